"""The fused kernel in Triton's interpreter; its code must be interpreted from the start, hence a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed; make engines runs this too"
)


def test_the_kernel_equals_the_torch_code_in_the_interpreter() -> None:
    script = Path(__file__).with_name("triton_twin.py")
    subprocess.run([sys.executable, str(script)], check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=280)
