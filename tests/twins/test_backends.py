"""Every form of the walk gives the same numbers, to the bit: oracle, plain Python, compiled CPU, CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asdsim.oracle import walk as reference
from asdsim.records import MemoryTrace
from asdsim.result import reference_blocks, reference_walks
from asdsim.trace.graph import build_graph
from asdsim.trace.tokens import edge_tokens
from asdsim.walk.sweep import Walks, sweep_graph, walk_grid
from tests.twins.cases import MODES, cases, cut_case, grid, random_trace, small_grid
from tests.twins.simulate import FIELDS

ROOT = Path(__file__).parents[2]


def assert_equal(one: Walks, other: Walks, fields: tuple[str, ...] = FIELDS) -> None:
    for field in fields:
        left, right = getattr(one, field), getattr(other, field)
        assert left.shape == right.shape
        assert np.array_equal(left, right), f"{field} differs at {np.argwhere(left != right)[:5].tolist()}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(cases()))
def test_oracle_python_and_compiled_agree(name: str, mode: str) -> None:
    trace = cases()[name]
    graph = build_graph(trace)
    oracle = reference_walks(trace, graph, grid(), mode)
    compiled = walk_grid(graph, grid(), off_trace=mode, device="cpu")
    assert_equal(oracle, compiled, ("counts", "spent", "histogram"))
    assert_equal(compiled, walk_grid(graph, grid(), off_trace=mode, device="python"))


@pytest.mark.parametrize("seed", range(40))
def test_oracle_and_compiled_agree_on_random_traces(seed: int) -> None:
    trace = random_trace(seed)
    graph = build_graph(trace)
    for mode in MODES:
        oracle = reference_walks(trace, graph, grid(), mode)
        assert_equal(oracle, walk_grid(graph, grid(), off_trace=mode, device="cpu"), ("counts", "spent", "histogram"))


@pytest.mark.parametrize("seed", range(6))
def test_the_last_edge_names_the_whole_output(seed: int) -> None:
    trace = random_trace(seed)
    graph = build_graph(trace)
    walks = walk_grid(graph, small_grid(), device="cpu")
    checked = 0
    for one, (record, blocks) in enumerate(zip(trace.request_records(), reference_blocks(trace), strict=True)):
        for setting in range(len(small_grid())):
            policy = small_grid().policy(setting)
            out = reference.walk(
                blocks, B=policy.budget, g=policy.gate, M=policy.cap, max_new_tokens=record.max_new_tokens,
                eos=record.eos_ids if record.stop == "natural" else (),
            )  # fmt: skip
            edge = int(walks.edge[setting, one])
            assert (out.left == 0) == walks.exact[setting, one]
            if out.left == 0 and edge >= 0:
                assert edge_tokens(trace, graph, edge) == out.tokens
                checked += 1
    assert checked


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    pytest.importorskip("numba_cuda")
    out = tmp_path_factory.mktemp("cudasim") / "walks.npz"
    subprocess.run(
        [sys.executable, "-m", "tests.twins.simulate", str(out)],
        cwd=ROOT, env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, check=True, timeout=240,
    )  # fmt: skip
    with np.load(out) as file:
        return dict(file)


@pytest.mark.parametrize("name", list(cases()))
def test_cuda_simulator_agrees(simulated: dict[str, np.ndarray], name: str) -> None:
    graph = build_graph(cases()[name])
    for mode in MODES:
        compiled = walk_grid(graph, small_grid(), off_trace=mode, device="cpu")
        assert_equal(compiled, Walks(*(simulated[f"{name}|{mode}|{field}"] for field in FIELDS)))
        for figure, values in sweep_graph(graph, small_grid(), off_trace=mode, device="cpu").items():
            found = simulated[f"{name}|{mode}|sweep|{figure}"]
            assert found.shape == values.shape and found.dtype == values.dtype, figure
            assert np.array_equal(found, values, equal_nan=values.dtype.kind == "f"), figure


def test_cuda_simulator_agrees_on_cut_blocks(simulated: dict[str, np.ndarray]) -> None:
    trace, grid = cut_case()
    graph = build_graph(trace, grid.layout)
    assert graph.max_draft == 5 and (graph.drafted < 5).any()
    walks = walk_grid(graph, grid, device="cpu")
    assert_equal(walks, Walks(*(simulated[f"cut|{field}"] for field in FIELDS)))
    assert_equal(walks, reference_walks(trace, graph, grid, "stop"), ("counts", "spent", "histogram"))


def test_the_cases_reach_every_column() -> None:
    """A twin test proves nothing about a column that no case ever moves."""
    moved: np.ndarray = np.zeros(9, bool)
    traces: list[MemoryTrace] = list(cases().values())
    for trace in traces:
        moved |= walk_grid(build_graph(trace), grid(), device="cpu").counts.any(axis=(0, 1))
    assert moved.all()
