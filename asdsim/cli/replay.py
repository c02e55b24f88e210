"""``asdsim replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import config_option, json_option, note, print_json, progress_bar, rule_options

if TYPE_CHECKING:
    from ..api import Result
    from ..policy import Grid

MAX_ROWS = 24
"""Rows that the table on a terminal shows."""

TABLE = [
    "B", "g", "M", "requests", "exact_share", "mean_acceptance_length", "accepted_per_proposal",
    "strict_mean_acceptance_length", "relaxed_tokens", "regret_spent_mean", "regret_spent_max",
]  # fmt: skip
SHORT = {
    "exact_share": "exact", "mean_acceptance_length": "tokens/step", "accepted_per_proposal": "accepted/step",
    "strict_mean_acceptance_length": "strict tokens/step", "relaxed_tokens": "relaxed",
    "regret_spent_mean": "regret mean", "regret_spent_max": "regret max",
}  # fmt: skip


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@rule_options()
@click.option("--off-trace", default="stop", show_default=True, metavar="stop|aligned|recorded|pooled",
              help="At a prefix that was not captured: drop the request (exact), or estimate.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|reference")
@click.option("--threads", default=0, show_default="all cores", help="CPU threads.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the rows to this Parquet file.")
@json_option
@config_option
def command(
    trace: Path, grids: list[Grid], off_trace: str, device: str, threads: int, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Walk TRACE under every combination of B, g and M, or of another rule's parameters.

    A row is exact where exact_share is 1: every walk then met captured steps only. Otherwise, with --off-trace stop,
    the row stands on the requests that stayed on the trace (no fair sample), and with aligned or recorded it is an
    estimate.
    """
    from ..errors import UsageError

    if threads < 0:
        raise UsageError(f"--threads {threads} is negative")
    if output is not None and output.suffix != ".parquet":
        raise UsageError(f"cannot tell the format of {output}", fix="name a file that ends in .parquet")
    if output is not None and not output.parent.is_dir():
        raise UsageError("no such directory", where=str(output.parent))
    from .. import api

    total = sum(len(grid) for grid in grids)
    source: Any = trace if len(grids) == 1 else api.load(trace)
    with progress_bar(total, "replay", "setting") as bar:
        results = [
            api.replay_grid(source, grid, off_trace=off_trace, device=device, threads=threads, progress=bar.update)
            for grid in grids
        ]
    if output is not None:
        api.write_results(results, output)
        note(f"wrote {total} rows to {output}")
    if as_json:
        rows = [row for result in results for row in result.rows()]
        print_json("replay", {"trace": str(trace), **results[0].provenance(), "settings": total, "rows": rows})
    else:
        print_table(results)


def print_table(results: list[Result]) -> None:
    """Print the rows, and what the figures may be taken for."""
    import polars as pl

    whole = pl.concat([result.frame() for result in results])
    asd = whole["rule"][0] == "asd"
    names = [name for name in TABLE if asd or name not in ("B", "g", "M")]
    if (whole["parameters"] != "").any():
        names.insert(3 if asd else 0, "parameters")
    if not asd:
        names.insert(0, "rule")
    frame = whole.select(names).rename(SHORT)
    plain = [
        pl.col(name).map_elements(lambda value: f"{value:g}", return_dtype=pl.String)
        for name in ("B", "g", "M")
        if name in names
    ]
    shown = (
        frame if len(frame) <= MAX_ROWS else frame.sort("tokens/step", descending=True, nulls_last=True).head(MAX_ROWS)
    )
    with pl.Config(
        tbl_rows=MAX_ROWS, tbl_cols=-1, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True,
        float_precision=3, tbl_width_chars=160, tbl_formatting="ASCII_MARKDOWN",
    ):  # fmt: skip
        click.echo(str(shown.with_columns(plain)))
    if len(frame) > MAX_ROWS:
        note(f"{MAX_ROWS} of {len(frame)} settings shown, longest acceptance first; -o FILE.parquet or --json for all")
    partly = int((frame["exact"] < 1.0).sum())
    if partly:
        meaning = {
            "stop": "they stand on the requests that never left the trace, no fair sample",
            "aligned": "they are estimates",
            "recorded": "they are estimates",
            "pooled": "they are estimates",
        }[results[0].off_trace]
        note(f"{partly} of {len(frame)} settings have exact < 1: {meaning}")
