"""What capture hands to the trace store: one request, and its steps, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

NO_PARENT = -1
"""``parent_step_id`` and ``parent_accepted`` of a root step."""

FORBIDDEN_LOGIT = float(np.finfo(np.float32).min)
"""Stands for a logit of -inf, so that a trace holds finite numbers only. A draft token with this logit has infinite
regret: no setting accepts it, not even B = g = M = inf."""


@dataclass(frozen=True)
class RequestRecord:
    """One prompt and the conditions under which it was decoded.

    Attributes
    ----------
    request_id : str
        Unique in a trace, for example ``"gsm8k/0"``.
    task : str
        Name of the task that the prompt came from.
    prompt_ids : tuple of int
        Token ids of the whole prompt, chat template applied.
    prompt_text : str
        The user's text before the chat template.
    reference : str or None
        Reference answer, where the task has one.
    max_new_tokens : int
        Limit on generated tokens.
    eos_ids : tuple of int
        Token ids that end the request under ``stop == "natural"``.
    stop : {"natural", "fixed"}
        ``natural`` ends at an EOS or at the limit, ``fixed`` at the limit only.
    """

    request_id: str
    task: str
    prompt_ids: tuple[int, ...]
    prompt_text: str
    reference: str | None
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    stop: str = "natural"


@dataclass(frozen=True)
class StepRecord:
    """One verification: K draft tokens at a prefix, and what the target said of each.

    Arrays of K + 1 entries have one per draft position and one for the bonus row.

    Attributes
    ----------
    step_id : int
        Unique in its request; the captured path is 0..n-1.
    parent_step_id, parent_accepted : int
        The step and its number of accepted draft tokens that led to this prefix; ``NO_PARENT`` for the root.
    start_pos : int
        Tokens generated before this step.
    draft_ids : int32 (K,)
    argmax_ids : int32 (K + 1,)
        The target's choice per row, lowest id on a tie.
    draft_logits : float32 (K,)
        The target's logit of each draft token.
    ranks : int32 (K,)
        Rank of the draft token in its row, 0 for the largest logit; ties ranked by id.
    top_ids : int32 (K + 1, k)
    top_logits : float32 (K + 1, k)
        The k largest logits per row, ordered by (-logit, id).
    logsumexp : float32 (K + 1,)
        Natural logarithm of the sum of exp(logits), in nats.
    entropy : float32 (K + 1,)
        Shannon entropy of the target's softmax, in nats.
    draft_logprobs : float32 (K,) or None
        The drafter's own log-probability of each draft token, in nats.
    divergences : dict of str to float32 (K,)
        Divergences between draft and target distributions, where asked for: ``kl``, ``reverse_kl``, ``js``, ``tv``.
    draft_us, verify_us, select_us : float
        Microseconds spent drafting, verifying (target forward) and deciding.
    wave : int
        0 for steps met by decoding, n >= 1 for steps added by the n-th wave of ``cover``.
    """

    step_id: int
    parent_step_id: int
    parent_accepted: int
    start_pos: int
    draft_ids: npt.NDArray[np.int32]
    argmax_ids: npt.NDArray[np.int32]
    draft_logits: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logits: npt.NDArray[np.float32]
    logsumexp: npt.NDArray[np.float32]
    entropy: npt.NDArray[np.float32]
    draft_logprobs: npt.NDArray[np.float32] | None = None
    divergences: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    draft_us: float = 0.0
    verify_us: float = 0.0
    select_us: float = 0.0
    wave: int = 0

    @property
    def num_draft_tokens(self) -> int:
        """K of this step."""
        return int(self.draft_ids.shape[0])
