"""Passes timed beside a capture: right cells by a clock that ticks, problems named, and the manifest that predicts."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asdsim
from asdsim.capture.loop import decode
from asdsim.capture.passes import PassTimes, crowded, table_rows, widths_of
from asdsim.capture.run import Plan, capture_with
from asdsim.capture.tasks import load_prompts
from asdsim.errors import TraceError
from asdsim.evaluate.cost import CostModel
from asdsim.evaluate.cost_spec import cost_of_trace
from asdsim.evaluate.step_table import StepTable, from_pass_rows
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT
from asdsim.trace.manifest import SPEEDS, TIMING
from tests.support.toymodels import ToyDrafter, ToyTarget
from tests.support.tracefiles import edit_manifest

from .conftest import tiny_llama, word_tokenizer

PROBLEMS = PassTimes.problems_of


def request(tokens: int = 60) -> RequestRecord:
    return RequestRecord("toy/0", "toy", tuple(range(1, 9)), "", None, tokens, (11,), "natural")


def timed(widths: list[int] | tuple[int, ...] = (), K: int = 7, tokens: int = 60) -> PassTimes:
    target, ticks = ToyTarget(3), count()
    times = PassTimes(target, ToyDrafter(target, 0.7, widths=widths), K, lambda: 1e-3 * next(ticks))
    times.measure(request(tokens))
    return times


@pytest.mark.parametrize(("K", "widths"), [(1, [1, 2]), (2, [1, 2, 3]), (3, [1, 2, 4]), (4, [1, 2, 4, 5]),
                                           (7, [1, 2, 4, 8])])  # fmt: skip
def test_widths(K: int, widths: list[int]) -> None:
    assert widths_of(K) == widths
    assert sorted({width for _, width in timed(K=K).cells}) == widths


@pytest.mark.parametrize("drafted", [[], [0, 1, 3]])
def test_every_width_is_timed_as_often_whatever_the_drafter_offers(drafted: list[int]) -> None:
    times = timed(drafted)
    assert {key: len(cell) for key, cell in times.cells.items()} == {(1, width): 3 for width in (1, 2, 4, 8)}
    # Every reading of this clock is a millisecond later: one for the pass, one before the draft, one for the draft.
    for (_, width), cell in times.cells.items():
        assert [sample[0] for sample in cell] == pytest.approx([2.0] * 3)
        assert [sample[1] for sample in cell] == pytest.approx([1.0] * 3), width
    assert times.prompts == {8: [pytest.approx(1.0)]}
    contexts = [sample[2] for cell in times.cells.values() for sample in cell]
    assert len(set(contexts)) == len(contexts) and min(contexts) > 8  # it goes on, and does not stand still


def test_rows_are_medians_and_spreads() -> None:
    rows = table_rows(
        {(1, 1): [(2.0, 0.1, 10), (7.0, 0.1, 20), (3.0, 0.1, 30)], (1, 3): [(9.0, 1.5, 7)]}, {5: [4.0, 8]}
    )
    assert rows[0] == {"batch": 1, "width": 1, "milliseconds": 3.0, "context": 20.0, "draft_milliseconds": 0.0,
                       "spread": pytest.approx(1.25 / 3)}  # fmt: skip
    assert rows[1]["draft_milliseconds"] == 1.5 and rows[1]["spread"] == 0.0
    assert rows[2] == {"prompt": 5, "milliseconds": 6.0}
    assert from_pass_rows(rows, "rows").spread == pytest.approx(1.25 / 3)


def test_too_few_tokens_leave_no_record() -> None:
    assert timed(tokens=3).record(1) is None
    found = timed().record(2)
    assert found is not None and found["threads"] == 2 and len(found["passes"]) == 5


def test_problems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassTimes, "problems_of", PROBLEMS)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (2.4, 2, 2))
    times = timed()
    assert crowded() == "" and times.record(1)["problems"] == []  # type: ignore[index]
    target = times.target
    steps = decode(target, ToyDrafter(target, 0.7), request(), STRICT, 7, None).steps
    times.note_steps(steps)
    assert times.captured == []  # nothing recorded, nothing to compare
    times.captured = [2.4, 2.5, 2.4]
    assert times.record(1)["problems"] == []  # type: ignore[index]
    times.captured = [2.6, 9.9, 2.6]
    times.cells[1, 4][0] = (9.0, 1.0, 20.0)
    monkeypatch.setattr("os.getloadavg", lambda: (6.04, 2, 2))
    busy, spread, apart = times.record(1)["problems"]  # type: ignore[index]
    assert busy == "the machine was busy: 6.0 programs wanted to run on 2 cores"
    assert spread.startswith("passes of one width spread by 88%")
    assert apart == "verifications of the capture took 2.6 ms at the median, those timed beside it 2.0"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a capture of the tiny Llama, whose manifest holds passes."""
    from asdsim.engines.transformers.model import HFTarget

    folder = tmp_path_factory.mktemp("passes")
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": f"w{n} w3 w{n + 9}"}) + "\n" for n in range(4)))
    target = HFTarget(tiny_llama(), "tiny-llama", word_tokenizer())
    plan = Plan(out=folder / "t", target="tiny-llama", drafter="lookup", task=f"jsonl:{folder / 'p.jsonl'}", K=3,
                max_new_tokens=40)  # fmt: skip
    from asdsim.capture.drafters import make_drafter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassTimes, "problems_of", lambda *_: ["a neighbour"])
        summary = capture_with(target, make_drafter("lookup", target), load_prompts(plan.task), plan)
    assert summary.problems == summary.row()["timing_problems"] == ["a neighbour"]
    return folder / "t"


