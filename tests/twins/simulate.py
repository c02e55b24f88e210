"""Walk the cases with the CUDA kernels in numba's simulator, and write the results; run as a process of its own.

Usage: ``NUMBA_ENABLE_CUDASIM=1 python -m tests.twins.simulate OUT.npz``
"""

from __future__ import annotations

import sys

import numpy as np

from asdsim.trace.graph import build_graph
from asdsim.walk import cuda
from asdsim.walk.sweep import sweep_graph, walk_grid
from tests.twins.cases import MODES, cases, cut_case, small_grid

FIELDS = ("counts", "spent", "edge", "histogram")


def main(path: str) -> None:
    """Walk every case in every mode."""
    if not cuda.simulating():
        raise SystemExit("NUMBA_ENABLE_CUDASIM=1 is not set")
    cuda.THREADS = 8  # a block ends inside even a tiny grid
    cuda.CHUNK_BYTES = 1  # a chunk is one block
    cuda.MAX_ROWS = 2  # and three requests take two launches
    results = {}
    for name, trace in cases().items():
        graph = build_graph(trace)
        for mode in MODES:
            walks = walk_grid(graph, small_grid(), off_trace=mode, device="cuda")
            for field in FIELDS:
                results[f"{name}|{mode}|{field}"] = getattr(walks, field)
            for figure, values in sweep_graph(graph, small_grid(), off_trace=mode, device="cuda").items():
                results[f"{name}|{mode}|sweep|{figure}"] = values
    trace, grid = cut_case()
    walks = walk_grid(build_graph(trace, grid.layout), grid, device="cuda")
    results |= {f"cut|{field}": getattr(walks, field) for field in FIELDS}
    np.savez(path, **results)


if __name__ == "__main__":
    main(sys.argv[1])
