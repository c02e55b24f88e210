"""Every figure that a table of results allows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from ..files import to_path
from .acceptance import acceptance_by_position, acceptance_distribution, match_share
from .heatmap import acceptance_heatmap
from .quality import gain_by_budget, pareto_fronts
from .regret import mismatch_groups, regret_distribution
from .rows import LENGTHS, MAX_SETTINGS, columns_of, focus, pick_settings, select
from .style import save

if TYPE_CHECKING:
    import polars as pl


Groups = Mapping[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]


def figures(
    frame: pl.DataFrame,
    *,
    matches: npt.NDArray[np.float64] | None = None,
    groups: Groups | None = None,
    gate: float | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[str, Figure, dict[str, Any]]]:
    """Yield every figure that the data allow: its name, the figure, and the numbers that it shows.

    Parameters
    ----------
    frame : polars.DataFrame
        Result rows.
    matches : float64 (K,), optional
        From :func:`asdsim.plots.acceptance.match_share`.
    groups, gate : optional
        From :func:`asdsim.plots.regret.mismatch_groups`, and the gate to draw in.
    note : callable
        Told of each figure that is left out, and why.
    """
    shown = pick_settings(frame)
    rows = columns_of(shown, ("B", "g", "M", "off_trace", "exact_share", *LENGTHS, "acceptance_histogram"))
    yield "acceptance-length", acceptance_distribution(shown), rows
    by_position = acceptance_by_position(shown, match_share=matches)
    yield "acceptance-by-position", by_position, {**rows, "match_share": matches}
    if frame["B"].n_unique() > 1 or frame["g"].n_unique() > 1:
        cells = columns_of(frame, ("B", "g", "M", "off_trace", "exact_share", *LENGTHS))
        yield "acceptance-heatmap", acceptance_heatmap(frame), cells
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
        yield "regret", regret_distribution(groups, gate=gate), {"gate": gate, "groups": numbers}
    elif groups is not None:
        note("no regret figure: every draft token is the target's choice")


def draw_all(
    frame: pl.DataFrame, folder: str | os.PathLike[str], record: Mapping[str, Any], **options: Any
) -> list[Path]:
    """Draw every figure that the data allow and save each into ``folder``; returns the files written.

    Parameters
    ----------
    frame : polars.DataFrame
        Result rows.
    folder : path
        Where to write.
    record : mapping
        From :func:`asdsim.plots.style.provenance`.
    **options
        As for :func:`figures`.
    """
    drawn = figures(frame, **options)
    return [path for name, figure, data in drawn for path in save(figure, to_path(folder) / name, record, data)]


def figures_of(result: Any, note: Callable[[str], None] = lambda text: None) -> Iterator[tuple[str, Figure, Any]]:
    """Yield every figure of a replay of ASD, as :func:`figures` does, those of its mismatches too.

    ``result`` is an :class:`asdsim.result.Result`, a room above this one.
    """
    frame, (trace, graph) = result.frame(), result.whole
    policy = focus(frame)
    exact = policy is not None and bool(
        select(frame, B=[policy.budget], g=[policy.gate], M=[policy.cap])["exact_share"][0] == 1
    )
    step_of_row = np.repeat(np.arange(len(trace.pos_ptr) - 1), np.diff(trace.pos_ptr))
    rows = trace.column("positions", "i") < trace.column("steps", "num_draft_tokens")[step_of_row]
    matches = match_share(*(trace.column("positions", name)[rows] for name in ("draft_id", "argmax_id", "i")))
    yield from figures(
        frame,
        matches=matches if len(matches) else None,
        groups=mismatch_groups(graph, policy, result.off_trace, exact=exact),
        gate=None if policy is None else policy.gate,
        note=note,
    )


def figures_with_intervals(frame: pl.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yield what the figures of :meth:`asdsim.evaluate.quality.Quality.frame` allow: fronts, and gain by budget."""
    exact = frame.filter(frame["exact_share"] == 1.0)
    gain = "speed_up" if "speed_up" in frame.columns else "mean_acceptance_length"
    risks = [name for name in ("outputs_differ_share", "regret_per_token", "accuracy") if name in frame.columns]
    if len(exact) > 2 and risks:
        yield "fronts", pareto_fronts(exact, risks, gain)
    gates = exact["g"].unique().sort().to_list()
    if exact["B"].n_unique() > 2 and "acceptance_length_gain" in frame.columns:
        yield "gain-by-budget", gain_by_budget(exact, gates[:: -(-len(gates) // MAX_SETTINGS)])
