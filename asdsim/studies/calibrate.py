"""Choose a setting of a rule on one set of requests, freeze it, and judge it on another.

Choosing the best of many settings on a set makes that setting look better there than it is: the holdout says by how
much (the optimism). A holdout that shares prompts with the calibration set cannot show that, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..errors import UsageError
from ..evaluate.quality import Evaluator, Quality, strict_beside
from ..files import plain
from ..rules.frozen import KIND, POLICY_VERSION
from ..rules.settings import Grid, layout_of
from ..trace.graph import Graphs
from .frozen import check_same_models, how_to_cover, identity, setting_name, setting_record

if TYPE_CHECKING:
    from ..evaluate.cost import Cost
    from ..trace.groups import StreamedTrace
    from ..trace.stored import Source, Trace

METHODS = ("pareto", "quantile")
HEADLINE = (
    "speed_up_plain", "speed_up", "mean_acceptance_length", "acceptance_length_gain", "regret_per_token",
    "outputs_differ_share", "length_change", "answer_speed_up", "tokens_per_answer", "seconds_per_answer",
    "ended_share", "accuracy", "accuracy_change",
)  # fmt: skip
"""Figures that a report of a calibration shows."""


FIGURE_OF = {
    "divergence": "outputs_differ_share", "accuracy_drop": "accuracy_change", "length_growth": "length_change",
    "min_accuracy": "accuracy",
}  # fmt: skip
"""Figure that a limit of another name bounds."""
RANKS = {"token": "speed_up", "answer": "answer_speed_up"}
"""What the fastest setting is fastest by: predicted time per token, or per answer."""


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
    length_growth : float, optional
        Relative growth of generated tokens; shorter outputs keep it.
    min_accuracy : float, optional
        Least accuracy, as a share.
    bound : bool
        Hold the limits with the far end of each 95 % interval instead of the value. A setting without an interval,
        such as an estimated one, then keeps no limit.
    """

    regret_per_token: float | None = None
    divergence: float | None = None
    length_change: float | None = None
    accuracy_drop: float | None = None
    length_growth: float | None = None
    min_accuracy: float | None = None
    bound: bool = False

    def given(self) -> dict[str, float]:
        """Return the limits that are set."""
        names = ("regret_per_token", "divergence", "length_change", "accuracy_drop", "length_growth", "min_accuracy")
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
            figure = FIGURE_OF.get(name, name)
            if figure not in quality.figures:
                raise UsageError(
                    f"a limit on {name} needs {figure}, which these data do not give",
                    fix="give scores (a task with answers) and exact settings, or leave the limit out",
                )
            interval = quality.figures[figure]
            if name == "accuracy_drop":
                if quality.scored is not None:
                    known = quality.scored[:, 1] > 0
                    if not known.any():
                        raise UsageError(
                            f"a limit on {name} limits nothing here: {quality.about_scores()}",
                            fix="score answers that strict matching can get right (longer outputs, another --scorer, "
                            "other prompts), or leave the limit out",
                        )  # fmt: skip
                    fine &= known
                cost = -(interval.low if self.bound else interval.value)
            elif name == "min_accuracy":
                cost, most = -(interval.low if self.bound else interval.value), -most
            elif name == "length_change":
                ends = np.maximum(np.abs(interval.low), np.abs(interval.high))
                cost = ends if self.bound else np.abs(interval.value)
            else:
                cost = interval.high if self.bound else interval.value
            with np.errstate(invalid="ignore"):
                fine &= cost <= most + 1e-12
        return fine


