"""``asdsim audit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from .common import (
    TracePath,
    check_table,
    config_option,
    counted,
    json_option,
    note,
    note_unfinished,
    print_json,
    print_rows,
)
from .quality_options import (
    FORMATS,
    Scoring,
    bootstrap_options,
    check_resamples,
    cost_of,
    cost_option,
    note_baselines,
    plain_row,
    print_columns,
    scoring_options,
    shown,
)


@click.command("audit")
@click.argument("trace", type=TracePath())
@click.option("--policy", type=click.Path(path_type=Path), help="File that asdsim calibrate wrote.")
@click.option("--sweep", is_flag=True, help="Judge every covered setting, and print the speed-against-accuracy front.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write all settings with intervals: .parquet or .csv."
)
@cost_option
@scoring_options
@bootstrap_options
@json_option
@config_option
def command(
    trace: Path, policy: Path | None, sweep: bool, output: Path | None, cost: str, scoring: Scoring, resamples: int,
    seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Judge a frozen setting on TRACE: accuracy, length, divergence, ledger, each against strict.

    Outputs may end by themselves; it is said how many did, and how many hit the token limit. Accuracy comes with
    Newcombe's paired interval and McNemar's exact test. Every distinct output is scored once.
    """
    check_resamples(resamples)
    check_table(output)
    if (policy is None) == (not sweep):
        raise UsageError("give --policy FILE or --sweep", fix="one of them")
    from .. import result as api
    from ..rules.frozen import read_policy
    from ..stats import few
    from ..studies.audit import audit
    from ..studies.frozen import setting_name, setting_record

    grid, record = read_policy(policy) if policy is not None else (None, None)
    source = api.load(trace)
    note_unfinished(source)
    if grid is None:
        from ..trace.covered import covered_settings

        grid = covered_settings(source)
    model = cost_of(cost, source)
    audited = audit(
        source, grid, scoring.decoder(source), policy=record, chosen=scoring.chosen, allow_code=scoring.allow_code,
        timeout=scoring.timeout, memory=scoring.memory << 20, cost=model, resamples=resamples,
        seed=seed,
    )  # fmt: skip
    if output is not None:
        from ..provenance import trace_source
        from ..trace.writer import write_frame

        write_frame(audited.quality.frame(), output, {"asdsim": trace_source(source)})
        note(f"wrote {counted(len(audited.quality), 'setting')} to {output}")
    left_out = _unscored(source, scoring)
    requests = len(source.request_ids())
    if as_json:
        payload: dict[str, Any] = {
            "trace": str(trace), "requests": requests, "scored_requests": audited.scored,
            "scored_outputs": audited.outputs, "not_scored": left_out,
        }  # fmt: skip
        if grid.layout.rule == "asd":
            axes = {"B": grid.budget, "g": grid.gate, "M": grid.cap}
            names = [{name: str(axis[n]) for name, axis in axes.items()} for n in range(len(grid))]
        else:
            names = [setting_record(grid[[n]]) for n in range(len(grid))]
        payload["rows"] = [{**names[n], **plain_row(audited.quality, n)} for n in range(len(grid))]
        payload["by_task"] = {
            task: [{**names[n], **plain_row(quality, n)} for n in range(len(grid))]
            for task, quality in audited.by_task.items()
        }
        print_json("audit", payload)
        return
    shown_row = int(audited.quality.exact.argmax())
    row = audited.quality.row(shown_row)
    if sweep:
        _print_front(audited)
        click.echo(f"strict matching: {_ends(row['requests'], row['ended_strict'])}")
    else:
        columns = {f"all, {counted(requests, 'request')}": row}
        for task, quality in audited.by_task.items():
            columns[f"{task}, {quality.requests[0]}"] = quality.row(0)
        click.echo(f"{setting_name(grid)} against strict matching: {_ends(row['requests'], row['ended'])} "
                   f"(strict: {row['ended_strict']} and {row['requests'] - row['ended_strict']})")  # fmt: skip
        print_columns(columns, FORMATS)
        if audited.scored:
            click.echo(
                f"McNemar, exact: {row['answers_gained']} answers gained, {row['answers_lost']} lost, "
                f"p = {row['mcnemar_p']:.3g}; largest ledger of a request {row['regret_spent_max']:.3f} logits"
            )
    click.echo(f"{audited.quality.about_scores(shown_row)}; {audited.outputs} distinct outputs were scored")
    for task, why in left_out.items():
        note(f"{task} is not scored: {why}")
    note_baselines(model)
    if text := few(requests, audited.scored):
        note(text)


def _ends(outputs: int, ended: int) -> str:
    return f"{ended} of {outputs} outputs end by themselves, {outputs - ended} at the token limit"


def _unscored(trace: Any, scoring: Scoring) -> dict[str, str]:
    from ..evaluate.scorers import OPEN, scorer_name

    reasons = {}
    for record in trace.request_records():
        if scorer_name(record, scoring.chosen, scoring.allow_code) is None:
            if record.task in OPEN:
                reasons[record.task] = "its questions have no one right answer"
            elif record.reference is None:
                reasons[record.task] = "no reference answer"
            else:
                reasons[record.task] = "it means running programs; allow that with --allow-code-execution"
    return reasons


def _print_front(audited: Any) -> None:
    speed = "speed_up" if "speed_up" in audited.quality.figures else "mean_acceptance_length"
    names = [name for name in ("speed_up_plain", speed) if name in audited.quality.figures]
    names += ["accuracy", "accuracy_change", "outputs_differ_share", "regret_per_token"]
    exact = int(audited.quality.exact.sum())
    click.echo(f"front of {exact} exact settings: faster, for no less accuracy")
    rows = []
    for row in audited.front().to_dicts():
        cells = [shown(name, [row[name], row[f"{name}_low"], row[f"{name}_high"]]) for name in names]
        rows.append([*(f"{row[axis]:g}" for axis in "BgM"), *cells, f"{row['mcnemar_p']:.3g}"])
    print_rows(["B", "g", "M", *(FORMATS[name][0] for name in names), "McNemar p"], rows)
