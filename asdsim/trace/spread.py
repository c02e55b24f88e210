"""Spread the groups of a large trace over several processes, a run of neighbouring groups to each.

Reading and laying out hold the interpreter lock most of the time, so threads would not help. Groups that a process
could not handle, for whatever reason, are missing from the result. The caller handles them itself, so errors are those
of a single process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from .groups import StreamedTrace
from .interrupt import uninterrupted
from .stored import Trace

LEAST = 2
"""Groups that make a process worth starting."""

STARTING = threading.Lock()
"""Held by the one thread that starts processes."""

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
    if number < 2 or multiprocessing.current_process().daemon:  # which may start none
        return {}
    context = multiprocessing.get_context("spawn")
    found: dict[int, T] = {}
    pipes, processes = [], []
    try:
        for run in np.array_split(np.array(wanted), number):
            with contextlib.suppress(OSError):  # too many processes or open files, or it ended before it was told all
                pipe, theirs = context.Pipe(duplex=False)
                with theirs, _alone():
                    process = context.Process(target=_run, args=(trace, function, run.tolist(), theirs), daemon=True)
                    process.start()
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
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()
    return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let processes that are started meanwhile not hear of Ctrl-C, which ends the caller, and not import its script.

    A script that has no ``if __name__ == "__main__"`` would run again, and one from a pipe could not be found.
    """
    with uninterrupted(), STARTING:
        resource_tracker.ensure_running()  # or it is started in between, and lets Ctrl-C through
        main = sys.modules["__main__"]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit it
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(trace: StreamedTrace, function: Callable[[int, Trace], Any], run: list[int], pipe: Connection) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # files that are being written are removed
    trace.progress = lambda rows: pipe.send((None, rows))
    try:
        for n, group in zip(run, trace.groups(set(run)), strict=True):
            result = function(n, group)
            pipe.send((n, result))
            if result is False:
                return
    except Exception:  # the caller meets the same error and reports it
        return
