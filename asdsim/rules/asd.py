"""The rule of Approximate Speculative Decoding, once, in scalar Python.

Source: "ASD: Approximate Speculative Decoding", arXiv 2608.03447. Positions count from 0. A draft block holds K tokens
x_0 .. x_{K-1}; z_i is the target's logit row after the prefix and x_0 .. x_{i-1}.

    (1)  y_i = argmax z_i                       the target's own choice, lowest id on a tie
    (2)  d_i = [x_i != y_i]                     mismatch, by token id
    (3)  r_i = z_i(y_i) - z_i(x_i)  >= 0        regret, in logits
    (4)  q_i = K - i                            suffix value: what a rejection at i would throw away
    (5)  r_i / q_i <= g                         gate
    (6)  C = sum of accepted d_i r_i            block charge, summed from left to right
         N = sum of accepted d_i                relaxed tokens of the block
    (7)  s + C <= B                             budget; s is what the request has spent in earlier blocks
    (8)  N <= M                                 cap
    (9)  a = the longest prefix of the block in which every mismatch satisfies (5), (7) and (8)
    (10) commit x_0 .. x_{a-1}, then y_a; s <- s + C

B = 0 is strict matching by token id, on logit ties too. All sums are float64; the walk adds and compares, and the one
division (5) happens when a block is laid out, so Python, compiled CPU and CUDA code decide alike to the bit.

``judge_*`` decide about one mismatch and ``accept_block`` about a block. They use only what numba compiles: the CPU and
the CUDA kernels compile these very functions, each for itself, since code compiled for one cannot be called from the
other; ``bind`` is how a compiled judge gets into ``accept_block``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ACCEPT, GATE, BUDGET, CAP = 0, 1, 2, 3
"""Verdicts on a mismatch: accepted, or the first constraint that it breaks, in the order (5), (7), (8)."""


def judge_paper(
    score: float, before: float, charge: float, count: int, spent: float, budget: float, gate: float, cap: float
) -> int:
    """Decide about one mismatch, as the paper defines it.

    Parameters
    ----------
    score : float
        r_i / q_i of this mismatch, in logits.
    before : float
        Block charge C without this mismatch (unused here; other semantics compare it).
    charge : float
        Block charge C with this mismatch.
    count : int
        Relaxed tokens N of the block with this mismatch.
    spent : float
        Ledger s of the request before this block.
    budget, gate, cap : float
        B, g and M; ``inf`` lifts a constraint.

    Returns
    -------
    int
        ``ACCEPT``, or the first constraint that fails: ``GATE``, ``BUDGET``, ``CAP``.
    """
    if not score <= gate:  # (5); written so that a NaN never passes
        return GATE
    if budget == 0.0 or not spent + charge <= budget:  # (7), and strict at B = 0
        return BUDGET
    if count > cap:  # (8)
        return CAP
    return ACCEPT


def judge_core(
    score: float, before: float, charge: float, count: int, spent: float, budget: float, gate: float, cap: float
) -> int:
    """Decide as the reference implementation's core does; parameters as :func:`judge_paper`.

    The budget test is C <= (B - s) + 1e-9, in this order of operations, and g = 0 is strict as B = 0 is (M = 0 is
    strict by (8) anyway).
    """
    if gate == 0.0 or not score <= gate:
        return GATE
    if budget == 0.0 or not charge <= (budget - spent) + 1e-9:
        return BUDGET
    if count > cap:
        return CAP
    return ACCEPT


def judge_dspark(
    score: float, before: float, charge: float, count: int, spent: float, budget: float, gate: float, cap: float
) -> int:
    """Decide as the DSpark reproduction does; parameters as :func:`judge_paper`, score r / ((K - i) / K).

    Something of the budget must be left before the mismatch, C without it < B - s, and it must fit, C <= B - s: once
    the budget is used up to the last bit, even a tie is refused, and B = 0 is strict for that reason.
    """
    if not score <= gate:
        return GATE
    left = budget - spent
    if not (before < left and charge <= left):
        return BUDGET
    if count > cap:
        return CAP
    return ACCEPT


def judge_lightllm(
    score: float, before: float, charge: float, count: int, spent: float, budget: float, gate: float, cap: float
) -> int:
    """Decide as the LightLLM pull request does; parameters as :func:`judge_paper`.

    A mismatch is a positive regret here, not another id, so ties never come before this judge and B = 0 accepts them:
    no setting is strict by id. The ledger ``spent`` is kept in float32, see :func:`settle_single`.
    """
    if not score <= gate:
        return GATE
    if not spent + charge <= budget:
        return BUDGET
    if count > cap:
        return CAP
    return ACCEPT


def unbound(*arguments: float) -> Any:
    """Stand where ``judge`` and ``settle`` of a reading belong: nothing decides by default, see :func:`bind`."""
    raise NotImplementedError("no judge or ledger is bound here")


judge: Callable[..., int] = unbound
settle: Callable[..., float] = unbound


def judge_block(
    score: float, before: float, charge: float, count: int, spent: float, budget: float, gate: float, cap: float
) -> int:
    """Decide as the bound ``judge`` does with a ledger that starts anew in every block."""
    return judge(score, before, charge, count, 0.0, budget, gate, cap)


def settle_double(spent: float, charge: float) -> float:
    """Return the ledger after a block, equation (10), in float64."""
    return spent + charge


def settle_single(spent: float, charge: float) -> float:
    """Return the ledger after a block, kept in float32."""
    return single(spent + charge)


def single(x: float) -> float:
    """Return the float32 nearest to x, ties to even; kernels replace this by a cast."""
    if x == 0.0 or not math.isfinite(x):
        return x
    fraction, exponent = math.frexp(x)
    bits = min(24, exponent + 149)  # fewer below the smallest normal number
    if bits < 0:
        return 0.0
    rounded = math.ldexp(float(round(math.ldexp(fraction, bits))), exponent - bits)
    return math.copysign(math.inf, x) if abs(rounded) > 3.4028234663852886e38 else rounded


def accept_block(
    position: Sequence[int], score: Sequence[float], charge: Sequence[float], lo: int, hi: int,
    stop: int, spent: float, budget: float, gate: float, cap: float,
) -> tuple[int, float, int, int]:  # fmt: skip
    """Walk the mismatches ``lo .. hi-1`` of one block, equation (9).

    ``position``, ``score`` and ``charge`` are indexable; mismatches at ``position >= stop`` are out of reach (an EOS or
    the token limit comes first). Decides with the global ``judge``, see :func:`bind`.

    Returns
    -------
    outcome : int
        Mismatches accepted before the first refused one; ``hi - lo`` where none was refused.
    charge, count : float, int
        C and N of the block.
    verdict : int
        What refused it, ``ACCEPT`` where nothing did.
    """
    total = 0.0
    count = 0
    for j in range(lo, hi):
        if position[j] >= stop:
            break
        verdict = judge(score[j], total, total + charge[j], count + 1, spent, budget, gate, cap)
        if verdict != ACCEPT:
            return j - lo, total, count, verdict
        total += charge[j]
        count += 1
    return hi - lo, total, count, ACCEPT


def bind(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return ``function`` with some of its global names bound anew, for example ``accept_block`` to a judge.

    The same source thus runs in Python around a Python judge and compiles around a compiled one.
    """
    bound: Callable[..., Any] = type(function)(function.__code__, {**function.__globals__, **names}, function.__name__)  # type: ignore[misc]
    return bound


