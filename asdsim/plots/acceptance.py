"""How many draft tokens steps accept, and at which position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from .rows import label, note_of, pick_settings
from .style import DASHES, FILLS, GREY, LINES, MARKERS, legend_below, styled

if TYPE_CHECKING:
    import polars as pl


def acceptance_distribution(frame: pl.DataFrame) -> Figure:
    """Draw how many draft tokens a step accepts, one group of bars per count, one bar per setting.

    Parameters
    ----------
    frame : polars.DataFrame
        Result rows; at most four are shown, see :func:`pick_settings`.
    """
    rows = pick_settings(frame).to_dicts()
    width = max(len(row["acceptance_histogram"]) for row in rows)
    with styled():
        figure = Figure(figsize=(max(6.4, 0.55 * width + 2), 4.2), layout="constrained")
        axes = figure.add_subplot()
        bar = 0.8 / len(rows)
        for nth, row in enumerate(rows):
            axes.bar(
                np.arange(width) + (nth - (len(rows) - 1) / 2) * bar,
                _shares(row, width),
                bar,
                color=FILLS[nth],
                edgecolor="white" if nth == 0 and row["exact_share"] < 1 else "black",
                linewidth=0.5,
                hatch="////" if row["exact_share"] < 1 else None,
                label=_legend_label(row),
            )
        axes.set_xticks(range(width))
        axes.set_xlabel("accepted draft tokens per step (bonus token not counted)")
        axes.set_ylabel("share of steps (%)")
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=""))
        axes.set_title("Acceptance length by setting", loc="left")
        legend_below(figure, axes, note_of(rows))
    return figure


def acceptance_by_position(frame: pl.DataFrame, *, match_share: npt.NDArray[np.float64] | None = None) -> Figure:
    """Draw, per draft position, the share of steps that accept it, and the same among steps that got that far.

    Parameters
    ----------
    frame : polars.DataFrame
        Result rows; at most four are shown. A step whose block is shorter than a position does not accept it.
    match_share : float64 (K,), optional
        Share (0 to 1) of draft tokens that equal the target's choice at each position, whatever came before.
    """
    rows = pick_settings(frame).to_dicts()
    width = max(len(row["acceptance_histogram"]) for row in rows)
    position = np.arange(1, width)
    with styled():
        figure = Figure(figsize=(8.6, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for nth, row in enumerate(rows):
            reached = np.cumsum(_shares(row, width)[::-1])[::-1]  # share of steps with at least 0, 1, .. accepted
            look: dict[str, Any] = {
                "color": LINES[nth],
                "linestyle": DASHES[nth],
                "marker": MARKERS[nth],
                "markersize": 5,
                "markerfacecolor": "white" if row["exact_share"] < 1 else LINES[nth],
            }
            left.plot(position, reached[1:], label=_legend_label(row), **look)
            given = np.divide(100 * reached[1:], reached[:-1], out=np.full(width - 1, np.nan), where=reached[:-1] > 0)
            right.plot(position, given, **look)
        if match_share is not None:
            left.plot(
                np.arange(1, len(match_share) + 1),
                100 * match_share,
                color=GREY,
                linestyle=(0, (1, 2)),
                marker="x",
                markersize=5,
                label="draft token is the target's choice, whatever came before",
            )
        left.set_ylabel("share (%)")
        left.set_ylim(0, 103)
        left.set_title("Of all steps: position accepted", loc="left")
        right.set_title("Of steps that accepted all before it", loc="left")
        for axes in (left, right):
            axes.set_xlabel("draft position in the block (1 = first)")
            axes.set_xticks(position if width <= 17 else position[:: math.ceil(width / 16)])
            axes.set_xlim(0.6, width - 0.6)
        legend_below(figure, left, note_of(rows), "open markers")
    return figure


def _shares(row: Mapping[str, Any], width: int) -> npt.NDArray[np.float64]:
    """Return the acceptance histogram of a row in per cent of its steps, padded to ``width``."""
    histogram = np.zeros(width)
    histogram[: len(row["acceptance_histogram"])] = row["acceptance_histogram"]
    return 100.0 * histogram / histogram.sum()


def _legend_label(row: Mapping[str, Any]) -> str:
    histogram = row["acceptance_histogram"]
    drafts = sum(count * steps for count, steps in enumerate(histogram)) / sum(histogram)
    text = f"{label(row)}: {row['mean_acceptance_length']:.2f} tokens per step, {drafts:.2f} without the bonus"
    if row["exact_share"] < 1:
        text += f" (exact for {100 * row['exact_share']:.0f} % of requests)"
    return text


def match_share(
    draft_id: npt.NDArray[np.integer], argmax_id: npt.NDArray[np.integer], position: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """Return, per draft position, the share of draft tokens that equal the target's choice.

    Parameters
    ----------
    draft_id, argmax_id, position : int (n,)
        One entry per draft position of every step, bonus rows left out.
    """
    drafted = np.bincount(position)
    return np.bincount(position, weights=draft_id == argmax_id, minlength=len(drafted)) / np.maximum(drafted, 1)
