"""``asdsim bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .common import PathOrUrl, json_option, note, print_json

LABELS = {
    "cpu": "asdsim, recorded order",
    "numpy": "NumPy, loop over mismatches",
    "torch": "torch, cumsum and cumprod like the reference",
    "torch_broadcast": "torch, broadcasting over settings",
    "python": "plain Python, like the reference",
    "python_loop": "plain Python, a minimal loop",
    "graph": "asdsim, exact walk of a covered trace",
    "recorded_path": "asdsim, recorded order on its captured path",
    "graph_pair_by_pair": "asdsim, exact walk pair by pair",
}


@click.command("bench")
@click.option(
    "--quick",
    is_flag=True,
    help="Small samples of the slow implementations; no grids of a million settings, no memory peak, no first replay.",
)
@click.option("--requests", default=1000, show_default=True, help="Requests of the synthetic trace.")
@click.option("--trace", type=PathOrUrl(),
              help="A trace covered for the benchmark's 1,000 settings, instead of the committed one.")  # fmt: skip
@json_option
def command(quick: bool, requests: int, trace: Path | None, as_json: bool) -> None:
    """Time the walk beside plain Python, torch and numpy.

    Everything is timed in one run on one core; ratios transfer between machines better than seconds. The sweep is 60
    steps of 7 draft tokens for each request, under 10,000 settings.
    """
    from ..errors import UsageError

    if requests < 1:
        raise UsageError(f"--requests {requests} is not positive")
    if trace is not None and not trace.is_dir():
        raise UsageError("no such directory", where=str(trace))
    from ..bench import run

    timings = run.run(quick=quick, requests=requests, trace=trace, note=note)
    if as_json:
        print_json("bench", timings)
    else:
        print_table(timings)


def print_table(timings: dict[str, Any]) -> None:
    """Print the ratios first, then the times."""
    click.echo(f"{timings['machine']['processor']}, one core")
    for name, value in timings["ratios"].items():
        click.echo(f"  {name:24} {'not measured' if value is None else f'{value:,.1f}'}")
    click.echo("ns per (step, setting)")
    for name, value in timings["ns_per_step_setting"].items():
        click.echo(f"  {LABELS[name]:44} {'not measured' if value is None else f'{value:,.2f}'}")
    click.echo("whole sweeps, s")
    for name, row in timings["grids"].items():
        click.echo(f"  {name:60} {row['seconds']:.3f}")
    for name, peak in timings.get("peak_bytes", {}).items():
        click.echo(f"peak memory of the sweep, {name.replace('_', ' ')}: {peak / 1e6:,.0f} MB")
    for name, row in timings.get("first_replay_seconds", {}).items():
        click.echo(f"first asdsim replay, {name}: {row['warm']:.2f} s, {row['cold']:.1f} s when it has to compile")
