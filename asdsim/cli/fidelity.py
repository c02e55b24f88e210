"""``asdsim fidelity``."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError
from .common import (
    PathOrUrl,
    TracePath,
    config_option,
    counted,
    json_option,
    note,
    print_json,
    print_rows,
    with_interval,
)
from .quality_options import seed_option

SHORT = {
    "mean_acceptance_length": "tokens/step",
    "accepted_per_proposal": "accepted/step",
    "steps_per_request": "steps/request",
}


@click.command("fidelity")
@click.argument("trace", type=TracePath())
@click.option("--B", "B", metavar="LIST", help="Budgets. Without --B, --g and --M, every covered grid is used.")
@click.option("--g", "g", metavar="LIST", help="Gates.")
@click.option("--M", "M", metavar="LIST", help="Caps.")
@click.option("--semantics", default="paper", show_default=True, help="Reading of the rule.")
@seed_option
@click.option("-o", "--output", type=PathOrUrl(), help="Folder for a figure of the errors.")
@json_option
@config_option
def command(
    trace: Path, B: str | None, g: str | None, M: str | None, semantics: str, seed: int, output: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure how far off estimates are, on a covered TRACE.

    Hides the steps that cover added, estimates every setting from the captured path alone, and compares with the exact
    walk. Settings that act as strict matching everywhere are left out.
    """
    given = [axis is not None for axis in (B, g, M)]
    if any(given) and not all(given):
        raise UsageError("give --B, --g and --M together", fix="give all three, or none for the covered grids")
    from ..rules.settings import Grid

    grid = Grid.product(B, g, M, semantics) if B is not None and g is not None and M is not None else None
    from .. import result as api
    from ..stats import few
    from ..studies.fidelity import measure
    from ..trace.covered import covered_settings

    source = api.load(trace)
    measured = measure(source, grid or covered_settings(source), seed=seed)
    if as_json:
        print_json("fidelity", {
            "trace": str(trace), "requests": measured.requests, "summary": measured.summary.to_dicts(),
            "rows": measured.settings.to_dicts(),
        })  # fmt: skip
    else:
        settings = counted(measured.summary["settings"][0], "setting")
        click.echo(f"{counted(measured.requests, 'request')}, {settings} with a relaxed token")
        print_rows(
            ["estimate", "figure", "mean error (%)", "worst setting (%)", "bias (%)"],
            [
                [
                    row["estimator"], SHORT[row["figure"]],
                    *(with_interval([row[f"{kind}_error"], row[f"{kind}_low"], row[f"{kind}_high"]], "{:.1f}", 100.0)
                      for kind in ("mean", "worst")),
                    f"{100 * row['bias']:+.1f}",
                ]
                for row in measured.summary.to_dicts()
            ],
        )  # fmt: skip
        if text := few(measured.requests):
            note(text)
    if output is not None:
        from ..plots import exact as plots_exact
        from ..plots.style import provenance, save

        made_from = {"trace": str(trace), "subject": source.subject}
        record = provenance(f"asdsim fidelity {trace} -o {output}", source=made_from)
        for path in save(plots_exact.fidelity_errors(measured.settings), output / "fidelity", record):
            note(f"wrote {path}")
