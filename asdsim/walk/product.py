"""A product grid over a graph, aggregated: tiles of the grid on threads, in recorded order or by boxes.

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

from ..rules.settings import Grid
from ..trace.graph import Graph
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
) -> GridSums:
    """Walk a product grid and add up over requests.

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
    """
    workers = threads or len(os.sched_getaffinity(0))
    cells = max(1, TILE_BYTES // (8 * max(1, graph.num_requests) * workers))
    if by == "auto":
        by = "recorded" if mode == RECORDED and min(cells, len(grid)) <= RECORDED_UP_TO else "boxes"
    path = path_arrays(graph) if by == "recorded" and mode == RECORDED else None
    module = boxes if path is None else recorded
    if note and compiled and not is_cached(module, grid.reading):
        note(COMPILING)
    walker = Walker(
        graph, whole_product(graph, axes, grid.reading, compiled=compiled), mode, strict_columns(strict), path
    )
    walk: Kernel = module.kernel(grid.reading) if compiled else module.python_kernel(grid.reading)
    add: Kernel = store_kernel() if compiled else store
    summarise: Kernel = ledgers.kernel() if compiled else ledgers.summarise_ledgers
    sums = empty_sums(len(grid), graph.max_draft)

    def do(tile: Tile) -> int:
        settings = axes.settings(tile.gates, tile.budgets)
        spent_of = walker.tile(tile, settings, walk, add, sums)
        total, highest, p95 = (np.zeros(settings.shape) for _ in range(3))
        summarise(spent_of, ledgers.scratch(graph.num_requests, *settings.shape[1:]), total, highest, p95)
        sums.spent[settings], sums.highest[settings], sums.p95[settings] = total, highest, p95
        return settings.size

    widest = len(axes.budgets) if path is None else recorded.WIDTH
    parts = list(tiles(axes, cells, widest, TILES_PER_THREAD * workers if workers > 1 else 1))
    if workers == 1 or len(parts) == 1:
        for tile in parts:
            done = do(tile)
            if progress:
                progress(done)
        return sums
    with ThreadPoolExecutor(workers) as pool:
        for done in pool.map(do, parts):
            if progress:
                progress(done)
    return sums


@dataclass(frozen=True)
class Walker:
    """What all tiles share; ``path`` says that they are walked in recorded order, else by boxes."""

    graph: Graph
    product: TileArrays
    mode: int
    strict: npt.NDArray[np.int32]
    path: PathArrays | None

    def tile(self, tile: Tile, settings: Int64, walk: Kernel, add: Kernel, sums: GridSums) -> Float64:
        """Walk a tile, add to the sums of its settings, and return its ledgers, float64 (R, gates, caps, budgets)."""
        graph, largest = self.graph, self.graph.max_draft
        arrays = self.product.cut(tile.gates, tile.budgets)
        spent_of = np.empty((graph.num_requests, *settings.shape))
        corners = self.path is None and settings.size >= CORNERS_FROM
        if self.path is None:
            stack = boxes.stack_for(settings.size, largest, int(graph.limit.max(initial=1)))
        else:
            scratch = recorded.scratch(largest, int(np.diff(graph.path_ptr).max(initial=1)))
        for requests in _blocks(graph.limit, largest):
            shape = [side + corners for side in settings.shape]
            if self.path is None:
                tile_sums = np.zeros((*shape, columns.HISTOGRAM + largest + 1), np.int32)
                walk(graph.arrays, arrays, requests, self.strict, self.mode, stack, corners, tile_sums, spent_of)
            else:
                by_figure = np.zeros((*shape[:2], columns.HISTOGRAM + largest + 1, shape[2]), np.int32)
                walk(graph.arrays, arrays, self.path, requests, self.strict, *scratch, by_figure, spent_of)
                tile_sums = by_figure.transpose(0, 1, 3, 2)
            add(tile_sums, corners, settings, sums)
        return spent_of


def _blocks(limit: npt.NDArray[np.int32], largest: int) -> Iterator[Int64]:
    """Cut the requests where 32-bit sums could run over."""
    most = np.maximum(limit.astype(np.int64), 1) * max(1, largest)  # nothing that is counted exceeds it
    rest = np.arange(len(limit))
    while len(rest):
        fit = max(1, int(np.searchsorted(np.cumsum(most[rest]), 1 << 31)))
        yield rest[:fit]
        rest = rest[fit:]
