"""Breakpoints in B against the scalar walk: nothing changes between two of them, and something does at each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from asdsim import replay, replay_breakpoints
from asdsim.cli import main
from asdsim.errors import UsageError
from asdsim.records import MemoryTrace
from asdsim.rules import asd as rule
from asdsim.rules.asd import BUDGET, Reading
from asdsim.rules.settings import Grid, Policy, layout_of
from asdsim.trace.graph import Graph, build_graph
from asdsim.walk import breakpoints
from asdsim.walk.breakpoints import breakpoints_of, turning_point
from asdsim.walk.off_trace import off_trace_code
from asdsim.walk.path import Visit, visits
from asdsim.walk.sweep import sweep_graph
from tests.support.toygraph import toy_requests
from tests.twins.cases import INF, MODES, READINGS, cases

TRACE = Path(__file__).parents[2] / "traces/smollm2-layerskip-wide"
PAIRS = [(0.125, 1.0), (0.4, 2.0), (INF, INF)]
TINY = 5e-324
PAPER = Reading()


def decisions(
    graph: Graph, budget: float, gate: float, cap: float, mode: str, reading: Reading = PAPER
) -> list[list[tuple]]:
    """Return, per request, every step met, how it ended and why, and the budgets that its charges called for."""
    policy = Policy(budget, gate, cap, reading.semantics, ledger=reading.ledger)

    def wanted(visit: Visit) -> float | None:
        if visit.verdict != BUDGET:
            return None
        return visit.spent + (visit.charge + float(graph.mm_charge[graph.mm_ptr[visit.step] + visit.outcome]))

    return [
        [(visit.step, visit.outcome, visit.verdict, wanted(visit)) for visit in visits(graph, policy, r, mode).visits]
        for r in range(graph.num_requests)
    ]


def check(graph: Graph, mode: str, reading: Reading = PAPER, compiled: bool = True) -> int:
    """Hold the breakpoints of a graph against walks at both ends of every interval; return how many there are.

    A judge's answer turns once along B, so walks that agree at both ends agree between them.
    """
    number = 0
    found = breakpoints_of(graph, PAIRS, off_trace_code(mode), reading, compiled=compiled)
    for (gate, cap), points in zip(PAIRS, found, strict=True):
        assert (np.diff(points) > 0).all() and (points > 0).all()
        starts = [0.0, *points.tolist()]
        for start, following in zip(starts, [*starts[1:], None], strict=True):
            end = INF if following is None else math.nextafter(following, 0.0)
            here = decisions(graph, start, gate, cap, mode, reading)
            assert here == decisions(graph, end, gate, cap, mode, reading), (start, end)
            if following is None:
                break
            assert here != decisions(graph, following, gate, cap, mode, reading), following
            if reading == PAPER:  # the very float that the rule computes, at the request that changes
                wanted = {wanted for met in here for *_, wanted in met}
                assert following in wanted or (following == TINY and 0.0 in wanted)
        number += len(points)
    return number


@pytest.mark.parametrize("mode", MODES)
def test_every_case(mode: str) -> None:
    assert sum(check(build_graph(trace), mode) for trace in cases().values()) > 200


@pytest.mark.parametrize("reading", READINGS)
def test_every_reading(reading: Reading) -> None:
    layout = layout_of(reading.semantics)
    names = ("ties everywhere", "arbitrary floats", "ragged K with 0", "tie", "sums that round")
    number = sum(check(build_graph(cases()[name], layout), "aligned", reading, compiled=False) for name in names)
    assert number > 20


@pytest.mark.parametrize("seed", range(6))
def test_all_of_them_are_found(seed: int) -> None:
    """Regrets are multiples of 1/8, so changes can only be at multiples of 1/8: try every one."""
    graph = build_graph(MemoryTrace(toy_requests(seed, requests=2, ks=(5,), limit=25, grain=0.125, extra=25)))
    for mode in MODES:
        for (gate, cap), points in zip(PAIRS, breakpoints_of(graph, PAIRS, off_trace_code(mode), PAPER), strict=True):
            expected, before = [], decisions(graph, 0.0, gate, cap, mode)
            for budget in [TINY, *(np.arange(1, 900) / 8).tolist()]:
                here = decisions(graph, budget, gate, cap, mode)
                differs = [[visit[:3] for visit in met] for met in here] != [
                    [visit[:3] for visit in met] for met in before
                ]
                if differs:
                    expected.append(budget)
                before = here
            assert points.tolist() == expected


def test_compiled_and_python_and_threads_agree() -> None:
    graph = build_graph(cases()["arbitrary floats"])
    for mode in MODES:
        one = breakpoints_of(graph, PAIRS, off_trace_code(mode), PAPER, threads=1)
        for other in (
            breakpoints_of(graph, PAIRS, off_trace_code(mode), PAPER, threads=2),
            breakpoints_of(graph, PAIRS, off_trace_code(mode), PAPER, compiled=False),
        ):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("reading", READINGS)
def test_the_turning_point_is_the_smallest_budget(reading: Reading) -> None:
    rng = np.random.default_rng(0)
    judge, turned = rule.judge_of(reading), 0
    turn = rule.bind(turning_point, judge=judge)
    for _ in range(500):
        spent, before = rng.choice([0.0, 1e-9, 0.3, 7.1, 1e9, 1e-300, 1e308], 2) * rng.random(2)
        charge = before + rng.choice([0.0, 1e-12, 0.1, 1.7, 1e9])
        at = turn(0.0, before, charge, 1, spent, 0.0, INF, INF)
        refused = [
            judge(0.0, before, charge, 1, spent, budget, INF, INF) == rule.BUDGET
            for budget in (0.0, math.nextafter(at, 0.0), at)
        ]
        if refused[0]:  # else nothing has to turn
            assert refused == [True, True, False], (spent, before, charge, at)
            turned += 1
    assert turned > 50


def test_rows_are_those_of_replay() -> None:
    rng = np.random.default_rng(1)
    for off_trace in MODES:
        results = replay_breakpoints(TRACE, g=[0.3, 2], M="1,inf", off_trace=off_trace, upper=6)
        assert [(r.grid.gate[0], r.grid.cap[0]) for r in results] == [(0.3, 1), (0.3, INF), (2, 1), (2, INF)]
        for result in results[1:3]:
            frame = result.frame()
            assert frame["B"][0] == 0 and frame["B_to"].to_list() == [*frame["B"].to_list()[1:], 6.0]
            rows = rng.integers(0, len(frame), 20)
            inside = [float(rng.uniform(frame["B"][int(n)], frame["B_to"][int(n)])) for n in rows]
            expected = sweep_graph(
                result.graph,
                Grid.of([Grid.product(b, result.grid.gate[0], result.grid.cap[0]).policy(0) for b in inside]),
                off_trace=off_trace,
            )
            for name, values in expected.items():
                assert np.array_equal(values, result.columns[name][rows], equal_nan=values.dtype.kind == "f"), name
    one = replay_breakpoints(TRACE, g=0.3, M=1)[0]
    whole = replay(TRACE, B=one.grid.budget, g=0.3, M=1)
    assert whole.frame().equals(one.frame().drop("B_to"))
    assert one.rows()[-1]["B_to"] == "inf"


def test_what_is_too_much_is_said() -> None:
    graph = build_graph(cases()["arbitrary floats"])
    with pytest.raises(UsageError, match=r"more than 5 breakpoints in B; stopped at g=.* such as --B exact:"):
        breakpoints_of(graph, PAIRS, 2, PAPER, most=5)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(breakpoints, "CHUNK", 4)
    try:
        with pytest.raises(UsageError, match="not found within 0 s"):
            breakpoints_of(graph, PAIRS, 2, PAPER, seconds=0.0)
        with pytest.raises(UsageError, match="more than 5 breakpoints"):
            breakpoints_of(graph, PAIRS, 2, PAPER, most=5)
        chunked = breakpoints_of(graph, PAIRS, 2, PAPER)
    finally:
        monkey.undo()
    whole = breakpoints_of(graph, PAIRS, 2, PAPER)
    assert all(np.array_equal(a, b) for a, b in zip(chunked, whole, strict=True))
    for change, message in (
        ({"off_trace": "pooled"}, "no breakpoints in B under off-trace mode pooled"),
        ({"device": "reference"}, "the reference walk finds no breakpoints"),
        ({"upper": -1.0}, "negative"),
    ):
        with pytest.raises(UsageError, match=message):
            replay_breakpoints(TRACE, g=1, M=1, **change)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(TRACE), *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import polars as pl

    out = tmp_path / "rows.parquet"
    status, text, _ = run(capsys, "--B", "exact:1.5", "--g", ".3", "--M", "1,2", "--json", "-o", str(out))
    found = json.loads(text)
    frame = pl.read_parquet(out)
    assert status == 0 and found["settings"] == len(found["rows"]) == len(frame) > 20
    assert [row["B_to"] for row in found["rows"]] == frame["B_to"].to_list() and frame["B"].max() <= 1.5
    status, text, _ = run(capsys, "--B", "exact:.2", "--g", ".3", "--M", "1")
    first = text.splitlines()[0].split("|")
    assert status == 0 and first[1].strip() == "B" and first[2].strip() == "B to"
    point = replay_breakpoints(TRACE, g=0.3, M=1, upper=0.2)[0].frame()["B"][1]
    assert repr(point) in text, "all digits"
    for arguments, message in (
        (["--B", "exact:a", "--g", "1", "--M", "1"], "B: 'a' is not a number"),
        (["--B", "exact:1,2", "--g", "1", "--M", "1"], "names 2 upper bounds"),
        (["--B", "exact", "--rule", "mars"], "--B belongs to rule asd"),
        (["--B", "exact", "--g", "1", "--M", "1", "--ledger", "none"], "needs a budget"),
    ):
        status, _, err = run(capsys, *arguments)
        assert status == 2 and message in err and err.count("\n") == 1
