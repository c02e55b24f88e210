"""``asdsim compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import UsageError
from .common import (
    PathOrUrl,
    TracePath,
    config_option,
    counted,
    json_option,
    note,
    print_json,
    print_rows,
    progress_bar,
    with_interval,
)
from .quality_options import cost_of, cost_option, scorer_of, seed_option
from .streaming import Streaming, stream_options

if TYPE_CHECKING:
    from ..studies.compare import Comparison


@click.command("compare")
@click.argument("trace", type=TracePath())
@click.option("--rules", "names", metavar="LIST", show_default="all", help="Comma list of rules to compare.")
@click.option(
    "--level", type=float, help="Compare rules at this level of risk; without it, each at its published setting."
)
@click.option("--risk", default="regret_max", show_default=True,
              help="What --level bounds: regret_max|regret_per_token|outputs_differ_share.")  # fmt: skip
@cost_option
@click.option("--draft-cost", type=float, help="In place of --cost: time of one draft token, as a share of a target "
              "pass that always takes the same.")  # fmt: skip
@click.option("--off-trace", default="pooled", show_default=True, metavar="stop|aligned|recorded|pooled",
              help="At a prefix that was not captured: drop the request, or estimate.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda")
@click.option("--threads", default=0, show_default="all cores", help="CPU threads.")
@seed_option
@click.option("-o", "--output", type=PathOrUrl(), help="Folder for a figure.")
@stream_options
@json_option
@config_option
def command(
    trace: Path, names: str | None, level: float | None, risk: str, cost: str, draft_cost: float | None,
    off_trace: str, device: str, threads: int, seed: int, output: Path | None, streaming: Streaming, as_json: bool,
) -> None:  # fmt: skip
    """Compare acceptance rules on TRACE: each at its published setting, or all at one level of risk.

    With --level, one parameter of each rule varies, and the setting with the longest acceptance length within the level
    is taken. truncate has no published setting and is shown at the K predicted to be fastest. Figures of a row that is
    not exact are marked with ~ and have no interval; asdsim cover TRACE --rule NAME -p .. makes the row exact. Under
    --off-trace stop only exact settings are taken at a level, and only exact rows are ranked. The predicted speed-up is
    over the target alone, one token per forward pass; what it assumes is said below the table.
    """
    if threads < 0:
        raise UsageError(f"--threads {threads} is negative")
    if level is None and click.get_current_context().get_parameter_source("risk") is ParameterSource.COMMANDLINE:
        raise UsageError("--risk has no effect without --level", fix="add --level NUMBER")
    if device == "reference":
        raise UsageError("the reference walk is too slow for a comparison", fix="use --device cpu or cuda")
    stated = click.get_current_context().get_parameter_source("cost") is ParameterSource.COMMANDLINE
    if cost == "none" or (stated and draft_cost is not None):
        raise UsageError("a comparison needs one cost", fix="give --cost NAME|FILE or --draft-cost NUMBER")
    from ..rules import NAMES
    from ..studies.compare import RISKS, compare, stated_cost

    source = streaming.open(trace)
    model = stated_cost(draft_cost) if draft_cost is not None else None if cost == "trace" else cost_of(cost, source)
    rules = [name.strip() for name in names.split(",")] if names is not None else ["asd", *NAMES]
    with progress_bar(len(set(rules)), "compare", "rule") as bar:
        comparison = compare(
            source, rules, risk=risk, level=level, cost=model, scorer=scorer_of(source), off_trace=off_trace,
            device=device, threads=threads, seed=seed, progress=bar.update,
        )  # fmt: skip
    title = "published settings" if level is None else f"{RISKS[risk].partition(',')[0]} <= {level:g}"
    if output is not None:
        from ..plots.rules import compared_rules
        from ..plots.style import provenance, save

        words = f"asdsim compare {trace}" + ("" if level is None else f" --risk {risk} --level {level:g}")
        made_from = {"trace": str(trace), "subject": source.subject}
        record = provenance(f"{words} -o {output}", source=made_from)
        figure = compared_rules(comparison.rows, f"Rules at {title}", off_trace)
        for path in save(figure, output / "compare", record, {"rows": comparison.rows}):
            note(f"wrote {path}")
    if as_json:
        print_json("compare", {
            "trace": str(trace), "risk": risk, "level": level, "off_trace": off_trace,
            "cost_source": comparison.cost.source, "cost_notes": comparison.cost.notes(),
            "speedup_over": "the target alone",
            "unpaired_requests": comparison.unpaired, "rows": comparison.rows, "skipped": comparison.skipped,
        })  # fmt: skip
        return
    print_table(comparison, title)


def print_table(comparison: Comparison, title: str) -> None:
    """Print the rows, a verdict on ASD, and what the figures may be taken for."""
    from ..plots.rules import name_of
    from ..stats import few

    click.echo(f"{title}; speed is predicted from {comparison.cost.source}")
    scored = any(row["scored_requests"] for row in comparison.rows)
    print_rows(
        ["rule", "speed-up over the target alone, predicted", "tokens/step", "accepted/step", "over strict, 95 % (%)",
         "tokens/answer", "ended (%)", "answer over strict, predicted",
         *(["accuracy, 95 % (%)"] if scored else []), "regret max", "regret/token",
         "outputs differ (%)", "exact"],
        [_cells(row, name_of(row), comparison.off_trace, scored) for row in comparison.rows],
    )  # fmt: skip
    for text in verdict(comparison):
        click.echo(text)
    for text in comparison.cost.notes():
        note(text)
    if scored:
        note(f"accuracy, of exact rows: {comparison.about_scores}")
    for name, reason in comparison.skipped.items():
        note(f"{name} left out: {reason}")
    if comparison.unpaired:
        left = counted(comparison.unpaired, "request")
        note(f"{left} left out: the strict walk is not captured, so there is nothing to compare with; run asdsim "
             "cover --B 0 --g 0 --M 0")  # fmt: skip
    if any(row["rule"] == "truncate" for row in comparison.rows):
        note("truncate has no published K: it is shown at the K with the highest predicted speed-up")
    partly = [row for row in comparison.rows if not row["exact"]]
    if partly and comparison.off_trace == "stop":
        note("~: these cover only the requests that never left the trace, a biased sample that differs from row to "
             "row: "
             + ", ".join(f"{row['rule']} {row['requests']}" for row in partly))  # fmt: skip
    elif partly:
        note(f"~: estimates, because walks left the captured steps: {', '.join(row['rule'] for row in partly)}")
    sampled = [row["rule"] for row in comparison.rows if row["sampled"]]
    if sampled:
        note(f"{', '.join(sampled)}: a greedy trace cannot show what sampling under them would give; see asdsim rules")
    if text := few(*(row["requests"] for row in comparison.rows if row["exact"])):
        note(text)


def _cells(row: dict[str, Any], name: str, off_trace: str, scored: bool) -> list[str]:
    """Return a row of the table; figures that are not exact are marked."""
    exact = "yes" if row["exact"] else f"no: {'biased sample' if off_trace == 'stop' else 'estimate'}"
    if not row["exact"]:
        exact += f", exact for {100 * row['exact_share']:.0f} %"
    spans = {
        "acceptance_length_gain": ("acceptance_length_gain", "gain_low", "gain_high"),
        "accuracy": ("accuracy", "accuracy_low", "accuracy_high"),
    }  # fmt: skip
    formats = {
        "predicted_speedup": ("{:.2f}", 1.0), "mean_acceptance_length": ("{:.2f}", 1.0),
        "accepted_per_proposal": ("{:.2f}", 1.0), "acceptance_length_gain": ("{:+.1f}", 100.0),
        "tokens_per_answer": ("{:.1f}", 1.0), "ended_share": ("{:.0f}", 100.0), "answer_speed_up": ("{:.2f}", 1.0),
        **({"accuracy": ("{:.1f}", 100.0)} if scored else {}),
        "regret_max": ("{:.2f}", 1.0), "regret_per_token": ("{:.4f}", 1.0), "outputs_differ_share": ("{:.0f}", 100.0),
    }  # fmt: skip
    cells = []
    for key, (form, scale) in formats.items():
        text = with_interval([row[end] for end in spans.get(key, (key,))], form, scale)
        # Whether an output differs is known for walks that left the trace, too.
        cells.append(text if row["exact"] or text == "-" or key == "outputs_differ_share" else f"~{text}")
    return [name, *cells, exact]


def verdict(comparison: Comparison) -> list[str]:
    """Say who has the longest acceptance length, and whether ASD is behind by more than chance.

    Where walks that leave the trace stop, rows that are not exact stand on different requests and are not ranked.
    """
    known = [row for row in comparison.rows if row["mean_acceptance_length"] is not None]
    aside = []
    if comparison.off_trace == "stop":
        known = [row for row in known if row["exact"]]
        if left := len(comparison.rows) - len(known):
            aside = [f"{left} of {len(comparison.rows)} rows not ranked: not exact, on a biased sample of requests; "
                     "run asdsim cover, or choose another --off-trace"]  # fmt: skip
        elif comparison.level is not None:
            aside = ["only settings that are exact for all requests were candidates; asdsim cover adds others"]
    asd: Any = next((row for row in known if row["rule"] == "asd"), None)
    if asd is None or len(known) < 2:
        return aside
    best: Any = max(known, key=lambda row: (row["mean_acceptance_length"], row is asd))
    what = "at this level" if comparison.level is not None else "at published settings, which differ in risk"
    what = f"among exact rows {what}" if comparison.off_trace == "stop" else what
    if best is asd:
        return [f"asd has the longest acceptance length {what}", *aside, *_doubt(comparison, known)]
    against = [best[key] for key in ("against_asd", "against_asd_low", "against_asd_high")]
    lines = [f"asd does not win {what}: {best['rule']} is {with_interval(against, '{:+.1f}', 100.0)} % longer"]
    ahead = [row["rule"] for row in known if row is not asd and (row["against_asd_low"] or 0.0) > 0.0]
    lines.append(f"ahead of asd by their own 95 % interval, among exact rows: {', '.join(ahead) or 'none'}")
    return [*lines, *aside, *_doubt(comparison, [best, asd])]


def _doubt(comparison: Comparison, rows: list[dict[str, Any]]) -> list[str]:
    """Say what a verdict rests on where it is not exact."""
    if comparison.off_trace == "stop" or all(row["exact"] for row in rows):
        return []
    return ["this is an estimate: cover the trace for these settings before relying on it"]
