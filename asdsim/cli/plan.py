"""``asdsim plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import TracePath, config_option, counted, json_option, note_unfinished, print_json, print_rows
from .quality_options import cost_of, cost_option, seed_option

if TYPE_CHECKING:
    from ..studies.plan import Plan


@click.command("plan")
@click.argument("trace", type=TracePath())
@click.option("--requests", type=float, required=True, help="Requests to capture, such as 1e6.")
@click.option("--tokens", type=float, help="Tokens that each generates.  [as in the trace]")
@click.option("--settings", type=int, help="Settings to cover; 0 for none.  [as many as the trace is covered for]")
@click.option("--gpus", "devices", default=1, show_default=True, help="Devices that share the requests.")
@click.option("--batch", default=32, show_default=True, help="Steps that cover computes at once.")
@cost_option
@seed_option
@json_option
@config_option
def command(
    trace: Path, requests: float, tokens: float | None, settings: int | None, devices: int, batch: int, cost: str,
    seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Estimate how large a capture of more requests like those of TRACE would be: steps, bytes, hours, memory.

    Everything printed is an estimate, with what it rests on below. Hours come from --cost: step times of the trace, or
    of another device.
    """
    from .. import result as api
    from ..studies.plan import plan

    source = api.load(trace)
    note_unfinished(source)
    found = plan(
        source, requests, cost_of(cost, source), tokens=tokens, settings=settings, devices=devices, batch=batch,
        seed=seed,
    )  # fmt: skip
    if as_json:
        print_json("plan", {
            "estimate": True, "asked": found.asked, "source": found.source, "extrapolated": found.extrapolated,
            "rows": found.rows, "memory_bytes": found.memory, "assumptions": found.assumptions,
        })  # fmt: skip
    else:
        _print(found)


def _print(found: Plan) -> None:
    asked, source = found.asked, found.source
    length = "as long as in the trace" if asked["tokens"] is None else f"of {asked['tokens']:,.0f} tokens"
    click.echo(
        f"Estimate: {asked['requests']:,.0f} requests {length}, {asked['settings']:,} settings, "
        f"{counted(asked['devices'], 'device')}"
        + (f"; EXTRAPOLATED beyond the trace in {' and '.join(found.extrapolated)}" if found.extrapolated else "")
    )
    click.echo(
        f"from {source['requests']:,} requests of up to {source['tokens']:,.0f} tokens, covered for "
        f"{source['settings']:,} settings: {source['tokens_per_step']:.2f} tokens per step, "
        f"{source['drafts_per_step']:.2f} drafts per step, {source['bytes_per_row']['positions']:.1f} bytes/position"
    )
    devices = asked["devices"]
    header = ["part", "steps", "95 % over requests", "positions", "GB", "device hours", f"hours on {devices:,}"]
    print_rows(header, [_cells(row) for row in found.rows], align=True)
    if asked["cover_ratio"] is not None and asked["settings"]:
        click.echo(
            f"~{asked['cover_ratio']:.1f} distinct steps for each captured one, in place of {asked['settings']:,} live "
            f"runs of ~{asked['live_steps'] / asked['settings']:.3g} steps"
        )
    if found.memory["whole"] is not None:
        click.echo(
            f"memory to read it: ~{_rounded(found.memory['groups'] / 1e9)} GB group by group (inspect, replay, "
            f"compare, calibrate, convert), ~{_rounded(found.memory['whole'] / 1e9)} GB whole, "
            f"~{_rounded(found.memory['shard'] / 1e9)} GB for one of {counted(found.memory['shards'], 'shard')}"
        )
    click.echo("Assumed: " + ";\n  ".join(found.assumptions) + ".")


def _cells(row: dict[str, Any]) -> list[str]:
    def about(value: float | None, unit: float = 1.0) -> str:
        return "not known" if value is None else f"~{_rounded(value / unit)}"

    ends = row["steps_interval"]
    span = "-" if ends is None else f"{_rounded(ends[0])} to {_rounded(ends[1])}"
    return [
        row["part"], about(row["steps"]), span, about(row["positions"]), about(row["bytes"], 1e9),
        about(row["device_hours"]), about(row["hours"]),
    ]  # fmt: skip


def _rounded(value: float) -> str:
    """Return three digits: an estimate has no more."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"
