"""Sum, 95th percentile and maximum of the ledgers of a setting, over its requests, in a fixed order.

The sum runs over the requests from the first to the last, so it is the same number on every device and for every way
to cut a grid. The percentile is numpy's linear one: :func:`place_of` and :func:`between` define it, here and on CUDA.

For very large grids sorting every setting's ledgers would take longer than the walk, so the kernel looks at the largest
ledgers only. For few requests these are kept sorted. For many, the percentile is looked for near that of the same
budget and cap under the gate before, which is seldom far::

       low        high            ledgers below `low` are skipped, those above `high` counted,
    .....[..x.x.xx.x]..xx.x...    the place is selected among those in the bracket;
                                  among all ledgers, where the bracket misses it

"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..rules import asd as rule
from .compiled import compile_cached, helper, named

Float64 = npt.NDArray[np.float64]

QUANTILE = 0.95

LANES = 128
"""Budgets taken together: a request's ledgers lie far from the next one's, and every jump should bring many."""

SORTED = 10
"""Ledgers that are kept sorted, at most."""

REACH = 8
"""Half a bracket, in mean distances between the ledgers above the percentile."""


def place_of(number):
    """Return (below, fraction): the percentile of so many ledgers lies that far from place ``below`` to the next."""
    place = QUANTILE * max(number - 1, 0)
    below = int(math.floor(place))
    return below, place - below


def between(low, high, fraction):
    """Return the point between two neighbouring ledgers; where ``fraction`` is 0, ``high`` has to be ``low``."""
    return low + fraction * (high - low)


def percentile(spent: Float64, keep: npt.NDArray[np.bool_]) -> Float64:
    """Return the 95th percentile of the ledgers that count, of each setting; NaN where none does.

    Parameters
    ----------
    spent, keep : (n, R)
    """
    settings, requests = spent.shape
    if not requests:
        return np.full(settings, np.nan)
    number = keep.sum(axis=1)
    places = [place_of(n) for n in range(requests + 1)]
    below = np.array([low for low, _ in places])[number]
    fraction = np.array([fraction for _, fraction in places])[number]
    ordered = np.sort(np.where(keep, spent, np.inf), axis=1)
    row = np.arange(settings)
    low, high = ordered[row, below], ordered[row, np.minimum(below + 1, requests - 1)]
    with np.errstate(invalid="ignore"):  # infinite where no ledger counts
        return np.where(number > 0, between(low, np.where(fraction > 0.0, high, low), fraction), np.nan)


class Scratch(NamedTuple):
    """What the kernel works in.

    Attributes
    ----------
    best : float64 (SORTED * LANES,)
        The largest ledgers of each lane, descending; a row for each place.
    value, added, most : float64 (LANES,)
        A request's ledger; the sum and the maximum so far.
    number : int64 (LANES,)
        Requests that count.
    copies : float64 (R * LANES,)
        Ledgers, lane after lane.
    column : float64 (R + 1,)
        Those among which the place is selected.
    low, high : float64 (caps, budgets)
        Where to look for the percentile under the next gate.
    """

    best: Float64
    value: Float64
    added: Float64
    most: Float64
    number: npt.NDArray[np.int64]
    copies: Float64
    column: Float64
    low: Float64
    high: Float64


def scratch(requests: int, caps: int, budgets: int) -> Scratch:
    """Return room for ledgers of a number of requests, caps and budgets."""
    return Scratch(
        best=np.zeros(SORTED * LANES),
        value=np.zeros(LANES),
        added=np.zeros(LANES),
        most=np.zeros(LANES),
        number=np.zeros(LANES, np.int64),
        copies=np.zeros(requests * LANES),
        column=np.zeros(requests + 1),
        low=np.full((caps, budgets), np.inf),
        high=np.full((caps, budgets), -np.inf),
    )


def select(values, count, place):
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


def scan(room, spent_of, g, c, first, width, levels):
    """Pass once over the requests: sum, count and maximum of each lane, and what the percentile needs.

    ``levels`` largest ledgers are kept sorted; where it is 0, all are copied.
    """
    best, value = room.best, room.value
    for k in range(width):
        room.added[k] = 0.0
        room.number[k] = 0
        room.most[k] = -1.0
    for i in range(SORTED * LANES):
        best[i] = -1.0
    requests = spent_of.shape[0]
    for r in range(requests):
        for k in range(width):
            value[k] = spent_of[r, g, c, first + k]
        for k in range(width):
            room.added[k] += max(value[k], 0.0)
            room.number[k] += 1 if value[k] >= 0.0 else 0
            room.most[k] = max(room.most[k], value[k])
        if levels == 0:
            for k in range(width):
                room.copies[k * requests + r] = value[k]
        for i in range(levels):
            for k in range(width):
                held = best[i * LANES + k]
                best[i * LANES + k] = max(held, value[k])
                value[k] = min(held, value[k])


def near(room, requests, k, over, here, there):
    """Return the ledger of lane ``k`` below which ``over`` are larger, and the next larger one."""
    copies, column = room.copies, room.column
    count, larger = 0, 0
    for r in range(requests):
        x = copies[k * requests + r]
        column[count] = x
        count += 1 if (x >= here) & (x <= there) else 0
        larger += 1 if x > there else 0
    if larger + count <= over or larger > max(over - 1, 0):  # the bracket misses one of the two
        for r in range(requests):
            column[r] = copies[k * requests + r]
        count, larger = requests, 0
    place = count - 1 - (over - larger)
    select(column, count, place)
    at_high = column[place]
    for i in range(place + 1, count):
        at_high = column[i] if i == place + 1 else min(at_high, column[i])
    return column[place], at_high


def summarise_ledgers(spent_of, room, total, highest, at_quantile):
    """Summarise ledgers.

    Parameters
    ----------
    spent_of : float64 (R, gates, caps, budgets)
        Ledgers; -1 where a request does not count.
    room : Scratch
    total, highest, at_quantile : float64 (gates, caps, budgets), out
        NaN (the total: 0) where no request counts.
    """
    requests, gates, caps, budgets = spent_of.shape
    most_above = requests - 1 - place_of(requests)[0]  # places above the quantile where all count
    levels = most_above + 1 if most_above < SORTED else 0
    for g in range(gates):
        for c in range(caps):
            for first in range(0, budgets, LANES):
                width = min(LANES, budgets - first)
                scan(room, spent_of, g, c, first, width, levels)
                for k in range(width):
                    b = first + k
                    total[g, c, b] = room.added[k]
                    if room.number[k] == 0:
                        highest[g, c, b] = np.nan
                        at_quantile[g, c, b] = np.nan
                        continue
                    highest[g, c, b] = room.most[k]
                    below, fraction = place_of(room.number[k])
                    over = room.number[k] - 1 - below
                    if levels:
                        low = room.best[over * LANES + k]
                        high = room.best[(over - 1) * LANES + k] if over > 0 else low
                    else:
                        low, high = near(room, requests, k, over, room.low[c, b], room.high[c, b])
                        reach = REACH * (room.most[k] - low) / (over + 1)
                        room.low[c, b], room.high[c, b] = max(low - reach, 0.0), low + reach
                    # numpy takes the place above only where the quantile falls between two
                    at_quantile[g, c, b] = between(low, high if fraction > 0.0 else low, fraction)


@cache
def kernel() -> Any:
    """Return ``summarise_ledgers`` compiled."""
    import numba

    bound: dict[str, Any] = {"select": helper(named(rule.bind(select), "all"))}
    for function in (place_of, between, scan, near):
        bound[function.__name__] = helper(named(rule.bind(function, **bound), "all"))
    return compile_cached(numba.njit, named(rule.bind(summarise_ledgers, **bound), "all"), nogil=True, _nrt=False)
