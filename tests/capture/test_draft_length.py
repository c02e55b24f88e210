"""A long capture covered for a shorter draft decodes what the drafter decodes when asked for fewer, token for token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asdsim.capture.cover import BatchRunner, cover
from asdsim.capture.loop import Decoded, decode
from asdsim.capture.record import Recorder
from asdsim.records import MemoryTrace, RequestRecord, StepRecord
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.graph import build_graph
from asdsim.trace.tokens import edge_tokens
from asdsim.walk.demand import demand_of
from asdsim.walk.sweep import walk_grid
from tests.support.toymodels import ToyDrafter, ToyTarget

TRACES = Path(__file__).resolve().parents[2] / "traces"


def hold(models: tuple[Any, Any], records: list[RequestRecord], long: int, short: int) -> None:
    """Capture at ``long``, cover for ``short``, and compare every walk with live decoding at ``short``."""
    grid = Grid.product("0,8", "0.25,2", 2, K=short)
    captured = [(record, decode(*models, record, STRICT, long, Recorder()).steps) for record in records]
    added: dict[str, list[StepRecord]] = {record.request_id: [] for record in records}
    progress = cover(
        captured, lambda graph: demand_of(graph, [grid], device="cpu"), BatchRunner(*models, long, Recorder()),
        lambda name, steps: added[name].extend(steps), settings=len(grid),
        build=lambda held: build_graph(held, grid.layout),
    )  # fmt: skip
    assert progress.complete and progress.steps_added > 0
    trace = MemoryTrace([(record, [*steps, *added[record.request_id]]) for record, steps in captured])
    graph = build_graph(trace, grid.layout)
    walks = walk_grid(graph, grid, device="cpu")
    assert walks.exact.all()
    decoded: dict[tuple[float, int], Decoded] = {}
    for setting in range(len(grid)):
        policy = replace(grid.policy(setting), layout=STRICT.layout)  # whole blocks, of a shorter draft
        for r, record in enumerate(records):
            key = policy.gate if policy.budget else 0.0, r  # B = 0 is strict under any gate
            live = decoded[key] = decoded.get(key) or decode(*models, record, policy, short)
            assert edge_tokens(trace, graph, int(walks.edge[setting, r])) == live.tokens, (str(policy), r)
            assert walks.counts[setting, r, 0] == len(live.outcomes)
            assert walks.spent[setting, r] == pytest.approx(live.ledger, abs=1e-3)


@pytest.mark.parametrize("short", [1, 2, 3])
def test_toys(short: int) -> None:
    target = ToyTarget(4)
    records = [
        RequestRecord(f"toy/{n}", "toy", tuple(range(1, 4 + n)), "", None, 30, (11,), "natural") for n in range(4)
    ]
    hold((target, ToyDrafter(target, 0.7)), records, 5, short)


@pytest.mark.smollm2
@pytest.mark.parametrize("name", [pytest.param("lookup", marks=pytest.mark.slow), "layerskip", "medusa", "eagle3"])
def test_smollm2(name: str) -> None:
    import asdsim
    from asdsim.capture.reload import load_pair

    trace = asdsim.load(TRACES / f"smollm2-{name}")
    models = load_pair(trace.manifest)
    tokens = 64 if name == "lookup" else 16  # it has little to look up at first
    records = [replace(record, max_new_tokens=tokens) for record in trace.request_records()[:1]]
    hold(models, records, 5, 2)