def fastest(tables: Sequence[Quality], limits: Limits, rank: str = "token") -> tuple[int, int]:
    """Return the fastest setting within limits: by predicted speed-up, or by acceptance length without a cost model.

    Of equally fast ones the one with the least regret per token is taken, then the smallest B, g and M (limit of
    another rule), so that the choice does not depend on the order of the candidates.

    Parameters
    ----------
    tables : sequence of Quality
        All candidates; those of one grid in one table.
    limits : Limits
    rank : {"token", "answer"}
        Whether the speed-up is that per token or per answer.

    Returns
    -------
    table, row : int

    Raises
    ------
    UsageError
        If no setting keeps the limits.
    """
    rows: list[tuple[int, int]] = []
    keys: list[npt.NDArray[np.float64]] = []
    for n, table in enumerate(tables):
        name = RANKS[rank]
        if rank == "answer" and name not in table.figures:
            raise UsageError("ranking by time per answer needs step times", fix="give a cost model with --cost")
        speed = table.figures[name if name in table.figures else "mean_acceptance_length"].value
        kept = np.flatnonzero(limits.hold(table) & ~np.isnan(speed))
        grid, regret = table.grid, table.figures["regret_per_token"].value
        keys += list(np.stack([speed, regret, grid.budget, grid.gate, grid.cap], axis=1)[kept])
        rows += [(n, int(row)) for row in kept]
    if not rows:
        named = ", ".join(
            f"accuracy >= {most:g}" if name == "min_accuracy" else f"{name} <= {most:g}"
            for name, most in limits.given().items()
        )
        total = sum(map(len, tables))
        raise UsageError(f"none of {total} settings meets {named}", fix="loosen a limit, or add B = 0 (strict)")
    # Sums in another order may differ in their last bits: speeds equal to 12 digits are equal.
    top = max(float(key[0]) for key in keys) * (1 - 1e-12)
    equal = [n for n, key in enumerate(keys) if key[0] >= top]
    return rows[min(equal, key=lambda n: tuple(keys[n][1:]))]


def rejection_ratios(graph: Graphs, requests: Sequence[int] | None = None) -> npt.NDArray[np.float64]:
    """Return the positive r/q at the first rejection of every block of the captured path.

    Parameters
    ----------
    graph : Graphs
        Of a strict capture; its layout says which suffix value q is.
    requests : sequence of int, optional
        Rows of the requests to use.
    """
    wanted = np.ones(graph.num_requests, bool) if requests is None else np.zeros(graph.num_requests, bool)
    if requests is not None:
        wanted[list(requests)] = True
    ratios: list[float] = []
    for rows, part in graph.parts():
        for r in np.flatnonzero(wanted[rows]):
            for step in part.path_step[part.path_ptr[r] : part.path_ptr[r + 1]]:
                first = int(part.mm_ptr[step])
                if first < part.mm_ptr[step + 1] and 0 < part.mm_score[first] < math.inf:
                    ratios.append(float(part.mm_score[first]))
    return np.array(ratios)


@dataclass(frozen=True)
class Quantile:
    """The paper's way to freeze a setting: B = g = a quantile of the first-rejection ratios, with a given M.

    Attributes
    ----------
    q : float
        Linear quantile, at h = (n - 1) q between sorted values.
    cap : float
        M.
    semantics : str
        Reading of the rule; its layout says which suffix value the ratios are taken over.
    """

    q: float = 0.25
    cap: float = 1.0
    semantics: str = "paper"

    def setting(self, graph: Graphs, requests: Sequence[int] | None = None) -> Grid:
        """Return the setting for some requests of a strict capture, all by default.

        Raises
        ------
        UsageError
            If no block of the captured path was rejected.
        """
        ratios = rejection_ratios(graph, requests)
        if not len(ratios):
            raise UsageError(
                "no block of the captured path was rejected with regret > 0, so there are no ratios for a quantile"
            )
        value = float(np.quantile(ratios, self.q, method="linear"))
        return Grid.product(value, value, self.cap, self.semantics)


