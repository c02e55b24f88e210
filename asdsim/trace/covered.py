"""How a manifest names the grids that a trace is covered for."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from ..rules.settings import Grid, layout_of, rule_grids
from .stored import Source

VARIED = ("regret", "value", "ledger", "K", "draft_threshold", "draft_stop")
"""Names of :meth:`asdsim.rules.settings.Grid.product` that an entry may hold, each if it is not as usual."""


def grid_entry(grid: Grid, faithful: bool) -> dict[str, Any]:
    """Return how a manifest names a covered grid."""
    if grid.layout.rule != "asd":
        names = grid.params[0] if grid.params else {}
        params = {
            name: [
                "inf" if value == float("inf") else value for value in dict.fromkeys(row[name] for row in grid.params)
            ]
            for name in names
        }
        return {"rule": grid.layout.rule, "params": params, "faithful": faithful}
    varied: dict[str, Any] = {}
    layout = grid.layout
    if layout.whole != layout_of(grid.semantics) or grid.ledger != "request":
        varied = {"regret": layout.regret, "value": layout.value, "ledger": grid.ledger}
    varied |= layout.cuts
    return {
        "rule": "asd",
        "semantics": grid.semantics,
        **varied,
        **{axis: ["inf" if value == float("inf") else value for value in values] for axis, values in grid.axes.items()},
        "faithful": faithful,
    }


def covered_grids(grids: list[dict[str, Any]]) -> list[Grid]:
    """Return the grids that a manifest says are covered."""

    # JSON has no infinity: the manifest writes "inf", which float() reads.
    def axis(entry: dict[str, Any], name: str) -> list[float]:
        return [float(value) for value in entry[name]]

    covered: list[Grid] = []
    for entry in grids:
        if entry["rule"] != "asd":
            covered += rule_grids(entry["rule"], entry["params"])
        else:
            varied = {name: entry[name] for name in VARIED if name in entry}
            B, g, M = (axis(entry, name) for name in ("B", "g", "M"))
            covered.append(Grid.product(B, g, M, entry["semantics"], **varied))
    return covered


def covered_like(trace: Source, like: Grid) -> Grid | None:
    """Return every setting once of the covered grids that read ASD as ``like`` does, None where there is none."""
    grids = [grid for grid in covered_grids(trace.manifest.grids) if grid.layout.rule == "asd"]
    grids = [grid for grid in grids if (grid.reading, grid.layout) == (like.reading, like.layout)]
    return Grid.of(list(dict.fromkeys(grid.policy(n) for grid in grids for n in range(len(grid))))) if grids else None


def covered_settings(trace: Source) -> Grid:
    """Return every setting once of the covered grids of ASD: those of the first reading that is covered.

    Raises
    ------
    UsageError
        If none is covered.
    """
    for grid in covered_grids(trace.manifest.grids):
        if grid.layout.rule == "asd" and (covered := covered_like(trace, grid)) is not None:
            return covered
    raise UsageError(
        "the trace is not covered for any grid", where=str(trace.path), fix="give --B --g --M, or run asdsim cover"
    )
