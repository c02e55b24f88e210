"""Distinct model steps against the number of settings, from covered traces; no model needed.

    python analysis/figures_steps_by_settings.py

Grids are nested. The steps of a grid are those that its walks visit; live runs would take as many as the walks have.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from asdsim.plots import exact as plots_exact
from asdsim.plots.style import provenance, save
from asdsim.result import load
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.graph import build_graph
from asdsim.walk.path import visits
from asdsim.walk.request import STEPS
from asdsim.walk.sweep import walk_grid

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python analysis/figures_steps_by_settings.py"
GRIDS = {
    18: ("0,4,8", ".1,.25,.5", "1,2"),
    36: ("0,2,4,8", ".1,.25,.5", "1,2,inf"),
    108: ("0,1,2,4,8,16", ".05,.1,.25,.5,1,2", "1,2,inf"),
    300: ("0,1,2,4,6,8,12,16,24,3", ".05,.1,.15,.2,.25,.3,.4,.5,1,2", "1,2,inf"),
    1000: (
        "0,1,2,3,4,6,8,12,16,24",
        ".05,.1,.15,.2,.25,.3,.35,.4,.45,.5,.6,.7,.8,.9,1,1.25,1.5,2,3,4",
        "1,2,3,4,inf",
    ),
}


def count(folder: Path) -> list[dict[str, float]]:
    """Return, for each grid that a trace covers, distinct steps and live steps per request."""
    graph = build_graph(load(folder))
    rows: list[dict[str, float]] = []
    strict = walk_grid(graph, Grid.of([STRICT]))
    rows.append(
        {
            "settings": 1,
            "distinct": float(strict.counts[0, :, STEPS].mean()),
            "live": float(strict.counts[0, :, STEPS].mean()),
        }
    )
    for size, axes in GRIDS.items():
        grid = Grid.product(*axes)
        assert len(grid) == size
        walks = walk_grid(graph, grid)
        if not walks.exact.all():
            continue
        visited: set[int] = set()
        for r in range(graph.num_requests):
            # settings that reach the same last edge may still have cut their blocks differently, so walk each once
            for n in range(size):
                visited.update(visit.step for visit in visits(graph, grid.policy(n), r)[0])
        rows.append({
            "settings": size,
            "distinct": len(visited) / graph.num_requests,
            "live": float(walks.counts[:, :, STEPS].sum() / graph.num_requests),
        })  # fmt: skip
    return rows


def main() -> None:
    """Draw the figure."""
    os.chdir(ROOT)
    found = {folder: count(Path(folder)) for folder in ("traces/smollm2-layerskip-wide", "traces/smollm2-lookup")}
    figure = plots_exact.steps_by_settings(found)
    subject = "; ".join(load(folder).subject for folder in found)
    record = provenance(COMMAND, source={"traces": list(found), "subject": subject})
    for path in save(figure, Path("figures/steps-by-settings"), record, found):
        print(path)
    for folder, rows in found.items():
        for row in rows:
            print(folder, json.dumps({**row, "times_fewer": round(row["live"] / row["distinct"], 2)}))
    assert np.isfinite([row["distinct"] for rows in found.values() for row in rows]).all()


if __name__ == "__main__":
    main()
