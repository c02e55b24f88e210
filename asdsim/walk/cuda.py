"""The walk on CUDA: one thread per (request, setting), settings adjacent in a warp.

The only module that imports ``numba.cuda``. The rule's sources are compiled a second time here, as device functions
that are inlined: code compiled for the CPU cannot be called from a kernel.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
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
    pair = cuda.grid(1)  # type: ignore[name-defined]  # noqa: F821  (bound when compiled)
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


def to_single(x):  # type: ignore[no-untyped-def]
    """Round to float32; what :func:`asdsim.rule.single` is in compiled code."""
    return np.float64(np.float32(x))


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
    settle = device(rule.settle_of(semantics, device(to_single)))
    one = rule.bind(walk_request, accept_block=device(block), settle=settle)
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


@dataclass(frozen=True)
class MachineCode:
    """What the assembler says of a kernel, per thread.

    Attributes
    ----------
    registers : int
        Registers of 32 bits.
    spill_stores, spill_loads, stack : int
        Bytes of local memory: registers that did not fit, and frames.
    ptx : str
        The code before assembly.
    cubin : bytes
        Machine code.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    ptx: str
    cubin: bytes


def machine_code(semantics: str, capability: tuple[int, int]) -> MachineCode:
    """Compile the kernel for a GPU that need not be present: NVVM to PTX, nvJitLink to machine code.

    Needs the packages of the extras ``cuda12`` or ``cuda13``, no driver and no toolkit of the system.

    Parameters
    ----------
    semantics : str
        A key of :data:`asdsim.rule.JUDGES`.
    capability : (int, int)
        Compute capability, for example (9, 0).

    Raises
    ------
    RuntimeError
        Where the simulator is on: it compiles nothing.
    """
    if simulating():
        raise RuntimeError("NUMBA_ENABLE_CUDASIM=1 runs kernels as Python; unset it to compile them")
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    ptx, _ = cuda.compile_ptx(device_source(semantics), _signature(), cc=capability)
    linker = Linker(
        ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch="sm_{}{}".format(*capability), verbose=True)
    )
    cubin = linker.link("cubin").code
    log = linker.get_info_log()

    def number(pattern: str) -> int:
        found = re.findall(pattern, log)
        if not found:
            raise RuntimeError(f"the assembler's report lacks {pattern!r}: {log[-400:]}")
        return max(map(int, found))

    return MachineCode(
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        ptx=ptx,
        cubin=bytes(cubin),
    )


def _signature() -> tuple[Any, ...]:
    from numba import types

    def array(dtype: Any, dims: int = 1) -> Any:
        return types.Array(dtype, dims, "C")

    i32, i64, f64 = array(types.int32), array(types.int64), array(types.float64)
    graph = (i32, i32, i32, i64, i32, f64, f64, i32, i32, i32, i64, i32, i64, i32)
    outputs = (array(types.int32, 3), array(types.float64, 2), array(types.int64, 2), array(types.int32, 3))
    return (f64, f64, f64, types.int64, *graph, *outputs)
