"""A target and a drafter that are functions of the token prefix: a hash of it gives logits with many near-ties."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asdsim.engines.protocol import Drafter, DrafterSession, Proposal, Target, TargetSession
from tests.support.toygraph import toy_row


class ToyTarget(Target):
    """Logits by hash; counts the prefixes it was asked to score."""

    def __init__(self, seed: int, vocab: int = 12, grain: float = 0.125) -> None:
        self.name, self.vocab_size, self.eos_ids = f"toy-{seed}", vocab, (vocab - 1,)
        self.seed, self.grain = seed, grain
        self.scored: list[tuple[int, ...]] = []

    def session(self, prompt_ids: Sequence[int]) -> TargetSession:
        return _Scores(self)

    def row(self, prefix: Sequence[int]) -> np.ndarray:
        """Return the logits (V,) after a prefix."""
        return toy_row(self.seed, tuple(prefix), self.vocab_size, self.grain)


class _Scores(TargetSession):
    def __init__(self, target: ToyTarget) -> None:
        self.target = target

    def score(self, prefix_ids: Sequence[int], draft_ids: Sequence[int]) -> np.ndarray:
        self.target.scored.append(tuple(prefix_ids))
        return np.stack([self.target.row([*prefix_ids, *draft_ids[:i]]) for i in range(len(draft_ids) + 1)])

    def fork(self) -> TargetSession:
        return self


class ToyDrafter(Drafter):
    """Agrees with the target with a set probability; K fixed, or varying with the prefix.

    With ``doubts`` it has probabilities, multiples of 1/8, and with ``tau`` it stops by itself as Transformers'
    assistant does: behind the first token of a smaller probability.
    """

    def __init__(
        self, target: ToyTarget, agree: float, widths: Sequence[int] = (), doubts: bool = False, tau: float = 0.0
    ) -> None:
        self.name, self.vocab_size = f"toy-drafter-{agree}", target.vocab_size
        self.target, self.agree, self.widths, self.doubts, self.tau = target, agree, list(widths), doubts, tau

    def session(self, prompt_ids: Sequence[int]) -> DrafterSession:
        return _Drafts(self)


class _Drafts(DrafterSession):
    def __init__(self, drafter: ToyDrafter) -> None:
        self.drafter = drafter

    def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        drafter, target = self.drafter, self.drafter.target
        rng = np.random.default_rng([target.seed, 77, len(prefix_ids), *prefix_ids])
        width = min(num_draft_tokens, int(rng.choice(drafter.widths)) if drafter.widths else num_draft_tokens)
        ids: list[int] = []
        sure: list[np.float32] = []
        for _ in range(width):
            row = target.row([*prefix_ids, *ids])
            ids.append(int(row.argmax() if rng.random() < drafter.agree else rng.integers(target.vocab_size)))
            if drafter.doubts:
                sure.append(np.float32(np.log(rng.integers(1, 9) / 8)))
                if drafter.tau and float(sure[-1]) < math.log(drafter.tau):
                    break
        return Proposal(ids, np.array(sure, np.float32) if drafter.doubts else None)

    def fork(self) -> DrafterSession:
        return self
