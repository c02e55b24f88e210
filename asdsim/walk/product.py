"""A product grid over a graph, aggregated: tiles of the grid on threads, in recorded order or by boxes.

A tile is a range of gates and a range of budgets under all caps. Its ledgers, one for each request and setting, are
what memory goes into, so tiles are cut to ``TILE_BYTES``; sums are per setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..provenance import own_cores
from ..rules.settings import Grid
from ..trace.graph import Graph, Graphs
from . import boxes, ledgers, recorded
from . import request as columns
from .axes import Axes
from .compiled import COMPILING, is_cached
from .prepared import TileArrays, whole_product
from .recorded import PathArrays, path_arrays
from .request import RECORDED
from .sums import GridSums, empty_sums, store, store_kernel, strict_columns

TILE_BYTES = 32 << 20
"""For the ledgers of all tiles in work."""

RECORDED_UP_TO = 200_000
"""Settings of a tile up to which, in recorded order, its own kernel beats boxes; measured, see tests/bench."""

TILES_PER_THREAD = 4
"""So that a slow tile leaves no thread idle for long."""

Kernel = Callable[..., None]

CORNERS_FROM = 30_000
"""Settings of a tile from which on boxes are added at their corners; measured, see tests/bench."""

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


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
    graph: Graphs,
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
    memory: float = 0.0,
) -> GridSums:
    """Walk a product grid and add up over requests.

    A graph in parts is gone through once for as many tiles as ``memory`` has room for the ledgers of; these are
    summarised when all requests have been walked, so the figures are those of a whole graph to the bit.

    Parameters
    ----------
    mode : int
        ``STOP``, ``ALIGNED`` or ``RECORDED``.
    strict : int32 (R, NUM_COUNTS)
        Counts of strict matching in the same mode.
    threads : int
        0 takes every core that this process may use; results do not depend on it.
    by : {"auto", "recorded", "boxes"}
        ``recorded`` falls back to boxes where the mode is another one, or an outcome leads to another step than the
        next recorded one.
    compiled : bool
        False runs the kernels' sources as Python.
    progress, note : callable, optional
        Called with the number of settings done in each tile; with a line where a kernel has to be compiled first.
    memory : float
        Bytes for the ledgers of a graph in parts.
    """
    workers = threads or len(own_cores())
    several = graph.num_parts > 1
    room = max(memory, TILE_BYTES) if several else TILE_BYTES
    cells = max(1, int(room) // (8 * max(1, graph.num_requests) * workers))
    if by == "auto":
        by = "recorded" if mode == RECORDED and min(cells, len(grid)) <= RECORDED_UP_TO else "boxes"
    in_order = by == "recorded" and mode == RECORDED
    if note and compiled and not is_cached(recorded if in_order else boxes, grid.reading):
        note(COMPILING)
    fixed = strict_columns(strict)
    add: Kernel = store_kernel() if compiled else store
    summarise: Kernel = ledgers.kernel() if compiled else ledgers.summarise_ledgers
    sums = empty_sums(len(grid), graph.max_draft)

    def prepare(rows: slice, part: Graph) -> Walker:
        path = path_arrays(part) if in_order else None
        module = boxes if path is None else recorded
        walk = module.kernel(grid.reading) if compiled else module.python_kernel(grid.reading)
        product = whole_product(part, axes, grid.reading, compiled=compiled)
        return Walker(part, product, mode, fixed[rows], path, walk)

    def close(tile: Tile, spent_of: Float64) -> int:
        settings = axes.settings(tile.gates, tile.budgets)
        total, highest, p95 = (np.zeros(settings.shape) for _ in range(3))
        summarise(spent_of, ledgers.scratch(graph.num_requests, *settings.shape[1:]), total, highest, p95)
        sums.spent[settings], sums.highest[settings], sums.p95[settings] = total, highest, p95
        return int(settings.size)

    with ThreadPoolExecutor(workers) as pool:
        at_once: Callable[..., Iterator[int]] = map if workers == 1 else pool.map
        if not several:
            walker = prepare(*next(graph.parts()))

            def do(tile: Tile) -> int:
                settings = axes.settings(tile.gates, tile.budgets)
                spent_of = np.empty((graph.num_requests, *settings.shape))
                walker.tile(tile, settings, add, sums, spent_of)
                return close(tile, spent_of)

            widest = len(axes.budgets) if walker.path is None else recorded.WIDTH
            for done in at_once(do, tiles(axes, cells, widest, TILES_PER_THREAD * workers if workers > 1 else 1)):
                if progress:
                    progress(done)
            return sums
        widest = recorded.WIDTH if in_order else len(axes.budgets)
        waiting = list(tiles(axes, cells, widest, TILES_PER_THREAD * workers))
        while waiting:
            sizes = np.cumsum([8 * graph.num_requests * tile.size * len(axes.caps) for tile in waiting])
            fit = max(1, int(np.searchsorted(sizes, room, side="right")))
            now, waiting = waiting[:fit], waiting[fit:]
            where = [axes.settings(tile.gates, tile.budgets) for tile in now]
            ledgers_of = [np.empty((graph.num_requests, *settings.shape)) for settings in where]
            for rows, part in graph.parts():
                walker = prepare(rows, part)
                jobs = zip(now, where, (spent_of[rows] for spent_of in ledgers_of), strict=True)
                for _ in at_once(lambda job, w=walker: w.tile(job[0], job[1], add, sums, job[2]), jobs):
                    pass
            for done in at_once(close, now, ledgers_of):
                if progress:
                    progress(done)
    return sums


@dataclass(frozen=True)
class Walker:
    """What all tiles share; ``path`` says that they are walked in recorded order, else by boxes; ``walk`` is how."""

    graph: Graph
    product: TileArrays
    mode: int
    strict: npt.NDArray[np.int32]
    path: PathArrays | None
    walk: Kernel

    def tile(self, tile: Tile, settings: Int64, add: Kernel, sums: GridSums, spent_of: Float64) -> None:
        """Walk a tile, add to the sums of its settings, and fill its ledgers, float64 (R, gates, caps, budgets)."""
        graph, largest = self.graph, self.graph.max_draft
        arrays = self.product.cut(tile.gates, tile.budgets)
        corners = self.path is None and settings.size >= CORNERS_FROM
        if self.path is None:
            stack = boxes.stack_for(settings.size, largest, int(graph.limit.max(initial=1)))
        else:
            scratch = recorded.scratch(largest, int(np.diff(graph.path_ptr).max(initial=1)))
        for requests in _blocks(graph.limit, largest):
            shape = [side + corners for side in settings.shape]
            if self.path is None:
                tile_sums = np.zeros((*shape, columns.HISTOGRAM + largest + 1), np.int32)
                self.walk(graph.arrays, arrays, requests, self.strict, self.mode, stack, corners, tile_sums, spent_of)
            else:
                by_figure = np.zeros((*shape[:2], columns.HISTOGRAM + largest + 1, shape[2]), np.int32)
                self.walk(graph.arrays, arrays, self.path, requests, self.strict, *scratch, by_figure, spent_of)
                tile_sums = by_figure.transpose(0, 1, 3, 2)
            add(tile_sums, corners, settings, sums)


def _blocks(limit: npt.NDArray[np.int32], largest: int) -> Iterator[Int64]:
    """Cut the requests where 32-bit sums could run over."""
    most = np.maximum(limit.astype(np.int64), 1) * max(1, largest)  # nothing that is counted exceeds it
    rest = np.arange(len(limit))
    while len(rest):
        fit = max(1, int(np.searchsorted(np.cumsum(most[rest]), 1 << 31)))
        yield rest[:fit]
        rest = rest[fit:]
