"""Which rows of a table a figure shows, and how it names them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..walk.off_trace import OFF_TRACE

if TYPE_CHECKING:
    import polars as pl

    from ..rules.settings import Policy

MAX_SETTINGS = 4
"""Settings that one distribution or line plot shows."""

PAPER = (8.0, 0.25, 2.0)
"""B, g and M of the paper's main results."""

LENGTHS = ("mean_acceptance_length", "accepted_per_proposal")


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
    need(frame, ("B", "g", "M"))
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
    need(
        frame,
        ("B", "g", "M", "off_trace", "exact_share", "mean_acceptance_length", "acceptance_histogram", "num_spec_steps"),
    )
    rows = [row for row in frame.to_dicts() if row["num_spec_steps"] and finite(row["mean_acceptance_length"])]
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


def need(frame: pl.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise UsageError(
            f"the table has no column {', '.join(missing)}", fix="give a table that `asdsim replay -o` wrote"
        )


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def note_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what the rows that are not exact stand for; ``None`` where all are."""
    modes = sorted({row["off_trace"] for row in rows if row["exact_share"] < 1})
    return " / ".join(OFF_TRACE[mode].figure_note if mode in OFF_TRACE else "not exact" for mode in modes) or None


def columns_of(frame: pl.DataFrame, names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: frame[name].to_list() for name in names if name in frame.columns}
