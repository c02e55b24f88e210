"""``asdsim calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import UsageError, unknown_name
from ..files import has_folder
from .common import (
    RULE_FLAGS,
    OutputPath,
    TracePath,
    check_table,
    config_option,
    counted,
    grids_of,
    json_option,
    note,
    note_unfinished,
    print_json,
    progress_bar,
    rule_flags,
)
from .quality_options import (
    Scoring,
    bootstrap_options,
    check_resamples,
    cost_of,
    cost_option,
    note_baselines,
    plain_row,
    print_columns,
    scorer_of,
    scoring_options,
    shown,
)
from .ray_options import ray_options, walk_on
from .streaming import Streaming, stream_options

if TYPE_CHECKING:
    from ..rules.settings import Grid
    from ..studies.calibrate import Calibration, Quantile
    from ..trace.groups import StreamedTrace
    from ..trace.stored import Source, Trace


@click.command("calibrate")
@click.argument("calibration", metavar="CAL", type=TracePath())
@click.option("--holdout", type=TracePath(), help="Trace of other prompts to judge the setting on.")
@click.option(
    "--split",
    type=int,
    default=0,
    metavar="PARTS",
    help="Without a holdout: split CAL into this many parts, and judge each under the setting chosen on the others.",
)
@click.option("-o", "--output", type=OutputPath(), default=Path("policy.json"), show_default=True,
              help="Policy file to write; an existing one is replaced only if -o names it.")  # fmt: skip
@click.option(
    "--force", is_flag=True, help="Replace the output file whatever it holds, even a policy judged on a holdout."
)
@click.option(
    "--method",
    default="pareto",
    show_default=True,
    metavar="pareto|quantile",
    help="pareto: the fastest setting within the limits. quantile: B = g = a quantile of first-rejection ratios, as "
    "in the paper.",
)
@rule_flags()
@click.option(
    "--quantile",
    default=0.25,
    show_default=True,
    help="Quantile of the first-rejection ratios; --M then gives the cap.",
)
@click.option("--max-regret-per-token", type=float, help="Limit, in logits.")
@click.option("--max-divergence", type=float, help="Limit on the share of outputs that differ from strict.")
@click.option("--max-length-change", type=float, help="Limit on the relative change of length, either way.")
@click.option(
    "--max-accuracy-drop",
    type=float,
    help="Limit on accuracy lost against strict, as a share; refused if strict gets no answer right.",
)
@click.option("--bound", is_flag=True, help="Apply limits to the far end of the 95 % interval instead of the value.")
@click.option(
    "--estimate", metavar="aligned|recorded", help="Allow settings that are not exact, estimated in this mode."
)
@click.option("--max-length-growth", type=float, help="Limit on the relative growth of length; shorter is fine.")
@click.option("--min-accuracy", type=float, help="Least accuracy, as a share.")
@click.option("--rank", metavar="answer|token", show_default="answer; token without step times",
              help="What the fastest setting is fastest by: predicted time per answer, or per token.")  # fmt: skip
@click.option("--table", type=OutputPath(), help="Write all candidates with intervals: .parquet or .csv.")
@cost_option
@scoring_options
@bootstrap_options
@stream_options
@ray_options(models=False)
@json_option
@config_option
def command(
    calibration: Path, holdout: Path | None, split: int, output: Path, force: bool, method: str, quantile: float,
    max_regret_per_token: float | None, max_divergence: float | None, max_length_change: float | None,
    max_accuracy_drop: float | None, max_length_growth: float | None, min_accuracy: float | None, rank: str | None,
    bound: bool, estimate: str | None, table: Path | None, cost: str,
    scoring: Scoring, resamples: int, seed: int, streaming: Streaming, as_json: bool, cluster: Any, **asked: Any,
) -> None:  # fmt: skip
    """Choose a setting of a rule on the trace CAL, freeze it in a file, and judge it on a holdout.

    Candidates are the settings given, by default those that CAL is covered for; only exact ones are compared. The
    optimism (calibration minus holdout) says how much better the setting looks where it was chosen. A holdout that
    shares a prompt with CAL is refused.
    """
    check_resamples(resamples)
    check_table(table)
    if estimate is not None and estimate not in ("aligned", "recorded"):
        raise UsageError(f"--estimate {estimate!r} is neither aligned nor recorded")
    _check_output(output, holdout is not None or split > 0, force)
    most = (
        max_regret_per_token, max_divergence, max_length_change, max_accuracy_drop, max_length_growth, min_accuracy,
    )  # fmt: skip
    if any(limit is not None and not limit >= 0 for limit in most):
        raise UsageError("a limit is negative or not a number")
    if rank not in (None, "token", "answer"):
        raise unknown_name("rank", rank, ["token", "answer"])
    wanted = _asked(method, quantile, asked)
    from ..evaluate.quality import Evaluator
    from ..studies.calibrate import Limits, calibrate, policy_record
    from ..studies.frozen import write_policy

    there_on = here_on = None
    trace: Trace | StreamedTrace
    other: Trace | StreamedTrace | None
    if cluster is None:
        trace = streaming.open(calibration)
        other = streaming.open(holdout) if holdout is not None else None
    else:
        if method == "quantile":
            raise UsageError("--method quantile takes the whole trace at once", fix="leave --ray out")
        here_on = walk_on(cluster, calibration, 1, timed=cost == "trace")
        there_on = here_on.beside(holdout) if holdout is not None else None
        trace, other = here_on.trace, there_on.trace if there_on is not None else None
    note_unfinished(trace)
    candidates = _covered(trace, asked["rule"]) if wanted is None else wanted
    asked_for = max_accuracy_drop is not None or min_accuracy is not None or scoring.asked
    model = cost_of(cost, trace)
    options: dict[str, Any] = {"cost": model, "resamples": resamples, "seed": seed}
    make_scorer = scoring.scorer if asked_for else scorer_of

    def evaluator(one: Trace | StreamedTrace, on: Any) -> Evaluator:
        if on is not None:
            return on.evaluator(scoring=make_scorer, **options)  # type: ignore[no-any-return]
        return Evaluator(one, scorer=make_scorer(one), **options)

    here = evaluator(trace, here_on)
    there = None if other is None else evaluator(other, there_on)
    limits = Limits(*most, bound=bound)
    total = sum(map(len, candidates)) if isinstance(candidates, list) else 1
    with progress_bar(total, "calibrate", "setting") as bar:
        frozen = calibrate(
            here, candidates, holdout=there, limits=limits, rank=rank, split=split, estimated=estimate or "",
            progress=bar.update,
        )  # fmt: skip
    record = policy_record(frozen, trace, other, model)
    write_policy(record, output)
    if table is not None and frozen.tables:
        _write_table(frozen, trace, table)
    if as_json:
        print_json("calibrate", {"trace": str(calibration), "policy": str(output), **_payload(frozen, record)})
        return
    judged = "holdout" if other is not None else f"{split} parts held out in turn"
    how = f"q{100 * quantile:g} of {frozen.ratios} ratios" if method == "quantile" else ""
    _print(frozen, output, judged, how)
    _notes(frozen, judged, estimate)
    note_baselines(model)


def _check_output(output: Path, judged: bool, force: bool) -> None:
    """Refuse to replace a policy that may be in use, or one that was judged on more than the new one will be."""
    from ..studies.frozen import check_replaces

    if not has_folder(output):
        raise UsageError("no such directory", where=str(output.parent))
    if force:
        return
    # As with replay -o, a file that the user names is replaced; one that nobody named may be a policy in use.
    if output.exists() and click.get_current_context().get_parameter_source("output") is ParameterSource.DEFAULT:
        raise UsageError(
            "the file exists, and is replaced only if -o names it", where=str(output),
            fix=f"give -o {output} to replace it, or another file with -o",
        )  # fmt: skip
    check_replaces(output, judged)


def _asked(method: str, quantile: float, asked: dict[str, Any]) -> list[Grid] | Quantile | None:
    """Return the candidates that the options name, None for those that the trace is covered for."""
    from ..rules import get_rule
    from ..rules.settings import axis_values
    from ..studies.calibrate import METHODS, Quantile

    if method not in METHODS:
        raise unknown_name("method", method, list(METHODS))
    if not 0 < quantile < 1:
        raise UsageError(f"--quantile {quantile} is not between 0 and 1")
    if method == "quantile":
        if asked["rule"] != "asd":
            raise UsageError(
                f"--method quantile gives B and g of asd, not a setting of {asked['rule']}",
                fix="use --method pareto",
            )
        cap = axis_values("M", asked["M"])[0] if asked["M"] is not None else 1.0
        return Quantile(quantile, cap, asked["semantics"])
    if asked["rule"] != "asd" and get_rule(asked["rule"]).parameters and not asked["param"]:
        return None
    grids: list[Grid] | None = grids_of(False, **{name: asked[name] for name in RULE_FLAGS})
    return grids


def _covered(trace: Source, rule: str) -> list[Grid]:
    from ..trace.covered import covered_grids, covered_settings

    if rule == "asd":
        return [covered_settings(trace)]
    grids = [grid for grid in covered_grids(trace.manifest.grids) if grid.layout.rule == rule]
    if not grids:
        raise UsageError(
            f"the trace is not covered for rule {rule}", where=str(trace.path),
            fix=f"give -p NAME=LIST, or run asdsim cover {trace.path} --rule {rule} -p NAME=LIST",
        )  # fmt: skip
    return grids


def _write_table(frozen: Calibration, trace: Source, path: Path) -> None:
    import polars as pl

    from ..trace.writer import write_frame

    record = {"trace": str(trace.path), "manifest_checksum": trace.manifest.checksum}
    write_frame(pl.concat([one.frame() for one in frozen.tables]), path, {"asdsim": record})
    note(f"wrote {counted(frozen.candidates, 'setting')} to {path}")


def _payload(frozen: Calibration, record: dict[str, Any]) -> dict[str, Any]:
    sides = {"calibration": plain_row(frozen.calibration)}
    if frozen.holdout is not None:
        sides["holdout"] = plain_row(frozen.holdout)
    names = ("rule", "B", "g", "M", "semantics", "parameters", "limits", "folds", "optimism")
    return {
        "method": frozen.method, "candidates": frozen.candidates,
        **{name: record[name] for name in names if name in record}, **sides,
    }  # fmt: skip


def _print(frozen: Calibration, output: Path, judged: str, how: str) -> None:
    from ..studies.calibrate import HEADLINE
    from ..studies.frozen import setting_name

    how = how or f"fastest per {frozen.rank} of {counted(frozen.candidates, 'setting')}"
    click.echo(f"{setting_name(frozen.grid)}: {how}, frozen in {output}")
    columns: dict[str, dict[str, Any]] = {
        f"calibration, {counted(frozen.calibration.requests[0], 'request')}": frozen.calibration.row(0)
    }
    if frozen.holdout is not None:
        columns[f"{judged}, {counted(frozen.holdout.requests[0], 'request')}"] = frozen.holdout.row(0)
        columns["optimism"] = {name: shown(name, [gap, None, None]) for name, gap in frozen.optimism().items()}
    print_columns(columns, HEADLINE)


def _notes(frozen: Calibration, judged: str, estimate: str | None) -> None:
    """Say what the figures may be taken for."""
    from ..rules import get_rule
    from ..stats import few

    sides = {"calibration": frozen.calibration} | ({judged: frozen.holdout} if frozen.holdout is not None else {})
    for fold in frozen.folds:
        names = {name: value for name, value in fold.items() if name != "held_out"}
        names = names.get("parameters", names)
        values = " ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                          for name, value in names.items())  # fmt: skip
        note(f"chosen without {counted(fold['held_out'], 'request')}: {values}")
    for name, side in sides.items():
        if side.scored is not None:
            note(f"{name}: {side.about_scores()}")
    if frozen.left_out:
        settings = counted(frozen.left_out, "setting")
        note(f"exact here but not on the holdout, so left out: {settings}; cover the holdout for them")
    if frozen.holdout is None:
        note("no holdout: these figures come from the set that the setting was chosen on, and are too good")
    if frozen.grid.layout.rule == "asd" and frozen.grid.budget[0] == 0 and frozen.candidates > 1:
        note("B=0 is strict matching: no setting that accepts near-ties keeps the limits")
    if frozen.method == "pareto" and not frozen.limits.given():
        note("no limit was given: this is the fastest setting, whatever it does to the outputs")
    if estimate:
        note(f"settings that are not exact were allowed: their figures are estimates ({estimate})")
    rule = frozen.grid.layout.rule
    if rule != "asd" and get_rule(rule).sampled:
        note(f"{rule}: a greedy trace cannot show what sampling under it would give; see asdsim rules")
    if text := few(*(int(side.requests[0]) for side in sides.values() if side.exact[0])):
        note(text)