def check_disjoint(calibration: Trace | StreamedTrace, holdout: Trace | StreamedTrace) -> None:
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
            f"{len(shared)} of its {holdout.num_requests} prompts are in the calibration set too, the first is "
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
    tables : list of Quality
        With ``pareto``: all candidates, those of one grid in one table.
    left_out : int
        Settings that are exact on the calibration set but not on the holdout, and so could not be judged there.
    rank : {"token", "answer"}
        What the setting is fastest by.
    """

    grid: Grid
    method: str
    limits: Limits
    candidates: int
    calibration: Quality
    holdout: Quality | None = None
    folds: list[dict[str, Any]] = field(default_factory=list)
    ratios: int = 0
    tables: list[Quality] = field(default_factory=list)
    left_out: int = 0
    rank: str = "token"

    def optimism(self) -> dict[str, float]:
        """Return calibration minus holdout for each headline figure that both have."""
        if self.holdout is None:
            return {}
        gaps = {}
        for name in HEADLINE:
            if name in self.calibration.figures and name in self.holdout.figures:
                gap = self.calibration.figures[name].value[0] - self.holdout.figures[name].value[0]
                if not np.isnan(gap):
                    gaps[name] = float(gap)
        return gaps


def calibrate(
    evaluator: Evaluator,
    candidates: Grid | Sequence[Grid] | Quantile,
    *,
    holdout: Evaluator | None = None,
    limits: Limits | None = None,
    rank: str | None = None,
    split: int = 0,
    estimated: str = "",
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Choose a setting on a trace and judge it on another one, or on parts held out in turn.

    Parameters
    ----------
    evaluator : Evaluator
        Of the calibration set.
    candidates : Grid, sequence of Grid, or Quantile
        Settings of one rule to choose the fastest of; those that are not exact are left out unless ``estimated`` is
        given. Or how to derive the one setting.
    holdout : Evaluator, optional
        Of other prompts, same models.
    limits : Limits, optional
        That the fastest setting must keep.
    rank : {"token", "answer"}, optional
        See :func:`fastest`; by default per answer, or per token where there are no step times.
    split : int
        Number of parts: each is judged under the setting chosen on the others, and the frozen setting is chosen on all.
    estimated : str
        An ``off_trace`` mode: allow settings that are not exact, with figures estimated so.
    progress : callable, optional
        Called with the number of settings done.

    Raises
    ------
    UsageError
        If nothing can be chosen, or judged honestly: why.
    """
    limits = limits or Limits()
    if holdout is not None:
        if split:
            raise UsageError("--holdout and --split exclude each other", fix="give one of them")
        check_same_models(identity(evaluator.trace), identity(holdout.trace), str(holdout.trace.path))
        check_disjoint(evaluator.trace, holdout.trace)
    off_trace = estimated or "stop"
    if isinstance(candidates, Quantile):
        calibration = _by_quantile(evaluator, candidates, limits, off_trace)
    else:
        grids = [candidates] if isinstance(candidates, Grid) else list(candidates)
        tables, left_out = _candidates(evaluator, grids, off_trace, holdout, progress)
        if rank is None:
            rank = "answer" if all(RANKS["answer"] in table.figures for table in tables) else "token"
        n, row = fastest(tables, limits, rank)
        best = tables[n].take([row])
        calibration = Calibration(
            best.grid, "pareto", limits, sum(map(len, tables)), best, tables=tables, left_out=left_out, rank=rank
        )
    if split:
        way = candidates if isinstance(candidates, Quantile) else None
        calibration.folds, calibration.holdout = _held_out_in_turn(evaluator, calibration, way, split)
    if holdout is not None:
        calibration.holdout = holdout.evaluate(calibration.grid, off_trace=off_trace)
        _need_exact(calibration.holdout, holdout.trace, off_trace)
    return calibration


def _by_quantile(evaluator: Evaluator, way: Quantile, limits: Limits, off_trace: str) -> Calibration:
    graph = evaluator.graph(layout_of(way.semantics))
    setting = way.setting(graph)
    quality = evaluator.evaluate(setting, off_trace=off_trace)
    _need_exact(quality, evaluator.trace, off_trace)
    return Calibration(setting, "quantile", limits, 1, quality, ratios=len(rejection_ratios(graph)))


def _candidates(
    evaluator: Evaluator, grids: Sequence[Grid], off_trace: str, holdout: Evaluator | None,
    progress: Callable[[int], None] | None,
) -> tuple[list[Quality], int]:  # fmt: skip
    """Return the tables to choose from, and how many settings are left out as not exact on the holdout."""
    tables = [evaluator.evaluate(grid, off_trace=off_trace, progress=progress) for grid in grids]
    total, left_out = sum(map(len, tables)), 0
    if off_trace == "stop":
        tables = [table.take(np.flatnonzero(table.exact)) for table in tables]
        if not sum(map(len, tables)):
            raise UsageError(
                f"none of {total} settings is exact{_strict_missing(evaluator, grids[0])}",
                where=str(evaluator.trace.path),
                fix="run asdsim cover for the grid, or allow estimates with --estimate",
            )
        if holdout is not None:
            there = [_exact_on(holdout, table.grid) for table in tables]
            # Where none is exact there, the setting chosen is named, so that it can be covered.
            if any(rows.any() for rows in there):
                left_out = sum(int((~rows).sum()) for rows in there)
                tables = [table.take(np.flatnonzero(rows)) for table, rows in zip(tables, there, strict=True)]
    return [table for table in tables if len(table)], left_out


