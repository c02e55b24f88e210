"""What a threshold on the drafter's probability cuts, by hand, and how it is named, stored and refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.capture.loop import verified_length
from asdsim.capture.verify import _held, _length_margin
from asdsim.engines.protocol import Proposal
from asdsim.errors import CaptureError, TraceError, UsageError
from asdsim.files import Fields
from asdsim.oracle.walk import confident_length
from asdsim.rules.frozen import asd_setting
from asdsim.rules.scoring import NO_DRAFT, STOPS, Layout, draft_lengths
from asdsim.rules.settings import Grid, parse_thresholds
from asdsim.studies.frozen import how_to_cover, setting_record
from asdsim.trace.covered import covered_grids, grid_entry
from asdsim.trace.graph import build_graph

TRACES = Path(__file__).resolve().parents[2] / "traces"
Q = [0.9, 0.5, 0.8, 0.3, 0.9]


@pytest.mark.parametrize(
    ("tau", "stop", "length"),
    [
        (0.5, "after", 4),  # .3 is below, and verified as the last one; .5 is not below .5
        (0.5, "before", 3),
        (0.5, "product", 1),  # .9, .45 is below
        (0.4, "product", 2),  # .9, .45, .36
        (0.95, "after", 1),
        (0.95, "before", 0),
        (0.95, "product", 0),
        (0.1, "product", 4),  # .9 x .5 x .8 x .3 = .108, x .9 = .0972
        (0.25, "before", 5),
        (0.0, "before", 5),
    ],
)
def test_where_a_block_is_cut(tau: float, stop: str, length: int) -> None:
    logprobs = np.log(np.array(Q))[None]
    assert draft_lengths(Layout(threshold=tau, stop=stop), [5], logprobs).tolist() == [length]
    if tau:
        assert confident_length(logprobs[0].tolist(), tau, stop) == length


def test_a_length_and_a_threshold_cut_together() -> None:
    logprobs = np.log(np.array([Q, Q]))
    assert draft_lengths(Layout(width=2, threshold=0.5), [5, 1], logprobs).tolist() == [2, 1]
    assert draft_lengths(Layout(width=NO_DRAFT), [5, 1], None).tolist() == [0, 0]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", ["eagle3", "layerskip", "medusa", "dspark"])
def test_the_oracle_walks_alike(name: str, stop: str) -> None:
    """On real probabilities, whole walks or not: counts, ledgers and histograms are the same numbers."""
    asked = {"B": "0,4", "g": 0.25, "M": 2, "draft_threshold": 0.3, "draft_stop": stop, "off_trace": "aligned"}
    trace = asdsim.load(TRACES / f"smollm2-{name}")
    fast, slow = (asdsim.replay(trace, device=device, **asked) for device in ("cpu", "reference"))
    assert fast.columns["num_draft_tokens"].max() < asdsim.replay(trace, B=0, g=0, M=0).columns["num_draft_tokens"]
    for column, values in fast.columns.items():
        assert np.array_equal(values, slow.columns[column], equal_nan=True), column


def test_the_value_of_a_position_is_that_of_the_cut_block() -> None:
    trace = asdsim.load(TRACES / "smollm2-eagle3")
    graph = build_graph(trace, Grid.product(8, 1, 2, draft_threshold=0.4).layout)
    step = np.repeat(np.arange(graph.num_steps), np.diff(graph.mm_ptr))
    assert len(np.unique(graph.drafted)) > 3
    assert np.array_equal(graph.mm_score, graph.mm_regret / (graph.drafted[step] - graph.mm_pos))


def test_live_decoding_cuts_by_the_same_numbers() -> None:
    """float32 probabilities of a proposal are compared as those of a trace are."""
    logprobs = np.log(np.array(Q)).astype(np.float32)
    for stop in STOPS:
        for tau in (0.1, float(np.exp(np.float64(logprobs[1]))), 0.5, 0.9, 1.0):
            layout = Layout(threshold=tau, stop=stop)
            length = verified_length(layout, Proposal([1] * 5, logprobs), "here")
            assert length == confident_length(logprobs.astype(float).tolist(), tau, stop)
    with pytest.raises(CaptureError, match="this drafter has none"):
        verified_length(Layout(threshold=0.5), Proposal([1, 2]), "request toy/0, step 0")
    assert verified_length(Layout(threshold=0.5), Proposal([]), "here") == 0


def test_a_trace_without_probabilities_is_refused() -> None:
    with pytest.raises(TraceError, match="request .*, step 0: .*draft_logprob"):
        asdsim.replay(TRACES / "smollm2-lookup", B=0, g=0, M=0, draft_threshold=0.5)


def test_a_difference_at_the_threshold_has_its_margin() -> None:
    trace = asdsim.load(TRACES / "smollm2-eagle3")
    step = trace.steps_of(trace.request_ids()[0])[0]
    assert step.draft_logprobs is not None
    value = float(step.draft_logprobs[0])
    near = Layout(threshold=math.exp(value) * (1 + 1e-6), stop="before")
    assert _held(near, step) == 0
    assert _length_margin(near, step, 0) == pytest.approx(1e-6, rel=1e-2)
    assert _length_margin(Layout(width=3), step, 3) == math.inf


def test_a_threshold_is_named_wherever_a_setting_is() -> None:
    grid = Grid.product("0,8", 0.25, 2, K=3, draft_threshold=0.4, draft_stop="before")
    assert str(grid.policy(1)) == "B=8 g=0.25 M=2 K=3 draft-threshold=0.4 draft-stop=before"
    entry = grid_entry(grid, True)
    assert entry["draft_threshold"] == 0.4 and covered_grids([entry])[0].layout == grid.layout
    record = setting_record(grid[[0]])
    assert asd_setting(Fields(record, "policy.json")).layout == grid.layout
    assert how_to_cover(Path("t"), grid).endswith("--K 3 --draft-threshold 0.4 --draft-stop before")
    assert not Layout(threshold=0.0, stop="before").cuts and Layout(threshold=0.0, stop="before") == Layout()


def test_thresholds_on_the_command_line() -> None:
    assert parse_thresholds("0,.25:.75:.25") == [0, 0.25, 0.5, 0.75]
    for text in ("1.5", "-1", "nan", "inf", "", "x"):
        with pytest.raises(UsageError):
            parse_thresholds(text)
    with pytest.raises(UsageError, match="draft stop"):
        parse_thresholds(".5", "never")
