"""Speculative decoding, one block at a time, greedy, under any setting of the rule.

A :class:`Course` holds the state of one request and knows how to take a verified block; :func:`decode` drives one
course with live sessions. Callers that want batches drive many courses with ``score_many`` and ``propose_many``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np

from ..engines.protocol import Drafter, Proposal, Target
from ..errors import CaptureError
from ..records import NO_PARENT, RequestRecord, StepRecord
from ..rules.asd import ACCEPT, GATE, accept, decide, settle_of
from ..rules.scoring import DEFAULT, Layout, draft_lengths, lay_block
from ..rules.settings import Policy
from .record import Recorder, Scan, check_ids, scan


@dataclass(frozen=True)
class Outcome:
    """The result of one block.

    Attributes
    ----------
    num_draft_tokens : int
        K.
    accepted : int
        Draft tokens committed; the bonus token is not among them.
    tokens : list of int
        All tokens committed, the target's own last where there is one.
    charge : float
        C, regret charged, in logits.
    relaxed : int
        N, mismatches accepted.
    verdict : int
        Why it ended, see :mod:`asdsim.rules.asd`.
    """

    num_draft_tokens: int
    accepted: int
    tokens: list[int]
    charge: float
    relaxed: int
    verdict: int


@dataclass
class Course:
    """One request being decoded.

    Attributes
    ----------
    request : RequestRecord
    policy : Policy
    tokens : list of int
        Generated so far.
    spent : float
        Ledger s, in logits.
    outcomes : list of Outcome
    """

    request: RequestRecord
    policy: Policy
    tokens: list[int] = field(default_factory=list)
    spent: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def prefix(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt_ids, *self.tokens]

    @property
    def done(self) -> bool:
        """True once an EOS was committed (natural stop) or the token limit is reached."""
        request = self.request
        if len(self.tokens) >= request.max_new_tokens:
            return True
        return request.stop == "natural" and bool(self.tokens) and self.tokens[-1] in request.eos_ids

    def reach(self, draft_ids: Sequence[int]) -> int:
        """Return how many draft tokens can be committed at all: up to the first EOS and the token limit."""
        reach = min(len(draft_ids), self.request.max_new_tokens - len(self.tokens))
        if self.request.stop == "natural":
            for i in range(reach):
                if draft_ids[i] in self.request.eos_ids:
                    return i + 1
        return reach

    def take(self, draft_ids: Sequence[int], seen: Scan, step: StepRecord | None = None) -> Outcome:
        """Decide a verified block, commit what it yields and charge the ledger.

        A mismatch on a token that the target rules out (logit -inf, infinite regret) is never accepted, not even under
        B = g = M = inf. ``step`` is the record of the block; layouts other than the default one read it.
        """
        width = len(draft_ids)
        reach = self.reach(draft_ids)
        stop = min(reach, seen.forbidden)
        policy = self.policy
        spent = self.spent if policy.ledger == "request" else 0.0
        numbers = stop, spent, policy.budget, policy.gate, policy.cap, policy.semantics
        if policy.layout == DEFAULT:
            accepted, charge, relaxed, verdict = decide(
                draft_ids, seen.argmax_ids.tolist(), seen.regrets.tolist(), *numbers
            )
        else:
            assert step is not None
            at, scores, charges = lay_block(policy.layout, self.request, step, self.tokens)
            accepted, charge, relaxed, verdict = accept(at, scores, charges, *numbers)
        if verdict == ACCEPT and stop < reach:
            verdict = GATE
        tokens = [int(token) for token in draft_ids[:accepted]]
        if verdict != ACCEPT:
            tokens.append(int(seen.argmax_ids[accepted]))
        elif reach == width and len(self.tokens) + width < self.request.max_new_tokens:
            ended = self.request.stop == "natural" and width > 0 and draft_ids[-1] in self.request.eos_ids
            if not ended:
                tokens.append(int(seen.argmax_ids[width]))  # bonus
        self.tokens.extend(tokens)
        self.spent = settle_of(policy.semantics)(self.spent, charge)
        outcome = Outcome(width, accepted, tokens, charge, relaxed, verdict)
        self.outcomes.append(outcome)
        return outcome


@dataclass(frozen=True)
class Decoded:
    """A finished request.

    Attributes
    ----------
    tokens : list of int
        Generated tokens, a natural EOS included.
    ledger : float
        Regret spent, in logits.
    outcomes : list of Outcome
        One per step.
    steps : list of StepRecord
        One per step where a recorder was given.
    """

    tokens: list[int]
    ledger: float
    outcomes: list[Outcome]
    steps: list[StepRecord]


def check_request(target: Target, drafter: Drafter, request: RequestRecord, num_draft_tokens: int) -> None:
    """Refuse, before any decoding, a request that cannot be decoded to its end.

    Raises
    ------
    CaptureError
        If the prompt is empty or names unknown tokens, K is not one that the drafter can draft, vocabularies differ, or
        prompt, answer and draft block do not fit into the positions of a model.
    """
    where = f"request {request.request_id}"
    if not request.prompt_ids:
        raise CaptureError("the prompt has no tokens", where=where)
    check_pair(target, drafter, num_draft_tokens)
    worst = max(request.prompt_ids), min(request.prompt_ids)
    if worst[0] >= target.vocab_size or worst[1] < 0:
        token = worst[0] if worst[0] >= target.vocab_size else worst[1]
        raise CaptureError(
            f"prompt token {token} is outside the target's vocabulary of {target.vocab_size}",
            where=where,
            fix="use the tokenizer that belongs to the target",
        )
    longest = positions_needed(request, num_draft_tokens)
    for kind, limit in (("target", target.max_positions), ("drafter", drafter.max_positions)):
        if limit is not None and longest > limit:
            raise CaptureError(
                f"prompt ({len(request.prompt_ids)}), answer ({request.max_new_tokens}) and draft block "
                f"({num_draft_tokens}) need {longest} positions, but the {kind} has {limit}",
                where=where,
                fix="lower --max-new-tokens or --K, or leave this prompt out",
            )


def positions_needed(request: RequestRecord, num_draft_tokens: int) -> int:
    """Return the positions that prompt, answer and draft block take at most."""
    return len(request.prompt_ids) + request.max_new_tokens - 1 + num_draft_tokens


def beyond(drafter: Drafter, request: RequestRecord, num_draft_tokens: int) -> bool:
    """Return whether a request may run past the positions that the drafter was made for."""
    limit = drafter.trained_positions
    return limit is not None and positions_needed(request, num_draft_tokens) > limit


def note_on_positions(drafter: Drafter, longer: int, requests: int) -> str:
    """Return a note that ``longer`` of all requests may run :func:`beyond` the drafter's positions."""
    return (
        f"{longer} of {requests} requests may run past the {drafter.trained_positions} positions that drafter "
        f"{drafter.name} was made for, where it may draft badly"
    )


