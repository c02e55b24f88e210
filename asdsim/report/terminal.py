"""Walks as lines of text: prompt, both outputs side by side, and one row of tokens for each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from ..evaluate.strips import (
    BONUS,
    DISCARDED,
    EXACT,
    PAST_END,
    REJECTED,
    RELAXED,
    REPLACEMENT,
    Strip,
    Token,
    Walk,
    name_of,
    parted_at,
)
from .visible import escaped, padded, shown_token, width, wrapped

SIGNS = {EXACT: "=", RELAXED: "~", REJECTED: "x", REPLACEMENT: ">", BONUS: "+", DISCARDED: "-", PAST_END: "."}
"""How a token is marked besides its colour."""

LOOKS: dict[str, dict[str, Any]] = {
    EXACT: {},
    RELAXED: {"fg": "yellow", "bold": True, "underline": True},
    REJECTED: {"fg": "red"},
    REPLACEMENT: {"fg": "green"},
    BONUS: {"fg": "cyan"},
    DISCARDED: {"dim": True},
    PAST_END: {"dim": True},
}
SHARED = 160
"""Characters shown of what both outputs begin with, and of a prompt that is folded."""


@dataclass(frozen=True)
class Reader:
    """How tokens of a trace read.

    Attributes
    ----------
    text : callable
        Text of a list of ids.
    piece : callable
        What one id stands for.
    """

    text: Callable[[list[int]], str]
    piece: Callable[[int], str]


def legend() -> str:
    """Return what the signs mean, in one line."""
    words = ("exact", "relaxed[target's]", "rejected", "replaced by", "bonus", "discarded", "past the end")
    pairs = zip(SIGNS.items(), words, strict=True)
    return " ".join(click.style(sign + word, **LOOKS[kind]) for (kind, sign), word in pairs)


def show_walk(walk: Walk, base: Walk, reader: Reader, *, columns: int, blank: str = "·") -> Iterator[str]:
    """Yield the lines that show a walk beside another one.

    Parameters
    ----------
    walk, base : Walk
        Of one request; ``base`` is what it is compared with.
    reader : Reader
    columns : int
        Width of a line.
    blank : str
        Sign for a blank at either end of a token.
    """
    yield from _outputs(walk, base, reader, columns)
    yield ""
    for strip in walk.strips:
        yield from wrapped(_head(strip, walk), columns)
        yield from _row(strip, reader, columns, blank)
    if not walk.exact and walk.strips and walk.strips[-1].final == "missing":
        yield "the walk leaves the trace here, so what follows is not known: run asdsim cover for this setting"


def _outputs(walk: Walk, base: Walk, reader: Reader, columns: int) -> Iterator[str]:
    place = parted_at(walk, base)
    names = [name_of(base.policy), name_of(walk.policy)]
    if place < 0:
        whole = walk.exact and base.exact
        yield f"both outputs are the same{'' if whole else ' as far as they are known'}:"
        yield from wrapped(_prose(reader.text(walk.tokens)), columns)
        return
    before, first, second = (reader.text(ids) for ids in (walk.tokens[:place], base.tokens, walk.tokens))
    same = len(before) if first.startswith(before) and second.startswith(before) else 0
    yield f"the outputs part at token {place}" + ("; shared before:" if same else "")
    cut = max(0, same - SHARED)
    if same:
        yield from wrapped(("... " if cut else "") + _prose(before[cut:same]), columns)
    half = (columns - 3) // 2
    sides = []
    for name, side, text in zip(names, (base, walk), (first, second), strict=True):
        unknown = "" if side.exact else " [not known further]"
        head = f"{name}: {len(side.tokens)} tokens, {len(side.relaxed)} relaxed, spent {side.spent:.2f}"
        sides.append([*wrapped(head, half), "-" * half, *wrapped(_prose(text[same:]) + unknown, half)])
    for n in range(max(map(len, sides))):
        left, right = (side[n] if n < len(side) else "" for side in sides)
        yield f"{padded(left, half)} | {right}".rstrip()


def _prose(text: str) -> str:
    return escaped(text, keep="\n")


def ending(strip: Strip, walk: Walk) -> str:
    """Say what ended a block, and by how much."""
    policy = walk.policy
    refused = next((token for token in strip.tokens if token.kind == REJECTED), None)
    over = float("nan") if strip.over is None else strip.over
    score = None if refused is None else refused.score
    if strip.ended == "block":
        text = "all accepted"
    elif strip.ended == "end":
        text = "end of the output" if strip.final == "eos" else "token limit"
    elif strip.ended == "mismatch":
        text = f"mismatch, regret {over:.2f}"
    elif strip.ended == "budget":
        text = f"budget: {policy.budget:g} exceeded by {over:.2f}"
    elif strip.ended == "cap":
        text = f"cap: more than {policy.cap:g}"
    elif strip.ended == "gate":
        text = f"gate: {score:.2f} > {policy.gate:g} by {over:.2f}"
    else:
        text = f"refused by {strip.ended}"
        if not math.isnan(over):
            text += f": {score:.3g} > {policy.gate:g} by {over:.3g}"
    if strip.ended != "end" and strip.final in ("eos", "limit"):
        text += "; end of the output" if strip.final == "eos" else "; token limit"
    return text + (" (estimate)" if strip.estimated else "")


def _head(strip: Strip, walk: Walk) -> str:
    where = f"step {strip.step_id:<4} at {strip.start:<4}"
    source = "" if strip.wave == 0 else "  covered"
    ledger = f"{strip.spent:.2f} -> {strip.spent_after:.2f}"
    return f"{where} ledger {ledger:<14} {ending(strip, walk)}{source}"


def _row(strip: Strip, reader: Reader, columns: int, blank: str) -> Iterator[str]:
    line, used = "   ", 3
    for token in strip.tokens:
        plain = token_text(token, reader, blank)
        wide = width(plain) + 1
        if used > 3 and used + wide > columns:
            yield line
            line, used = "   ", 3
        line += " " + click.style(plain, **LOOKS[token.kind])
        used += wide
    if used > 3:
        yield line


def token_text(token: Token, reader: Reader, blank: str) -> str:
    """Return a token with its sign; behind a relaxed one, in brackets, what the target would have chosen."""
    text = SIGNS[token.kind] + shown_token(reader.piece(token.id), blank)
    if token.kind == RELAXED:
        text += f"[{shown_token(reader.piece(token.choice), blank)}]"
    return text


def walk_record(walk: Walk, reader: Reader) -> dict[str, Any]:
    """Return a walk as plain values, for ``--json``."""
    return {
        "setting": name_of(walk.policy),
        "exact": walk.exact,
        "completion_tokens": len(walk.tokens),
        "relaxed_tokens": len(walk.relaxed),
        "regret_spent": walk.spent,
        "tokens": walk.tokens,
        "text": reader.text(walk.tokens),
        "steps": [
            {
                "step_id": strip.step_id,
                "wave": strip.wave,
                "start": strip.start,
                "accepted": strip.accepted,
                "committed": strip.committed,
                "spent_before": strip.spent,
                "spent_after": strip.spent_after,
                "ended_by": strip.ended,
                "over": strip.over,
                "final": strip.final,
                "estimated": strip.estimated,
                "tokens": [
                    {
                        "kind": token.kind,
                        "position": token.position,
                        "id": token.id,
                        "text": reader.piece(token.id),
                        "target_id": token.choice,
                        "target_text": reader.piece(token.choice),
                        "regret": token.regret,
                        "score": token.score,
                        "spent_before": token.spent_before,
                        "spent_after": token.spent_after,
                    }
                    for token in strip.tokens
                ],
            }
            for strip in walk.strips
        ],
    }
