"""``asdsim plot``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..files import read_octets
from ..rules.settings import DEFAULT_AXES
from .common import PathOrUrl, config_option, json_option, note, print_json

if TYPE_CHECKING:
    import polars as pl


NUMBERS = ("B", "g", "M", "exact_share", "mean_acceptance_length", "accepted_per_proposal", "num_spec_steps")
TEXTS = ("rule", "semantics", "off_trace", "parameters")
HISTOGRAM = "acceptance_histogram"


def _fits(column: pl.Series, name: str, asd: bool) -> bool:
    """Tell whether a column of a sweep is of its type; what a row rests on, and ASD's settings, are never missing."""
    import polars as pl

    kind = column.dtype
    if name == HISTOGRAM:
        return isinstance(kind, pl.List) and kind.inner.is_integer() and not column.null_count()
    if name in TEXTS:
        return kind in (pl.String, pl.Null)
    needed = name in ("exact_share", "num_spec_steps") or (asd and name in ("B", "g", "M"))
    return kind.is_numeric() and not (needed and column.null_count())


def _axis(name: str, text: str) -> Any:
    return click.option(
        f"--{name}", name, metavar="LIST",
        help=f"{text} to show from a sweep, or to replay a trace with  [trace default: {DEFAULT_AXES[name]}]",
    )  # fmt: skip


@click.command("plot")
@click.argument("source", metavar="SWEEP.parquet|TRACE", type=PathOrUrl())
@click.option("-o", "--output", type=PathOrUrl(), default=Path("figures"), show_default=True,
              help="Folder for the figures.")  # fmt: skip
@_axis("B", "Budgets")
@_axis("g", "Gates")
@_axis("M", "Caps")
@click.option("--off-trace", metavar="stop|aligned|recorded|pooled", help="For a trace, as in replay.  [default: stop]")
@json_option
@config_option
def command(
    source: Path, output: Path, B: str | None, g: str | None, M: str | None, off_trace: str | None, as_json: bool
) -> None:
    """Draw figures from a sweep or a trace, as SVG and PNG, each with a JSON file of its data and origin.

    A sweep gives acceptance length by setting, acceptance by position, and a heat map over B and g. A trace is
    replayed first, and gives the distribution of regret as well.
    """
    from ..errors import UsageError
    from ..rules.settings import parse_axis

    asked = {"B": B, "g": g, "M": M}
    axes = {name: parse_axis(name, text) for name, text in asked.items() if text is not None}
    if output.exists() and not output.is_dir():
        raise UsageError("is not a folder", where=str(output), fix="name a folder with -o")
    if not source.exists():
        raise UsageError("no such file or directory", where=str(source), fix="give a sweep or a trace directory")
    words = ["asdsim", "plot", str(source), "-o", str(output)]
    words += [word for name, text in asked.items() if text is not None for word in (f"--{name}", text)]
    if source.is_dir():
        if off_trace is not None:
            words += ["--off-trace", off_trace]
        paths = plot_trace(source, output, {**DEFAULT_AXES, **axes}, off_trace or "stop", shlex.join(words))
    else:
        if off_trace is not None:
            raise UsageError("--off-trace is fixed when a sweep is made", fix="give it to asdsim replay")
        paths = plot_sweep(source, output, axes, shlex.join(words))
    if as_json:
        print_json("plot", {"source": str(source), "files": [str(path) for path in paths]})
    else:
        for path in paths:
            click.echo(path)


def plot_sweep(source: Path, output: Path, axes: dict[str, list[float]], command_line: str) -> list[Path]:
    """Draw what a table of results allows; returns the files written."""
    from ..plots.all import draw_all
    from ..plots.rows import select
    from ..plots.style import provenance

    frame, made_from = read_sweep(source)
    others = [name for name in frame["rule"].unique().to_list() if name != "asd"] if "rule" in frame.columns else []
    if others:
        from ..errors import UsageError

        raise UsageError(
            f"it holds rule {', '.join(sorted(others))}, but these figures are over B, g and M",
            where=str(source), fix="use asdsim compare TRACE -o DIR for a figure of several rules",
        )  # fmt: skip
    subject = str(made_from.get("subject", source.name))
    record = provenance(command_line, source={"sweep": source.name, **made_from}, subject=subject)
    return draw_all(select(frame, **axes), output, record, note=note)


def plot_trace(source: Path, output: Path, grid: dict[str, Any], off_trace: str, command_line: str) -> list[Path]:
    """Replay a trace under a grid and draw every figure; returns the files written."""
    from .. import result as api
    from ..plots.all import figures_of
    from ..plots.style import provenance, save

    result = api.replay(api.load(source), **grid, off_trace=off_trace)
    record = provenance(command_line, source=result.provenance())
    drawn = figures_of(result, note)
    return [path for name, figure, data in drawn for path in save(figure, output / name, record, data)]


def read_sweep(path: Path) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Read a table that ``asdsim replay -o`` wrote, and what it says about its origin.

    Raises
    ------
    UsageError
        If the file is not such a table.
    """
    import polars as pl
    import pyarrow as pa

    from ..errors import UsageError
    from ..trace.tables import open_parquet, read_columns

    fix = "give a .parquet table that `asdsim replay -o` wrote, or a trace directory"
    try:
        with open_parquet(read_octets(path)) as parquet:
            table = read_columns(parquet)
        made_from = json.loads((table.schema.metadata or {}).get(b"asdsim", b"{}"))
        frame = pl.from_arrow(table)
    except (OSError, pa.ArrowException, ValueError, pl.exceptions.PolarsError) as error:
        raise UsageError(
            f"not a readable Parquet table: {str(error).splitlines()[0]}", where=str(path), fix=fix
        ) from None
    if not isinstance(frame, pl.DataFrame) or frame.is_empty():
        raise UsageError("the table has no rows", where=str(path), fix=fix)
    asd = "rule" not in frame.columns or frame["rule"].to_list() == ["asd"] * len(frame)
    for name in (*NUMBERS, *TEXTS, HISTOGRAM):
        if name in frame.columns and not _fits(frame[name], name, asd):
            what = "text" if name in TEXTS else "lists of whole numbers" if name == HISTOGRAM else "numbers"
            raise UsageError(
                f"column {name} holds {frame[name].dtype}, or lacks a value, where {what} should be",
                where=str(path), fix=fix,
            )  # fmt: skip
    return frame, made_from if isinstance(made_from, dict) else {}
