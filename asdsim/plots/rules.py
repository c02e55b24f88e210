"""Figure of a comparison of acceptance rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..rules import get_rule
from .style import ASD, GREY, LINES, styled


def compared_rules(rows: Sequence[Mapping[str, Any]], title: str, off_trace: str = "pooled") -> Figure:
    """Draw the gain in acceptance length of every rule over strict, with intervals over requests.

    Parameters
    ----------
    rows : sequence of mapping
        As in :class:`asdsim.studies.compare.Comparison`; ``strict``, ``truncate`` and rows without a gain are left out.
    title : str
        What the rules were matched at.
    off_trace : str
        What happened at prefixes that were not captured.
    """
    shown = [row for row in rows if row["acceptance_length_gain"] is not None][::-1]
    shown = [row for row in shown if row["rule"] not in ("strict", "truncate")]
    with styled():
        figure = Figure(figsize=(6.8, 1.3 + 0.34 * max(1, len(shown))), layout="constrained")
        axes = figure.subplots()
        kinds: dict[bool, Any] = {}
        for line, row in enumerate(shown):
            exact = row["exact_share"] == 1.0
            color = ASD if row["rule"] == "asd" else LINES[1]
            if row["gain_low"] is not None:
                axes.plot([row["gain_low"], row["gain_high"]], [line, line], color=color, linewidth=1.4)
            (mark,) = axes.plot(
                [row["acceptance_length_gain"]], [line], marker="o", linestyle="none", color=color,
                markerfacecolor=color if exact else "white", markersize=6,
            )  # fmt: skip
            kinds.setdefault(exact, mark)
        axes.axvline(0.0, color=GREY, linewidth=1.0)
        axes.set_yticks(range(len(shown)), [name_of(row) for row in shown])
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        bars = any(row["gain_low"] is not None for row in shown)
        axes.set_xlabel("acceptance length over strict matching" + (" (95 % over requests)" if bars else ""))
        axes.set_title(title, loc="left")
        axes.grid(visible=True, axis="x", color="#dddddd")
        axes.grid(visible=False, axis="y")
        left = "some walks left the captured steps"
        words = {True: "exact", False: f"no fair sample: {left}, and do not count" if off_trace == "stop" else
                 f"estimate: {left}"}  # fmt: skip
        figure.legend([kinds[key] for key in kinds], [words[key] for key in kinds], loc="outside lower left")
    return figure


def name_of(row: Mapping[str, Any]) -> str:
    """Return a rule with the parameters that matter, in short; a value that stands for a formula as that formula."""
    hidden = {"begin", "end", "seed"}
    known = (
        {} if row["rule"] == "asd" else {parameter.name: parameter for parameter in get_rule(row["rule"]).parameters}
    )
    parts = [
        f"{name}={known[name].shown(value) if name in known else f'{value:.3g}'}"
        for name, value in row["parameters"].items()
        if name not in hidden
    ]
    return " ".join([row["rule"], *parts])
