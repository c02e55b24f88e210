"""Walks step by step against the sums of a sweep, and suffix reuse against counting token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim import stats
from asdsim.errors import UsageError
from asdsim.evaluate.per_step import histograms, ledger_over_time, reach_by_position, reuse_curves, share_by_count
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.graph import build_graph
from asdsim.walk.sweep import walk_grid

TRACES = Path(__file__).resolve().parents[2] / "traces"
GRID = Grid.product("0,2,8", ".25,1", "1,inf")


@pytest.fixture(scope="module")
def trace():
    return asdsim.load(TRACES / "smollm2-layerskip")


@pytest.fixture(scope="module")
def graph(trace):
    return build_graph(trace)


def test_histograms_and_ledgers_are_those_of_the_walks(graph) -> None:
    walks = walk_grid(graph, GRID)
    for n in range(len(GRID)):
        assert np.array_equal(histograms(graph, GRID.policy(n)).sum(axis=0), walks.histogram[n])
        ledger = ledger_over_time(graph, GRID.policy(n), np.array([0, 10, 50, 10_000]))
        assert (ledger[:, 0] == 0).all() and (np.diff(ledger, axis=1) >= 0).all()
        assert np.array_equal(ledger[:, -1], walks.spent[n])


def test_shares_have_intervals_and_add_up(graph) -> None:
    counts = histograms(graph, GRID.policy(len(GRID) - 1))
    weights = stats.resample_weights(graph.num_requests)
    share = share_by_count(counts, weights)
    assert share.value.sum() == pytest.approx(1.0) and (share.low <= share.value).all()
    reached, given = reach_by_position(counts, weights)
    assert np.allclose(np.cumprod(given.value), reached.value)
    assert (reached.low < reached.value).all() and (reached.value < reached.high).all()


def test_a_walk_that_leaves_the_trace_is_refused(graph) -> None:
    with pytest.raises(UsageError, match="leaves the trace"):
        histograms(graph, Grid.product(3, 0.3, 3).policy(0))


def test_suffix_reuse_token_by_token(trace, graph) -> None:
    curves = reuse_curves(graph, [0.5, 2.0], [1, 3])
    hits = {(tau, p): [0, 0] for tau in (0.5, 2.0) for p in (1, 3)}
    for record in trace.request_records():
        for step in trace.steps_of(record.request_id):
            if step.wave:
                continue
            width = min(step.num_draft_tokens, record.max_new_tokens - step.start_pos)
            ends = [i for i in range(width) if int(step.draft_ids[i]) in record.eos_ids]
            width = min(width, ends[0] + 1) if ends else width
            exact = step.draft_ids == step.argmax_ids[:-1]
            for i in range(width):
                regret = float(step.top_logits[i, 0]) - float(step.draft_logits[i])
                for (tau, p), count in hits.items():
                    if not exact[i] and regret <= tau and i + p < width:
                        count[1] += 1
                        count[0] += bool(exact[i + 1 : i + 1 + p].all())
    for (tau, p), (reused, counted) in hits.items():
        shares, number = curves[p]
        at = [0.5, 2.0].index(tau)
        assert number[at] == counted and shares.value[at] == pytest.approx(reused / counted)
        assert shares.low[at] < shares.value[at] < shares.high[at]


def test_strict_spends_nothing(graph) -> None:
    assert not ledger_over_time(graph, STRICT, np.arange(0, 97, 8)).any()
