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
from ..stats import ratio
from ..trace.graph import Graph, Graphs
from . import request as columns
from .axes import axes_of
from .compiled import COMPILING, is_cached
from .ledgers import percentile
from .off_trace import off_trace_code
from .product import sum_product
from .request import LEFT, NUM_COUNTS
from .sums import GridSums

DEVICES = ["auto", "cpu", "cuda", "reference", "python"]
CHUNK_BYTES = 64 << 20
PAIR_BYTES = 4 * NUM_COUNTS + 8 + 8
"""Results of one walk: int32 counts, a ledger and an edge."""

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


def choose_device(device: str) -> str:
    """Resolve ``auto`` to CUDA where a GPU and its toolkit are available, else to CPU.

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


def walk_grid(graph: Graphs, grid: Grid, *, off_trace: str = "stop", device: str = "auto", threads: int = 0) -> Walks:
    """Walk every request under every setting; results are for all at once, the graph may come part by part.

    Raises
    ------
    UsageError
        On an unknown device or ``off_trace``.
    """
    mode = off_trace_code(off_trace)
    settings = tuple(np.ascontiguousarray(axis, np.float64) for axis in (grid.budget, grid.gate, grid.cap))
    chosen = choose_device(device)
    if graph.num_parts == 1:
        return next(_walk(part, settings, mode, grid, chosen, threads) for _, part in graph.parts())
    number = len(grid)
    whole = Walks(
        np.zeros((number, graph.num_requests, NUM_COUNTS), np.int32), np.zeros((number, graph.num_requests)),
        np.full((number, graph.num_requests), -1, np.int64), np.zeros((number, graph.max_draft + 1), np.int64),
    )  # fmt: skip
    before = 0
    for rows, part in graph.parts():
        walks = _walk(part, settings, mode, grid, chosen, threads)
        whole.counts[:, rows], whole.spent[:, rows] = walks.counts, walks.spent
        whole.edge[:, rows] = np.where(walks.edge >= 0, walks.edge + before, -1)
        whole.histogram[:, : walks.histogram.shape[1]] += walks.histogram
        before += len(part.edge_next)
    return whole


def _walk(
    graph: Graph, settings: tuple[npt.NDArray[np.float64], ...], mode: int, grid: Grid, chosen: str, threads: int
) -> Walks:
    arrays = graph.arrays
    if chosen == "cuda":
        from . import cuda

        return Walks(*cuda.run(arrays, settings, mode, grid.reading))
    from . import cpu

    if chosen == "python":
        return Walks(*cpu.run_with(cpu.python_kernel(grid.reading), arrays, settings, mode, 1))
    return Walks(*cpu.run(arrays, settings, mode, grid.reading, threads))


def settings_at_once(requests: int) -> int:
    """Return how many settings to walk in one piece: their results for each request fill ``CHUNK_BYTES``."""
    return max(1, CHUNK_BYTES // max(1, requests * PAIR_BYTES))


Walker = Callable[[Grid], Walks]
Progress = Callable[[int], None]


def sweep(
    walk: Walker,
    grid: Grid,
    num_requests: int,
    *,
    off_trace: str,
    strict: Walks | None = None,
    progress: Progress | None = None,
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
    strict : Walks, optional
        The baseline, one setting; by default strict matching by ``walk``.
    progress : callable, optional
        Called with the number of settings done in each chunk.

    Returns
    -------
    dict of ndarray (n,)
        The figures of :data:`asdsim.evaluate.figures.COLUMNS`; ``acceptance_histogram`` is (n, largest K + 1).
    """
    strict = walk(grid.strict) if strict is None else strict
    size = settings_at_once(num_requests)
    chunks: list[dict[str, npt.NDArray[Any]]] = []
    for first in range(0, len(grid), size):
        chunk = grid[first : first + size]
        chunks.append(figures_of(sums_of(walk(chunk), strict, off_trace), num_requests))
        if progress:
            progress(len(chunk))
    return {name: np.concatenate([figures[name] for figures in chunks]) for name in chunks[0]}


