"""The walk on CUDA: one thread per (request, setting), settings adjacent in a warp.

The only module that imports ``numba.cuda``. The rule's sources are compiled a second time here, as device functions
that are inlined: code compiled for the CPU cannot be called from a kernel.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np

from .. import rule
from .request import LEFT, NUM_COUNTS, STOP, walk_request

THREADS = 128
"""Threads per block; tests set it small so that a block edge falls inside a tiny grid."""


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


def pair_kernel(  # type: ignore[no-untyped-def]
    budget, gate, cap, off_trace,
    root, limit, drafted, mm_ptr, mm_pos, mm_score, mm_charge, edge_next, edge_accepted, edge_tokens,
    path_ptr, path_step, align_ptr, align_step, counts, spent, edge, histogram,
):  # fmt: skip
    """Walk one (request, setting) pair per thread; outputs are indexed [request, .., setting]."""
    pair = cuda.grid(1)  # noqa: F821  (bound when compiled)
    settings = budget.shape[0]
    if pair >= settings * root.shape[0]:
        return
    setting = pair % settings
    one = pair // settings
    left, last = walk_request(
        one, budget[setting], gate[setting], cap[setting], off_trace,
        root, limit, drafted, mm_ptr, mm_pos, mm_score, mm_charge, edge_next, edge_accepted, edge_tokens,
        path_ptr, path_step, align_ptr, align_step, counts[one, :, setting], histogram[one, :, setting],
    )  # fmt: skip
    spent[one, setting] = left
    edge[one, setting] = last


@cache
def kernel(semantics: str) -> Any:
    """Return ``pair_kernel`` around one semantics, compiled when first launched."""
    from numba import cuda

    return cuda.jit(device_source(semantics))


def device_source(semantics: str) -> Any:
    """Return the kernel's Python function with inlined device functions bound in."""
    from numba import cuda

    def device(function: Any) -> Any:
        return cuda.jit(device=True, inline="always")(function)

    block = rule.bind(rule.accept_block, judge=device(rule.JUDGES[semantics]))
    one = rule.bind(walk_request, accept_block=device(block))
    return rule.bind(pair_kernel, walk_request=device(one), cuda=cuda)


def run(arrays: tuple[Any, ...], settings: tuple[Any, ...], off_trace: int, semantics: str) -> tuple[Any, ...]:
    """Walk all settings on the current device; parameters and results as :func:`asdsim.walk.cpu.run`."""
    from numba import cuda

    number, requests = len(settings[0]), len(arrays[0])
    width = int(arrays[2].max(initial=0)) + 1
    counts = np.zeros((requests, NUM_COUNTS, number), np.int32)
    spent = np.zeros((requests, number), np.float64)
    edge = np.full((requests, number), -1, np.int64)
    steps = np.zeros((requests, width, number), np.int32)
    if requests and number:
        outputs = [cuda.to_device(array) for array in (counts, spent, edge, steps)]
        inputs = [cuda.to_device(array if len(array) else np.zeros(1, array.dtype)) for array in (*settings, *arrays)]
        blocks = (number * requests + THREADS - 1) // THREADS
        kernel(semantics)[blocks, THREADS](*inputs[:3], off_trace, *inputs[3:], *outputs)
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
