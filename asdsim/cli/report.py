"""``asdsim report``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import (
    OutputPath,
    PathOrUrl,
    TracePath,
    config_option,
    counted,
    json_option,
    note,
    note_unfinished,
    print_json,
    rule_options,
)
from .quality_options import cost_of, cost_option
from .show import vocabulary_of

if TYPE_CHECKING:
    from ..evaluate.cost import Cost
    from ..rules.settings import Grid

FALLBACK: dict[str, Any] = {"B": "0,2,4,8", "g": ".1,.25,.5", "M": "1,2"}
"""Grid of a trace that is covered for none."""

MOST_SETTINGS = 2000
"""Settings that one page holds."""


@click.command("report")
@click.argument("trace", type=TracePath())
@click.option("-o", "--output", type=OutputPath(), default=Path("report.html"), show_default=True,
              help="File to write.")  # fmt: skip
@rule_options(required=False)
@click.option("--policy", type=PathOrUrl(), help="Start with the setting in this file, which asdsim "
    "calibrate wrote.")  # fmt: skip
@click.option("--off-trace", default="stop", show_default=True, metavar="stop|aligned|recorded",
              help="At a prefix that was not captured, as in replay; inexact settings are marked.")  # fmt: skip
@cost_option
@click.option("--tokenizer", metavar="NAME|DIR", help="Tokenizer of the target, for a trace without the text of its "
                                                      "tokens.")  # fmt: skip
@click.option("--offline", is_flag=True, help="Use only files on this machine.")
@json_option
@config_option
def command(
    trace: Path, output: Path, grids: list[Grid] | None, policy: Path | None, off_trace: str, cost: str,
    tokenizer: str | None, offline: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write one page about TRACE: settings, outputs side by side, every token with its ledger, figures.

    The page is one file that opens from disk and loads nothing. Without a grid it holds the settings that the trace is
    covered for, all of them exact. Figures of a setting that is not exact are marked with ~ and are no result: under
    --off-trace stop it has no gain, no speed-up, and no share of outputs that differ.
    """
    from ..report.page import write_report
    from ..result import load, replay_grid
    from ..rules.settings import Policy

    if output.is_dir():
        raise UsageError("is a folder", where=str(output), fix="name a file with -o")
    source = load(trace)
    note_unfinished(source)
    chosen: Policy | None = None
    given = grids
    if policy is not None:
        from ..studies.frozen import read_policy

        frozen = read_policy(policy)[0]
        chosen = frozen.policy(0)
        given = [*(grids or []), frozen]
    if grids is None:
        given = [*reported_grids(source), *([frozen] if policy is not None else [])]
    number = sum(map(len, given or []))
    if number > MOST_SETTINGS:
        raise UsageError(f"{number} settings are too many for a page", fix=f"ask for at most {MOST_SETTINGS}")
    results = [replay_grid(source, grid, off_trace=off_trace, note=note) for grid in given or []]
    words = ["asdsim", "report", str(trace), "-o", str(output)]
    context = click.get_current_context()
    words += [
        word for name in ("B", "g", "M") if (text := context.params.get(name)) for word in (f"--{name}", str(text))
    ]
    times = trace_cost(source) if cost == "trace" else cost_of(cost, source)
    page = write_report(
        output, results, vocabulary_of(source, tokenizer, offline), cost=times, policy=chosen,
        command=shlex.join(words), note=note,
    )  # fmt: skip
    if as_json:
        print_json("report", {
            "trace": str(trace), "file": str(page.path), "bytes": page.bytes, "settings": page.settings,
            "exact_settings": page.exact,
            "requests": page.requests, "all_requests": page.all_requests,
        })  # fmt: skip
        return
    click.echo(
        f"{page.path}: {counted(page.settings, 'setting')}, {counted(page.requests, 'request')}, "
        f"{page.bytes / 1e6:.1f} MB"
    )


def reported_grids(trace: Any) -> list[Grid]:
    """Return the grids that a trace is covered for, settings of ASD as one; a small one where there are none."""
    from ..rules.settings import Grid
    from ..trace.covered import covered_grids, covered_settings

    covered = covered_grids(trace.manifest.grids)
    if not covered:
        note(f"{trace.path} is covered for no grid: settings off the captured path are not exact")
        return [Grid.product(**FALLBACK)]
    others = [grid for grid in covered if grid.layout.rule not in ("asd", "strict")]
    asd = [covered_settings(trace)] if any(grid.layout.rule == "asd" for grid in covered) else []
    return [*asd, *others]


def trace_cost(trace: Any) -> Cost | None:
    """Return the cost model of a trace; None, with a note, where its step times allow no fit."""
    try:
        return cost_of("trace", trace)
    except UsageError as error:
        note(f"no predicted speed-up: {error.what}")
        return None
