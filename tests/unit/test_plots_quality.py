"""Figures with intervals: what they show equals what they were given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import asdsim
from asdsim.errors import UsageError
from asdsim.evaluate.quality import Evaluator
from asdsim.plots import quality as plots_quality
from asdsim.rules.settings import Grid
from asdsim.stats import Intervals

TRACE = Path(__file__).resolve().parents[2] / "traces" / "smollm2-layerskip"


def test_front_keeps_what_nothing_beats() -> None:
    gain = np.array([1.0, 1.5, 1.4, 1.6, np.nan, 1.6])
    risk = np.array([0.0, 0.2, 0.3, 0.4, 0.0, 0.5])
    assert plots_quality.front(gain, risk).tolist() == [0, 1, 3]


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    trace = asdsim.load(TRACE)
    evaluator = Evaluator(trace, scorer=lambda r, tokens: r % 2 == 0)
    return evaluator.evaluate(Grid.product("0,2,8", ".25,.5", "1,2")).frame()


def test_fronts_show_every_exact_setting_and_intervals_of_the_best(frame) -> None:
    figure = plots_quality.pareto_fronts(frame, ["regret_per_token", "accuracy"], gain="mean_acceptance_length")
    left, right = figure.axes
    points = left.collections[0].get_offsets()
    assert np.allclose(points[:, 0], frame["regret_per_token"]) and np.allclose(
        points[:, 1], frame["mean_acceptance_length"]
    )
    kept = plots_quality.front(frame["mean_acceptance_length"].to_numpy(), frame["regret_per_token"].to_numpy())
    assert len(left.lines[-1].get_xdata()) == len(kept) and right.get_xlim()[0] > right.get_xlim()[1]
    with pytest.raises(UsageError, match="no setting is exact"):
        plots_quality.pareto_fronts(frame.with_columns(exact_share=0.5), ["regret_per_token"])


def test_gains_are_drawn_in_per_cent_for_each_cap(frame) -> None:
    figure = plots_quality.gain_by_budget(frame, [0.25, 0.5])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["M = 1 per block", "M = 2 per block"]
    wanted = frame.filter((pl.col("M") == 1) & (pl.col("g") == 0.25)).sort("B")["acceptance_length_gain"]
    assert np.allclose(figure.axes[0].lines[0].get_ydata(), 100 * wanted.to_numpy())


def test_ledger_and_reuse_draw_what_they_are_given() -> None:
    tokens = np.arange(4)
    mean = Intervals(np.array([0, 1, 2, 3.0]), np.array([0, 0.5, 1, 2.0]), np.array([0, 2, 3, 4.0]))
    spread = np.stack([mean.low, mean.high])
    figure = plots_quality.ledger_over_time(tokens, {"one": (mean, spread, 4.0), "two": (mean, spread, np.inf)})
    assert np.array_equal(figure.axes[0].lines[0].get_ydata(), mean.value)
    assert len(figure.axes[0].lines) == 2 and len(figure.axes[1].lines) == 1  # no line for an infinite budget
    with pytest.raises(UsageError, match="0 settings"):
        plots_quality.ledger_over_time(tokens, {})
    figure = plots_quality.suffix_reuse(np.array([0.1, 1, 2, 4]), {1: (mean, np.array([5, 6, 7, 8]))})
    assert "8 mismatches have 1 behind" in figure.legends[0].get_texts()[0].get_text()


def test_acceptance_names_lengths_with_their_intervals() -> None:
    share = Intervals(np.array([0.25, 0.75]), np.array([0.2, 0.6]), np.array([0.4, 0.8]))
    one = Intervals(np.array([0.75]), np.array([0.6]), np.array([0.8]))
    figure = plots_quality.acceptance({"strict": (share, one, one)}, {"strict": (1.75, 1.5, 2.0)})
    assert figure.legends[0].get_texts()[0].get_text() == "strict: 1.75 tokens per step (1.50 to 2.00)"
    assert [bar.get_height() for bar in figure.axes[0].patches] == [25.0, 75.0]


def test_accuracy_is_left_out_where_strict_has_nothing_right() -> None:
    trace = asdsim.load(TRACE)
    none_right = Evaluator(trace, scorer=lambda r, tokens: False).evaluate(Grid.product("0,8", 0.25, 2)).frame()
    figure = plots_quality.pareto_fronts(none_right, ["regret_per_token", "accuracy"], gain="mean_acceptance_length")
    assert len(figure.axes) == 1


def test_strict_has_no_interval_for_differing_from_itself(frame) -> None:
    figure = plots_quality.pareto_fronts(frame, ["outputs_differ_share"], gain="mean_acceptance_length")
    (axes,) = figure.axes
    across = axes.collections[1].get_segments()  # horizontal bars of the front, strict first
    assert across[0][0].tolist() == across[0][1].tolist()
    assert axes.get_xlim()[0] <= 0
