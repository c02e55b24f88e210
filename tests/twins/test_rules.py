"""Every acceptance rule: oracle, plain Python and compiled walk give the same numbers; the simulator too."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from asdsim.oracle.rules import ALLOWS
from asdsim.records import MemoryTrace
from asdsim.result import reference_walks
from asdsim.rules import NAMES
from asdsim.rules.scoring import STOPS, VALUES
from asdsim.rules.settings import SEMANTICS, Grid, rule_grids
from asdsim.trace.graph import build_graph
from asdsim.walk.sweep import walk_grid
from tests.support.toygraph import toy_requests
from tests.twins.cases import MODES
from tests.twins.test_backends import assert_equal

SETTINGS = {
    "truncate": {"K": "1,2,4,9"},
    "mars": {"theta": "0,.5,.9,1"},
    "fuzzy": {"T": "0,.1,.4,1", "kind": "js,kl,reverse_kl,tv"},
    "medusa": {"eps": "0,.09,.3", "alpha": "0,.2,.9"},
    "trtllm": {"delta": "0,.3,.6,1", "N": "1,2,10"},
    "vllm": {"ratio": "0,.1,.5,1", "k": "1,3"},
    "fly": {"h": "0,.3,1", "W": "0,1,2"},
    "sglang": {"acc": ".1,.5,1", "single": ".3,1", "seed": "0,7"},
    "lenience": {"l": ".1,.5,1", "seed": "0,7"},
    "additive": {"delta": "0,.1,.5,1"},
    "multiplicative": {"ratio": "0,.2,.5,1"},
    "topm": {"m": "1,2,5"},
    "entropy": {"h": "0,1,2,9", "m": "1,3"},
}


@cache
def trace(seed: int) -> MemoryTrace:
    """Return a toy trace with every column filled and positive top logits."""
    ks = [(3,), (7,), (0, 1, 5), (16,)][seed % 4]
    return MemoryTrace(
        toy_requests(
            seed, ks=ks, vocab=12, limit=30, agree=0.6, grain=[0.125, 0.0][seed % 2], extra=40, shift=12.0, columns=True
        )
    )


def variations() -> list[Grid]:
    """Return a grid of each reading of ASD and of each of its variations."""
    axes = [0, 0.125, 0.5, 1.3, float("inf")], [0, 0.125, 0.4, float("inf")], [0, 1, 2, float("inf")]
    made = [Grid.product(*axes, semantics) for semantics in SEMANTICS]
    made += [Grid.product(*axes, value=value) for value in VALUES]
    made += [Grid.product([0, 0.1, 0.4, float("inf")], [0, 0.05, 0.2], [1, 2], regret="probability")]
    made += [Grid.product(*axes, semantics, ledger="block") for semantics in SEMANTICS]
    made += [Grid.product(*axes, ledger="none"), Grid.product(*axes, gate=False)]
    made += [Grid.product(*axes, K=2), Grid.product(*axes, "dspark", K=4, draft_threshold=0.3)]
    made += [Grid.product(*axes, draft_threshold=tau, draft_stop=stop) for tau in (0.3, 0.6) for stop in STOPS]
    return made


def check(graph_trace: MemoryTrace, grid: Grid, mode: str) -> None:
    graph = build_graph(graph_trace, grid.layout)
    oracle = reference_walks(graph_trace, graph, grid, mode)  # type: ignore[arg-type]
    compiled = walk_grid(graph, grid, off_trace=mode, device="cpu")
    assert_equal(oracle, compiled, ("counts", "spent", "histogram"))
    assert_equal(compiled, walk_grid(graph, grid, off_trace=mode, device="python"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_walks_as_its_oracle(name: str, mode: str) -> None:
    for seed in range(4):
        for grid in rule_grids(name, SETTINGS.get(name, {})):
            check(trace(seed), grid, mode)


@pytest.mark.parametrize("number", range(len(variations())))
def test_a_reading_of_asd_walks_as_its_oracle(number: int) -> None:
    for seed in range(4):
        for mode in MODES:
            check(trace(seed), variations()[number], mode)


def test_every_rule_has_an_oracle_and_relaxes_something() -> None:
    assert set(ALLOWS) == set(NAMES)
    for name in NAMES:
        relaxed = sum(
            int(walk_grid(build_graph(trace(seed), grid.layout), grid, device="cpu").counts[..., 4].sum())
            for seed in range(4)
            for grid in rule_grids(name, SETTINGS.get(name, {}))
        )
        assert (relaxed > 0) == (name not in ("strict", "truncate")), name


def test_one_knob_lays_the_trace_out_once() -> None:
    assert [len(grid) for grid in rule_grids("mars", {"theta": np.linspace(0.5, 1, 20).tolist()})] == [20]
    assert [len(grid) for grid in rule_grids("fuzzy", {"T": ".1,.2", "kind": "js,kl"})] == [2, 2]
