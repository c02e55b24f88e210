"""What the kernels want to know of a graph and of the axes of a grid before they walk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rules import asd as rule
from ..rules.asd import CAP, GATE, Reading, judge
from ..trace.graph import END, MISSING, Graph
from .compiled import compile_cached, compiled_rule, named
from .lanes import AT_LEFT, AT_RELAXED

INF = float("inf")


@dataclass(frozen=True)
class Prepared:
    """Arrays beside those of the graph, over S steps and m mismatches.

    Attributes
    ----------
    graph : Graph
    before, charge : float64 (m,)
        Block charge without and with a mismatch, all before it in its block accepted; summed from left to right.
    rank : int64 (m,)
        Place of a mismatch among those of its step.
    edge_word : int64 (S + m,)
        Counters of an edge as :mod:`asdsim.walk.lanes` packs them.
    edge_accepted : int64 (S + m,)
        As in the graph, in the width in which the lanes shift by it.
    plain : bool (S,)
        Steps of which no outcome ends the request.
    in_order : bool
        Whether in recorded order every request has one next step for all outcomes.
    """

    graph: Graph
    before: npt.NDArray[np.float64]
    charge: npt.NDArray[np.float64]
    rank: npt.NDArray[np.int64]
    edge_word: npt.NDArray[np.int64]
    edge_accepted: npt.NDArray[np.int64]
    plain: npt.NDArray[np.bool_]
    in_order: bool


def prepare(graph: Graph) -> Prepared:
    """Lay out what does not depend on the grid."""
    steps, mismatches = graph.num_steps, len(graph.mm_pos)
    number = np.diff(graph.mm_ptr)
    step_of = np.repeat(np.arange(steps), number)
    rank = np.arange(mismatches) - graph.mm_ptr[step_of]
    charge, before = graph.mm_charge.copy(), np.zeros(mismatches)
    for place in range(1, int(rank.max(initial=0)) + 1):
        here = np.flatnonzero(rank == place)
        before[here] = charge[here - 1]
        charge[here] = charge[here - 1] + graph.mm_charge[here]
    step_of_edge = np.repeat(np.arange(steps), number + 1)
    outcome = np.arange(steps + mismatches) - (graph.mm_ptr[:-1] + np.arange(steps))[step_of_edge]
    missing = graph.edge_next == MISSING
    word = graph.edge_tokens + (outcome << AT_RELAXED) + (missing.astype(np.int64) << AT_LEFT)
    ends = np.zeros(steps, bool)
    ends[step_of_edge[graph.edge_next == END]] = True
    return Prepared(
        graph, before, charge, rank, word, graph.edge_accepted.astype(np.int64), ~ends, _in_order(graph, step_of_edge)
    )


def _in_order(graph: Graph, step_of_edge: npt.NDArray[np.int64]) -> bool:
    """Return whether every outcome of a captured step leads to the next captured step, to the end, or off the trace."""
    first = graph.path_ptr[:-1]
    empty = first == graph.path_ptr[1:]
    begin = np.full(graph.num_requests, END, np.int64)
    begin[~empty] = graph.path_step[first[~empty]]
    if not np.array_equal(begin, graph.root):
        return False
    after = np.full(graph.num_steps, END, np.int64)
    after[graph.path_step[:-1]] = graph.path_step[1:]
    ends = graph.path_ptr[1:][~empty] - 1
    after[graph.path_step[ends]] = END
    on_path = np.zeros(graph.num_steps, bool)
    on_path[graph.path_step] = True
    fine = (graph.edge_next < 0) | (graph.edge_next == after[step_of_edge])
    return bool(fine[on_path[step_of_edge]].all())


def rank_gates(score, gates, out):  # type: ignore[no-untyped-def]
    """Find for each score the first of the ascending gates that lets it pass, by asking the judge."""
    for j in range(score.shape[0]):
        at, end = 0, gates.shape[0]
        while at < end:
            middle = (at + end) // 2
            if judge(score[j], 0.0, 0.0, 0, 0.0, INF, gates[middle], INF) == GATE:
                at = middle + 1
            else:
                end = middle
        out[j] = at


@cache
def _rank_kernel(reading: Reading) -> Any:
    import numba

    bound = rule.bind(rank_gates, judge=compiled_rule(reading)["judge"])
    return compile_cached(numba.njit, named(bound, reading), nogil=True)


def gate_ranks(
    prepared: Prepared, gates: npt.NDArray[np.float64], reading: Reading, *, compiled: bool = True
) -> npt.NDArray[np.int32]:
    """Return int32 (m,): the first gate that lets each mismatch pass; ``len(gates)`` where none does."""
    out = np.zeros(len(prepared.rank), np.int32)
    function = _rank_kernel(reading) if compiled else rule.bind(rank_gates, judge=rule.judge_of(reading))
    function(prepared.graph.mm_score, gates, out)
    return out


def running_ranks(prepared: Prepared, ranks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the largest rank among a mismatch and those before it in its block."""
    out = ranks.copy()
    for place in range(1, int(prepared.rank.max(initial=0)) + 1):
        here = np.flatnonzero(prepared.rank == place)
        out[here] = np.maximum(out[here], out[here - 1])
    return out


def cap_ranks(caps: npt.NDArray[np.float64], largest: int, reading: Reading) -> npt.NDArray[np.int64]:
    """Return int64 (K + 2,): the first cap that allows n relaxed tokens in a block."""
    ask = rule.judge_of(reading)
    allowed = [
        [ask(0.0, 0.0, 0.0, count, 0.0, INF, INF, float(cap)) != CAP for cap in caps] for count in range(largest + 2)
    ]
    return np.array([row.index(True) if any(row) else len(caps) for row in allowed], np.int64)


def cap_limits(caps: npt.NDArray[np.float64], largest: int, reading: Reading) -> npt.NDArray[np.int64]:
    """Return int64 (caps,): relaxed tokens that each cap allows in a block, K at most."""
    ranks = cap_ranks(caps, largest, reading)
    return np.array([int((ranks[1 : largest + 1] <= at).sum()) for at in range(len(caps))], np.int64)
