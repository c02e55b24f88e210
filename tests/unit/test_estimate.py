"""Estimates: what is exact stays exact, draws are repeatable, and an unknown name is answered."""

from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.errors import UsageError
from asdsim.records import MemoryTrace
from asdsim.rules.settings import Grid
from asdsim.studies.compare import Meter
from asdsim.trace.graph import MISSING, build_graph
from asdsim.walk import estimate
from asdsim.walk.request import ACCEPTED, STEPS, TOKENS
from asdsim.walk.sweep import walk_grid
from tests.support.toygraph import toy_requests

GRID = Grid.product([0, 0.5, 4], [0.25, 1], [1, 2])


def graph_of(seed: int, **options: int):
    return build_graph(MemoryTrace(toy_requests(seed, requests=6, limit=40, ks=(4,), extra=0, **options)))


def test_pooled_leaves_exact_walks_alone():
    graph = graph_of(1)
    strict = Grid.product([0], [1], [1])
    truth = walk_grid(graph, strict).counts[..., [STEPS, ACCEPTED, TOKENS]]
    assert np.array_equal(estimate.estimate(graph, strict, "pooled")[..., :3], truth)
    pooled = estimate.pooled_graph(graph, draws=3)
    counts = walk_grid(pooled, strict).counts.reshape(1, 3, graph.num_requests, -1)
    assert (counts == walk_grid(graph, strict).counts[:, None]).all()


def test_pooled_graph_has_no_loose_ends_and_ends_where_the_capture_ended():
    graph = graph_of(2)
    pooled = estimate.pooled_graph(graph, draws=5)
    assert not (pooled.edge_next == MISSING).any()
    assert pooled.edge_next.max() < pooled.num_steps
    walks = walk_grid(pooled, GRID)
    assert walks.exact.all()
    length = np.tile(np.diff(graph.align_ptr), 5)
    assert (walks.counts[..., TOKENS] <= length[None, :]).all()


def test_draws_are_repeatable_and_differ_by_seed():
    graph = graph_of(3)
    first = estimate.estimate(graph, GRID, "pooled")
    assert np.array_equal(first, estimate.estimate(graph, GRID, "pooled"))
    assert not np.array_equal(first, estimate.estimate(graph, GRID, "pooled", seed=1))


def test_drawn_steps_are_whole_and_followed_the_same_kind_of_end():
    graph = graph_of(4)
    first = graph.mm_ptr[:-1] + np.arange(graph.num_steps)
    pools = estimate._pools(graph, first)
    assert len(pools[True]) and len(pools[False])
    for ended_full, steps in pools.items():
        for step in steps:
            r = graph.step_request[step]
            path = graph.path_step[graph.path_ptr[r] : graph.path_ptr[r + 1]].tolist()
            before = path[path.index(step) - 1]
            assert (graph.mm_ptr[before + 1] == graph.mm_ptr[before]) == ended_full
            assert graph.start[step] + graph.drafted[step] + 1 <= graph.limit[r]


def test_unknown_estimator():
    with pytest.raises(UsageError, match="did you mean 'aligned'"):
        estimate.estimate(graph_of(5), GRID, "alinged")


def test_pooled_is_the_exact_walk_where_nothing_is_missing() -> None:
    trace = Path(__file__).parents[2] / "traces" / "smollm2-layerskip"
    grid = {"B": "0,8", "g": ".25", "M": "2"}  # covered; its outputs are longer and shorter than the strict ones
    pooled, exact = (asdsim.replay(trace, **grid, off_trace=mode).frame() for mode in ("pooled", "stop"))
    assert (exact["exact_share"] == 1).all()
    assert pooled.drop("off_trace").equals(exact.drop("off_trace"))
    measured = Meter(asdsim.load(trace)).measure(Grid.product(8, 0.25, 2))
    assert measured.tokens.sum() == exact["completion_tokens"][1] and measured.steps.sum() == exact["num_spec_steps"][1]
