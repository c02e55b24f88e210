"""Measured speed: the target alone, strict, ASD, strict again, live and to a fixed length, beside what is predicted.

The paper's protocol: all runs generate the same number of tokens for every request (ends of sequence are ignored), the
baseline is the mean of the strict runs before and after, and the drift between these two shows whether the machine was
quiet. With a drift of more than 3 % a comparison means little. The target alone runs first, one token per pass.

:func:`keep` stores what was found in the trace, so that later predictions say how far this one was off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import stats
from ..errors import UsageError
from ..evaluate.cost import Cost
from ..evaluate.quality import Evaluator
from ..rules.settings import STRICT, Grid, Policy
from ..stats import Intervals

if TYPE_CHECKING:
    from ..capture.loop import Course
    from ..capture.reload import Placing
    from ..records import RequestRecord

MAX_DRIFT = 0.03
RUNS = ("target alone", "strict before", "policy", "strict after")
WARM_TOKENS = 16

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass
class Timing:
    """What was measured and predicted.

    Attributes
    ----------
    requests : int
    tokens : int64 (4, R)
        Generated tokens of each run, in the order of :data:`RUNS`.
    steps, drafted : int64 (4, R)
        Verifications, and draft tokens proposed.
    seconds : float64 (4, R)
        Wall-clock seconds of each request.
    measured, measured_plain : Intervals
        Tokens per second of the policy over the mean of the strict runs, and over the target alone, paired by request.
    predicted_live, predicted_plain : float
        The same ratios, predicted by the cost model from the steps that the live runs took.
    predicted_strict_plain : float
        Tokens per second of the first strict run over those of the target alone, predicted alike.
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
    measured_plain: Intervals
    predicted_live: float
    predicted_rate: float
    predicted_plain: float
    predicted_strict_plain: float
    predicted_replay: Intervals | None
    drift: float
    problems: list[str] = field(default_factory=list)

    @property
    def rates(self) -> Floats:
        """Tokens per second of each run, float64 (4,)."""
        return np.asarray(self.tokens.sum(axis=1) / self.seconds.sum(axis=1))

    @property
    def measured_strict_plain(self) -> float:
        """Mean tokens per second of the strict runs over those of the target alone."""
        return float(0.5 * (self.rates[1] + self.rates[3]) / self.rates[0])


