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
    print_json,
    progress_bar,
    rule_options,
    threads_option,
)

if TYPE_CHECKING:
    from ..capture.cover import Progress
    from ..rules.settings import Grid


@click.command("cover")
@click.argument("trace", type=TracePath())
@rule_options()
@click.option("--max-steps", type=int, help="Compute at most so many steps, those that most settings want first.")
@click.option("--max-minutes", type=float, help="Stop after so many minutes.")
@click.option("--batch", default=32, show_default=True, help="Steps to compute in one batch.")
@click.option("--group", default=32, show_default=True, help="Requests to complete together, without a limit.")
@click.option("--kv-gb", default=2.0, show_default=True, help="KV cache to keep for prefixes, per model; 0 keeps none.")
@click.option("--faithful", is_flag=True,
              help="Batch 1, in the shapes of live decoding: equal to it to the bit. Slow.")  # fmt: skip
@click.option("--target", help="Where the target is now, if no longer under its recorded name.")
@click.option("--drafter", help="The same for the drafter.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--resume", is_flag=True, expose_value=False,
              help="As in capture; not needed, since cover always goes on from what is there.")  # fmt: skip
@threads_option
@json_option
@config_option
def command(
    trace: Path, grids: list[Grid], max_steps: int | None, max_minutes: float | None, batch: int, group: int,
    kv_gb: float, faithful: bool, target: str | None, drafter: str | None, offline: bool, as_json: bool,
) -> None:  # fmt: skip
    """Complete TRACE for a grid: run the model at just those prefixes that the grid needs and the trace lacks.

    Afterwards a replay of these settings is exact: the very tokens that live decoding would have produced. May be
    interrupted and run again; a second run, or one with a larger grid, adds only what is missing.
    """
    for flag, value, lowest in (("max-steps", max_steps, 0), ("max-minutes", max_minutes, 0), ("batch", batch, 1),
                                ("group", group, 1), ("kv-gb", kv_gb, 0)):  # fmt: skip
        if value is not None and not lowest <= value < float("inf"):
            raise UsageError(f"--{flag} {value} is out of range", fix=f"give a number of at least {lowest}")
    from ..live.cover import cover_trace
    from ..trace.reader import load_manifest

    note_planned(trace, load_manifest(trace)[0])
    with progress_bar(1, "cover", "pair") as bar:

        def report(progress: Any) -> None:
            bar.total = progress.pairs
            bar.n = progress.exact_pairs
            bar.set_postfix_str(f"wave {progress.waves}, {progress.steps_added} steps added")
            bar.refresh()

        progress = cover_trace(
            trace, grids, max_steps=max_steps, max_minutes=max_minutes, batch=batch, group=group,
            kv_bytes=int(kv_gb * 2**30), faithful=faithful, target=target, drafter=drafter, offline=offline,
            report=report,
        )  # fmt: skip
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
        note("asdsim: interrupted; what was computed is kept, run the same command to go on")
        raise click.exceptions.Exit(130)


def _print(progress: Progress) -> None:
    click.echo(
        f"{progress.exact_pairs} of {progress.pairs} (request, setting) pairs exact; "
        f"{counted(progress.steps_added, 'step')} added in {counted(progress.waves, 'wave')} "
        f"and {progress.seconds:.0f} s"
    )
    if progress.complete:
        held, live = progress.steps_held, progress.live_steps
        fewer = f": {live / held:.1f}x fewer" if live > held > 0 else ", and for other settings"
        click.echo(f"{counted(held, 'step')} stand{'s' if held == 1 else ''} for {live} of live runs{fewer}")
    elif not progress.interrupted:
        note("not complete: the other pairs stay inexact (exact_share below 1); run again to go on")
