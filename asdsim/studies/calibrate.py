"""Choose B, g and M on one set of requests, freeze them, and judge them on another.

Choosing the best of many settings on a set makes that setting look better there than it is: the holdout says by how
much (the optimism). A holdout that shares prompts with the calibration set cannot say it and is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import __version__, stats
from ..errors import UsageError, unknown_name
from ..evaluate.cost import CostModel
from ..evaluate.quality import Quality, Scorer, judge, judge_assigned, take
from ..rules.settings import SEMANTICS, Grid
from ..stats import Intervals
from ..trace.graph import Graph, build_graph
from ..walk.sweep import walk_grid

if TYPE_CHECKING:
    from ..trace.reader import Trace

METHODS = ("pareto", "quantile")
POLICY_VERSION = 1
HEADLINE = (
    "mean_acceptance_length", "acceptance_length_gain", "speed_up", "regret_per_token", "outputs_differ_share",
    "length_change", "accuracy", "accuracy_change",
)  # fmt: skip
"""Figures that a report of a calibration shows."""


@dataclass(frozen=True)
class Limits:
    """What the fastest setting may cost at most; None lifts a limit.

    Attributes
    ----------
    regret_per_token : float, optional
        Ledger per generated token, logits.
    divergence : float, optional
        Share of outputs that are not the strict one.
    length_change : float, optional
        Size of the relative change of generated tokens, either way.
    accuracy_drop : float, optional
        Accuracy lost against strict, as a share.
    bound : bool
        Hold the limits with the far end of each 95 % interval instead of the value.
    """

    regret_per_token: float | None = None
    divergence: float | None = None
    length_change: float | None = None
    accuracy_drop: float | None = None
    bound: bool = False

    def given(self) -> dict[str, float]:
        """Return the limits that are set."""
        names = ("regret_per_token", "divergence", "length_change", "accuracy_drop")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def hold(self, quality: Quality) -> npt.NDArray[np.bool_]:
        """Return, per setting, whether every limit holds.

        Raises
        ------
        UsageError
            If a limit needs a figure that the data do not give, or bounds a loss where there is nothing to lose.
        """
        fine = np.ones(len(quality), bool)
        for name, most in self.given().items():
            figure = {"divergence": "outputs_differ_share", "accuracy_drop": "accuracy_change"}.get(name, name)
            if figure not in quality.figures:
                raise UsageError(
                    f"a limit on {name} needs {figure}, which these data do not give",
                    fix="give scores (a task with answers) and exact settings, or leave the limit out",
                )
            one = quality.figures[figure]
            if name == "accuracy_drop":
                if quality.scored is not None:
                    known = quality.scored[:, 1] > 0
                    if not known.any():
                        raise UsageError(
                            f"a limit on {name} holds nothing: {quality.about_scores()}",
                            fix="score answers that strict matching can get right (longer outputs, another --scorer, "
                            "other prompts), or leave the limit out",
                        )  # fmt: skip
                    fine &= known
                cost = -(one.low if self.bound else one.value)
            elif name == "length_change":
                cost = np.maximum(np.abs(one.low), np.abs(one.high)) if self.bound else np.abs(one.value)
            else:
                cost = one.high if self.bound else one.value
            with np.errstate(invalid="ignore"):
                fine &= cost <= most + 1e-12
        return fine


def choose(quality: Quality, limits: Limits) -> int:
    """Return the fastest setting within limits: by predicted speed-up, or by acceptance length without a cost model.

    Of equally fast ones the one with the least regret per token is taken, then the smallest B, g and M, so that the
    choice does not hang on the order of the grid.

    Raises
    ------
    UsageError
        If no setting keeps the limits.
    """
    gain = quality.figures["speed_up" if "speed_up" in quality.figures else "mean_acceptance_length"].value
    fine = limits.hold(quality) & ~np.isnan(gain)
    if not fine.any():
        named = ", ".join(f"{name} <= {most:g}" for name, most in limits.given().items())
        raise UsageError(f"none of {len(quality)} settings keeps {named}", fix="loosen a limit, or add B = 0 (strict)")
    regret = quality.figures["regret_per_token"].value
    grid = quality.grid
    kept = np.flatnonzero(fine)
    # Sums in another order may differ in their last bits: speeds equal to 12 digits are equal.
    fastest = kept[gain[kept] >= gain[kept].max() * (1 - 1e-12)]
    order = np.lexsort((grid.cap[fastest], grid.gate[fastest], grid.budget[fastest], regret[fastest]))
    return int(fastest[order[0]])


def rejection_ratios(graph: Graph, requests: Sequence[int] | None = None) -> npt.NDArray[np.float64]:
    """Return the positive r/q at the first rejection of every block of the captured path.

    Parameters
    ----------
    graph : Graph
        Of a strict capture; its layout says which suffix value q is.
    requests : sequence of int, optional
        Rows of the requests to use.
    """
    wanted = range(graph.num_requests) if requests is None else requests
    found: list[float] = []
    for r in wanted:
        for step in graph.path_step[graph.path_ptr[r] : graph.path_ptr[r + 1]]:
            first = int(graph.mm_ptr[step])
            if first < graph.mm_ptr[step + 1] and 0 < graph.mm_score[first] < math.inf:
                found.append(float(graph.mm_score[first]))
    return np.array(found)


def quantile_setting(
    graph: Graph, semantics: str = "paper", cap: float = 1.0, q: float = 0.25, requests: Sequence[int] | None = None
) -> Grid:
    """Return B = g = a quantile of the first-rejection ratios, as the paper freezes its setting (M is given).

    The quantile is linear: at h = (n - 1) q between sorted values.

    Raises
    ------
    UsageError
        If no block of the captured path was rejected.
    """
    ratios = rejection_ratios(graph, requests)
    if not len(ratios):
        raise UsageError("no block of the captured path was rejected with regret > 0: there is nothing to take from")
    value = float(np.quantile(ratios, q, method="linear"))
    return Grid.product(value, value, cap, semantics)


def identity(trace: Trace) -> dict[str, Any]:
    """Return what a frozen setting belongs to: models, drafter and K."""
    manifest = trace.manifest
    return {
        "target": manifest.target, "drafter": manifest.drafter, "num_draft_tokens": manifest.num_draft_tokens,
        "logits_dtype": manifest.logits_dtype,
    }  # fmt: skip


def check_same_models(one: dict[str, Any], other: dict[str, Any], where: str) -> None:
    """Refuse a trace of other models, or of another K.

    Raises
    ------
    UsageError
        Naming the first difference. Names may differ where the checksum of the weights is the same.
    """
    for part in ("target", "drafter"):
        left, right = one[part], other[part]
        for key in ("weights_sha256", "config_sha256", "name", "revision", "layers", "ngram", "dtype"):
            if key == "config_sha256" and not (left.get(key) and right.get(key)):  # older traces do not say
                continue
            if (
                key in ("name", "revision")
                and left.get("weights_sha256")
                and left.get("weights_sha256") == right.get("weights_sha256")
            ):
                continue
            if left.get(key) != right.get(key):
                raise UsageError(
                    f"{part} {key} is {right.get(key)!r} ({right.get('name')}), "
                    f"not {left.get(key)!r} ({left.get('name')})", where=where,
                    fix="calibrate and judge with one model and drafter",
                )  # fmt: skip
    if one["num_draft_tokens"] != other["num_draft_tokens"]:
        raise UsageError(
            f"K is {other['num_draft_tokens']}, not {one['num_draft_tokens']}", where=where, fix="capture with one K"
        )


def check_disjoint(calibration: Trace, holdout: Trace) -> None:
    """Refuse a holdout that shares prompts with the calibration set, by tokens or by text (spaces aside).

    Raises
    ------
    UsageError
        Naming the first shared prompt and how many there are.
    """
    seen: dict[Any, str] = {}
    for record in calibration.request_records():
        seen[record.prompt_ids] = record.request_id
        seen[" ".join(record.prompt_text.split())] = record.request_id
    shared = []
    for record in holdout.request_records():
        other = seen.get(record.prompt_ids) or seen.get(" ".join(record.prompt_text.split()))
        if other is not None:
            shared.append((record.request_id, other))
    if shared:
        mine, other = shared[0]
        raise UsageError(
            f"{len(shared)} of its {len(holdout.request_ids())} prompts are in the calibration set too, the first is "
            f"{mine} ({other} there)",
            where=str(holdout.path), fix="hold out other prompts (asdsim capture --offset), or use --split",
        )  # fmt: skip


@dataclass
class Calibration:
    """A frozen setting, and what is known of it.

    Attributes
    ----------
    grid : Grid
        The one setting.
    method : str
    limits : Limits
    candidates : int
        Settings that were compared.
    calibration, holdout : Quality or None
        Figures on either set, one row each.
    folds : list of dict
        With ``--split``: the setting chosen without each fold.
    ratios : int
        With ``quantile``: first-rejection ratios used.
    table : Quality or None
        With ``pareto``: all candidates.
    left_out : int
        Settings that are exact on the calibration set but not on the holdout, and so could not be judged there.
    """

    grid: Grid
    method: str
    limits: Limits
    candidates: int
    calibration: Quality
    holdout: Quality | None = None
    folds: list[dict[str, Any]] = field(default_factory=list)
    ratios: int = 0
    table: Quality | None = None
    left_out: int = 0

    def optimism(self) -> dict[str, float]:
        """Return calibration minus holdout for each headline figure that both have."""
        if self.holdout is None:
            return {}
        found = {}
        for name in HEADLINE:
            if name in self.calibration.figures and name in self.holdout.figures:
                gap = self.calibration.figures[name].value[0] - self.holdout.figures[name].value[0]
                if not np.isnan(gap):
                    found[name] = float(gap)
        return found


def calibrate(
    trace: Trace,
    grid: Grid | None,
    *,
    holdout: Trace | None = None,
    method: str = "pareto",
    limits: Limits | None = None,
    cap: float = 1.0,
    quantile: float = 0.25,
    semantics: str = "paper",
    cost: CostModel | None = None,
    holdout_cost: CostModel | None = None,
    scorer: Scorer | None = None,
    holdout_scorer: Scorer | None = None,
    split: int = 0,
    estimated: str = "",
    resamples: int = stats.RESAMPLES,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Choose a setting on a trace and judge it on another one, or on parts held out in turn.

    Parameters
    ----------
    trace : Trace
        The calibration set.
    grid : Grid or None
        Candidates of ``pareto``; those that are not exact are left out unless ``estimated`` is given.
    holdout : Trace, optional
        Other prompts, same models.
    method : {"pareto", "quantile"}
    limits : Limits, optional
        Of ``pareto``.
    cap, quantile, semantics
        Of ``quantile``: see :func:`quantile_setting`.
    cost, holdout_cost : CostModel, optional
        The second one defaults to the first.
    scorer, holdout_scorer : callable, optional
        Each for the requests of its trace.
    split : int
        Number of parts: each is judged under the setting chosen on the others, and the frozen setting is chosen on all.
    estimated : str
        An ``off_trace`` mode: allow settings that are not exact, with figures estimated so.
    resamples, seed, progress
        See :func:`asdsim.evaluate.quality.judge`.

    Raises
    ------
    UsageError
        If nothing can be chosen, or judged honestly: why.
    """
    if method not in METHODS:
        raise unknown_name("method", method, list(METHODS))
    limits = limits or Limits()
    if holdout is not None:
        if split:
            raise UsageError("--holdout and --split are two ways to judge", fix="give one of them")
        check_same_models(identity(trace), identity(holdout), str(holdout.path))
        check_disjoint(trace, holdout)
    off_trace = estimated or "stop"
    if method == "quantile":
        from ..rules.settings import layout_of

        graph = build_graph(trace, layout_of(semantics))
        chosen = quantile_setting(graph, semantics, cap, quantile)
        table = judge(trace, chosen, cost=cost, scorer=scorer, graph=graph, off_trace=off_trace, resamples=resamples,
                      seed=seed)  # fmt: skip
        _need_exact(table, chosen, trace, off_trace)
        made = Calibration(chosen, method, limits, 1, table, ratios=len(rejection_ratios(graph)))
    else:
        if grid is None:
            raise UsageError("pareto needs candidates", fix="give --B, --g and --M, or cover the trace")
        graph = build_graph(trace, grid.layout)
        table = judge(trace, grid, cost=cost, scorer=scorer, graph=graph, off_trace=off_trace, resamples=resamples,
                      seed=seed, progress=progress)  # fmt: skip
        allowed = _allowed(table, trace, off_trace)
        left_out = 0
        if holdout is not None and off_trace == "stop":
            there = walk_grid(build_graph(holdout, grid.layout), take(grid, allowed)).exact.all(axis=1)
            # Where none is exact there, the setting chosen is named, so that it can be covered.
            if there.any():
                left_out = int((~there).sum())
                allowed = allowed[there]
        table = _rows(table, allowed)
        best = choose(table, limits)
        made = Calibration(table.grid[best : best + 1], method, limits, len(table), _rows(table, np.array([best])))
        made.table, made.left_out = table, left_out
    if split:
        made.folds, made.holdout = _held_out_in_turn(
            trace, made, table, split, limits, cap, quantile, semantics, cost, scorer, resamples, seed
        )
    if holdout is not None:
        made.holdout = judge(holdout, made.grid, cost=holdout_cost or cost, scorer=holdout_scorer, off_trace=off_trace,
                             resamples=resamples, seed=seed)  # fmt: skip
        _need_exact(made.holdout, made.grid, holdout, off_trace)
    return made


