"""Time the walk and its peers; every figure is made in this run, on one core."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..rules.settings import Grid
from ..trace.graph import Graph, build_graph
from ..walk.request import ACCEPTED, STEPS
from ..walk.sweep import sweep_graph, walk_grid
from . import children, peers
from .synthetic import synthetic_graph

STEPS_PER_REQUEST, WIDTH = 60, 7
ROOT = Path(__file__).resolve().parents[2]
COVERED = ROOT / "traces" / "smollm2-layerskip-wide"
"""Committed trace that is covered for :func:`covered_grid`."""
COMMITTED = ROOT / "traces" / "smollm2-layerskip"
"""Committed trace of a first replay."""

Note = Callable[[str], None]
Seconds = dict[str, float]


def sweep_grid() -> Grid:
    """Return 10,000 settings: 100 budgets, 50 gates, 2 caps."""
    return Grid.product(np.linspace(0.0, 16.0, 100), np.linspace(0.05, 1.0, 50), [1, 2])


def covered_grid() -> Grid:
    """Return the 1,000 settings that the committed trace is covered for."""
    return Grid.product(
        [0, 1, 2, 3, 4, 6, 8, 12, 16, 24],
        [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 4],
        "1,2,3,4,inf",
    )


def timed(function: Callable[[], Any], *, least: float = 0.0, times: int = 1) -> tuple[float, Any]:
    """Return the shortest time of a call, in seconds, and its result; repeated ``times``, and for ``least`` seconds."""
    best, spent, done = float("inf"), 0.0, 0
    result = None
    while done < times or spent < least:
        begin = time.perf_counter()
        result = function()
        took = time.perf_counter() - begin
        best, spent, done = min(best, took), spent + took, done + 1
    return best, result


def run(*, quick: bool, requests: int = 1000, trace: Path | None = None, note: Note = lambda _: None) -> dict[str, Any]:
    """Time everything.

    Parameters
    ----------
    quick : bool
        Smaller samples of the slow peers; no large grids, no memory, no first replay.
    requests : int
        Requests of the synthetic trace.
    trace : Path, optional
        A trace that is covered for :func:`covered_grid`; the committed one by default, left out where there is none.
    note : callable
        Called with lines on what is being done.

    Returns
    -------
    dict
        ``ratios`` (null where a part could not be measured), ``ns_per_step_setting``, ``grids``, ``machine`` and
        ``sizes``; in full also ``peak_bytes`` and ``first_replay_seconds``.
    """
    graph = synthetic_graph(requests, STEPS_PER_REQUEST, WIDTH)
    grid = sweep_grid()
    note("recorded order: the kernel")
    sweep_graph(synthetic_graph(2, 3, WIDTH), grid, off_trace="recorded", threads=1, by="recorded", device="cpu")
    seconds, figures = timed(lambda: recorded(graph, grid), times=3)
    ours = seconds / (graph.num_steps * len(grid))
    nanoseconds: dict[str, float | None] = {"cpu": ours * 1e9}
    ratios: dict[str, float | None] = {}
    for name, measure in PEERS.items():
        if name.startswith("torch") and not peers.has_torch():
            note("torch is not installed: left out")
            nanoseconds[name] = ratios[f"{name}_over_cpu"] = None
            continue
        note(f"recorded order: {name}")
        each = measure(graph, grid, quick)
        nanoseconds[name] = each * 1e9
        ratios[f"{name}_over_cpu"] = each / ours
    covered = trace or (COVERED if COVERED.is_dir() else None)
    ratios["graph_over_recorded"] = None
    if covered is not None:
        note("graph: boxes")
        nanoseconds |= time_graph(covered)
        ratios["graph_over_recorded"] = nanoseconds["graph"] / nanoseconds["recorded_path"]  # type: ignore[operator]
    else:
        note("no covered trace at hand: the graph is left out")
    grids = {"10000": {"settings": len(grid), "seconds": seconds}}
    apart: dict[str, Any] = {}
    if not quick:
        grids |= time_grids(graph, covered, note)
        apart["peak_bytes"] = children.memory(requests, note)
        if COMMITTED.is_dir():
            apart["first_replay_seconds"] = children.first_replay(COMMITTED, note)
    return {
        "ratios": ratios,
        "ns_per_step_setting": nanoseconds,
        "grids": grids,
        **apart,
        "sizes": {
            "requests": requests, "steps": STEPS_PER_REQUEST, "K": WIDTH, "settings": len(grid),
            "step_settings": graph.num_steps * len(grid), "accepted": int(figures["num_accepted_draft_tokens"].sum()),
        },
        "quick": quick,
        "machine": machine(),
    }  # fmt: skip


def recorded(graph: Graph, grid: Grid, threads: int = 1) -> dict[str, Any]:
    """Sweep in recorded order on one core."""
    return sweep_graph(graph, grid, off_trace="recorded", device="cpu", threads=threads)


def _settings(grid: Grid, number: int) -> tuple[Grid, peers.Settings]:
    """Return a number of settings spread over a grid."""
    picked = np.linspace(0, len(grid) - 1, number).astype(int)
    chosen = Grid.of([grid.policy(int(index)) for index in picked])
    return chosen, (chosen.budget, chosen.gate, chosen.cap)


def _check(name: str, graph: Graph, settings: Grid, requests: int, theirs: tuple[Any, Any]) -> None:
    """Refuse a peer that counts something else: a ratio of different work says nothing."""
    cut = int(graph.path_ptr[requests])
    few = replace(
        graph, request_ids=graph.request_ids[:requests], root=graph.root[:requests], limit=graph.limit[:requests],
        step_request=graph.step_request[:cut], path_ptr=graph.path_ptr[: requests + 1],
        align_ptr=graph.align_ptr[: requests + 1],
    )  # fmt: skip
    walks = walk_grid(few, settings, off_trace="recorded", device="cpu", threads=1)
    accepted, spent = theirs
    if not (np.array_equal(walks.counts[:, :, ACCEPTED].T, accepted) and np.array_equal(walks.spent.T, spent)):
        raise RuntimeError(f"{name} does not walk as the kernels do")


def time_python(graph: Graph, grid: Grid, quick: bool) -> float:
    """Return seconds per (step, setting) of plain Python in the reference's style, over a sample."""
    requests, number = min(len(graph.root), 10), 20 if quick else 60
    blocks = peers.blocks_of(peers.regrets_of(graph, requests))
    return _time_sample("python", graph, grid, requests, number, lambda settings: peers.walk_python(blocks, settings))


