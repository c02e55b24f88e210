"""A trace that was never on disk: what ``build_graph`` and the oracle ask of one, held in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asdsim.trace.records import RequestRecord, StepRecord
from tests.support.toygraph import TOP_K

Made = list[tuple[RequestRecord, list[StepRecord]]]


class DuckTrace:
    """The columns, records and offsets of a trace, from records."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.path = "in memory"
        numbered = [(number, step) for number, (_, steps) in enumerate(made) for step in steps]
        steps = [step for _, step in numbered]
        self.step_request = np.array([number for number, _ in numbered], np.int32)
        self._columns: dict[tuple[str, str], np.ndarray] = {}
        for name, get, dtype in (
            ("num_draft_tokens", lambda step: step.num_draft_tokens, np.int32),
            ("start_pos", lambda step: step.start_pos, np.int32),
            ("step_id", lambda step: step.step_id, np.int32),
            ("parent_step_id", lambda step: step.parent_step_id, np.int32),
            ("parent_accepted", lambda step: step.parent_accepted, np.int32),
            ("wave", lambda step: step.wave, np.int16),
        ):
            self._columns["steps", name] = np.array([get(step) for step in steps], dtype)
        widths = self._columns["steps", "num_draft_tokens"]
        self.pos_ptr = np.concatenate([[0], np.cumsum(widths + 1)]).astype(np.int64)
        self._positions("draft_id", steps, lambda step: [*step.draft_ids, -1], np.int32)
        self._positions("argmax_id", steps, lambda step: step.argmax_ids, np.int32)
        self._positions("draft_logit", steps, lambda step: [*step.draft_logits, np.nan], np.float32)
        self._columns["positions", "top_logits"] = (
            np.concatenate([step.top_logits for step in steps]) if steps else np.zeros((0, TOP_K), np.float32)
        )

    def _positions(self, name: str, steps: Sequence[StepRecord], get: Callable[[StepRecord], Any], dtype: type) -> None:
        parts = [np.asarray(get(step), dtype) for step in steps]
        self._columns["positions", name] = np.concatenate(parts) if parts else np.zeros(0, dtype)

    def column(self, table: str, name: str) -> np.ndarray:
        """Return one column."""
        return self._columns[table, name]

    def request_records(self) -> list[RequestRecord]:
        """Return the requests in order."""
        return [record for record, _ in self.made]

    def steps_of(self, request_id: str) -> list[StepRecord]:
        """Return the steps of one request in order."""
        return next(steps for record, steps in self.made if record.request_id == request_id)
