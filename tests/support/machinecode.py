"""A CUDA kernel as machine code, without a GPU: what the assembler says of its registers, and the code itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from asdsim.rules.asd import Reading
from asdsim.trace.graph import GraphArrays
from asdsim.walk.cuda import MAX_REGISTERS, device_source, simulating


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


def known_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities that the installed toolkit compiles for."""
    from numba.cuda.cudadrv import nvrtc

    return [tuple(pair) for pair in nvrtc.get_supported_ccs()]  # type: ignore[attr-defined]


def machine_code(
    name: str, reading: Reading, capability: tuple[int, int], most_registers: int = MAX_REGISTERS
) -> MachineCode:
    """Compile a kernel for a GPU that need not be present: NVVM to PTX, nvJitLink to machine code.

    Needs the packages of the extras ``cuda12`` or ``cuda13``, no driver and no toolkit of the system.

    Parameters
    ----------
    name : str
        A key of :data:`asdsim.walk.cuda.KERNELS`.
    reading : Reading
    capability : (int, int)
        Compute capability, for example (9, 0).
    most_registers : int
        That a thread may use.

    Raises
    ------
    RuntimeError
        Where the simulator is on: it compiles nothing.
    """
    if simulating():
        raise RuntimeError("NUMBA_ENABLE_CUDASIM=1 runs kernels as Python; unset it to compile them")
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    ptx, _ = cuda.compile_ptx(device_source(name, reading), _signature(name), cc=capability)
    options = LinkerOptions(arch="sm_{}{}".format(*capability), verbose=True, max_register_count=most_registers)
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    cubin = linker.link("cubin").code
    log = linker.get_info_log()

    def number(pattern: str) -> int:
        numbers = re.findall(pattern, log)
        if not numbers:
            raise RuntimeError(f"the assembler's report lacks {pattern!r}: {log[-400:]}")
        return max(map(int, numbers))

    return MachineCode(
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        ptx=ptx,
        cubin=bytes(cubin),
    )


def _signature(name: str) -> tuple[Any, ...]:
    from numba import types

    def array(dtype: Any, dims: int = 1) -> Any:
        return types.Array(dtype, dims, "C")

    i32, i64, f64 = array(types.int32), array(types.int64), array(types.float64)
    kinds = (i32, i32, i32, i64, i32, f64, f64, i32, i32, i32, i64, i32, i64, i32)
    graph = types.NamedTuple(kinds, GraphArrays)
    if name == "ledgers":
        return (array(types.float64, 2), i64, f64, f64, f64, f64)
    setting = (graph, types.int64, f64, f64, f64, types.int64)
    if name == "sums":
        return (*setting, array(types.int32, 2), array(types.int64, 2), array(types.float64, 2))
    return (*setting, array(types.int32, 3), array(types.float64, 2), array(types.int64, 2), array(types.int32, 3))
