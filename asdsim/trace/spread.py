"""Look at the groups of a large trace in several processes, each at a run of neighbouring groups.

Reading and laying out hold the interpreter lock most of the time, so threads would not help. What a process could not
do, for whatever reason, is missing from what comes back: the caller does it itself, so errors are those of one process.
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
"""Groups that are worth starting a process for."""

T = TypeVar("T")


def spread(
    trace: StreamedTrace, function: Callable[[int, Trace], T], wanted: Sequence[int], weight: float = 1.0
) -> dict[int, T]:
    """Call a function on groups, in as many processes as the trace allows; in none if that is one.

    Parameters
    ----------
    trace : StreamedTrace
    function : callable
        That can be pickled, given the number of a group and the group. A process ends where it returns False.
    wanted : sequence of int
        Numbers of groups, sorted.
    weight : float
        Memory of a process, as a multiple of what reading a group and one graph of it take.

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
                except (EOFError, OSError):  # it has ended, one way or another
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
        return  # the caller meets it, too, and says so
