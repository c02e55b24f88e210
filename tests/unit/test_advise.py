"""Advice by batch: right by hand on a small queue, monotone where it must be, and honest about what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asdsim
from asdsim.cli import main
from asdsim.errors import UsageError
from asdsim.evaluate.cost import CostModel, Linear, fit_trace
from asdsim.evaluate.quality import Evaluator
from asdsim.evaluate.step_table import from_pass_rows
from asdsim.rules.settings import Grid, Schedule
from asdsim.studies.advise import ALONE, Advice, Candidate, Limits, Load, advise, as_record, corners, scaled
from asdsim.trace.covered import covered_grids
from asdsim.walk.batch import Times

TRACE = Path(__file__).resolve().parents[2] / "traces" / "smollm2-eagle3"
# Width is nearly free for one request and costs its share in a batch of 64, as arithmetic becomes the limit.
ROWS = [
    {"batch": batch, "width": width, "milliseconds": max(8 + 0.05 * batch * width, 0.12 * batch * width),
     "draft_milliseconds": 0.3 * (width - 1)}
    for batch in (1, 4, 16, 64) for width in (1, 2, 4, 8, 200)
]  # fmt: skip


@pytest.fixture(scope="module")
def trace() -> asdsim.Trace:
    return asdsim.load(TRACE)


@pytest.fixture(scope="module")
def found(trace: asdsim.Trace) -> Advice:
    return advise(
        trace, covered_grids(trace.manifest.grids), from_pass_rows(ROWS, "rows"), [1, 4, 16, 64], resamples=40
    )


def test_speculation_pays_in_small_batches_and_stops_to(found: Advice) -> None:
    gains = [row.rates[row.best.name] / row.rates[ALONE] for row in found.rows]
    assert gains[0] > 1.3 and gains[-1] < gains[0]
    assert [row.pays for row in found.rows] == [gain > 1 for gain in gains]
    assert found.pays_up_to() is not None and found.pays_up_to() >= 4
    assert found.ranges()[0][:1] == [1] and found.ranges()[-1] == [64, 64, 0]
    assert not found.left_out and len(found.candidates) == 2 + 18


def test_over_a_single_request_the_event_loop_is_the_sum_of_steps(trace: asdsim.Trace) -> None:
    model = fit_trace(trace)
    one = advise(trace, [Grid.product(8, 0.25, 2)], model, [1], resamples=5, cost_error=0.0)
    quality = asdsim.replay(trace, B=8, g=0.25, M=2).quality(cost=model, figures=["speed_up", "speed_up_plain"])
    row = one.rows[0]
    assert row.rates["B=8 g=0.25 M=2 (paper)"] / row.rates["strict"] == pytest.approx(
        float(quality.figures["speed_up"].value[0]), rel=0.02
    )
    assert row.rates["strict"] / row.rates[ALONE] == pytest.approx(
        float((quality.figures["speed_up_plain"].value / quality.figures["speed_up"].value)[0]), rel=0.02
    )


def test_intervals_hold_their_value_and_corners_lie_around(found: Advice) -> None:
    for row in found.rows:
        for ends in (row.over_alone, row.over_strict):
            assert ends.low[0] <= ends.value[0] <= ends.high[0]
        assert len(row.corners) == 4
        assert min(row.corners.values()) <= row.over_alone.value[0] <= max(row.corners.values())


def test_the_cheapest_corner_is_the_fastest(found: Advice) -> None:
    for row in found.rows:
        assert max(row.corners, key=lambda name: row.corners[name]) == "width -20%, draft -20%"


def test_scaling_moves_what_lies_beyond_one_token_each() -> None:
    memory = np.array([[1.0, 2, 3, 4, 5], [10, 11, 12, 13, 14], [20, 21, 22, 24, 28]])
    times = Times(memory, memory + 1, 0.5, 0.25, np.ones((3, 3)), np.ones(4))
    more = scaled(times, 2.0, 3.0)
    assert more.memory[2].tolist() == [20, 21, 22, 26, 34] and more.compute[1].tolist() == [11, 12, 14, 16, 18]
    assert (more.draft == 3).all() and more.memory_per_context == 0.5
    assert corners(times, 0.0) == {}


def test_limits_hold(trace: asdsim.Trace) -> None:
    cost = from_pass_rows(ROWS, "rows")
    grids = covered_grids(trace.manifest.grids)
    strict_only = advise(trace, grids, cost, [1], limits=Limits(divergence=0.0), resamples=5)
    rows = [candidate.name for candidate in strict_only.candidates]
    assert strict_only.over_limit == 12 and all("B=0" in name for name in rows[2:])
    assert strict_only.rows[0].best.name == "strict"  # of equals the plainest


def test_limits_on_accuracy_hold(trace: asdsim.Trace) -> None:
    """A scorer of the parity of a length: a made-up answer, but one that settings gain and lose."""
    cost, grids = from_pass_rows(ROWS, "rows"), covered_grids(trace.manifest.grids)
    scored = Evaluator(trace, device="cpu", scorer=lambda request, ids: sum(ids) % 2 == 0)
    known = scored.evaluate(grids[0]).figures["accuracy"].value
    least = float(np.median(known))
    found = advise(trace, grids[:1], cost, [1], limits=Limits(min_accuracy=least), resamples=5, evaluator=scored)
    assert found.over_limit == int((known < least - 1e-12).sum()) > 0


def test_settings_that_are_not_exact_take_no_part(trace: asdsim.Trace) -> None:
    out = advise(trace, [Grid.product("3,5", 0.33, 2), Grid.product(8, 0.25, 2)], from_pass_rows(ROWS, "rows"), [2],
                 resamples=5)  # fmt: skip
    assert out.left_out == 2 and len(out.candidates) == 3


def test_requests_that_come_slowly_wait_for_nobody(trace: asdsim.Trace) -> None:
    cost = from_pass_rows(ROWS, "rows")
    slow = advise(trace, [], cost, [4], load=Load(rate=0.01), resamples=3, cost_error=0.0).rows[0]
    fast = advise(trace, [], cost, [1], resamples=3, cost_error=0.0).rows[0]
    alone = np.percentile(slow.served.gaps, 50), np.percentile(fast.served.gaps, 50)
    assert alone[0] == pytest.approx(alone[1], rel=0.05)
    assert slow.rates["strict"] < 0.1 * fast.rates["strict"]


def test_a_table_by_batch_takes_part_where_it_is_exact(tmp_path: Path, trace: asdsim.Trace) -> None:
    """A full batch has one draft length, so the table is that length but for the batch that empties at the end."""
    cost = from_pass_rows(ROWS, "rows")
    whole = Schedule(((1, 7),))
    grids = [Grid.product(8, 0.25, 2), Grid.product(3, 0.33, 2)]
    found = advise(trace, grids, cost, [1, 4], schedules=[whole], resamples=5)
    names = [candidate.name for candidate in found.candidates]
    assert names[-2:] == ["strict, K by batch 1-:7", "B=8 g=0.25 M=2 (paper), K by batch 1-:7"]
    assert found.left_out == 2  # the setting that is not covered, at its own length and under the table
    for row in found.rows:
        assert row.rates["strict, K by batch 1-:7"] == row.rates["strict"]
        assert row.rates[names[-1]] == row.rates["B=8 g=0.25 M=2 (paper)"]
    apart = advise(trace, grids, cost, [1], schedules=[Schedule(((1, 7), (2, 0)))], resamples=5)
    assert apart.left_out == 1 + 3  # this trace was covered for whole blocks, and holds no other walk
    with pytest.raises(UsageError, match="no limit can be held"):
        advise(trace, grids, cost, [1], schedules=[whole], limits=Limits(divergence=0.5))


def test_advice_of_a_table_names_the_length_of_each_batch(trace: asdsim.Trace) -> None:
    found = advise(trace, [], from_pass_rows(ROWS, "rows"), [1, 64], resamples=5)
    table = Candidate("table", None, 7, found.candidates[0].which, Schedule(((1, 7), (8, 2))))
    for row in found.rows:
        row.best = table
        row.rates["table"] = 2 * row.rates[ALONE]
    assert [row.K for row in found.rows] == [7, 2] and found.ranges() == [[1, 63, 7], [64, 64, 2]]


def test_refusals(trace: asdsim.Trace) -> None:
    cost = from_pass_rows(ROWS, "rows")
    with pytest.raises(UsageError, match="nothing of a batch of 2"):
        advise(trace, [], fit_trace(trace), [1, 2])
    for batches in ([], [0], [4096]):
        with pytest.raises(UsageError, match="cannot be served"):
            advise(trace, [], cost, batches)
    with pytest.raises(UsageError, match="a rate of 0"):
        advise(trace, [], cost, [1], load=Load(rate=0.0))
    with pytest.raises(UsageError, match="off by 1"):
        advise(trace, [], cost, [1], cost_error=1.0)
    model = CostModel(Linear(5), Linear(5), Linear(), Linear(9), "x")
    assert as_record(advise(trace, [], model, [1], resamples=3), model)["rows"][0]["batch"] == 1


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "passes.json"
    table.write_text(json.dumps(ROWS))

    def run(*words: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["advise", str(TRACE), "--cost", str(table), "--resamples", "10", *map(str, words)])
        return int(end.value.code or 0), *capsys.readouterr()

    status, text, err = run("--batch", "1,64", "-o", tmp_path)
    assert status == 0 and text.startswith("| batch | speculate |") and "beats the target alone up to batch 1" in text
    assert '"num_speculative_tokens_per_batch_size": [[1, 63, 7], [64, 64, 0]]' in text
    assert "predicted, not measured" in err and (tmp_path / "advise.svg").exists()
    status, text, _ = run("--batch", "1", "--json")
    assert status == 0 and json.loads(text)["rows"][0]["pays"] is True
    status, text, err = run("--batch", "1", "--min-accuracy", 0.5)
    assert status == 0 and "| strict " in text and "exact, but beyond a limit: 18 settings" in err
    status, _, err = run("--batch", "1", "--min-accuracy", -1)
    assert status == 2 and "a limit is negative" in err
    for words, message in ((["--batch", "1.5"], "not all are whole"), (["--cost", "none"], "needs step times")):
        status, _, err = run(*words)
        assert status == 2 and message in err and err.count("\n") == 1
