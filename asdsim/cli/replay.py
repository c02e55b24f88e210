"""``asdsim replay``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import (
    OutputPath,
    TracePath,
    check_table,
    check_threads,
    config_option,
    counted,
    json_option,
    note,
    note_unfinished,
    print_json,
    print_rows,
    progress_bar,
    rule_options,
    with_interval,
)
from .quality_options import cost_of, note_baselines, scorer_of
from .ray_options import ray_options, walk_on
from .streaming import Streaming, stream_options

if TYPE_CHECKING:
    import polars as pl

    from ..evaluate.cost import Cost
    from ..evaluate.scorers import TaskScorer
    from ..result import Result
    from ..rules.settings import Grid
    from ..trace.stored import Source

MAX_ROWS = 24
"""Rows that the table on a terminal shows."""

INEXACT = "~"
"""Stands before every figure of a row that is not exact."""

FIGURES = ("mean_acceptance_length", "accepted_per_proposal", "acceptance_length_gain", "regret_spent_mean")
SPEED = (
    "tokens_per_second",
    "speed_up_plain",
    "speed_up",
    "tokens_per_answer",
    "seconds_per_answer",
    "answer_speed_up",
    "accuracy",
    "accuracy_change",
)


def _check_off_trace(name: str | None) -> None:
    from ..walk.off_trace import off_trace_mode

    if name is not None:
        off_trace_mode(name)


def _check_device(name: str) -> None:
    from ..walk.sweep import choose_device

    choose_device(name)


@click.command("replay")
@click.argument("trace", type=TracePath())
@rule_options(exact=True, checks={
    "off_trace": _check_off_trace, "device": _check_device, "threads": check_threads, "output": check_table,
})  # fmt: skip
@click.option("--off-trace", metavar="stop|aligned|recorded|pooled", show_default="stop; pooled if no setting is "
    "named or covered", help="At a prefix that was not captured: drop the request (the row is then not exact), or "
              "estimate.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|reference")
@click.option("--threads", default=0, show_default="all cores", help="CPU threads.")
@click.option(
    "-o",
    "--output",
    type=OutputPath(),
    help="Write the rows to this file: .parquet (with their origin, for asdsim plot) or .csv.",
)
@click.option(
    "--intervals",
    is_flag=True,
    help="Add the printed table's 95 % intervals to --json; null in rows that are not exact.",
)
@click.option(
    "--cost",
    metavar="NAME|FILE",
    default="none",
    show_default=True,
    help="Predict the speed-up over the target alone and over strict from step times, and show accuracy where answers "
    "can be scored: trace (passes timed beside its capture, else a fit to its steps), a published name, a table (CSV, "
    "JSON) of steps or of measured passes, or roofline:DEVICE,model=CONFIG.json,draft=KIND; none leaves speeds out.",
)
@stream_options
@ray_options(models=False)
@json_option
@config_option
def command(
    trace: Path, grids: list[Grid] | None, upper: float | None, varied: dict[str, Any], off_trace: str | None,
    device: str, threads: int, output: Path | None, intervals: bool, cost: str, streaming: Streaming, as_json: bool,
    cluster: Any,
) -> None:  # fmt: skip
    """Walk TRACE under every combination of B, g and M, or of another rule's parameters.

    Without settings, it shows those that TRACE is covered for; if there are none, it estimates a default grid.

    A row is exact if every walk met captured steps only. Any other row is marked with ~ and has no interval. Under
    --off-trace stop it has no gain either: it covers only the requests that stayed on the trace, a biased sample. Under
    the other modes it is an estimate; asdsim fidelity measures how far off estimates are.

    --B exact finds every budget at which some decision changes, for each g and M. A row then holds from its B to just
    below the next one, and rows are sorted by B.
    """
    from .. import result as api

    source: Source
    replay_grid: Callable[..., Result] = api.replay_grid
    if cluster is None:
        source = streaming.open(trace)
    else:
        if upper is not None:
            raise UsageError("--B exact takes the whole trace at once", fix="leave --ray out")
        walking = walk_on(cluster, trace, threads, timed=cost == "trace", scoring=scorer_of)
        source, replay_grid = walking.trace, walking.replay_grid
    if grids is None:
        grid, mode = api.default_settings(source, **varied)
        note_default(source, grid, off_trace or mode)
    else:
        grid, mode = grids[0], "stop"
    chosen = [grid] if grids is None else grids
    with progress_bar(sum(map(len, chosen)), "replay", "setting") as bar:
        how: dict[str, Any] = {"off_trace": off_trace or mode, "device": device, "threads": threads, "note": note}
        if upper is None:
            results = [replay_grid(source, grid, progress=bar.update, **how) for grid in chosen]
        else:
            results = [
                result for part in chosen
                for result in api.replay_grid_breakpoints(source, part, upper=upper, progress=bar.update, **how)
            ]  # fmt: skip
    note_unfinished(source)
    total = sum(map(len, results))
    if output is not None:
        api.write_results(results, output)
        note(f"wrote {counted(total, 'row')} to {output}")
    model = cost_of(cost, source)
    scorer = scorer_of(source) if model is not None and results[0].has_intervals else None
    if not results[0].has_intervals and (intervals or model is not None):
        note("no interval and no predicted speed: these need one walk per request, so --device cpu or cuda, and not "
             "pooled")  # fmt: skip
    if as_json:
        rows = [row for result in results for row in result.rows()]
        if intervals or model is not None:
            ends = [row for result in results for row in _intervals(result, range(len(result)), model, scorer)]
            rows = [{**row, "intervals": held} for row, held in zip(rows, ends, strict=True)]
        print_json("replay", {"trace": str(trace), **results[0].provenance(), "settings": total, "rows": rows})
    else:
        print_table(results, model, scorer)
        if results[0].has_intervals:
            note_baselines(model)


def note_default(trace: Source, shown: Grid, mode: str) -> None:
    """Say what is shown where no setting was named, and what is covered besides."""
    from ..trace.covered import covered_grids, covered_like

    if covered_like(trace, shown) is None:
        note(f"no setting named, and none covered: {counted(len(shown), 'setting')} estimated by --off-trace {mode}; "
             "asdsim cover makes settings exact")  # fmt: skip
    else:
        note(f"no setting named: the {counted(len(shown), 'setting')} that the trace is covered for")
    others: dict[str, None] = {}
    for grid in covered_grids(trace.manifest.grids):
        if grid.layout.rule != "asd":
            others[f"--rule {grid.layout.rule}"] = None
        elif (grid.reading, grid.layout) != (shown.reading, shown.layout):
            others[" ".join(["--semantics", grid.semantics, grid.parameters(0)]).strip()] = None
    if others:
        note(f"also covered, but not shown: {', '.join(others)}")


def print_table(results: list[Result], cost: Cost | None = None, scorer: TaskScorer | None = None) -> None:
    """Print the rows, and what the figures may be taken for."""
    import polars as pl

    frame = pl.concat([result.frame() for result in results]).with_row_index("row")
    thresholds = "B_to" in frame.columns
    if thresholds or len(frame) <= MAX_ROWS:  # thresholds are a list: by B, for each g and M
        shown = frame.head(MAX_ROWS)
    else:
        best = ["exact", "mean_acceptance_length"]
        shown = frame.sort(best, descending=True, nulls_last=True).head(MAX_ROWS)
    rows = shown.to_dicts()
    about = _put_intervals(results, rows, cost, scorer)
    columns = _columns(frame, rows, results[0].trace.num_requests)
    print_rows([*columns], [[cell(row) for cell in columns.values()] for row in rows], align=True)
    if len(frame) > MAX_ROWS:
        order = "by B for each g and M" if thresholds else "exact and longest first"
        note(f"{MAX_ROWS} of {len(frame)} settings shown, {order}; -o FILE or --json for all")
    partly = int((~frame["exact"]).sum())
    if thresholds:
        note(f"exact: {len(frame) - partly} of {counted(len(frame), 'row')}")
    if partly:
        from ..walk.off_trace import OFF_TRACE

        mode = OFF_TRACE[results[0].off_trace]
        note(f"exact < 1: {partly} of {counted(len(frame), 'setting')}, {mode.note}; marked {INEXACT}")
    _note_baseline(frame, results[0])
    for text in about:
        note(text)
    from ..stats import few

    sure = [row["requests"] for row in rows if row["exact"] and row["paired_requests"] == row["requests"]]
    if results[0].has_intervals and sure and (text := few(*sure)):
        note(text)


def _note_baseline(frame: pl.DataFrame, result: Result) -> None:
    """Say so where the baseline is not strict matching, or not known for the requests of a row."""
    baseline = frame["baseline"][0]
    if not baseline.startswith("strict"):
        note(f"the baseline is {baseline}: no setting of this reading is strict by token id")
    unpaired = frame.filter(frame["paired_requests"] < frame["requests"])
    if len(unpaired):
        known, all_of = max(unpaired["paired_requests"].to_list()), result.trace.num_requests
        note(f"the strict walk is captured for only {known} of {all_of} requests, so there is no gain over strict; "
             f"asdsim cover {result.trace.path} --B 0 --g 0 --M 0 adds the others")  # fmt: skip


def _columns(
    frame: pl.DataFrame, rows: Sequence[dict[str, Any]], requests: int
) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Return what the table shows: how each column is called, and its text of a row."""

    def number(name: str, form: str = "{:.3f}", scale: float = 1.0) -> Callable[[dict[str, Any]], str]:
        def cell(row: dict[str, Any]) -> str:
            text = with_interval(row["intervals"].get(name) or [row.get(name)], form, scale)
            return text if text == "-" or row["exact"] else INEXACT + text

        return cell

    def head(text: str, name: str) -> str:
        return f"{text}, 95 %" if any(row["intervals"].get(name) for row in rows) else text

    asd, thresholds = frame["rule"][0] == "asd", "B_to" in frame.columns
    # All digits of a threshold: the very float decides.
    axis = repr if thresholds else "{:g}".format
    base = "strict" if frame["baseline"][0].startswith("strict") else "B=0"
    columns: dict[str, Callable[[dict[str, Any]], str]] = {}
    if asd:
        columns["B"] = lambda row: axis(row["B"])
        if thresholds:
            columns["B to"] = lambda row: axis(row["B_to"])
        columns |= {"g": lambda row: f"{row['g']:g}", "M": lambda row: f"{row['M']:g}"}
    else:
        columns["rule"] = lambda row: row["rule"]
    if (frame["parameters"] != "").any():
        columns["parameters"] = lambda row: row["parameters"]
    columns["exact"] = lambda row: f"{round((row['exact_share'] or 0.0) * requests)} of {requests}"
    columns |= {
        head("tokens/step", "mean_acceptance_length"): number("mean_acceptance_length"),
        "accepted/step": number("accepted_per_proposal"),
        f"{base} tokens/step": number("strict_mean_acceptance_length"),
        head(f"over {base}, %", "acceptance_length_gain"): number("acceptance_length_gain", "{:+.1f}", 100.0),
        "relaxed": number("relaxed_tokens", "{:.0f}"),
        head("regret mean", "regret_spent_mean"): number("regret_spent_mean"),
        "regret max": number("regret_spent_max"),
    }
    speeds = {
        "speed_up_plain": "predicted speed-up over the target alone, 95 %",
        "speed_up": f"predicted speed-up over {base}, 95 %",
        "tokens_per_answer": "tokens per answer, 95 %",
        "seconds_per_answer": "predicted seconds per answer, 95 %",
        "accuracy": "accuracy (%), 95 %",
        "accuracy_change": f"accuracy over {base} (points), 95 %",
    }
    for name, title in speeds.items():
        if any(name in row["intervals"] for row in rows):
            form, scale = {"accuracy": ("{:.1f}", 100.0), "accuracy_change": ("{:+.1f}", 100.0)}.get(
                name, ("{:.3f}", 1.0)
            )
            columns[title] = number(name, form, scale)
    return columns


