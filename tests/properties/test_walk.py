"""What must hold of every walk, whatever the trace and the setting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asdsim.records import MemoryTrace, RequestRecord, StepRecord
from asdsim.rules import asd as rule
from asdsim.rules.settings import STRICT, Grid, Policy
from asdsim.trace.graph import Graph, build_graph
from asdsim.trace.tokens import edge_tokens
from asdsim.walk import request as columns
from asdsim.walk.sweep import Walks, walk_grid
from tests.support.toygraph import toy_requests

INF = float("inf")
FEW = settings(max_examples=40, deadline=None, derandomize=True)

logits = st.one_of(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]), st.floats(0, 8, width=32))
limits = st.one_of(st.sampled_from([0.0, 0.125, 0.5, 1.0, INF]), st.floats(0, 16))
caps = st.sampled_from([0.0, 1.0, 2.0, 3.0, INF])
policies = st.builds(Policy, limits, limits, caps)
grids = st.lists(policies, min_size=1, max_size=6).map(Grid.of)
modes = st.sampled_from(["stop", "aligned", "recorded"])
traces = st.builds(
    lambda seed, ks, agree, grain, extra, limit, stop: MemoryTrace(
        toy_requests(seed, requests=3, ks=ks, agree=agree, grain=grain, extra=extra, limit=limit, stop=stop)
    ),
    st.integers(0, 30),
    st.sampled_from([(1,), (3,), (7,), (0, 2, 5)]),
    st.sampled_from([0.4, 0.8]),
    st.sampled_from([0.0, 0.125, 1.0]),
    st.sampled_from([0, 25]),
    st.sampled_from([1, 6, 25]),
    st.sampled_from(["natural", "fixed"]),
)
blocks = st.lists(st.tuples(st.booleans(), logits), min_size=1, max_size=16)


def made(trace: MemoryTrace, prefix: str = "") -> list[tuple[RequestRecord, list[StepRecord]]]:
    """Return the requests with their steps, under other names where asked."""
    return [
        (replace(record, request_id=prefix + record.request_id), trace.steps_of(record.request_id))
        for record in trace.request_records()
    ]


def walk(graph: Graph, grid: Grid, mode: str = "stop", **options: int) -> Walks:
    return walk_grid(graph, grid, off_trace=mode, device="cpu", **options)


def same(one: Walks, other: Walks) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("counts", "spent", "edge", "histogram")
    )


@given(blocks, limits, policies, st.integers(1, 17))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_block_accepts_the_longest_feasible_prefix(
    block: list[tuple[bool, float]], spent: float, policy: Policy, stop: int
) -> None:
    draft, regret = list(range(len(block))), [r for _, r in block]
    choice = [i if hit else i + 100 for i, (hit, _) in enumerate(block)]
    stop, spent = min(stop, len(block)), min(spent, 1e6)
    taken, charge, count, verdict = rule.decide(
        draft, choice, regret, stop, spent, policy.budget, policy.gate, policy.cap
    )

    def feasible(length: int) -> bool:
        relaxed = [i for i in range(length) if draft[i] != choice[i]]
        total = 0.0
        for i in relaxed:
            total += regret[i]
        gated = all(regret[i] / (len(block) - i) <= policy.gate for i in relaxed)
        paid = not relaxed or (policy.budget > 0 and spent + total <= policy.budget)
        return gated and paid and len(relaxed) <= policy.cap

    assert taken == max(length for length in range(stop + 1) if feasible(length))
    assert count == sum(draft[i] != choice[i] for i in range(taken)) <= policy.cap
    assert 0 <= taken <= stop and (verdict == rule.ACCEPT) == (taken == stop)
    assert charge == 0.0 or spent + charge <= policy.budget


@given(st.lists(st.tuples(st.booleans(), logits), min_size=1, max_size=16), limits, caps)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_budget_zero_accepts_the_leading_matches(block: list[tuple[bool, float]], gate: float, cap: float) -> None:
    draft = list(range(len(block)))
    choice = [i if hit else i + 100 for i, (hit, _) in enumerate(block)]
    leading = next((i for i, (hit, _) in enumerate(block) if not hit), len(block))
    taken, charge, count, _ = rule.decide(draft, choice, [r for _, r in block], len(block), 0.0, 0.0, gate, cap)
    assert (taken, charge, count) == (leading, 0.0, 0)


@given(traces, limits, caps, modes)
@FEW
def test_budget_zero_walks_the_captured_path(trace: MemoryTrace, gate: float, cap: float, mode: str) -> None:
    graph = build_graph(trace)
    walks = walk(graph, Grid.of([Policy(0.0, gate, cap)]), mode)
    assert walks.exact.all() and not walks.spent.any()
    assert not walks.counts[0, :, columns.RELAXED].any()
    for one, (record, steps) in enumerate(made(trace)):
        path = [step for step in steps if step.wave == 0]
        assert walks.counts[0, one, columns.STEPS] == len(path)
        tokens = edge_tokens(trace, graph, int(walks.edge[0, one]))
        assert len(tokens) == walks.counts[0, one, columns.TOKENS] <= record.max_new_tokens
        expected: list[int] = []
        for step in path:
            assert step.start_pos == len(expected)
            for draft, choice in zip([*step.draft_ids, -1], step.argmax_ids, strict=True):
                expected.append(int(choice))
                ended = record.stop == "natural" and int(choice) in record.eos_ids
                if ended or draft != choice or len(expected) == record.max_new_tokens:
                    break
        assert tokens == expected


@given(traces, grids, modes)
@FEW
def test_every_walk_keeps_its_bounds(trace: MemoryTrace, grid: Grid, mode: str) -> None:
    graph = build_graph(trace)
    walks = walk(graph, grid, mode)
    count = {name: walks.counts[:, :, getattr(columns, name)].astype(np.int64) for name in (
        "STEPS", "DRAFTED", "ACCEPTED", "TOKENS", "RELAXED", "BY_GATE", "BY_BUDGET", "BY_CAP")}  # fmt: skip
    assert (walks.spent >= 0).all() and (walks.spent <= grid.budget[:, None]).all()
    assert (count["ACCEPTED"] <= count["DRAFTED"]).all() and (count["RELAXED"] <= count["ACCEPTED"]).all()
    with np.errstate(invalid="ignore"):  # 0 steps under M = inf
        most = np.where(count["STEPS"] > 0, grid.cap[:, None] * count["STEPS"], 0)
    assert (count["RELAXED"] <= most).all()
    assert (count["TOKENS"] <= graph.limit).all()
    assert (count["TOKENS"] - count["ACCEPTED"] <= count["STEPS"]).all()
    assert (count["BY_GATE"] + count["BY_BUDGET"] + count["BY_CAP"] <= count["STEPS"]).all()
    counted = walks.exact if mode == "stop" else np.ones_like(walks.exact)
    bins = np.arange(walks.histogram.shape[1])
    assert np.array_equal(walks.histogram.sum(axis=1), (count["STEPS"] * counted).sum(axis=1))
    assert np.array_equal(walks.histogram @ bins, (count["ACCEPTED"] * counted).sum(axis=1))


@given(traces, grids, modes, st.randoms(use_true_random=False))
@FEW
def test_order_chunks_and_threads_change_nothing(trace: MemoryTrace, grid: Grid, mode: str, random) -> None:  # type: ignore[no-untyped-def]
    graph = build_graph(trace)
    whole = walk(graph, grid, mode, threads=1)
    assert same(whole, walk(graph, grid, mode, threads=2))
    order = list(range(len(grid)))
    random.shuffle(order)
    mixed = walk(graph, Grid.of([grid.policy(index) for index in order]), mode)
    parts = [walk(graph, grid[first : first + 2], mode) for first in range(0, len(grid), 2)]
    for name in ("counts", "spent", "edge", "histogram"):
        assert np.array_equal(getattr(mixed, name), getattr(whole, name)[order])
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
    originals = made(trace)
    requests = list(range(len(originals)))
    random.shuffle(requests)
    moved = walk(build_graph(MemoryTrace([originals[index] for index in requests])), grid, mode)
    assert np.array_equal(moved.counts, whole.counts[:, requests])
    assert np.array_equal(moved.spent, whole.spent[:, requests])


@given(traces, traces, grids, modes)
@FEW
def test_replay_of_a_concatenation(one: MemoryTrace, other: MemoryTrace, grid: Grid, mode: str) -> None:
    both = walk(build_graph(MemoryTrace([*made(one), *made(other, "other ")])), grid, mode)
    left, right = walk(build_graph(one), grid, mode), walk(build_graph(other), grid, mode)
    assert np.array_equal(both.counts, np.concatenate([left.counts, right.counts], axis=1))
    assert np.array_equal(both.spent, np.concatenate([left.spent, right.spent], axis=1))
    width = both.histogram.shape[1]
    summed = sum(np.pad(part.histogram, ((0, 0), (0, width - part.histogram.shape[1]))) for part in (left, right))
    assert np.array_equal(both.histogram, summed)


@given(traces, policies)
@FEW
def test_off_trace_modes_agree_where_nothing_is_missing(trace: MemoryTrace, policy: Policy) -> None:
    graph = build_graph(trace)
    grid = Grid.of([STRICT, policy])
    stop, aligned, recorded = (walk(graph, grid, mode) for mode in ("stop", "aligned", "recorded"))
    keep = stop.exact
    assert np.array_equal(keep, aligned.exact) and np.array_equal(keep, recorded.exact)
    for other in (aligned, recorded):
        assert np.array_equal(other.counts[keep], stop.counts[keep])
        assert np.array_equal(other.spent[keep], stop.spent[keep])


def test_bounds_hold_where_sums_round() -> None:
    """0.1 + 0.1 + 0.1 > 0.3 in float64: the budget test uses the sum as computed, so B = 0.3 pays for two."""
    draft, choice = [1, 1, 1, 1], [2, 2, 2, 2]
    taken, charge, _, _ = rule.decide(draft, choice, [0.1] * 4, 4, 0.0, 0.3, INF, INF)
    assert (taken, charge) == (2, 0.2)
    assert 0.1 + 0.1 <= 0.3 < 0.1 + 0.1 + 0.1
