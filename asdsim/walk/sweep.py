"""A grid of settings over a graph: choose a device and a way to walk, cut the grid into chunks, add up.

What is known per request of a chunk is turned into sums before the next chunk starts, so memory does not grow with the
grid unless per-request results are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, unknown_name
from ..rules.settings import Grid
from ..stats import masked_quantile, ratio
from ..trace.graph import Graph
from . import request as columns
from .axes import axes_of
from .compiled import COMPILING, is_cached
from .product import Sums, sum_product
from .request import ALIGNED, LEFT, NUM_COUNTS, RECORDED, STOP

OFF_TRACE = {"stop": STOP, "aligned": ALIGNED, "recorded": RECORDED}
DEVICES = ["auto", "cpu", "cuda", "reference", "python"]
CHUNK_BYTES = 64 << 20
PAIRS_UP_TO = 100_000
"""Settings times steps of the trace up to which a sweep goes pair by pair; measured, see tests/bench."""


@dataclass
class Walks:
    """Per-pair results: one walk for each (setting, request).

    Attributes
    ----------
    counts : int32 (n, R, NUM_COUNTS)
        Columns as named in :mod:`asdsim.walk.request`.
    spent : float64 (n, R)
        Ledger at the end of each walk, in logits.
    edge : int64 (n, R)
        Last edge; -1 for a request without steps.
    histogram : int64 (n, largest K + 1)
        Steps by accepted draft tokens, over the requests that count.
    """

    counts: npt.NDArray[np.int32]
    spent: npt.NDArray[np.float64]
    edge: npt.NDArray[np.int64]
    histogram: npt.NDArray[np.int64]

    @property
    def exact(self) -> npt.NDArray[np.bool_]:
        """(n, R): whether the walk met captured steps only."""
        return np.asarray(self.counts[:, :, LEFT] == 0)


def arrays_of(graph: Graph) -> tuple[Any, ...]:
    """Return the graph in the order of ``walk_request``'s arguments."""
    return (
        graph.root, graph.limit, graph.drafted, graph.mm_ptr, graph.mm_pos, graph.mm_score, graph.mm_charge,
        graph.edge_next, graph.edge_accepted, graph.edge_tokens,
        graph.path_ptr, graph.path_step, graph.align_ptr, graph.align_step,
    )  # fmt: skip


def choose_device(device: str) -> str:
    """Resolve ``auto`` to CUDA where a GPU and its toolkit are at hand, else to CPU.

    Raises
    ------
    UsageError
        On an unknown device, or ``cuda`` where it cannot run.
    """
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    if device in ("auto", "cuda"):
        reason = cuda_missing()
        if device == "cuda" and reason:
            raise UsageError(
                f"no CUDA device can be used: {reason}", fix="use --device cpu, or install asdsim[cuda12] or [cuda13]"
            )
        return "cpu" if reason else "cuda"
    return device


def cuda_missing() -> str:
    """Say why CUDA cannot be used, or nothing."""
    import importlib.util

    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed"
    from . import cuda

    return cuda.why_unavailable()


def walk_grid(graph: Graph, grid: Grid, *, off_trace: str = "stop", device: str = "auto", threads: int = 0) -> Walks:
    """Walk every request under every setting, in one piece.

    Raises
    ------
    UsageError
        On an unknown device or ``off_trace``.
    """
    mode = off_trace_code(off_trace)
    settings = tuple(np.ascontiguousarray(axis, np.float64) for axis in (grid.budget, grid.gate, grid.cap))
    chosen = choose_device(device)
    arrays = arrays_of(graph)
    if chosen == "cuda":
        from . import cuda

        return Walks(*cuda.run(arrays, settings, mode, grid.reading))
    from . import cpu

    if chosen == "python":
        return Walks(*cpu.run_with(cpu.python_kernel(grid.reading), arrays, settings, mode, 1))
    return Walks(*cpu.run(arrays, settings, mode, grid.reading, threads))


def off_trace_code(name: str) -> int:
    """Return the kernel's code of an ``off_trace`` name."""
    if name not in OFF_TRACE:
        raise unknown_name("off-trace mode", name, list(OFF_TRACE))
    return OFF_TRACE[name]


Walker = Callable[[Grid], Walks]
Progress = Callable[[int], None]


