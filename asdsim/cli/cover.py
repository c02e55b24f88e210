"""``asdsim cover``."""

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
    note_planned,
    placing_options,
    print_json,
    print_memory,
    progress_bar,
    rule_options,
    threads_option,
)
from .ray_options import ray_options

if TYPE_CHECKING:
    from ..capture.cover import Progress
    from ..rules.settings import Grid


@click.command("cover")
@click.argument("trace", type=TracePath())
@rule_options()
@click.option("--K-by-batch", "table", metavar="TABLE", help="Cover every walk that a batch may choose by a table such "
              "as 1-4:5,5-16:3,17-:0, whatever batches a request meets; for asdsim advise.")  # fmt: skip
@click.option(
    "--max-steps", type=int, help="Compute at most this many steps, starting with those that most settings need."
)
@click.option("--max-minutes", type=float, help="Stop after this many minutes.")
@click.option("--batch", default=32, show_default=True, help="Steps to compute in one batch.")
@click.option("--group", type=int, show_default="32; with --ray 1",
              help="Requests to complete together, unless --max-steps or --max-minutes is given.")  # fmt: skip
@click.option(
    "--kv-gb", default=2.0, show_default=True, help="GB of KV cache to keep for prefixes, per model; 0 keeps none."
)
@click.option("--faithful", is_flag=True,
              help="Compute each step alone, in the shapes of live decoding: equal to the bit, but slow.")  # fmt: skip
@click.option("--target", help="Where the target is now, if not under its recorded name.")
@click.option("--drafter", help="The same for the drafter.")
@placing_options
@click.option("--offline", is_flag=True, help="Use only files on this machine.")
@click.option("--resume", is_flag=True, expose_value=False,
              help="Accepted as in capture, but not needed: cover always continues.")  # fmt: skip
@ray_options()
@threads_option
@json_option
@config_option
def command(
    trace: Path, grids: list[Grid], table: str | None, max_steps: int | None, max_minutes: float | None, batch: int,
    group: int | None, kv_gb: float, faithful: bool, target: str | None, drafter: str | None, offline: bool,
    as_json: bool, cluster: Any, **layout: Any,
) -> int:  # fmt: skip
    """Complete TRACE for a grid: run the model at just the prefixes that the grid needs and the trace lacks.

    Afterwards a replay of these settings is exact: it gives the same tokens as live decoding. You can interrupt the
    command and run it again; another run, or one with a larger grid, adds only what is missing.
    """
    for flag, value, lowest in (("max-steps", max_steps, 0), ("max-minutes", max_minutes, 0), ("batch", batch, 1),
                                ("group", group, 1), ("kv-gb", kv_gb, 0)):  # fmt: skip
        if value is not None and not lowest <= value < float("inf"):
            raise UsageError(f"--{flag} {value} is out of range", fix=f"give a number of at least {lowest}")
    if cluster is not None and (max_steps is not None or max_minutes is not None):
        raise UsageError(
            "--max-steps and --max-minutes order the steps of all requests, which --ray does not",
            fix="leave them out; Ctrl-C keeps what is finished",
        )
    from ..capture.reload import Placing, plan_pair
    from ..rules.settings import parse_schedule
    from ..trace.reader import load_manifest

    by_batch = None if table is None else parse_schedule(table)
    if by_batch and any(grid.layout.rule != "asd" or grid.layout.width for grid in grids):
        raise UsageError("--K-by-batch chooses the draft length of asd", fix="leave --K and --rule out")
    manifest, placing = load_manifest(trace)[0], Placing(**layout)
    note_planned(trace, manifest)
    if placing.memory.startswith("plan"):
        from ..live.cover import cover_load

        load = cover_load(trace, batch=batch, kv_bytes=int(kv_gb * 2**30), faithful=faithful)
        memory = plan_pair(manifest, load, target=target, drafter=drafter, offline=offline, placing=placing)
        return print_memory("cover", memory, as_json)
    with progress_bar(1, "cover", "pair") as bar:

        def report(progress: Any) -> None:
            bar.total = progress.pairs
            bar.n = progress.exact_pairs
            bar.set_postfix_str(f"wave {progress.waves}, {progress.steps_added} steps added")
            bar.refresh()

        how: dict[str, Any] = {
            "batch": batch, "kv_bytes": int(kv_gb * 2**30), "faithful": faithful, "by_batch": by_batch,
            "target": target, "drafter": drafter, "offline": offline, "placing": placing, "report": report,
        }  # fmt: skip
        if cluster is None:
            from ..live.cover import cover_trace

            progress = cover_trace(trace, grids, max_steps=max_steps, max_minutes=max_minutes, group=group or 32, **how)
        else:
            from ..cluster.cover import cover_on

            progress = cover_on(
                trace, grids, cluster, group=group or 1, **how, note=lambda text: note(f"asdsim: {text}")
            )
    row = {
        "settings": sum(map(len, grids)),
        "exact_share": progress.exact_share,
        "interrupted": progress.interrupted,
        "pairs": progress.pairs,
        "exact_pairs": progress.exact_pairs,
        "waves": progress.waves,
        "steps_added": progress.steps_added,
        "steps_held": progress.steps_held,
        "live_steps": progress.live_steps,
        "seconds": round(progress.seconds, 1),
    }
    if as_json:
        print_json("cover", {"trace": str(trace), "rows": [row]})
    else:
        _print(progress)
    if progress.interrupted:
        note("asdsim: interrupted; what was computed is kept, run the same command to continue")
        raise click.exceptions.Exit(130)
    return 0


def _print(progress: Progress) -> None:
    click.echo(
        f"{progress.exact_pairs} of {progress.pairs} (request, setting) pairs exact; "
        f"{counted(progress.steps_added, 'step')} added in {counted(progress.waves, 'wave')} "
        f"and {progress.seconds:.0f} s"
    )
    if progress.complete:
        held, live = progress.steps_held, progress.live_steps
        fewer = f": {live / held:.1f}x fewer" if live > held > 0 else ", and serve other settings"
        click.echo(f"{counted(held, 'step')} replace{'s' if held == 1 else ''} {live} of live runs{fewer}")
    elif not progress.interrupted:
        note("not complete: the other pairs are not exact (exact_share below 1); run again to continue")
