"""Which edges a grid needs and the graph lacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..rules.settings import Grid
from ..trace.graph import Graph
from .request import STEPS
from .sweep import settings_at_once, walk_grid


@dataclass(frozen=True)
class Demand:
    """Edges at which walks leave the trace.

    Attributes
    ----------
    edges : int64 (n,)
        Missing edges, ascending.
    weights : int64 (n,)
        Settings whose walk of that request stops there.
    exact : int64 (R,)
        Settings whose walk of each request is exact.
    steps : int64 (R,)
        Verifications that the walks of each request took, over all settings.
    """

    edges: npt.NDArray[np.int64]
    weights: npt.NDArray[np.int64]
    exact: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]


def demand_of(graph: Graph, grids: list[Grid], *, device: str = "auto", threads: int = 0) -> Demand:
    """Walk the grids and collect the edges that were needed and not captured."""
    weight: dict[int, int] = {}
    exact = np.zeros(graph.num_requests, np.int64)
    steps = np.zeros(graph.num_requests, np.int64)
    for grid in grids:
        size = settings_at_once(graph.num_requests)
        for first in range(0, len(grid), size):
            walks = walk_grid(graph, grid[first : first + size], device=device, threads=threads)
            exact += walks.exact.sum(axis=0)
            steps += walks.counts[:, :, STEPS].sum(axis=0, dtype=np.int64)
            edges, counts = np.unique(walks.edge[~walks.exact], return_counts=True)
            for edge, count in zip(edges.tolist(), counts.tolist(), strict=True):
                weight[edge] = weight.get(edge, 0) + count
    order = sorted(weight)
    return Demand(np.array(order, np.int64), np.array([weight[edge] for edge in order], np.int64), exact, steps)
