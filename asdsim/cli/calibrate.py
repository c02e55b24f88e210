"""``asdsim calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import UsageError
from .common import (
    TracePath,
    check_table,
    config_option,
    counted,
    json_option,
    note,
    note_unfinished,
    print_json,
    progress_bar,
)
from .quality_options import (
    bootstrap_options,
    check_resamples,
    cost_of,
    cost_option,
    plain_row,
    print_columns,
    scoring_options,
    shown,
)


@click.command("calibrate")
@click.argument("calibration", metavar="CAL", type=TracePath())
@click.option("--holdout", type=TracePath(), help="Trace of other prompts to judge the setting on.")
@click.option(
    "--split",
    type=int,
    default=0,
    metavar="PARTS",
    help="Without a holdout: judge each of so many parts under the setting chosen on the others.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("policy.json"), show_default=True,
              help="Policy file to write; named here it replaces an existing one.")  # fmt: skip
@click.option(
    "--method",
    default="pareto",
    show_default=True,
    metavar="pareto|quantile",
    help="The fastest setting within limits; or B = g = a quantile of first-rejection ratios (the paper's).",
)
@click.option("--B", "B", metavar="LIST", help="Candidates; without --B, --g, --M every covered setting.")
@click.option("--g", "g", metavar="LIST", help="Gates.")
@click.option("--M", "M", metavar="LIST", help="Caps; with quantile the one cap, 1 if not given.")
@click.option("--semantics", default="paper", show_default=True, help="paper|core|dspark|lightllm.")
@click.option("--quantile", default=0.25, show_default=True, help="Of the first-rejection ratios.")
@click.option("--max-regret-per-token", type=float, help="Limit, in logits.")
@click.option("--max-divergence", type=float, help="Limit on the share of outputs that differ from strict.")
@click.option("--max-length-change", type=float, help="Limit on the relative change of length, either way.")
@click.option(
    "--max-accuracy-drop",
    type=float,
    help="Limit on accuracy lost against strict, as a share; refused where strict has nothing right to lose.",
)
@click.option("--bound", is_flag=True, help="Hold limits with the far end of the 95 % interval, not the value.")
@click.option("--estimate", metavar="aligned|recorded", help="Allow settings that are not exact, estimated so.")
@click.option("--table", type=click.Path(path_type=Path), help="Write all candidates with intervals: .parquet or .csv.")
@cost_option
@scoring_options
@bootstrap_options
@json_option
@config_option
def command(
    calibration: Path, holdout: Path | None, split: int, output: Path, method: str, B: str | None, g: str | None,
    M: str | None, semantics: str, quantile: float, max_regret_per_token: float | None, max_divergence: float | None,
    max_length_change: float | None, max_accuracy_drop: float | None, bound: bool, estimate: str | None,
    table: Path | None, cost: str, scorers: tuple[str, ...], allow_code: bool, timeout: float, memory: int,
    tokenizer: str | None, offline: bool, resamples: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Choose B, g and M on the trace CAL, freeze them in a file, and judge them on a holdout.

    Only exact settings are candidates. The optimism (calibration minus holdout) says how much better the setting looks
    where it was chosen. A holdout that shares prompts with CAL is refused.
    """
    check_resamples(resamples)
    check_table(table)
    if estimate is not None and estimate not in ("aligned", "recorded"):
        raise UsageError(f"--estimate {estimate!r} is neither aligned nor recorded")
    if not 0 < quantile < 1:
        raise UsageError(f"--quantile {quantile} is not between 0 and 1")
    if not output.parent.is_dir():
        raise UsageError("no such directory", where=str(output.parent))
    # As with replay -o, a file that the user names is replaced; one that nobody named may be a policy in use.
    if output.exists() and click.get_current_context().get_parameter_source("output") is ParameterSource.DEFAULT:
        raise UsageError(
            "it exists, and no -o asks to replace it", where=str(output),
            fix=f"give -o {output} to replace it, or another file with -o",
        )  # fmt: skip
    limits = (max_regret_per_token, max_divergence, max_length_change, max_accuracy_drop)
    if any(limit is not None and not limit >= 0 for limit in limits):
        raise UsageError("a limit is negative or no number")
    from ..rules.settings import Grid, axis_values

    given = [axis is not None for axis in (B, g, M)]
    grid = None
    if method == "pareto" and any(given):
        if not all(given):
            raise UsageError("--B, --g and --M belong together", fix="give all three, or none for the covered settings")
        assert B is not None and g is not None and M is not None
        grid = Grid.product(B, g, M, semantics)
    cap = axis_values("M", M)[0] if method == "quantile" and M is not None else 1.0
    from .. import result as api
    from ..stats import few
    from ..studies.calibrate import HEADLINE, Limits, calibrate, policy_record, write_policy
    from ..trace.covered import covered_settings

    trace = api.load(calibration)
    note_unfinished(trace)
    other = api.load(holdout) if holdout is not None else None
    if grid is None and method == "pareto":
        grid = covered_settings(trace)
    scorer = holdout_scorer = None
    if max_accuracy_drop is not None or scorers or allow_code:
        scorer, holdout_scorer = (
            None if one is None else _scorer(one, scorers, allow_code, timeout, memory, tokenizer, offline)
            for one in (trace, other)
        )
    model = cost_of(cost, trace)
    with progress_bar(len(grid) if grid is not None else 1, "calibrate", "setting") as bar:
        made = calibrate(
            trace, grid, holdout=other, method=method, limits=Limits(*limits, bound=bound), cap=cap, quantile=quantile,
            semantics=semantics, cost=model, scorer=scorer, holdout_scorer=holdout_scorer, split=split,
            estimated=estimate or "", resamples=resamples, seed=seed, progress=bar.update,
        )  # fmt: skip
    record = policy_record(made, trace, other, model)
    write_policy(record, output)
    if table is not None and made.table is not None:
        from ..trace.writer import write_frame

        write_frame(
            made.table.frame(),
            table,
            {"asdsim": {"trace": str(calibration), "manifest_checksum": trace.manifest.checksum}},
        )
        note(f"wrote {counted(len(made.table), 'setting')} to {table}")
    judged = "holdout" if other is not None else f"{split} parts held out in turn"
    if as_json:
        sides = {"calibration": plain_row(made.calibration)}
        if made.holdout is not None:
            sides["holdout"] = plain_row(made.holdout)
        print_json("calibrate", {
            "trace": str(calibration), "policy": str(output), "method": method, "candidates": made.candidates,
            **{key: record[key] for key in ("B", "g", "M", "semantics", "limits", "folds", "optimism")}, **sides,
        })  # fmt: skip
        return
    how = (
        f"fastest of {counted(made.candidates, 'setting')}"
        if method == "pareto"
        else f"q{100 * quantile:g} of {made.ratios} ratios"
    )
    click.echo(f"{made.grid.policy(0)} ({semantics}): {how}, frozen in {output}")
    columns: dict[str, dict[str, Any]] = {
        f"calibration, {counted(made.calibration.requests[0], 'request')}": made.calibration.row(0)
    }
    if made.holdout is not None:
        columns[f"{judged}, {counted(made.holdout.requests[0], 'request')}"] = made.holdout.row(0)
        columns["optimism"] = {name: shown(name, [gap, None, None]) for name, gap in made.optimism().items()}
    print_columns(columns, HEADLINE)
    for fold in made.folds:
        note(f"chosen without {counted(fold['held_out'], 'request')}: B={fold['B']:g} g={fold['g']:g} M={fold['M']:g}")
    if scorer is not None:
        for name, side in (("calibration", made.calibration), (judged, made.holdout)):
            if side is not None:
                note(f"{name}: {side.about_scores()}")
    if made.left_out:
        settings = counted(made.left_out, "setting")
        note(f"exact here but not on the holdout, and so no candidates: {settings}; cover it for them")
    if made.holdout is None:
        note("no holdout: these figures are those of the set that the setting was chosen on, and flatter it")
    if method == "pareto" and not made.limits.given():
        note("no limit was given: this is the fastest setting, whatever it costs")
    if estimate:
        note(f"settings that are not exact were allowed: their figures are estimates ({estimate})")
    if text := few(*(int(side.requests[0]) for side in (made.calibration, made.holdout) if side is not None)):
        note(text)


def _scorer(
    trace: Any, scorers: tuple[str, ...], allow_code: bool, timeout: float, memory: int, tokenizer: str | None,
    offline: bool,
) -> Any:  # fmt: skip
    from ..engines.transformers.text import load_decoder
    from ..evaluate.scorers import make_scorer, parse_chosen

    decode = load_decoder(trace.manifest.target, tokenizer=tokenizer, offline=offline)
    return make_scorer(
        trace.request_records(), decode, chosen=parse_chosen(scorers), allow_code=allow_code, timeout=timeout,
        memory=memory << 20,
    )  # fmt: skip
