"""Figures from results: plain tables and arrays in, matplotlib figures out.

Nothing here touches pyplot, so no display, backend or global figure list is involved. Colours are those of Okabe and
Ito (bars and lines) and cividis (maps): told apart by people with any colour vision, and, by lightness, markers and
line style, in grey print. Rows that are not exact (``exact_share`` below 1) are hatched in maps and bars, drawn with
open markers in lines, and named in the legend; in maps, means over only the requests that stayed are grey.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from ..errors import AsdsimError, UsageError
from ..files import dump_json, write_atomically
from ..provenance import provenance as made_with

if TYPE_CHECKING:
    import polars as pl

    from ..rules.settings import Policy
    from ..trace.graph import Graph

PROVENANCE_VERSION = 1
MAX_SETTINGS = 4
"""Settings that one distribution or line plot shows."""

PAPER = (8.0, 0.25, 2.0)
"""B, g and M of the paper's main results."""

FILLS = ("#000000", "#0072B2", "#E69F00", "#F0E442")
LINES = ("#000000", "#0072B2", "#D55E00", "#56B4E9")
MARKERS = ("o", "s", "^", "D")
DASHES = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)))
GREY = "#767676"
NO_COLOUR = "#E4E4E4"
LENGTHS = ("mean_acceptance_length", "accepted_per_proposal")

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "figure.dpi": 100,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "asdsim",
}

OFF_TRACE_NOTE = {
    "stop": "not exact; only the requests that stayed on captured steps",
    "aligned": "estimate; requests that left the captured steps go on at the nearest one",
    "recorded": "estimate; requests that left the captured steps go on with the next one",
    "pooled": "estimate; requests that left the captured steps go on at ones drawn at random",
}


@contextmanager
def styled() -> Iterator[None]:
    # From the defaults, so that a user's own matplotlib settings change no figure.
    parameters: Any = {**dict(matplotlib.rcParamsDefault), **STYLE}
    parameters.pop("backend", None)
    with matplotlib.rc_context(parameters):
        yield


# --- which rows to show -------------------------------------------------------------------------------------------


def label(row: Mapping[str, Any]) -> str:
    """Return the short name of a setting: ``strict``, or ``B=8 g=0.25 M=2``."""
    if row["B"] == 0 or row["M"] == 0:
        return "strict"
    return f"B={row['B']:g} g={row['g']:g} M={row['M']:g}"


def select(
    frame: pl.DataFrame,
    B: Sequence[float] | None = None,
    g: Sequence[float] | None = None,
    M: Sequence[float] | None = None,
) -> pl.DataFrame:
    """Return the rows whose B, g and M are among those given (``None`` keeps all).

    Raises
    ------
    UsageError
        If no row is left, or the table lacks a column.
    """
    _need(frame, ("B", "g", "M"))
    for name, wanted in (("B", B), ("g", g), ("M", M)):
        if wanted is None:
            continue
        kept = frame.filter(frame[name].is_in(list(wanted)))
        if kept.is_empty():
            have = ", ".join(f"{value:g}" for value in frame[name].unique().sort().to_list()[:12])
            raise UsageError(
                f"no setting with {name} = {', '.join(f'{v:g}' for v in wanted)}", fix=f"{name} in the table: {have}"
            )
        frame = kept
    return frame


