"""Judge a frozen setting on outputs that may end naturally: accuracy, length, divergence and ledger against strict.

An output that meets the token limit first is cut there; reports count both kinds.

Every distinct output is scored once, so a whole grid of settings costs no more scoring than its distinct outputs. A
sequential audit scores no more requests than it takes to decide whether accuracy falls by more than a margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .. import stats
from ..errors import UsageError
from ..evaluate.cost import Cost
from ..evaluate.quality import Evaluator, Quality, strict_beside
from ..evaluate.scorers import TaskScorer, make_scorer, readings
from ..rules.settings import Grid
from ..stats import Margin, MarginBets, check_margin, within_margin
from .frozen import check_same_models, how_to_cover, identity, setting_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import polars as pl

    from ..trace.reader import Trace


@dataclass
class Audit:
    """What an audit found.

    Attributes
    ----------
    quality : Quality
        One row per setting.
    by_task : dict of str to Quality
        The same for the requests of each task, where there are several.
    outputs : int
        Distinct outputs scored.
    scored : int
        Requests that have a score.
    margins : list of Margin or None
        Per setting, where a margin was given; "not shown" where the setting is not exact.
    readings : dict of str to (float, float, int)
        Of one setting: share under strict, share under the setting, and verdicts counted, by other ways to score.
    """

    quality: Quality
    by_task: dict[str, Quality]
    outputs: int
    scored: int
    margins: list[Margin] | None = None
    readings: dict[str, tuple[float, float, int]] = field(default_factory=dict)

    def front(self) -> pl.DataFrame:
        """Return the settings that no other one beats: faster, for no less accuracy; sorted by accuracy, falling.

        Speed is the predicted speed-up per answer, or the acceptance length without a cost model.
        """
        import polars as pl

        frame = self.quality.frame().filter(pl.col("exact"))
        speed = "answer_speed_up" if "answer_speed_up" in frame.columns else "mean_acceptance_length"
        frame = frame.sort(["accuracy", speed, "B", "g", "M"], descending=[True, True, False, False, False])
        return frame.filter(pl.col(speed) > pl.col(speed).cum_max().shift(1).fill_null(-np.inf))


def audit(
    trace: Trace,
    grid: Grid,
    decode: Callable[[list[int]], str],
    *,
    policy: Mapping[str, Any] | None = None,
    chosen: Mapping[str, str] | None = None,
    allow_code: bool = False,
    timeout: float = 5.0,
    memory: int = 1 << 30,
    margin: float | None = None,
    alpha: float = 1 - stats.LEVEL,
    until_decided: bool = False,
    cost: Cost | None = None,
    resamples: int = stats.RESAMPLES,
    seed: int = 0,
) -> Audit:
    """Score and judge settings on a trace.

    Parameters
    ----------
    trace : Trace
        Captured with ``--stop natural``.
    grid : Grid
        Settings that the trace covers.
    decode : callable
        Turns token ids into text.
    policy : mapping, optional
        Content of a policy file: its models must be the trace's.
    chosen, allow_code, timeout, memory
        See :func:`asdsim.evaluate.scorers.make_scorer`.
    margin, alpha : float
        Largest fall of accuracy, and the chance of a wrong verdict on it, as shares.
    until_decided : bool
        Score requests in random order (by the seed) until the margin is decided, and report no accuracy; for one
        setting.
    cost, resamples, seed
        See :class:`asdsim.evaluate.quality.Evaluator`.

    Raises
    ------
    UsageError
        If the trace is of fixed length or other models, no setting is exact on it, or there is no one setting or no
        margin to decide.
    """
    if margin is not None:
        check_margin(margin, alpha)
    if until_decided and (margin is None or len(grid) != 1):
        raise UsageError("a sequential audit decides a margin for one setting", fix="give --policy and --margin POINTS")
    if trace.manifest.stop != "natural":
        raise UsageError(
            "the trace was captured with a fixed length; quality is judged at natural end", where=str(trace.path),
            fix="capture with --stop natural",
        )  # fmt: skip
    if policy is not None:
        check_same_models(dict(policy), identity(trace), str(trace.path))
    records = trace.request_records()
    scorer = make_scorer(records, decode, chosen=chosen, allow_code=allow_code, timeout=timeout, memory=memory)
    evaluator = Evaluator(
        trace, cost=cost, scorer=None if until_decided else scorer, resamples=resamples, seed=seed
    )  # fmt: skip
    quality = evaluator.evaluate(grid)
    if not quality.exact.any():
        raise UsageError(
            "no setting is exact on this trace, so its outputs are not known", where=str(trace.path),
            fix=f"run {how_to_cover(trace.path, grid)}",
        )  # fmt: skip
    tasks = list(dict.fromkeys(record.task for record in records))
    rows = {task: [n for n, record in enumerate(records) if record.task == task] for task in tasks}
    by_task = {task: evaluator.evaluate(grid, requests=rows[task]) for task in tasks if len(tasks) > 1}
    if until_decided and margin is not None:
        return _decide(quality, by_task, scorer, outputs_beside_strict(evaluator, grid), margin, alpha, seed)
    verdicts = [request for (request, _), verdict in evaluator.scores.items() if verdict is not None]
    audited = Audit(quality, by_task, len(verdicts), len(set(verdicts)))
    if margin is not None:
        audited.margins = _margins(quality, margin, alpha)
    if len(grid) == 1 and quality.exact[0]:
        audited.readings = _readings(scorer, outputs_beside_strict(evaluator, grid))
    return audited


def _margins(quality: Quality, margin: float, alpha: float) -> list[Margin] | None:
    """Return a verdict per setting, "not shown" where it is not exact; None without scores."""
    if quality.changed is None or quality.scored is None:
        return None
    counts = zip(quality.changed.tolist(), quality.scored[:, 0].tolist(), quality.exact, strict=True)
    return [
        within_margin(gained, lost, total, margin, alpha) if exact else Margin("not shown", 1.0, 1.0, 0)
        for (gained, lost), total, exact in counts
    ]


def outputs_beside_strict(evaluator: Evaluator, grid: Grid) -> list[tuple[bytes, bytes]]:
    """Return each request's output under strict and under the one setting of a grid.

    Raises
    ------
    UsageError
        If either is not exact.
    """
    pair = []
    for setting in (strict_beside(grid), grid):
        table, walks = evaluator.edges(setting.layout), evaluator.walk(setting)
        if not walks.exact[0].all():
            raise UsageError(
                f"{setting_name(setting)} is not exact on this trace, so its outputs are not known",
                where=str(evaluator.trace.path), fix=f"run {how_to_cover(evaluator.trace.path, setting)}",
            )  # fmt: skip
        pair.append([table.output(int(edge)) for edge in walks.edge[0]])
    return list(zip(*pair, strict=True))


def _decide(
    quality: Quality, by_task: dict[str, Quality], scorer: TaskScorer, outputs: list[tuple[bytes, bytes]],
    margin: float, alpha: float, seed: int,
) -> Audit:  # fmt: skip
    """Score requests in random order until a sequential test decides the margin."""
    bets, scored = MarginBets(margin, alpha), 0
    verdict = Margin("not shown", 1.0, 1.0, 0)
    for request in np.random.default_rng(seed).permutation(len(outputs)):
        before, after = outputs[request]
        right = scorer(int(request), before)
        if right is None:
            continue
        now = right if after == before else scorer(int(request), after)
        scored += 1 + (after != before)
        verdict = bets.add(int(bool(now)) - int(right))
        if verdict.verdict != "not shown":
            break
    return Audit(quality, by_task, scored, bets.requests, [verdict])


def _readings(scorer: TaskScorer, outputs: list[tuple[bytes, bytes]]) -> dict[str, tuple[float, float, int]]:
    """Return shares under strict and under the setting by every other way to score."""
    lists: dict[str, tuple[list[bool], list[bool]]] = {}
    for record, name, pair in zip(scorer.records, scorer.names, outputs, strict=True):
        if name is None or record.reference is None:
            continue
        for side, tokens in enumerate(pair):
            text = scorer.decode(np.frombuffer(tokens, "<i4").tolist())
            for reading, verdicts in readings(name, record.request_id, text, record.reference).items():
                lists.setdefault(f"{record.task}, {reading}", ([], []))[side].extend(verdicts)
    shares = {
        reading: (float(np.mean(before)), float(np.mean(after)), len(after))
        for reading, (before, after) in lists.items()
    }
    subjects = [reading for reading in shares if reading.partition(", ")[2].startswith("subject ")]
    if subjects:
        macro = np.mean([shares[reading][:2] for reading in subjects], axis=0)
        shares["mmlu, macro average over subjects"] = (float(macro[0]), float(macro[1]), len(subjects))
    return shares
