"""The model of cost that ``--cost`` names: a trace's own, published step times, a roofline, or a table of the user's.

:func:`cost_of_trace` is the default of every command that predicts a speed.
"""

from __future__ import annotations

import csv
import io
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TraceError, UsageError, unknown_name
from ..files import Fields, read_rows, read_text, shown, to_path
from ..trace.manifest import MANIFEST, SPEEDS, TIMING
from .cost import PUBLISHED, Cost, fit_trace, from_rows
from .roofline import read_roofline
from .step_table import StepTable, from_pass_rows

if TYPE_CHECKING:
    from ..trace.stored import Source


def cost_of_trace(trace: Source, spec: str = "trace") -> Cost:
    """Return a model of cost for a trace, which says how far earlier predictions for it were off.

    Parameters
    ----------
    trace : Trace
    spec : str
        ``trace`` takes the passes timed beside its capture, or where there are none a fit to the times of its steps;
        anything else is for :func:`read_cost`.

    Raises
    ------
    UsageError
        If the trace has neither, or ``spec`` names no cost.
    TraceError
        If what the manifest says of times is not understood.
    """
    where = f"{trace.path}: {MANIFEST}, notes"
    notes = Fields(trace.manifest.notes, where, TraceError)
    cost: Cost
    if spec != "trace":
        cost = read_cost(spec)
    elif notes.get(TIMING, None) is None:
        cost = fit_trace(trace)
    else:
        cost = _timed(notes.inner(TIMING), f"of {trace.path}")
    cost.remarks.extend(_measured(notes))
    return cost


def _timed(timing: Fields, whose: str) -> StepTable:
    """Return the passes that a manifest holds."""
    rows = timing.get("passes")
    if not isinstance(rows, list):
        timing.refuse("passes", "a list")
    try:
        table = from_pass_rows([Fields(row, timing.where, TraceError).values for row in rows], timing.where)
    except UsageError as error:
        raise TraceError(error.what, where=error.where, fix="give step times with --cost FILE") from None
    table.source = f"{timing.text('source')} {whose}"
    if problems := timing.list_of("text", "problems", []):
        table.spread = 0.0  # said below, where it is too large
        table.remarks.append(f"speeds predicted from these passes mean little: {'; '.join(problems)}")
    return table


def _measured(notes: Fields) -> list[str]:
    """Return what ``asdsim timing`` measured on a trace, beside what had been predicted."""
    held = notes.get(SPEEDS, [])
    if not isinstance(held, list):
        notes.refuse(SPEEDS, "a list")
    lines = []
    for item in held:
        entry = Fields(item, f"{notes.where}, {SPEEDS}", TraceError)
        measured, predicted = entry.number("measured"), entry.number("predicted")
        off = f" ({predicted / measured - 1:+.0%})" if measured > 0 else ""
        lines.append(
            f"asdsim timing measured {measured:.2f} over strict for {entry.text('setting')} on "
            f"{entry.whole('requests')} requests of this trace, and {predicted:.2f} had been predicted{off}"
        )
    return lines


def read_cost(spec: str) -> Cost:
    """Return the model of cost that ``--cost`` names.

    Parameters
    ----------
    spec : str
        A published name (:data:`PUBLISHED`); ``roofline:DEVICE,model=CONFIG.json,..``, see :mod:`.roofline`; or a table
        (CSV or JSON): of steps, see :func:`from_rows`, or with a column ``milliseconds`` of passes, see
        :mod:`.step_table`.

    Raises
    ------
    UsageError
        On an unknown name, or a file that is no such table.
    """
    if spec in PUBLISHED:
        values = dict(PUBLISHED[spec])
        return from_rows([{key: value for key, value in values.items() if key != "source"}], values["source"])
    if spec.startswith("roofline:"):
        return read_roofline(spec)
    path = to_path(spec)
    if not path.exists():
        raise unknown_name(
            "cost", spec, [*PUBLISHED, "roofline:DEVICE,model=CONFIG.json", "or a file: FILE.csv, FILE.json"]
        )
    rows = _read_table(path)
    if rows and "milliseconds" in rows[0]:
        return from_pass_rows(rows, shown(path))
    return from_rows(rows, shown(path))


def _read_table(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a CSV or JSON file, told apart by their first character, since a pipe has no name."""
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        return [row for _, row in read_rows(path, text=text)]
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        names = list(reader.fieldnames or ())
        rows: list[dict[str, Any]] = list(reader)
    except csv.Error as error:
        raise UsageError(f"not valid CSV: {error}", where=shown(path)) from None
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"column {reprlib.repr(name)} appears twice", where=shown(path), fix="leave one out")
    return rows
