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
from asdsim.rules.settings import STRICT, Grid, rule_grids
from asdsim.trace.reader import read_trace
from tests.support.toytrace import RELAXED, relaxed_requests, write_relaxed_trace

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
    assert quality.about_scores() == "24 of 24 requests are scored, strict matching gets 12 right"
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


def test_scores_of_strict_answers_are_those_of_strict_matching(trace) -> None:
    """A scorer that calls only the strict output right: an asymmetric case, unlike 12 gained and 12 lost."""
    strict = asdsim.result.replay_grid(trace, Grid.of([STRICT]))
    outputs = [np.array(strict.tokens(0, r), "<i4").tobytes() for r in range(24)]
    scorer = lambda request, tokens: tokens == outputs[request]  # noqa: E731
    quality = Evaluator(trace, scorer=scorer).evaluate(GRID)
    assert quality.scored.tolist() == [[24, 24]] * len(GRID)
    differ = np.rint(quality.figures["outputs_differ_share"].value * 24).astype(int)
    assert quality.changed[:, 0].tolist() == [0] * len(GRID) and quality.changed[:, 1].tolist() == differ.tolist()
    last = quality.row(len(GRID) - 1)
    assert (last["answers_gained"], last["answers_lost"]) == (0, 24) and last["accuracy"][0] == 0.0
    assert last["accuracy_change"][0] == -1.0 and last["mcnemar_p"] == pytest.approx(2 * 0.5**24)
    assert quality.row(0)["accuracy"][0] == 1.0 and quality.row(0)["mcnemar_p"] == 1.0


def test_a_setting_that_is_not_exact_has_values_without_intervals(trace) -> None:
    mixed = Grid.product("4,3", ".25,.3", 2)  # the first is covered
    for off_trace in ("stop", "aligned"):
        quality = Evaluator(trace, cost=fit_trace(trace)).evaluate(mixed, off_trace=off_trace)
        assert quality.exact.tolist() == [True, False, False, False]
        for name, interval in quality.figures.items():
            assert np.isfinite([interval.low[0], interval.high[0]]).all(), name
            assert np.isnan([interval.low[1:], interval.high[1:]]).all() and np.isfinite(interval.value[0]), name
            gain_of_survivors = off_trace == "stop" and name == "acceptance_length_gain"
            assert (np.isnan if gain_of_survivors else np.isfinite)(interval.value[1:]).all(), name
        assert [quality.row(n)["exact"] for n in range(4)] == [True, False, False, False]
        assert quality.frame()["speed_up_low"].is_null().to_list() == [False, True, True, True]
    scored = Evaluator(trace, scorer=lambda request, tokens: len(tokens) % 8 == 0).evaluate(mixed)
    assert scored.row(0)["mcnemar_p"] is not None and scored.row(1)["mcnemar_p"] is None


@pytest.mark.parametrize("off_trace", ["stop", "aligned"])
def test_requests_without_a_captured_strict_walk_leave_every_figure(tmp_path: Path, off_trace: str) -> None:
    source = read_trace(write_relaxed_trace(tmp_path / "relaxed", strict_for=3))
    everything = Grid.product("inf", "inf", "inf")
    quality = Evaluator(source).evaluate(everything, off_trace=off_trace)
    row = quality.row(0)
    assert (row["requests"], row["exact_share"], row["exact"]) == (3, 1.0, False)
    model = RELAXED
    tokens = steps = strict_tokens = strict_steps = 0
    for request in relaxed_requests()[:3]:
        decoded = model.decode(request)
        strict_steps += len(decoded)
        strict_tokens += decoded[-1].start_pos + len(model.outcomes(request, decoded[-1])[0][1])
        path = [step for step in source.steps_of(request.request_id) if step.wave == 0]
        steps += len(path)
        tokens += path[-1].start_pos + len(model.outcomes(request, path[-1])[-1][1])
    assert row["mean_acceptance_length"] == [tokens / steps, None, None]
    gain = tokens / steps / (strict_tokens / strict_steps) - 1
    assert row["acceptance_length_gain"] == [pytest.approx(gain, abs=1e-12), None, None] and gain > 0.05
    if off_trace == "stop":
        assert row["outputs_differ_share"][0] == 1.0 and row["length_change"][0] == tokens / strict_tokens - 1
    alone = Evaluator(source).evaluate(everything, requests=range(3)).row(0)
    assert alone["exact"] and alone["mean_acceptance_length"][:1] == row["mean_acceptance_length"][:1]
    none = Evaluator(source).evaluate(everything, requests=range(3, 10)).row(0)
    assert none["requests"] == 0 and none["mean_acceptance_length"] == [None, None, None]


def test_shorter_blocks_are_put_beside_strict_matching_of_whole_ones(trace) -> None:
    grids = rule_grids("truncate", {"K": [1, 7]})
    short, whole = (Evaluator(trace, cost=fit_trace(trace)).evaluate(grid, off_trace="stop") for grid in grids)
    strict = Evaluator(trace).evaluate(Grid.of([STRICT])).figures["mean_acceptance_length"].value[0]
    assert whole.figures["acceptance_length_gain"].value[0] == 0.0 and whole.figures["speed_up"].value[0] == 1.0
    assert short.exact_share[0] < 1.0  # blocks of one draft token end at prefixes that strict matching skips
    guess = Evaluator(trace, cost=fit_trace(trace)).evaluate(grids[0], off_trace="aligned")
    assert guess.figures["mean_acceptance_length"].value[0] < 2.0 < 4.0 < strict
    gain = guess.figures["mean_acceptance_length"].value[0] / strict - 1.0
    assert guess.figures["acceptance_length_gain"].value[0] == pytest.approx(gain, rel=1e-12)
    assert whole.figures["mean_acceptance_length"].value[0] == strict
    assert whole.row(0)["outputs_differ_share"][0] == 0.0


def test_two_seeds_draw_other_requests_and_one_seed_the_same(trace) -> None:
    ends = []
    for seed in (0, 1, 1):
        one = Evaluator(trace, seed=seed).evaluate(GRID).figures["acceptance_length_gain"]
        ends.append(np.stack([one.low, one.high])[:, 4:])  # B = 0 gains nothing in every resample
    assert (ends[1] == ends[2]).all() and (ends[0] != ends[1]).mean() > 0.9


def test_speed_over_the_target_alone_counts_one_pass_per_token() -> None:
    """Ten tokens alone: the prompt in 60 ms with its token, and nine passes of 20 ms."""
    from asdsim.evaluate.cost import CostModel, Linear

    cost = CostModel(
        draft=Linear(5_000), verify=Linear(20_000), select=Linear(1_000), first=Linear(66_000), source="by hand"
    )
    assert cost.plain_seconds(10, 100) == pytest.approx(0.060 + 9 * 0.020) and cost.plain_seconds(0, 100) == 0.0
    # Three steps for ten tokens: 66 ms, then two of 26 ms.
    assert cost.seconds(3, 21, 10, 100) == pytest.approx(0.066 + 2 * 0.026)
    s = {"tokens": np.array(10.0), "seconds": cost.seconds(3, 21, 10, 100), "tokens_strict": np.array(10.0),
         "plain_strict": cost.plain_seconds(10, 100)}  # fmt: skip
    assert FIGURES["speed_up_plain"].formula(s) == pytest.approx(0.240 / 0.118)
