"""The checks that need a CUDA device: ``python -m tests.gpu [-o FILE]``, run by ``make gpu``.

Walks random, adversarial and committed graphs on the GPU and on the CPU and compares them with ``==``; then times one
sweep on both, in one run. Prints one JSON object. Exit status 1 where anything differs, 2 without a device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

import asdsim
from asdsim.rules.settings import Grid
from asdsim.trace.graph import Graph, build_graph
from asdsim.walk.off_trace import WALKED
from asdsim.walk.sweep import cuda_missing, walk_grid
from tests.twins.cases import adversarial, random_trace, small_grid

ROOT = Path(__file__).resolve().parents[1]
RANDOM = 200


def differs(graph: Graph, grid: Grid) -> str | None:
    """Name what differs between GPU and CPU, None where nothing does."""
    for mode in WALKED:
        cpu = walk_grid(graph, grid, off_trace=mode, device="cpu")
        gpu = walk_grid(graph, grid, off_trace=mode, device="cuda")
        for name in ("counts", "spent", "edge", "histogram"):
            if not np.array_equal(getattr(cpu, name), getattr(gpu, name)):
                return f"{name} under --off-trace {mode}"
    return None


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    reason = cuda_missing()
    if reason:
        print(f"no CUDA device can be used: {reason}", file=sys.stderr)
        return 2
    from numba import cuda

    faults: list[str] = []
    graphs = {f"random {seed}": random_trace(seed) for seed in range(RANDOM)} | adversarial()
    for name, trace in graphs.items():
        found = differs(build_graph(trace), small_grid())
        if found:
            faults.append(f"{name}: {found}")
    committed = build_graph(asdsim.load(ROOT / "traces/smollm2-layerskip"))
    wide = Grid.product("0:16:.25", ".02:2:.02", "1,2,inf")
    found = differs(committed, wide)
    if found:
        faults.append(f"traces/smollm2-layerskip: {found}")
    seconds = {}
    for device in ("cpu", "cuda"):
        walk_grid(committed, wide, device=device)
        begin = time.perf_counter()
        walks = walk_grid(committed, wide, device=device)
        seconds[device] = time.perf_counter() - begin
    report = {
        "gpu": cuda.get_current_device().name.decode(),
        "graphs": len(graphs) + 1,
        "differences": faults,
        "settings": len(wide),
        "steps_walked": int(walks.counts[:, :, 0].sum()),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "cpu_over_cuda": round(seconds["cpu"] / seconds["cuda"], 2),
    }
    print(json.dumps(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