def test_a_capture_tells_one_token_from_a_verification(captured: Path) -> None:
    trace = asdsim.load(captured)
    held = trace.manifest.notes[TIMING]
    assert [row.get("width") for row in held["passes"]][:3] == [1, 2, 4] and held["threads"] >= 1
    cost = cost_of_trace(trace)
    assert isinstance(cost, StepTable) and cost.source == f"passes timed beside the capture of {captured}"
    by_width = {row["width"]: row["milliseconds"] for row in held["passes"] if "width" in row}
    assert cost.verification(3, 0) == pytest.approx(by_width[4] / by_width[1])
    assert "speeds predicted from these passes mean little: a neighbour" in cost.notes()
    assert not any("as long as a verification" in note for note in cost.notes())
    quality = asdsim.replay(trace, B=0, g=1, M=1).quality(cost=cost, figures=["speed_up_plain"])
    assert np.isfinite(quality.figures["speed_up_plain"].value).all()


def test_what_timing_measured_goes_with_every_prediction(captured: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "t"
    shutil.copytree(captured, folder)
    entry: dict[str, Any] = {"setting": "B=8 g=0.25 M=2 (paper)", "measured": 1.25, "predicted": 1.5, "requests": 8}
    edit_manifest(folder, lambda content: content["notes"].update({SPEEDS: [entry]}))
    said = ("asdsim timing measured 1.25 over strict for B=8 g=0.25 M=2 (paper) on 8 requests of this trace, and 1.50 "
            "had been predicted (+20%)")  # fmt: skip
    trace = asdsim.load(folder)
    assert said in cost_of_trace(trace).notes() and said in cost_of_trace(trace, "h20-deepseek-v4-flash").notes()
    edit_manifest(folder, lambda content: content["notes"].pop(TIMING))
    assert isinstance(cost_of_trace(asdsim.load(folder)), CostModel) and said in cost_of_trace(trace).notes()


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({TIMING: {"source": "x", "passes": [{"width": 1}]}}, "row 1: no milliseconds"),
        ({TIMING: {"source": "x", "passes": [3]}}, "not a JSON object"),
        ({TIMING: {"source": "x", "passes": {}}}, "not a list"),
        ({TIMING: {"passes": [{"width": 1, "milliseconds": 3}]}}, "source is missing"),
        ({TIMING: 4}, "not an object"),
        ({SPEEDS: [{"setting": "strict", "measured": "fast"}]}, "measured is 'fast', not a finite number"),
        ({SPEEDS: 4}, "not a list"),
    ],
)
def test_notes_that_cannot_be_meant(captured: Path, tmp_path: Path, notes: dict[str, Any], message: str) -> None:
    import shutil

    folder = tmp_path / "t"
    shutil.copytree(captured, folder)
    edit_manifest(folder, lambda content: content["notes"].update(notes))
    with pytest.raises(TraceError, match=message):
        cost_of_trace(asdsim.load(folder))


def test_samples_of_several_processes_are_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassTimes, "problems_of", PROBLEMS)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (1.0, 2, 2))
    whole, times = PassTimes(None, None, 7), timed()
    expected = times.record(1)
    whole.add(times.taken())
    assert times.record(1) is None and times.target is not None
    monkeypatch.setattr("os.getloadavg", lambda: (6.04, 2, 2))  # where they are collected: nobody is timed there
    assert whole.record(1) == {**expected, "clock": "wall clock"}  # type: ignore[dict-item]
    whole.add(timed().taken())
    assert whole.record(1)["problems"] == [crowded()]  # type: ignore[index]
    assert {len(cell) for cell in whole.cells.values()} == {6}
