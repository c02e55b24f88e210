"""Requests decoded together: one draft and one pass of the target for all that are running, refilled from a queue.

What :mod:`asdsim.walk.batch` replays, done with the models: for measuring passes (:mod:`.profile`) and for holding
predictions against. Prompts are read one at a time while everything else waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ..capture.loop import Course, check_proposal, cut
from ..capture.record import scan
from ..engines.protocol import Proposal
from ..errors import UsageError
from ..records import RequestRecord
from ..rules.scoring import DEFAULT
from ..rules.settings import Policy, Schedule

KV_BYTES = 4 << 30


@dataclass(frozen=True)
class Iteration:
    """One step of all running requests.

    Attributes
    ----------
    batch, width : int
        Requests, and tokens of each in the pass: the most draft tokens + 1.
    context : float
        Mean tokens that each stands on.
    draft, verify, decide : float
        Seconds of drafting, of the pass, and of deciding.
    """

    batch: int
    width: int
    context: float
    draft: float
    verify: float
    decide: float


class Batched:
    """A target and a drafter that serve a batch.

    Parameters
    ----------
    target, drafter : Target, Drafter
    policy : Policy
        Of ASD in the paper's layout, or strict.
    K : int or Schedule
        Draft tokens of each step, or a table by which the requests that share it choose them; 0 runs the target alone.
    clock : callable
        Seconds; on a busy machine ``time.process_time`` of one thread says more than the clock on the wall.
    """

    def __init__(
        self, target: Any, drafter: Any, policy: Policy, K: int | Schedule, clock: Callable[[], float] = perf_counter
    ) -> None:
        if policy.layout != DEFAULT:
            raise UsageError(
                f"{policy} is not decided from ids and regrets alone", fix="take a setting of ASD, whole blocks"
            )
        self.target, self.policy, self.clock = target, policy, clock
        self.schedule = K if isinstance(K, Schedule) else Schedule(((1, K),))
        self.scorer = target.pooled(KV_BYTES)
        self.proposer = drafter.pooled_beside(self.scorer, KV_BYTES)
        self.iterations: list[Iteration] = []
        self.prompts: list[tuple[int, float]] = []

    def read(self, request: RequestRecord) -> Course:
        """Read a prompt by itself, all but its last token, as the first step of a request does."""
        begin = self.clock()
        self.scorer.score_many([list(request.prompt_ids[:-1]) or list(request.prompt_ids)], [[]])
        self.target.synchronize()
        self.prompts.append((len(request.prompt_ids), self.clock() - begin))
        return Course(request, self.policy)

    def step(self, running: Sequence[Course]) -> None:
        """Draft, verify and decide one block of each."""
        prefixes = [course.prefix for course in running]
        K = self.schedule.at(len(running))
        t0 = self.clock()
        blocks = [Proposal([]) for _ in running]
        if K:
            blocks = [cut(block, K) for block in self.proposer.propose_many(prefixes, K)]
        t1 = self.clock()
        for course, block in zip(running, blocks, strict=True):
            check_proposal(block, max(K, 1), self.target.vocab_size, f"request {course.request.request_id}")
        t2 = self.clock()
        logits = self.scorer.score_many(prefixes, [block.ids for block in blocks])
        self.target.synchronize()
        t3 = self.clock()
        for course, block, rows in zip(running, blocks, logits, strict=True):
            course.take(block.ids, scan(rows, block.ids, f"request {course.request.request_id}"))
        self.iterations.append(Iteration(
            len(running), 1 + max(len(block.ids) for block in blocks), sum(map(len, prefixes)) / len(prefixes),
            t1 - t0, t3 - t2, self.clock() - t3,
        ))  # fmt: skip

    def serve(self, queue: Sequence[RequestRecord], batch: int, most: int | None = None) -> list[Course]:
        """Serve a queue, ``batch`` requests at a time; return them in its order.

        ``most`` ends after so many iterations, with requests that are not done.
        """
        courses: list[Course] = []
        running: list[Course] = []
        while (running or len(courses) < len(queue)) and (most is None or len(self.iterations) < most):
            while len(running) < batch and len(courses) < len(queue):
                courses.append(self.read(queue[len(courses)]))
                running.append(courses[-1])
            self.step(running)
            running = [course for course in running if not course.done]
        return courses

    @property
    def seconds(self) -> float:
        """Seconds of everything so far."""
        work = sum(one.draft + one.verify + one.decide for one in self.iterations)
        return work + sum(seconds for _, seconds in self.prompts)