def pick_settings(frame: pl.DataFrame, limit: int = MAX_SETTINGS) -> pl.DataFrame:
    """Choose few rows that span a sweep: strict and the paper's setting if they are there, the rest evenly by length.

    Rows that rest on no request are left out. Where enough rows are exact, only exact ones are chosen.
    """
    _need(
        frame,
        ("B", "g", "M", "off_trace", "exact_share", "mean_acceptance_length", "acceptance_histogram", "num_spec_steps"),
    )
    rows = [row for row in frame.to_dicts() if row["num_spec_steps"] and _finite(row["mean_acceptance_length"])]
    if not rows:
        raise UsageError("no setting of this table has a step to show", fix="replay with --off-trace aligned, or cover")
    # One strict row stands for all of them: every setting with B = 0 walks alike.
    strict = [row for row in rows if label(row) == "strict"][:1]
    other = [row for row in rows if label(row) != "strict"]
    exact = [row for row in other if row["exact_share"] == 1]
    if len(exact) >= limit - len(strict):
        other = exact
    other.sort(key=lambda row: (row["mean_acceptance_length"], row["B"], row["g"], row["M"]))
    # Of settings that act alike one is enough: the paper's, else the smallest.
    alike: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in sorted(other, key=lambda row: (row["B"], row["g"], row["M"]) != PAPER):
        alike.setdefault(tuple(row["acceptance_histogram"]), row)
    other = [row for row in other if alike[tuple(row["acceptance_histogram"])] is row]
    room = min(limit - len(strict), len(other))
    # Next to strict the spread starts above the shortest, which is nearly strict itself.
    skip = 1 if strict and room < len(other) else 0
    where = [round(index) for index in np.linspace(0, len(other) - 1, room + skip)[skip:]] if room else []
    paper = [nth for nth, row in enumerate(other) if (row["B"], row["g"], row["M"]) == PAPER]
    if paper and paper[0] not in where:
        nearest = min(range(room), key=lambda nth: abs(where[nth] - paper[0]))
        where[nearest] = paper[0]
    chosen = strict + [other[nth] for nth in sorted(where)]
    return type(frame)(chosen, schema=frame.schema)


def focus(frame: pl.DataFrame) -> Policy | None:
    """Choose the setting whose accepted mismatches the regret figure shows; ``None`` where all settings are strict.

    The paper's B = 8, g = .25, M = 2 if it is there; else, of the rows with the largest exact share, the longest.
    """
    from ..rules.settings import Policy

    rows = [row for row in frame.to_dicts() if label(row) != "strict" and row["num_spec_steps"]]
    if not rows:
        return None
    best = max(
        rows,
        key=lambda row: (
            (row["B"], row["g"], row["M"]) == PAPER,
            row["exact_share"],
            row["mean_acceptance_length"] or 0.0,
        ),
    )
    ledger = "block" if "ledger=block" in (best.get("parameters") or "").split() else "request"
    return Policy(best["B"], best["g"], best["M"], best.get("semantics") or "paper", ledger=ledger)


