"""The CUDA kernel becomes machine code without a GPU, and that code decides as the CPU does."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda")
from asdsim.rule import FLOAT32_LEDGER, JUDGES
from asdsim.walk import cuda

ROOT = Path(__file__).parents[2]
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
ELF = b"\x7fELF"


@cache
def code(semantics: str, capability: tuple[int, int]) -> cuda.MachineCode:
    return cuda.machine_code(semantics, capability)


@pytest.mark.parametrize("semantics", list(JUDGES))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_without_spills(semantics: str, capability: tuple[int, int]) -> None:
    made = code(semantics, capability)
    assert made.cubin.startswith(ELF)
    assert ".target sm_{}{}".format(*capability) in made.ptx
    assert (made.spill_stores, made.spill_loads, made.stack) == (0, 0, 0)
    print(f"sm_{capability[0]}{capability[1]} {semantics}: {made.registers} registers, no spills")


@pytest.mark.parametrize("semantics", list(JUDGES))
def test_no_float_is_multiplied_divided_or_fused(semantics: str) -> None:
    """What has no product has no fused multiply-add; additions and comparisons round the same everywhere."""
    ptx = code(semantics, (9, 0)).ptx
    assert re.search(r"\badd\.(rn\.)?f64\b", ptx) and re.search(r"\bsetp\.\w+\.f64\b", ptx)
    forbidden = re.findall(r"\b(?:fma|mad|mul|div|rcp|sqrt|ex2|lg2)[.\w]*\.f(?:16|32|64)\b", ptx)
    assert not forbidden
    # A ledger in float32 is two conversions, and no arithmetic in float32; other semantics have neither.
    single = set(re.findall(r"\b[\w.]+\.f32\b(?:\.f64)?", ptx))
    casts = {"cvt.rn.f32.f64", "cvt.f64.f32"}
    assert single <= casts | {".f32", ".reg.f32"} if semantics in FLOAT32_LEDGER else not single


def test_the_simulator_is_not_taken_for_the_compiler() -> None:
    script = (
        "import os; os.environ['NUMBA_ENABLE_CUDASIM'] = '1'\n"
        "from asdsim.walk import cuda\n"
        "cuda.machine_code('paper', (9, 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode and "NUMBA_ENABLE_CUDASIM=1 runs kernels as Python" in done.stderr
