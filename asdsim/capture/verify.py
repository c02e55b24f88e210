"""Hold walks against live decoding, token for token, and say what any difference comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..engines.protocol import Drafter, Target
from ..records import RequestRecord, StepRecord
from ..rules.scoring import Layout, confidences, draft_lengths
from ..rules.settings import Policy
from ..trace.tokens import first_difference
from .loop import decode
from .record import Recorder

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.0625}
"""Margin under which a difference counts as a near-tie, in logits, by the type that logits are computed in.

Logits of SmolLM2 and its like reach 16 to 32, where bfloat16 steps are .125 and float16 steps .016: four steps. float32
logits move by about 1e-4 between batch shapes (measured: see the README)."""


@dataclass(frozen=True)
class Case:
    """One walk to check: what it says was generated, through which steps."""

    request: RequestRecord
    policy: Policy
    tokens: list[int]
    steps: Sequence[tuple[StepRecord, int, float]]  # (step, draft tokens accepted, closeness of the rule's decision)


@dataclass(frozen=True)
class Difference:
    """Where live decoding parted from a walk.

    Attributes
    ----------
    request_id : str
    policy : Policy
    position : int
        Generated token at which the outputs part.
    walked, live : int or None
        The two tokens; None where one output has ended.
    step_id : int
        Step of the walk that differs first.
    cause : str
        ``draft`` (another draft token), ``choice`` (the target chose another token), ``decision`` (the rule decided
        otherwise on the same tokens) or ``none`` (no step differs: the walk itself is wrong).
    margin : float
        How close the two alternatives were, in logits (log-probability of the drafter for ``draft``: between two
        tokens, or to the threshold where one run drafted on; for ``decision``
        the unit of the regret, so a difference of probabilities under ``regret="probability"``).
    near_tie : bool
        Whether the margin is under the threshold.
    """

    request_id: str
    policy: Policy
    position: int
    walked: int | None
    live: int | None
    step_id: int
    cause: str
    margin: float
    near_tie: bool


def verify(
    target: Target,
    drafter: Drafter,
    num_draft_tokens: int,
    cases: Iterable[Case],
    threshold: float,
    progress: Callable[[], None] | None = None,
) -> Iterator[Difference | None]:
    """Decode every case live; yield None where it equals the walk, else the difference."""
    recorder = Recorder()
    for case in cases:
        live = decode(target, drafter, case.request, case.policy, num_draft_tokens, recorder)
        yield None if live.tokens == case.tokens else compare(case, live.tokens, live.steps, threshold)
        if progress:
            progress()


def compare(case: Case, tokens: Sequence[int], steps: Sequence[StepRecord], threshold: float) -> Difference:
    """Explain a difference by the first step at which the two runs do not agree."""
    walked, live = case.tokens, list(tokens)
    position = first_difference(walked, live)
    step_id, cause, margin = -1, "none", float("inf")
    for number, ((recorded, accepted, closeness), again) in enumerate(zip(case.steps, steps, strict=False)):
        step_id = recorded.step_id
        width = min(recorded.num_draft_tokens, again.num_draft_tokens)
        drafts = [i for i in range(width) if recorded.draft_ids[i] != again.draft_ids[i]]
        first_draft = drafts[0] if drafts else width
        held = _held(case.policy.layout, recorded)
        if held != again.num_draft_tokens and not drafts:
            cause, margin = "draft", _length_margin(case.policy.layout, recorded, min(held, again.num_draft_tokens))
            break
        rows = range(min(first_draft, width) + 1)
        choices = [i for i in rows if recorded.argmax_ids[i] != again.argmax_ids[i]]
        if choices and choices[0] <= accepted:
            cause, margin = "choice", _choice_margin(recorded, again, choices[0])
            break
        if drafts and first_draft <= accepted:
            cause, margin = "draft", _draft_margin(recorded, again, first_draft)
            break
        if number + 1 < min(len(case.steps), len(steps)):
            after = case.steps[number + 1][0]
            if after.start_pos != steps[number + 1].start_pos:
                cause, margin = "decision", closeness
                break
    return Difference(
        case.request.request_id, case.policy, position,
        walked[position] if position < len(walked) else None, live[position] if position < len(live) else None,
        step_id, cause, margin, margin < threshold,
    )  # fmt: skip


def _held(layout: Layout, recorded: StepRecord) -> int:
    """Return how many draft tokens of a recorded step the layout verifies."""
    logprobs = recorded.draft_logprobs
    return int(draft_lengths(layout, [recorded.num_draft_tokens], None if logprobs is None else logprobs[None])[0])


def _length_margin(layout: Layout, recorded: StepRecord, shorter: int) -> float:
    """Return how far the drafter's confidence was from the threshold where one of two runs cut; inf without one."""
    if not layout.threshold or recorded.draft_logprobs is None:
        return float("inf")
    at = shorter - (layout.stop == "after")
    value = confidences(layout, recorded.draft_logprobs[None])[0]
    return abs(float(value[at]) - math.log(layout.threshold)) if 0 <= at < len(value) else float("inf")


def _choice_margin(recorded: StepRecord, again: StepRecord, row: int) -> float:
    """Return the larger of the two runs' gaps between the two tokens chosen; inf where one is not among the top k."""
    gaps = []
    for step, other in ((recorded, again), (again, recorded)):
        ids = step.top_ids[row].tolist()
        token = int(other.argmax_ids[row])
        if token not in ids:
            return float("inf")
        gaps.append(float(step.top_logits[row, 0]) - float(step.top_logits[row, ids.index(token)]))
    return max(gaps)


def _draft_margin(recorded: StepRecord, again: StepRecord, position: int) -> float:
    """Return how far the two runs' best draft log-probabilities are apart; inf for a drafter without them.

    Both tokens are the drafter's favourite of one run. Had one been ahead by more than rounding, both runs would have
    picked it; so a small gap between their log-probabilities is what rounding alone leaves.
    """
    if recorded.draft_logprobs is None or again.draft_logprobs is None:
        return float("inf")
    return abs(float(recorded.draft_logprobs[position]) - float(again.draft_logprobs[position]))