JUDGES: dict[str, Callable[..., int]] = {
    "paper": judge_paper, "core": judge_core, "dspark": judge_dspark, "lightllm": judge_lightllm,
}  # fmt: skip
"""One judge per semantics. All share the signature of :func:`judge_paper`; kernels are compiled around each of them."""

FLOAT32_LEDGER = ("lightllm",)
"""Semantics that keep the ledger in float32; every walk enters a block's charge by :func:`settle_of`."""


class Reading(NamedTuple):
    """How the rule is read: a key of :data:`JUDGES`, and whether the ledger runs over a ``request`` or a ``block``."""

    semantics: str = "paper"
    ledger: str = "request"


def judge_of(reading: Reading, compiled: Callable[[Any], Any] = lambda judge: judge) -> Callable[..., int]:
    """Return the judge of a reading; kernels hand in how it is ``compiled``."""
    whole: Callable[..., int] = compiled(JUDGES[reading.semantics])
    if reading.ledger == "request":
        return whole
    alone: Callable[..., int] = compiled(bind(judge_block, judge=whole))
    return alone


def settle_of(semantics: str, cast: Callable[[float], float] = single) -> Callable[[float, float], float]:
    """Return how a block's charge enters the ledger; kernels hand in a compiled rounding to float32."""
    return bind(settle_single, single=cast) if semantics in FLOAT32_LEDGER else settle_double