def _allowed(table: Quality, trace: Trace, off_trace: str) -> npt.NDArray[np.int64]:
    if off_trace != "stop":
        return np.arange(len(table))
    exact = np.flatnonzero(table.exact_share == 1.0)
    if not len(exact):
        raise UsageError(
            f"none of {len(table)} settings is exact", where=str(trace.path),
            fix="run asdsim cover for the grid, or allow estimates with --estimate",
        )  # fmt: skip
    return exact


def _rows(quality: Quality, rows: npt.NDArray[np.int64]) -> Quality:
    figures = {name: Intervals(one.value[rows], one.low[rows], one.high[rows]) for name, one in quality.figures.items()}
    return replace(
        quality, grid=take(quality.grid, rows), requests=quality.requests[rows],
        exact_share=quality.exact_share[rows], figures=figures, largest_ledger=quality.largest_ledger[rows],
        mcnemar=None if quality.mcnemar is None else quality.mcnemar[rows],
        changed=None if quality.changed is None else quality.changed[rows],
        scored=None if quality.scored is None else quality.scored[rows],
        ended=None if quality.ended is None else quality.ended[rows],
    )  # fmt: skip


def _need_exact(quality: Quality, grid: Grid, trace: Trace, off_trace: str) -> None:
    if off_trace == "stop" and quality.exact_share[0] < 1.0:
        B, g, M = (f"{axis[0]:g}" for axis in (grid.budget, grid.gate, grid.cap))
        exactly = f"--B {float(grid.budget[0])!r} --g {float(grid.gate[0])!r} --M {M}"
        raise UsageError(
            f"B={B} g={g} M={M} is exact for {100 * quality.exact_share[0]:.0f} % of its requests only",
            where=str(trace.path), fix=f"run asdsim cover {trace.path} {exactly}, or allow estimates with --estimate",
        )  # fmt: skip


