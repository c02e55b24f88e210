"""Complete a trace: run the model at just the prefixes that a walk needed and did not find.

``cover`` knows no rule and no kernel: the caller passes a function that says which edges are wanted. One wave computes
all steps that are missing at that time; they are independent, so they run as batches. A request's depth then
costs as many waves as its longest walk has steps, however many settings there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..engines.processes import value_of_first
from ..engines.protocol import Drafter, DrafterSession, Logits, Proposal, Target, TargetSession
from ..records import MemoryTrace, RequestRecord, StepRecord
from ..trace.graph import Graph, build_graph
from ..trace.interrupt import uninterrupted
from ..trace.tokens import edge_tokens
from .loop import check_proposal
from .record import Recorder, scan

DEFAULT_BATCH = 32
DEFAULT_KV_BYTES = 2 << 30
SAVE_SECONDS = 10.0


class Wanted(Protocol):
    """What a walk reports; see :class:`asdsim.walk.demand.Demand`."""

    @property
    def edges(self) -> npt.NDArray[np.int64]: ...

    @property
    def weights(self) -> npt.NDArray[np.int64]: ...

    @property
    def exact(self) -> npt.NDArray[np.int64]: ...

    @property
    def steps(self) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class Missing:
    """A prefix at which a step is wanted.

    Attributes
    ----------
    request : int
        Row of the request.
    parent_step_id, parent_accepted : int
        A recorded step and the accepted draft tokens that lead there.
    tokens : tuple of int
        Generated tokens up to the prefix.
    weight : int
        Settings that want it.
    """

    request: int
    parent_step_id: int
    parent_accepted: int
    tokens: tuple[int, ...]
    weight: int


@dataclass
class Progress:
    """How far a cover has come.

    Attributes
    ----------
    pairs, exact_pairs : int
        (request, setting) pairs asked for, and those whose walk is known to be exact.
    waves, steps_added : int
        Waves run and steps computed in this run.
    steps_held : int
        Distinct steps in the trace now.
    live_steps : int
        Verifications that all walks took so far. Once complete: what running every setting live would have cost.
    seconds : float
    waves_by_request : dict of str to int
        Waves in which each request had a step computed.
    interrupted : bool
        Ctrl-C ended the run; what was computed is kept.
    """

    pairs: int = 0
    exact_pairs: int = 0
    waves: int = 0
    steps_added: int = 0
    steps_held: int = 0
    live_steps: int = 0
    seconds: float = 0.0
    waves_by_request: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.exact_pairs == self.pairs

    def then(self, after: Progress) -> Progress:
        """Return this cover and one that followed it as one."""
        waves = {
            name: self.waves_by_request.get(name, 0) + after.waves_by_request.get(name, 0)
            for name in self.waves_by_request | after.waves_by_request
        }
        return Progress(
            self.pairs + after.pairs, self.exact_pairs + after.exact_pairs, self.waves + after.waves,
            self.steps_added + after.steps_added, after.steps_held, self.live_steps + after.live_steps,
            self.seconds + after.seconds, waves, after.interrupted,
        )  # fmt: skip

    @property
    def exact_share(self) -> float:
        """Share of (request, setting) pairs that are exact."""
        return self.exact_pairs / self.pairs if self.pairs else 1.0


@dataclass(frozen=True)
class Job:
    """One step to compute: where it stands, and what it will be called."""

    request: RequestRecord
    step_id: int
    wave: int
    missing: Missing

    @property
    def prefix(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt_ids, *self.missing.tokens]

    @property
    def where(self) -> str:
        """Request and step, for errors."""
        return f"request {self.request.request_id}, step {self.step_id}"


Runner = Callable[[Sequence[Job]], Iterator[StepRecord]]
"""Computes steps: yields one record per job, in order, and may be left early."""


def cover(
    requests: Sequence[tuple[RequestRecord, Sequence[StepRecord]]],
    demand: Callable[[Graph], Wanted],
    runner: Runner,
    save: Callable[[str, list[StepRecord]], None],
    *,
    settings: int,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    group: int | None = None,
    report: Callable[[Progress], None] | None = None,
    build: Callable[[MemoryTrace], Graph] = build_graph,
    between: Callable[[], None] | None = None,
) -> Progress:
    """Add steps until every walk is exact or a limit is reached.

    Parameters
    ----------
    requests : sequence of (RequestRecord, steps)
        The trace as it is.
    demand : callable
        Walks a graph and reports the edges that it lacks.
    runner : Runner
        :class:`BatchRunner` or :class:`FaithfulRunner`.
    save : callable
        Takes new steps of one request: ``save(request_id, steps)``.
    settings : int
        Number of settings that ``demand`` walks.
    max_steps, max_minutes : optional
        Stop after so many new steps, or minutes. What most settings want then comes first, over all requests.
    group : int, optional
        Without a limit: requests to complete together, which bounds the KV cache that is worth keeping.
    report : callable, optional
        Called before every wave and at the end.
    build : callable
        Lays out what ``demand`` walks; for another rule than ASD, with its layout.
    between : callable, optional
        Called before each group. With a runner that then forgets what it holds, the steps of a group do not depend on
        the groups before it: whoever completes one alone gets the same bits.

    Returns
    -------
    Progress
        ``complete`` tells whether nothing is missing.
    """
    begin = monotonic()
    records = [record for record, _ in requests]
    held = [list(steps) for _, steps in requests]
    exact, live = [0] * len(records), [0] * len(records)
    progress = Progress(pairs=len(records) * settings)
    limited = max_steps is not None or max_minutes is not None
    size = group if group and not limited else max(1, len(records))

    def out_of_time() -> bool:
        return max_minutes is not None and value_of_first(monotonic() - begin >= 60.0 * max_minutes)

    def tell() -> None:
        progress.exact_pairs, progress.live_steps = sum(exact), sum(live)
        progress.steps_held = sum(map(len, held))
        progress.seconds = monotonic() - begin
        if report:
            report(progress)

    fresh: dict[str, list[StepRecord]] = {}  # computed, not yet handed to `save`
    try:
        for first in range(0, len(records), size):
            active = list(range(first, min(first + size, len(records))))
            wave = max((step.wave for r in active for step in held[r]), default=0)
            if between:
                between()
            while active:
                trace = MemoryTrace([(records[r], held[r]) for r in active])
                graph = build(trace)
                wanted = demand(graph)
                for r, count, steps in zip(active, wanted.exact, wanted.steps, strict=True):
                    exact[r], live[r] = int(count), int(steps)
                missing = missing_prefixes(trace, graph, wanted, active)
                active = [r for r in active if exact[r] < settings]
                tell()
                if not missing or out_of_time():
                    break
                if limited:
                    missing.sort(key=lambda one: (-one.weight, one.request, one.tokens))
                    missing = missing[: None if max_steps is None else max_steps - progress.steps_added]
                    if not missing:
                        break
                else:  # neighbours of one length need little padding
                    missing.sort(key=lambda one: (len(records[one.request].prompt_ids) + len(one.tokens), one.request))
                progress.waves += 1
                wave += 1
                jobs = []
                next_id = {r: held[r][-1].step_id + 1 for r in active}
                for one in missing:
                    jobs.append(Job(records[one.request], next_id[one.request], wave, one))
                    next_id[one.request] += 1
                saved = monotonic()
                for job, step in zip(jobs, runner(jobs), strict=False):
                    fresh.setdefault(job.request.request_id, []).append(step)
                    held[job.missing.request].append(step)
                    progress.steps_added += 1
                    if monotonic() - saved > SAVE_SECONDS:
                        _save(fresh, save)
                        saved = monotonic()
                    if out_of_time():
                        break
                _save(fresh, save)
                for r in {one.request for one in missing}:
                    name = records[r].request_id
                    progress.waves_by_request[name] = progress.waves_by_request.get(name, 0) + 1
            tell()
    except KeyboardInterrupt:  # at whatever moment: what was computed is kept
        progress.interrupted = True
        _save(fresh, save)
        tell()
    return progress


def _save(fresh: dict[str, list[StepRecord]], save: Callable[[str, list[StepRecord]], None]) -> None:
    with uninterrupted():  # a writer that was cut short between two tables could not continue
        for name in list(fresh):
            save(name, fresh[name])
            del fresh[name]


def missing_prefixes(trace: MemoryTrace, graph: Graph, wanted: Wanted, rows: Sequence[int]) -> list[Missing]:
    """Return the prefixes behind the wanted edges; edges that reach one prefix are one step.

    ``rows`` are the requests' numbers in the caller's list, in the order of the graph's requests.
    """
    found: dict[tuple[int, tuple[int, ...]], Missing] = {}
    step_id = trace.column("steps", "step_id")
    for edge, weight in zip(wanted.edges.tolist(), wanted.weights.tolist(), strict=True):
        step, _ = graph.edge_of(edge)
        request = rows[int(graph.step_request[step])]
        tokens = tuple(edge_tokens(trace, graph, edge))
        other = found.get((request, tokens))
        if other is None:
            found[request, tokens] = Missing(
                request, int(step_id[step]), int(graph.edge_accepted[edge]), tokens, int(weight)
            )
        else:
            found[request, tokens] = replace(other, weight=other.weight + int(weight))
    return list(found.values())


class BatchRunner:
    """Compute steps in batches, KV of shared prefixes reused where the models offer it.

    Parameters
    ----------
    target, drafter : Target, Drafter
    num_draft_tokens : int
        K asked of the drafter.
    recorder : Recorder
    batch : int
        Largest number of steps in one batch.
    kv_bytes : int
        Bound on the KV cache kept for prefixes, for each of the two models; a draft head shares the target's. 0 keeps
        none.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        num_draft_tokens: int,
        recorder: Recorder,
        batch: int = DEFAULT_BATCH,
        kv_bytes: int = DEFAULT_KV_BYTES,
    ) -> None:
        self._models = target, drafter, kv_bytes
        self._vocab_size, self._synchronize = target.vocab_size, target.synchronize
        self._width, self._recorder, self._batch = num_draft_tokens, recorder, batch
        self.forget()

    def forget(self) -> None:
        """Drop the KV that is held."""
        target, drafter, kv_bytes = self._models
        self._target = target.pooled(kv_bytes)
        self._drafter = drafter.pooled_beside(self._target, kv_bytes)

    def __call__(self, jobs: Sequence[Job]) -> Iterator[StepRecord]:
        """Yield one record per job, in order."""
        for first in range(0, len(jobs), self._batch):
            yield from self._run(jobs[first : first + self._batch])

    def _run(self, jobs: Sequence[Job]) -> Iterator[StepRecord]:
        prefixes = [job.prefix for job in jobs]
        t0 = perf_counter()
        proposals = self._drafter.propose_many(prefixes, self._width)
        t1 = perf_counter()
        for job, proposal in zip(jobs, proposals, strict=True):
            check_proposal(proposal, self._width, self._vocab_size, job.where)
        t2 = perf_counter()
        rows = self._target.score_many(prefixes, [proposal.ids for proposal in proposals])
        self._synchronize()
        t3 = perf_counter()
        share = 1e6 / len(jobs)
        for job, proposal, logits in zip(jobs, proposals, rows, strict=True):
            times = ((t1 - t0) * share, (t3 - t2) * share, 0.0)
            yield record_job(self._recorder, job, proposal, logits, times)


