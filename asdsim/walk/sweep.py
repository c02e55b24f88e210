"""A grid of settings over a graph: choose a device, cut the grid into chunks, add up.

The per-pair results of a chunk are turned into rows before the next chunk starts, so memory does not grow with the grid
unless per-request results are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, unknown_name
from ..metrics import masked_quantile, ratio
from ..policy import STRICT, Grid
from ..trace.graph import Graph
from . import request as columns
from .request import ALIGNED, LEFT, NUM_COUNTS, RECORDED, STOP

OFF_TRACE = {"stop": STOP, "aligned": ALIGNED, "recorded": RECORDED}
DEVICES = ["auto", "cpu", "cuda", "reference", "python"]
CHUNK_BYTES = 64 << 20


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

        return Walks(*cuda.run(arrays, settings, mode, grid.semantics))
    from . import cpu

    if chosen == "python":
        return Walks(*cpu.run_with(cpu.python_kernel(grid.semantics), arrays, settings, mode, 1))
    return Walks(*cpu.run(arrays, settings, mode, grid.semantics, threads))


def off_trace_code(name: str) -> int:
    """Return the kernel's code of an ``off_trace`` name."""
    if name not in OFF_TRACE:
        raise unknown_name("off-trace mode", name, list(OFF_TRACE))
    return OFF_TRACE[name]


Walker = Callable[[Grid], Walks]


def sweep(
    walk: Walker, grid: Grid, num_requests: int, *, off_trace: str, progress: Callable[[int], None] | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Walk a grid in chunks and return one figure per setting for each column of :data:`asdsim.metrics.COLUMNS`.

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
        ``acceptance_histogram`` is (n, largest K + 1).
    """
    strict = walk(Grid.of([STRICT.with_semantics(grid.semantics)]))
    size = max(1, CHUNK_BYTES // max(1, num_requests * (4 * NUM_COUNTS + 16)))
    parts: list[dict[str, npt.NDArray[Any]]] = []
    for first in range(0, len(grid), size):
        chunk = grid[first : first + size]
        parts.append(_rows(walk(chunk), strict, off_trace))
        if progress:
            progress(len(chunk))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _rows(walks: Walks, strict: Walks, off_trace: str) -> dict[str, npt.NDArray[Any]]:
    exact = walks.exact
    number, requests = exact.shape
    keep = exact if off_trace == "stop" else np.ones_like(exact)
    totals = np.einsum("nrc,nr->nc", walks.counts.astype(np.int64), keep.astype(np.int64))
    # The baseline leaves the comparison with the request that left the trace.
    base = np.einsum("rc,nr->nc", strict.counts[0].astype(np.int64), (keep & strict.exact[0]).astype(np.int64))
    paired = keep & strict.exact[0]
    same = np.einsum("nrc,nr->nc", walks.counts.astype(np.int64), paired.astype(np.int64))
    steps, tokens = totals[:, columns.STEPS], totals[:, columns.TOKENS]
    accepted, drafted = totals[:, columns.ACCEPTED], totals[:, columns.DRAFTED]
    spent = np.where(keep, walks.spent, 0.0)
    kept = keep.sum(axis=1)
    strict_length = ratio(base[:, columns.TOKENS], base[:, columns.STEPS])
    return {
        "requests": kept,
        "exact_share": exact.mean(axis=1) if requests else np.full(number, np.nan),
        "mean_acceptance_length": ratio(tokens, steps),
        "accepted_per_proposal": ratio(accepted, steps),
        "draft_acceptance_rate": ratio(accepted, drafted),
        "strict_mean_acceptance_length": strict_length,
        "strict_accepted_per_proposal": ratio(base[:, columns.ACCEPTED], base[:, columns.STEPS]),
        "acceptance_length_gain": ratio(same[:, columns.TOKENS], same[:, columns.STEPS]) / strict_length - 1.0,
        "completion_tokens": tokens,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "relaxed_tokens": totals[:, columns.RELAXED],
        "regret_spent_mean": ratio(spent.sum(axis=1), kept),
        "regret_spent_p95": masked_quantile(walks.spent, keep, 0.95) if requests else np.full(number, np.nan),
        "regret_spent_max": np.where(kept > 0, spent.max(axis=1, initial=0.0), np.nan),
        "rejected_by_gate": totals[:, columns.BY_GATE],
        "rejected_by_budget": totals[:, columns.BY_BUDGET],
        "rejected_by_cap": totals[:, columns.BY_CAP],
        "acceptance_histogram": walks.histogram,
    }
