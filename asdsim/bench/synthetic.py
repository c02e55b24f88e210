"""A trace of any size with the statistics of the committed real one, laid out as a graph; no tokens behind it."""

from __future__ import annotations

import numpy as np

from ..trace.graph import END, MISSING, Graph

# Of the captured path of traces/smollm2-layerskip (518 steps, K = 7); tests/bench holds them against it.
MATCH_FIRST, MATCH_AFTER_MATCH, MATCH_AFTER_MISMATCH = 0.770, 0.820, 0.771
"""Probability that a draft token is the target's choice: at position 0, and after a position that was or was not."""

REGRET = (
    0.001, 0.065, 0.127, 0.217, 0.300, 0.389, 0.482, 0.576, 0.713, 0.815, 0.997, 1.141, 1.311, 1.559, 1.989, 2.781,
    9.943,
)  # fmt: skip
"""Regret of mismatches, in logits: quantiles 0, 1/16 .. 1."""


def synthetic_graph(requests: int, steps: int, width: int, seed: int = 0) -> Graph:
    """Return requests of one captured path each, of ``steps`` blocks of K = ``width`` draft tokens.

    Nothing off the path is captured, so it is replayed in recorded order; the token limit is out of reach, so every
    setting walks every step.
    """
    rng = np.random.default_rng(seed)
    number = requests * steps
    match = np.zeros((number, width), bool)
    chance = np.full(number, MATCH_FIRST)
    for i in range(width):
        match[:, i] = rng.random(number) < chance
        chance = np.where(match[:, i], MATCH_AFTER_MATCH, MATCH_AFTER_MISMATCH)
    rows, position = np.nonzero(~match)
    drawn = np.interp(rng.random(len(rows)), np.linspace(0, 1, len(REGRET)), REGRET)
    regret = drawn.astype(np.float32).astype(np.float64)  # a difference of float32 logits
    counts = np.bincount(rows, minlength=number)
    mm_ptr = np.zeros(number + 1, np.int64)
    np.cumsum(counts, out=mm_ptr[1:])
    first = mm_ptr[:-1] + np.arange(number)
    accepted = np.full(number + len(rows), width, np.int32)
    accepted[np.arange(len(rows)) + rows] = position
    tokens = accepted + 1
    after = np.full(number + len(rows), MISSING, np.int32)
    after[first] = np.arange(1, number + 1)
    after[first[steps - 1 :: steps]] = END
    start = np.cumsum(tokens[first].reshape(requests, steps), axis=1) - tokens[first].reshape(requests, steps)
    path_ptr = np.arange(requests + 1, dtype=np.int64) * steps
    return Graph(
        request_ids=[f"synthetic/{index}" for index in range(requests)],
        root=path_ptr[:-1].astype(np.int32),
        limit=np.full(requests, steps * (width + 1) + width + 2, np.int32),
        step_request=np.repeat(np.arange(requests, dtype=np.int32), steps),
        drafted=np.full(number, width, np.int32),
        proposed=np.full(number, width, np.int32),
        start=start.ravel().astype(np.int32),
        mm_ptr=mm_ptr,
        mm_pos=position.astype(np.int32),
        mm_regret=regret,
        mm_score=regret / (width - position),
        mm_charge=regret.copy(),
        edge_next=after,
        edge_accepted=accepted,
        edge_tokens=tokens,
        edge_margin=np.full(len(after), np.inf),
        path_ptr=path_ptr,
        path_step=np.arange(number, dtype=np.int32),
        align_ptr=np.zeros(requests + 1, np.int64),
        align_step=np.zeros(0, np.int32),
        max_draft=width,
    )
