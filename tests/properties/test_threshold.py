"""A threshold on the drafter's probability: covered and replayed, it is what live decoding does under it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asdsim.capture.cover import BatchRunner, cover
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.records import MemoryTrace, RequestRecord
from asdsim.rules.scoring import STOPS
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.graph import build_graph
from asdsim.trace.tokens import edge_tokens
from asdsim.walk import request as columns
from asdsim.walk.demand import demand_of
from asdsim.walk.sweep import walk_grid
from tests.support.toymodels import ToyDrafter, ToyTarget

TAUS = st.sampled_from([0.0, 0.125, 0.25, 0.375, 0.5, 1.0])  # some are the very probabilities of the toy drafter


@st.composite
def worlds(draw):
    """Draw target, drafter, requests, K and a grid under a threshold."""
    target = ToyTarget(draw(st.integers(0, 2**20)), draw(st.integers(8, 30)), draw(st.sampled_from([0.125, 0.5])))
    drafter = ToyDrafter(target, draw(st.sampled_from([0.4, 0.8])), draw(st.sampled_from([(), (0, 1, 3)])), doubts=True)
    requests = [
        RequestRecord(f"toy/{n}", "toy", (n + 1, 3), "", None, draw(st.integers(1, 12)), target.eos_ids, stop)
        for n, stop in enumerate(draw(st.lists(st.sampled_from(["natural", "fixed"]), min_size=1, max_size=2)))
    ]
    grid = Grid.product(
        "0,.5,2", ".125,.5", 2, K=draw(st.sampled_from([0, 1, 2])), draft_threshold=draw(TAUS),
        draft_stop=draw(st.sampled_from(STOPS)),
    )  # fmt: skip
    return target, drafter, requests, draw(st.integers(2, 5)), grid


def covered(target, drafter, requests, K, grid):
    """Capture strictly on whole blocks and cover the grid; return the trace."""
    captured = [(record, list(decode(target, drafter, record, STRICT, K, Recorder()).steps)) for record in requests]
    held = {record.request_id: steps for record, steps in captured}
    progress = cover(
        captured, lambda graph: demand_of(graph, [grid], device="cpu", threads=1),
        BatchRunner(target, drafter, K, Recorder()), lambda name, new: held[name].extend(new), settings=len(grid),
        build=lambda trace: build_graph(trace, grid.layout),
    )  # fmt: skip
    assert progress.complete
    return MemoryTrace([(record, held[record.request_id]) for record in requests])


@settings(max_examples=120, deadline=None)
@given(worlds())
def test_covered_and_replayed_it_is_live_decoding(world):
    target, drafter, requests, K, grid = world
    trace = covered(target, drafter, requests, K, grid)
    graph = build_graph(trace, grid.layout)
    walks = walk_grid(graph, grid, device="cpu", threads=1)
    assert walks.exact.all()
    for r, record in enumerate(requests):
        for n in range(len(grid)):
            live = decode(target, drafter, record, grid.policy(n), K)
            assert edge_tokens(trace, graph, int(walks.edge[n, r])) == live.tokens
            assert walks.spent[n, r] == live.ledger
            assert walks.counts[n, r, columns.STEPS] == len(live.outcomes)
            assert walks.counts[n, r, columns.DRAFTED] == sum(one.num_draft_tokens for one in live.outcomes)
            assert walks.counts[n, r, columns.ACCEPTED] == sum(one.accepted for one in live.outcomes)


@settings(max_examples=60, deadline=None)
@given(worlds(), st.sampled_from([0.25, 0.5, 0.75]))
def test_a_drafter_that_stops_by_itself_changes_nothing(world, tau):
    """A live engine does not draft what would be cut: its own stop and ours give the same blocks."""
    target, drafter, requests, K, _ = world
    early = ToyDrafter(target, drafter.agree, drafter.widths, doubts=True, tau=tau)
    policy = Grid.product(2, 0.5, 2, draft_threshold=tau).policy(0)
    plain = Grid.product(2, 0.5, 2).policy(0)
    for record in requests:
        cut, stopped, alone = (
            decode(target, by, record, under, K) for by, under in ((drafter, policy), (early, policy), (early, plain))
        )
        assert cut.tokens == stopped.tokens == alone.tokens
        assert cut.outcomes == stopped.outcomes == alone.outcomes and cut.ledger == alone.ledger


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_a_higher_threshold_never_drafts_more(world):
    target, drafter, requests, K, grid = world
    steps = [(record, decode(target, drafter, record, STRICT, K, Recorder()).steps) for record in requests]
    trace = MemoryTrace(steps)
    for stop in STOPS:
        laid = [
            build_graph(trace, Grid.product(0, 0, 0, draft_threshold=tau, draft_stop=stop).layout)
            for tau in (0.0, 0.25, 0.5, 1.0)
        ]
        for lower, higher in pairwise(laid):
            assert (higher.drafted <= lower.drafted).all() and (higher.proposed <= lower.proposed).all()
        for graph in laid:
            dropped = graph.proposed - graph.drafted
            assert np.isin(dropped, (0, 1)).all() and (stop != "after" or not dropped.any())
