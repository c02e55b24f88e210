"""Lay out the groups of a large trace in several processes, each a run of neighbouring groups.

Reading and laying out hold the interpreter lock most of the time, so threads would not help. Processes write what they
made where :class:`asdsim.trace.store.GraphStore` looks for it, and tell nothing else: what one of them could not do,
for whatever reason, the caller finds missing and does itself, so errors are those of one process.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TraceError

if TYPE_CHECKING:
    from .store import GraphStore

LEAST = 2
"""Groups that are worth starting a process for."""
POLL_SECONDS = 0.2

LayOut = Callable[[Sequence["GraphStore"], Sequence[set[int]], Sequence[int]], None]


def spread(lay_out: LayOut, stores: Sequence[GraphStore], missing: Sequence[set[int]], wanted: Sequence[int]) -> None:
    """Call ``lay_out`` for runs of the groups that are wanted, in as many processes as the trace allows.

    Parameters
    ----------
    lay_out : callable
        A function of a module, given the stores, the groups that each of them is missing, and a run.
    stores : sequence of GraphStore
        Of one trace.
    missing : sequence of set of int
    wanted : sequence of int
        Sorted.
    """
    trace = stores[0].trace
    number = min(trace.processes, len(wanted) // LEAST)
    if number < 2:
        return
    context = multiprocessing.get_context("spawn")
    read = context.Value("q", 0)
    processes = [
        context.Process(target=_run, args=(lay_out, stores, missing, run.tolist(), read), daemon=True)
        for run in np.array_split(np.array(wanted), number)
    ]
    told = 0
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            wait([process.sentinel for process in processes if process.is_alive()], POLL_SECONDS)
            if trace.progress:
                done, told = read.value - told, read.value
                trace.progress(done)
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()


def _run(lay_out: LayOut, stores: Sequence[GraphStore], missing: Sequence[set[int]], run: list[int], read: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the caller, and that ends this

    def count(rows: int) -> None:
        with read.get_lock():
            read.value += rows

    stores[0].trace.progress = count
    try:
        lay_out(stores, missing, run)
    except (TraceError, MemoryError):
        return  # the caller meets it, too, and says so
