"""Spread the groups of a large trace over several processes, a run of neighbouring groups to each.

Reading and laying out hold the interpreter lock most of the time, so threads would not help. Groups that a process
could not handle, for whatever reason, are missing from the result. The caller handles them itself, so errors are those
of a single process.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import numpy as np

from ..errors import TraceError
from .groups import StreamedTrace
from .stored import Trace

LEAST = 2
"""Groups that make a process worth starting."""

T = TypeVar("T")


def spread(
    trace: StreamedTrace, function: Callable[[int, Trace], T], wanted: Sequence[int], weight: float = 1.0
) -> dict[int, T]:
    """Call a function on groups in as many processes as the trace allows; not at all if that is one.

    Parameters
    ----------
    trace : StreamedTrace
    function : callable
        Takes the number of a group and the group, and can be pickled. A process ends when it returns False.
    wanted : sequence of int
        Numbers of groups, sorted.
    weight : float
        Memory of a process, as a multiple of what it takes to read a group and to hold one graph of it.

    Returns
    -------
    dict
        What it returned, by number.
    """
    number = min(trace.most_processes(weight), len(wanted) // LEAST)
    if number < 2:
        return {}
    context = multiprocessing.get_context("spawn")
    found: dict[int, T] = {}
    pipes, processes = [], []
    try:
        for run in np.array_split(np.array(wanted), number):
            pipe, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(trace, function, run.tolist(), theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(pipe)
            processes.append(process)
        while pipes:
            ready = wait(pipes)
            for pipe in [one for one in pipes if one in ready]:
                try:
                    n, result = pipe.recv()
                except (EOFError, OSError):  # the process has ended, one way or another
                    pipes.remove(pipe)
                    continue
                if n is not None:
                    found[n] = result
                elif trace.progress:
                    trace.progress(result)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return found


def _run(trace: StreamedTrace, function: Callable[[int, Trace], Any], run: list[int], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the caller, and that ends this
    trace.progress = lambda rows: pipe.send((None, rows))
    try:
        for n, group in zip(run, trace.groups(set(run)), strict=True):
            result = function(n, group)
            pipe.send((n, result))
            if result is False:
                return
    except (TraceError, MemoryError, OSError):
        return  # the caller meets the same error and reports it
