"""``asdsim demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import PathOrUrl, config_option, json_option, note, print_json, progress_bar, threads_option

if TYPE_CHECKING:
    from ..report.page import Page
    from ..result import Result

TASKS = "gsm8k,humaneval,mt-bench"
HEAD = Path(__file__).resolve().parents[2] / "heads" / "smollm2-eagle3"
"""The trained head of a source tree; an installed package has none and drafts with the model less one layer."""
COVERED: dict[str, Any] = {"B": "0,2,4,8", "g": ".1,.25,.5", "M": "1,2"}
GRID: dict[str, Any] = {"B": "0:16:.5", "g": ".05:1:.05", "M": "1,2,inf"}


@click.command("demo")
@click.option("-o", "--out", type=PathOrUrl(), default=Path("demo-out"), show_default=True,
              help="Folder for the trace, the sweep and the figures.")  # fmt: skip
@click.option("--offline", is_flag=True, help="Use only files on this machine.")
@threads_option
@json_option
@config_option
def command(out: Path, offline: bool, as_json: bool) -> None:
    """Capture three prompts with a real model, complete the trace for a small grid, replay it and draw figures.

    The model is SmolLM2-135M-Instruct, downloaded once (93 MB). In a source tree the drafter is a trained EAGLE3 head;
    elsewhere it is the model itself without layer 12.
    """
    from ..capture.run import Plan, capture_with
    from ..trace.manifest import MANIFEST

    trace, sweep, figures = out / "trace", out / "sweep.parquet", out / "figures"
    head = HEAD.relative_to(Path.cwd()) if HEAD.is_relative_to(Path.cwd()) else HEAD
    drafter = f"eagle3:{head}" if HEAD.is_dir() else "layer-skip"
    plan = Plan(
        out=trace, target="smollm2-135m", drafter=drafter, task=TASKS, limit=1, offline=offline,
        resume=(trace / MANIFEST).exists(),
    )  # fmt: skip
    clock: dict[str, float] = {}
    start = time.perf_counter()

    def lap(name: str) -> None:
        clock[name] = time.perf_counter() - start - sum(clock.values())

    from ..capture.drafters import make_drafter
    from ..capture.tasks import load_prompts
    from ..engines.transformers.load import load_target

    note("asdsim: loading SmolLM2-135M-Instruct")
    prompts = load_prompts(plan.task, limit=plan.limit, offset=plan.offset, offline=plan.offline)
    target = load_target(plan.target, **plan.loading)
    models = target, make_drafter(plan.drafter, target, **plan.loading)
    lap("load")
    note("asdsim: capturing 3 prompts, up to 96 tokens each")
    with progress_bar(len(prompts), "capture", "request") as bar:
        captured = capture_with(
            *models, prompts, plan, lambda what, done, *_: bar.update(done - bar.n if what == "capture" else 0)
        )
    _stop_if(captured.interrupted, out)
    lap("capture")

    from ..live.cover import cover_with
    from ..rules.settings import Grid
    from ..trace.writer import TraceWriter

    covered = Grid.product(**COVERED)
    note(f"asdsim: computing the steps that {len(covered)} settings need and the capture lacks")
    with TraceWriter.append(trace) as writer, progress_bar(1, "cover", "pair") as bar:

        def report(progress: Any) -> None:
            bar.total, bar.n = progress.pairs, progress.exact_pairs
            bar.refresh()

        done = cover_with(writer, models, covered, report=report)
    _stop_if(done.interrupted, out)
    lap("cover")

    from .. import result as api
    from .plot import plot_trace
    from .replay import print_table

    result = api.replay(trace, **COVERED)
    wide = api.replay(trace, **GRID, off_trace="aligned")
    wide.write(sweep)
    lap("replay")
    files = plot_trace(trace, figures, dict(COVERED), "stop", f"asdsim demo -o {out}")
    page = _write_page(result, out)
    lap("draw")
    seconds = {name: round(value, 1) for name, value in clock.items()}
    if as_json:
        print_json("demo", {
            "trace": str(trace), "sweep": str(sweep), "figures": [str(file) for file in files],
            "report": str(page.path), "verdict": page.verdict, "seconds": seconds,
            "steps_added": done.steps_added, "live_steps": done.live_steps, "rows": result.rows(),
        })  # fmt: skip
        return
    print_table([result])
    click.echo()
    click.echo(f"{len(covered)} exact settings: {done.steps_held} model steps replace {done.live_steps} of live runs")
    click.echo(f"{trace}: the trace (asdsim inspect {trace})")
    click.echo(f"{sweep}: {len(wide)} settings, estimated where not covered (asdsim plot {sweep} -o ..)")
    click.echo(f"{figures}: figures, SVG and PNG, each with the data it shows")
    click.echo(f"{page.path}: every setting, output and token; open it in a browser")
    click.echo("seconds: " + ", ".join(f"{name} {value}" for name, value in seconds.items()))
    click.echo()
    click.echo(page.verdict)
    click.echo(f"See what changed: asdsim show {trace} --B 8 --g .25 --M 2 --largest-regret 1")


def _write_page(result: Result, out: Path) -> Page:
    """Write ``report.html`` beside the trace."""
    from ..report.page import write_report
    from .report import trace_cost
    from .show import vocabulary_of

    trace, _ = result.whole
    vocabulary, cost = vocabulary_of(trace), trace_cost(trace)
    return write_report(out / "report.html", [result], vocabulary, cost=cost, command=f"asdsim demo -o {out}")


def _stop_if(interrupted: bool, out: Path) -> None:
    """End where Ctrl-C ended a stage: what would follow would call unfinished work exact."""
    if interrupted:
        note(f"asdsim: interrupted; what was computed is kept, asdsim demo -o {out} continues")
        raise click.exceptions.Exit(130)
