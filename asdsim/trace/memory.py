"""Records in memory, seen as the tables that the graph is laid out from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .records import RequestRecord, StepRecord


class StepTables(Protocol):
    """What :func:`asdsim.trace.graph.build_graph` reads; a :class:`~asdsim.trace.reader.Trace` has it too."""

    @property
    def step_request(self) -> npt.NDArray[np.int32]: ...

    @property
    def pos_ptr(self) -> npt.NDArray[np.int64]: ...

    def column(self, table: str, name: str) -> npt.NDArray[Any]: ...

    def request_records(self) -> list[RequestRecord]: ...

    def steps_of(self, request_id: str) -> list[StepRecord]: ...


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

    def request_records(self) -> list[RequestRecord]:
        """Return the requests in order."""
        return self._requests

    def steps_of(self, request_id: str) -> list[StepRecord]:
        """Return the steps of one request."""
        return self._steps[request_id]

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