def time_loop(graph: Graph, grid: Grid, quick: bool) -> float:
    """Return the same of a bare loop in Python."""
    requests, number = min(len(graph.root), 10), 50 if quick else 200
    blocks = peers.regrets_of(graph, requests).tolist()
    return _time_sample(
        "python_loop", graph, grid, requests, number, lambda settings: peers.walk_loop(blocks, settings)
    )


def time_torch(graph: Graph, grid: Grid, quick: bool) -> float:
    """Return the same of a torch batch in the reference's style."""
    requests, number = min(len(graph.root), 64), 64 if quick else 256
    blocks = peers.regrets_of(graph, requests)
    return _time_sample("torch", graph, grid, requests, number, lambda settings: peers.walk_torch(blocks, settings))


def time_broadcast(graph: Graph, grid: Grid, quick: bool) -> float:
    """Return the same of torch by broadcasting."""
    requests, number = min(len(graph.root), 64), 64 if quick else 256
    blocks = peers.regrets_of(graph, requests)
    return _time_sample(
        "torch_broadcast", graph, grid, requests, number, lambda settings: peers.walk_broadcast(blocks, settings)
    )


def time_numpy(graph: Graph, grid: Grid, quick: bool) -> float:
    """Return the same of the numpy walk, over all settings and a sample of the requests."""
    requests = min(len(graph.root), 5 if quick else 20)
    return _time_sample(
        "numpy", graph, grid, requests, len(grid), lambda settings: peers.walk_numpy(graph, requests, settings)
    )


