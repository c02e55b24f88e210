"""What the kernels want to know of a graph and of the axes of a grid before they walk."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..rules import asd as rule
from ..rules.asd import CAP, GATE, Reading, judge
from ..trace.graph import Graph
from .axes import Axes
from .compiled import compile_cached, compiled_rule, named

INF = float("inf")

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


class TileArrays(NamedTuple):
    """A product of budgets, gates and caps as the kernels take it, over m mismatches.

    Attributes
    ----------
    budgets, gates, caps : float64
        Ascending.
    gate_from : int32 (m,)
        Index of the first gate that lets a mismatch and those before it in its block pass; ``len(gates)`` for none.
    cap_from : int64 (K + 2,)
        Index of the first cap that allows ``n`` relaxed tokens in a block.
    cap_most : int64 (caps,)
        Relaxed tokens that each cap allows in a block, K at most.
    before, through : float64 (m,)
        Block charge without and with a mismatch, all before it in its block accepted; summed from left to right.
    """

    budgets: Float64
    gates: Float64
    caps: Float64
    gate_from: Int32
    cap_from: Int64
    cap_most: Int64
    before: Float64
    through: Float64

    def cut(self, gates: slice, budgets: slice) -> TileArrays:
        """Return the product of some gates and some budgets."""
        height = gates.stop - gates.start
        return self._replace(
            budgets=self.budgets[budgets],
            gates=self.gates[gates],
            gate_from=np.clip(self.gate_from - np.int32(gates.start), 0, height).astype(np.int32),
        )


def whole_product(graph: Graph, axes: Axes, reading: Reading, *, compiled: bool = True) -> TileArrays:
    """Lay out a whole product grid."""
    places = places_of(graph)
    through, before = graph.mm_charge.copy(), np.zeros(len(graph.mm_charge))
    gate_from = gate_ranks(graph, axes.gates, reading, compiled=compiled)
    for place in range(1, int(places.max(initial=0)) + 1):
        here = np.flatnonzero(places == place)
        before[here] = through[here - 1]
        through[here] = through[here - 1] + graph.mm_charge[here]
        gate_from[here] = np.maximum(gate_from[here], gate_from[here - 1])
    cap_from = cap_ranks(axes.caps, graph.max_draft, reading)
    inside = cap_from[1 : graph.max_draft + 1]
    cap_most = np.array([int((inside <= c).sum()) for c in range(len(axes.caps))], np.int64)
    return TileArrays(axes.budgets, axes.gates, axes.caps, gate_from, cap_from, cap_most, before, through)


def places_of(graph: Graph) -> Int64:
    """Return int64 (m,): the place of each mismatch among those of its step."""
    step_of = np.repeat(np.arange(graph.num_steps), np.diff(graph.mm_ptr))
    return np.asarray(np.arange(len(graph.mm_pos)) - graph.mm_ptr[step_of])


def rank_gates(score, gates, out):
    """Find for each score the first of the ascending gates that lets it pass, by asking the judge."""
    for j in range(score.shape[0]):
        first, end = 0, gates.shape[0]
        while first < end:
            middle = (first + end) // 2
            if judge(score[j], 0.0, 0.0, 0, 0.0, INF, gates[middle], INF) == GATE:
                first = middle + 1
            else:
                end = middle
        out[j] = first


@cache
def _rank_kernel(reading: Reading) -> Any:
    import numba

    bound = rule.bind(rank_gates, judge=compiled_rule(reading)["judge"])
    return compile_cached(numba.njit, named(bound, reading), nogil=True)


def gate_ranks(graph: Graph, gates: Float64, reading: Reading, *, compiled: bool = True) -> Int32:
    """Return int32 (m,): the first gate that lets each mismatch pass; ``len(gates)`` where none does."""
    ranks = np.zeros(len(graph.mm_score), np.int32)
    function = _rank_kernel(reading) if compiled else rule.bind(rank_gates, judge=rule.judge_of(reading))
    function(graph.mm_score, gates, ranks)
    return ranks


def cap_ranks(caps: Float64, largest: int, reading: Reading) -> Int64:
    """Return int64 (K + 2,): the first cap that allows n relaxed tokens in a block."""
    ask = rule.judge_of(reading)
    allowed = [
        [ask(0.0, 0.0, 0.0, count, 0.0, INF, INF, float(cap)) != CAP for cap in caps] for count in range(largest + 2)
    ]
    return np.array([row.index(True) if any(row) else len(caps) for row in allowed], np.int64)
