"""Errors of estimates: measured against exact walks, by the definition of each figure."""

from __future__ import annotations

import numpy as np
import pytest

import asdsim
from asdsim.errors import UsageError
from asdsim.rules.settings import Grid
from asdsim.studies.fidelity import hidden, measure
from asdsim.trace.graph import build_graph
from asdsim.walk.estimate import ESTIMATORS, estimate
from asdsim.walk.request import STEPS, TOKENS
from asdsim.walk.sweep import walk_grid
from tests.support.toytrace import ToyModel, write_toy_trace

TRACE = "traces/smollm2-lookup"
GRID = Grid.product([0, 4, 8], [0.1, 0.5], [1, 2])


@pytest.fixture(scope="module")
def found():
    return measure(asdsim.load(TRACE), GRID, resamples=200)


def test_hiding_leaves_the_captured_path():
    trace = asdsim.load(TRACE)
    path = build_graph(hidden(trace))
    strict = Grid.product([0], [1], [1])
    assert path.num_steps == int((trace.column("steps", "wave") == 0).sum())
    assert np.array_equal(walk_grid(path, strict).counts, walk_grid(build_graph(trace), strict).counts)


def test_errors_are_those_of_ratios_of_sums(found):
    trace = asdsim.load(TRACE)
    exact = walk_grid(build_graph(trace), Grid.product([4], [0.5], [2])).counts[0].sum(axis=0)
    for name in ESTIMATORS:
        sums = estimate(build_graph(hidden(trace)), Grid.product([4], [0.5], [2]), name)[0].sum(axis=0)
        row = found.settings.filter(
            (found.settings["B"] == 4) & (found.settings["g"] == 0.5) & (found.settings["M"] == 2)
            & (found.settings["estimator"] == name) & (found.settings["figure"] == "mean_acceptance_length")
        ).to_dicts()  # fmt: skip
        assert row[0]["exact"] == exact[TOKENS] / exact[STEPS]
        assert row[0]["estimate"] == pytest.approx(sums[2] / sums[0], rel=1e-12)
        assert row[0]["error"] == pytest.approx(row[0]["estimate"] / row[0]["exact"] - 1)


def test_the_summary_sums_up(found):
    for row in found.summary.to_dicts():
        part = found.settings.filter(
            (found.settings["estimator"] == row["estimator"]) & (found.settings["figure"] == row["figure"])
        )
        assert row["settings"] == len(part) == 8  # B = 0 acts as strict and is left out
        assert row["mean_error"] == pytest.approx(part["error"].abs().mean())
        assert row["worst_error"] == pytest.approx(part["error"].abs().max())
        assert row["bias"] == pytest.approx(part["error"].mean())
        assert row["mean_low"] <= row["mean_high"]


def test_a_grid_that_is_not_covered_has_no_truth(tmp_path):
    write_toy_trace(tmp_path / "t", ToyModel(2, 40), count=3)
    with pytest.raises(UsageError, match="run asdsim cover"):
        measure(asdsim.load(tmp_path / "t"), Grid.product([9], [9], [9]))
