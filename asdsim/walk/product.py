"""A product grid over a graph, aggregated: tiles of the grid on threads, by lanes or by boxes.

A tile is a range of gates and a range of budgets under all caps. Its ledgers, one for each request and setting, are
what memory goes into, so tiles are cut to ``TILE_BYTES``; sums are per setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..rules.asd import Reading
from ..rules.settings import Grid
from ..trace.graph import Graph
from . import boxes, lanes, spread
from . import request as columns
from .axes import Axes
from .compiled import COMPILING, is_cached
from .prepared import Prepared, cap_limits, cap_ranks, gate_ranks, prepare, running_ranks
from .request import NUM_COUNTS, RECORDED, STOP

TILE_BYTES = 32 << 20
"""For the ledgers of all tiles in work."""

LANES_UP_TO = 200_000
"""Settings of a tile up to which, in recorded order, lanes beat boxes; measured, see tests/bench."""

CORNERS_FROM = 30_000
"""Settings of a tile from which on boxes are added at their corners; measured, see tests/bench."""

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass
class Sums:
    """Sums over the requests that count, for n settings; ``Sums.empty`` tells the shapes.

    Attributes
    ----------
    counts : int64 (NUM_COUNTS, n)
        Rows as named in :mod:`asdsim.walk.request`; ``LEFT`` is not filled.
    histogram : int64 (n, largest K + 1)
    kept, exact : int64 (n,)
        Requests that count, and requests whose walk met captured steps only.
    base : int64 (3, n)
        Steps, accepted draft tokens and tokens of strict matching, over the requests that count and whose strict walk
        is exact.
    same : int64 (2, n)
        Steps and tokens of the setting on the same requests.
    spent, highest, p95 : float64 (n,)
        Sum, maximum and 95th percentile of the ledgers, in logits.
    """

    counts: Int64
    histogram: Int64
    kept: Int64
    exact: Int64
    base: Int64
    same: Int64
    spent: Float64
    highest: Float64
    p95: Float64

    @classmethod
    def empty(cls, settings: int, largest: int) -> Sums:
        """Return room for the sums of a number of settings."""
        n = settings
        return cls(
            counts=np.zeros((NUM_COUNTS, n), np.int64),
            histogram=np.zeros((n, largest + 1), np.int64),
            kept=np.zeros(n, np.int64),
            exact=np.zeros(n, np.int64),
            base=np.zeros((3, n), np.int64),
            same=np.zeros((2, n), np.int64),
            spent=np.full(n, np.nan),
            highest=np.full(n, np.nan),
            p95=np.full(n, np.nan),
        )


@dataclass(frozen=True)
class Tile:
    """A range of gates and a range of budgets."""

    gates: slice
    budgets: slice

    @property
    def size(self) -> int:
        """Gates times budgets."""
        return int((self.gates.stop - self.gates.start) * (self.budgets.stop - self.budgets.start))


def tiles(axes: Axes, cells: int, widest: int, parts: int) -> Iterator[Tile]:
    """Cut the product into at least ``parts`` tiles (where it can be) of at most ``cells`` settings, or one gate each.

    ``widest`` is the largest number of budgets of a tile.
    """
    num_gates, num_caps, num_budgets = axes.shape
    width = max(1, min(widest, num_budgets, cells // num_caps))
    pieces = -(-num_budgets // width)
    width = -(-num_budgets // pieces)
    height = max(1, min(cells // (num_caps * width), -(-num_gates * pieces // parts)))
    for b in range(0, num_budgets, width):
        for g in range(0, num_gates, height):
            yield Tile(slice(g, min(g + height, num_gates)), slice(b, min(b + width, num_budgets)))


def sum_product(
    graph: Graph,
    grid: Grid,
    axes: Axes,
    mode: int,
    strict: npt.NDArray[np.int32],
    *,
    threads: int = 0,
    by: str = "auto",
    compiled: bool = True,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Sums:
    """Walk a product grid and add up over requests.

    Parameters
    ----------
    mode : int
        ``STOP``, ``ALIGNED`` or ``RECORDED``.
    strict : int32 (R, NUM_COUNTS)
        Counts of strict matching in the same mode.
    threads : int
        0 takes every core that this process may use; results do not depend on it.
    by : {"auto", "lanes", "boxes"}
        ``lanes`` needs recorded order with one next step for all outcomes.
    compiled : bool
        False runs the kernels' sources as Python.
    progress, note : callable, optional
        Called with the number of settings done in each tile; with a line where a kernel has to be compiled first.
    """
    workers = threads or len(os.sched_getaffinity(0))
    ready = prepare(graph)
    cells = max(1, TILE_BYTES // (8 * max(1, graph.num_requests) * workers))
    num_gates, num_caps, num_budgets = axes.shape
    if by == "auto":
        in_order = mode == RECORDED and ready.in_order
        by = "lanes" if in_order and min(cells, len(grid)) <= LANES_UP_TO else "boxes"
    out = Sums.empty(len(grid), graph.max_draft)
    work = _Lanes if by == "lanes" else _Boxes
    if note and compiled and not is_cached(work.module, grid.reading):
        note(COMPILING)
    walker = work(ready, grid.reading, axes, mode, strict, compiled)
    spread_kernel: Callable[..., None] = spread.kernel() if compiled else spread.spread

    def one(tile: Tile) -> int:
        at = axes.settings(tile.gates, tile.budgets)
        shape = at.shape
        spent_of, row_of = walker.tile(tile, out, at)
        total, highest, p95 = (np.zeros(shape) for _ in range(3))
        scratch = spread.scratch(graph.num_requests, *shape[1:])
        spread_kernel(spent_of, row_of, 0.95, *scratch, total, highest, p95)
        out.spent[at], out.highest[at], out.p95[at] = total, highest, p95
        return at.size

    parts = list(tiles(axes, cells, walker.widest, 4 * workers if workers > 1 else 1))
    if workers == 1 or len(parts) == 1:
        for tile in parts:
            done = one(tile)
            if progress:
                progress(done)
        return out
    with ThreadPoolExecutor(workers) as pool:
        for done in pool.map(one, parts):
            if progress:
                progress(done)
    return out


class _Lanes:
    """Recorded order; see :mod:`asdsim.walk.lanes`."""

    module, widest = lanes, lanes.WIDTH

    def __init__(
        self, ready: Prepared, reading: Reading, axes: Axes, mode: int, strict: npt.NDArray[np.int32], compiled: bool
    ) -> None:
        del mode  # recorded
        self.ready, self.axes, self.strict = ready, axes, strict
        self.kernel = lanes.kernel(reading) if compiled else lanes.python_kernel(reading)
        self.store = lanes.store_kernel() if compiled else lanes.store
        self.gate_from = running_ranks(ready, gate_ranks(ready, axes.gates, reading, compiled=compiled))
        self.cap_most = cap_limits(axes.caps, ready.graph.max_draft, reading)

    def tile(self, tile: Tile, out: Sums, at: Int64) -> tuple[Float64, npt.NDArray[np.int32]]:
        ready, graph = self.ready, self.ready.graph
        height, num_caps, width = at.shape
        largest = graph.max_draft
        figures = lanes.HISTOGRAM + largest + 1
        spent_of = np.empty((graph.num_requests, *at.shape))
        row_of = np.zeros((graph.num_requests, height), np.int32)
        paired = self.strict[:, columns.LEFT] == 0
        longest = int(np.diff(graph.path_ptr).max(initial=1))
        scratch = lanes.scratch(len(self.axes.gates), num_caps, largest, longest)
        for requests, counted in _blocks(graph.limit, largest, paired):
            sums = np.zeros((height, num_caps, figures, width), np.int32)
            self.kernel(
                requests, tile.gates.start, tile.gates.stop, self.axes.budgets[tile.budgets], self.axes.gates,
                self.axes.caps, self.cap_most, self.gate_from, graph.limit, graph.path_ptr, graph.path_step,
                ready.plain, graph.drafted, graph.mm_ptr, graph.mm_pos, graph.mm_score, ready.before, ready.charge,
                graph.edge_next, ready.edge_accepted, graph.edge_tokens, ready.edge_word, largest,
                *scratch, sums, spent_of, row_of,
            )  # fmt: skip
            self.store(sums, at, counted, out.counts, out.histogram, out.exact, out.same)
        out.kept[at] = graph.num_requests
        strict = self.strict[paired][:, [columns.STEPS, columns.ACCEPTED, columns.TOKENS]].sum(axis=0)
        for row, number in zip(out.base, strict, strict=True):
            row[at] = number
        return spent_of, row_of


class _Boxes:
    """Any graph, any mode; see :mod:`asdsim.walk.boxes`."""

    module, widest = boxes, 1 << 30

    def __init__(
        self, ready: Prepared, reading: Reading, axes: Axes, mode: int, strict: npt.NDArray[np.int32], compiled: bool
    ) -> None:
        self.ready, self.axes, self.mode = ready, axes, mode
        self.kernel = boxes.kernel(reading) if compiled else boxes.python_kernel(reading)
        self.store = boxes.store_kernel() if compiled else boxes.store
        self.gate_from = gate_ranks(ready, axes.gates, reading, compiled=compiled)
        self.cap_from = cap_ranks(axes.caps, ready.graph.max_draft, reading)
        exact = (strict[:, columns.LEFT] == 0).astype(np.int32)
        picked = strict[:, [columns.STEPS, columns.ACCEPTED, columns.TOKENS]]
        self.strict = np.ascontiguousarray(np.concatenate([exact[:, None], picked], axis=1), np.int32)

    def tile(self, tile: Tile, out: Sums, at: Int64) -> tuple[Float64, npt.NDArray[np.int32]]:
        ready, graph, figures = self.ready, self.ready.graph, boxes.HISTOGRAM + self.ready.graph.max_draft + 1
        largest = graph.max_draft
        height, num_caps, width = at.shape
        spent_of = np.empty((graph.num_requests, *at.shape))
        row_of = np.broadcast_to(np.arange(height, dtype=np.int32), (graph.num_requests, height)).copy()
        corners = at.size >= CORNERS_FROM
        room = boxes.room_for(at.size, largest, int(graph.limit.max(initial=1)))
        boxed, spent_at, total_at = np.zeros((room, boxes.BOX_ROWS), np.int64), np.zeros(room), np.zeros(room)
        counts = np.zeros((room + 1, figures), np.int32)
        # The kernel sees the gates of this tile only.
        ranks = np.clip(self.gate_from - tile.gates.start, 0, height)
        for requests, _ in _blocks(graph.limit, largest, np.ones(graph.num_requests, bool)):
            sums = np.zeros((height + corners, num_caps + corners, width + corners, figures), np.int32)
            self.kernel(
                requests, self.axes.budgets[tile.budgets], self.axes.gates[tile.gates], self.axes.caps,
                self.cap_from, ranks, self.mode, self.strict, graph.root, graph.limit, graph.drafted, graph.mm_ptr,
                graph.mm_pos, graph.mm_score, ready.before, ready.charge, graph.edge_next, graph.edge_accepted,
                graph.edge_tokens, graph.path_ptr, graph.path_step, graph.align_ptr, graph.align_step,
                boxed, spent_at, total_at, counts, corners, sums, spent_of,
            )  # fmt: skip
            self.store(sums, corners, at, out.counts, out.histogram, out.kept, out.exact, out.base, out.same)
        return spent_of, row_of


def _blocks(limit: npt.NDArray[np.int32], largest: int, paired: npt.NDArray[np.bool_]) -> Iterator[tuple[Int64, bool]]:
    """Cut the requests where 32-bit sums could run over, those that are ``paired`` first; yield (requests, paired)."""
    most = np.maximum(limit.astype(np.int64), 1) * max(1, largest)  # nothing that is counted exceeds it
    for flag in (True, False):
        some = np.flatnonzero(paired == flag)
        while len(some):
            fit = max(1, int(np.searchsorted(np.cumsum(most[some]), 1 << 31)))
            yield some[:fit], flag
            some = some[fit:]


__all__ = ["STOP", "Sums", "Tile", "sum_product", "tiles"]
