"""``asdsim replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import config_option, grid_options, json_option, note, print_json, progress_bar

if TYPE_CHECKING:
    from ..api import Result

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
@grid_options()
@click.option("--rule", default="asd", show_default=True, help="Acceptance rule.")
@click.option("--semantics", default="paper", show_default=True, help="Which reading of the rule.")
@click.option("--off-trace", default="stop", show_default=True, metavar="stop|aligned|recorded|pooled",
              help="At a prefix that was not captured: drop the request (exact), or estimate.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|reference")
@click.option("--threads", default=0, show_default="all cores", help="CPU threads.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the rows to this Parquet file.")
@json_option
@config_option
def command(
    trace: Path, B: str, g: str, M: str, rule: str, semantics: str, off_trace: str, device: str, threads: int,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Walk TRACE under every combination of B, g and M.

    A row is exact where exact_share is 1: every walk then met captured steps only. Otherwise, with --off-trace stop,
    the row stands on the requests that stayed on the trace (no fair sample), and with aligned or recorded it is an
    estimate.
    """
    from ..errors import UsageError, unknown_name
    from ..policy import Grid

    if rule != "asd":
        raise unknown_name("rule", rule, ["asd"])
    if threads < 0:
        raise UsageError(f"--threads {threads} is negative")
    if output is not None and output.suffix != ".parquet":
        raise UsageError(f"cannot tell the format of {output}", fix="name a file that ends in .parquet")
    if output is not None and not output.parent.is_dir():
        raise UsageError("no such directory", where=str(output.parent))
    total = len(Grid.product(B, g, M, semantics))
    from .. import api

    with progress_bar(total, "replay", "setting") as bar:
        result = api.replay(
            trace, B=B, g=g, M=M, semantics=semantics, off_trace=off_trace, device=device, threads=threads,
            progress=bar.update,
        )  # fmt: skip
    if output is not None:
        result.write(output)
        note(f"wrote {len(result)} rows to {output}")
    if as_json:
        print_json("replay", {"trace": str(trace), **result.provenance(), "rows": result.rows()})
    else:
        print_table(result)


def print_table(result: Result) -> None:
    """Print the rows, and what the figures may be taken for."""
    import polars as pl

    frame = result.frame().select(TABLE).rename(SHORT)
    plain = [pl.col(name).map_elements(lambda value: f"{value:g}", return_dtype=pl.String) for name in ("B", "g", "M")]
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
        }[result.off_trace]
        note(f"{partly} of {len(frame)} settings have exact < 1: {meaning}")
