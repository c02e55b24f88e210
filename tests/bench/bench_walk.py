"""The walk in pieces, by pytest-benchmark: ``make micro``. Asserts nothing about time; ``make test`` skips it."""

from __future__ import annotations

import numpy as np
import pytest

from asdsim.bench import run
from asdsim.bench.synthetic import synthetic_graph
from asdsim.rules import asd as rule
from asdsim.rules.settings import Grid
from asdsim.trace.graph import Graph, build_graph
from asdsim.trace.reader import read_trace
from asdsim.walk import ledgers
from asdsim.walk.axes import axes_of
from asdsim.walk.breakpoints import breakpoints_of
from asdsim.walk.prepared import whole_product
from asdsim.walk.request import RECORDED, STOP
from asdsim.walk.sweep import sweep_graph, walk_grid


@pytest.fixture(scope="module")
def synthetic() -> Graph:
    return synthetic_graph(100, run.STEPS_PER_REQUEST, run.WIDTH)


@pytest.fixture(scope="module")
def covered() -> Graph:
    return build_graph(read_trace(run.COVERED))


@pytest.mark.parametrize("semantics", list(rule.JUDGES))
def test_one_block_as_python(benchmark, semantics: str) -> None:
    regrets = [0.0, 0.31, 0.0, 0.07, 0.0, 1.4, 0.0]
    draft = [int(regret > 0) for regret in regrets]
    positions, scores, charges = rule.mismatches(draft, [0] * 7, regrets, semantics)
    benchmark(rule.accept, positions, scores, charges, 7, 0.5, 4.0, 0.5, 2, semantics)


@pytest.mark.parametrize("by", ["pairs", "recorded", "boxes"])
def test_recorded_order(benchmark, synthetic: Graph, by: str) -> None:
    grid = Grid.product(np.linspace(0, 16, 50), np.linspace(0.05, 1, 10), [1, 2])
    benchmark(sweep_graph, synthetic, grid, off_trace="recorded", device="cpu", threads=1, by=by)


@pytest.mark.parametrize("by", ["pairs", "boxes"])
def test_covered_graph(benchmark, covered: Graph, by: str) -> None:
    benchmark(sweep_graph, covered, run.covered_grid(), device="cpu", threads=1, by=by)


def test_one_setting(benchmark, covered: Graph) -> None:
    benchmark(walk_grid, covered, Grid.product(4, 0.25, 2), device="cpu", threads=1)


def test_layout(benchmark) -> None:
    benchmark(build_graph, read_trace(run.COVERED))


def test_layout_of_a_product(benchmark, synthetic: Graph) -> None:
    benchmark(whole_product, synthetic, axes_of(run.sweep_grid()), rule.Reading())


def test_axes(benchmark) -> None:
    benchmark(axes_of, run.sweep_grid())


@pytest.mark.parametrize("requests", [100, 1000])
def test_percentiles(benchmark, requests: int) -> None:
    rng = np.random.default_rng(0)
    spent = rng.random((requests, 1, 2, 100)) * 8 + rng.random((requests, 8, 2, 100)) * 0.05
    out = [np.zeros((8, 2, 100)) for _ in range(3)]
    kernel = ledgers.kernel()
    benchmark(lambda: kernel(spent, ledgers.scratch(requests, 2, 100), *out))


@pytest.mark.parametrize("mode", [STOP, RECORDED])
def test_breakpoints(benchmark, covered: Graph, mode: int) -> None:
    benchmark(breakpoints_of, covered, [(0.5, 2.0)], mode, rule.Reading(), threads=1)
