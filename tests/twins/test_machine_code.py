"""The CUDA kernels become machine code without a GPU, and that code decides as the CPU does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda")
from asdsim.rules.asd import FLOAT32_LEDGER, JUDGES, Reading
from asdsim.walk import cuda
from tests.support import machinecode
from tests.twins.cases import READINGS

ROOT = Path(__file__).parents[2]
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
ELF = b"\x7fELF"
PAPER = Reading()


@cache
def code(name: str, reading: Reading, capability: tuple[int, int]) -> machinecode.MachineCode:
    return machinecode.machine_code(name, reading, capability)


@pytest.mark.parametrize("name", list(cuda.KERNELS))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_without_spills(name: str, capability: tuple[int, int]) -> None:
    if capability not in machinecode.known_capabilities():
        pytest.skip("the installed toolkit does not know sm_{}{}".format(*capability))
    made = code(name, PAPER, capability)
    print(
        f"{name} sm_{capability[0]}{capability[1]}: {made.registers} registers, {made.spill_stores} bytes of spill "
        f"stores, {made.spill_loads} of spill loads, {made.stack} of stack"
    )
    assert made.cubin.startswith(ELF)
    assert ".target sm_{}{}".format(*capability) in made.ptx
    assert (made.spill_stores, made.spill_loads, made.stack) == (0, 0, 0)
    assert made.registers <= 64


@pytest.mark.parametrize("reading", [reading for reading in READINGS if reading != PAPER])
def test_every_reading_compiles_without_spills(reading: Reading) -> None:
    made = code("sums", reading, (9, 0))
    assert (made.spill_stores, made.spill_loads, made.stack) == (0, 0, 0)
    assert made.registers <= 64


@pytest.mark.parametrize(
    ("name", "reading"), [*((name, PAPER) for name in cuda.KERNELS), *(("sums", reading) for reading in READINGS)]
)
def test_no_float_is_multiplied_divided_or_fused(name: str, reading: Reading) -> None:
    """What has no product has no fused multiply-add; additions and comparisons round the same everywhere."""
    ptx = code(name, reading, (9, 0)).ptx
    assert re.search(r"\badd\.(rn\.)?f64\b", ptx) and re.search(r"\bsetp\.\w+\.f64\b", ptx)
    assert not products(ptx)
    # A ledger in float32 is two conversions, and no arithmetic in float32; other semantics have neither.
    single = set(re.findall(r"\b[\w.]+\.f32\b(?:\.f64)?", ptx))
    casts = {"cvt.rn.f32.f64", "cvt.f64.f32"}
    assert single <= casts | {".f32", ".reg.f32"} if reading.semantics in FLOAT32_LEDGER else not single


def products(ptx: str) -> list[str]:
    """Return the instructions in which floats are multiplied, divided or fused."""
    return re.findall(r"\b(?:fma|mad|mul|div|rcp|sqrt|ex2|lg2)[.\w]*\.f(?:16|32|64)\b", ptx)


def test_a_fused_product_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that multiplies where ours compares: the compiler fuses it with the addition, and it is seen."""

    def judge(score, before, charge, count, spent, budget, gate, cap):  # type: ignore[no-untyped-def]
        if not charge * gate + spent <= budget:
            return 2
        return 0

    monkeypatch.setitem(JUDGES, "paper", judge)
    assert "fma.rn.f64" in products(machinecode.machine_code("sums", PAPER, (9, 0)).ptx)


def test_a_kernel_that_needs_more_registers_is_caught() -> None:
    """The report is read, not assumed: held to 32 registers, the same kernel spills."""
    made = machinecode.machine_code("sums", PAPER, (9, 0), 32)
    assert made.registers <= 32 and made.spill_stores > 0


def test_the_simulator_is_not_taken_for_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tests.support.machinecode as m; m.machine_code('sums', m.Reading(), (9, 0))"],
        cwd=ROOT, env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode and "NUMBA_ENABLE_CUDASIM=1 runs kernels as Python" in done.stderr


def test_it_compiles_where_the_system_has_no_toolkit() -> None:
    """The packages of the extra are enough: no CUDA_HOME, nothing on the path."""
    hidden = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA", "NUMBA_CUDA"))}
    script = (
        "from tests.support import machinecode as m; made = m.machine_code('sums', m.Reading(), (9, 0)); "
        "print(made.registers, made.spill_stores)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**hidden, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    registers, spills = map(int, done.stdout.split())
    assert 0 < registers <= 64 and spills == 0