def _strict_missing(evaluator: Evaluator, grid: Grid) -> str:
    """Say so where strict matching, the baseline of every figure, is not captured."""
    missing = int((~evaluator.exact(strict_beside(grid))[0]).sum())
    return f": the strict walk of {missing} requests is not captured" if missing else ""


def _exact_on(evaluator: Evaluator, grid: Grid) -> npt.NDArray[np.bool_]:
    """Return, per setting, whether its walks and the strict ones are exact for every request."""
    strict = evaluator.exact(strict_beside(grid))
    return np.asarray((evaluator.exact(grid) & strict).all(axis=1)) if len(grid) else np.zeros(0, bool)


def _need_exact(quality: Quality, trace: Source, off_trace: str) -> None:
    if off_trace == "stop" and not quality.exact[0]:
        share = min(quality.exact_share[0], quality.requests[0] / max(1, trace.num_requests))
        raise UsageError(
            f"{setting_name(quality.grid)} is exact for {100 * share:.0f} % of its requests",
            where=str(trace.path),
            fix=f"run {how_to_cover(trace.path, quality.grid)}, or allow estimates with --estimate",
        )


def _held_out_in_turn(
    evaluator: Evaluator, calibration: Calibration, way: Quantile | None, split: int
) -> tuple[list[dict[str, Any]], Quality]:
    """Choose without each part and judge on it, over all parts; parts are drawn by request, by the seed."""
    trace = evaluator.trace
    number = trace.num_requests
    if not 2 <= split <= number:
        raise UsageError(f"--split {split} cannot split {number} requests", fix=f"give 2 to {number}")
    part_of = np.random.default_rng(evaluator.seed).permutation(number) % split
    settings, folds = [], []
    for part in range(split):
        others = np.flatnonzero(part_of != part).tolist()
        if way is not None:
            setting = way.setting(evaluator.graph(calibration.grid.layout), others)
        else:
            # Values decide, unless limits hold with intervals: then these are drawn on the others as well.
            draws = None if calibration.limits.bound else 2
            tables = [
                evaluator.evaluate(table.grid, requests=others, resamples=draws) for table in calibration.tables
            ]  # fmt: skip
            n, row = fastest(tables, calibration.limits, calibration.rank)
            setting = tables[n].grid[[row]]
        settings.append(setting)
        named = {key: value for key, value in setting_record(setting).items() if key in ("B", "g", "M", "parameters")}
        folds.append({"held_out": int((part_of == part).sum()), **named})
    quality = evaluator.evaluate_assigned(settings, part_of.tolist())
    if not quality.exact[0]:
        raise UsageError(
            "a setting chosen without one part is not exact on it", where=str(trace.path),
            fix="run asdsim cover for the settings of the folds, or use method pareto on covered settings",
        )  # fmt: skip
    return folds, quality


def policy_record(calibration: Calibration, trace: Source, holdout: Source | None, cost: Cost | None) -> dict[str, Any]:
    """Return the content of ``policy.json``: the setting, what it belongs to, and how it was found and judged."""

    def side(source: Source | None, quality: Quality | None) -> dict[str, Any] | None:
        if quality is None:
            return None
        where = {} if source is None else {"trace": str(source.path), "checksum": source.manifest.checksum}
        return {**where, "figures": quality.row(0)}

    return plain({
        "schema_version": POLICY_VERSION, "kind": KIND, "asdsim": __version__,
        **setting_record(calibration.grid), **identity(trace),
        "method": calibration.method, "rank": calibration.rank,
        "limits": {**calibration.limits.given(), "bound": calibration.limits.bound},
        "candidates": calibration.candidates, "ratios": calibration.ratios or None,
        "cost": None if cost is None else cost.to_dict(), "resamples": calibration.calibration.resamples,
        "seed": calibration.calibration.seed, "calibration": side(trace, calibration.calibration),
        "holdout": side(holdout, calibration.holdout), "folds": calibration.folds or None,
        "optimism": calibration.optimism(),
    })  # fmt: skip
