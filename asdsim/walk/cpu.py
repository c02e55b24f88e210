"""The walk on CPU: numba, one thread per share of the settings.

Threads are Python's own around code that releases the interpreter lock, not numba's thread pool: that pool is OpenMP on
most machines, which ends a process that forks after using it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np

from ..rules import asd as rule
from ..rules.asd import BUDGET, CAP, GATE, Reading
from . import request
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


def walk_settings(  # type: ignore[no-untyped-def]
    first, last, budget, gate, cap, off_trace,
    root, limit, drafted, mm_ptr, mm_pos, mm_score, mm_charge, edge_next, edge_accepted, edge_tokens,
    path_ptr, path_step, align_ptr, align_step, counts, spent, edge, histogram,
):  # fmt: skip
    """Walk every request under the settings ``first .. last - 1``; see :func:`asdsim.walk.sweep.walk_grid`."""
    width = histogram.shape[1]
    scratch = np.zeros(width, np.int32)
    for setting in range(first, last):
        for one in range(root.shape[0]):
            for k in range(width):
                scratch[k] = 0
            at_end, last, steps, offered, taken, tokens, relaxed, refused, left = walk_request(
                one, budget[setting], gate[setting], cap[setting], off_trace,
                root, limit, drafted, mm_ptr, mm_pos, mm_score, mm_charge, edge_next, edge_accepted, edge_tokens,
                path_ptr, path_step, align_ptr, align_step, scratch,
            )  # fmt: skip
            spent[setting, one] = at_end
            edge[setting, one] = last
            counts[setting, one, STEPS] = steps
            counts[setting, one, DRAFTED] = offered
            counts[setting, one, ACCEPTED] = taken
            counts[setting, one, TOKENS] = tokens
            counts[setting, one, RELAXED] = relaxed
            counts[setting, one, BY_GATE] = refusals(refused, GATE)
            counts[setting, one, BY_BUDGET] = refusals(refused, BUDGET)
            counts[setting, one, BY_CAP] = refusals(refused, CAP)
            counts[setting, one, LEFT] = left
            if off_trace != STOP or left == 0:
                for k in range(width):
                    histogram[setting, k] += scratch[k]


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
    arrays: tuple[Any, ...], settings: tuple[Any, ...], off_trace: int, reading: Reading, threads: int = 0
) -> tuple[Any, ...]:
    """Walk all settings.

    Parameters
    ----------
    arrays : tuple of ndarray
        The graph, in the order of ``walk_request``'s arguments from ``root`` to ``align_step``.
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
    return run_with(kernel(reading), arrays, settings, off_trace, threads)


def run_with(
    compiled: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], off_trace: int, threads: int
) -> tuple[Any, ...]:
    """Walk all settings with a given form of ``walk_settings``."""
    number, requests = len(settings[0]), len(arrays[0])
    width = int(arrays[2].max(initial=0)) + 1
    counts = np.zeros((number, requests, NUM_COUNTS), np.int32)
    spent = np.zeros((number, requests), np.float64)
    edge = np.full((number, requests), -1, np.int64)
    histogram = np.zeros((number, width), np.int64)

    def share(first: int, last: int) -> None:
        compiled(first, last, *settings, off_trace, *arrays, counts, spent, edge, histogram)

    workers = max(1, min(threads or len(os.sched_getaffinity(0)), number))
    bounds = np.linspace(0, number, 4 * workers + 1).astype(int) if workers > 1 else np.array([0, number])
    if workers == 1:
        share(0, number)
    else:
        with ThreadPoolExecutor(workers) as pool:
            for done in [
                pool.submit(share, int(lo), int(hi)) for lo, hi in zip(bounds, bounds[1:], strict=False) if lo < hi
            ]:
                done.result()
    return counts, spent, edge, histogram


__all__ = ["kernel", "python_kernel", "request", "run", "run_with"]
