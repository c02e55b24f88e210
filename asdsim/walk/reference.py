"""An independent, slow reading of the paper: the oracle that the kernels are held against.

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
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Block:
    """One verification as the oracle sees it: plain lists, and the generated tokens that it stands behind."""

    prefix: tuple[int, ...]
    draft: list[int]
    choice: list[int]
    regret: list[float]
    captured: bool = True


@dataclass
class Outcome:
    """What one walk did; ``left`` counts the prefixes that were needed and not captured."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    refused_by: list[str] = field(default_factory=list)
    spent: float = 0.0
    relaxed: int = 0
    left: int = 0


def charge_of(block: Block, length: int) -> float:
    """Return the sum of the regrets of the mismatches among the first ``length`` draft tokens, in logits."""
    total = 0.0
    for i in range(length):
        if block.draft[i] != block.choice[i]:
            total = total + block.regret[i]
    return total


def broken_condition(block: Block, length: int, spent: float, B: float, g: float, M: float) -> str:
    """Say which condition the prefix of this length breaks: ``""`` for none, ``gate``, ``budget`` or ``cap``."""
    relaxed = [i for i in range(length) if block.draft[i] != block.choice[i]]
    if not relaxed:
        return ""
    if any(block.regret[i] == math.inf or block.regret[i] / (len(block.draft) - i) > g for i in relaxed):
        return "gate"
    if B == 0 or spent + charge_of(block, length) > B:
        return "budget"
    return "cap" if len(relaxed) > M else ""


def accepted_length(block: Block, spent: float, B: float, g: float, M: float) -> int:
    """Return the length of the longest prefix of a block that satisfies gate, budget and cap."""
    for length in range(len(block.draft), 0, -1):
        if broken_condition(block, length, spent, B, g, M) == "":
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

    Returns
    -------
    Outcome
        ``tokens`` is the true output where ``left == 0``; otherwise only its length up to there means anything.
    """
    out = Outcome()
    path = [block for block in blocks.values() if block.captured]
    block = blocks.get(())
    while block is not None:
        before = out.spent
        whole = accepted_length(block, before, B, g, M)
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
        out.relaxed += sum(block.draft[i] != block.choice[i] for i in range(taken))
        out.spent = before + charge_of(block, taken)
        out.tokens += kept
        if len(kept) > whole and whole < len(block.draft):
            out.refused_by.append(broken_condition(block, whole + 1, before, B, g, M))
        if ended:
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
