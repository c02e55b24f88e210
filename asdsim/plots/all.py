"""Every figure that a table of results allows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .acceptance import acceptance_by_position, acceptance_distribution
from .heatmap import acceptance_heatmap
from .regret import regret_distribution
from .rows import LENGTHS, columns_of, pick_settings
from .style import save

if TYPE_CHECKING:
    import polars as pl


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
    rows = columns_of(shown, ("B", "g", "M", "off_trace", "exact_share", *LENGTHS, "acceptance_histogram"))
    base = Path(folder)
    paths = save(acceptance_distribution(shown), base / "acceptance-length", record, rows)
    paths += save(
        acceptance_by_position(shown, match_share=matches),
        base / "acceptance-by-position",
        record,
        {**rows, "match_share": matches},
    )
    if frame["B"].n_unique() > 1 or frame["g"].n_unique() > 1:
        cells = columns_of(frame, ("B", "g", "M", "off_trace", "exact_share", *LENGTHS))
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
