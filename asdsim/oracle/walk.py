"""An independent, slow reading of the paper: the oracle that the kernels are checked against.

Source: arXiv 2608.03447, written from its definitions in terms of tokens; nothing is shared with the rule that the
kernels compile. It tries every prefix length of a block from the longest down, commits tokens one by one, and looks the
next step up by the very tokens generated so far.

Tie-breaking: the target's choice is the *lowest* id among equal logits. A draft token of the same logit but another
id is a mismatch of regret 0: refused when B = 0, otherwise free of charge but counted against M.
A token that the target rules out (logit -inf, infinite regret) is refused by every gate, an infinite one too.
Sums run from left to right from 0.0; the budget test adds the block's charge to what was spent before.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Block:
    """One verification as the oracle sees it: plain lists, and the generated tokens before it.

    ``cost`` is what mismatches are charged where that is not their regret in logits. ``rows`` holds what rules other
    than ASD ask for, one dictionary of recorded columns per draft position.
    """

    prefix: tuple[int, ...]
    draft: list[int]
    choice: list[int]
    regret: list[float]
    captured: bool = True
    cost: list[float] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)


Allows = Callable[[Block, int], bool]


@dataclass
class Outcome:
    """What one walk did; ``left`` counts the prefixes that were needed and not captured.

    ``ended`` tells whether the request came to its end.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    refused_by: list[str] = field(default_factory=list)
    spent: float = 0.0
    relaxed: int = 0
    left: int = 0
    ended: bool = False


def confident_length(logprobs: Sequence[float], tau: float, stop: str) -> int:
    """Return how many draft tokens are verified where a drafter stops under a probability of tau.

    ``after`` keeps the token that the drafter doubts, ``before`` drops it, ``product`` drops the first token at which
    the probability of all the block so far is below tau. ``logprobs`` are the drafter's, in nats.
    """
    together = 0.0
    for i, logprob in enumerate(logprobs):
        together = together + logprob
        if (together if stop == "product" else logprob) < math.log(tau):
            return i + 1 if stop == "after" else i
    return len(logprobs)


def cut(block: Block, width: int) -> Block:
    """Return a block of the first draft tokens, and the target's choices at and behind them."""
    return replace(block, draft=block.draft[:width], choice=block.choice[: width + 1], regret=block.regret[:width])


def relaxed_positions(block: Block, length: int, semantics: str = "paper") -> list[int]:
    """Return where the first ``length`` draft tokens hold a mismatch: another id; to lightllm, a positive regret."""
    if semantics == "lightllm":
        return [i for i in range(length) if block.draft[i] != block.choice[i] and not block.regret[i] <= 0]
    return [i for i in range(length) if block.draft[i] != block.choice[i]]


def charge_of(block: Block, length: int, semantics: str = "paper") -> float:
    """Return the sum of the regrets of the mismatches among the first ``length`` draft tokens."""
    total = 0.0
    for i in relaxed_positions(block, length, semantics):
        total = total + (block.regret[i] if block.cost is None else block.cost[i])
    return total


def value_of(block: Block, i: int, scheme: str) -> float:
    """Return what is lost by a rejection at position i."""
    width = len(block.draft)
    if scheme == "unit":
        return 1.0
    if scheme == "reuse":
        value = 1.0
        for j in range(i + 1, width):
            if block.draft[j] != block.choice[j]:
                break
            value += 1.0
        return value
    if scheme == "reciprocal":
        return (width - i) * (1 / width)
    return (width - i) / width if scheme == "normalised" else float(width - i)


def broken_condition(
    block: Block, length: int, spent: float, B: float, g: float, M: float, semantics: str = "paper", value: str = ""
) -> str:
    """Say which condition the prefix of this length breaks: ``""`` for none, ``gate``, ``budget`` or ``cap``.

    ``semantics`` is one of the four readings of ASD.
    """
    scheme = value or ("normalised" if semantics == "dspark" else "suffix")
    relaxed = relaxed_positions(block, length, semantics)
    if not relaxed:
        return ""
    costs = block.regret if block.cost is None else block.cost
    for i in relaxed:
        if math.isinf(block.regret[i]) or math.isnan(costs[i]) or costs[i] / value_of(block, i, scheme) > g:
            return "gate"
    if semantics == "core" and g == 0:
        return "gate"
    if semantics in ("paper", "core") and B == 0:
        return "budget"
    for number in range(len(relaxed)):
        before = sum_of(costs, relaxed[:number])
        total = sum_of(costs, relaxed[: number + 1])
        if semantics == "core":
            affordable = total <= (B - spent) + 1e-9
        elif semantics == "dspark":
            affordable = before < B - spent and total <= B - spent
        else:
            affordable = spent + total <= B
        if not affordable:
            return "budget"
    return "cap" if len(relaxed) > M else ""