def _time_sample(
    name: str, graph: Graph, grid: Grid, requests: int, number: int, walk: Callable[[peers.Settings], tuple[Any, Any]]
) -> float:
    chosen, settings = _settings(grid, number)
    seconds, results = timed(lambda: walk(settings), times=2)
    _check(name, graph, chosen, requests, results)
    return seconds / (requests * STEPS_PER_REQUEST * number)


PEERS: dict[str, Callable[[Graph, Grid, bool], float]] = {
    "python": time_python, "python_loop": time_loop, "torch": time_torch, "torch_broadcast": time_broadcast,
    "numpy": time_numpy,
}  # fmt: skip


def time_graph(trace: Path) -> dict[str, float | None]:
    """Return ns per (step, setting) on a covered trace, and in recorded order on its captured path alone."""
    from ..records import MemoryTrace
    from ..trace.reader import read_trace

    source = read_trace(trace)
    grid = covered_grid()
    graph = build_graph(source)
    alone = [
        (record, [step for step in source.steps_of(record.request_id) if step.wave == 0])
        for record in source.request_records()
    ]
    path = build_graph(MemoryTrace(alone))

    def each(graph: Graph, mode: str, by: str) -> float:
        def sweep() -> dict[str, Any]:
            return sweep_graph(graph, grid, off_trace=mode, device="cpu", threads=1, by=by)

        sweep()
        seconds, figures = timed(sweep, least=0.2, times=5)
        if mode == "stop" and not (figures["exact_share"] == 1.0).all():
            raise UsageError("the trace is not covered for the 1,000 settings of the benchmark", where=str(trace))
        return seconds / int(figures["num_spec_steps"].sum()) * 1e9

    pairs = walk_grid(graph, grid, device="cpu", threads=1)
    pair_seconds, _ = timed(lambda: walk_grid(graph, grid, device="cpu", threads=1), times=3)
    return {
        "graph": each(graph, "stop", "auto"),
        "recorded_path": each(path, "recorded", "recorded"),
        "graph_pair_by_pair": pair_seconds / int(pairs.counts[:, :, STEPS].sum()) * 1e9,
    }


def time_grids(graph: Graph, covered: Path | None, note: Note) -> dict[str, Any]:
    """Time larger grids: a million settings on both traces."""
    from ..trace.reader import read_trace

    grids = {
        "1e6 as 100 x 100 x 100": Grid.product(np.linspace(0, 16, 100), np.linspace(0.05, 1, 100), range(100)),
        "1e6 as 1000 x 500 x 2": Grid.product(np.linspace(0, 16, 1000), np.linspace(0.05, 1, 500), [1, 2]),
    }
    rows: dict[str, Any] = {}
    if covered is not None:
        real = build_graph(read_trace(covered))
        for name, grid in {"1e4": sweep_grid(), **grids}.items():
            note(f"covered trace: {name} settings")
            seconds, _ = timed(lambda grid=grid: sweep_graph(real, grid, device="cpu", threads=1), times=2)  # type: ignore[misc]
            rows[f"covered, {name}"] = {"settings": len(grid), "seconds": seconds}
    tenth = synthetic_graph(max(1, len(graph.root) // 10), STEPS_PER_REQUEST, WIDTH)
    for name, grid in grids.items():
        note(f"synthetic trace, a tenth of its requests: {name} settings")
        seconds, _ = timed(lambda grid=grid: recorded(tenth, grid))  # type: ignore[misc]
        rows[f"recorded, a tenth of the requests, {name}"] = {"settings": len(grid), "seconds": seconds}
    return rows


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    import numba

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": name, "cores": cores,
        "python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__,
    }  # fmt: skip
