"""Sum, 95th percentile and maximum of the ledgers of a setting, over its requests, in a fixed order.

The sum runs over the requests from the first to the last, so it is the same number on every device and for every way
to cut a grid. The percentile is numpy's linear one. It needs the few largest ledgers only: for few requests these are
kept sorted. For many, it is looked for near the percentile of the same budget and cap under the gate before, which is
seldom far: ledgers in a bracket around that are picked out, those above it counted, and the place is selected among the
picked ones; among all, where it is not there.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from .compiled import compile_cached, helper, named

LANES = 128
"""Budgets taken together: a request's ledgers lie far from the next one's, and every jump should bring many."""

SORTED = 10
"""Ledgers that are kept sorted, at most."""
REACH = 8
"""Half a bracket, in mean distances between the ledgers above the percentile."""


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
    spent_of, row_of, quantile, best, value, number, added, most, part, column, low, high, total, highest, at_quantile
):  # fmt: skip
    """Summarise ledgers.

    Parameters
    ----------
    spent_of : float64 (R, rows, caps, budgets)
        Ledgers; -1 where a request does not count.
    row_of : int32 (R, gates)
        Row that holds the ledgers of a request under each gate.
    quantile : float
    best .. high
        See :func:`scratch`.
    total, highest, at_quantile : float64 (gates, caps, budgets), out
        NaN (the total: 0) where no request counts.
    """
    requests, gates = row_of.shape
    caps, budgets = spent_of.shape[2], spent_of.shape[3]
    above = requests - 1 - int(math.floor(quantile * max(requests - 1, 0)))  # places above the quantile, at most
    few = above + 1 <= SORTED
    levels = above + 1 if few else 0
    for g in range(gates):
        for c in range(caps):
            for first in range(0, budgets, LANES):
                width = min(LANES, budgets - first)
                for k in range(width):
                    added[k] = 0.0
                    number[k] = 0
                    most[k] = -1.0
                for i in range(SORTED * LANES):
                    best[i] = -1.0
                for r in range(requests):
                    row = row_of[r, g]
                    for k in range(width):
                        value[k] = spent_of[r, row, c, first + k]
                    for k in range(width):
                        added[k] += max(value[k], 0.0)
                        number[k] += 1 if value[k] >= 0.0 else 0
                        most[k] = max(most[k], value[k])
                    if not few:
                        for k in range(width):
                            part[k * requests + r] = value[k]
                    for i in range(levels):
                        for k in range(width):
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
                    else:
                        here, there = low[c, first + k], high[c, first + k]
                        count, larger = 0, 0
                        for r in range(requests):
                            x = part[k * requests + r]
                            column[count] = x
                            count += 1 if (x >= here) & (x <= there) else 0
                            larger += 1 if x > there else 0
                        if larger + count <= over or larger > max(over - 1, 0):
                            for r in range(requests):
                                column[r] = part[k * requests + r]
                            count, larger = requests, 0
                        at = count - 1 - (over - larger)
                        select(column, count, at)
                        at_low = column[at]
                        at_high = at_low
                        for i in range(at + 1, count):
                            at_high = column[i] if i == at + 1 else min(at_high, column[i])
                        reach = REACH * (most[k] - at_low) / (over + 1)
                        low[c, first + k], high[c, first + k] = max(at_low - reach, 0.0), at_low + reach
                    highest[g, c, first + k] = most[k]
                    # numpy takes the place above only where the quantile falls between two
                    between = place - below
                    at_high = at_high if between > 0.0 else at_low
                    at_quantile[g, c, first + k] = at_low + between * (at_high - at_low)


def scratch(requests: int, caps: int, budgets: int) -> tuple[Any, ...]:
    """Return what ``spread`` works in."""
    return (
        np.zeros(SORTED * LANES),
        np.zeros(LANES),
        np.zeros(LANES, np.int64),
        np.zeros(LANES),
        np.zeros(LANES),
        np.zeros(requests * LANES),
        np.zeros(requests + 1),
        np.full((caps, budgets), np.inf),
        np.full((caps, budgets), -np.inf),
    )


@cache
def kernel() -> Any:
    """Return ``spread`` compiled."""
    import numba

    from ..rules import asd as rule

    names = {"select": helper(named(rule.bind(select), "all"))}
    return compile_cached(numba.njit, named(rule.bind(spread, **names), "all"), nogil=True)
