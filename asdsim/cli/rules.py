"""``asdsim rules``."""

from __future__ import annotations

from typing import Any

import click

from .common import json_option, print_json

ASD: dict[str, Any] = {
    "name": "asd",
    "title": "Approximate Speculative Decoding",
    "source": "arXiv 2608.03447, B = 8, g = .25, M = 2",
    "accepts": "r/q <= g, ledger + block charge <= B, at most M in a block",
    "parameters": [
        {"name": "B", "default": 8.0, "range": "[0, inf]", "meaning": "regret budget of a request, in logits"},
        {"name": "g", "default": 0.25, "range": "[0, inf]", "meaning": "largest regret / suffix value"},
        {"name": "M", "default": 2.0, "range": "whole [0, inf]", "meaning": "relaxed tokens per block"},
    ],
    "needs": [],
    "sampled": False,
    "knob": "B",
    "note": "varied by --semantics, --regret, --value, --ledger and --no-gate",
}


@click.command("rules")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the acceptance rules, or describe the one called NAME: when it accepts, parameters, sources, needed columns.

    A default is the published setting, or ours where the source says so.
    """
    from ..errors import unknown_name
    from ..rules import NAMES

    if name is not None and name not in ("asd", *NAMES):
        raise unknown_name("rule", name, ["asd", *NAMES])
    rows = [_row(one) for one in ("asd", *NAMES) if name in (None, one)]
    if as_json:
        print_json("rules", {"rows": rows})
        return
    for row in rows:
        _print(row, whole=name is not None)


def _row(name: str) -> dict[str, Any]:
    if name == "asd":
        return ASD
    from ..rules import get_rule

    rule = get_rule(name)
    return {
        "name": name, "title": rule.title, "source": rule.source, "accepts": rule.accepts,
        "parameters": [
            {"name": one.name, "default": one.default, "range": one.range, "meaning": one.meaning}
            for one in rule.parameters
        ],
        "needs": list(rule.needs), "sampled": rule.sampled, "knob": rule.knob or None, "note": rule.note,
    }  # fmt: skip


def _print(row: dict[str, Any], whole: bool) -> None:
    """Print a rule; a ``whole`` description adds its setting in one line and what a comparison moves."""
    click.echo(f"{row['name']}: {row['title']}{' (sampled)' if row['sampled'] else ''}")
    click.echo(f"  accepts a mismatch x when: {row['accepts']}")
    setting = []
    for one in row["parameters"]:
        value = f"{one['default']:g}" if isinstance(one["default"], float) else one["default"]
        setting.append(f"{one['name']}={value}")
        click.echo(f"  {one['name']} = {value}, {one['range']}: {one['meaning']}")
    if whole and setting:
        click.echo(f"  default setting, published unless the source says otherwise: {' '.join(setting)}")
    click.echo(f"  source: {row['source']}")
    if whole and row["knob"]:
        click.echo(f"  compare --level varies: {row['knob']}")
    if row["needs"]:
        click.echo(f"  needs: {', '.join(row['needs'])}")
    if row["note"]:
        click.echo(f"  note: {row['note']}")
