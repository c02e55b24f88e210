"""The examples run as they stand, and the notebook's committed outputs are what its cells give."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_cell(source: str, names: dict[str, Any]) -> str:
    """Run a cell as a notebook does; return what it prints and the text of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None
    return printed.getvalue() + ("" if value is None else repr(value))


def test_the_notebook_holds_what_its_cells_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setitem(sys.modules, "torch", None)
    notebook = json.loads((EXAMPLES / "first_look.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        given = run_cell("".join(cell["source"]), names)
        held = ""
        for output in cell["outputs"]:
            held += "".join(output["text"] if "text" in output else output["data"]["text/plain"])
        assert given.strip() == held.strip()


def test_the_script_chooses_and_judges(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setattr(sys, "argv", ["choose_a_setting.py"])
    runpy.run_path("examples/choose_a_setting.py", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chosen of ") and len(lines) == 11
