"""Cover and verify under other rules, and readings of ASD, on tiny Transformers models and stored traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asdsim.capture.drafters import make_drafter
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.live.cover import cover_with
from asdsim.live.verify import verify_trace
from asdsim.result import replay_grid
from asdsim.rules.settings import STRICT, Grid, rule_grids
from asdsim.trace.covered import covered_grids
from asdsim.trace.reader import read_trace
from asdsim.trace.writer import TraceWriter

from .test_cover_models import K, manifest_of

GRIDS: dict[str, list[Grid]] = {
    "vllm": rule_grids("vllm", {"ratio": ".3,.8", "k": "2,5"}),
    "truncate": rule_grids("truncate", {"K": "1,3"}),
    "fuzzy": rule_grids("fuzzy", {"T": ".01,.3"}),
    "lenience": rule_grids("lenience", {"l": ".2,1", "seed": 3}),
    "lightllm": [Grid.product([0, 0.5], [0.5], [2], "lightllm")],
    "asd per block": [Grid.product([0.3], "inf", [2], value="reuse", ledger="block")],
    "asd probability": [Grid.product([0.3], [0.01], [2], regret="probability")],
}


@pytest.mark.parametrize("name", list(GRIDS))
def test_covered_rules_equal_live_decoding(
    name: str, target: Any, requests: Callable[..., Any], tmp_path: Path
) -> None:
    pair = target, make_drafter("layer-skip:1", target, keep_logits=True)
    recorder, path = Recorder(divergences=("js",)), tmp_path / "trace"
    with TraceWriter.create(path, manifest_of(*pair, settings={"divergences": ["js"]})) as writer:
        for request in requests(3, seed=3):
            writer.add_request(request, decode(*pair, request, STRICT, K, recorder).steps)
    for grid in GRIDS[name]:
        with TraceWriter.append(path) as writer:
            assert cover_with(writer, pair, grid, batch=5).complete
    trace = read_trace(path)  # every row and edge is checked again
    for grid in GRIDS[name]:
        assert (replay_grid(trace, grid, device="cpu").frame()["exact_share"] == 1.0).all()
    covered = covered_grids(trace.manifest.grids)
    assert [(grid.semantics, grid.layout, grid.params) for grid in covered] == [
        (grid.semantics, grid.layout, grid.params) for grid in GRIDS[name]
    ]
    found = verify_trace(path, models=pair)
    settings = sum(len(grid) for grid in GRIDS[name])
    assert (found.pairs, found.identical, found.not_captured) == (3 * settings, 3 * settings, 0)
