"""``asdsim audit``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import (
    OutputPath,
    PathOrUrl,
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
    with_finished,
)

if TYPE_CHECKING:
    from ..stats import Margin
    from ..studies.audit import Audit

Test = tuple[float | None, float, bool]
"""The margin in points, alpha, and whether the test is sequential."""


@click.command("audit")
@click.argument("trace", type=TracePath())
@click.option("--policy", type=PathOrUrl(), help="File that asdsim calibrate wrote.")
@click.option("--sweep", is_flag=True, help="Judge every covered setting, and print the speed-against-accuracy front.")
@click.option("-o", "--output", type=OutputPath(), help="Write all settings with intervals: .parquet or .csv.")
@click.option("--margin", type=float, metavar="POINTS",
              help="Test whether accuracy falls by no more than this: shown, not shown or refuted.")  # fmt: skip
@click.option("--alpha", default=0.05, show_default=True, help="Chance of a wrong verdict on the margin.")
@click.option("--until-decided", is_flag=True,
              help="With --policy and --margin: score requests in random order until that is decided.")  # fmt: skip
@cost_option
@scoring_options
@bootstrap_options
@json_option
@config_option
def command(
    trace: Path, policy: Path | None, sweep: bool, output: Path | None, margin: float | None, alpha: float,
    until_decided: bool, cost: str, scoring: Scoring, resamples: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Judge a frozen setting on TRACE: accuracy, length, divergence, ledger, each against strict.

    Reports how many outputs ended naturally and how many hit the token limit. Accuracy comes with Newcombe's paired
    interval and McNemar's exact test. Every distinct output is scored once.
    """
    check_resamples(resamples)
    check_table(output)
    if (policy is None) == (not sweep):
        raise UsageError("exactly one of --policy and --sweep is needed", fix="give --policy FILE or --sweep")
    from .. import result as api
    from ..rules.frozen import read_policy
    from ..stats import few
    from ..studies.audit import audit

    grid, record = read_policy(policy) if policy is not None else (None, None)
    source = api.load(trace)
    note_unfinished(source)
    if grid is None:
        from ..trace.covered import covered_settings

        grid = covered_settings(source)
    model = cost_of(cost, source)
    audited = audit(
        source, grid, scoring.decoder(source), policy=record, chosen=scoring.chosen, allow_code=scoring.allow_code,
        timeout=scoring.timeout, memory=scoring.code_memory << 20, cost=model, resamples=resamples,
        seed=seed, margin=None if margin is None else margin / 100, alpha=alpha, until_decided=until_decided,
    )  # fmt: skip
    if output is not None:
        from ..provenance import trace_source
        from ..trace.writer import write_frame

        write_frame(audited.quality.frame(), output, {"asdsim": trace_source(source)})
        note(f"wrote {counted(len(audited.quality), 'setting')} to {output}")
    left_out = _unscored(source, scoring)
    requests = len(source.request_ids())
    test = (margin, alpha, until_decided)
    if as_json:
        head = {"trace": str(trace), "requests": requests, "not_scored": left_out}
        print_json("audit", {**head, **_payload(audited, test)})
        return
    shown_row = int(audited.quality.exact.argmax())
    if sweep:
        row = audited.quality.row(shown_row)
        _print_front(audited)
        click.echo(f"strict matching: {_ends(row['requests'], row['ended_strict'])}")
    else:
        _print_setting(audited, requests, test)
    if until_decided:
        click.echo(
            f"{audited.scored} of {requests} requests and {audited.outputs} outputs were scored, in random order"
        )
    else:
        click.echo(f"{audited.quality.about_scores(shown_row)}; {audited.outputs} distinct outputs were scored")
    for task, why in left_out.items():
        note(f"{task} is not scored: {why}")
    note_baselines(model)
    if text := few(requests, audited.scored):
        note(text)


def _payload(audited: Audit, test: Test) -> dict[str, Any]:
    """Return what ``--json`` says of the settings."""
    from ..studies.frozen import setting_record

    grid, payload = audited.quality.grid, {"scored_requests": audited.scored, "scored_outputs": audited.outputs}
    if grid.layout.rule == "asd":
        axes = {"B": grid.budget, "g": grid.gate, "M": grid.cap}
        names = [{name: str(axis[n]) for name, axis in axes.items()} for n in range(len(grid))]
    else:
        names = [setting_record(grid[[n]]) for n in range(len(grid))]
    rows = [{**names[n], **plain_row(audited.quality, n)} for n in range(len(grid))]
    by_task = {
        task: [{**names[n], **plain_row(quality, n)} for n in range(len(grid))]
        for task, quality in audited.by_task.items()
    }
    readings = {
        name: {"strict": before, "setting": after, "verdicts": count}
        for name, (before, after, count) in audited.readings.items()
    }
    for row, verdict in zip(rows, audited.margins or (), strict=False):
        row["within_margin"] = asdict(verdict)
    margin = {} if audited.margins is None else dict(zip(("points", "alpha", "sequential"), test, strict=True))
    return {
        **payload, "rows": rows, "by_task": by_task, "readings": readings, **({"margin": margin} if margin else {}),
    }  # fmt: skip


