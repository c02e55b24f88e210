"""What has to be measured in a process of its own: peak memory of the sweep, and the time to a first result."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GRIDS = {
    "12 settings": ["--B", "0,4,8", "--g", ".25,.5", "--M", "1,2"],
    "1,000 settings": ["--B", "0:9.5:.5", "--g", ".05:.5:.05", "--M", "1,2,3,4,inf"],
}
"""Grids of a first replay."""

SWEEP = """
import sys
from asdsim.bench.run import STEPS_PER_REQUEST, WIDTH, sweep_grid
from asdsim.bench.synthetic import synthetic_graph
from asdsim.walk.sweep import sweep_graph, walk_grid
graph, grid = synthetic_graph(int(sys.argv[1]), STEPS_PER_REQUEST, WIDTH), sweep_grid()
if sys.argv[2] == "aggregated":
    kept = sweep_graph(graph, grid, off_trace="recorded", device="cpu")
else:
    kept = walk_grid(graph, grid, off_trace="recorded", device="cpu")
from asdsim.bench.children import peak_bytes
print(peak_bytes())
"""


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # what getrusage says may be the size of the process that started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def memory(requests: int, note: Callable[[str], None]) -> dict[str, int]:
    """Return the peak memory of the whole process that sweeps, in bytes: aggregated, and with per-request results."""
    measured = {}
    for kind in ("aggregated", "per_request"):
        note(f"peak memory: {kind}")
        measured[kind] = int(_run([sys.executable, "-c", SWEEP, str(requests), kind]))
    return measured


def first_replay(trace: Path, note: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Return the seconds of ``asdsim replay`` in fresh processes: with nothing compiled before, and again.

    From the start of Python to the end of the table, intervals included.
    """
    measured: dict[str, dict[str, float]] = {}
    for name, settings in GRIDS.items():
        note(f"first replay: {name}")
        with tempfile.TemporaryDirectory() as cache:
            seconds = {}
            for kind in ("cold", "warm"):
                begin = time.perf_counter()
                _run([sys.executable, "-m", "asdsim", "replay", str(trace), *settings], NUMBA_CACHE_DIR=cache)
                seconds[kind] = time.perf_counter() - begin
            measured[name] = seconds
    return measured


def _run(command: list[str], **environment: str) -> str:
    from ..errors import UsageError

    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        last: Any = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"a measurement failed: {last}")
    return done.stdout