def sum_of(costs: Sequence[float], positions: Sequence[int]) -> float:
    """Add costs from left to right."""
    total = 0.0
    for i in positions:
        total = total + costs[i]
    return total


def settled(spent: float, charge: float, semantics: str) -> float:
    """Return the ledger after a block; lightllm keeps it in float32."""
    total = spent + charge
    return float(struct.unpack("f", struct.pack("f", total))[0]) if semantics == "lightllm" else total


def accepted_length(
    block: Block, spent: float, B: float, g: float, M: float, semantics: str = "paper", value: str = ""
) -> int:
    """Return the length of the longest prefix of a block that satisfies gate, budget and cap."""
    for length in range(len(block.draft), 0, -1):
        if broken_condition(block, length, spent, B, g, M, semantics, value) == "":
            return length
    return 0


def walk(
    blocks: dict[tuple[int, ...], Block],
    *,
    B: float,
    g: float,
    M: float,
    max_new_tokens: int,
    eos: Sequence[int] = (),
    off_trace: str = "stop",
    semantics: str = "paper",
    ledger: str = "request",
    value: str = "",
    allows: Allows | None = None,
    lengths: Sequence[int] | None = None,
) -> Outcome:
    """Walk one request.

    Parameters
    ----------
    blocks : dict
        Every step of the request by the tokens generated before it, in the order captured.
    B, g, M : float
        Budget, gate, cap.
    max_new_tokens : int
        Limit on generated tokens.
    eos : sequence of int
        Tokens that end the request (empty for a fixed length).
    off_trace : {"stop", "aligned", "recorded"}
        What to do at a prefix that is not among ``blocks``.
    semantics, ledger, value : str
        Reading of ASD; whether a ``request`` or a ``block`` is charged; value scheme where not the reading's own.
    allows : callable, optional
        Another rule: whether the mismatch at a position of a block may be accepted. B, g and M are then not looked at.
    lengths : sequence of int, optional
        Draft length of each step, as the batch of that step chose it; the walk stops behind the last one.

    Returns
    -------
    Outcome
        ``tokens`` is the true output where ``left == 0``; otherwise only its length up to there means anything.
    """
    out = Outcome()
    path = [block for block in blocks.values() if block.captured]
    block = blocks.get(())
    while block is not None and (lengths is None or len(out.accepted) < len(lengths)):
        if lengths is not None:
            block = cut(block, lengths[len(out.accepted)])
        before = out.spent
        known = 0.0 if ledger == "block" else before
        if allows is None:
            whole = accepted_length(block, known, B, g, M, semantics, value)
        else:
            whole = allowed_length(block, allows)
        room = max_new_tokens - max(len(out.tokens), len(block.prefix))
        kept: list[int] = []
        ended = False
        for token in [*block.draft[:whole], block.choice[whole]]:
            kept.append(token)
            ended = token in eos or len(kept) == room
            if ended:
                break
        taken = min(whole, len(kept))
        out.accepted.append(taken)
        out.drafted.append(len(block.draft))
        out.relaxed += len(relaxed_positions(block, taken, semantics))
        out.spent = settled(before, charge_of(block, taken, semantics), semantics)
        out.tokens += kept
        if len(kept) > whole and whole < len(block.draft):
            reason = "gate" if allows else broken_condition(block, whole + 1, known, B, g, M, semantics, value)
            out.refused_by.append(reason)
        if ended:
            out.ended = True
            break
        block = blocks.get(block.prefix + tuple(kept))
        if block is None:
            out.left += 1
            if off_trace == "recorded" and len(out.accepted) < len(path):
                block = path[len(out.accepted)]
            elif off_trace == "aligned" and len(out.tokens) < captured_tokens(path, max_new_tokens, eos):
                here = len(out.tokens)
                block = min(path, key=lambda candidate: abs(len(candidate.prefix) - here))
    return out


def allowed_length(block: Block, allows: Allows) -> int:
    """Return the length of the longest prefix in which every mismatch is allowed."""
    for length in range(len(block.draft), 0, -1):
        if all(block.regret[i] < math.inf and allows(block, i) for i in relaxed_positions(block, length)):
            return length
    return 0


def captured_tokens(path: Sequence[Block], max_new_tokens: int, eos: Sequence[int]) -> int:
    """Return the length of the captured output: the last step's prefix and what strict matching commits there."""
    last = path[-1]
    matched = accepted_length(last, 0.0, 0.0, 0.0, 0.0)
    length = len(last.prefix)
    for token in [*last.draft[:matched], last.choice[matched]]:
        length += 1
        if token in eos or length == max_new_tokens:
            break
    return length