def _print_setting(audited: Audit, requests: int, test: Test) -> None:
    """Print the figures of the one setting, of all requests and by task, and what is said of its answers."""
    from ..studies.frozen import setting_name

    row, (margin, alpha, until_decided) = audited.quality.row(0), test
    columns = {f"all, {counted(requests, 'request')}": with_finished(row)}
    for task, quality in audited.by_task.items():
        columns[f"{task}, {quality.requests[0]}"] = with_finished(quality.row(0))
    click.echo(f"{setting_name(audited.quality.grid)} against strict matching: {_ends(row['requests'], row['ended'])} "
               f"(strict: {row['ended_strict']} and {row['requests'] - row['ended_strict']})")  # fmt: skip
    print_columns(columns, FORMATS)
    for name, (before, after, count) in audited.readings.items():
        click.echo(f"{name}: {100 * after:.1f} % (strict {100 * before:.1f} %), {counted(count, 'verdict')}")
    if audited.scored and not until_decided:
        click.echo(
            f"McNemar, exact: {row['answers_gained']} answers gained, {row['answers_lost']} lost, "
            f"p = {row['mcnemar_p']:.3g}; largest ledger of a request {row['regret_spent_max']:.3f} logits"
        )
    if audited.margins is not None and margin is not None:
        click.echo(_about_margin(audited.margins[0], margin, alpha, until_decided))


def _about_margin(verdict: Margin, margin: float, alpha: float, sequential: bool) -> str:
    test = "betting test, one-sided" if sequential else "Tango's score test, one-sided"
    text = (
        f"accuracy falls by less than {margin:g} points: {verdict.verdict} at alpha {alpha:g} ({test}: "
        f"p = {verdict.shown_p:.3g} against a fall of that much, {verdict.refuted_p:.3g} against less)"
    )
    if verdict.needed is None:
        return text
    return f"{text}; some {verdict.needed} scored requests would show it, if accuracy does not change in truth"


def _ends(outputs: int, ended: int) -> str:
    return f"{ended} of {outputs} outputs end naturally, {outputs - ended} at the token limit"


def _unscored(trace: Any, scoring: Scoring) -> dict[str, str]:
    from ..evaluate.scorers import OPEN, scorer_name

    reasons = {}
    for record in trace.request_records():
        if scorer_name(record, scoring.chosen, scoring.allow_code) is None:
            if record.task in OPEN:
                reasons[record.task] = "its questions have no single right answer"
            elif record.reference is None:
                reasons[record.task] = "no reference answer"
            else:
                reasons[record.task] = "scoring it runs programs that the model wrote; add --allow-code-execution"
    return reasons


def _print_front(audited: Audit) -> None:
    speeds = ("answer_speed_up", "speed_up_plain", "seconds_per_answer")
    names = [name for name in speeds if name in audited.quality.figures] or ["mean_acceptance_length"]
    names += [
        "tokens_per_answer",
        "ended_share",
        "accuracy",
        "accuracy_change",
        "outputs_differ_share",
        "regret_per_token",
    ]
    exact = int(audited.quality.exact.sum())
    click.echo(f"front of {exact} exact settings: faster, for no less accuracy")
    margins = audited.margins or []
    grid = audited.quality.grid
    axes = zip(grid.budget.tolist(), grid.gate.tolist(), grid.cap.tolist(), strict=True)
    verdicts = {setting: margin.verdict for setting, margin in zip(axes, margins, strict=False)}
    rows = []
    for row in audited.front().to_dicts():
        cells = [shown(name, [row[name], row[f"{name}_low"], row[f"{name}_high"]]) for name in names]
        verdict = [verdicts[tuple(row[axis] for axis in "BgM")]] if verdicts else []
        rows.append([*(f"{row[axis]:g}" for axis in "BgM"), *cells, f"{row['mcnemar_p']:.3g}", *verdict])
    print_rows(
        ["B", "g", "M", *(FORMATS[name][0] for name in names), "McNemar p", *(["within margin"] if verdicts else [])],
        rows,
    )
