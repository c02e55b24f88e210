"""Figures with intervals against the plain rows of a replay, and against counting by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.errors import UsageError
from asdsim.evaluate.cost import fit_trace
from asdsim.evaluate.figures import FIGURES, suffix_reuse
from asdsim.evaluate.quality import Evaluator
from asdsim.rules.settings import Grid

TRACES = Path(__file__).resolve().parents[2] / "traces"
GRID = Grid.product("0,2,8", ".25,1", "1,inf")


@pytest.fixture(scope="module")
def trace():
    return asdsim.load(TRACES / "smollm2-layerskip")


@pytest.fixture(scope="module")
def result(trace):
    return asdsim.result.replay_grid(trace, GRID)


@pytest.fixture(scope="module")
def quality(trace):
    scorer = lambda request, tokens: request < 12 or None  # noqa: E731
    return Evaluator(trace, cost=fit_trace(trace), scorer=scorer).evaluate(GRID)


def test_values_are_those_of_the_rows(quality, result) -> None:
    for name in ("mean_acceptance_length", "accepted_per_proposal", "acceptance_length_gain", "regret_spent_mean"):
        assert np.allclose(quality.figures[name].value, result.columns[name], rtol=1e-12, atol=1e-15)
    assert np.array_equal(quality.largest_ledger, result.columns["regret_spent_max"])
    bound = quality.figures["bound_by_gate"].value * result.columns["num_spec_steps"]
    assert np.allclose(bound, result.columns["rejected_by_gate"])
    divergence = result.outputs().divergence()
    assert np.allclose(quality.figures["outputs_differ_share"].value, divergence["outputs_differ_share"])
    mean = quality.figures["first_difference_mean"].value
    there = ~np.isnan(mean)
    assert np.allclose(mean[there], divergence["first_difference_mean"].to_numpy()[there])


def test_a_result_gives_its_figures_with_intervals(result, quality) -> None:
    frame = result.quality(figures=["mean_acceptance_length"]).frame()
    assert np.array_equal(frame["mean_acceptance_length_low"], quality.figures["mean_acceptance_length"].low)
    with pytest.raises(UsageError, match="no interval of this kind"):
        asdsim.replay(TRACES / "smollm2-layerskip", B=4, g=0.25, M=2, off_trace="pooled").quality()


def test_every_figure_has_an_interval_about_it(quality) -> None:
    assert set(quality.figures) == set(FIGURES)
    for name, one in quality.figures.items():
        some = ~np.isnan(one.value)
        assert (one.low[some] <= one.value[some] + 1e-12).all(), name
        assert (one.value[some] <= one.high[some] + 1e-12).all(), name
    frame = quality.frame()
    assert len(frame) == len(GRID) and {"speed_up", "speed_up_low", "speed_up_high", "mcnemar_p"} <= set(frame.columns)
    assert quality.row(3)["accuracy"] == [1.0, pytest.approx(0.7575, abs=1e-4), 1.0]  # 12 of 12 scored


def test_strict_gains_nothing_and_differs_nowhere(quality) -> None:
    for name, nothing in (("acceptance_length_gain", 0.0), ("speed_up", 1.0), ("length_change", 0.0),
                          ("edit_distance_mean", 0.0), ("logprob_change_mean", 0.0)):  # fmt: skip
        one = quality.figures[name]
        assert np.allclose([one.value[0], one.low[0], one.high[0]], nothing, rtol=0, atol=1e-12)
    share = quality.figures["outputs_differ_share"]
    assert share.value[0] == 0.0 and 0.1 < share.high[0] < 0.2  # none of 24 does not mean never


def test_answers_that_change_are_counted_by_pair(trace) -> None:
    table = {}

    def scorer(request: int, tokens: bytes) -> bool:
        """Strict outputs come first: they are right for even requests, all others for odd ones."""
        strict = table.setdefault(request, tokens) == tokens
        return strict == (request % 2 == 0)

    quality = Evaluator(trace, scorer=scorer).evaluate(
        GRID, figures=["accuracy", "accuracy_change", "outputs_differ_share"]
    )  # fmt: skip
    differ = np.rint(quality.figures["outputs_differ_share"].value * 24).astype(int)
    assert (quality.changed.sum(axis=1) == differ).all() and differ.max() == 24
    last = quality.row(len(GRID) - 1)
    assert (last["answers_gained"], last["answers_lost"], last["mcnemar_p"]) == (12, 12, 1.0)
    assert (last["scored_requests"], last["strict_right"]) == (24, 12)
    assert quality.about_scores() == "24 of 24 requests have a score, strict matching has 12 right"
    assert "speed_up" not in quality.figures  # no cost model, no speed


def test_outputs_that_end_by_themselves_are_counted(trace, result, quality) -> None:
    records = trace.request_records()
    for n in range(len(GRID)):
        last = [result.tokens(n, r)[-1] in record.eos_ids for r, record in enumerate(records)]
        assert quality.ended[n, 0] == sum(last)
    assert (quality.ended[:, 1] == quality.ended[0, 0]).all()  # B = 0 is strict
    assert quality.frame()["ended"].to_list() == quality.ended[:, 0].tolist()
    assert 0 < quality.ended[0, 0] < len(records)  # the token limit cut some
    assert Evaluator(trace).evaluate(GRID, off_trace="aligned").ended is None


def test_estimates_name_no_outputs_and_parts_stand_on_their_requests(trace) -> None:
    loose = Evaluator(trace).evaluate(Grid.product(3, 0.3, 3), off_trace="aligned")
    assert loose.exact_share[0] < 1 and "outputs_differ_share" not in loose.figures and loose.requests[0] == 24
    stopped = Evaluator(trace).evaluate(Grid.product(3, 0.3, 3))
    assert stopped.requests[0] == round(24 * stopped.exact_share[0])
    half = Evaluator(trace).evaluate(GRID, requests=range(12))
    other = Evaluator(trace).evaluate(GRID, requests=range(12, 24))
    whole = Evaluator(trace).evaluate(GRID)
    name = "regret_spent_mean"
    halves = (half.figures[name].value + other.figures[name].value) / 2
    assert np.allclose(halves, whole.figures[name].value) and (half.requests == 12).all()


def test_suffix_reuse_counts_only_where_there_is_room() -> None:
    regret, run, room = np.array([0.1, 0.2, 0.9, 0.3]), np.array([3, 0, 5, 1]), np.array([3, 2, 5, 1])
    reused, counted = suffix_reuse(regret, run, room, np.array([0.25, 1.0]), [1, 2])
    assert counted.sum(axis=2).tolist() == [[2, 2], [4, 3]]
    assert reused.sum(axis=2).tolist() == [[1, 1], [3, 2]]
