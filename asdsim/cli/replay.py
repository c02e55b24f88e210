"""``asdsim replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import (
    TracePath,
    check_table,
    config_option,
    counted,
    json_option,
    note,
    note_unfinished,
    print_json,
    progress_bar,
    rule_options,
)
from .quality_options import cost_of

if TYPE_CHECKING:
    import polars as pl

    from ..evaluate.cost import CostModel
    from ..result import Result
    from ..rules.settings import Grid

MAX_ROWS = 24
"""Rows that the table on a terminal shows."""

TABLE = [
    "B", "g", "M", "requests", "exact_share", "mean_acceptance_length", "accepted_per_proposal",
    "strict_mean_acceptance_length", "relaxed_tokens", "regret_spent_mean", "regret_spent_max",
]  # fmt: skip
SHORT = {
    "B_to": "B to",
    "exact_share": "exact", "mean_acceptance_length": "tokens/step", "accepted_per_proposal": "accepted/step",
    "strict_mean_acceptance_length": "strict tokens/step", "relaxed_tokens": "relaxed",
    "regret_spent_mean": "regret mean", "regret_spent_max": "regret max",
}  # fmt: skip


@click.command("replay")
@click.argument("trace", type=TracePath())
@rule_options(exact=True)
@click.option("--off-trace", default="stop", show_default=True, metavar="stop|aligned|recorded|pooled",
              help="At a prefix that was not captured: drop the request (exact), or estimate.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|reference")
@click.option("--threads", default=0, show_default="all cores", help="CPU threads.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write the rows to this file: .parquet (with their origin, for asdsim plot) or .csv.",
)
@click.option(
    "--intervals",
    is_flag=True,
    help="Give --json the 95 % intervals that the printed table has (not for pooled and the oracle).",
)
@click.option(
    "--cost",
    metavar="NAME|FILE",
    default="none",
    show_default=True,
    help="Predict the speed-up over strict from step times: trace (its own), a published name, or a table (CSV, JSON).",
)
@json_option
@config_option
def command(
    trace: Path, grids: list[Grid], upper: float | None, off_trace: str, device: str, threads: int,
    output: Path | None, intervals: bool, cost: str, as_json: bool,
) -> None:  # fmt: skip
    """Walk TRACE under every combination of B, g and M, or of another rule's parameters.

    A row is exact where exact_share is 1: every walk then met captured steps only. Otherwise, with --off-trace stop,
    the row stands on the requests that stayed on the trace (no fair sample), and with the others it is an
    estimate; asdsim fidelity says how far off these are.

    --B exact finds every budget at which some decision changes, for each g and M; a row then holds from its B up to
    below the next one, and rows are shown by B.
    """
    from ..errors import UsageError

    if threads < 0:
        raise UsageError(f"--threads {threads} is negative")
    check_table(output)
    if output is not None and not output.parent.is_dir():
        raise UsageError("no such directory", where=str(output.parent))
    from .. import result as api

    total = sum(len(grid) for grid in grids)
    source: Any = trace if len(grids) == 1 else api.load(trace)
    with progress_bar(total, "replay", "setting") as bar:
        how: dict[str, Any] = {"off_trace": off_trace, "device": device, "threads": threads}
        if upper is None:
            results = [api.replay_grid(source, grid, progress=bar.update, note=note, **how) for grid in grids]
        else:
            results = api.replay_grid_breakpoints(source, grids[0], upper=upper, progress=bar.update, note=note, **how)
    note_unfinished(results[0].trace)
    total = sum(map(len, results))
    if output is not None:
        api.write_results(results, output)
        note(f"wrote {counted(total, 'row')} to {output}")
    model = cost_of(cost, results[0].trace)
    if as_json:
        rows = [row for result in results for row in result.rows()]
        if intervals or model is not None:
            found = [one for result in results for one in _intervals(result, range(len(result)), model)]
            rows = [{**row, "intervals": one} for row, one in zip(rows, found, strict=True)]
        print_json("replay", {"trace": str(trace), **results[0].provenance(), "settings": total, "rows": rows})
    else:
        print_table(results, model)


def print_table(results: list[Result], cost: CostModel | None = None) -> None:
    """Print the rows, and what the figures may be taken for."""
    import polars as pl

    whole = pl.concat([result.frame() for result in results])
    asd = whole["rule"][0] == "asd"
    exact = "B_to" in whole.columns
    names = [name for name in TABLE if asd or name not in ("B", "g", "M")]
    if (whole["parameters"] != "").any():
        names.insert(3 if asd else 0, "parameters")
    if not asd:
        names.insert(0, "rule")
    if exact:
        names.insert(1, "B_to")
    frame = whole.select(names).rename(SHORT, strict=False).with_row_index("row")
    plain = [
        pl.col(name).map_elements(lambda value: f"{value:g}", return_dtype=pl.String)
        for name in ("B", "g", "M")
        if name in names and not (exact and name == "B")
    ]
    if exact:  # all digits: the very float decides
        plain += [pl.col(name).map_elements(repr, return_dtype=pl.String).alias(name) for name in ("B", "B to")]
    if exact or len(frame) <= MAX_ROWS:  # thresholds are a list: by B, for each g and M
        shown = frame.head(MAX_ROWS)
    else:
        best = [pl.col("exact") == 1.0, pl.col("tokens/step")]
        shown = frame.sort(best, descending=True, nulls_last=True).head(MAX_ROWS)
    shown = _with_intervals(results, shown, cost)
    with pl.Config(
        tbl_rows=MAX_ROWS, tbl_cols=-1, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True,
        float_precision=3, tbl_width_chars=230 if exact or cost else 190, tbl_formatting="ASCII_MARKDOWN",
        fmt_str_lengths=60,
    ):  # fmt: skip
        click.echo(str(shown.with_columns(plain)))
    if len(frame) > MAX_ROWS:
        order = "by B for each g and M" if exact else "exact and longest first"
        note(f"{MAX_ROWS} of {len(frame)} settings shown, {order}; -o FILE or --json for all")
    partly = int((frame["exact"] < 1.0).sum())
    if exact:
        note(f"exact: {len(frame) - partly} of {counted(len(frame), 'row')}")
    if partly:
        meaning = {
            "stop": "means over the requests that never left the trace, no fair sample",
            "aligned": "estimates",
            "recorded": "estimates",
            "pooled": "estimates",
        }[results[0].off_trace]
        note(f"exact < 1: {partly} of {counted(len(frame), 'setting')}, {meaning}")
    from ..stats import few

    tried = results[0].off_trace != "pooled" and results[0].device != "reference"
    if tried and (text := few(*shown["requests"].to_list())):
        note(text)


INTERVALS = {"tokens/step": "mean_acceptance_length", "regret mean": "regret_spent_mean"}
"""Columns of the table that an interval is shown beside."""


def _intervals(result: Result, rows: Sequence[int], cost: CostModel | None) -> list[dict[str, list[float]]]:
    """Return the 95 % intervals of some rows, by figure: [value, low, high]; none for pooled and the oracle."""
    from ..evaluate.quality import Evaluator

    if result.off_trace == "pooled" or result.device == "reference" or not result.graph.num_requests or not len(rows):
        return [{} for _ in rows]
    names = ["mean_acceptance_length", "accepted_per_proposal", "acceptance_length_gain", "regret_spent_mean"]
    if cost is not None:
        names += ["tokens_per_second", "speed_up"]
    evaluator = Evaluator(result.trace, cost=cost, device=result.device, graphs={result.grid.layout: result.graph})
    quality = evaluator.evaluate(result.grid[rows], figures=names, off_trace=result.off_trace)
    found = [quality.row(n) for n in range(len(rows))]
    return [{name: row[name] for name in names if row[name][1] is not None} for row in found]


def _with_intervals(results: list[Result], shown: pl.DataFrame, cost: CostModel | None) -> pl.DataFrame:
    """Put 95 % intervals beside the means of the rows of a table; ``row`` counts through all results."""
    import polars as pl

    texts: dict[int, dict[str, list[float]]] = {}
    first = 0
    for result in results:
        here = [row for row in shown["row"].to_list() if first <= row < first + len(result)]
        texts.update(zip(here, _intervals(result, [row - first for row in here], cost), strict=True))
        first += len(result)
    order = shown["row"].to_list()
    shown = shown.drop("row")
    for column, name in INTERVALS.items():
        if not any(name in texts[row] for row in order):
            continue
        cells = ["{:.3f} - {:.3f}".format(*texts[row][name][1:]) if name in texts[row] else "-" for row in order]
        shown.insert_column(shown.columns.index(column) + 1, pl.Series(f"{column}, 95 %", cells, dtype=pl.String))
    if any("speed_up" in texts[row] for row in order):
        made = ["{:.3f} ({:.3f} - {:.3f})".format(*texts[row]["speed_up"]) if "speed_up" in texts[row] else None
                for row in order]  # fmt: skip
        shown = shown.with_columns(pl.Series("predicted speed-up over strict, 95 %", made, dtype=pl.String))
    return shown
