"""``asdsim verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import (
    TracePath,
    config_option,
    counted,
    json_option,
    note,
    placing_options,
    print_json,
    progress_bar,
    rule_options,
    threads_option,
)
from .ray_options import ray_options

if TYPE_CHECKING:
    from ..rules.settings import Grid


@click.command("verify")
@click.argument("trace", type=TracePath())
@rule_options(required=False)
@click.option("--sample", type=int, help="Verify this many (request, setting) pairs, drawn at random, instead of all.")
@click.option("--seed", default=0, show_default=True, help="Seed of --sample.")
@click.option("--near-tie", type=float, help="Margin below which a difference counts as rounding, in logits; "
              "under --regret probability, the margin of a decision is in probability.")  # fmt: skip
@click.option("--target", help="Where the target is now, if not under its recorded name.")
@click.option("--drafter", help="The same for the drafter.")
@placing_options
@click.option("--offline", is_flag=True, help="Use only files on this machine.")
@ray_options()
@threads_option
@json_option
@config_option
def command(
    trace: Path, grids: list[Grid] | None, sample: int | None, seed: int,
    near_tie: float | None, target: str | None, drafter: str | None, offline: bool, as_json: bool,
    cluster: Any, **layout: Any,
) -> int:  # fmt: skip
    """Decode live under the rule and compare with the walk of TRACE, token for token.

    Without settings, every covered grid is verified. Exit status 1 if any difference is not explained by a near-tie.
    """
    if seed < 0:
        raise UsageError(f"--seed {seed} is negative")
    if sample is not None and sample < 1:
        raise UsageError(f"--sample {sample} is below 1", fix="give at least 1")
    if near_tie is not None and not near_tie >= 0:
        raise UsageError(f"--near-tie {near_tie} is not a margin", fix="give a number >= 0, in logits")
    from ..capture.reload import Placing

    with progress_bar(1, "verify", "pair") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        how: dict[str, Any] = {
            "sample": sample, "seed": seed, "near_tie": near_tie, "target": target, "drafter": drafter,
            "offline": offline, "placing": Placing(**layout), "progress": progress,
        }  # fmt: skip
        if cluster is None:
            from ..live.verify import verify_trace

            found = verify_trace(trace, grids, **how)
        else:
            from ..cluster.verify import verify_on

            found = verify_on(trace, grids, cluster, **how, note=lambda text: note(f"asdsim: {text}"))
    near = len(found.differences) - len(found.real)
    if as_json:
        rows = [
            {
                "request_id": one.request_id, "setting": str(one.policy), "B": str(one.policy.budget),
                "g": str(one.policy.gate), "M": str(one.policy.cap), "position": one.position, "walked": one.walked,
                "live": one.live,
                "step_id": one.step_id, "cause": one.cause, "margin": str(one.margin), "near_tie": one.near_tie,
            }
            for one in found.differences
        ]  # fmt: skip
        print_json("verify", {
            "trace": str(trace), "pairs": found.pairs, "identical": found.identical, "near_ties": near,
            "real_differences": len(found.real), "not_captured": found.not_captured, "threshold": found.threshold,
            "rows": rows,
        })  # fmt: skip
    else:
        for one in found.differences:
            kind = "near-tie" if one.near_tie else "REAL"
            click.echo(
                f"{kind}: {one.request_id} under {one.policy}: token {one.position} is {one.walked} in the walk and "
                f"{one.live} live; step {one.step_id}, {one.cause}, margin {one.margin:.3g}"
            )
        compared = found.pairs - found.not_captured
        click.echo(
            f"{found.identical} of {counted(compared, 'pair')} identical to live decoding, "
            f"{near} explained by a near-tie (margin under {found.threshold:g}), "
            f"{counted(len(found.real), 'real difference')}"
        )
        if found.not_captured:
            note(f"not captured, as the walk says: {found.not_captured} of {counted(found.pairs, 'pair')}")
    return 1 if found.real else 0