class FaithfulRunner:
    """Compute steps one by one, in the shapes that live decoding uses, so that they equal it to the bit.

    The KV caches are carried along each path and copied where paths branch. A state that is no longer held is built
    again from the prompt, step by step.

    Parameters
    ----------
    target, drafter : Target, Drafter
    num_draft_tokens : int
    recorder : Recorder
    steps_of : callable
        Returns the recorded steps of a request by its id, new ones included.
    states : int
        States (a KV cache of each model) to hold.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        num_draft_tokens: int,
        recorder: Recorder,
        steps_of: Callable[[str], Sequence[StepRecord]],
        states: int = 64,
    ) -> None:
        self._target, self._drafter, self._width, self._recorder = target, drafter, num_draft_tokens, recorder
        self._steps_of, self._size = steps_of, states
        self._states: OrderedDict[tuple[str, int], tuple[TargetSession, DrafterSession]] = OrderedDict()
        self._steps: dict[str, dict[int, StepRecord]] = {}

    def forget(self) -> None:
        """Drop the states that are held."""
        self._states.clear()
        self._steps.clear()

    def __call__(self, jobs: Sequence[Job]) -> Iterator[StepRecord]:
        """Yield one record per job, in order."""
        for job in jobs:
            name = job.request.request_id
            steps = self._steps.setdefault(name, {step.step_id: step for step in self._steps_of(name)})
            verifying, drafting = self._after(job, steps)
            t0 = perf_counter()
            proposal = drafting.propose(job.prefix, self._width)
            t1 = perf_counter()
            check_proposal(proposal, self._width, self._target.vocab_size, job.where)
            t2 = perf_counter()
            logits = verifying.score(job.prefix, proposal.ids)
            self._target.synchronize()
            t3 = perf_counter()
            step = record_job(self._recorder, job, proposal, logits, ((t1 - t0) * 1e6, (t3 - t2) * 1e6, 0.0))
            steps[step.step_id] = step
            self._hold(name, step.step_id, verifying, drafting)
            yield step

    def _after(self, job: Job, steps: dict[int, StepRecord]) -> tuple[TargetSession, DrafterSession]:
        """Return sessions as live decoding leaves them after a job's parent, free to be used up."""
        request, parent_id = job.request, job.missing.parent_step_id
        chain: list[StepRecord] = []
        step_id = parent_id
        while step_id >= 0 and (request.request_id, step_id) not in self._states:
            chain.append(steps[step_id])
            step_id = steps[step_id].parent_step_id
        if step_id >= 0:
            self._states.move_to_end((request.request_id, step_id))
            held = self._states[request.request_id, step_id]
            verifying = held[0].fork()
            drafting = held[1].fork_beside(verifying)
        else:
            verifying = self._target.session(request.prompt_ids)
            drafting = self._drafter.session_beside(request.prompt_ids, verifying)
        for step in reversed(chain):  # the prefix of each begins the job's own
            prefix = [*request.prompt_ids, *job.missing.tokens[: step.start_pos]]
            drafting.propose(prefix, self._width)
            verifying.score(prefix, step.draft_ids.tolist())
        if chain:
            twin = verifying.fork()
            self._hold(request.request_id, parent_id, twin, drafting.fork_beside(twin))
        return verifying, drafting

    def _hold(self, name: str, step_id: int, verifying: TargetSession, drafting: DrafterSession) -> None:
        self._states[name, step_id] = verifying, drafting
        while len(self._states) > self._size:
            self._states.popitem(last=False)


def record_job(
    recorder: Recorder, job: Job, proposal: Proposal, logits: Logits, times_us: tuple[float, float, float]
) -> StepRecord:
    """Turn the logits of one job into its record."""
    return recorder.step(
        scan(logits, proposal.ids, job.where),
        proposal,
        step_id=job.step_id,
        parent_step_id=job.missing.parent_step_id,
        parent_accepted=job.missing.parent_accepted,
        start_pos=len(job.missing.tokens),
        where=job.where,
        times_us=times_us,
        wave=job.wave,
    )
