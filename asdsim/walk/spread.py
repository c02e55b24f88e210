"""Mean, 95th percentile and maximum of the ledgers of a setting, over its requests, in a fixed order.

The sum runs over the requests from the first to the last, so it is the same number on every device and for every way
to cut a grid. The percentile is numpy's linear one. It needs the few largest ledgers only: for few requests these are
kept sorted, for many a bound first throws out the requests that cannot be among them for any of ``LANES`` neighbouring
settings.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from .compiled import compile_cached, helper, named

LANES = 16
SORTED = 8
"""Largest number of ledgers that are kept sorted."""


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


def spread(spent_of, row_of, quantile, total, highest, at_quantile):  # type: ignore[no-untyped-def]
    """Summarise ledgers.

    Parameters
    ----------
    spent_of : float64 (R, rows, caps, budgets)
        Ledgers; -1 where a request does not count.
    row_of : int32 (R, gates)
        Row that holds the ledgers of a request under each gate.
    quantile : float
    total, highest, at_quantile : float64 (gates, caps, budgets), out
        NaN (the total: 0) where no request counts.
    """
    requests, gates = row_of.shape
    caps, budgets = spent_of.shape[2], spent_of.shape[3]
    above = requests - 1 - int(math.floor(quantile * max(requests - 1, 0)))  # places above the quantile, at most
    levels = above + 1
    few = levels <= SORTED
    best = np.zeros((SORTED + 1) * LANES)
    value = np.zeros(LANES)
    number = np.zeros(LANES, np.int64)
    added = np.zeros(LANES)
    low = np.zeros(requests + 1)
    high = np.zeros(requests + 1)
    wanted = np.zeros(requests + 1, np.int64)
    column = np.zeros(requests + 1)
    for g in range(gates):
        for c in range(caps):
            for first in range(0, budgets, LANES):
                width = min(LANES, budgets - first)
                for k in range(LANES):
                    added[k] = 0.0
                    number[k] = 0
                for i in range((SORTED + 1) * LANES):
                    best[i] = -1.0
                for r in range(requests):
                    row = spent_of[r, row_of[r, g], c]
                    for k in range(width):
                        value[k] = row[first + k]
                    for k in range(width):
                        added[k] += max(value[k], 0.0)
                        number[k] += 1 if value[k] >= 0.0 else 0
                    if few:
                        for i in range(levels):
                            for k in range(LANES):
                                held = best[i * LANES + k]
                                best[i * LANES + k] = max(held, value[k])
                                value[k] = min(held, value[k])
                    else:
                        smallest, largest = value[0], value[0]
                        for k in range(width):
                            smallest = min(smallest, value[k])
                            largest = max(largest, value[k])
                        low[r], high[r] = smallest, largest
                candidates = 0
                if not few:
                    # At least ``levels`` requests reach ``bound`` in every lane: who stays below it does not matter.
                    for r in range(requests):
                        column[r] = low[r]
                    select(column, requests, requests - levels)
                    bound = column[requests - levels]
                    for r in range(requests):
                        if high[r] >= bound:
                            wanted[candidates] = r
                            candidates += 1
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
                        for i in range(candidates):
                            r = wanted[i]
                            column[i] = spent_of[r, row_of[r, g], c, first + k]
                        select(column, candidates, candidates - 1 - over)
                        at_low = column[candidates - 1 - over]
                        top = at_low
                        at_high = at_low
                        for i in range(candidates - over, candidates):
                            at_high = column[i] if i == candidates - over else min(at_high, column[i])
                            top = max(top, column[i])
                    highest[g, c, first + k] = top
                    # numpy takes the place above only where the quantile falls between two
                    part = place - below
                    at_high = at_high if part > 0.0 else at_low
                    at_quantile[g, c, first + k] = at_low + part * (at_high - at_low)


@cache
def kernel() -> Any:
    """Return ``spread`` compiled."""
    import numba

    from .. import rule

    return compile_cached(
        numba.njit, named(rule.bind(spread, select=helper(named(rule.bind(select), "all"))), "all"), nogil=True
    )
