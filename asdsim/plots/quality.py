"""Figures of what settings gain and cost, all with 95 % intervals over requests: plain arrays in, figures out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from ..errors import UsageError
from ..stats import Intervals
from .rows import MAX_SETTINGS, label
from .style import DASHES, GREY, LINES, MARKERS, styled

if TYPE_CHECKING:
    import polars as pl

AXES = {
    "speed_up": "predicted speed-up over strict",
    "answer_speed_up": "predicted speed-up of an answer over strict",
    "mean_acceptance_length": "tokens per step (bonus included)",
    "outputs_differ_share": "outputs that differ from strict (%)",
    "regret_per_token": "regret per token (logits)",
    "edit_distance_mean": "edit distance to the strict output (0 to 1)",
    "length_change": "change of answer length (%)",
    "accuracy": "accuracy (%)",
}
PERCENT = ("outputs_differ_share", "length_change", "accuracy")


def front(gain: npt.NDArray[np.float64], risk: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the rows that no other one beats (more gain for no more risk), by rising risk; NaN rows never."""
    usable = np.flatnonzero(np.isfinite(gain) & np.isfinite(risk))
    order = usable[np.lexsort((-gain[usable], risk[usable]))]
    best = -math.inf
    kept = []
    for row in order:
        if gain[row] > best:
            best = gain[row]
            kept.append(row)
    return np.array(kept, np.int64)


def pareto_fronts(frame: pl.DataFrame, risks: Sequence[str], gain: str = "speed_up") -> Figure:
    """Draw speed against each of several risks: every exact setting, and the front with its intervals.

    Parameters
    ----------
    frame : polars.DataFrame
        From :meth:`asdsim.evaluate.quality.Quality.frame`, exact rows only are drawn.
    risks : sequence of str
        Columns; of ``accuracy`` more is better, of the others less.
    gain : str
    """
    frame = frame.filter(frame["exact_share"] == 1.0)
    if frame.is_empty():
        raise UsageError("no setting is exact: there is no front to draw", fix="run asdsim cover for the grid")
    strict = ((frame["B"] == 0) | (frame["M"] == 0)).to_numpy()
    if "accuracy" in risks and not (frame["accuracy"].to_numpy()[strict] > 0).any():
        # Where strict matching has nothing right there is nothing to lose, and no change says anything.
        risks = [risk for risk in risks if risk != "accuracy"]
    with styled():
        figure = Figure(figsize=(3.5 * len(risks) + 0.4, 4.0), layout="constrained")
        panels = figure.subplots(1, len(risks), sharey=True, squeeze=False)[0]
        for axes, risk in zip(panels, risks, strict=True):
            factor = 100.0 if risk in PERCENT else 1.0
            sign = -1.0 if risk == "accuracy" else 1.0
            x, y = (factor * frame[risk].to_numpy(), frame[gain].to_numpy())
            best = front(y, sign * x)
            axes.scatter(x, y, s=16, facecolors="none", edgecolors=LINES[3], linewidths=0.9, label="setting")
            box = [[x, frame[f"{risk}_low"].to_numpy() * factor, frame[f"{risk}_high"].to_numpy() * factor],
                   [y, frame[f"{gain}_low"].to_numpy(), frame[f"{gain}_high"].to_numpy()]]  # fmt: skip
            across, up = (
                np.abs(np.stack([values[best] - low[best], high[best] - values[best]])) for values, low, high in box
            )
            if risk != "accuracy":
                across[:, strict[best]] = 0.0  # by definition: strict does not differ from itself and spends nothing
            axes.errorbar(
                x[best], y[best], xerr=across, yerr=up, fmt="none", ecolor=GREY, elinewidth=0.8, capsize=2,
                label="95 % interval over requests",
            )  # fmt: skip
            order = best[np.argsort(x[best])]
            axes.plot(
                x[order], y[order], color=LINES[0], marker=MARKERS[1], markersize=4.5, linewidth=1.3,
                drawstyle="steps-pre" if risk == "accuracy" else "steps-post", label="front",
            )  # fmt: skip
            axes.set_xlabel(AXES[risk])
            axes.margins(0.12)
            if risk not in ("accuracy", "length_change"):  # risks begin at none: no large one stands at the left edge
                axes.set_xlim(0.0 - 0.04 * np.nanmax(x, initial=0.0), None)
            if risk == "accuracy":
                axes.invert_xaxis()
                axes.set_xlabel(AXES[risk] + ", falling")
            ends = [(int(best[-1]), (-4, 20), "right")]
            if len(best) > 1:
                ends.append((int(best[0]), (4, -14), "left"))
            for row, offset, side in ends:
                axes.annotate(
                    label(frame.row(row, named=True)), (x[row], y[row]), xytext=offset, textcoords="offset points",
                    fontsize=7.5, ha=side, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
                )  # fmt: skip
            axes.grid(axis="x")
        panels[0].set_ylabel(AXES[gain])
        figure.suptitle("What speed costs: exact settings and their fronts", x=0.01, ha="left", fontsize=11)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=3)
    return figure


