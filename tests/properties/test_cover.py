"""After ``cover``, the walk of every setting is what live decoding does: token for token, step for step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asdsim.capture.cover import BatchRunner, FaithfulRunner, cover
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.records import MemoryTrace, RequestRecord
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.graph import build_graph
from asdsim.trace.tokens import edge_tokens
from asdsim.walk import request as columns
from asdsim.walk.demand import demand_of
from asdsim.walk.sweep import walk_grid
from tests.support.toymodels import ToyDrafter, ToyTarget

VALUES = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 1.3, 2.0, 4.0, math.inf])
AXIS = st.lists(VALUES, min_size=1, max_size=3, unique=True)
CAPS = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf]), min_size=1, max_size=2, unique=True)


@st.composite
def worlds(draw):
    """Draw a toy world: target, drafter, requests, K, grid."""
    target = ToyTarget(
        draw(st.integers(0, 2**20)), draw(st.integers(8, 64)), draw(st.sampled_from([0.0, 0.125, 0.5, 1.0]))
    )
    widths = draw(st.sampled_from([(), (0, 1, 2, 3), (2, 5)]))
    drafter = ToyDrafter(target, draw(st.sampled_from([0.2, 0.5, 0.8])), widths)
    requests = [
        RequestRecord(
            f"toy/{n}", "toy", (n + 1, 3), "", None, draw(st.integers(1, 14)), target.eos_ids,
            draw(st.sampled_from(["natural", "fixed"])),
        )
        for n in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    return target, drafter, requests, draw(st.integers(1, 5)), Grid.product(draw(AXIS), draw(AXIS), draw(CAPS))


def strict_capture(target, drafter, requests, K):
    """Capture the strict path of each request."""
    return [(request, decode(target, drafter, request, STRICT, K, Recorder()).steps) for request in requests]


def complete(world, captured, *, batch=4, faithful=False, **options):
    """Cover a grid in memory; return (progress, steps by request)."""
    target, drafter, requests, K, grid = world
    steps = {record.request_id: list(held) for record, held in captured}
    runner = (
        FaithfulRunner(target, drafter, K, Recorder(), lambda name: steps[name], states=3)
        if faithful
        else BatchRunner(target, drafter, K, Recorder(), batch=batch)
    )
    progress = cover(
        [(request, steps[request.request_id]) for request in requests],
        lambda graph: demand_of(graph, [grid], device="cpu", threads=1),
        runner,
        lambda name, new: steps[name].extend(new),
        settings=len(grid),
        **options,
    )
    return progress, steps


@settings(max_examples=1000, deadline=None)
@given(worlds(), st.booleans())
def test_every_walk_equals_live_decoding(world, faithful):
    target, drafter, requests, K, grid = world
    captured = strict_capture(target, drafter, requests, K)
    target.scored.clear()
    progress, steps = complete(world, captured, faithful=faithful)
    calls = list(target.scored)
    assert progress.complete and progress.exact_share == 1.0
    trace = MemoryTrace([(request, steps[request.request_id]) for request in requests])
    graph = build_graph(trace)
    walks = walk_grid(graph, grid, device="cpu", threads=1)
    assert walks.exact.all()
    needed: set[tuple[int, ...]] = set()
    live_steps = 0
    for r, request in enumerate(requests):
        for n in range(len(grid)):
            live = decode(target, drafter, request, grid.policy(n), K)
            counts = walks.counts[n, r]
            assert edge_tokens(trace, graph, int(walks.edge[n, r])) == live.tokens
            assert walks.spent[n, r] == live.ledger
            assert counts[columns.STEPS] == len(live.outcomes)
            assert counts[columns.ACCEPTED] == sum(one.accepted for one in live.outcomes)
            assert counts[columns.RELAXED] == sum(one.relaxed for one in live.outcomes)
            assert counts[columns.DRAFTED] == sum(one.num_draft_tokens for one in live.outcomes)
            assert counts[columns.TOKENS] == len(live.tokens)
            live_steps += len(live.outcomes)
            done = 0
            for one in live.outcomes:
                needed.add((*request.prompt_ids, *live.tokens[:done]))
                done += len(one.tokens)
    recorded = {
        (*request.prompt_ids, *live_prefix)
        for request, held in captured
        for live_prefix in _prefixes(held)
    }  # fmt: skip
    if not faithful:  # a faithful run may score a path again to build its state
        assert len(calls) == len(set(calls))
        assert set(calls) == needed - recorded
    assert progress.steps_added == len(needed - recorded)
    assert progress.live_steps == live_steps


def _prefixes(steps):
    made = {}
    for step in steps:
        if step.parent_step_id < 0:
            made[step.step_id] = ()
        else:
            parent, taken = next(s for s in steps if s.step_id == step.parent_step_id), step.parent_accepted
            made[step.step_id] = (
                *made[parent.step_id], *parent.draft_ids[:taken].tolist(), int(parent.argmax_ids[taken])
            )  # fmt: skip
    return made.values()


@settings(max_examples=600, deadline=None)
@given(worlds(), st.integers(0, 12))
def test_a_budget_reports_exactly_the_pairs_that_are_exact(world, budget):
    target, drafter, requests, K, grid = world
    captured = strict_capture(target, drafter, requests, K)
    progress, steps = complete(world, captured, max_steps=budget)
    assert progress.steps_added <= budget
    graph = build_graph(MemoryTrace([(request, steps[request.request_id]) for request in requests]))
    walks = walk_grid(graph, grid, device="cpu", threads=1)
    assert progress.exact_pairs == int(walks.exact.sum())
    trace = MemoryTrace([(request, steps[request.request_id]) for request in requests])
    for n, r in np.argwhere(walks.exact):
        live = decode(target, drafter, requests[r], grid.policy(int(n)), K)
        assert edge_tokens(trace, graph, int(walks.edge[n, r])) == live.tokens


@settings(max_examples=400, deadline=None)
@given(worlds(), st.integers(0, 9), st.integers(1, 3))
def test_batches_order_and_interruption_do_not_matter(world, first, group):
    target, drafter, requests, K, grid = world
    captured = strict_capture(target, drafter, requests, K)
    _, whole = complete(world, captured)
    _, partly = complete(world, captured, max_steps=first, batch=1)
    progress, resumed = complete(world, [(r, partly[r.request_id]) for r in requests], batch=7, group=group)
    backwards = (target, drafter, requests[::-1], K, grid)
    _, turned = complete(backwards, captured[::-1], batch=3)
    assert progress.complete
    for request in requests:
        name = request.request_id
        seen = [
            sorted(
                (tuple(p), tuple(s.draft_ids.tolist())) for p, s in zip(_prefixes(held[name]), held[name], strict=True)
            )
            for held in (whole, resumed, turned)
        ]
        assert seen[0] == seen[1] == seen[2]


def test_more_settings_add_only_what_is_new():
    target = ToyTarget(5)
    world = (target, ToyDrafter(target, 0.5), [RequestRecord("toy/0", "toy", (1,), "", None, 30, (), "fixed")], 4)
    captured = strict_capture(*world)
    small, large = Grid.product([0, 1], [0.5], [1]), Grid.product([0, 1, 2], [0.5, 1], [1, 2])
    first, steps = complete((*world, small), captured)
    second, steps = complete((*world, large), [(world[2][0], steps["toy/0"])])
    alone, _ = complete((*world, large), captured)
    assert first.steps_added + second.steps_added == alone.steps_added
    assert second.steps_held == alone.steps_held
    assert complete((*world, large), [(replace(world[2][0]), steps["toy/0"])])[0].steps_added == 0