def _held_out_in_turn(
    trace: Trace, made: Calibration, table: Quality, split: int, limits: Limits, cap: float, quantile: float,
    semantics: str, cost: CostModel | None, scorer: Scorer | None, resamples: int, seed: int,
) -> tuple[list[dict[str, Any]], Quality]:  # fmt: skip
    """Choose without each part and judge on it, over all parts; parts are drawn by request, by ``seed``."""
    graph = build_graph(trace, table.grid.layout)
    number = graph.num_requests
    if not 2 <= split <= number:
        raise UsageError(f"--split {split} cannot part {number} requests", fix=f"give 2 to {number}")
    part_of = np.random.default_rng(seed).permutation(number) % split
    policies, folds = [], []
    for part in range(split):
        rest = np.flatnonzero(part_of != part)
        if made.method == "quantile":
            chosen = quantile_setting(graph, semantics, cap, quantile, rest.tolist())
        else:
            # Values decide, unless limits hold with intervals: then these are drawn on the rest as well.
            draws = resamples if limits.bound else 2
            inner = judge(trace, table.grid, cost=cost, scorer=scorer, requests=rest.tolist(), graph=graph,
                          resamples=draws, seed=seed)  # fmt: skip
            best = choose(inner, limits)
            chosen = table.grid[best : best + 1]
        policies.append(chosen.policy(0))
        folds.append({
            "held_out": int((part_of == part).sum()), "B": float(chosen.budget[0]), "g": float(chosen.gate[0]),
            "M": float(chosen.cap[0]),
        })  # fmt: skip
    quality = judge_assigned(trace, Grid.of(policies), part_of.tolist(), cost=cost, scorer=scorer, resamples=resamples,
                             seed=seed)  # fmt: skip
    if quality.exact_share[0] < 1.0:
        raise UsageError(
            "a setting chosen without one part is not exact on it", where=str(trace.path),
            fix="run asdsim cover for the settings of the folds, or use method pareto on covered settings",
        )  # fmt: skip
    return folds, quality