def ledger_over_time(
    tokens: npt.NDArray[np.int64], curves: Mapping[str, tuple[Intervals, npt.NDArray[np.float64], float]]
) -> Figure:
    """Draw how the ledger grows over a request: the mean with its interval, and the middle 80 % of requests.

    Parameters
    ----------
    tokens : int64 (t,)
        Generated tokens.
    curves : mapping of str to (Intervals, float64 (2, t), float)
        Per setting the mean ledger, its 10th and 90th percentile over requests, and the budget B.
    """
    if not 0 < len(curves) <= MAX_SETTINGS:
        raise UsageError(f"{len(curves)} settings to draw", fix=f"give 1 to {MAX_SETTINGS}")
    with styled():
        across = min(len(curves), 2)
        down = math.ceil(len(curves) / across)
        figure = Figure(figsize=(4.3 * across, 3.0 * down + 0.6), layout="constrained")
        panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
        for nth, (name, (mean, spread, budget)) in enumerate(curves.items()):
            axes = panels[nth]
            axes.fill_between(tokens, spread[0], spread[1], color="#D9D9D9", label="middle 80 % of requests")
            axes.fill_between(
                tokens, mean.low, mean.high, color=LINES[3], alpha=0.6, label="95 % interval of the mean", linewidth=0
            )
            axes.plot(tokens, mean.value, color=LINES[0], label="mean ledger")
            if math.isfinite(budget):
                axes.axhline(budget, color=LINES[2], linestyle=DASHES[1], label="budget B")
            axes.set_title(name, loc="left")
            if nth % across == 0:
                axes.set_ylabel("regret spent (logits)")
            if nth + across >= len(curves):
                axes.set_xlabel("generated tokens")
                axes.tick_params(labelbottom=True)
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
        figure.suptitle("The ledger over a request", x=0.01, ha="left", fontsize=11)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2)
    return figure


def gain_by_budget(frame: pl.DataFrame, gates: Sequence[float]) -> Figure:
    """Draw the gain in acceptance length over B, one line per g and one panel per M, with intervals.

    Parameters
    ----------
    frame : polars.DataFrame
        From :meth:`asdsim.evaluate.quality.Quality.frame`; settings that are not exact are left out.
    gates : sequence of float
        At most four.
    """
    frame = frame.filter(frame["exact_share"] == 1.0)
    caps = sorted(set(frame["M"].to_list()))
    with styled():
        figure = Figure(figsize=(3.4 * len(caps) + 0.4, 4.0), layout="constrained")
        panels = figure.subplots(1, len(caps), sharey=True, squeeze=False)[0]
        for axes, cap in zip(panels, caps, strict=True):
            for nth, gate in enumerate(gates[:MAX_SETTINGS]):
                rows = frame.filter((frame["M"] == cap) & (frame["g"] == gate)).sort("B")
                value, low, high = (
                    100 * rows[f"acceptance_length_gain{end}"].to_numpy() for end in ("", "_low", "_high")
                )
                place = np.arange(len(rows)) + 0.07 * (nth - (len(gates) - 1) / 2)
                axes.errorbar(
                    place, value, yerr=np.abs(np.stack([value - low, high - value])), color=LINES[nth],
                    linestyle=DASHES[nth], marker=MARKERS[nth], markersize=4.5, capsize=2, elinewidth=0.8,
                    label=f"g = {gate:g}",
                )  # fmt: skip
                axes.set_xticks(range(len(rows)), [f"{budget:g}" for budget in rows["B"]])
            axes.axhline(0, color=GREY, linewidth=1)
            axes.set_xlabel("budget B (logits per request)")
            axes.set_title(f"M = {cap:g} per block" if math.isfinite(cap) else "no cap (M = inf)", loc="left")
        panels[0].set_ylabel("tokens per step against strict (%)")
        figure.suptitle(
            "Gain in acceptance length, with 95 % intervals paired by request", x=0.01, ha="left", fontsize=11
        )
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=4)
    return figure


