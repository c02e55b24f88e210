"""Sums over requests made on a CUDA device, as the host wants them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..rules.settings import Grid
from ..trace.graph import Graph
from . import cuda
from . import request as columns
from .ledgers import between, place_of
from .sums import GridSums, strict_columns


def sum_on_device(
    graph: Graph,
    grid: Grid,
    mode: int,
    strict: npt.NDArray[np.int32],
    progress: Callable[[int], None] | None = None,
) -> GridSums:
    """Walk a grid on the current CUDA device and add up over requests there; parameters as for ``sum_product``."""
    places = [place_of(number) for number in range(graph.num_requests + 1)]
    above = np.array([max(0, number - 1 - below) for number, (below, _) in enumerate(places)], np.int64)
    settings = tuple(np.ascontiguousarray(axis, np.float64) for axis in (grid.budget, grid.gate, grid.cap))
    totals = cuda.sum_settings(graph.arrays, settings, mode, grid.reading, strict_columns(strict), above, progress)
    sums, kept = totals.sums, totals.sums[columns.KEPT]
    none = kept == 0
    fraction = np.array([fraction for _, fraction in places])[kept]
    p95 = between(totals.at_low, np.where(fraction > 0.0, totals.at_high, totals.at_low), fraction)
    return GridSums(
        counts=sums[: columns.NUM_COUNTS],
        histogram=np.ascontiguousarray(sums[columns.HISTOGRAM :].T),
        kept=kept,
        exact=sums[columns.EXACT],
        paired=sums[columns.PAIRED],
        base=sums[[columns.BASE_STEPS, columns.BASE_ACCEPTED, columns.BASE_TOKENS]],
        same=sums[[columns.STEPS, columns.TOKENS]] - sums[[columns.LOST_STEPS, columns.LOST_TOKENS]],
        spent=totals.spent,
        highest=np.where(none, np.nan, totals.highest),
        p95=np.where(none, np.nan, p95),
    )
