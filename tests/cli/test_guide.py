"""The guide shows what its commands print, for every command that needs no model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_outputs_in_the_guide_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = runpy.run_path(str(ROOT / "analysis" / "guide.py"))
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert script["page"](text, models=False) == text
    assert "@@" not in text


def test_the_page_of_definitions_is_current() -> None:
    page = runpy.run_path(str(ROOT / "analysis" / "definitions.py"), run_name="page")
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page["document"]()
