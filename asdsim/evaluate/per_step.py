"""What happens along walks, step by step: acceptance by position, the ledger over time, reuse of suffixes.

For a few settings, of which every step is looked at; sums over whole grids are those of :mod:`asdsim.walk.sweep`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .. import stats
from ..errors import UsageError
from ..rules.settings import Policy
from ..stats import Intervals
from ..trace.graph import Graph
from ..walk.path import Visit, visits
from .figures import suffix_reuse

Floats = npt.NDArray[np.float64]


def exact_path(graph: Graph, policy: Policy, request: int) -> list[Visit]:
    """Return the steps of a walk.

    Raises
    ------
    UsageError
        If it leaves the trace.
    """
    walk = visits(graph, policy, request)
    if not walk.exact:
        raise UsageError(
            f"the walk of request {graph.request_ids[request]} under {policy} leaves the trace",
            fix="run asdsim cover for this setting",
        )
    return walk.visits


def histograms(graph: Graph, policy: Policy) -> npt.NDArray[np.int64]:
    """Return int64 (R, largest K + 1): steps of each request by accepted draft tokens."""
    counts = np.zeros((graph.num_requests, graph.max_draft + 1), np.int64)
    for r in range(graph.num_requests):
        for visit in exact_path(graph, policy, r):
            counts[r, visit.accepted] += 1
    return counts


def share_by_count(counts: npt.NDArray[np.int64], weights: Floats) -> Intervals:
    """Return the share of steps with each number of accepted draft tokens, float64 (K + 1,), with intervals."""
    sums = stats.Resampled({"here": counts.T, "steps": counts.sum(axis=1)}, weights)
    return sums.interval(lambda s: s["here"] / s["steps"])


def reach_by_position(counts: npt.NDArray[np.int64], weights: Floats) -> tuple[Intervals, Intervals]:
    """Return acceptance by draft position: of all steps, and of the steps that accepted all before it; each (K,)."""
    reached = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]  # steps with at least 0, 1, .. accepted
    columns = {"here": reached[:, 1:].T, "before": reached[:, :-1].T, "steps": counts.sum(axis=1)}
    sums = stats.Resampled(columns, weights)
    return sums.interval(lambda s: s["here"] / s["steps"]), sums.interval(lambda s: s["here"] / s["before"])


def ledger_over_time(graph: Graph, policy: Policy, tokens: npt.NDArray[np.int64]) -> Floats:
    """Return float64 (R, t): what each request has spent once so many tokens are generated; constant after its end."""
    ledger = np.zeros((graph.num_requests, len(tokens)))
    for r in range(graph.num_requests):
        ends, spent = [0], [0.0]
        for visit in exact_path(graph, policy, r):
            ends.append(visit.tokens_before + visit.tokens)
            spent.append(visit.spent_after)
        ledger[r] = np.array(spent)[np.searchsorted(np.array(ends), tokens, side="right") - 1]
    return ledger


def reuse_curves(
    graph: Graph,
    thresholds: Sequence[float],
    lengths: Sequence[int],
    *,
    resamples: int = stats.RESAMPLES,
    seed: int = 0,
) -> dict[int, tuple[Intervals, npt.NDArray[np.int64]]]:
    """Return suffix reuse on the captured path, per p: the share over tau with intervals, and how many count.

    See :func:`asdsim.evaluate.figures.suffix_reuse`; all mismatches of captured steps are taken, not only the first of
    a block.
    """
    steps = graph.path_step.astype(np.int64)
    owner = np.repeat(np.arange(graph.num_requests), np.diff(graph.path_ptr))
    regret, run, room, request = [], [], [], []
    last_edge = graph.mm_ptr[1:] + np.arange(graph.num_steps)
    for step, r in zip(steps, owner, strict=True):
        lo, hi = int(graph.mm_ptr[step]), int(graph.mm_ptr[step + 1])
        stop = int(graph.edge_accepted[last_edge[step]])  # draft tokens that can be committed at all
        place = graph.mm_pos[lo:hi]
        after = np.append(place[1:], stop)
        regret.append(graph.mm_regret[lo:hi])
        run.append(after - place - 1)
        room.append(stop - place - 1)
        request.append(np.full(hi - lo, r))
    if not sum(map(len, regret)):
        raise UsageError("no mismatch on the captured path: there is no suffix to reuse")
    reused, counted = suffix_reuse(
        np.concatenate(regret), np.concatenate(run), np.concatenate(room), np.asarray(thresholds, np.float64), lengths
    )
    whose = np.concatenate(request)
    weights = stats.resample_weights(graph.num_requests, resamples, seed)
    member = (whose[:, None] == np.arange(graph.num_requests)[None, :]).astype(np.float64)  # (m, R)
    curves = {}
    for n, p in enumerate(lengths):
        sums = stats.Resampled({"reused": reused[:, n] @ member, "counted": counted[:, n] @ member}, weights)
        curves[p] = sums.interval(lambda s: s["reused"] / s["counted"]), counted[:, n].sum(axis=1)
    return curves