def _need(frame: pl.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise UsageError(
            f"the table has no column {', '.join(missing)}", fix="give a table that `asdsim replay -o` wrote"
        )


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _shares(row: Mapping[str, Any], width: int) -> npt.NDArray[np.float64]:
    """Return the acceptance histogram of a row in per cent of its steps, padded to ``width``."""
    histogram = np.zeros(width)
    histogram[: len(row["acceptance_histogram"])] = row["acceptance_histogram"]
    return 100.0 * histogram / histogram.sum()


def _note(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what the rows that are not exact stand for; ``None`` where all are."""
    modes = sorted({row["off_trace"] for row in rows if row["exact_share"] < 1})
    return " / ".join(OFF_TRACE_NOTE.get(mode, "not exact") for mode in modes) or None


def _legend_label(row: Mapping[str, Any]) -> str:
    histogram = row["acceptance_histogram"]
    drafts = sum(count * steps for count, steps in enumerate(histogram)) / sum(histogram)
    text = f"{label(row)}: {row['mean_acceptance_length']:.2f} tokens per step, {drafts:.2f} without the bonus"
    if row["exact_share"] < 1:
        text += f" (exact for {100 * row['exact_share']:.0f} % of requests)"
    return text


# --- figures ------------------------------------------------------------------------------------------------------


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
        _legend_below(figure, axes, _note(rows))
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
        _legend_below(figure, left, _note(rows), "open markers")
    return figure


def regret_distribution(
    groups: Mapping[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]], *, gate: float | None = None
) -> Figure:
    """Draw the cumulative distribution of regret, as such and per token of suffix value (what the gate compares).

    Parameters
    ----------
    groups : mapping of str to (regret, score)
        Per group of mismatches, regret r in logits and r/q in logits per token, each float64 of one length. At most
        three groups; empty ones appear in the legend only.
    gate : float, optional
        g, drawn on the r/q axis.
    """
    present = [(name, pair) for name, pair in groups.items() if len(pair[0])]
    if not present:
        raise UsageError("no mismatch to draw: every draft token is the target's choice")
    with styled():
        figure = Figure(figsize=(8.6, 4.2), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for which, axes in enumerate(panels):
            values = [pair[which] for _, pair in present]
            positive = np.concatenate(values)
            positive = positive[positive > 0]
            low = max(float(np.quantile(positive, 0.002)), 1e-3) if len(positive) else 1e-3
            high = float(positive.max()) if len(positive) else 1.0
            if which == 1 and gate is not None and 0 < gate < math.inf:
                low, high = min(low, gate / 2), max(high, gate * 2)
            low, high = 10 ** math.floor(math.log10(low)), high * 1.15
            zeros = any(bool((value <= low).any()) for value in values)
            for nth, (name, pair) in enumerate(groups.items()):
                value, share = _cumulative(pair[which])
                axes.step(
                    np.concatenate([[low], np.maximum(value, low), [high]]) if len(value) else [],
                    100 * np.concatenate([[0], share, [1]]) if len(value) else [],
                    where="post",
                    color=LINES[nth],
                    linestyle=DASHES[nth],
                    linewidth=1.8,
                    label=f"{name} (n = {len(pair[which]):,})",
                )
            axes.set_xscale("log")
            axes.set_xlim(low, high)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.grid(axis="x")
            axes.set_ylim(0, 103)
            unit = "regret r (logits)" if which == 0 else "regret per token of suffix value, r/q (logits per token)"
            axes.set_xlabel(unit + (f"\nleft edge: {low:g} and less" if zeros else ""))
        left, right = panels
        left.set_ylabel("share with at most this regret (%)")
        left.set_title("Regret: what the budget pays", loc="left")
        right.set_title("Regret over suffix value: what the gate compares", loc="left")
        if gate is not None and 0 < gate < math.inf:
            right.axvspan(gate, right.get_xlim()[1], color="#BBBBBB", alpha=0.35, linewidth=0)
            right.axvline(gate, color=GREY, linewidth=2.2, label=f"gate g = {gate:g}: refused right of it")
        _legend_below(figure, right, None)
    return figure


def _cumulative(sample: npt.NDArray[np.float64], most: int = 400) -> tuple[Any, Any]:
    """Return sorted values and the share of the sample up to each; of a large sample, ``most`` points of the curve."""
    value = np.sort(sample)
    share = np.arange(1, len(value) + 1) / max(len(value), 1)
    if len(value) > most:
        keep = np.unique(np.linspace(0, len(value) - 1, most).astype(int))
        value, share = value[keep], share[keep]
    return value, share


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
    _need(frame, ("B", "g", "M", "off_trace", "exact_share", "mean_acceptance_length"))
    if frame.select("B", "g", "M").is_duplicated().any():
        raise UsageError("a setting appears twice in the table", fix="plot one rule and one semantics at a time")
    rows = frame.to_dicts()
    lengths = [row["mean_acceptance_length"] for row in rows if _finite(row["mean_acceptance_length"])]
    if not lengths:
        raise UsageError(
            "no setting of this table has a length to show", fix="replay with --off-trace aligned, or cover"
        )
    budgets, gates, caps = (sorted({row[name] for row in rows}) for name in ("B", "g", "M"))
    whole = [
        row["mean_acceptance_length"] for row in rows if _finite(row["mean_acceptance_length"]) and not _partial(row)
    ]
    scale = whole or lengths
    norm = Normalize(min(scale), max(max(scale), min(scale) + 1e-9))
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
        if whole:
            bar = figure.colorbar(image, ax=panels, pad=0.02, shrink=0.9)
            bar.set_label("tokens per step")
            bar.ax.yaxis.set_major_locator(MaxNLocator(6))
        figure.suptitle(
            "Mean acceptance length (tokens per step, bonus token included)", x=0.01, ha="left", fontsize=11
        )
        handles: list[Patch] = []
        drawn = [row for row in rows if _finite(row["mean_acceptance_length"])]
        if any(map(_partial, drawn)):
            meaning = f"{OFF_TRACE_NOTE['stop']}: no fair sample, so no colour" + (
                " (per cent of all)" if readable else ""
            )
            handles.append(Patch(facecolor=NO_COLOUR, edgecolor=GREY, hatch="////", linewidth=0, label=meaning))
        estimated = _note([row for row in drawn if not _partial(row)])
        if estimated:
            handles.append(Patch(facecolor="white", edgecolor="black", hatch="////", label=estimated))
        if any(not _finite(row["mean_acceptance_length"]) for row in rows):
            handles.append(
                Patch(
                    facecolor="white",
                    edgecolor=GREY,
                    hatch="xx",
                    label="no figure: every request left the captured steps",
                )
            )
        if handles:
            figure.legend(handles=handles, loc="outside lower left", ncols=1, handlelength=2.6, handleheight=1.4)
    return figure


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
        at = gates.index(row["g"]), budgets.index(row["B"])
        shares[at] = row["exact_share"]
        at_stop[at] = _partial(row)
        if _finite(row["mean_acceptance_length"]):
            values[at] = row["mean_acceptance_length"]
    asked = {(gates.index(row["g"]), budgets.index(row["B"])) for row in rows}
    coloured = np.where(at_stop, np.nan, values)
    image = axes.imshow(coloured, origin="lower", aspect="auto", cmap="cividis", norm=norm, interpolation="nearest")
    partial = [at for at in sorted(asked) if at_stop[at] and np.isfinite(values[at])]
    inexact = [at for at in sorted(asked) if shares[at] < 1 and np.isfinite(coloured[at])]
    dark = [at for at in inexact if _is_dark(norm(values[at]))]
    light = [at for at in inexact if at not in set(dark)]
    absent = [at for at in sorted(asked) if not np.isfinite(values[at])]
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


def _legend_below(figure: Figure, axes: Axes, note: str | None, mark: str = "hatched") -> None:
    """Put the legend under the axes, where it can hide no data, and a note on rows that are not exact beneath it."""
    handles, labels = axes.get_legend_handles_labels()
    room = (figure.get_figwidth() / 2 - 0.75) / 0.066  # characters of half the width, less the handle
    columns = 1 if max(map(len, labels)) > room else 2
    figure.legend(
        handles, labels, loc="outside lower left", ncols=columns, handlelength=3.2, title=note and f"{mark} = {note}",
        title_fontproperties={"size": 8, "style": "italic"}, alignment="left",
    )  # fmt: skip


# --- data from a trace --------------------------------------------------------------------------------------------


def mismatch_groups(
    graph: Graph, policy: Policy | None = None, off_trace: str = "stop", *, exact: bool = False
) -> dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Return regret r and r/q of all mismatches, of the first one in each block, and of those that a setting accepts.

    Mismatches behind an EOS or the token limit are not counted. The first two groups cover every captured step; the
    third follows ``policy`` from each prompt along captured edges, and beyond them only as ``off_trace`` says; where
    that matters (``exact`` is false), its name says so.
    """
    has_any = graph.mm_ptr[1:] > graph.mm_ptr[:-1]
    first = graph.mm_ptr[:-1][has_any]
    groups = {
        "all mismatches": (graph.mm_regret, graph.mm_score),
        "first of each block": (graph.mm_regret[first], graph.mm_score[first]),
    }
    if policy is not None:
        taken = accepted_mismatches(graph, policy, off_trace)
        caveat = "" if exact else ", captured steps only" if off_trace == "stop" else ", estimated"
        groups[f"accepted under {policy}{caveat}"] = (graph.mm_regret[taken], graph.mm_score[taken])
    return groups


def accepted_mismatches(graph: Graph, policy: Policy, off_trace: str = "stop") -> npt.NDArray[np.int64]:
    """Return the indices (into ``graph.mm_*``) of the mismatches that one setting accepts, request by request."""
    from ..walk.path import visits

    walks = [visits(graph, policy, request, off_trace).visits for request in range(graph.num_requests)]
    firsts = [(int(graph.mm_ptr[visit.step]), visit.relaxed) for walk in walks for visit in walk]
    return np.array([j for first, relaxed in firsts for j in range(first, first + relaxed)], np.int64)


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


# --- files --------------------------------------------------------------------------------------------------------


def provenance(command: str, *, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a figure came from: command, software versions, and the caller's words on the source."""
    return {"schema_version": PROVENANCE_VERSION, **made_with(command, source, "matplotlib", "numpy", "polars")}


def save(
    figure: Figure, stem: str | os.PathLike[str], record: Mapping[str, Any], data: Mapping[str, Any] | None = None
) -> list[Path]:
    """Write ``stem.svg``, ``stem.png`` and ``stem.json``; equal input gives equal files.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What to draw.
    stem : path
        Path without suffix; missing folders are made.
    record : mapping
        From :func:`provenance`.
    data : mapping, optional
        The plotted numbers, plain lists and scalars. Infinities are written as ``"inf"``, NaN as null.

    Returns
    -------
    list of Path
        The three files.

    Raises
    ------
    AsdsimError
        If a file cannot be written. Files are replaced whole: an error leaves the earlier ones as they were.
    """
    base = Path(stem)
    paths = [base.with_name(base.name + suffix) for suffix in (".svg", ".png", ".json")]
    text = dump_json({**record, "figure": base.name, "data": data or {}}, indent=1, ascii_only=False) + "\n"
    text = re.sub(
        r"\[\n[^\[\]{}]*\]", lambda flat: re.sub(r"\n\s*", " ", flat[0]), text
    )  # a list of numbers on one line
    with styled():
        content = [_drawn(figure, "svg"), _drawn(figure, "png"), text.encode()]
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for path, octets in zip(paths, content, strict=True):
            write_atomically(path, octets)
    except OSError as error:
        raise AsdsimError(
            f"cannot write: {error.strerror or error}", where=str(base), fix="choose another folder with -o"
        ) from None
    return paths


def _drawn(figure: Figure, kind: str) -> bytes:
    stream = io.BytesIO()
    # No date and no version in the files: a redraw of the same data changes no byte.
    figure.savefig(stream, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return stream.getvalue()


def draw_all(
    frame: pl.DataFrame,
    folder: str | os.PathLike[str],
    record: Mapping[str, Any],
    *,
    matches: npt.NDArray[np.float64] | None = None,
    groups: Mapping[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] | None = None,
    gate: float | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Draw every figure that the data allow and save each into ``folder``.

    Parameters
    ----------
    frame : polars.DataFrame
        Result rows.
    folder : path
        Where to write.
    record : mapping
        From :func:`provenance`.
    matches : float64 (K,), optional
        From :func:`match_share`.
    groups, gate : optional
        From :func:`mismatch_groups`, and the gate to draw in.
    note : callable
        Told of each figure that is left out, and why.

    Returns
    -------
    list of Path
        Files written.
    """
    shown = pick_settings(frame)
    rows = _columns(shown, ("B", "g", "M", "off_trace", "exact_share", *LENGTHS, "acceptance_histogram"))
    base = Path(folder)
    paths = save(acceptance_distribution(shown), base / "acceptance-length", record, rows)
    paths += save(
        acceptance_by_position(shown, match_share=matches),
        base / "acceptance-by-position",
        record,
        {**rows, "match_share": matches},
    )
    if frame["B"].n_unique() > 1 or frame["g"].n_unique() > 1:
        cells = _columns(frame, ("B", "g", "M", "off_trace", "exact_share", *LENGTHS))
        paths += save(acceptance_heatmap(frame), base / "acceptance-heatmap", record, cells)
    else:
        note("no heat map: it needs more than one B or g")
    if groups is not None and any(len(pair[0]) for pair in groups.values()):
        quantiles = [round(0.05 * step, 2) for step in range(21)]
        numbers = {
            name: {
                "n": len(regret),
                "quantiles": quantiles,
                "regret": np.quantile(regret, quantiles) if len(regret) else [],
                "regret_per_value": np.quantile(score, quantiles) if len(score) else [],
            }
            for name, (regret, score) in groups.items()
        }
        paths += save(
            regret_distribution(groups, gate=gate), base / "regret", record, {"gate": gate, "groups": numbers}
        )
    elif groups is not None:
        note("no regret figure: every draft token is the target's choice")
    return paths


def _columns(frame: pl.DataFrame, names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: frame[name].to_list() for name in names if name in frame.columns}