def _intervals(
    result: Result, rows: Sequence[int], cost: Cost | None, scorer: TaskScorer | None, about: set[str] | None = None
) -> list[dict[str, list[float] | None]]:
    """Return figures of some rows with their 95 % intervals, as [value, low, high].

    None where a row is not exact, or has other requests than its baseline; nothing at all for pooled and the oracle.
    ``about`` is told what accuracy stands on.
    """
    if not result.has_intervals or not result.trace.num_requests or not len(rows):
        return [{} for _ in rows]
    names = [*FIGURES, *(SPEED if cost is not None else ())]
    evaluator = result.evaluator(cost=cost, scorer=scorer)
    quality = evaluator.evaluate(result.grid[rows], figures=names, off_trace=result.off_trace)
    if about is not None and scorer is not None and quality.scored is not None:
        about |= {quality.about_scores(row) for row in quality.exact.nonzero()[0][:1]}
    held = [quality.row(n) for n in range(len(rows))]
    return [
        {name: row[name] if row[name][1] is not None else None for name in names if name in row} for row in held
    ]  # fmt: skip


def _put_intervals(
    results: list[Result], shown: list[dict[str, Any]], cost: Cost | None, scorer: TaskScorer | None
) -> set[str]:
    """Put what has a 95 % interval into the rows of a table as ``intervals``; ``row`` counts through all results.

    Returns
    -------
    set of str
        What accuracy stands on.
    """
    first, about = 0, set[str]()
    for result in results:
        here = [row for row in shown if first <= row["row"] < first + len(result)]
        held_rows = _intervals(result, [row["row"] - first for row in here], cost, scorer, about)
        for row, held in zip(here, held_rows, strict=True):
            row["intervals"] = {name: values for name, values in held.items() if values is not None}
        first += len(result)
    return about
