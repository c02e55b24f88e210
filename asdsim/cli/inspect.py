"""``asdsim inspect``: validate a trace and summarise it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..files import shown
from .common import TracePath, config_option, json_option, print_json
from .streaming import Streaming, memory_option


@click.command("inspect")
@click.argument("trace", metavar="DIR", type=TracePath())
@click.option("--no-checksums", is_flag=True, help="Skip the SHA-256 of the shards; everything else is still checked.")
@memory_option
@json_option
@config_option
def command(trace: Path, no_checksums: bool, streaming: Streaming, as_json: bool) -> None:
    """Validate the trace in DIR and summarise it.

    Every checksum, row and edge is checked. The first fault is named, with exit status 2. Acceptance is that of strict
    matching on the captured path.
    """
    from ..evaluate.summary import summarise

    summary = summarise(streaming.open(trace, verify=not no_checksums))
    if as_json:
        print_json("inspect", {"trace": str(trace), **summary})
    else:
        click.echo("\n".join(render(str(trace), summary)))


def render(path: str, summary: dict[str, Any]) -> list[str]:
    """Return the lines that people read."""
    size, first, ties = summary["bytes"], summary["first_mismatch"], summary["ties"]
    histogram = ", ".join(f"{k}: {n}" for k, n in summary["steps_by_K"].items())
    lines = [
        f"{path}: valid",
        f"  target     {_model(summary['target'])}",
        f"  drafter    {_model(summary['drafter'])}",
        f"  captured   rule {_flat(summary['rule'])}; K {summary['K']}; stop {summary['stop']}, at most "
        f"{summary['max_new_tokens']} tokens; logits {shown(summary['logits_dtype'])} on {shown(summary['device'])}; "
        f"seed {summary['seed']}",
        f"  checksum   {summary['checksum']}",
        f"  requests   {summary['requests']}{_unfinished(summary)}",
        f"  steps      {summary['steps']} ({summary['steps_on_captured_path']} on the captured path, "
        f"{summary['steps_added_by_cover']} added by cover)",
        f"  positions  {summary['positions']} rows, {summary['draft_positions']} of them draft tokens; "
        f"steps by K {histogram or '-'}",
        f"  bytes      {size['total']} in {len(summary['shards'])} shards; "
        f"{_number(size['positions_per_draft_position'])} per draft position",
        "",
        "  strict acceptance on the captured path",
        f"    {'task':<14}{'requests':>9}{'steps':>8}{'tokens':>9}{'tokens/step':>13}{'95 %':>16}"
        f"{'accepted/proposal':>19}{'95 %':>16}",
    ]
    for name, row in [
        *summary["tasks"].items(),
        ("all", {"requests": summary["requests"], **summary["strict_acceptance"]}),
    ]:
        lines.append(
            f"    {shown(name):<14}{row['requests']:>9}{row['num_spec_steps']:>8}{row['completion_tokens']:>9}"
            f"{_number(row['mean_acceptance_length'], 3):>13}{_span(row['mean_acceptance_length_interval']):>16}"
            f"{_number(row['accepted_per_proposal'], 3):>19}{_span(row['accepted_per_proposal_interval']):>16}"
        )
    quantiles = "  ".join(f"q{round(100 * float(q))} {_number(v, 3)}" for q, v in first["regret_quantiles"].items())
    times = "  ".join(f"{name} {_number(value, 0)}" for name, value in summary["median_us"].items())
    lines += [
        "",
        f"  regret     at the first mismatch of {first['count']} blocks, in logits: {quantiles}  "
        f"max {_number(first['regret_max'], 3)}",
        f"  ties       {ties['mismatches']} mismatches of equal logit, {first['ties']} of them first in their block; "
        f"{ties['rows_with_two_largest_logits']} rows with two largest logits",
        f"  median us  {times}",
        "  covered    " + ("; ".join(_flat(grid) for grid in summary["grids"]) or "the captured path alone"),
    ]
    return lines


def _unfinished(summary: dict[str, Any]) -> str:
    planned = summary["planned_requests"]
    return f" of {planned}: asdsim capture --resume continues" if planned > summary["requests"] else ""


def _model(described: dict[str, Any]) -> str:
    name = described.get("name", "?")
    rest = {key: value for key, value in described.items() if key != "name"}
    return f"{shown(name)} ({_flat(rest)})" if rest else shown(name)


def _flat(values: dict[str, Any]) -> str:
    return ", ".join(f"{shown(key)} {_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return f"[{_flat(value)}]"
    if isinstance(value, list):
        return ",".join(_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else shown(value)


def _span(ends: list[float] | None) -> str:
    return "-" if ends is None else f"[{ends[0]:.3f}, {ends[1]:.3f}]"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
