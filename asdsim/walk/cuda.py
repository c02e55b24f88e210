"""The walk on CUDA: one thread per (request, setting), settings adjacent in a warp.

The only module that imports ``numba.cuda``. The rule's sources are compiled a second time here, as device functions
that are inlined: code compiled for the CPU cannot be called from a kernel.

Sums are made on the device. Counts are integers, added atomically, so their order does not matter; ledgers are summed
by one thread per setting over the requests from first to last, as everywhere else. What needs a product, the place of a
percentile and the line between two ledgers, is left to the host: the kernels only add and compare, so there is nothing
that CUDA could contract into a fused multiply-add and round otherwise than a CPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rules import asd as rule
from ..rules.asd import BUDGET, CAP, GATE, Reading
from ..trace.graph import GraphArrays
from .compiled import to_single
from .request import (
    ACCEPTED,
    BASE_ACCEPTED,
    BASE_STEPS,
    BASE_TOKENS,
    BY_BUDGET,
    BY_CAP,
    BY_GATE,
    DRAFTED,
    EXACT,
    HISTOGRAM,
    KEPT,
    LEFT,
    LOST_STEPS,
    LOST_TOKENS,
    NUM_COUNTS,
    PAIRED,
    RELAXED,
    STEPS,
    STOP,
    STRICT_ACCEPTED,
    STRICT_EXACT,
    STRICT_STEPS,
    STRICT_TOKENS,
    TOKENS,
    go_on,
    refusals,
    walk_request,
)

THREADS = 128
"""Threads per block; tests set it small so that a block edge falls inside a tiny grid."""

MAX_REGISTERS = 64
"""A thread may use; leaves room for 1,024 threads on a multiprocessor."""

MAX_ROWS = 65535
"""Requests of one launch: what CUDA allows as the second extent of a grid."""

INT32_BYTES = 4

CHUNK_BYTES = 256 << 20
"""Device memory for the ledgers of one chunk of settings."""

# Globals of the kernels below that are bound when they are compiled.
cuda: Any = None
int32: Any = None


def simulating() -> bool:
    """Whether numba runs kernels in its Python simulator."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"


def why_unavailable() -> str:
    """Say why no kernel can run here, or nothing. Cheap where there is no driver."""
    if simulating():
        return ""
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return "no NVIDIA driver"
    from numba import cuda

    return "" if cuda.is_available() else "the driver reports no device, or the CUDA toolkit is not installed"


def pair_kernel(graph, first, budget, gate, cap, off_trace, counts, spent, edge, histogram):
    """Walk one pair per thread, from request ``first`` on; outputs are indexed [request, .., setting]."""
    setting = cuda.grid(1)
    request = first + cuda.blockIdx.y
    if setting >= budget.shape[0]:
        return
    at_end, last_edge, steps, offered, taken, tokens, relaxed, refused, left = walk_request(
        graph, request, budget[setting], gate[setting], cap[setting], off_trace,
        graph.root[request], 0, 0, 0.0, histogram[request, :, setting],
    )  # fmt: skip
    spent[request, setting] = at_end
    edge[request, setting] = last_edge
    counts[request, STEPS, setting] = steps
    counts[request, DRAFTED, setting] = offered
    counts[request, ACCEPTED, setting] = taken
    counts[request, TOKENS, setting] = tokens
    counts[request, RELAXED, setting] = relaxed
    counts[request, BY_GATE, setting] = refusals(refused, GATE)
    counts[request, BY_BUDGET, setting] = refusals(refused, BUDGET)
    counts[request, BY_CAP, setting] = refusals(refused, CAP)
    counts[request, LEFT, setting] = left


