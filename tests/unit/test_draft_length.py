"""K as a setting: blocks cut to their first K draft tokens are what a capture at K records, and replay as it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asdsim
from asdsim.errors import TraceError, UsageError
from asdsim.rules.scoring import Layout
from asdsim.rules.settings import Grid, parse_lengths
from asdsim.studies.frozen import how_to_cover, setting_record
from asdsim.trace.covered import covered_grids, grid_entry
from asdsim.trace.graph import build_graph
from asdsim.trace.tokens import prefix_tokens

TRACES = Path(__file__).resolve().parents[2] / "traces"
PAIRS = [("layerskip", "layerskip-k4"), ("lookup", "lookup-k4"), ("medusa", "medusa-k3"), ("eagle3", "eagle3-k4")]


def drafts(trace: asdsim.Trace) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]:
    """Return the draft of each step by (prompt, tokens before it)."""
    records, draft_id = trace.request_records(), trace.column("positions", "draft_id")
    return {
        (records[trace.step_request[row]].prompt_ids, tuple(prefix_tokens(trace, row))): draft_id[
            trace.pos_ptr[row] : trace.pos_ptr[row + 1] - 1
        ].tolist()
        for row in range(len(trace.step_request))
    }


@pytest.mark.parametrize(("wide", "short"), PAIRS)
def test_a_cut_block_is_the_block_of_a_shorter_capture(wide: str, short: str) -> None:
    captured, cut = asdsim.load(TRACES / f"smollm2-{short}"), drafts(asdsim.load(TRACES / f"smollm2-{wide}"))
    K = captured.manifest.num_draft_tokens
    shared = {prefix: draft for prefix, draft in drafts(captured).items() if prefix in cut}
    assert len(shared) > 200
    assert all(cut[prefix][:K] == draft for prefix, draft in shared.items())


@pytest.mark.parametrize(("wide", "short"), PAIRS)
def test_walks_over_cut_blocks_are_those_of_a_shorter_capture(wide: str, short: str) -> None:
    """Token for token, and decision for decision, wherever the long capture holds the prefixes that the walk meets."""
    captured, long = asdsim.load(TRACES / f"smollm2-{short}"), asdsim.load(TRACES / f"smollm2-{wide}")
    K = captured.manifest.num_draft_tokens
    there = asdsim.replay(captured, B="0,8", g=0.25, M=2)
    here = asdsim.replay(long, B="0,8", g=0.25, M=2, K=K)
    names = {name: n for n, name in enumerate(there.graph.request_ids)}
    paired, steps = 0, 0
    for n, name in enumerate(here.graph.request_ids):
        if name not in names:
            continue
        mine, theirs = here.walks(), there.walks()
        for setting in range(2):
            exact = bool(mine.exact[setting, n])
            steps += int(mine.counts[setting, n, 0])
            if exact:
                paired += 1
                assert here.tokens(setting, n) == there.tokens(setting, names[name])
                assert np.array_equal(mine.counts[setting, n], theirs.counts[setting, names[name]])
                # Logits of a pass over 8 rows and one over 4 or 5 differ in their last bits.
                assert mine.spent[setting, n] == pytest.approx(theirs.spent[setting, names[name]], abs=1e-4)
    # The long capture of layer-skip was covered for few settings, and holds no whole walk of blocks of 4.
    assert steps > 0 and (paired > 0 or wide == "layerskip")


def test_the_value_of_a_position_is_that_of_the_shorter_block() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip")
    graph = build_graph(trace, Grid.product(8, 1, 2, K=3).layout)
    assert graph.max_draft == 3 and (graph.mm_pos < 3).all()
    assert np.array_equal(graph.mm_score, graph.mm_regret / (3 - graph.mm_pos))


def test_whole_blocks_are_the_longest_cut() -> None:
    trace = asdsim.load(TRACES / "smollm2-lookup")
    whole, cut = (asdsim.replay(trace, B="0,8", g=0.25, M=2, **given) for given in ({}, {"K": 7}))
    for name, values in whole.columns.items():
        assert np.array_equal(values, cut.columns[name], equal_nan=True), name


@pytest.mark.parametrize(("name", "cuts"), [("lookup", {"K": 2}), ("eagle3", {"draft_threshold": 0.6})])
def test_strict_on_whole_blocks_is_the_baseline_of_every_cut(name: str, cuts: dict[str, Any]) -> None:
    trace = asdsim.load(TRACES / f"smollm2-{name}")
    whole = asdsim.replay(trace, B=0, g=0, M=0)
    cut = asdsim.replay(trace, B=0, g=0, M=0, off_trace="aligned", **cuts)
    length = whole.columns["mean_acceptance_length"][0]
    assert cut.columns["strict_mean_acceptance_length"][0] == length
    assert cut.columns["mean_acceptance_length"][0] < length
    for layout in (Layout(width=2, threshold=0.5), Layout("mars", width=2, params=(("theta", 0.9),))):
        assert layout.of_strict == Layout() and layout.whole.of_strict == layout.whole


def test_the_oracle_walks_cut_blocks_alike() -> None:
    asked = {"B": "0,4", "g": 0.25, "M": 2, "K": 3}
    trace = asdsim.load(TRACES / "smollm2-layerskip-k4")
    fast, slow = (asdsim.replay(trace, device=device, **asked) for device in ("cpu", "reference"))
    for name, values in fast.columns.items():
        assert np.array_equal(values, slow.columns[name], equal_nan=True), name


def test_lengths_that_a_trace_cannot_be_cut_to_are_refused() -> None:
    with pytest.raises(TraceError, match="K=8 is longer than the recorded blocks of 7"):
        asdsim.replay(TRACES / "smollm2-lookup", B=0, g=0, M=0, K=8)
    for rule in ({"rule": "truncate"}, {"B": 0, "g": 0, "M": 0}):
        with pytest.raises(TraceError, match="dspark cannot be cut to K=3.*capture with --num-draft-tokens 3"):
            asdsim.replay(TRACES / "smollm2-dspark", K=3, **rule)
    assert len(asdsim.replay(TRACES / "smollm2-dspark", B=0, g=0, M=0, K=7)) == 1  # whole blocks


def test_lengths_on_the_command_line() -> None:
    assert parse_lengths("1:7") == [1, 2, 3, 4, 5, 6, 7] and parse_lengths("3") == [3]
    assert parse_lengths("1,5:7,2:6:2") == [1, 5, 6, 7, 2, 4]
    for text in ("0", "1.5", "-1", "0:3", "inf", ""):
        with pytest.raises(UsageError):
            parse_lengths(text)


def test_a_length_is_named_wherever_a_setting_is() -> None:
    grid = Grid.product("0,8", 0.25, 2, K=3)
    assert str(grid.policy(1)) == "B=8 g=0.25 M=2 K=3" and grid.parameters(0) == "K=3"
    entry = grid_entry(grid, True)
    assert entry["K"] == 3 and covered_grids([entry])[0].layout == grid.layout
    assert "K" not in grid_entry(Grid.product(0, 0, 0), True)
    assert setting_record(grid[[0]])["K"] == 3 and "K" not in setting_record(Grid.product(0, 0, 0))
    assert how_to_cover(Path("t"), grid).endswith("--K 3")