# --- the file -----------------------------------------------------------------------------------------------------


def _number(value: float) -> float | str:
    return "inf" if math.isinf(value) else float(value)


def policy_record(made: Calibration, trace: Trace, holdout: Trace | None, cost: CostModel | None) -> dict[str, Any]:
    """Return the content of ``policy.json``: the setting, what it belongs to, and how it was found and judged."""
    grid = made.grid

    def side(source: Trace | None, quality: Quality | None) -> dict[str, Any] | None:
        if quality is None:
            return None
        where = {} if source is None else {"trace": str(source.path), "checksum": source.manifest.checksum}
        return {**where, "figures": quality.row(0)}

    return {
        "schema_version": POLICY_VERSION, "kind": "asdsim policy", "asdsim": __version__, "rule": "asd",
        "B": _number(grid.budget[0]), "g": _number(grid.gate[0]), "M": _number(grid.cap[0]),
        "semantics": grid.semantics, "regret": grid.layout.regret, "value": grid.layout.value, "ledger": grid.ledger,
        **identity(trace),
        "method": made.method, "limits": {**made.limits.given(), "bound": made.limits.bound},
        "candidates": made.candidates, "ratios": made.ratios or None,
        "cost": None if cost is None else cost.to_dict(), "resamples": made.calibration.resamples,
        "seed": made.calibration.seed, "calibration": side(trace, made.calibration),
        "holdout": side(holdout, made.holdout),
        "folds": [{**fold, **{name: _number(fold[name]) for name in "BgM"}} for fold in made.folds] or None,
        "optimism": made.optimism(),
    }  # fmt: skip