def sum_kernel(graph, first, budget, gate, cap, off_trace, strict, sums, spent):
    """Walk one pair per thread, from request ``first`` on; add to its setting's sums, int64 [column, setting].

    Columns as in :mod:`asdsim.walk.request`.

    The steps of a thread by accepted draft tokens are counted in shared memory, a slot of bins for each thread::

        thread 0              thread 1              thread 2
        |bin 0 .. bin K|(pad)|bin 0 .. bin K|(pad)|bin 0 ..

    Steps and accepted draft tokens follow from the bins, which spares two registers of the walk.
    """
    setting = cuda.grid(1)
    request = first + cuda.blockIdx.y
    thread = cuda.threadIdx.x
    shared = cuda.shared.array(0, int32)
    width = sums.shape[0] - HISTOGRAM
    slot = width | 1  # odd, so that threads which count in one bin meet no bank twice
    bins = shared[thread * slot : (thread + 1) * slot]
    for a in range(width):
        bins[a] = 0
    if setting >= budget.shape[0]:
        return
    at_end, _, _, offered, _, tokens, relaxed, refused, left = walk_request(
        graph, request, budget[setting], gate[setting], cap[setting], off_trace, graph.root[request], 0, 0, 0.0, bins
    )
    if off_trace == STOP and left > 0:
        spent[request, setting] = -1.0
        return
    spent[request, setting] = at_end
    steps, taken = 0, 0
    for a in range(width):
        steps += bins[a]
        taken += a * bins[a]
    cuda.atomic.add(sums, (STEPS, setting), steps)
    cuda.atomic.add(sums, (DRAFTED, setting), offered)
    cuda.atomic.add(sums, (ACCEPTED, setting), taken)
    cuda.atomic.add(sums, (TOKENS, setting), tokens)
    cuda.atomic.add(sums, (RELAXED, setting), relaxed)
    cuda.atomic.add(sums, (BY_GATE, setting), refusals(refused, GATE))
    cuda.atomic.add(sums, (BY_BUDGET, setting), refusals(refused, BUDGET))
    cuda.atomic.add(sums, (BY_CAP, setting), refusals(refused, CAP))
    cuda.atomic.add(sums, (KEPT, setting), 1)
    if left == 0:
        cuda.atomic.add(sums, (EXACT, setting), 1)
    if strict[request, STRICT_EXACT] > 0:
        cuda.atomic.add(sums, (PAIRED, setting), 1)
        cuda.atomic.add(sums, (BASE_STEPS, setting), strict[request, STRICT_STEPS])
        cuda.atomic.add(sums, (BASE_ACCEPTED, setting), strict[request, STRICT_ACCEPTED])
        cuda.atomic.add(sums, (BASE_TOKENS, setting), strict[request, STRICT_TOKENS])
    else:
        cuda.atomic.add(sums, (LOST_STEPS, setting), steps)
        cuda.atomic.add(sums, (LOST_TOKENS, setting), tokens)
    for a in range(width):
        if bins[a] > 0:
            cuda.atomic.add(sums, (HISTOGRAM + a, setting), bins[a])


def ledger_kernel(spent, above, total, highest, at_low, at_high):
    """Summarise the ledgers float64 [request, setting] of one setting per thread; -1 stands for a request left out.

    ``above`` (int64, requests + 1) says how many ledgers are larger than the lower of the two between which the
    percentile falls, by how many there are. The largest are found one distinct value after another, since no thread has
    room to sort in: with two ledgers above it, the walk down is ::

        9.0   8.5   8.5   6.0 | 5.5 ...
        ^ 1 larger               larger = 0 at 9.0, same = 1
              ^     ^ 2 more     larger = 1 at 8.5, same = 2: place 2 is among them: both ends are 8.5
    """
    setting = cuda.grid(1)
    if setting >= spent.shape[1]:
        return
    number, added, most = 0, 0.0, -1.0
    for r in range(spent.shape[0]):
        value = spent[r, setting]
        if value >= 0.0:
            number += 1
            added += value
            most = max(most, value)
    total[setting] = added
    highest[setting] = most
    over = above[number]
    # ``larger`` ledgers are larger than ``value``; the ``over``-th largest is passed on the way to the one below it
    value, larger, below, at_over = most, 0, -1.0, most
    while True:
        same, below = 0, -1.0
        for r in range(spent.shape[0]):
            x = spent[r, setting]
            if x == value:
                same += 1
            elif x < value:
                below = max(below, x)
        if over > 0 and larger < over and larger + same >= over:
            at_over = value
        if larger + same > over or below < 0.0:
            break
        larger += same
        value = below
    at_low[setting] = value
    at_high[setting] = at_over if over > 0 else value


KERNELS: dict[str, Callable[..., Any]] = {"pairs": pair_kernel, "sums": sum_kernel, "ledgers": ledger_kernel}
"""Kernels by name."""


@cache
def kernel(name: str, reading: Reading) -> Any:
    """Return a kernel around one reading, compiled when first launched."""
    from numba import cuda

    limits = {} if simulating() else {"max_registers": MAX_REGISTERS}
    return cuda.jit(device_source(name, reading), **limits)


def device_source(name: str, reading: Reading) -> Any:
    """Return a kernel's Python function with inlined device functions bound in."""
    from numba import cuda, types

    def device(function: Any) -> Any:
        return cuda.jit(device=True, inline="always")(function)

    block = rule.bind(rule.accept_block, judge=rule.judge_of(reading, device))
    settle = device(rule.settle_of(reading.semantics, device(to_single)))
    walk = rule.bind(walk_request, accept_block=device(block), settle=settle, go_on=device(rule.bind(go_on)))
    return rule.bind(
        KERNELS[name], walk_request=device(walk), refusals=device(rule.bind(refusals)), cuda=cuda, int32=types.int32
    )


def _to_device(arrays: tuple[Any, ...]) -> list[Any]:
    from numba import cuda

    return [cuda.to_device(array if array.size else np.zeros(1, array.dtype)) for array in arrays]


