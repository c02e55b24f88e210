"""What the decoding loop asks of a target model and of a drafter.

Both decode greedily, so both are functions of the token prefix. Subclass the protocols to inherit their defaults; a toy
for a test then is one ``score`` and one ``propose`` in numpy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import CaptureError

Logits: TypeAlias = Any
"""A torch tensor or numpy array of floats, (rows, vocabulary), before any softmax or logits processor."""


@dataclass(frozen=True)
class Proposal:
    """A draft block.

    Attributes
    ----------
    ids : list of int (K,)
        Draft tokens; fewer than asked for, or none, where the drafter has no more to offer.
    logprobs : float32 (K,) or None
        The drafter's log-probability of each, in nats.
    logits : Logits (K, V) or None
        The drafter's logit rows, kept only for divergences.
    """

    ids: list[int]
    logprobs: npt.NDArray[np.float32] | None = None
    logits: Logits | None = None


class TargetSession(Protocol):
    """One request at the target. May hold a KV cache; its answers must not depend on what was asked before."""

    def score(self, prefix_ids: Sequence[int], draft_ids: Sequence[int]) -> Logits:
        """Return logits (K + 1, V): row i after ``prefix_ids`` and ``draft_ids[:i]``."""
        ...

    def states(self, ids: Sequence[int], taps: Sequence[int] | None = None) -> Any:
        """Return hidden states (n, taps x d) at each of ``ids``; only what was not run before is run.

        ``taps`` count as Transformers does: 0 the embeddings, i what layer i - 1 puts out, the last behind the final
        norm. None means all that are tapped.
        """
        raise CaptureError("this target shows no hidden states", fix="use a drafter that needs none")

    def fork(self) -> TargetSession:
        """Return an independent session in the same state."""
        return copy.deepcopy(self)


class Target(Protocol):
    """The model whose greedy choices count.

    Attributes
    ----------
    name : str
    vocab_size : int
        Width of a logit row.
    eos_ids : tuple of int
        Tokens that end a request.
    max_positions : int or None
        Longest sequence that the model takes, None where it has no limit.
    """

    name: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_positions: int | None = None

    def session(self, prompt_ids: Sequence[int]) -> TargetSession:
        """Return a fresh session for one request."""
        ...

    def score_many(self, prefixes: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> list[Logits]:
        """Score many blocks that have nothing to do with each other; logits (K_n + 1, V) for each."""
        return [self.session(prefix).score(prefix, draft) for prefix, draft in zip(prefixes, drafts, strict=True)]

    def pooled(self, max_bytes: int) -> ManyScorer:
        """Return a ``score_many`` that may keep ``max_bytes`` of KV cache for prefixes it has met."""
        return self

    def describe(self) -> dict[str, Any]:
        """Return what identifies this model, for the manifest."""
        return {"name": self.name, "vocab_size": self.vocab_size}

    def synchronize(self) -> None:
        """Wait until the device is done, so that a clock can be read."""
        return None


class DrafterSession(Protocol):
    """One request at the drafter."""

    def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        """Return at most ``num_draft_tokens`` tokens to follow ``prefix_ids``."""
        ...

    def fork(self) -> DrafterSession:
        """Return an independent session in the same state."""
        return copy.deepcopy(self)

    def fork_beside(self, target_session: TargetSession) -> DrafterSession:
        """Return a fork that reads from ``target_session``, where this one read from its twin."""
        return self.fork()


class ManyScorer(Protocol):
    """What a batch asks of a target."""

    def score_many(self, prefixes: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> list[Logits]:
        """Score many blocks that have nothing to do with each other; logits (K_n + 1, V) for each."""
        ...


class ManyProposer(Protocol):
    """What a batch asks of a drafter."""

    def propose_many(self, prefixes: Sequence[Sequence[int]], num_draft_tokens: int) -> list[Proposal]:
        """Propose for many prefixes that have nothing to do with each other."""
        ...


class Drafter(Protocol):
    """Whatever guesses the target's next tokens.

    Attributes
    ----------
    name : str
        As on the command line.
    vocab_size : int or None
        None where every proposed token was copied from the prefix.
    max_draft_tokens : int or None
        Largest K, None where there is no limit.
    max_positions : int or None
        Longest sequence, None where there is no limit.
    trained_positions : int or None
        Longest sequence that it was made for; beyond, it drafts, but may draft badly.
    memoryless : bool
        True when a proposal is a function of the prefix alone; otherwise a trace cannot be completed by ``cover``.
    has_logits : bool
        True when a proposal can carry the drafter's logit rows.
    reads_target : bool
        True when a proposal is made from the target's hidden states.
    """

    name: str
    vocab_size: int | None = None
    max_draft_tokens: int | None = None
    max_positions: int | None = None
    trained_positions: int | None = None
    memoryless: bool = True
    has_logits: bool = False
    reads_target: bool = False

    def session(self, prompt_ids: Sequence[int]) -> DrafterSession:
        """Return a fresh session for one request."""
        ...

    def session_beside(self, prompt_ids: Sequence[int], target_session: TargetSession) -> DrafterSession:
        """Return a fresh session that may read the target's hidden states from the session that verifies."""
        return self.session(prompt_ids)

    def propose_many(self, prefixes: Sequence[Sequence[int]], num_draft_tokens: int) -> list[Proposal]:
        """Propose for many prefixes that have nothing to do with each other."""
        return [self.session(prefix).propose(prefix, num_draft_tokens) for prefix in prefixes]

    def pooled(self, max_bytes: int) -> ManyProposer:
        """Return a ``propose_many`` that may keep ``max_bytes`` of KV cache for prefixes it has met."""
        return self

    def pooled_beside(self, target: ManyScorer, max_bytes: int) -> ManyProposer:
        """Return a ``propose_many`` that may read the target's hidden states from the ``target`` of the batch."""
        return self.pooled(max_bytes)

    def describe(self) -> dict[str, Any]:
        """Return what identifies this drafter and its settings, for the manifest."""
        return {"name": self.name}
