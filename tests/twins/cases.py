"""Traces on which every form of the walk must agree: random ones, and ones made to hurt."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from asdsim.records import NO_PARENT, MemoryTrace, RequestRecord
from asdsim.rules.asd import JUDGES, Reading
from asdsim.rules.settings import KEPT_LEDGERS, Grid
from tests.support.toygraph import record_step, toy_requests

READINGS = [Reading(semantics, ledger) for ledger in KEPT_LEDGERS for semantics in JUDGES]
MODES = ("stop", "aligned", "recorded")
INF = float("inf")
VOCAB = 12
EOS = VOCAB - 1


def grid() -> Grid:
    """Return settings that hit every verdict: zeros, exact ties with the toy regrets, infinity."""
    return Grid.product([0, 0.125, 0.5, 1.3, 4, INF], [0, 0.125, 0.4, INF], [0, 1, 2, INF])


def small_grid() -> Grid:
    """Return a few settings of the same kinds, for slow backends."""
    return Grid.product([0, 0.5, 1.3, INF], [0.125, INF], [1, INF])


def logits_for(choice: list[int], draft: list[int], regret: list[float]) -> np.ndarray:
    """Return logits with the given argmax per row, and the given regret of each draft token."""
    rows = np.full((len(choice), VOCAB), -40.0, np.float32)
    for i, best in enumerate(choice):
        rows[i, best] = 2.0
        if i < len(draft) and draft[i] != best:
            rows[i, draft[i]] = np.float32(2.0 - regret[i])
    return rows


def one_path(
    blocks: list[tuple[list[int], list[int], list[float]]], *, limit: int, stop: str = "natural", name: str = "made"
) -> tuple[RequestRecord, list]:
    """Return a request whose strict path runs through blocks of (drafts, choices, regrets), written by hand."""
    record = RequestRecord(f"{name}/0", "made", (1, 2, 3), "prompt", None, limit, (EOS,), stop)
    steps, start, accepted = [], 0, NO_PARENT
    for number, (draft, choice, regret) in enumerate(blocks):
        parent = number - 1 if number else NO_PARENT
        logits = logits_for(choice, draft, regret)
        steps.append(record_step(number, parent, accepted, start, np.array(draft, np.int32), logits))
        assert steps[-1].argmax_ids.tolist() == choice
        accepted = next((i for i, token in enumerate(draft) if token != choice[i]), len(draft))
        start += accepted + 1
    return record, steps


def adversarial() -> dict[str, MemoryTrace]:
    """Return hand-made traces, each with one difficulty."""
    tie = logits_for([3, 4, 5, 6], [3, 4, 5], [])
    tie[1, 9] = tie[1, 4]  # equal maxima at ids 4 and 9: the draft takes 9, the target 4
    tied = record_step(0, NO_PARENT, NO_PARENT, 0, np.array([3, 9, 5], np.int32), tie)
    record = RequestRecord("tie/0", "made", (1,), "", None, 4, (EOS,), "natural")
    eos_inside = [([1, 7, EOS, 2, 3], [1, 2, EOS, 2, 8, 9], [0, 0.25, 0, 0, 0.5]), ([1], [2, 3], [0.5])]
    eos_refused = [([1, EOS, 3], [1, 2, 3, 4], [0, 0.5, 0]), ([5, 6], [5, 6, EOS], [])]
    forbidden = [([1, 2, 3], [1, 4, 3, 5], [0, 3.4028234663852886e38, 0]), ([1], [1, 2], [])]
    sums = [([1] * 8, [2] * 8 + [3], [0.1] * 8)] * 3  # 0.1 * 3 != 0.1 + 0.1 + 0.1
    return {
        "tie": MemoryTrace([(record, [tied])]),
        "eos inside a block": MemoryTrace([one_path(eos_inside, limit=30)]),
        "eos that is a mismatch": MemoryTrace([one_path(eos_refused, limit=30)]),
        "eos ignored": MemoryTrace([one_path(eos_inside, limit=30, stop="fixed")]),
        "limit inside a block": MemoryTrace(
            [one_path([([1, 2, 3], [1, 2, 3, 4], []), ([1, 5, 3], [1, 2, 3, 4], [0, 0.25, 0])], limit=6)]
        ),
        "limit of one": MemoryTrace([one_path([([1, 2, 3], [4, 2, 3, 4], [0.1, 0, 0])], limit=1)]),
        "regret of a forbidden token": MemoryTrace([one_path(forbidden, limit=9)]),
        "sums that round": MemoryTrace([one_path(sums, limit=20)]),
        "K of 0": MemoryTrace([one_path([([], [4], []), ([1, 2], [1, 3, 4], [0, 0.5]), ([], [5], [])], limit=9)]),
        "one empty request": MemoryTrace([(replace(record, request_id="empty/0"), [])]),
        "no request": MemoryTrace([]),
    }


RANDOM: dict[str, dict[str, Any]] = {
    "K=3": {"ks": (3,), "extra": 40},
    "K=1": {"ks": (1,), "extra": 20, "vocab": 10},
    "K=16": {"ks": (16,), "agree": 0.9, "limit": 40, "vocab": 30, "extra": 40},
    "K=16, many mismatches": {"ks": (16,), "agree": 0.3, "limit": 40, "vocab": 30, "extra": 10},
    "ragged K with 0": {"ks": (0, 1, 5), "extra": 20},
    "ragged K": {"ks": (2, 7), "limit": 40, "extra": 40},
    "ties everywhere": {"ks": (5,), "grain": 1.0, "agree": 0.5},
    "arbitrary floats": {"ks": (7,), "grain": 0.0, "limit": 40, "extra": 60},
    "fixed length": {"ks": (4,), "stop": "fixed", "limit": 25},
    "limit 2": {"ks": (5,), "limit": 2},
    "strict path only": {"ks": (7,), "extra": 0, "limit": 60, "grain": 0.0},
    "an empty request among others": {"ks": (3,), "empty": True},
}
"""Arguments of ``toy_requests``."""


def cut_case() -> tuple[MemoryTrace, Grid]:
    """Return a trace with the drafter's probabilities, and settings that cut its blocks by them."""
    trace = MemoryTrace(toy_requests(7, ks=(5,), limit=20, agree=0.7, extra=40, columns=True))
    return trace, Grid.product([0, 0.5, 1.3, INF], [0.125, INF], [1, INF], draft_threshold=0.5, draft_stop="product")


@cache
def cases() -> dict[str, MemoryTrace]:
    """Return every trace by name."""
    made = {
        name: MemoryTrace(toy_requests(100 + number, **arguments))
        for number, (name, arguments) in enumerate(RANDOM.items())
    }
    return {**made, **adversarial()}


def random_trace(seed: int) -> MemoryTrace:
    """Return a trace of random shape."""
    rng = np.random.default_rng(seed)
    return MemoryTrace(
        toy_requests(
            seed,
            requests=int(rng.integers(1, 4)),
            vocab=int(rng.choice([10, 12, 30])),
            ks=[(3,), (1,), (16,), (0, 1, 5), (2, 7)][rng.integers(5)],
            limit=int(rng.choice([1, 2, 6, 20, 40])),
            agree=float(rng.choice([0.3, 0.6, 0.9])),
            grain=float(rng.choice([0, 0.125, 1.0])),
            extra=int(rng.choice([0, 5, 40])),
            stop=["natural", "fixed"][rng.integers(2)],
            empty=bool(rng.integers(2)),
        )
    )