def sweep_graph(
    graph: Graphs,
    grid: Grid,
    *,
    off_trace: str = "stop",
    device: str = "auto",
    threads: int = 0,
    by: str = "auto",
    strict: Walks | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    memory: float = 0.0,
) -> dict[str, npt.NDArray[Any]]:
    """Walk a grid and return one figure per setting, by whatever is fastest; results do not depend on it.

    Parameters
    ----------
    graph : Graphs
    grid : Grid
    off_trace, device, threads
        As for :func:`walk_grid`.
    by : {"auto", "pairs", "recorded", "boxes"}
        On a CPU: pair by pair, or, for a product of B, g and M, as :mod:`asdsim.walk.product` does.
    strict : Walks, optional
        The baseline, one setting in the same mode; by default strict matching on this graph.
    progress : callable, optional
        Called with the number of settings done.
    note : callable, optional
        Called with a line for the user where kernels have to be compiled first.
    memory : float
        Bytes that the ledgers of all requests may take where the graph comes in parts; the fewer, the more often it is
        gone through.

    Returns
    -------
    dict of ndarray (n,)
        As :func:`sweep`.
    """
    mode = off_trace_code(off_trace)
    chosen = choose_device(device)

    def walk(settings: Grid) -> Walks:
        return walk_grid(graph, settings, off_trace=off_trace, device=chosen, threads=threads)

    if note and chosen == "cpu":
        from . import cpu

        if not is_cached(cpu, grid.reading):
            note(COMPILING)
    if by == "auto" and len(grid) * graph.num_steps < PAIRS_UP_TO:
        by = "pairs"
    if chosen == "cuda" and graph.num_parts > 1:
        by = "pairs"  # sums made on a device take the whole graph
    axes = axes_of(grid) if by != "pairs" and graph.num_steps and len(grid) else None
    if axes is None and (chosen != "cuda" or graph.num_parts > 1):
        return sweep(walk, grid, graph.num_requests, off_trace=off_trace, strict=strict, progress=progress)
    base = walk(grid.strict) if strict is None else strict

    if axes is None or chosen == "cuda":
        from .device import sum_on_device

        assert isinstance(graph, Graph)
        sums = sum_on_device(graph, grid, mode, base.counts[0], progress)
    else:
        sums = sum_product(
            graph, grid, axes, mode, base.counts[0], threads=threads, by=by, compiled=chosen == "cpu",
            progress=progress, note=note, memory=memory,
        )  # fmt: skip
    return figures_of(sums, graph.num_requests)


def sums_of(walks: Walks, strict: Walks, off_trace: str) -> GridSums:
    """Add up single walks over the requests that count."""
    return with_ledgers(*counted(walks, strict, off_trace))


def counted(walks: Walks, strict: Walks, off_trace: str) -> tuple[GridSums, npt.NDArray[np.float64]]:
    """Add up what is counted of single walks, and return it with the ledger of each: sums of parts of a trace add up.

    Returns
    -------
    GridSums
        Without ``spent``, ``highest`` and ``p95``.
    float64 (n, R)
        Ledgers; -1 where a request does not count.
    """
    exact = walks.exact
    keep = exact if off_trace == "stop" else np.ones_like(exact)
    # A request that left the trace leaves the baseline too.
    paired = (keep & strict.exact[0]).astype(np.int64)
    counts = walks.counts.astype(np.int64)
    same = np.einsum("nrc,nr->cn", counts, paired)[[columns.STEPS, columns.TOKENS]]
    picked = strict.counts[0][:, [columns.STEPS, columns.ACCEPTED, columns.TOKENS]].astype(np.int64)
    none = np.full(len(counts), np.nan)
    sums = GridSums(
        counts=np.einsum("nrc,nr->cn", counts, keep.astype(np.int64)),
        histogram=walks.histogram,
        kept=keep.sum(axis=1),
        exact=exact.sum(axis=1),
        paired=paired.sum(axis=1),
        base=np.einsum("rc,nr->cn", picked, paired),
        same=same,
        spent=none,
        highest=none,
        p95=none,
    )
    return sums, np.where(keep, walks.spent, -1.0)


def with_ledgers(sums: GridSums, spent: npt.NDArray[np.float64]) -> GridSums:
    """Return sums of :func:`counted` with what the ledgers of all requests, in their order, say together."""
    keep = spent >= 0.0
    paid = np.where(keep, spent, 0.0)
    total = np.zeros(len(spent))
    for ledger in paid.T:  # in the order of the requests, so that the sum is the same number wherever it is made
        total += ledger
    highest = np.where(sums.kept > 0, paid.max(axis=1, initial=0.0), np.nan)
    return sums._replace(spent=total, highest=highest, p95=percentile(spent, keep))


def figures_of(sums: GridSums, requests: int) -> dict[str, npt.NDArray[Any]]:
    """Return the figures of sums over a trace of a number of requests.

    Unless the strict walk of every request of a row is known, nothing of strict matching is known of that row; and the
    gain of a row that has lost requests is none.
    """
    steps, tokens = sums.counts[columns.STEPS], sums.counts[columns.TOKENS]
    accepted, drafted = sums.counts[columns.ACCEPTED], sums.counts[columns.DRAFTED]
    exact_share = ratio(sums.exact, np.full(len(sums.exact), requests))
    matched = sums.paired == sums.kept
    strict_length = np.where(matched, ratio(sums.base[2], sums.base[0]), np.nan)
    gain = ratio(sums.same[1], sums.same[0]) / strict_length - 1.0
    return {
        "requests": sums.kept,
        "exact": exact_share == 1.0,
        "exact_share": exact_share,
        "paired_requests": sums.paired,
        "mean_acceptance_length": ratio(tokens, steps),
        "accepted_per_proposal": ratio(accepted, steps),
        "draft_acceptance_rate": ratio(accepted, drafted),
        "strict_mean_acceptance_length": strict_length,
        "strict_accepted_per_proposal": np.where(matched, ratio(sums.base[1], sums.base[0]), np.nan),
        "acceptance_length_gain": np.where(sums.kept == requests, gain, np.nan),
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