def time_policy(
    path: Path,
    grid: Grid,
    *,
    limit: int = 8,
    tokens: int | None = None,
    cost: Cost | None = None,
    max_drift: float = MAX_DRIFT,
    interleave: bool = False,
    policy: dict[str, Any] | None = None,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    placing: Placing | None = None,
    models: tuple[Any, Any] | None = None,
    resamples: int = stats.RESAMPLES,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Timing:
    """Decode the first requests of a trace with the target alone, strictly, under a setting, and strictly again.

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
    cost : Cost, optional
        By default the trace's own.
    max_drift : float
        Largest drift that is acceptable.
    interleave : bool
        Run the four request by request instead of one after the other: what else the machine does then weighs on all
        of them alike.
    policy : dict, optional
        Content of a policy file: its models must be the trace's.
    target, drafter, offline, placing
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
    from ..evaluate.cost_spec import cost_of_trace
    from ..result import load
    from ..studies.frozen import check_same_models, identity

    trace = load(path)
    if policy is not None:
        check_same_models(policy, identity(trace), str(path))
    if limit < 1:
        raise UsageError(f"--limit {limit} leaves no request")
    if tokens is not None and tokens < 1:
        raise UsageError(f"--tokens {tokens} leaves nothing to generate")
    model = cost or cost_of_trace(trace)
    wanted = {
        n: replace(record, stop="fixed", max_new_tokens=tokens or record.max_new_tokens)
        for n, record in enumerate(trace.request_records()[:limit])
        if tokens or record.max_new_tokens > 0
    }
    records = list(wanted.values())
    if not records:
        raise UsageError("the trace has no request to time", where=str(path))
    from ..capture.loop import decode
    from ..capture.reload import live_load, load_pair

    at_hand = models or load_pair(
        trace.manifest, target=target, drafter=drafter, offline=offline, placing=placing,
        load=live_load(trace.manifest, records),
    )  # fmt: skip
    setting, width = grid.policy(0), trace.manifest.num_draft_tokens

    def run(policy: Policy | None, record: RequestRecord) -> tuple[int, int, int, float]:
        start = perf_counter()
        done = _alone(at_hand[0], record) if policy is None else decode(*at_hand, record, policy, width)
        seconds = perf_counter() - start
        return len(done.tokens), len(done.outcomes), sum(one.num_draft_tokens for one in done.outcomes), seconds

    # First calls allocate and compile: they belong to no run.
    run(setting, replace(records[0], max_new_tokens=min(WARM_TOKENS, records[0].max_new_tokens)))
    table = np.zeros((4, len(RUNS), len(records)))
    order = [(n, r) for n in range(len(RUNS)) for r in range(len(records))]
    if interleave:
        order.sort(key=lambda pair: (pair[1], pair[0]))
    for n, r in order:
        table[:, n, r] = run((None, STRICT, setting, STRICT)[n], records[r])
        if progress:
            progress(1)
    tokens_made, steps, drafted = table[:3].astype(np.int64)
    evaluator = Evaluator(trace, cost=model, resamples=resamples, seed=seed)
    return _timing(evaluator, grid, list(wanted), (tokens_made, steps, drafted, table[3]), max_drift)


def _alone(target: Any, record: RequestRecord) -> Course:
    """Decode a request with the target alone, one token per pass."""
    from ..capture.loop import Course
    from ..capture.record import scan

    course, session = Course(record, STRICT), target.session(record.prompt_ids)
    while not course.done:
        logits = session.score(course.prefix, [])
        target.synchronize()
        course.take([], scan(logits, [], f"request {record.request_id}, target alone"))
    return course


def _timing(
    evaluator: Evaluator, grid: Grid, rows: list[int], runs: tuple[Counts, Counts, Counts, Floats], max_drift: float
) -> Timing:
    """Compare what was measured with what is predicted.

    ``rows`` are the requests in the trace; ``runs`` holds their tokens, steps, drafts and seconds, each (4, R).
    """
    made, steps, drafted, seconds = runs
    model, records = evaluator.cost, evaluator.trace.request_records()
    assert model is not None
    prompt = np.array([len(records[n].prompt_ids) for n in rows], np.float64)
    foreseen, plain = model.seconds(steps, drafted, made, prompt), model.plain_seconds(made, prompt)
    rates = made.sum(axis=1) / seconds.sum(axis=1)
    replayed = evaluator.evaluate(grid, figures=["speed_up"], requests=rows)
    timing = Timing(
        len(rows), made, steps, drafted, seconds, *_measured(made, seconds, evaluator.resamples, evaluator.seed),
        predicted_live=float(_gain(made.sum(axis=1) / foreseen.sum(axis=1))),
        predicted_rate=float(made[2].sum() / foreseen[2].sum()),
        predicted_plain=float(plain[2].sum() / foreseen[2].sum()),
        predicted_strict_plain=float(plain[1].sum() / foreseen[1].sum()),
        predicted_replay=replayed.figures["speed_up"] if replayed.exact[0] else None,
        drift=float(rates[3] / rates[1] - 1.0),
    )  # fmt: skip
    if (made != made[0]).any():
        timing.problems.append("the runs generated different numbers of tokens, so their times do not compare")
    if abs(timing.drift) > max_drift:
        timing.problems.append(
            f"the strict runs drifted by {100 * timing.drift:+.1f} %, more than {100 * max_drift:g} %: the machine "
            "was not quiet, so the measured speed-up means little"
        )
    return timing


def _gain(rates: Floats) -> float:
    """Return the policy's rate over the mean of the strict ones."""
    return float(rates[2] / (0.5 * (rates[1] + rates[3])))


def _measured(tokens: npt.NDArray[np.int64], seconds: Floats, resamples: int, seed: int) -> tuple[Intervals, Intervals]:
    """Return the speed of the policy over strict, and over the target alone."""
    columns = {f"{name}{run}": table[run] for run in range(4) for name, table in (("t", tokens), ("s", seconds))}
    sums = stats.Resampled(columns, stats.resample_weights(seconds.shape[1], resamples, seed))
    over_strict = sums.interval(lambda s: s["t2"] / s["s2"] / (0.5 * (s["t1"] / s["s1"] + s["t3"] / s["s3"])))
    return over_strict, sums.interval(lambda s: s["t2"] / s["s2"] / (s["t0"] / s["s0"]))


def keep(path: Path, timed: Timing, setting: str, cost: str) -> bool:
    """Store what was measured in the manifest of a trace, in place of what an earlier run stored for the setting.

    Parameters
    ----------
    path : Path
    timed : Timing
    setting : str
        Name of the setting.
    cost : str
        Source of the cost that predicted. The trace itself is stored by its name, wherever it lies.

    Returns
    -------
    bool
        False, and nothing is stored, where the measurement has problems or the trace cannot be written.
    """
    from ..errors import TraceError
    from ..trace.manifest import SPEEDS
    from ..trace.writer import TraceWriter

    if timed.problems:
        return False
    if cost.endswith(f" {path}"):
        cost = cost.removesuffix(str(path)) + path.resolve().name
    entry = {
        "setting": setting, "measured": float(timed.measured.value[0]), "predicted": timed.predicted_live,
        "measured_over_target_alone": float(timed.measured_plain.value[0]),
        "predicted_over_target_alone": timed.predicted_plain, "requests": timed.requests, "drift": timed.drift,
        "cost": cost,
    }  # fmt: skip
    try:
        with TraceWriter.append(path) as writer:
            notes = writer.manifest.notes
            others = [held for held in notes.get(SPEEDS, []) if held.get("setting") != setting]
            writer.update_manifest(notes={**notes, SPEEDS: [*others, entry]})
    except (TraceError, OSError):
        return False
    return True