def check_pair(target: Target, drafter: Drafter, num_draft_tokens: int) -> None:
    """Refuse a K that the drafter cannot draft, and vocabularies that differ."""
    if num_draft_tokens < 1:
        raise CaptureError(f"K={num_draft_tokens} drafts nothing", fix="give K >= 1")
    check_width(drafter.name, drafter.max_draft_tokens, num_draft_tokens)
    check_vocabulary(target, drafter)


def check_width(name: str, limit: int | None, num_draft_tokens: int) -> None:
    """Refuse a K that is more than a drafter can draft at once."""
    if limit is not None and num_draft_tokens > limit:
        raise CaptureError(f"K={num_draft_tokens} is more than drafter {name} can draft", fix=f"give K <= {limit}")


def check_vocabulary(target: Target, drafter: Drafter) -> None:
    """Refuse a drafter whose logit rows have another width than the target's."""
    if drafter.vocab_size is not None and drafter.vocab_size != target.vocab_size:
        raise CaptureError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the target's {target.vocab_size}",
            fix="use a drafter of the target's own family",
        )


def decode(
    target: Target,
    drafter: Drafter,
    request: RequestRecord,
    policy: Policy,
    num_draft_tokens: int,
    recorder: Recorder | None = None,
) -> Decoded:
    """Decode one request to its end.

    Parameters
    ----------
    target, drafter : Target, Drafter
    request : RequestRecord
    policy : Policy
        :data:`asdsim.rules.settings.STRICT` for strict matching.
    num_draft_tokens : int
        K asked of the drafter in every step, whatever is left of the token limit.
    recorder : Recorder or None
        None decodes without recording.

    Returns
    -------
    Decoded

    Raises
    ------
    CaptureError
        See :func:`check_request`, :func:`asdsim.capture.record.check_ids` and :func:`asdsim.capture.record.scan`.
    """
    check_request(target, drafter, request, num_draft_tokens)
    course = Course(request, policy)
    verifying = target.session(request.prompt_ids)
    drafting = drafter.session_beside(request.prompt_ids, verifying)
    steps: list[StepRecord] = []
    parent, parent_accepted = NO_PARENT, NO_PARENT
    while not course.done:
        prefix, start_pos, step_id = course.prefix, len(course.tokens), len(course.outcomes)
        where = f"request {request.request_id}, step {step_id}"
        before = perf_counter()
        if drafter.reads_target:  # at the first step the prompt: the target's work, not the drafter's
            verifying.states(prefix[:-1])
            target.synchronize()
        t0 = perf_counter()
        proposal = drafting.propose(prefix, num_draft_tokens)
        t1 = perf_counter()
        check_proposal(proposal, num_draft_tokens, target.vocab_size, where)
        proposal = cut(proposal, verified_length(policy.layout, proposal, where))
        t2 = perf_counter()
        logits = verifying.score(prefix, proposal.ids)
        target.synchronize()
        t3 = perf_counter()
        seen = scan(logits, proposal.ids, where)
        place: dict[str, Any] = {
            "step_id": step_id, "parent_step_id": parent, "parent_accepted": parent_accepted, "start_pos": start_pos,
        }  # fmt: skip
        record = None
        if policy.layout != DEFAULT:  # the rule reads what a trace would hold
            record = recorder_for(policy, recorder).step(seen, proposal, where=where, **place)
        outcome = course.take(proposal.ids, seen, record)
        t4 = perf_counter()
        if recorder is not None:
            times = ((t1 - t0) * 1e6, (t0 - before + t3 - t2) * 1e6, (t4 - t3) * 1e6)
            if record is None:
                steps.append(recorder.step(seen, proposal, where=where, times_us=times, **place))
            else:
                steps.append(replace(record, draft_us=times[0], verify_us=times[1], select_us=times[2]))
        parent, parent_accepted = step_id, outcome.accepted
    return Decoded(course.tokens, course.spent, course.outcomes, steps)


