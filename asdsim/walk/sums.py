"""Sums over requests, one for each setting of a grid: what every way to walk a grid ends in."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..rules import asd as rule
from .compiled import compile_cached, helper, named
from .request import (
    ACCEPTED,
    BASE_ACCEPTED,
    BASE_STEPS,
    BASE_TOKENS,
    EXACT,
    HISTOGRAM,
    KEPT,
    LEFT,
    LOST_STEPS,
    LOST_TOKENS,
    NUM_COUNTS,
    PAIRED,
    STEPS,
    TOKENS,
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


class GridSums(NamedTuple):
    """Sums over the requests that count, for n settings; ``empty_sums`` tells the shapes.

    Attributes
    ----------
    counts : int64 (NUM_COUNTS, n)
        Rows as named in :mod:`asdsim.walk.request`; ``LEFT`` is not filled.
    histogram : int64 (n, largest K + 1)
    kept, exact, paired : int64 (n,)
        Requests that count, requests whose walk met captured steps only, and requests that count and whose strict walk
        is exact.
    base : int64 (3, n)
        Steps, accepted draft tokens and tokens of strict matching, over the paired requests.
    same : int64 (2, n)
        Steps and tokens of the setting on the same requests.
    spent, highest, p95 : float64 (n,)
        Sum, maximum and 95th percentile of the ledgers, in logits.
    """

    counts: Int64
    histogram: Int64
    kept: Int64
    exact: Int64
    paired: Int64
    base: Int64
    same: Int64
    spent: Float64
    highest: Float64
    p95: Float64


def empty_sums(settings: int, largest: int) -> GridSums:
    """Return room for the sums of a number of settings."""
    n = settings
    return GridSums(
        counts=np.zeros((NUM_COUNTS, n), np.int64),
        histogram=np.zeros((n, largest + 1), np.int64),
        kept=np.zeros(n, np.int64),
        exact=np.zeros(n, np.int64),
        paired=np.zeros(n, np.int64),
        base=np.zeros((3, n), np.int64),
        same=np.zeros((2, n), np.int64),
        spent=np.full(n, np.nan),
        highest=np.full(n, np.nan),
        p95=np.full(n, np.nan),
    )


BUDGETS_AT_ONCE, GATES_AT_ONCE = 8, 64
"""Sides of a block of a tile that is stored together, so that neither side jumps through memory: a grid runs over its
caps first, a tile over its budgets."""


def store(sums, corners, settings, out):
    """Add the sums of a tile to those of the grid, ``out``, where its settings stand: int64 (gates, caps, budgets).

    ``sums`` is int32 (gates, caps, budgets, HISTOGRAM + K + 1), columns as in :mod:`asdsim.walk.request`. Where it
    holds differences along the axes (``corners``), running sums are made first, in place.
    """
    num_gates, num_caps, num_budgets = settings.shape
    if corners:
        run_up(sums, settings.shape)
    for b_lo in range(0, num_budgets, BUDGETS_AT_ONCE):
        for g_lo in range(0, num_gates, GATES_AT_ONCE):
            for b in range(b_lo, min(b_lo + BUDGETS_AT_ONCE, num_budgets)):
                for g in range(g_lo, min(g_lo + GATES_AT_ONCE, num_gates)):
                    for c in range(num_caps):
                        setting, row = settings[g, c, b], sums[g, c, b]
                        for f in range(NUM_COUNTS):
                            out.counts[f, setting] += row[f]
                        for a in range(HISTOGRAM, row.shape[0]):
                            out.histogram[setting, a - HISTOGRAM] += row[a]
                        out.kept[setting] += row[KEPT]
                        out.exact[setting] += row[EXACT]
                        out.paired[setting] += row[PAIRED]
                        out.base[0, setting] += row[BASE_STEPS]
                        out.base[1, setting] += row[BASE_ACCEPTED]
                        out.base[2, setting] += row[BASE_TOKENS]
                        out.same[0, setting] += row[STEPS] - row[LOST_STEPS]
                        out.same[1, setting] += row[TOKENS] - row[LOST_TOKENS]


def run_up(sums, shape):
    """Turn differences along three axes into values: running sums along budgets, caps and gates, gate by gate."""
    num_gates, num_caps, num_budgets = shape
    for g in range(num_gates):
        for c in range(num_caps):
            for b in range(1, num_budgets):
                for f in range(sums.shape[3]):
                    sums[g, c, b, f] += sums[g, c, b - 1, f]
            for b in range(num_budgets if c > 0 else 0):
                for f in range(sums.shape[3]):
                    sums[g, c, b, f] += sums[g, c - 1, b, f]
        # Only now along the gates: the rows of the gate before hold running sums along all three axes.
        for c in range(num_caps if g > 0 else 0):
            for b in range(num_budgets):
                for f in range(sums.shape[3]):
                    sums[g, c, b, f] += sums[g - 1, c, b, f]


@cache
def store_kernel() -> Any:
    """Return ``store`` compiled."""
    import numba

    bound = rule.bind(store, run_up=helper(named(rule.bind(run_up), "all")))
    return compile_cached(numba.njit, named(bound, "all"), nogil=True, _nrt=False)


def strict_columns(counts: Int32) -> Int32:
    """Return int32 (R, 4), in the columns ``STRICT_EXACT`` .. ``STRICT_TOKENS``, from the counts of strict matching."""
    exact = (counts[:, LEFT] == 0).astype(np.int32)
    picked = counts[:, [STEPS, ACCEPTED, TOKENS]]
    return np.ascontiguousarray(np.concatenate([exact[:, None], picked], axis=1), np.int32)
