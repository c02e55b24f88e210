"""``asdsim convert-policy``."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError
from .common import OutputPath, PathOrUrl, json_option, note, print_json


@click.command("convert-policy")
@click.argument("config", required=False, type=PathOrUrl())
@click.option("--B", "B", type=float, help="Budget, if no CONFIG is given.")
@click.option("--g", "g", type=float, help="Gate.")
@click.option("--M", "M", type=float, help="Cap.")
@click.option("--from", "source", default="paper", show_default=True, metavar="paper|core|dspark|lightllm",
              help="Reading that --B, --g and --M belong to.")  # fmt: skip
@click.option("--to", "to", required=True, metavar="paper|core|dspark|lightllm", help="Reading to convert to.")
@click.option("--K", "K", type=int, help="Draft tokens per step, the same in every step; needed for dspark.")
@click.option("-o", "--output", type=OutputPath(),
              help="Write the reference's JSON configuration (core or dspark).")  # fmt: skip
@json_option
def command(
    config: Path | None, B: float | None, g: float | None, M: float | None, source: str, to: str, K: int | None,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Convert a setting from one reading of ASD to another, where one exists that decides alike.

    CONFIG is a JSON configuration of the reference implementation (risk_budget, max_regret_per_value and
    max_relaxed_tokens_per_block, or DSpark's B, g, m, value_scheme and block_size), or the policy.json of asdsim
    calibrate.
    """
    from ..files import dump_json, write_atomically
    from ..formats.policies import config_of, convert_policy, read_config, setting

    if config is not None:
        if B is not None or g is not None or M is not None:
            raise UsageError("give either CONFIG or --B, --g and --M")
        policy, size = read_config(config)
        K = size if K is None else K
        if size is not None and size != K:
            raise UsageError(f"--K {K} is not the block_size {size} of the configuration", where=str(config))
    else:
        if B is None or g is None or M is None:
            raise UsageError("give CONFIG, or --B, --g and --M")
        policy = setting(B, g, M, source)
    made = convert_policy(policy, to, K)
    if output is not None:
        write_atomically(output, dump_json(config_of(made, to), indent=2) + "\n")
        note(f"wrote {output}")
    if as_json:
        row = {
            "semantics": to, "B": str(made.policy.budget), "g": str(made.policy.gate), "M": str(made.policy.cap),
            "block_size": made.block_size, "notes": made.notes,
        }  # fmt: skip
        print_json("convert-policy", {"rows": [row]})
        return
    size_text = f", K={made.block_size}" if made.block_size else ""
    click.echo(f"{policy} ({policy.semantics}) is {made.policy} ({to}{size_text})")
    for text in made.notes:
        click.echo(f"  but: {text}")
