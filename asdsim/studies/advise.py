"""What a setting is worth under load: the best one for each batch, over strict and over the target alone.

Every setting's exact walks are served by :mod:`asdsim.walk.batch`, beside strict matching and beside the target alone,
which commits one token a step, on the very same queue of the trace's own requests. No walk is estimated: settings that
are not exact for every request take no part.

Two things make the answer uncertain, and are told apart. The interval is over requests: the queue is drawn again and
again from the requests of the trace. The corners are of the cost: what a pass takes beyond one token each, and what
drafting takes, each a fifth less and a fifth more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import stats
from ..errors import UsageError
from ..evaluate.cost import Cost
from ..evaluate.quality import Evaluator, strict_beside
from ..rules.scoring import Layout
from ..rules.settings import STRICT, Grid, Schedule
from ..trace.graph import whole_graph
from ..trace.stored import Trace
from ..walk.batch import Paths, Served, Times, paths_of, simulate, simulate_by_batch
from ..walk.ladder import Ladder, demand_of_all, ladder_of
from ..walk.request import TOKENS
from .calibrate import Limits
from .frozen import how_to_cover, setting_name

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TURNS = 8
"""Requests in the queue for each slot of the batch, at least: the last ones run in a batch that empties."""
RESAMPLES = 200
COST_ERROR = 0.2
MAX_BATCH = 1024
ALONE, AS_CAPTURED = "target alone", "strict"


@dataclass(frozen=True)
class Candidate:
    """One way to serve: a setting, strict matching, or the target alone.

    Attributes
    ----------
    name : str
    grid : Grid or None
        The one setting; None for the target alone.
    K : int
        Draft tokens of a step at most; 0 for the target alone.
    which : int64 (R,)
        Path of each request; nothing where the batch chooses the draft length.
    schedule, ladder : optional
        Draft length by batch, and the trace laid out for it.
    """

    name: str
    grid: Grid | None
    K: int
    which: Ints
    schedule: Schedule | None = None
    ladder: Ladder | None = None

    def length(self, batch: int) -> int:
        """Return the draft tokens of a step in a batch, at most."""
        return self.K if self.schedule is None else self.schedule.at(batch)


@dataclass(frozen=True)
class Load:
    """How requests come and are served.

    Attributes
    ----------
    rate : float or None
        Requests a second, at random (Poisson); None serves ``batch`` requests at a time without a pause.
    chunk : int
        Prompt tokens read beside each iteration; 0 reads a prompt by itself.
    seed : int
        Of the order of the queue, of arrivals and of the bootstrap.
    """

    rate: float | None = None
    chunk: int = 0
    seed: int = 0


@dataclass
class Row:
    """The fastest setting of one batch.

    Attributes
    ----------
    batch : int
    best : Candidate
        The fastest one that speculates, by tokens per second; it may be slower than the target alone.
    rates : dict of str to float
        Tokens per second of every candidate.
    over_alone, over_strict : Intervals
        Tokens per second of the best over the target alone, and over strict matching; over requests.
    corners : dict of str to float
        Over the target alone, at each corner of the cost.
    other_winner : dict of str to str
        Corners at which another candidate is fastest, and which.
    verification : float
        How long a pass over K + 1 tokens of each request takes, in passes over one token each.
    served : Served
        Latencies of the best.
    """

    batch: int
    best: Candidate
    rates: dict[str, float]
    over_alone: stats.Intervals
    over_strict: stats.Intervals
    corners: dict[str, float]
    other_winner: dict[str, str]
    verification: float
    served: Served

    @property
    def pays(self) -> bool:
        """Whether the best setting beats the target alone."""
        return self.rates[self.best.name] > self.rates[ALONE]

    @property
    def K(self) -> int:
        """Draft length to use: 0 where speculation does not pay."""
        return self.best.length(self.batch) if self.pays else 0


@dataclass
class Advice:
    """What :func:`advise` found.

    Attributes
    ----------
    rows : list of Row
        By batch.
    candidates : list of Candidate
    left_out, over_limit : int
        Settings that are not exact for every request, and exact ones that keep no limit.
    requests : int
    """

    rows: list[Row]
    candidates: list[Candidate]
    left_out: int
    over_limit: int
    requests: int
    limits: Limits = field(default_factory=Limits)

    def pays_up_to(self, name: str | None = None) -> int | None:
        """Return the largest batch up to which a candidate beats the target alone at every batch looked at.

        Without a name: up to which any does. 0 where none does at the first batch, None where one does at all of them.
        """
        last = 0
        for row in self.rows:
            if not row.rates[row.best.name if name is None else name] > row.rates[ALONE]:
                return last
            last = row.batch
        return None

    def ranges(self) -> list[list[int]]:
        """Return [first batch, last batch, K] of the best settings, neighbours of one K put together.

        As vLLM takes it for ``num_speculative_tokens_per_batch_size``. K holds from its batch up to the next one; it is
        0 where speculation does not pay.
        """
        out: list[list[int]] = []
        for n, row in enumerate(self.rows):
            first = 1 if n == 0 else row.batch
            last = self.rows[n + 1].batch - 1 if n + 1 < len(self.rows) else row.batch
            if out and out[-1][2] == row.K:
                out[-1][1] = last
            else:
                out.append([first, last, row.K])
        return out


def candidates_of(
    trace: Trace, grids: Sequence[Grid], limits: Limits, evaluator: Evaluator
) -> tuple[list[Candidate], Paths, int, int]:
    """Return the exact settings within limits, with strict matching and the target alone first, and their paths.

    Returns
    -------
    candidates : list of Candidate
    paths : Paths
    left_out, over_limit : int

    Raises
    ------
    UsageError
        If strict matching is not exact for every request.
    """
    baseline = strict_beside(grids[0]) if grids else Grid.of([STRICT])
    strict = evaluator.walk(baseline)
    if not strict.exact.all():
        raise UsageError(
            "strict matching is not exact for every request, so there is no baseline", where=str(trace.path),
            fix=f"run {how_to_cover(trace.path, baseline)}",
        )  # fmt: skip
    width = trace.manifest.num_draft_tokens
    laid: list[tuple[str, Grid | None, int, Paths, Ints]] = []
    tokens = strict.counts[0, :, TOKENS].astype(np.int64)
    number, alone = np.unique(tokens, return_inverse=True)
    steps = int(number.sum())
    none = np.zeros(steps, np.int32)
    one_each = Paths(np.concatenate([[0], np.cumsum(number)]).astype(np.int64), none, np.ones(steps, np.int32), none)
    laid.append((ALONE, None, 0, one_each, alone.astype(np.int64)))
    left_out = over_limit = 0
    for grid in (baseline, *grids):
        graph, walks = evaluator.graph(grid.layout), strict if grid is baseline else evaluator.walk(grid)
        exact = walks.exact.all(axis=1)
        kept: npt.NDArray[np.bool_] = np.array(exact)
        if grid is not baseline:
            left_out += int((~exact).sum())
            if limits.given() and exact.any():
                rows = np.flatnonzero(exact)
                kept[rows] = limits.hold(evaluator.evaluate(grid[rows]))
                over_limit += int(exact.sum() - kept.sum())
        chosen = np.flatnonzero(kept)
        if not len(chosen):
            continue
        paths, which = paths_of(whole_graph(graph), grid[chosen])
        for row, setting in enumerate(chosen):
            part = grid[[int(setting)]]
            name = AS_CAPTURED if grid is baseline else setting_name(part)
            laid.append((name, part, grid.layout.width or width, paths, which[row]))
    joined, offsets = _joined([paths for *_, paths, _ in laid])
    candidates = [
        Candidate(name, part, K, which + offset)
        for (name, part, K, _, which), offset in zip(laid, offsets, strict=True)
    ]
    return candidates, joined, left_out, over_limit


def by_batch_of(trace: Trace, grids: Sequence[Grid], schedules: Sequence[Schedule]) -> tuple[list[Candidate], int]:
    """Return every setting under every table of draft lengths by batch, and how many were left out.

    Strict matching and the settings of ASD take part, each once whatever draft length it was named with. Whom a request
    shares its steps with decides its walk; those are kept that are exact in whatever company.
    """
    policies = [grid.policy(n) for grid in grids if grid.layout.rule == "asd" for n in range(len(grid))]
    whole = [replace(policy, layout=replace(policy.layout, width=0)) for policy in (STRICT, *policies)]
    made, left_out = [], 0
    for schedule in schedules:
        ladders: dict[Layout, Ladder] = {}
        for policy in dict.fromkeys(whole):
            if policy.layout not in ladders:
                ladders[policy.layout] = ladder_of(trace, policy.layout, schedule.lengths)
            ladder, part = ladders[policy.layout], Grid.of([policy])
            if not demand_of_all(ladder, part).exact.all():
                left_out += 1
                continue
            name = AS_CAPTURED if policy == STRICT else setting_name(part)
            none = np.zeros(0, np.int64)
            name = f"{name}, K by batch {schedule}"
            made.append(Candidate(name, part, max(schedule.lengths), none, schedule, ladder))
    return made, left_out


def _joined(parts: Sequence[Paths]) -> tuple[Paths, list[int]]:
    """Return all paths as one list, and where each part begins; equal parts are kept once."""
    offsets, seen, starts = [], dict[int, int](), [np.zeros(1, np.int64)]
    steps = paths = 0
    for part in parts:
        if id(part) not in seen:
            seen[id(part)] = paths
            starts.append(part.start[1:] + steps)
            steps += len(part.drafted)
            paths += len(part.start) - 1
        offsets.append(seen[id(part)])
    unique = list({id(part): part for part in parts}.values())
    drafted, tokens, proposed = (
        np.concatenate([getattr(part, name) for part in unique]) for name in ("drafted", "tokens", "proposed")
    )
    return Paths(np.concatenate(starts), drafted, tokens, proposed), offsets


@dataclass
class _Server:
    """Serves candidates from one queue after another."""

    paths: Paths
    prompt: Ints
    load: Load
    batch: int

    def order(self, chosen: Ints | None = None) -> Ints:
        """Return the queue: requests (all, or those drawn) again and again, each turn in an order of its own."""
        rng = np.random.default_rng(self.load.seed)
        requests = np.arange(len(self.prompt)) if chosen is None else chosen
        turns = max(1, -(-TURNS * self.batch // len(requests)))
        return np.concatenate([rng.permutation(requests) for _ in range(turns)])

    def serve(self, candidate: Candidate, order: Ints, times: Times) -> Served:
        rate, arrival = self.load.rate, None
        if rate is not None:
            arrival = np.cumsum(np.random.default_rng(self.load.seed).exponential(1.0 / rate, len(order)))
        how: dict[str, Any] = {"batch": self.batch, "arrival": arrival, "chunk": self.load.chunk}
        if candidate.ladder is None or candidate.schedule is None or candidate.grid is None:
            return simulate(self.paths, candidate.which[order], self.prompt[order], times, **how)
        served = simulate_by_batch(
            candidate.ladder, candidate.schedule, candidate.grid.policy(0), order, self.prompt[order], times, **how
        )
        assert not served.lost  # every walk of the ladder is exact
        return served

    def rate(self, candidate: Candidate, order: Ints, times: Times) -> float:
        """Return tokens per second."""
        served = self.serve(candidate, order, times)
        return float(served.tokens.sum() / served.seconds) if served.seconds > 0 else 0.0


def scaled(times: Times, width: float, draft: float) -> Times:
    """Return times whose passes take ``width`` times as much beyond one token each, and drafting ``draft`` times."""

    def beyond(table: Floats) -> Floats:
        blocks = np.minimum(np.maximum(np.arange(len(table)), 1), table.shape[1] - 1)
        one_each = table[np.arange(len(table)), blocks][:, None]
        tokens = np.arange(table.shape[1])[None, :]
        return np.where(tokens > blocks[:, None], one_each + width * (table - one_each), table)

    return times._replace(memory=beyond(times.memory), compute=beyond(times.compute), draft=draft * times.draft)


def corners(times: Times, error: float) -> dict[str, Times]:
    """Return the corners of a cost that may be off by a share, by name."""
    if error == 0:
        return {}
    words = {1 - error: f"-{error:.0%}", 1 + error: f"+{error:.0%}"}
    return {
        f"width {words[width]}, draft {words[draft]}": scaled(times, width, draft) for width in words for draft in words
    }


def advise(
    trace: Trace,
    grids: Sequence[Grid],
    cost: Cost,
    batches: Sequence[int] = BATCHES,
    *,
    schedules: Sequence[Schedule] = (),
    limits: Limits | None = None,
    load: Load | None = None,
    cost_error: float = COST_ERROR,
    resamples: int = RESAMPLES,
    evaluator: Evaluator | None = None,
    progress: Callable[[int], None] | None = None,
) -> Advice:
    """Find the fastest setting of each batch.

    Parameters
    ----------
    trace : Trace
    grids : sequence of Grid
        Settings to choose from; strict matching and the target alone always take part.
    cost : Cost
    batches : sequence of int
        Requests served together at most; ascending.
    schedules : sequence of Schedule
        Tables of draft lengths by batch, under which the settings of ASD take part as well.
    limits : Limits, optional
        What a setting may cost in quality; not beside ``schedules``.
    load : Load, optional
    cost_error : float
        Share by which the corners of the cost differ from it.
    resamples : int
        Of the bootstrap over requests.
    evaluator : Evaluator, optional
        Of the trace; with a scorer where a limit is on accuracy.
    progress : callable, optional
        Called with 1 after each batch.

    Raises
    ------
    UsageError
        If a batch is not positive, the queue would be too long, strict matching is not exact, the cost knows one
        request at a time and a batch is larger, or limits are given with tables by batch.
    """
    load, limits = load or Load(), limits or Limits()
    if not batches or min(batches) < 1 or max(batches) > MAX_BATCH:
        raise UsageError(f"batches {list(batches)} cannot be served", fix=f"give 1 to {MAX_BATCH}")
    if load.rate is not None and not 0 < load.rate < np.inf:
        raise UsageError(f"a rate of {load.rate} requests per second", fix="give a number above 0")
    if not 0 <= cost_error < 1:
        raise UsageError(f"a cost that is off by {cost_error:g}", fix="give a share from 0 to below 1")
    if schedules and limits.given():
        raise UsageError(
            "no limit can be held where the batch chooses the draft length: what a request says depends on its company",
            fix="leave the limit out, or the table",
        )
    sizes = sorted(set(batches))
    records = trace.request_records()
    if not records:
        raise UsageError("the trace has no request", where=str(trace.path))
    prompt = np.array([len(record.prompt_ids) for record in records], np.int64)
    K, longest = trace.manifest.num_draft_tokens, int(prompt.max())
    timed = [cost.times(batch, K, longest, load.chunk) for batch in sizes]  # refused before anything is walked
    known = evaluator or Evaluator(trace, device="cpu")
    candidates, paths, left_out, over_limit = candidates_of(trace, grids, limits, known)
    adaptive, more = by_batch_of(trace, grids, schedules)
    candidates, left_out = [*candidates, *adaptive], left_out + more
    context = float(prompt.mean())
    rows = []
    for batch, times in zip(sizes, timed, strict=True):
        server = _Server(paths, prompt, load, batch)
        rows.append(_row(server, candidates, times, corners(times, cost_error), resamples))
        rows[-1].verification = cost.verification(rows[-1].best.length(batch), context, batch)
        if progress:
            progress(1)
    return Advice(rows, candidates, left_out, over_limit, len(records), limits)


def _row(
    server: _Server, candidates: Sequence[Candidate], times: Times, cornered: dict[str, Times], resamples: int
) -> Row:
    order = server.order()
    rates: dict[str, float] = {}
    known: dict[bytes, float] = {}
    for candidate in candidates:  # settings that choose alike are served once
        key = candidate.which.tobytes() or candidate.name.encode()
        if key not in known:
            known[key] = server.rate(candidate, order, times)
        rates[candidate.name] = known[key]
    alone, strict = candidates[0], candidates[1]
    best = max(candidates[1:], key=lambda candidate: rates[candidate.name])  # of equals the first: strict
    three = (best, alone, strict)
    requests = len(server.prompt)

    def ratios(chosen: Ints | None) -> list[float]:
        queue = server.order(chosen)
        speed, plain, before = (server.rate(candidate, queue, times) for candidate in three)
        return [speed / plain, speed / before]

    draws = np.random.default_rng(server.load.seed).integers(0, requests, (resamples, requests))
    value = np.array(ratios(None))
    drawn = np.array([ratios(chosen) for chosen in draws]).T
    everyone = np.arange(requests)
    left = np.array([ratios(np.delete(everyone, r)) if requests > 1 else [np.nan, np.nan] for r in everyone]).T
    low, high = stats.bca(value, drawn, left, np.array([requests]))
    found: dict[str, float] = {}
    other: dict[str, str] = {}
    for name, times_there in cornered.items():
        there = {c.name: server.rate(c, order, times_there) for c in _leaders(candidates, rates)}
        found[name] = there[best.name] / there[ALONE]
        winner = max((name for name in there if name != ALONE), key=lambda candidate: there[candidate])
        if there[winner] > there[best.name]:
            other[name] = winner
    over = [stats.Intervals(value[n : n + 1], low[n : n + 1], high[n : n + 1]) for n in (0, 1)]
    return Row(server.batch, best, rates, over[0], over[1], found, other, np.nan, server.serve(best, order, times))


def _leaders(candidates: Sequence[Candidate], rates: dict[str, float], most: int = 50) -> list[Candidate]:
    """Return the fastest candidates of each K and the two baselines: those that may win at a corner."""
    ranked = sorted(candidates, key=lambda candidate: -rates[candidate.name])
    first_of_K = {candidate.K: candidate for candidate in reversed(ranked)}
    return list({c.name: c for c in (*candidates[:2], *ranked[:most], *first_of_K.values())}.values())


def as_record(advice: Advice, cost: Cost) -> dict[str, Any]:
    """Return advice as plain numbers, ready for JSON."""
    rows = []
    for row in advice.rows:
        gaps = 1e3 * row.served.gaps
        rows.append({
            "batch": row.batch, "setting": row.best.name, "K": row.best.length(row.batch), "pays": row.pays,
            "tokens_per_second": row.rates[row.best.name], "target_alone_tokens_per_second": row.rates[ALONE],
            "over_target_alone": _ends(row.over_alone), "over_strict": _ends(row.over_strict),
            "strict_over_target_alone": row.rates[AS_CAPTURED] / row.rates[ALONE],
            "verification": row.verification, "corners": row.corners, "other_winner": row.other_winner,
            "gap_ms": {"p50": float(np.percentile(gaps, 50)), "p99": float(np.percentile(gaps, 99))},
            "request_seconds_mean": float((row.served.finish - row.served.arrival).mean()),
            "rates": row.rates,
        })  # fmt: skip
    names = [candidate.name for candidate in advice.candidates[1:]]
    return {
        "requests": advice.requests, "cost": cost.to_dict(), "cost_notes": cost.notes(), "rows": rows,
        "pays_up_to": {name: advice.pays_up_to(name) for name in names}, "ranges": advice.ranges(),
        "left_out": advice.left_out, "over_limit": advice.over_limit,
    }  # fmt: skip


def _ends(interval: stats.Intervals) -> dict[str, float]:
    return {name: float(getattr(interval, name)[0]) for name in ("value", "low", "high")}
