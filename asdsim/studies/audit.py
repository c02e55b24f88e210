"""Judge a frozen setting on outputs that may end by themselves: accuracy, length, divergence and ledger against strict.

An output that meets the token limit first is cut there; reports count both kinds.

Every distinct output is scored once, so a whole grid of settings costs no more scoring than its distinct outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .. import stats
from ..errors import UsageError
from ..evaluate.cost import Cost
from ..evaluate.quality import Evaluator, Quality
from ..evaluate.scorers import make_scorer
from ..rules.settings import Grid
from .frozen import check_same_models, how_to_cover, identity

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
    """

    quality: Quality
    by_task: dict[str, Quality]
    outputs: int
    scored: int

    def front(self) -> pl.DataFrame:
        """Return the settings that no other one beats: faster, for no less accuracy; sorted by accuracy, falling.

        Speed is the predicted speed-up, or the acceptance length without a cost model.
        """
        import polars as pl

        frame = self.quality.frame().filter(pl.col("exact"))
        speed = "speed_up" if "speed_up" in frame.columns else "mean_acceptance_length"
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
    cost, resamples, seed
        See :class:`asdsim.evaluate.quality.Evaluator`.

    Raises
    ------
    UsageError
        If the trace is of fixed length or other models, or no setting is exact on it.
    """
    if trace.manifest.stop != "natural":
        raise UsageError(
            "the trace was captured with a fixed length; quality is judged at natural end", where=str(trace.path),
            fix="capture with --stop natural",
        )  # fmt: skip
    if policy is not None:
        check_same_models(dict(policy), identity(trace), str(trace.path))
    records = trace.request_records()
    scorer = make_scorer(records, decode, chosen=chosen, allow_code=allow_code, timeout=timeout, memory=memory)
    evaluator = Evaluator(trace, cost=cost, scorer=scorer, resamples=resamples, seed=seed)
    quality = evaluator.evaluate(grid)
    if not quality.exact.any():
        raise UsageError(
            "no setting is exact on this trace, so its outputs are not known", where=str(trace.path),
            fix=f"run {how_to_cover(trace.path, grid)}",
        )  # fmt: skip
    tasks = list(dict.fromkeys(record.task for record in records))
    by_task = {}
    if len(tasks) > 1:
        for task in tasks:
            rows = [n for n, record in enumerate(records) if record.task == task]
            by_task[task] = evaluator.evaluate(grid, requests=rows)
    verdicts = [request for (request, _), verdict in evaluator.scores.items() if verdict is not None]
    return Audit(quality, by_task, len(verdicts), len(set(verdicts)))
