"""Every budget at which a walk changes, for one gate and one cap.

Under a budget B a walk meets mismatches that the budget refuses. Each of them would be decided otherwise from some
larger budget on: s + C as the rule computes it (for readings that test C <= B - s, the smallest float that passes that
test). Up to the smallest of these every decision is the same, since a judge's answer turns once along B (held by
tests/twins/test_judges.py), and at it one decision is not. So a request is walked at B = 0, then at the smallest of
these floats, and so on until nothing is refused by the budget: one walk for each breakpoint, in memory for one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..provenance import own_cores
from ..rules import asd as rule
from ..rules.asd import BUDGET, Reading, accept_block, judge, settle
from ..trace.graph import END, MISSING, Graph
from .compiled import COMPILING, compile_cached, compiled_rule, helper, is_cached, named, python_rule
from .request import go_on

Float64 = npt.NDArray[np.float64]

MOST = 200_000
"""Breakpoints that are searched for, at most; their rows of figures take some 300 bytes each."""

SECONDS = 120.0
"""Time that the search may take."""

SMALLEST = 5e-324
"""Smallest float above 0: where strict matching ends."""

CHUNK = 1024
"""Breakpoints of one call of the kernel: how often the clock is looked at."""


def turning_point(score, before, charge, count, spent, budget, gate, cap):
    """Return the smallest budget under which a mismatch that ``budget`` refuses is no longer refused by the budget.

    NaN where no budget does that.
    """
    low, high = budget, max(spent + charge, SMALLEST)  # nearly always the very float; the smallest one above B = 0
    if judge(score, before, charge, count, spent, np.inf, gate, cap) == BUDGET:
        return np.nan
    while judge(score, before, charge, count, spent, high, gate, cap) == BUDGET:
        low = high
        high = float(np.nextafter(high, np.inf)) if high == spent + charge else high * 2.0
    below = float(np.nextafter(high, 0.0))
    if judge(score, before, charge, count, spent, below, gate, cap) == BUDGET:
        return high
    high = below
    while True:
        middle = low + (high - low) / 2.0
        if not low < middle < high:
            middle = float(np.nextafter(low, high))
            if middle == high:
                return high
        if judge(score, before, charge, count, spent, middle, gate, cap) == BUDGET:
            low = middle
        else:
            high = middle


def walk_breakpoints(graph, request, budget, upper, gate, cap, off_trace, out):
    """Write the breakpoints of one request above ``budget`` and up to ``upper`` to ``out``, ascending.

    Returns how many there are, ``len(out)`` at most.

    The walk under a budget, and the budgets at which each refusal by the budget would turn::

        B = 0    step 0: refused, turns at .5     step 1: refused, turns at .3
                                                          ^ smallest: walk again at B = .3
        B = .3   step 0: refused, turns at .5     step 1: accepted, leads to another step 2: refused, turns at .9
        B = .5   ...

    """
    number = 0
    while number < out.shape[0]:
        following = np.nan
        spent, tokens, steps = 0.0, 0, 0
        step = graph.root[request]
        while step >= 0:
            lo, hi = graph.mm_ptr[step], graph.mm_ptr[step + 1]
            room = graph.limit[request] - tokens
            outcome, charge, count, verdict = accept_block(
                graph.mm_pos, graph.mm_score, graph.mm_charge, lo, hi, room, spent, budget, gate, cap
            )
            if verdict == BUDGET:
                j = lo + outcome
                turn = turning_point(
                    graph.mm_score[j], charge, charge + graph.mm_charge[j], count + 1, spent, budget, gate, cap
                )
                if turn < following or following != following:  # NaN: nothing was found yet
                    following = turn
            spent = settle(spent, charge)
            edge = lo + step + outcome
            tokens += min(graph.edge_tokens[edge], room)
            steps += 1
            step = graph.edge_next[edge]
            if tokens >= graph.limit[request]:
                step = END
            if step == MISSING:
                step = go_on(graph, off_trace, request, steps, tokens)
        if not following <= upper:  # NaN: the budget refused nothing, so no larger one changes anything
            break
        out[number] = following
        number += 1
        budget = following
    return number


@cache
def kernel(reading: Reading) -> Any:
    """Return ``walk_breakpoints`` compiled for one reading."""
    import numba

    bound = compiled_rule(reading)
    for function in (accept_block, turning_point):
        bound[function.__name__] = helper(named(rule.bind(function, judge=bound["judge"]), reading))
    bound["go_on"] = helper(named(rule.bind(go_on), "all"))
    return compile_cached(numba.njit, named(rule.bind(walk_breakpoints, **bound), reading), nogil=True, _nrt=False)


def python_kernel(reading: Reading) -> Any:
    """Return the same sources as plain Python, for tests."""
    bound = python_rule(reading)
    for function in (accept_block, turning_point):
        bound[function.__name__] = rule.bind(function, judge=bound["judge"])
    return rule.bind(walk_breakpoints, **bound)


def breakpoints_of(
    graph: Graph,
    pairs: Sequence[tuple[float, float]],
    mode: int,
    reading: Reading,
    *,
    upper: float = np.inf,
    most: int = MOST,
    seconds: float = SECONDS,
    threads: int = 0,
    compiled: bool = True,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> list[Float64]:
    """Return, for each gate and cap, every budget in (0, upper] at which the walk of some request changes, ascending.

    Between two of them, and from the last one on, no walk changes.

    Parameters
    ----------
    pairs : sequence of (gate, cap)
    mode : int
        ``STOP``, ``ALIGNED`` or ``RECORDED``.
    most : int
        Breakpoints that may be found in all.
    seconds : float
        Time that may pass in all.
    threads : int
        0 takes every core that this process may use; results do not depend on it.
    compiled : bool
        False runs the kernel's source as Python.
    progress, note : callable, optional
        Called with 1 after each pair; with a line where the kernel has to be compiled first.

    Raises
    ------
    UsageError
        Where there are more, or it takes longer.
    """
    if note and compiled and not is_cached(sys.modules[__name__], reading):
        note(COMPILING)
    walk = partial(kernel(reading) if compiled else python_kernel(reading), graph.arrays)
    requests = range(graph.num_requests)
    workers = max(1, min(threads or len(own_cores()), len(requests)))
    search = _Search(walk, mode, upper, most, seconds, time.monotonic() + seconds)
    of_pairs: list[Float64] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for gate, cap in pairs:
                left = most - sum(map(len, of_pairs))
                every = np.zeros(0)
                # Floats, so that one compiled form serves all
                for points in pool.map(search, requests, repeat(float(gate)), repeat(float(cap)), repeat(left)):
                    every = np.union1d(every, points)
                    if len(every) > left:
                        raise _too_many(f"there are more than {most:,} breakpoints in B", gate, cap, float(every[left]))
                of_pairs.append(every)
                if progress:
                    progress(1)
        except UsageError:
            search.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return of_pairs


@dataclass
class _Search:
    """What the searches of all requests share: the kernel, its bounds, and whether one of them gave up."""

    walk: Callable[..., int]
    mode: int
    upper: float
    most: int
    seconds: float
    end: float
    stopped: bool = False

    def __call__(self, request: int, gate: float, cap: float, left: int) -> Float64:
        """Return the breakpoints of one request, ``left`` at most, in chunks between which the clock is looked at."""
        chunks = [np.zeros(0)]
        budget, number = 0.0, 0
        while not self.stopped:
            out = np.empty(CHUNK)
            wrote = int(self.walk(request, budget, self.upper, gate, cap, self.mode, out))
            chunks.append(out[:wrote])
            number += wrote
            if wrote < CHUNK:
                break
            budget = float(out[-1])
            if number > left:
                raise _too_many(f"there are more than {self.most:,} breakpoints in B", gate, cap, budget)
            if time.monotonic() > self.end:
                raise _too_many(f"the breakpoints in B were not found within {self.seconds:g} s", gate, cap, budget)
        return np.concatenate(chunks)


def _too_many(what: str, gate: float, cap: float, reached: float) -> UsageError:
    return UsageError(
        f"{what}; stopped at g={gate:g}, M={cap:g}, B={reached:g}",
        fix=f"search fewer g and M or a shorter range, such as --B exact:{reached / 2:.3g}",
    )
