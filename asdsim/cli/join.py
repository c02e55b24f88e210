"""``asdsim join``."""

from __future__ import annotations

from pathlib import Path

import click

from .common import PathOrUrl, config_option, counted, json_option, print_json


@click.command("join")
@click.argument("trace", type=PathOrUrl())
@json_option
@config_option
def command(trace: Path, as_json: bool) -> None:
    """Join the shards TRACE.shard-1-of-n, .. that capture --shard wrote, into TRACE.

    Requests come in the order of an undivided run, and what cover added to the shards is kept. The shards stay; remove
    them once the trace has been checked.
    """
    from ..trace.join import join

    joined = join(trace)
    row = {"requests": len(joined.request_ids()), "steps": joined.steps.num_rows, "grids": len(joined.manifest.grids)}
    if as_json:
        print_json("join", {"trace": str(trace), "rows": [row]})
    else:
        click.echo(f"{trace}: {counted(row['requests'], 'request')}, {counted(row['steps'], 'step')}, "
                   f"{counted(row['grids'], 'covered grid')}")  # fmt: skip
