"""What ``plan`` foretells, against what the committed traces hold: each error that it states is one that it keeps."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from asdsim.cli import main
from asdsim.errors import UsageError
from asdsim.evaluate.cost import fit_trace
from asdsim.evaluate.cost_spec import read_cost
from asdsim.result import load
from asdsim.studies.plan import FEWER_ERROR, SETTINGS_ERROR, TOKENS_ERROR, Growth, Sharing, growth_of, plan, sharing_of
from asdsim.trace import TraceWriter
from asdsim.trace.covered import covered_grids
from asdsim.trace.stored import Trace
from tests.support.toytrace import toy_manifest, write_toy_trace

TRACES = Path(__file__).parents[2] / "traces"
NAMES = sorted(path.name for path in TRACES.iterdir() if (path / "manifest.json").exists())


@cache
def trace_of(name: str) -> Trace:
    return load(TRACES / name)


@cache
def growth(name: str) -> Growth:
    return growth_of(trace_of(name))


def all_of(found: Growth) -> np.ndarray:
    return np.ones((1, len(found.path)))


# --- a trace foretells itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_the_trace_itself_is_the_trace(name: str) -> None:
    trace = trace_of(name)
    found = plan(trace, trace.requests.num_rows, fit_trace(trace))
    capture, cover, whole = found.rows
    added = int((trace.column("steps", "wave") > 0).sum())
    assert capture["steps"] == pytest.approx(trace.steps.num_rows - added)
    assert cover["steps"] == pytest.approx(added) and whole["steps"] == pytest.approx(trace.steps.num_rows)
    assert whole["positions"] == pytest.approx(trace.positions.num_rows)
    assert whole["bytes"] == pytest.approx(sum(shard.bytes for shard in trace.manifest.shards))
    assert whole["steps_interval"][0] < whole["steps"] < whole["steps_interval"][1]
    assert found.extrapolated == [] and found.asked["cover_ratio"] == pytest.approx(
        trace.steps.num_rows / (trace.steps.num_rows - added)
    )
    timed = sum(trace.column("steps", f"{part}_us").astype(float) for part in ("draft", "verify", "select"))
    path = trace.column("steps", "wave") == 0
    typical = float(np.median(timed[path])) * path.sum()  # as the fit, not moved by outliers of a busy machine
    assert capture["device_hours"] == pytest.approx(typical / 3.6e9, rel=0.35)
    assert cover["device_hours"] == pytest.approx(float(timed[~path].sum()) / 3.6e9)
    assert whole["device_hours"] == capture["device_hours"] + cover["device_hours"] == whole["hours"]


@pytest.mark.parametrize("name", ["smollm2-eagle3", "smollm2-medusa", "smollm2-dspark", "smollm2-lookup"])
def test_half_the_requests_foretell_steps_and_bytes_of_all(name: str, tmp_path: Path) -> None:
    """Written to a trace of their own, with its bytes per row: within 15 % of the whole, and within the interval."""
    trace = trace_of(name)
    with TraceWriter.create(tmp_path / "half", trace.manifest.replace(grids=[])) as writer:
        for record in trace.request_records()[::2]:
            writer.add_request(record, trace.steps_of(record.request_id))
        writer.update_manifest(grids=trace.manifest.grids)
    found = plan(load(tmp_path / "half"), trace.requests.num_rows)
    whole = found.rows[2]
    assert whole["steps"] == pytest.approx(trace.steps.num_rows, rel=0.15)
    assert whole["bytes"] == pytest.approx(sum(shard.bytes for shard in trace.manifest.shards), rel=0.15)
    assert whole["steps_interval"][0] <= trace.steps.num_rows <= whole["steps_interval"][1]


@pytest.mark.parametrize("name", NAMES)
def test_half_the_tokens_foretell_all_within_what_is_stated(name: str) -> None:
    found, known = growth(name), sum(map(len, covered_grids(trace_of(name).manifest.grids)))
    true = found.per_request(found.seen, all_of(found))[0]
    cut = found.cut(found.seen / 2)
    guess = cut.per_request(found.seen, all_of(found), settings=known)[0]
    assert cut.seen <= found.seen / 2 and guess == pytest.approx(true, rel=TOKENS_ERROR)
    steady = cut.per_request(found.seen, all_of(found), settings=known, parting=False)[0]
    assert steady[0] == guess[0] and steady[1] <= guess[1]
    one = cut.per_request(found.seen, all_of(found), settings=1)[0]  # a single path cannot part
    assert one[1] <= guess[1]


@pytest.mark.parametrize(("name", "sizes"), [("smollm2-layerskip", (18, 108)), ("smollm2-layerskip-wide", (18, 108))])
def test_settings_foretell_others_within_what_is_stated(name: str, sizes: tuple[int, int]) -> None:
    trace = trace_of(name)
    grids = {len(grid): grid for grid in covered_grids(trace.manifest.grids)}
    few, many = (sharing_of(trace, grids[size]) for size in sizes)
    there = [len(one.visits) / one.requests for one in (few, many)]
    up, down = there[0] * few.scale(sizes[1]), there[1] * many.scale(sizes[0])
    assert 1 - SETTINGS_ERROR[0] <= there[1] / up <= 1 + SETTINGS_ERROR[1]
    assert 1 - FEWER_ERROR <= there[0] / down <= 1.0


# --- the parts --------------------------------------------------------------------------------------------------------


def test_steps_of_fewer_settings_are_the_mean_over_all_subsets() -> None:
    from itertools import combinations

    rng = np.random.default_rng(3)
    met = rng.random((6, 40)) < rng.random(40)  # settings x steps
    met = met[:, met.any(axis=0)]
    sharing = Sharing(6, met.sum(axis=0), 1)
    for size in range(1, 7):
        subsets = [met[list(chosen)].any(axis=0).sum() for chosen in combinations(range(6), size)]
        assert sharing.scale(size) == pytest.approx(np.mean(subsets) / met.shape[1])
    assert sharing.scale(12) == pytest.approx(2**sharing.exponent) and sharing.scale(6) == pytest.approx(1.0)


def test_growth_by_hand() -> None:
    """Two requests of 8 and 4 tokens, a step every 2; another setting adds as many from token 4 on."""
    edges = np.array([0.0, 2, 4, 6, 8])
    path = np.array([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    every = path + np.array([[0.0, 0, 1, 1], [0, 0, 0, 0]])
    reached = 2.0 * (path > 0)
    found = Growth(edges, path, every, reached)
    assert found.seen == 4  # both get there
    one = Growth(edges, path[:1], every[:1], reached[:1])
    assert one.seen == 8 and one.per_request(8, np.ones((1, 1))).tolist() == [[4, 6]]
    assert one.per_request(5, np.ones((1, 1))).tolist() == [[2.5, 3]]
    assert one.per_request(16, np.ones((1, 1)), settings=2).tolist() == [[8, 14]]
    assert found.per_request(None, np.array([[1.0, 1.0]])).tolist() == [[3, 4]]


def test_hours_are_shared_out_and_follow_the_cost_that_is_given(tmp_path: Path) -> None:
    trace = trace_of("smollm2-layerskip-k4")
    (tmp_path / "steps.csv").write_text("draft_us,verify_us,select_us\n100,900,0\n")
    (tmp_path / "passes.csv").write_text("batch,width,milliseconds\n1,1,1\n1,5,1\n32,1,2\n32,5,2\n")
    single, passes = read_cost(str(tmp_path / "steps.csv")), read_cost(str(tmp_path / "passes.csv"))
    one, eight = plan(trace, 1e6, single), plan(trace, 1e6, single, devices=8)
    for row, shared in zip(one.rows, eight.rows, strict=True):
        assert shared["device_hours"] == row["device_hours"] and shared["hours"] == row["device_hours"] / 8
    assert one.rows[1]["device_hours"] == pytest.approx(one.rows[1]["steps"] * 1e-3 / 3600)
    batched = plan(trace, 1e6, passes)
    assert batched.rows[1]["device_hours"] == pytest.approx(batched.rows[1]["steps"] * 2e-3 / 32 / 3600)
    assert any("32 steps at once" in line for line in batched.assumptions)
    without = plan(trace, 1e6)
    assert [row["hours"] for row in without.rows] == [None] * 3 and any("no hours" in x for x in without.assumptions)
    assert 2e9 < eight.memory["groups"] == one.memory["groups"]
    assert eight.memory["shard"] < eight.memory["whole"] == one.memory["whole"] == one.memory["shard"]


def test_what_is_not_known_is_not_given(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t", count=8)
    trace = load(tmp_path / "t")
    found = plan(trace, 100, settings=18)
    assert found.rows[0]["steps"] > 0 and found.rows[1]["steps"] is None and found.rows[2]["bytes"] is None
    assert found.memory["whole"] is None and any("covered for no setting" in line for line in found.assumptions)
    alone = plan(trace, 100)
    assert alone.rows[1]["steps"] == 0 and alone.rows[2]["steps"] == alone.rows[0]["steps"]
    with TraceWriter.create(tmp_path / "none", toy_manifest()):
        pass
    with pytest.raises(UsageError, match="no step to plan from"):
        plan(load(tmp_path / "none"), 10)


@pytest.mark.parametrize(
    "wrong", [{"requests": 0.0}, {"requests": math.inf}, {"tokens": 0.0}, {"devices": 0}, {"settings": -1}]
)
def test_numbers_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="out of range"):
        plan(trace_of("smollm2-layerskip-k4"), **{"requests": 5, **wrong})  # type: ignore[arg-type]


def test_the_command_marks_every_figure_and_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(TRACES / "smollm2-eagle3"), "--requests", "1e6", "--tokens", "512", "--settings", "108",
             "--gpus", "64"]  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        main(words)
    out = capsys.readouterr().out
    assert out.startswith("Estimate: 1,000,000 requests of 512 tokens, 108 settings, 64 devices; EXTRAPOLATED")
    assert "tokens and settings" in out.splitlines()[0]
    for line in out.splitlines()[4:7]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert all(cell.startswith("~") for n, cell in enumerate(cells) if n not in (0, 2)), line
    assert "Assumed: " in out
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"] is True and found["extrapolated"] == ["tokens", "settings"]
    assert [row["part"] for row in found["rows"]] == ["capture", "cover", "trace"]
