"""The currency of all rooms: one request and its steps as plain arrays, and the tables that they make up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
        0 for steps met by decoding, n >= 1 for steps added by the n-th wave of its group in ``cover``.
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


class StepTables(Protocol):
    """What :func:`asdsim.trace.graph.build_graph` reads; a :class:`~asdsim.trace.reader.Trace` has it too."""

    @property
    def step_request(self) -> npt.NDArray[np.int32]: ...

    @property
    def pos_ptr(self) -> npt.NDArray[np.int64]: ...

    def column(self, table: str, name: str) -> npt.NDArray[Any]: ...

    def request_records(self) -> list[RequestRecord]: ...

    def steps_of(self, request_id: str) -> list[StepRecord]: ...

    def check_length(self, K: int) -> None:
        """Refuse a draft length to which the recorded blocks cannot be cut."""
        ...


class MemoryTrace:
    """Requests with their steps, without files.

    Parameters
    ----------
    requests : sequence of (RequestRecord, sequence of StepRecord)
        Steps in the order of their ids.
    """

    def __init__(self, requests: Sequence[tuple[RequestRecord, Sequence[StepRecord]]]) -> None:
        self._requests = [record for record, _ in requests]
        self._steps = {record.request_id: list(steps) for record, steps in requests}
        self._flat = [step for record in self._requests for step in self._steps[record.request_id]]
        counts = [len(self._steps[record.request_id]) for record in self._requests]
        self.step_request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        widths = np.array([step.num_draft_tokens for step in self._flat], np.int64)
        self.pos_ptr = np.concatenate([[0], np.cumsum(widths + 1)]).astype(np.int64)
        self._columns: dict[tuple[str, str], npt.NDArray[Any]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that it holds."""
        return len(self._requests)

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt, int64 (R,)."""
        return np.array([len(record.prompt_ids) for record in self._requests], np.int64)

    def request_records(self) -> list[RequestRecord]:
        """Return the requests in order."""
        return self._requests

    def steps_of(self, request_id: str) -> list[StepRecord]:
        """Return the steps of one request."""
        return self._steps[request_id]

    def check_length(self, K: int) -> None:
        """Accept any: nothing is known of the drafter."""

    def column(self, table: str, name: str) -> npt.NDArray[Any]:
        """Return a column of ``steps`` or ``positions``; missing ids are -1 and missing floats NaN."""
        key = table, name
        if key not in self._columns:
            self._columns[key] = self._make(table, name)
        return self._columns[key]

    def _make(self, table: str, name: str) -> npt.NDArray[Any]:
        if table == "steps":
            return np.array([getattr(step, name) for step in self._flat], np.int32)
        field, missing, kind = _POSITIONS[name]
        parts = []
        for step in self._flat:
            part = step.divergences.get(name) if field == "divergences" else getattr(step, field)
            if part is None:  # a column that this drafter cannot fill
                part = np.full(step.num_draft_tokens, np.nan, kind)
            parts.append(part if missing is None else np.append(part, np.array(missing, kind)))
        if parts:
            return np.concatenate(parts)
        return np.zeros((0, 1) if name.startswith("top_") else 0, kind)


_POSITIONS: dict[str, tuple[str, float | None, Any]] = {
    "draft_id": ("draft_ids", -1, np.int32),
    "argmax_id": ("argmax_ids", None, np.int32),
    "draft_logit": ("draft_logits", np.nan, np.float32),
    "top_ids": ("top_ids", None, np.int32),
    "top_logits": ("top_logits", None, np.float32),
    "logsumexp": ("logsumexp", None, np.float32),
    "entropy": ("entropy", None, np.float32),
    "rank": ("ranks", -1, np.int32),
    "draft_logprob": ("draft_logprobs", np.nan, np.float32),
    **dict.fromkeys(("kl", "reverse_kl", "js", "tv"), ("divergences", np.nan, np.float32)),
}
