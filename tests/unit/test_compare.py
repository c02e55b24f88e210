"""What a comparison claims: matched risk, intervals, predicted speed, and outputs that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asdsim.compare import ASD_LADDER, Bench, Measured, compare, interval, knob_grid, speedup
from asdsim.policy import STRICT, Grid, rule_grids
from asdsim.trace.graph import build_graph, edge_tokens_of
from asdsim.trace.reader import read_trace
from asdsim.walk.request import RELAXED
from asdsim.walk.sweep import walk_grid
from tests.cli.test_rules import write
from tests.twins.test_rules import SETTINGS, trace


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return read_trace(write(tmp_path_factory.mktemp("compare") / "trace"))


@pytest.mark.parametrize("name", ["mars", "vllm", "topm", "medusa", "asd"])
def test_an_output_differs_from_strict_where_something_was_relaxed(name: str) -> None:
    """The claim that makes this share exact even off the trace."""
    checked = 0
    for seed in range(4):
        source = trace(seed)
        grids = [Grid.product([0.5, 2], [0.4, 9], [1, 2])] if name == "asd" else rule_grids(name, SETTINGS[name])
        for grid in grids:
            graph = build_graph(source, grid.layout)
            walks, strict = walk_grid(graph, grid, device="cpu"), walk_grid(graph, Grid.of([STRICT]), device="cpu")
            for n, r in np.argwhere(walks.exact & strict.exact[0]):
                tokens = edge_tokens_of(source, graph, int(walks.edge[n, r]))
                base = edge_tokens_of(source, graph, int(strict.edge[0, r]))
                assert (tokens != base) == (walks.counts[n, r, RELAXED] > 0)
                checked += 1
    assert checked > 10


@pytest.mark.parametrize("risk", ["regret_max", "regret_per_token", "outputs_differ_share"])
def test_no_row_exceeds_the_level_and_no_rung_beats_it(stored: Any, risk: str) -> None:
    level = {"regret_max": 2.0, "regret_per_token": 0.05, "outputs_differ_share": 0.5}[risk]
    found = compare(stored, ["asd", "mars", "topm"], risk=risk, level=level, draft_cost=0.1, resamples=100)
    bench = Bench(stored)
    for row in found.rows:
        assert row[risk] <= level
        if row["rule"] == "asd":
            rungs = bench.measure(knob_grid("asd", ASD_LADDER))
            length = rungs.tokens.sum(axis=1) / rungs.steps.sum(axis=1)
            assert row["mean_acceptance_length"] >= length[rungs.risk(risk) <= level].max() - 1e-12


def test_the_estimate_is_the_walk_where_nothing_is_missing(stored: Any) -> None:
    grid = Grid.product([0.0], [0.25], [2])
    pooled, stop = Bench(stored).measure(grid), Bench(stored, "stop").measure(grid)
    assert stop.exact.all()
    for name in ("steps", "tokens", "accepted", "spent", "drafted", "differs"):
        assert np.array_equal(getattr(pooled, name), getattr(stop, name))


def test_predicted_speed() -> None:
    """Two steps of K = 5 that give 8 tokens, at a tenth of a verification per draft token: 8 / (2 + 1)."""
    one = np.array([[2.0]])
    made = Measured(Grid.of([STRICT]), one, one * 4, one, one, one * 5, one > 9, one > 0)
    assert speedup(made, 0.1).tolist() == [8.0 / 3.0]
    assert speedup(made, 0.0).tolist() == [4.0]


def gain(tokens: Any, steps: Any, tokens0: Any, steps0: Any, axis: int = -1) -> Any:
    return tokens.sum(axis) / steps.sum(axis) / (tokens0.sum(axis) / steps0.sum(axis)) - 1.0


def test_intervals_and_where_bca_does_not_apply() -> None:
    rng = np.random.default_rng(0)
    steps = rng.integers(5, 20, 40).astype(float)
    data = [steps * rng.uniform(3, 5, 40), steps, steps * 3.0, steps]
    low, high, kind = interval(data, gain, 0, 500)
    assert kind == "BCa" and low is not None and high is not None and low < gain(*data) < high
    assert interval(data, gain, 0, 500) == (low, high, kind)
    assert interval([steps, steps, steps, steps], gain, 0, 100) == (0.0, 0.0, "constant")
    assert interval([part[:1] for part in data], gain, 0, 100) == (None, None, "none")
    assert interval([part[:2] for part in data], gain, 0, 100)[2] == "percentile"


def test_a_seed_repeats_and_a_rule_that_cannot_run_is_named(tmp_path: Path) -> None:
    bare = read_trace(write(tmp_path / "bare", columns=False))
    one, two = (compare(bare, ["asd", "fuzzy"], draft_cost=0.1, resamples=100, seed=3) for _ in range(2))
    assert one.rows == two.rows and "needs the column js" in one.skipped["fuzzy"]