def write_policy(record: dict[str, Any], path: Path) -> None:
    """Write ``policy.json``, whole or not at all.

    Raises
    ------
    UsageError
        If it cannot be written.
    """
    text = json.dumps(record, indent=1, allow_nan=False, default=float) + "\n"
    rest = path.with_name(path.name + ".tmp")
    try:
        rest.write_text(text, encoding="utf-8")
        rest.replace(path)
    except OSError as error:
        rest.unlink(missing_ok=True)
        raise UsageError(f"cannot write: {error.strerror or error}", where=str(path)) from None


def read_policy(path: Path) -> tuple[Grid, dict[str, Any]]:
    """Read ``policy.json``.

    Returns
    -------
    Grid
        The one setting.
    dict
        Everything that the file says.

    Raises
    ------
    UsageError
        If it is no such file, or what it says cannot be meant.
    """
    fix = "give a file that asdsim calibrate wrote"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=str(path), fix=fix) from None
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid JSON: {error}", where=str(path), fix=fix) from None
    if not isinstance(record, dict) or record.get("kind") != "asdsim policy":
        raise UsageError("not a policy file", where=str(path), fix=fix)
    if record.get("schema_version") != POLICY_VERSION:
        raise UsageError(
            f"schema version {record.get('schema_version')!r} is not {POLICY_VERSION}", where=str(path), fix=fix
        )
    missing = [name for name in ("B", "g", "M", "semantics", "target", "drafter") if name not in record]
    if missing:
        raise UsageError(f"no {', '.join(missing)}", where=str(path), fix=fix)
    try:
        values = [float(record[name]) for name in ("B", "g", "M")]
    except (TypeError, ValueError):
        raise UsageError("B, g or M is not a number", where=str(path), fix=fix) from None
    if record["semantics"] not in SEMANTICS:
        raise UsageError(str(unknown_name("semantics", str(record["semantics"]), list(SEMANTICS))), where=str(path))
    B, g, M = ([value] for value in values)
    grid = Grid.product(
        B, g, M, record["semantics"], regret=record.get("regret", "logit"), value=record.get("value", ""),
        ledger=record.get("ledger", "request"),
    )  # fmt: skip
    return grid, record