def recorder_for(policy: Policy, recorder: Recorder | None) -> Recorder:
    """Return a recorder that keeps what the policy's rule reads, and all that the given one keeps."""
    base = recorder or Recorder()
    kind = dict(policy.layout.params).get("kind")
    if policy.layout.rule != "fuzzy" or kind in base.divergences:
        return base
    return replace(base, divergences=(*base.divergences, str(kind)))


def verified_length(layout: Layout, proposal: Proposal, where: str) -> int:
    """Return how many tokens of a proposal are verified; a drafter that stopped there by itself changes nothing.

    Raises
    ------
    CaptureError
        Under a threshold, where the drafter has no probabilities.
    """
    logprobs = None if proposal.logprobs is None else np.asarray(proposal.logprobs)[None]
    try:
        return int(draft_lengths(layout, [len(proposal.ids)], logprobs)[0])
    except ValueError:
        raise CaptureError(
            "a draft threshold needs the drafter's probabilities, and this drafter has none",
            where=where,
            fix="leave --draft-threshold out, or use a drafter that has a distribution",
        ) from None


def cut(proposal: Proposal, width: int) -> Proposal:
    """Return the first ``width`` tokens of a proposal."""
    if len(proposal.ids) <= width:
        return proposal
    rows = [part if part is None else part[:width] for part in (proposal.logprobs, proposal.logits)]
    return Proposal(proposal.ids[:width], *rows)


def check_proposal(proposal: Proposal, num_draft_tokens: int, vocab_size: int, where: str) -> None:
    """Refuse a block longer than asked for, with unknown tokens, or with log-probabilities that do not match it."""
    if len(proposal.ids) > num_draft_tokens:
        raise CaptureError(f"the drafter gave {len(proposal.ids)} tokens, not {num_draft_tokens}", where=where)
    check_ids(proposal.ids, vocab_size, where)
    if proposal.logprobs is not None and len(proposal.logprobs) != len(proposal.ids):
        raise CaptureError(
            f"the drafter gave {len(proposal.logprobs)} log-probabilities for {len(proposal.ids)} tokens", where=where
        )
    if proposal.logprobs is not None:
        for position, value in enumerate(proposal.logprobs):
            if not isfinite(value):
                raise CaptureError(
                    f"the drafter's log-probability is {value}",
                    where=f"{where}, position {position}",
                    fix="check the drafter's weights, or use a wider dtype (--dtype float32)",
                )