def accept(
    positions: Sequence[int],
    scores: Sequence[float],
    charges: Sequence[float],
    stop: int,
    spent: float,
    budget: float,
    gate: float,
    cap: float,
    semantics: str = "paper",
) -> tuple[int, float, int, int]:
    """Decide a block whose mismatches are laid out; parameters and results as :func:`decide`."""
    walk = bind(accept_block, judge=JUDGES[semantics])
    outcome, charge, count, verdict = walk(
        positions, scores, charges, 0, len(positions), stop, spent, budget, gate, cap
    )
    return (stop if verdict == ACCEPT else positions[outcome]), charge, count, verdict


def mismatches(
    draft_ids: Sequence[int], argmax_ids: Sequence[int], regrets: Sequence[float], semantics: str = "paper"
) -> tuple[list[int], list[float], list[float]]:
    """Lay out a block: positions, scores r/q and charges r of its mismatches, equations (2) to (5).

    ``dspark`` divides by (K - i) / K; to ``lightllm`` a tie is no mismatch. Both let a non-finite regret through, which
    no gate then accepts if it is NaN.

    Raises
    ------
    ValueError
        If a mismatch has a negative or non-finite regret, under ``paper`` and ``core``.
    """
    width = len(draft_ids)
    positions, scores, charges = [], [], []
    for i in range(width):
        regret = float(regrets[i])
        if draft_ids[i] != argmax_ids[i] and not (semantics == "lightllm" and regret <= 0.0):
            if semantics not in ("dspark", "lightllm") and not (regret >= 0.0 and math.isfinite(regret)):
                raise ValueError(f"regret {regret} at position {i} is not a finite number >= 0")
            positions.append(i)
            scores.append(regret / ((width - i) / width if semantics == "dspark" else width - i))
            charges.append(regret)
    return positions, scores, charges


def decide(
    draft_ids: Sequence[int],
    argmax_ids: Sequence[int],
    regrets: Sequence[float],
    stop: int,
    spent: float,
    budget: float,
    gate: float,
    cap: float,
    semantics: str = "paper",
) -> tuple[int, float, int, int]:
    """Decide one block of live decoding.

    Parameters
    ----------
    draft_ids, argmax_ids : sequence of int
        x_0 .. x_{K-1}, and y_0 .. y_{K-1} (a bonus row may follow).
    regrets : sequence of float
        r_0 .. r_{K-1} in logits; read at mismatches only.
    stop : int
        Draft tokens that can be committed at all: K, or fewer where an EOS or the token limit comes first.
    spent, budget, gate, cap : float
        s, B, g, M; s is 0 where the ledger starts anew in every block.
    semantics : str
        A key of :data:`JUDGES`.

    Returns
    -------
    accepted : int
        a, the draft tokens to commit.
    charge : float
        C, to be added to the ledger.
    count : int
        N, the relaxed tokens among them.
    verdict : int
        Why the block ended: ``ACCEPT`` where nothing was refused.
    """
    positions, scores, charges = mismatches(draft_ids, argmax_ids, regrets, semantics)
    return accept(positions, scores, charges, stop, spent, budget, gate, cap, semantics)
