"""Passes timed beside a capture: what one token costs the target, what a verification of K + 1 does.

The steps of a capture all verify about K + 1 tokens, so their times cannot say how long the target alone would take for
one. A few requests of the capture are therefore decoded once more, strictly, with another draft length at each step:
1, 2, 4 and K + 1 tokens in a pass, again and again. Widths take turns, so that a neighbour who comes and goes weighs on
all of them alike; the median of each is kept, and its spread says whether the machine stood still. The table goes into
the manifest, and every predicted speed rests on it; see :func:`asdsim.evaluate.cost_spec.cost_of_trace`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time
from typing import Any

import numpy as np

from ..engines.protocol import Proposal
from ..records import RequestRecord, StepRecord
from ..rules.settings import STRICT
from ..stats import MAX_SPREAD, half_spread
from .loop import Course, check_proposal
from .record import scan

REPEATS = 3
"""Passes of each width in one round; one more before them warms up."""
ROUNDS = 3
"""Rounds of a capture: on its first, its middle and its last request."""
MAX_APART = 0.25
"""Share by which the captured verifications may differ from the passes timed beside them."""

Sample = tuple[float, float, float]
"""Milliseconds of a pass (deciding included) and of its draft, and the tokens that it stands on."""


def widths_of(K: int) -> list[int]:
    """Return the widths to measure for a trace of K draft tokens: 1, 2, 4 and K + 1."""
    return sorted({width for width in (1, 2, 4) if width <= K} | {1, K + 1})


def table_rows(cells: Mapping[tuple[int, int], Sequence[Sample]], prompts: Mapping[int, Sequence[float]]) -> list[Any]:
    """Return the rows that :mod:`asdsim.evaluate.step_table` reads: medians of samples by (batch, width).

    Parameters
    ----------
    cells : mapping of (batch, width) to samples
    prompts : mapping of int to list of float
        Milliseconds of reading a prompt, by its length.
    """
    rows: list[Any] = []
    for (batch, width), cell in sorted(cells.items()):
        passes, drafts, contexts = np.array(cell, np.float64).T
        rows.append({
            "batch": batch, "width": width, "milliseconds": float(np.median(passes)),
            "context": float(contexts.mean()), "draft_milliseconds": float(np.median(drafts)) if width > 1 else 0.0,
            "spread": half_spread(passes),
        })  # fmt: skip
    return rows + [{"prompt": n, "milliseconds": float(np.median(ms))} for n, ms in sorted(prompts.items())]


def crowded() -> str:
    """Return a sentence where more programs want to run than there are cores, and nothing otherwise."""
    try:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
    except (AttributeError, OSError):  # not on this platform
        return ""
    if load <= cores + 0.5:
        return ""
    return f"the machine was busy: {load:.1f} programs wanted to run on {cores} cores"


@dataclass
class PassTimes:
    """Samples taken so far.

    Attributes
    ----------
    target, drafter : Target, Drafter
    K : int
        Draft tokens that the capture asks for.
    clock : callable
        Seconds.
    busy : str
        What :func:`crowded` said in the process that took the samples.
    """

    target: Any
    drafter: Any
    K: int
    clock: Callable[[], float] = perf_counter
    cells: dict[tuple[int, int], list[Sample]] = field(default_factory=dict)
    prompts: dict[int, list[float]] = field(default_factory=dict)
    captured: list[float] = field(default_factory=list)
    busy: str = ""

    def taken(self) -> PassTimes:
        """Hand over the samples so far, without the models, and start afresh."""
        samples = PassTimes(None, None, self.K, self.clock, self.cells, self.prompts, self.captured, crowded())
        self.cells, self.prompts, self.captured = {}, {}, []
        return samples

    def add(self, other: PassTimes) -> None:
        """Add the samples of another process."""
        for width, cell in other.cells.items():
            self.cells.setdefault(width, []).extend(cell)
        for length, times in other.prompts.items():
            self.prompts.setdefault(length, []).extend(times)
        self.captured += other.captured
        self.busy = self.busy or other.busy

    def note_steps(self, steps: Iterable[StepRecord]) -> None:
        """Take in the captured steps of a request, for comparison: those of K draft tokens after the first."""
        self.captured += [
            1e-3 * (step.verify_us + step.select_us) for step in steps
            if step.step_id > 0 and len(step.draft_ids) == self.K
        ]  # fmt: skip

    def measure(self, request: RequestRecord, repeats: int = REPEATS) -> None:
        """Decode a request strictly, with another draft length at each step, and keep the times.

        A block that the drafter leaves short is filled up with tokens of the prompt: a pass lasts as long whatever its
        tokens are.
        """
        prompt = list(request.prompt_ids)
        verifying = self.target.session(prompt)
        drafting = self.drafter.session_beside(prompt, verifying)
        if len(prompt) > 1:
            begin = self.clock()
            verifying.score(prompt[:-1], [])
            self.target.synchronize()
            self.prompts.setdefault(len(prompt), []).append(1e3 * (self.clock() - begin))
        course = Course(replace(request, stop="fixed"), STRICT)
        for repeat in range(repeats + 1):
            for width in widths_of(self.K):
                if course.done:
                    return
                sample = self._step(course, verifying, drafting, width)
                if repeat:
                    self.cells.setdefault((1, width), []).append(sample)

    def _step(self, course: Course, verifying: Any, drafting: Any, width: int) -> Sample:
        prefix, where = course.prefix, f"request {course.request.request_id}, pass over {width} tokens"
        before = self.clock()
        if self.drafter.reads_target:
            verifying.states(prefix[:-1])
            self.target.synchronize()
        t0 = self.clock()
        block = drafting.propose(prefix, width - 1) if width > 1 else Proposal([])
        t1 = self.clock()
        check_proposal(block, max(width - 1, 1), self.target.vocab_size, where)
        filler = course.request.prompt_ids
        ids = [*block.ids, *(filler[n % len(filler)] for n in range(width - 1 - len(block.ids)))]
        t2 = self.clock()
        logits = verifying.score(prefix, ids)
        self.target.synchronize()
        course.take(ids, scan(logits, ids, where))
        return 1e3 * (t0 - before + self.clock() - t2), 1e3 * (t1 - t0), float(len(prefix))

    def record(self, threads: int) -> dict[str, Any] | None:
        """Return what goes into the notes of the manifest; None where a width has no sample.

        Parameters
        ----------
        threads : int
            That torch uses on the CPU.
        """
        if {width for _, width in self.cells} != set(widths_of(self.K)):
            return None
        rows = table_rows(self.cells, self.prompts)
        return {
            "source": "passes timed beside the capture", "threads": threads, "cores": os.cpu_count() or 1,
            "clock": "process time" if self.clock is process_time else "wall clock", "passes": rows,
            "problems": self.problems_of(rows),
        }  # fmt: skip

    def problems_of(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return why the times are not to be trusted."""
        # Without a target nothing was timed here: who only collects may be as busy as it likes.
        busy = self.busy or ("" if self.target is None else crowded())
        problems = [busy] if busy else []
        spread = max(row.get("spread", 0.0) for row in rows)
        if spread > MAX_SPREAD:
            problems.append(f"passes of one width spread by {spread:.0%} about their median")
        if self.captured:
            there = float(np.median(self.captured))
            here = next(row["milliseconds"] for row in rows if row.get("width") == self.K + 1)
            if abs(there / here - 1) > MAX_APART:
                problems.append(
                    f"verifications of the capture took {there:.1f} ms at the median, those timed beside it {here:.1f}"
                )
        return problems
