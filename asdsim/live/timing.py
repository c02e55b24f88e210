"""Measured speed: strict, ASD, strict again, live and with fixed work, beside what the cost model predicts.

The paper's protocol: all runs generate the same number of tokens for every request (ends of sequence are ignored), the
baseline is the mean of the strict runs before and after, and the drift between these two says whether the machine stood
still. Under a drift of more than 3 % a comparison means little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import stats
from ..errors import UsageError
from ..evaluate.cost import CostModel
from ..evaluate.quality import Evaluator
from ..rules.settings import STRICT, Grid
from ..stats import Intervals

MAX_DRIFT = 0.03
RUNS = ("strict before", "policy", "strict after")
WARM_TOKENS = 16

Floats = npt.NDArray[np.float64]


@dataclass
class Timing:
    """What was measured and predicted.

    Attributes
    ----------
    requests : int
    tokens : int64 (3, R)
        Generated tokens of each run, in the order of :data:`RUNS`.
    steps, drafted : int64 (3, R)
        Verifications, and draft tokens proposed.
    seconds : float64 (3, R)
        Wall-clock seconds of each request.
    measured : Intervals
        Tokens per second of the policy over the mean of the strict runs, paired by request.
    predicted_live : float
        The same ratio, predicted by the cost model from the steps that the live runs took.
    predicted_plain, predicted_strict_plain : float
        Tokens per second of the policy, and of the first strict run, over those of the target alone: predicted by the
        cost model from the steps that the live runs took.
    predicted_replay : Intervals or None
        Predicted from the replay of the trace (natural end), where the policy is exact on it.
    predicted_rate : float
        Tokens per second of the policy's run, predicted from its steps.
    drift : float
        Tokens per second of the second strict run over the first, minus 1.
    """

    requests: int
    tokens: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    drafted: npt.NDArray[np.int64]
    seconds: Floats
    measured: Intervals
    predicted_live: float
    predicted_rate: float
    predicted_plain: float
    predicted_strict_plain: float
    predicted_replay: Intervals | None
    drift: float
    problems: list[str] = field(default_factory=list)

    @property
    def rates(self) -> Floats:
        """Tokens per second of each run, float64 (3,)."""
        return np.asarray(self.tokens.sum(axis=1) / self.seconds.sum(axis=1))


def time_policy(
    path: Path,
    grid: Grid,
    *,
    limit: int = 8,
    tokens: int | None = None,
    cost: CostModel | None = None,
    max_drift: float = MAX_DRIFT,
    interleave: bool = False,
    policy: dict[str, Any] | None = None,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    models: tuple[Any, Any] | None = None,
    resamples: int = stats.RESAMPLES,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Timing:
    """Decode the first requests of a trace strictly, under a setting, and strictly again.

    Parameters
    ----------
    path : Path
        Trace directory; its models are loaded.
    grid : Grid
        One setting.
    limit : int
        Requests.
    tokens : int, optional
        Tokens to generate for each; by default the trace's limit.
    cost : CostModel, optional
        By default fitted from the trace.
    max_drift : float
        Largest drift that is no problem.
    interleave : bool
        Run the three request by request instead of one after the other: what else the machine does then weighs on all
        three alike.
    policy : dict, optional
        Content of a policy file: its models must be the trace's.
    target, drafter, offline
        See :func:`asdsim.capture.reload.load_pair`.
    models : (Target, Drafter), optional
        At hand already.
    resamples, seed
        Of the bootstrap.
    progress : callable, optional
        Called with 1 after each request of each run.

    Raises
    ------
    UsageError
        If there is nothing to time.
    """
    from ..evaluate.cost import fit_trace
    from ..result import load
    from ..studies.frozen import check_same_models, identity

    trace = load(path)
    if policy is not None:
        check_same_models(policy, identity(trace), str(path))
    if limit < 1:
        raise UsageError(f"--limit {limit} leaves no request")
    if tokens is not None and tokens < 1:
        raise UsageError(f"--tokens {tokens} leaves nothing to generate")
    model = cost or fit_trace(trace)
    records = [
        replace(record, stop="fixed", max_new_tokens=tokens or record.max_new_tokens)
        for record in trace.request_records()[:limit]
    ]
    records = [record for record in records if record.max_new_tokens > 0]
    if not records:
        raise UsageError("the trace has no request to time", where=str(path))
    from ..capture.loop import decode
    from ..capture.reload import load_pair

    at_hand = models or load_pair(trace.manifest, target=target, drafter=drafter, offline=offline)
    width = trace.manifest.num_draft_tokens
    chosen = grid.policy(0)
    # First calls allocate and compile: they are no part of any run.
    decode(*at_hand, replace(records[0], max_new_tokens=min(WARM_TOKENS, records[0].max_new_tokens)), chosen, width)
    shape = len(RUNS), len(records)
    made, steps, drafted = (np.zeros(shape, np.int64) for _ in range(3))
    seconds = np.zeros(shape)
    settings = (STRICT, chosen, STRICT)
    order = [(run, r) for run in range(len(RUNS)) for r in range(len(records))]
    if interleave:
        order.sort(key=lambda pair: (pair[1], pair[0]))
    for run, r in order:
        start = perf_counter()
        done = decode(*at_hand, records[r], settings[run], width)
        seconds[run, r] = perf_counter() - start
        made[run, r], steps[run, r] = len(done.tokens), len(done.outcomes)
        drafted[run, r] = sum(outcome.num_draft_tokens for outcome in done.outcomes)
        if progress:
            progress(1)
    prompt = np.array([len(record.prompt_ids) for record in records], np.float64)
    foreseen = model.seconds(steps, drafted, made, prompt)
    plain = model.plain_seconds(made, prompt)
    rates = made.sum(axis=1) / seconds.sum(axis=1)
    rows = trace.request_records()
    evaluator = Evaluator(trace, cost=model, resamples=resamples, seed=seed)
    replayed = evaluator.evaluate(grid, figures=["speed_up"], requests=range(min(limit, len(rows))))
    found = Timing(
        len(records), made, steps, drafted, seconds, _measured(made, seconds, resamples, seed),
        predicted_live=float(_gain(made.sum(axis=1) / foreseen.sum(axis=1))),
        predicted_rate=float(made[1].sum() / foreseen[1].sum()),
        predicted_plain=float(plain[1].sum() / foreseen[1].sum()),
        predicted_strict_plain=float(plain[0].sum() / foreseen[0].sum()),
        predicted_replay=replayed.figures["speed_up"] if replayed.exact[0] else None,
        drift=float(rates[2] / rates[0] - 1.0),
    )  # fmt: skip
    if (made != made[0]).any():
        found.problems.append("the runs did not generate equally many tokens: the work was not fixed")
    if abs(found.drift) > max_drift:
        found.problems.append(
            f"the strict runs drifted by {100 * found.drift:+.1f} %, more than {100 * max_drift:g} %: the machine was "
            "not still, and the measured speed-up means little"
        )
    return found


def _gain(rates: Floats) -> float:
    """Return the policy's rate over the mean of the strict ones."""
    return float(rates[1] / (0.5 * (rates[0] + rates[2])))


def _measured(tokens: npt.NDArray[np.int64], seconds: Floats, resamples: int, seed: int) -> Intervals:
    columns = {f"{name}{run}": table[run] for run in range(3) for name, table in (("t", tokens), ("s", seconds))}
    weights = stats.resample_weights(seconds.shape[1], resamples, seed)
    return stats.Resampled(columns, weights).interval(
        lambda s: s["t1"] / s["s1"] / (0.5 * (s["t0"] / s["s0"] + s["t2"] / s["s2"]))
    )
