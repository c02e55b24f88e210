"""The model of cost that ``--cost`` names: published step times, a roofline, or a table of the user's."""

from __future__ import annotations

import csv
import io
import reprlib
from pathlib import Path
from typing import Any

from ..errors import UsageError, unknown_name
from ..files import read_rows, read_text, shown, to_path
from .cost import PUBLISHED, Cost, from_rows
from .roofline import read_roofline
from .step_table import from_pass_rows


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
