"""``asdsim advise``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import (
    RULE_FLAGS,
    PathOrUrl,
    TracePath,
    config_option,
    counted,
    grids_of,
    json_option,
    note,
    note_unfinished,
    print_json,
    print_rows,
    progress_bar,
    rule_flags,
    with_interval,
)
from .quality_options import Scoring, cost_of, cost_option, scoring_options

if TYPE_CHECKING:
    from ..rules.settings import Grid
    from ..studies.advise import Advice

MOST_LINES = 6


def _batches(text: str) -> list[int]:
    from ..rules.settings import unfold

    sizes = unfold("batch", text)
    if any(not (size >= 1 and float(size).is_integer()) for size in sizes):
        raise UsageError(f"--batch {text}: not all are whole numbers from 1 on", fix="write for example 1,2,4,8")
    return [int(size) for size in sizes]


@click.command("advise")
@click.argument("trace", type=TracePath())
@rule_flags()
@click.option("--K-by-batch", "tables", multiple=True, metavar="TABLE", help="Let the batch choose the draft length, "
              "such as 1-4:5,5-16:3,17-:0 (0 does not speculate); may be given several times.")  # fmt: skip
@click.option("--batch", "sizes", default="1,2,4,8,16,32,64", show_default=True, metavar="LIST",
              help="Requests served together at most.")  # fmt: skip
@cost_option
@click.option("--cost-error", default=20.0, show_default=True, help="Per cent by which the corners of the cost differ.")
@click.option(
    "--rate", type=float, help="Requests per second that come at random; without it the batch is always full."
)
@click.option("--chunk", default=0, show_default=True, help="Prompt tokens read beside an iteration; 0: one prompt by "
              "itself.")  # fmt: skip
@click.option("--max-regret-per-token", type=float, help="Limit, in logits.")
@click.option("--max-divergence", type=float, help="Limit on the share of outputs that differ from strict.")
@click.option("--max-length-change", type=float, help="Limit on the relative change of length, either way.")
@click.option("--max-accuracy-drop", type=float, help="Limit on accuracy lost against strict, as a share.")
@click.option("--min-accuracy", type=float, help="Least accuracy, as a share.")
@scoring_options
@click.option("--resamples", default=200, show_default=True, help="Draws of the queue behind each interval.")
@click.option("--seed", default=0, show_default=True, help="Of the queue, of arrivals and of the draws.")
@click.option("-o", "--output", type=PathOrUrl(), help="Folder for a figure.")
@json_option
@config_option
def command(
    trace: Path, tables: tuple[str, ...], sizes: str, cost: str, cost_error: float, rate: float | None, chunk: int,
    max_regret_per_token: float | None, max_divergence: float | None, max_length_change: float | None,
    max_accuracy_drop: float | None, min_accuracy: float | None, scoring: Scoring, resamples: int, seed: int,
    output: Path | None, as_json: bool, **asked: Any,
) -> None:  # fmt: skip
    """Say for each batch size which setting is fastest on TRACE, and whether to speculate at all.

    Requests of the trace are served together by replay of their exact walks, under every setting given (by default
    those that the trace is covered for, of every draft length), strict matching and the target alone. Speed comes from
    --cost, which has to know batches: a table of measured passes, or a roofline. A static engine is modelled: a batch
    that is refilled from a queue, no routing and no preemption.

    With --K-by-batch every setting takes part under that table as well: the requests that share a step choose its draft
    length, block by block. asdsim cover TRACE .. --K-by-batch TABLE makes that exact.
    """
    if resamples < 2 or chunk < 0 or seed < 0:
        raise UsageError("--resamples is below 2, or --chunk or --seed negative")
    from ..rules.settings import parse_schedule

    batches = _batches(sizes)
    grids = grids_of(False, **{name: asked[name] for name in RULE_FLAGS})
    schedules = [parse_schedule(table) for table in tables]
    if cost == "none":
        raise UsageError("advice needs step times", fix="give --cost FILE or --cost roofline:..")
    from .. import result as api
    from ..evaluate.quality import Evaluator
    from ..studies.advise import Limits, Load, advise, as_record

    source = api.load(trace)
    note_unfinished(source)
    model = cost_of(cost, source)
    assert model is not None
    limits = Limits(max_regret_per_token, max_divergence, max_length_change, max_accuracy_drop, None, min_accuracy)
    if any(not limit >= 0 for limit in limits.given().values()):
        raise UsageError("a limit is negative or not a number")
    scored = max_accuracy_drop is not None or min_accuracy is not None or scoring.asked
    evaluator = Evaluator(source, device="cpu", scorer=scoring.scorer(source)) if scored else None
    with progress_bar(len(set(batches)), "advise", "batch size") as bar:
        found = advise(
            source, _covered(source) if grids is None else grids, model, batches, schedules=schedules, limits=limits,
            load=Load(rate, chunk, seed), cost_error=cost_error / 100, resamples=resamples, evaluator=evaluator,
            progress=bar.update,
        )  # fmt: skip
    record = as_record(found, model)
    if output is not None:
        _draw(record, output, trace, source.subject)
    if as_json:
        print_json("advise", {"trace": str(trace), **record})
        return
    _print(found, record)


def _covered(trace: Any) -> list[Grid]:
    from ..trace.covered import covered_grids

    return covered_grids(trace.manifest.grids)


def _print(found: Advice, record: dict[str, Any]) -> None:
    from ..stats import few

    heads = ["batch", "speculate", "fastest setting", "over the target alone, 95 %", "corners of the cost",
             "over strict, 95 %", "strict over the target alone", "tokens/s", "a verification takes",
             "gap p50, p99 (ms)"]  # fmt: skip
    rows = []
    for row in record["rows"]:
        ends = list(row["corners"].values())
        rows.append([
            str(row["batch"]), "yes" if row["pays"] else "no", row["setting"],
            *(with_interval(list(row[name].values()), "{:.2f}") if index != 1 else
              (f"{min(ends):.2f} to {max(ends):.2f}" if ends else "-")
              for index, name in enumerate(("over_target_alone", "corners", "over_strict"))),
            f"{row['strict_over_target_alone']:.2f}", f"{row['tokens_per_second']:.1f}", f"{row['verification']:.2f}",
            f"{row['gap_ms']['p50']:.1f}, {row['gap_ms']['p99']:.1f}",
        ])  # fmt: skip
    print_rows(heads, rows, align=True)
    strict, any_of_them = found.pays_up_to("strict"), found.pays_up_to()
    click.echo(f"strict speculation beats the target alone {_up_to(strict)}; the fastest setting {_up_to(any_of_them)}")
    longest = max(K for _, _, K in found.ranges())
    if longest:
        spec = {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": found.ranges()}
        click.echo(f"vLLM: --speculative-config '{json.dumps(spec)}', with its method and model")
    note("predicted, not measured; a verification takes so many passes over one token each")
    for text in record["cost_notes"]:
        note(text)
    for row in record["rows"]:
        for corner, winner in row["other_winner"].items():
            note(f"batch {row['batch']}, {corner}: {winner} is faster")
    if found.left_out:
        left = counted(found.left_out, "setting")
        note(f"not exact for every request, and so left out: {left}; asdsim cover adds them")
    if found.over_limit:
        note(f"exact, but beyond a limit: {counted(found.over_limit, 'setting')}")
    if not found.limits.given():
        note("no limit was given: the fastest setting is taken, whatever it costs in quality")
    if text := few(found.requests):
        note(text)


def _up_to(batch: int | None) -> str:
    if batch is None:
        return "at every batch"
    return f"up to batch {batch}" if batch else "at no batch"


def _draw(record: dict[str, Any], output: Path, trace: Path, subject: str) -> None:
    from ..plots.load import speed_by_batch
    from ..plots.style import provenance, save

    best = dict.fromkeys(["strict", *(row["setting"] for row in record["rows"])])
    names = [name for name in best if name != "target alone"][:MOST_LINES]
    made = provenance(f"asdsim advise {trace} -o {output}", source={"trace": str(trace), "subject": subject})
    for path in save(speed_by_batch(record["rows"], names), output / "advise", made, {"rows": record["rows"]}):
        note(f"wrote {path}")
