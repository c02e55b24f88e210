"""Sums over requests made on a CUDA device, as the host wants them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..rules.settings import Grid
from ..trace.graph import Graph
from . import boxes, cuda
from . import request as columns
from .product import Sums

QUANTILE = 0.95


def sum_on_device(
    graph: Graph,
    grid: Grid,
    mode: int,
    strict: npt.NDArray[np.int32],
    progress: Callable[[int], None] | None = None,
) -> Sums:
    """Walk a grid on the current CUDA device and add up over requests there; parameters as for ``sum_product``."""
    exact = (strict[:, columns.LEFT] == 0).astype(np.int32)
    picked = strict[:, [columns.STEPS, columns.ACCEPTED, columns.TOKENS]]
    paired = np.ascontiguousarray(np.concatenate([exact[:, None], picked], axis=1), np.int32)
    places = [QUANTILE * max(number - 1, 0) for number in range(graph.num_requests + 1)]
    above = np.array([max(0, number - 1 - math.floor(at)) for number, at in enumerate(places)], np.int64)
    settings = tuple(np.ascontiguousarray(axis, np.float64) for axis in (grid.budget, grid.gate, grid.cap))
    arrays = (
        graph.root, graph.limit, graph.drafted, graph.mm_ptr, graph.mm_pos, graph.mm_score, graph.mm_charge,
        graph.edge_next, graph.edge_accepted, graph.edge_tokens,
        graph.path_ptr, graph.path_step, graph.align_ptr, graph.align_step,
    )  # fmt: skip
    made = cuda.sum_settings(arrays, settings, mode, grid.reading, paired, above, progress)
    sums, kept = made.sums, made.sums[boxes.KEPT]
    none = kept == 0
    part = np.array([at - math.floor(at) for at in places])[kept]
    at_high = np.where(part > 0.0, made.at_high, made.at_low)
    p95 = made.at_low + part * (at_high - made.at_low)
    return Sums(
        counts=sums[: columns.NUM_COUNTS],
        histogram=np.ascontiguousarray(sums[boxes.HISTOGRAM :].T),
        kept=kept,
        exact=sums[boxes.EXACT],
        base=sums[[boxes.BASE_STEPS, boxes.BASE_ACCEPTED, boxes.BASE_TOKENS]],
        same=sums[[columns.STEPS, columns.TOKENS]] - sums[[boxes.LOST_STEPS, boxes.LOST_TOKENS]],
        spent=made.spent,
        highest=np.where(none, np.nan, made.highest),
        p95=np.where(none, np.nan, p95),
    )
