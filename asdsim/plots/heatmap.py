"""Acceptance length over B and g, one panel per M."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ..errors import UsageError
from ..walk.off_trace import OFF_TRACE
from .rows import finite, need, note_of
from .style import GREY, NO_COLOUR, styled

if TYPE_CHECKING:
    import polars as pl


def acceptance_heatmap(frame: pl.DataFrame) -> Figure:
    """Draw mean acceptance length over B (across) and g (up), one panel per M; cells that are not exact are hatched.

    A mean over only the requests that stayed on the captured steps is another quantity than its neighbours: such a cell
    is grey, and no part of the colour scale.

    Parameters
    ----------
    frame : polars.DataFrame
        Result rows with B, g, M, off_trace, exact_share and mean_acceptance_length.

    Raises
    ------
    UsageError
        If a setting appears twice, or no setting has a length to show.
    """
    need(frame, ("B", "g", "M", "off_trace", "exact_share", "mean_acceptance_length"))
    if frame.select("B", "g", "M").is_duplicated().any():
        raise UsageError("a setting appears twice in the table", fix="plot one rule and one semantics at a time")
    rows = frame.to_dicts()
    lengths = [row["mean_acceptance_length"] for row in rows if finite(row["mean_acceptance_length"])]
    if not lengths:
        raise UsageError(
            "no setting of this table has a length to show", fix="replay with --off-trace aligned, or cover"
        )
    budgets, gates, caps = (sorted({row[name] for row in rows}) for name in ("B", "g", "M"))
    whole = [
        row["mean_acceptance_length"] for row in rows if finite(row["mean_acceptance_length"]) and not _partial(row)
    ]
    scale = whole or lengths
    lowest, highest = min(scale), max(scale)
    # One value has no scale: its cells get a colour from the middle and no bar.
    norm = Normalize(lowest, highest) if lowest < highest else Normalize(lowest - 0.5, highest + 0.5)
    across = min(len(caps), 3)
    down = math.ceil(len(caps) / across)
    # Numbers go into the cells while they can be read; a panel grows with its grid up to the width of a page.
    cell_w, cell_h = 0.58, 0.42
    panel_w = min(max(len(budgets) * cell_w, 2.2), 4.2 if across > 1 else 8.0)
    panel_h = min(max(len(gates) * cell_h, 1.6), 4.5)
    readable = panel_w / len(budgets) >= 0.4 and panel_h / len(gates) >= 0.26
    with styled():
        figure = Figure(figsize=(across * (panel_w + 0.35) + 1.6, down * (panel_h + 0.55) + 1.2), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        image = None
        for nth, axes in enumerate(panels.ravel()):
            if nth >= len(caps):
                axes.set_axis_off()
                continue
            here = [row for row in rows if row["M"] == caps[nth]]
            image = _panel(axes, here, budgets, gates, norm, readable)
            cap = caps[nth]
            axes.set_title(f"M = {cap:g} per block" if math.isfinite(cap) else "no cap (M = inf)", loc="left")
            if nth % across == 0:
                axes.set_ylabel("gate g (logits per token)")
            else:
                axes.tick_params(left=False)
            if nth + across >= len(caps):
                axes.set_xlabel("budget B (logits per request)")
                axes.tick_params(labelbottom=True)
        assert image is not None
        if whole and lowest < highest:
            bar = figure.colorbar(image, ax=panels, pad=0.02, shrink=0.9)
            bar.set_label("tokens per step")
            bar.ax.yaxis.set_major_locator(MaxNLocator(6))
        figure.suptitle(
            "Mean acceptance length (tokens per step, bonus token included)", x=0.01, ha="left", fontsize=11
        )
        handles = _legend(rows, readable)
        if handles:
            figure.legend(handles=handles, loc="outside lower left", ncols=1, handlelength=2.6, handleheight=1.4)
    return figure


def _legend(rows: Sequence[Mapping[str, Any]], readable: bool) -> list[Patch]:
    """Say what the cells mean that are not exact; empty where all are."""
    handles: list[Patch] = []
    drawn = [row for row in rows if finite(row["mean_acceptance_length"])]
    if any(map(_partial, drawn)):
        meaning = f"{OFF_TRACE['stop'].figure_note}: no fair sample, so no colour" + (
            " (per cent of all)" if readable else ""
        )
        handles.append(Patch(facecolor=NO_COLOUR, edgecolor=GREY, hatch="////", linewidth=0, label=meaning))
    estimated = note_of([row for row in drawn if not _partial(row)])
    if estimated:
        handles.append(Patch(facecolor="white", edgecolor="black", hatch="////", label=estimated))
    if any(not finite(row["mean_acceptance_length"]) for row in rows):
        handles.append(
            Patch(
                facecolor="white",
                edgecolor=GREY,
                hatch="xx",
                label="no figure: every request left the captured steps",
            )
        )
    return handles


def _partial(row: Mapping[str, Any]) -> bool:
    """Tell whether the figures of a row stand on only the requests that stayed on the captured steps."""
    return bool(row["off_trace"] == "stop" and row["exact_share"] < 1)


def _panel(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    budgets: Sequence[float],
    gates: Sequence[float],
    norm: Normalize,
    readable: bool,
) -> Any:
    values = np.full((len(gates), len(budgets)), np.nan)
    shares = np.ones_like(values)
    at_stop = np.zeros(values.shape, bool)  # where the mean is one over the requests that stayed
    for row in rows:
        cell = gates.index(row["g"]), budgets.index(row["B"])
        shares[cell] = row["exact_share"]
        at_stop[cell] = _partial(row)
        if finite(row["mean_acceptance_length"]):
            values[cell] = row["mean_acceptance_length"]
    asked = {(gates.index(row["g"]), budgets.index(row["B"])) for row in rows}
    coloured = np.where(at_stop, np.nan, values)
    image = axes.imshow(coloured, origin="lower", aspect="auto", cmap="cividis", norm=norm, interpolation="nearest")
    partial = [cell for cell in sorted(asked) if at_stop[cell] and np.isfinite(values[cell])]
    inexact = [cell for cell in sorted(asked) if shares[cell] < 1 and np.isfinite(coloured[cell])]
    dark = [cell for cell in inexact if _is_dark(norm(values[cell]))]
    light = [cell for cell in inexact if cell not in set(dark)]
    absent = [cell for cell in sorted(asked) if not np.isfinite(values[cell])]
    looks: tuple[tuple[list[tuple[int, int]], dict[str, Any]], ...] = (
        (partial, {"facecolor": NO_COLOUR, "edgecolor": GREY, "hatch": "////"}),
        (dark, {"facecolor": "none", "edgecolor": "white", "hatch": "////", "alpha": 0.6}),
        (light, {"facecolor": "none", "edgecolor": "black", "hatch": "////", "alpha": 0.6}),
        (absent, {"facecolor": "none", "edgecolor": GREY, "hatch": "xx", "alpha": 1.0}),
    )
    for cells, look in looks:
        if cells:
            boxes = [Rectangle((col - 0.5, line - 0.5), 1, 1) for line, col in cells]
            axes.add_collection(PatchCollection(boxes, linewidth=0, **look))
    if readable:
        for line, col in sorted(asked):
            if not np.isfinite(values[line, col]):
                continue
            grey = at_stop[line, col]
            back = NO_COLOUR if grey else matplotlib.colormaps["cividis"](norm(values[line, col]))
            box = {"facecolor": back, "edgecolor": "none", "pad": 1.2} if shares[line, col] < 1 else None
            axes.text(
                col,
                line,
                f"{values[line, col]:.2f}" + (f"\n{100 * shares[line, col]:.0f} %" if grey else ""),
                ha="center",
                va="center",
                fontsize=7 if grey else 8,
                linespacing=1.0,
                color="white" if not grey and _is_dark(norm(values[line, col])) else "black",
                bbox=box,
            )
    for axis, ticks in ((axes.xaxis, budgets), (axes.yaxis, gates)):
        stride = math.ceil(len(ticks) / 9) if not readable else 1
        axis.set_ticks(range(0, len(ticks), stride), [_number(tick) for tick in ticks[::stride]])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def _is_dark(level: float) -> bool:
    red, green, blue, _ = matplotlib.colormaps["cividis"](level)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.5


def _number(value: float) -> str:
    return f"{value:g}"
