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
from ..evaluate.cost import CostModel
from ..evaluate.quality import Quality, Scorer, judge
from ..evaluate.scorers import make_scorer
from ..rules.settings import Grid
from .calibrate import check_same_models, identity

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

        frame = self.quality.frame().filter(pl.col("exact_share") == 1.0)
        speed = "speed_up" if "speed_up" in frame.columns else "mean_acceptance_length"
        frame = frame.sort(["accuracy", speed, "B", "g", "M"], descending=[True, True, False, False, False])
        return frame.filter(pl.col(speed) > pl.col(speed).cum_max().shift(1).fill_null(-np.inf))


class CountingScorer:
    """A scorer that scores each (request, output) once and counts them."""

    def __init__(self, score: Scorer) -> None:
        self.score, self.title = score, getattr(score, "title", "")
        self.known: dict[tuple[int, bytes], bool | None] = {}

    def __call__(self, request: int, tokens: bytes) -> bool | None:
        """Return the verdict on an output."""
        key = request, tokens
        if key not in self.known:
            self.known[key] = self.score(request, tokens)
        return self.known[key]

    @property
    def outputs(self) -> int:
        """Distinct outputs that have a verdict."""
        return sum(verdict is not None for verdict in self.known.values())


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
    cost: CostModel | None = None,
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
        See :func:`asdsim.evaluate.quality.judge`.

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
    scorer = CountingScorer(
        make_scorer(records, decode, chosen=chosen, allow_code=allow_code, timeout=timeout, memory=memory)
    )
    quality = judge(trace, grid, cost=cost, scorer=scorer, resamples=resamples, seed=seed)
    if not (quality.exact_share == 1.0).any():
        B, g, M = (",".join(f"{value!r}" for value in dict.fromkeys(axis.tolist()))
                   for axis in (grid.budget, grid.gate, grid.cap))  # fmt: skip
        raise UsageError(
            "no setting is exact on this trace, so its outputs are not known", where=str(trace.path),
            fix=f"run asdsim cover {trace.path} --B {B} --g {g} --M {M}",
        )  # fmt: skip
    tasks = list(dict.fromkeys(record.task for record in records))
    by_task = {}
    if len(tasks) > 1:
        for task in tasks:
            rows = [n for n, record in enumerate(records) if record.task == task]
            by_task[task] = judge(trace, grid, cost=cost, scorer=scorer, requests=rows, resamples=resamples, seed=seed)
    scored = len({request for (request, _), verdict in scorer.known.items() if verdict is not None})
    return Audit(quality, by_task, scorer.outputs, scored)
