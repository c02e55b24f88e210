"""Random step graphs with no model: what a hash of the prefix says is drafted and scored there.

Steps are functions of the prefix, as with real greedy decoding, so prefixes that merge stand on one step. Regrets are
multiples of 1/8 (many near-ties and exact ties) or arbitrary floats.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from asdsim.records import NO_PARENT, RequestRecord, StepRecord

TOP_K = 8


@lru_cache(1 << 16)
def toy_row(seed: int, prefix: tuple[int, ...], vocab: int, grain: float) -> np.ndarray:
    """Return the logits float32 (vocab,) that a hash of the prefix gives; read only, since they are kept."""
    row = np.random.default_rng([seed, len(prefix), *prefix]).normal(0.0, 2.0, vocab)
    row = (np.round(row / grain) * grain if grain else row).astype(np.float32)
    row.flags.writeable = False
    return row


def toy_step(
    seed: int, prefix: tuple[int, ...], *, vocab: int, ks: tuple[int, ...], agree: float, grain: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (draft_ids (K,), logits float32 (K + 1, vocab)) at a prefix."""
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    width = int(rng.choice(ks))
    logits = rng.normal(0.0, 1.0, (width + 1, vocab)) * 2.0
    if grain:
        logits = np.round(logits / grain) * grain
    logits = logits.astype(np.float32)
    best = logits.argmax(axis=1)
    draft = np.where(rng.random(width) < agree, best[:width], rng.integers(0, vocab, width))
    return draft.astype(np.int32), logits


def record_step(
    step_id: int, parent: int, parent_accepted: int, start: int, draft: np.ndarray, logits: np.ndarray, wave: int = 0
) -> StepRecord:
    """Turn toy logits into what a trace stores, in plain numpy."""
    width = len(draft)
    vocab = logits.shape[1]
    order = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits), axis=1)
    top = order[:, :TOP_K]
    ranks = np.array([int(np.flatnonzero(order[i] == draft[i])[0]) for i in range(width)], np.int32)
    wide = logits.astype(np.float64)
    lse = np.log(np.exp(wide).sum(axis=1))
    prob = np.exp(wide - lse[:, None])
    entropy = -(prob * np.log(np.where(prob > 0.0, prob, 1.0))).sum(axis=1)
    return StepRecord(
        step_id=step_id,
        parent_step_id=parent,
        parent_accepted=parent_accepted,
        start_pos=start,
        draft_ids=draft.astype(np.int32),
        argmax_ids=order[:, 0].astype(np.int32),
        draft_logits=logits[np.arange(width), draft],
        ranks=ranks,
        top_ids=top.astype(np.int32),
        top_logits=np.take_along_axis(logits, top, axis=1),
        logsumexp=lse.astype(np.float32),
        entropy=entropy.astype(np.float32),
        wave=wave,
    )


def with_draft_columns(step: StepRecord, rng: np.random.Generator) -> StepRecord:
    """Return the step with random draft log-probabilities and divergences."""
    width = step.num_draft_tokens
    drawn = rng.exponential(0.3, (5, width)).astype(np.float32)
    drawn[3:] = np.minimum(drawn[3:], 1.0)
    names = ("kl", "reverse_kl", "js", "tv")
    return replace(step, draft_logprobs=-drawn[0], divergences=dict(zip(names, drawn[1:], strict=True)))


def outcomes(draft: list[int], choice: list[int], room: int, eos: tuple[int, ...]) -> list[tuple[int, list[int], bool]]:
    """Return (accepted, tokens, ended) for every way in which a block can end."""
    ends: list[tuple[int, list[int], bool]] = []
    for i, token in enumerate(draft):
        if token != choice[i]:
            commit = [*draft[:i], choice[i]]
            ends.append((i, commit, choice[i] in eos or len(commit) == room))
        if token in eos or i + 1 == room:
            ends.append((i + 1, draft[: i + 1], True))
            return ends
    commit = [*draft, choice[len(draft)]]
    ends.append((len(draft), commit, commit[-1] in eos or len(commit) == room))
    return ends


def toy_requests(
    seed: int,
    *,
    requests: int = 3,
    vocab: int = 12,
    ks: tuple[int, ...] = (3,),
    limit: int = 20,
    agree: float = 0.6,
    grain: float = 0.125,
    extra: int = 20,
    stop: str = "natural",
    empty: bool = False,
    shift: float = 0.0,
    columns: bool = False,
) -> list[tuple[RequestRecord, list[StepRecord]]]:
    """Return requests with their strict path (wave 0) and ``extra`` further steps each (wave 1).

    ``shift`` is added to all logits; ``columns`` fills what only a drafter with a distribution can.
    """
    rng = np.random.default_rng(seed)
    eos = (vocab - 1,)
    made = []
    for number in range(requests):
        record = RequestRecord(f"toy/{number}", "toy", (1, 2, number + 3), f"prompt {number}", None, limit, eos, stop)
        if empty and number == 1:
            made.append((record, []))
            continue
        ends = eos if stop == "natural" else ()
        tree = _Tree(seed * 1000 + number, vocab=vocab, ks=ks, agree=agree, grain=grain)
        tree.shift, tree.columns = np.float32(shift), columns
        here, parent, accepted, ended = (), NO_PARENT, NO_PARENT, False
        while not ended:
            parent = tree.add(here, parent, accepted, 0)
            accepted, commit, ended = tree.outcomes(parent, limit, ends)[0]
            here = (*here, *commit)
        for _ in range(extra):
            parent = int(rng.integers(len(tree.steps)))
            options = tree.outcomes(parent, limit, ends)
            accepted, commit, ended = options[int(rng.integers(len(options)))]
            reached = (*tree.content[parent][0], *commit)
            if not ended and reached not in tree.standing:
                tree.add(reached, parent, accepted, 1)
        made.append((record, tree.steps))
    return made


class _Tree:
    """The steps of one request while they are made."""

    def __init__(self, seed: int, **toy: Any) -> None:
        self.seed, self.toy = seed, toy
        self.shift, self.columns = np.float32(0.0), False
        self.steps: list[StepRecord] = []
        self.standing: dict[tuple[int, ...], int] = {}
        self.content: dict[int, tuple[tuple[int, ...], list[int], list[int]]] = {}

    def add(self, prefix: tuple[int, ...], parent: int, accepted: int, wave: int) -> int:
        """Record the step at a prefix and return its id."""
        draft, logits = toy_step(self.seed, prefix, **self.toy)
        step = record_step(len(self.steps), parent, accepted, len(prefix), draft, logits + self.shift, wave)
        if self.columns:
            step = with_draft_columns(step, np.random.default_rng([self.seed, 5, len(prefix), *prefix]))
        self.steps.append(step)
        self.standing[prefix] = step.step_id
        self.content[step.step_id] = (prefix, draft.tolist(), step.argmax_ids.tolist())
        return step.step_id

    def outcomes(self, step: int, limit: int, eos: tuple[int, ...]) -> list[tuple[int, list[int], bool]]:
        """Return the ways in which a recorded step can end."""
        prefix, draft, choice = self.content[step]
        return outcomes(draft, choice, limit - len(prefix), eos)
