"""Published figures follow from their counters to the last digit, and the page says what the script computes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page():
    return runpy.run_path(str(ROOT / "analysis" / "published.py"))


def test_derived_figures_equal_the_printed_ones(page) -> None:
    for run in (page["NATIVE"], page["ASD"]):
        assert repr(run.accepted / run.proposals) == run.printed_per_proposal
        assert repr(run.tokens / float(run.seconds)) == run.printed_rate
        assert sum(run.histogram) == run.proposals
        assert sum(j * n for j, n in enumerate(run.histogram)) == sum(run.by_position) == run.accepted
        for check in page["derived"](run)[:6]:
            assert check[2].endswith(("True", "yes")), check


def test_the_gain_that_reaches_throughput(page) -> None:
    found = page["shares"]()
    assert (round(found["accepted"], 2), round(found["length"], 2), round(found["rate"], 2)) == (7.64, 6.0, 5.44)
    alone, full = page["predicted"]()
    assert alone == pytest.approx(found["length"]) and full == pytest.approx(found["rate"])


def test_the_frozen_quantile(page) -> None:
    assert [value.split()[0] for _, value in page["quantile_checks"]()] == ["1.75", "8.75", "120.75", "2.0625"]


def test_the_page_is_current(page) -> None:
    assert (ROOT / "docs" / "published.md").read_text(encoding="utf-8") == page["document"]()