def run(graph: GraphArrays, settings: tuple[Any, ...], off_trace: int, reading: Reading) -> tuple[Any, ...]:
    """Walk all settings on the current device; parameters and results as :func:`asdsim.walk.cpu.run`."""
    number, requests = len(settings[0]), len(graph.root)
    width = int(graph.drafted.max(initial=0)) + 1
    counts = np.zeros((requests, NUM_COUNTS, number), np.int32)
    spent = np.zeros((requests, number), np.float64)
    edge = np.full((requests, number), -1, np.int64)
    steps = np.zeros((requests, width, number), np.int32)
    if requests and number:
        outputs = _to_device((counts, spent, edge, steps))
        axes, graph_there = _to_device(settings), GraphArrays(*_to_device(graph))
        threads = min(THREADS, number)
        for first in range(0, requests, MAX_ROWS):
            blocks = (-(-number // threads), min(MAX_ROWS, requests - first))
            kernel("pairs", reading)[blocks, threads](graph_there, first, *axes, off_trace, *outputs)
        for host, device in zip((counts, spent, edge, steps), outputs, strict=True):
            device.copy_to_host(host)
    counted = (counts[:, LEFT] == 0) | (off_trace != STOP)
    histogram = np.einsum("rwn,rn->nw", steps.astype(np.int64), counted.astype(np.int64))
    return (
        np.ascontiguousarray(counts.transpose(2, 0, 1)),
        np.ascontiguousarray(spent.T),
        np.ascontiguousarray(edge.T),
        np.ascontiguousarray(histogram),
    )


@dataclass(frozen=True)
class Totals:
    """Sums over requests of n settings.

    Attributes
    ----------
    sums : int64 (columns of :mod:`asdsim.walk.request`, n)
    spent, highest, at_low, at_high : float64 (n,)
        Sum and maximum of the ledgers, and the two between which the percentile falls; -1 where no request counts.
    """

    sums: npt.NDArray[np.int64]
    spent: npt.NDArray[np.float64]
    highest: npt.NDArray[np.float64]
    at_low: npt.NDArray[np.float64]
    at_high: npt.NDArray[np.float64]


def sum_settings(
    graph: GraphArrays,
    settings: tuple[Any, ...],
    off_trace: int,
    reading: Reading,
    strict: npt.NDArray[np.int32],
    above: npt.NDArray[np.int64],
    progress: Callable[[int], None] | None = None,
) -> Totals:
    """Walk all settings on the current device and add up there, in chunks of settings that bound memory.

    Parameters
    ----------
    graph, settings, off_trace, reading
        As for :func:`run`.
    strict : int32 (R, 4)
        Of strict matching, in the columns ``STRICT_EXACT`` .. ``STRICT_TOKENS`` of :mod:`asdsim.walk.request`.
    above : int64 (R + 1,)
        By the number of ledgers, how many are larger than the lower one of those that the percentile falls between.
    """
    from numba import cuda

    number, requests = len(settings[0]), len(graph.root)
    width = int(graph.drafted.max(initial=0)) + 1
    out = Totals(np.zeros((HISTOGRAM + width, number), np.int64), *(np.zeros(number) for _ in range(4)))
    if not requests or not number:
        for values in (out.highest, out.at_low, out.at_high):
            values[:] = -1.0
        return out
    graph_there, strict_there, above_there = (
        GraphArrays(*_to_device(graph)), cuda.to_device(strict), cuda.to_device(above),
    )  # fmt: skip
    size = max(THREADS, CHUNK_BYTES // (8 * requests) // THREADS * THREADS)
    for first in range(0, number, size):
        chunk = min(size, number - first)
        here = slice(first, first + chunk)
        axes = _to_device(tuple(np.ascontiguousarray(values[here]) for values in settings))
        sums = cuda.to_device(np.zeros((HISTOGRAM + width, chunk), np.int64))
        spent = cuda.device_array((requests, chunk), np.float64)
        ends = [cuda.device_array(chunk, np.float64) for _ in range(4)]
        threads = min(THREADS, chunk)
        blocks = -(-chunk // threads)
        for row in range(0, requests, MAX_ROWS):
            rows = min(MAX_ROWS, requests - row)
            kernel("sums", reading)[(blocks, rows), threads, 0, INT32_BYTES * threads * (width | 1)](
                graph_there, row, *axes, off_trace, strict_there, sums, spent
            )
        kernel("ledgers", reading)[blocks, threads](spent, above_there, *ends)
        out.sums[:, here] = sums.copy_to_host()
        for host, device in zip((out.spent, out.highest, out.at_low, out.at_high), ends, strict=True):
            host[here] = device.copy_to_host()
        if progress:
            progress(chunk)
    return out
