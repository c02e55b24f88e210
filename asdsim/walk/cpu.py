"""The walk on CPU: numba, one thread per share of the settings.

Threads are Python's own around code that releases the interpreter lock, not numba's thread pool: that pool is OpenMP on
most machines, which ends a process that forks after using it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ..provenance import own_cores
from ..rules import asd as rule
from ..rules.asd import BUDGET, CAP, GATE, Reading
from ..trace.graph import GraphArrays
from .compiled import compile_cached, compiled_rule, helper, named, python_rule
from .request import (
    ACCEPTED,
    BY_BUDGET,
    BY_CAP,
    BY_GATE,
    DRAFTED,
    LEFT,
    NUM_COUNTS,
    RELAXED,
    STEPS,
    STOP,
    TOKENS,
    go_on,
    refusals,
    walk_request,
)

Settings = tuple[npt.NDArray[np.float64], ...]

SHARES = 4
"""Shares of the settings that each thread gets, so that a slow share leaves no thread idle for long."""


def walk_settings(graph, first, last, budget, gate, cap, off_trace, counts, spent, edge, histogram):
    """Walk every request under the settings ``first .. last - 1``; see :func:`asdsim.walk.sweep.walk_grid`."""
    width = histogram.shape[1]
    bins = np.zeros(width, np.int32)
    for setting in range(first, last):
        for request in range(graph.root.shape[0]):
            for k in range(width):
                bins[k] = 0
            at_end, last_edge, steps, offered, taken, tokens, relaxed, refused, left = walk_request(
                graph, request, budget[setting], gate[setting], cap[setting], off_trace,
                graph.root[request], 0, 0, 0.0, bins,
            )  # fmt: skip
            spent[setting, request] = at_end
            edge[setting, request] = last_edge
            counts[setting, request, STEPS] = steps
            counts[setting, request, DRAFTED] = offered
            counts[setting, request, ACCEPTED] = taken
            counts[setting, request, TOKENS] = tokens
            counts[setting, request, RELAXED] = relaxed
            counts[setting, request, BY_GATE] = refusals(refused, GATE)
            counts[setting, request, BY_BUDGET] = refusals(refused, BUDGET)
            counts[setting, request, BY_CAP] = refusals(refused, CAP)
            counts[setting, request, LEFT] = left
            if off_trace != STOP or left == 0:
                for k in range(width):
                    histogram[setting, k] += bins[k]


@cache
def kernel(reading: Reading) -> Any:
    """Return ``walk_settings`` compiled for one reading."""
    bound = compiled_rule(reading)
    bound["accept_block"] = helper(named(rule.bind(rule.accept_block, judge=bound["judge"]), reading))
    bound["go_on"] = helper(named(rule.bind(go_on), "all"))
    walk = helper(named(rule.bind(walk_request, **bound), reading))
    settings = rule.bind(walk_settings, walk_request=walk, refusals=helper(rule.bind(refusals)))
    return compile_cached(numba.njit, named(settings, reading), nogil=True)


def python_kernel(reading: Reading) -> Any:
    """Return the same sources as plain Python, for tests and as a last resort."""
    bound = python_rule(reading)
    block = rule.bind(rule.accept_block, judge=bound["judge"])
    return rule.bind(walk_settings, walk_request=rule.bind(walk_request, accept_block=block, settle=bound["settle"]))


def run(
    graph: GraphArrays, settings: Settings, off_trace: int, reading: Reading, threads: int = 0
) -> tuple[npt.NDArray[Any], ...]:
    """Walk all settings.

    Parameters
    ----------
    graph : GraphArrays
    settings : tuple of float64 (n,)
        B, g, M.
    off_trace : int
        ``STOP``, ``ALIGNED`` or ``RECORDED``.
    reading : Reading
    threads : int
        0 takes every core that this process may use; results do not depend on it.

    Returns
    -------
    counts : int32 (n, R, NUM_COUNTS)
    spent : float64 (n, R)
    edge : int64 (n, R)
    histogram : int64 (n, largest K + 1)
    """
    return run_with(kernel(reading), graph, settings, off_trace, threads)


def run_with(
    compiled: Any, graph: GraphArrays, settings: Settings, off_trace: int, threads: int
) -> tuple[npt.NDArray[Any], ...]:
    """Walk all settings with a given form of ``walk_settings``."""
    number, requests = len(settings[0]), len(graph.root)
    width = int(graph.drafted.max(initial=0)) + 1
    counts = np.zeros((number, requests, NUM_COUNTS), np.int32)
    spent = np.zeros((number, requests), np.float64)
    edge = np.full((number, requests), -1, np.int64)
    histogram = np.zeros((number, width), np.int64)

    def share(first: int, last: int) -> None:
        compiled(graph, first, last, *settings, off_trace, counts, spent, edge, histogram)

    workers = max(1, min(threads or len(own_cores()), number))
    if workers == 1:
        share(0, number)
        return counts, spent, edge, histogram
    bounds = np.linspace(0, number, SHARES * workers + 1).astype(int)
    with ThreadPoolExecutor(workers) as pool:
        shares = [pool.submit(share, int(lo), int(hi)) for lo, hi in pairwise(bounds) if lo < hi]
        for done in shares:
            done.result()
    return counts, spent, edge, histogram