def suffix_reuse(
    thresholds: npt.NDArray[np.float64], curves: Mapping[int, tuple[Intervals, npt.NDArray[np.int64]]]
) -> Figure:
    """Draw the share of cheap mismatches whose next p draft tokens are exact, over the regret threshold.

    Parameters
    ----------
    thresholds : float64 (t,)
        tau, in logits.
    curves : mapping of int to (Intervals, int64 (t,))
        Per p, from :func:`asdsim.evaluate.per_step.reuse_curves`.
    """
    with styled():
        figure = Figure(figsize=(6.8, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for nth, (p, (share, counted)) in enumerate(list(curves.items())[:MAX_SETTINGS]):
            shift = 1.0 + 0.02 * (nth - 1.5)  # so that intervals of one tau stand side by side on the log axis
            reach = np.abs(np.stack([share.value - share.low, share.high - share.value])) * 100
            axes.errorbar(
                thresholds * shift, 100 * share.value, yerr=reach, color=LINES[nth], linestyle=DASHES[nth],
                marker=MARKERS[nth], markersize=4.5, capsize=2, elinewidth=0.9,
                label=f"next {p} exact" + f" ({counted[-1]:,} mismatches have {p} behind them)",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("mismatches with at most this regret (logits)")
        axes.set_ylabel("share followed by exact draft tokens (%)")
        axes.set_ylim(0, 102)
        axes.set_title("What accepting a mismatch saves: the suffix that is already verified", loc="left")
        figure.legend(loc="outside lower left", ncols=1)
    return figure


def acceptance(
    named: Mapping[str, tuple[Intervals, Intervals, Intervals]], lengths: Mapping[str, tuple[float, float, float]]
) -> Figure:
    """Draw steps by accepted draft tokens, and acceptance by position, each with intervals.

    Parameters
    ----------
    named : mapping of str to (Intervals, Intervals, Intervals)
        Per setting: share of steps by count (K + 1,), acceptance by position of all steps (K,), and of those that
        accepted all before it (K,).
    lengths : mapping of str to (value, low, high)
        Mean acceptance length of each setting, for the legend.
    """
    if not 0 < len(named) <= MAX_SETTINGS:
        raise UsageError(f"{len(named)} settings to draw", fix=f"give 1 to {MAX_SETTINGS}")
    with styled():
        figure = Figure(figsize=(11.0, 4.4), layout="constrained")
        left, middle, right = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1.5, 1, 1]})
        bar = 0.8 / len(named)
        for nth, (name, (share, reached, given)) in enumerate(named.items()):
            text = "{}: {:.2f} tokens per step ({:.2f} to {:.2f})".format(name, *lengths[name])
            place = np.arange(len(share.value)) + (nth - (len(named) - 1) / 2) * bar
            left.bar(
                place, 100 * share.value, bar, color=LINES[nth], edgecolor="black", linewidth=0.5, label=text,
                yerr=_reach(share), error_kw={"elinewidth": 0.8, "ecolor": "#999999", "capsize": 1.5},
            )  # fmt: skip
            position = np.arange(1, len(reached.value) + 1) + 0.06 * (nth - (len(named) - 1) / 2)
            for axes, curve in ((middle, reached), (right, given)):
                axes.errorbar(
                    position, 100 * curve.value, yerr=_reach(curve), color=LINES[nth], linestyle=DASHES[nth],
                    marker=MARKERS[nth], markersize=4, capsize=1.5, elinewidth=0.8,
                )  # fmt: skip
        left.set_xticks(range(len(share.value)))
        left.set_xlabel("accepted draft tokens per step (bonus not counted)")
        left.set_ylabel("share of steps (%)")
        left.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=""))
        left.set_title("Steps by accepted tokens", loc="left")
        middle.set_title("Position accepted, of all steps", loc="left")
        right.set_title("Of steps that got that far", loc="left")
        for axes in (middle, right):
            axes.set_ylim(0, 103)
            axes.set_xlabel("draft position (1 = first)")
            axes.set_ylabel("share (%)")
            axes.set_xticks(range(1, len(reached.value) + 1))
        figure.suptitle("Acceptance, with 95 % intervals over requests", x=0.01, ha="left", fontsize=11)
        figure.legend(loc="outside lower left", ncols=2)
    return figure


def _reach(share: Intervals) -> npt.NDArray[np.float64]:
    return 100 * np.nan_to_num(np.abs(np.stack([share.value - share.low, share.high - share.value])))


def record_of(figure: Intervals) -> dict[str, Any]:
    """Return the numbers of an interval, for a figure's JSON."""
    return {"value": figure.value, "low": figure.low, "high": figure.high}