def sweep(
    walk: Walker, grid: Grid, num_requests: int, *, off_trace: str, progress: Progress | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Walk a grid pair by pair, in chunks, and return one figure per setting.

    Parameters
    ----------
    walk : callable
        Walks a grid in one piece.
    grid : Grid
        n settings.
    num_requests : int
        R.
    off_trace : str
        Under ``stop`` only exact requests count.
    progress : callable, optional
        Called with the number of settings done in each chunk.

    Returns
    -------
    dict of ndarray (n,)
        The figures of :data:`asdsim.evaluate.figures.COLUMNS`; ``acceptance_histogram`` is (n, largest K + 1).
    """
    strict = walk(grid.strict)
    size = max(1, CHUNK_BYTES // max(1, num_requests * (4 * NUM_COUNTS + 16)))
    parts: list[dict[str, npt.NDArray[Any]]] = []
    for first in range(0, len(grid), size):
        chunk = grid[first : first + size]
        parts.append(figures_of(sums_of(walk(chunk), strict, off_trace), num_requests))
        if progress:
            progress(len(chunk))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def sweep_graph(
    graph: Graph,
    grid: Grid,
    *,
    off_trace: str = "stop",
    device: str = "auto",
    threads: int = 0,
    by: str = "auto",
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Walk a grid and return one figure per setting, by whatever is fastest; results do not depend on it.

    Parameters
    ----------
    graph : Graph
    grid : Grid
    off_trace, device, threads
        As for :func:`walk_grid`.
    by : {"auto", "pairs", "lanes", "boxes"}
        On a CPU: pair by pair, or, for a product of B, g and M, as :mod:`asdsim.walk.product` does.
    progress : callable, optional
        Called with the number of settings done.
    note : callable, optional
        Called with a line for the user where kernels have to be compiled first.

    Returns
    -------
    dict of ndarray (n,)
        As :func:`sweep`.
    """
    mode = off_trace_code(off_trace)
    chosen = choose_device(device)

    def walk(part: Grid) -> Walks:
        return walk_grid(graph, part, off_trace=off_trace, device=chosen, threads=threads)

    if chosen == "cuda":
        from .device import sum_on_device

        strict = walk(grid.strict)
        return figures_of(sum_on_device(graph, grid, mode, strict.counts[0], progress), graph.num_requests)
    if note and chosen == "cpu":
        from . import cpu

        if not is_cached(cpu, grid.reading):
            note(COMPILING)
    if by == "auto" and len(grid) * graph.num_steps < PAIRS_UP_TO:
        by = "pairs"
    axes = axes_of(grid) if by != "pairs" and graph.num_steps and len(grid) else None
    if axes is None:
        return sweep(walk, grid, graph.num_requests, off_trace=off_trace, progress=progress)
    strict = walk(grid.strict)
    sums = sum_product(
        graph, grid, axes, mode, strict.counts[0], threads=threads, by=by, compiled=chosen == "cpu",
        progress=progress, note=note,
    )  # fmt: skip
    return figures_of(sums, graph.num_requests)


def sums_of(walks: Walks, strict: Walks, off_trace: str) -> Sums:
    """Add up single walks over the requests that count."""
    exact = walks.exact
    keep = exact if off_trace == "stop" else np.ones_like(exact)
    # The baseline leaves the comparison with the request that left the trace.
    paired = (keep & strict.exact[0]).astype(np.int64)
    counts = walks.counts.astype(np.int64)
    same = np.einsum("nrc,nr->cn", counts, paired)[[columns.STEPS, columns.TOKENS]]
    picked = strict.counts[0][:, [columns.STEPS, columns.ACCEPTED, columns.TOKENS]].astype(np.int64)
    spent = np.where(keep, walks.spent, 0.0)
    total = np.zeros(len(spent))
    for one in spent.T:  # in the order of the requests, so that the sum is the same number wherever it is made
        total += one
    kept = keep.sum(axis=1)
    return Sums(
        counts=np.einsum("nrc,nr->cn", counts, keep.astype(np.int64)),
        histogram=walks.histogram,
        kept=kept,
        exact=exact.sum(axis=1),
        base=np.einsum("rc,nr->cn", picked, paired),
        same=same,
        spent=total,
        highest=np.where(kept > 0, spent.max(axis=1, initial=0.0), np.nan),
        p95=masked_quantile(walks.spent, keep, 0.95) if exact.shape[1] else np.full(len(spent), np.nan),
    )


def figures_of(sums: Sums, requests: int) -> dict[str, npt.NDArray[Any]]:
    """Return the figures of sums over a trace of a number of requests."""
    steps, tokens = sums.counts[columns.STEPS], sums.counts[columns.TOKENS]
    accepted, drafted = sums.counts[columns.ACCEPTED], sums.counts[columns.DRAFTED]
    strict_length = ratio(sums.base[2], sums.base[0])
    return {
        "requests": sums.kept,
        "exact_share": ratio(sums.exact, np.full(len(sums.exact), requests)),
        "mean_acceptance_length": ratio(tokens, steps),
        "accepted_per_proposal": ratio(accepted, steps),
        "draft_acceptance_rate": ratio(accepted, drafted),
        "strict_mean_acceptance_length": strict_length,
        "strict_accepted_per_proposal": ratio(sums.base[1], sums.base[0]),
        "acceptance_length_gain": ratio(sums.same[1], sums.same[0]) / strict_length - 1.0,
        "completion_tokens": tokens,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "relaxed_tokens": sums.counts[columns.RELAXED],
        "regret_spent_mean": ratio(sums.spent, sums.kept),
        "regret_spent_p95": sums.p95,
        "regret_spent_max": sums.highest,
        "rejected_by_gate": sums.counts[columns.BY_GATE],
        "rejected_by_budget": sums.counts[columns.BY_BUDGET],
        "rejected_by_cap": sums.counts[columns.BY_CAP],
        "acceptance_histogram": sums.histogram,
    }
