"""The paper's tables as commands: the page is what the script says, every command parses, and traces fill cells."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from asdsim.capture.run import Plan
from asdsim.cli import cli
from asdsim.cli.common import TracePath

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "smollm2-eagle3"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_tables", ROOT / "analysis" / "paper_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ours(script: ModuleType) -> ModuleType:
    """The script, with a trace of the repository as one of the paper's, and no other."""
    script.SMALL = ()
    about = {"target": "smollm2-135m", "drafter": "eagle3:heads/smollm2-eagle3", "K": 7, "drafter_is": "ours"}
    script.PAPER["pairs"]["qwen3-14b-dspark"] = about
    return script


def test_the_page_and_its_json_are_current(script: ModuleType) -> None:
    found = json.loads((ROOT / "analysis" / "results" / "paper-tables.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "paper-tables.md").read_text(encoding="utf-8") == script.document(found)
    if all(row["measured"] is None for row in found["paper"]):  # else it is of traces that are not in the repository
        assert script.rows([]) == found


def test_every_cell_of_both_tables_is_there_once(script: ModuleType) -> None:
    cells = [(pair, task) for pair, task, _ in script.cells()]
    assert len(cells) == len(set(cells)) == 15
    assert [task for pair, task in cells if pair == "qwen3-14b-dspark"] == list(script.TASKS)
    ten = [(pair, task) for pair, row in script.PAPER["table_2"].items() for task in row]
    assert len(ten) == 10 and set(ten) < set(cells)


def test_every_command_parses(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TracePath, "convert", lambda self, value, param, ctx: Path(value))
    context = click.Context(cli)
    for pair, task, _ in script.cells():
        names = []
        for line in script.commands(pair, task):
            program, name, *words = shlex.split(line)
            command = cli.get_command(context, name)
            assert program == "asdsim" and command is not None
            given = command.make_context(name, words).params
            names.append(name)
            if name == "capture":
                fields = {key: value for key, value in given.items() if key in Plan.__dataclass_fields__}
                plan = Plan(**fields | {"policy": None, "divergences": ()})
                assert plan.out == Path(f"traces/paper/{pair}-{task}") and plan.K in (5, 7)
            if name == "audit":
                assert given["policy"] == Path(f"traces/paper/{pair}-{task}.json")
        judged = ["judge"] if task in ("mt-bench", "alpaca") else []
        assert names == ["capture", "cover", "calibrate", "audit", *judged, "timing"]


def test_a_trace_fills_the_cells_of_its_tasks(ours: ModuleType) -> None:
    found = ours.rows([TRACE])
    filled = {(row["pair"], row["task"]): row["measured"] for row in found["paper"] if row["measured"] is not None}
    assert set(filled) == {("qwen3-14b-dspark", task) for task in ("gsm8k", "humaneval", "mt-bench")}
    gsm8k = filled["qwen3-14b-dspark", "gsm8k"]
    assert gsm8k["exact"] and gsm8k["requests"] == 8 and gsm8k["trace"] == "smollm2-eagle3"
    strict, asd = gsm8k["strict_length"][0], gsm8k["mean_acceptance_length"][0]
    assert (round(strict, 2), round(asd, 2)) == (3.07, 4.27)
    assert gsm8k["acceptance_length_gain"][0] == pytest.approx(asd / strict - 1, abs=1e-5)
    page = ours.document(found)
    assert "3 of 15 cells are filled." in page and page.count("needs a server") == 12


def test_traces_that_fill_nothing_or_one_cell_twice_are_refused(ours: ModuleType) -> None:
    with pytest.raises(SystemExit, match="none of the paper's"):
        ours.rows([ROOT / "traces" / "smollm2-medusa"])
    with pytest.raises(SystemExit, match="both hold gsm8k of qwen3-14b-dspark"):
        ours.rows([TRACE, TRACE])


def test_what_is_not_exact_or_not_scored_shows_no_figure(script: ModuleType) -> None:
    found: dict[str, Any] = {"requests": 4, "exact": False, "scored": 0, "strict_right": 0}
    assert script._figures(found) == ["4, not covered", *["-"] * 6]
    assert script._figures(None) == ["needs a server", *[""] * 6]
    exact = {
        "requests": 4, "exact": True, "scored": 4, "strict_right": 2, "strict_length": [2.0, 1.5, 2.5],
        "mean_acceptance_length": [3.0, None, None], "acceptance_length_gain": [0.5, 0.25, 0.75],
        "speed_up": [1.4, 1.2, 1.6], "outputs_differ_share": [0.5, 0.2, 0.8], "accuracy_change": [-0.25, -0.5, 0.0],
    }  # fmt: skip
    assert script._figures(exact) == [
        "4", "2.00 [1.50, 2.50]", "3.00", "+50.0 [+25.0, +75.0]", "+40.0 [+20.0, +60.0]", "50 [20, 80]",
        "-25.0 [-50.0, +0.0]",
    ]  # fmt: skip
    assert script._figures({**exact, "strict_right": 0})[-1] == "strict has none right"
    assert script._figures({**exact, "scored": 0})[-1] == "not scored"
