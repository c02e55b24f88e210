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
@json_option
def command(as_json: bool) -> None:
    """List the acceptance rules: when they accept, parameters with published defaults, sources, needed columns."""
    from ..rules import NAMES, get_rule

    rows = [ASD]
    for name in NAMES:
        rule = get_rule(name)
        rows.append(
            {
                "name": name, "title": rule.title, "source": rule.source, "accepts": rule.accepts,
                "parameters": [
                    {"name": one.name, "default": one.default, "range": one.range, "meaning": one.meaning}
                    for one in rule.parameters
                ],
                "needs": list(rule.needs), "sampled": rule.sampled, "knob": rule.knob or None, "note": rule.note,
            }
        )  # fmt: skip
    if as_json:
        print_json("rules", {"rows": rows})
        return
    for row in rows:
        click.echo(f"{row['name']}: {row['title']}{' (sampled)' if row['sampled'] else ''}")
        click.echo(f"  accepts a mismatch x when: {row['accepts']}")
        for one in row["parameters"]:
            value = f"{one['default']:g}" if isinstance(one["default"], float) else one["default"]
            click.echo(f"  {one['name']} = {value}, {one['range']}: {one['meaning']}")
        click.echo(f"  source: {row['source']}")
        if row["needs"]:
            click.echo(f"  needs: {', '.join(row['needs'])}")
        if row["note"]:
            click.echo(f"  note: {row['note']}")
