"""Sum, 95th percentile and maximum of the ledgers of a setting, over its requests, in a fixed order.

The sum runs over the requests from the first to the last, so it is the same number on every device and for every way
to cut a grid. The percentile is numpy's linear one. It needs the few largest ledgers only: for few requests these are
kept sorted; for many, a sample of the requests gives a bound that few ledgers exceed, and the place is selected among
those (among all where the bound was too high).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from .compiled import compile_cached, helper, named

LANES = 16
SORTED = 10
"""Ledgers that are kept sorted, at most."""
SAMPLE = 64
"""Requests, at least, from which the bound is taken: their tenth largest ledger exceeds all but about 15 in 100, hardly
ever so few as 5 in 100."""


def select(values, count, place):  # type: ignore[no-untyped-def]
    """Move the ``place``-th smallest of the first ``count`` values to its place, no larger one before it."""
    lo, hi = 0, count - 1
    while lo < hi:
        pivot = values[(lo + hi) // 2]
        i, j = lo, hi
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                kept = values[i]
                values[i] = values[j]
                values[j] = kept
                i += 1
                j -= 1
        if place <= j:
            hi = j
        elif place >= i:
            lo = i
        else:
            return


def spread(  # type: ignore[no-untyped-def]
    spent_of, row_of, quantile, best, value, number, added, part, column, total, highest, at_quantile
):  # fmt: skip
    """Summarise ledgers.

    Parameters
    ----------
    spent_of : float64 (R, rows, caps, budgets)
        Ledgers; -1 where a request does not count.
    row_of : int32 (R, gates)
        Row that holds the ledgers of a request under each gate.
    quantile : float
    best .. column
        See :func:`scratch`.
    total, highest, at_quantile : float64 (gates, caps, budgets), out
        NaN (the total: 0) where no request counts.
    """
    requests, gates = row_of.shape
    caps, budgets = spent_of.shape[2], spent_of.shape[3]
    above = requests - 1 - int(math.floor(quantile * max(requests - 1, 0)))  # places above the quantile, at most
    few = above + 1 <= SORTED
    levels = above + 1 if few else SORTED
    for g in range(gates):
        for c in range(caps):
            for first in range(0, budgets, LANES):
                width = min(LANES, budgets - first)
                for k in range(LANES):
                    added[k] = 0.0
                    number[k] = 0
                    value[k] = -1.0
                for i in range(SORTED * LANES):
                    best[i] = -1.0
                for r in range(requests):
                    row = row_of[r, g]
                    for k in range(width):
                        value[k] = spent_of[r, row, c, first + k]
                    for k in range(width):
                        added[k] += max(value[k], 0.0)
                        number[k] += 1 if value[k] >= 0.0 else 0
                    if not few:
                        for k in range(width):
                            part[k * requests + r] = value[k]
                    if few or r % (requests // SAMPLE) == 0:
                        for i in range(levels):
                            for k in range(LANES):
                                held = best[i * LANES + k]
                                best[i * LANES + k] = max(held, value[k])
                                value[k] = min(held, value[k])
                for k in range(width):
                    total[g, c, first + k] = added[k]
                    if number[k] == 0:
                        highest[g, c, first + k] = np.nan
                        at_quantile[g, c, first + k] = np.nan
                        continue
                    place = quantile * (number[k] - 1)
                    below = int(math.floor(place))
                    over = number[k] - 1 - below  # ledgers in places above it
                    if few:
                        at_low = best[over * LANES + k]
                        at_high = best[(over - 1) * LANES + k] if over > 0 else at_low
                        top = best[k]
                    else:
                        bound = best[(SORTED - 1) * LANES + k]
                        count = 0
                        for r in range(requests):
                            x = part[k * requests + r]
                            column[count] = x
                            count += 1 if x >= bound else 0
                        if count <= over:
                            for r in range(requests):
                                column[r] = part[k * requests + r]
                            count = requests
                        select(column, count, count - 1 - over)
                        at_low = column[count - 1 - over]
                        top = at_low
                        at_high = at_low
                        for i in range(count - over, count):
                            at_high = column[i] if i == count - over else min(at_high, column[i])
                            top = max(top, column[i])
                    highest[g, c, first + k] = top
                    # numpy takes the place above only where the quantile falls between two
                    between = place - below
                    at_high = at_high if between > 0.0 else at_low
                    at_quantile[g, c, first + k] = at_low + between * (at_high - at_low)


def scratch(requests: int) -> tuple[Any, ...]:
    """Return what ``spread`` works in."""
    return (
        np.zeros(SORTED * LANES),
        np.zeros(LANES),
        np.zeros(LANES, np.int64),
        np.zeros(LANES),
        np.zeros(requests * LANES),
        np.zeros(requests + 1),
    )


@cache
def kernel() -> Any:
    """Return ``spread`` compiled."""
    import numba

    from .. import rule

    names = {"select": helper(named(rule.bind(select), "all"))}
    return compile_cached(numba.njit, named(rule.bind(spread, **names), "all"), nogil=True)
