"""A grid of settings as the product of three sorted axes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..rules.settings import Grid

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Axes:
    """Budgets, gates and caps, ascending, and where each combination stands in the grid.

    Attributes
    ----------
    budgets, gates, caps : float64
    budget_at, gate_at, cap_at : int64
        What the budget, gate and cap add to the index of a setting in the grid, for grids made by ``Grid.product``.
    index : int64 (gates, caps, budgets) or None
        That index, for others.
    """

    budgets: Float64
    gates: Float64
    caps: Float64
    budget_at: Int64
    gate_at: Int64
    cap_at: Int64
    index: Int64 | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(gates, caps, budgets)."""
        return len(self.gates), len(self.caps), len(self.budgets)

    def settings(self, gates: slice, budgets: slice) -> Int64:
        """Return the indices in the grid of a part of the product, int64 (gates, caps, budgets)."""
        if self.index is not None:
            return self.index[gates, :, budgets]
        whole: Int64 = (
            self.gate_at[gates][:, None, None] + self.cap_at[None, :, None] + self.budget_at[budgets][None, None, :]
        )
        return whole


def axes_of(grid: Grid) -> Axes | None:
    """Return the axes of a grid that is a product, None for one that is not (or names a setting twice)."""
    if grid.axes and "B" in grid.axes:
        sizes = [len(grid.axes[name]) for name in ("B", "g", "M")]
        if len(grid) == sizes[0] * sizes[1] * sizes[2]:
            steps = (sizes[1] * sizes[2], sizes[2], 1)
            axes, places = [], []
            for name, step in zip(("B", "g", "M"), steps, strict=True):
                values = np.array(grid.axes[name], np.float64)
                order = np.argsort(values, kind="stable")
                axes.append(values[order])
                places.append(order.astype(np.int64) * step)
            return Axes(axes[0], axes[1], axes[2], places[0], places[1], places[2])
    unique = [np.unique(values, return_inverse=True) for values in (grid.budget, grid.gate, grid.cap)]
    (budgets, b), (gates, g), (caps, c) = unique
    shape = len(gates), len(caps), len(budgets)
    if shape[0] * shape[1] * shape[2] != len(grid):
        return None
    index = np.full(len(grid), -1, np.int64)
    index[np.ravel_multi_index((g, c, b), shape)] = np.arange(len(grid))
    if (index < 0).any():
        return None
    none = np.zeros(0, np.int64)
    return Axes(budgets, gates, caps, none, none, none, index.reshape(shape))
