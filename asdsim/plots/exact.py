"""Figures about completeness: what covering costs, and how far estimates are off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from .style import DASHES, GREY, LINES, MARKERS, styled

if TYPE_CHECKING:
    import polars as pl

NAMES = {"aligned": "aligned", "recorded": "recorded order", "pooled": "pooled"}


def steps_by_settings(traces: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Draw distinct steps per request against the number of settings, beside what live runs take.

    Parameters
    ----------
    traces : mapping of str to sequence of mapping
        Per trace, rows with ``settings``, ``distinct`` and ``live`` (steps per request).
    """
    with styled():
        figure = Figure(figsize=(6.8, 4.4), layout="constrained")
        axes = figure.subplots()
        for nth, (name, rows) in enumerate(traces.items()):
            settings = [row["settings"] for row in rows]
            look: dict[str, Any] = {"color": LINES[nth + 1], "marker": MARKERS[nth], "markersize": 5}
            axes.plot(settings, [row["distinct"] for row in rows], **look, label=f"{name}: distinct steps (cover)")
            axes.plot(
                settings, [row["live"] for row in rows], **look, linestyle=DASHES[1], markerfacecolor="white",
                label=f"{name}: steps of live runs",
            )  # fmt: skip
            last = rows[-1]
            axes.annotate(
                f"{last['live'] / last['distinct']:.0f}x fewer", (last["settings"], last["distinct"]),
                xytext=(0, -14), textcoords="offset points", ha="right", color=LINES[nth + 1],
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("settings (B, g, M) in the grid")
        axes.set_ylabel("model steps per request")
        axes.set_title("What exactness costs: steps to run, by number of settings", loc="left")
        axes.grid(visible=True, which="major", color="#dddddd")
        figure.legend(loc="outside lower left", frameon=False)
    return figure


def fidelity_errors(settings: pl.DataFrame, figure_name: str = "mean_acceptance_length") -> Figure:
    """Draw the error of every estimate, setting by setting, against the exact value.

    Parameters
    ----------
    settings : polars.DataFrame
        As in :class:`asdsim.studies.fidelity.Fidelity`.
    figure_name : str
        Which figure's error.
    """
    with styled():
        figure = Figure(figsize=(7.6, 4.2), layout="constrained")
        axes = figure.subplots()
        shown = settings.filter(settings["figure"] == figure_name)
        for nth, name in enumerate(shown["estimator"].unique(maintain_order=True)):
            rows = shown.filter(shown["estimator"] == name)
            error = 100 * rows["error"].to_numpy()
            axes.scatter(
                rows["exact"].to_numpy(), error, s=22, marker=MARKERS[nth], facecolors="none", edgecolors=LINES[nth],
                label=f"{NAMES.get(name, name)}: mean {np.abs(error).mean():.1f} %, worst {np.abs(error).max():.1f} %",
            )  # fmt: skip
        axes.axhline(0.0, color=GREY, linewidth=1)
        axes.set_xlabel("exact mean acceptance length (tokens per step, bonus included)")
        axes.set_ylabel("estimate against exact (%)")
        axes.set_title("Error of estimates from the captured path alone, one mark per setting", loc="left")
        figure.legend(loc="outside lower left", frameon=False, ncols=1)
    return figure
