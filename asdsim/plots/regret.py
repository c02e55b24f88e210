"""The regret of mismatches: of all, of the first in each block, and of those that a setting accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..errors import UsageError
from .style import DASHES, GREY, LINES, legend_below, styled

if TYPE_CHECKING:
    from ..rules.settings import Policy
    from ..trace.graph import Graph


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
        legend_below(figure, right, None)
    return figure


def _cumulative(sample: npt.NDArray[np.float64], most: int = 400) -> tuple[Any, Any]:
    """Return sorted values and the share of the sample up to each; of a large sample, ``most`` points of the curve."""
    value = np.sort(sample)
    share = np.arange(1, len(value) + 1) / max(len(value), 1)
    if len(value) > most:
        keep = np.unique(np.linspace(0, len(value) - 1, most).astype(int))
        value, share = value[keep], share[keep]
    return value, share


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
