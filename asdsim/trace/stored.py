"""A validated trace in memory: its tables, and how to get at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..records import RequestRecord, StepRecord
from .manifest import Manifest
from .schema import BY_NAME, DIVERGENCES, TABLES
from .tables import Array, to_numpy
from .vocabulary import Vocabulary, read_vocabulary

BLOCK_DRAFTERS = ("dspark",)
"""Kinds of drafters that draft all positions of a block at once, so that a shorter block is another draft."""

RECAPTURE = "the trace is damaged or was written by something else: restore it from a copy, or capture again"


def thinned(first: int, number: int, total: int, most: int | None) -> slice | npt.NDArray[np.int64]:
    """Return which rows of ``first`` .. ``first + number - 1`` to keep to thin ``total`` rows to about ``most``.

    A row is kept if the fractional part of its number times the golden ratio is small. These fractions are evenly
    spread, those of every n-th row included, so no place within a request is preferred, however regular requests are.
    """
    if most is None or total <= most:
        return slice(None)
    fractions = np.arange(first, first + number, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # of 2^64
    return np.flatnonzero(fractions < np.uint64((most << 64) // total))


class Source:
    """What is known of a trace without its rows."""

    path: Path
    manifest: Manifest

    @property
    def num_requests(self) -> int:
        """Requests that it holds."""
        raise NotImplementedError

    @property
    def subject(self) -> str:
        """What figures of this trace stand for, in one line: target, drafter, K and requests."""
        target, drafter = (str(model.get("name", "?")) for model in (self.manifest.target, self.manifest.drafter))
        number = self.num_requests
        return f"{target}, drafter {drafter}, K = {self.manifest.K}, {number} request{'' if number == 1 else 's'}"

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """Text of the token ids that occur; None where the trace has none."""
        return read_vocabulary(self.path, self.manifest)

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt, int64 (R,)."""
        raise NotImplementedError

    def request_ids(self) -> list[str]:
        """Return the ids of all requests, in the order of capture."""
        raise NotImplementedError

    def request_records(self) -> list[RequestRecord]:
        """Return all requests as records."""
        raise NotImplementedError

    def step_columns(
        self, names: Sequence[str], most: int | None = None
    ) -> tuple[dict[str, Array], npt.NDArray[np.int32]]:
        """Return some columns of ``steps`` as :meth:`Trace.column` does, and the row of each step's request.

        With ``most``, of about so many steps, spread evenly over the trace: see :func:`thinned`.
        """
        raise NotImplementedError

    def check_length(self, K: int) -> None:
        """Refuse a draft length to which the recorded blocks cannot be cut.

        Raises
        ------
        TraceError
            If the blocks are shorter, or their drafter would have proposed other tokens in a shorter block.
        """
        longest, drafter = self.manifest.num_draft_tokens, self.manifest.drafter
        if longest < K:
            fix = f"give at most {longest}, or capture with --num-draft-tokens {K}"
            raise TraceError(f"K={K} is longer than the recorded blocks of {longest}", where=str(self.path), fix=fix)
        if drafter.get("kind") in BLOCK_DRAFTERS and longest > K:
            raise TraceError(
                f"blocks of {drafter['kind']} cannot be cut to K={K}: it drafts all positions at once, and an engine "
                "asked for fewer may run a shorter block, which has other logits", where=str(self.path),
                fix=f"capture with --num-draft-tokens {K}",
            )  # fmt: skip


@dataclass
class Trace(Source):
    """A validated trace, or the part of one that belongs to some requests.

    Attributes
    ----------
    path : Path
        Its directory.
    manifest : Manifest
    requests, steps, positions : pyarrow.Table
        Sorted: requests in the order of capture, steps by (request, step_id), positions by (request, step_id, i).
        Columns as in :mod:`asdsim.trace.schema`.
    step_request : int32 (S,)
        Row of ``requests`` of each step.
    pos_ptr : int64 (S + 1,)
        Step s has the rows ``pos_ptr[s] .. pos_ptr[s + 1] - 1`` of ``positions``: K + 1 of them.
    step_ptr : int64 (R + 1,)
        Request r has the rows ``step_ptr[r] .. step_ptr[r + 1] - 1`` of ``steps``.
    first : int
        Place of its first request in the order of capture; 0 for a whole trace.
    """

    path: Path
    manifest: Manifest
    requests: pa.Table
    steps: pa.Table
    positions: pa.Table
    step_request: npt.NDArray[np.int32]
    pos_ptr: npt.NDArray[np.int64]
    step_ptr: npt.NDArray[np.int64]
    first: int = 0
    _origin: dict[str, Origin | None] = field(default_factory=dict, repr=False)
    _columns: dict[tuple[str, str], Array] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"Trace({str(self.path)!r}: {self.requests.num_rows} requests, {self.steps.num_rows} steps)"

    def column(self, table: str, name: str) -> Array:
        """Return one column as a read-only numpy array.

        A missing integer is -1, a missing float NaN, a missing string None; ``top_ids`` and ``top_logits`` are [n, k];
        lists and strings come as objects.

        Raises
        ------
        TraceError
            If there is no such column.
        """
        key = (table, name)
        if key not in BY_NAME:
            known = ", ".join(column for of, column in BY_NAME if of == table) or ", ".join(TABLES)
            raise TraceError(f"no column {name!r} in table {table!r}", fix=f"known: {known}")
        if key not in self._columns:
            values = to_numpy(getattr(self, table)[name])
            values.flags.writeable = False
            self._columns[key] = values
        return self._columns[key]

    @property
    def num_requests(self) -> int:
        """Requests that it holds."""
        return int(self.requests.num_rows)

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt, int64 (R,)."""
        return np.array([len(ids) for ids in self.column("requests", "prompt_ids")], np.int64)

    @cached_property
    def _request_rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.request_ids())}

    def _is_empty(self, name: str) -> bool:
        return bool(self.positions[name].null_count == self.positions.num_rows)

    def request_ids(self) -> list[str]:
        """Return the ids of all requests, in the order of capture."""
        return list(self.column("requests", "request_id"))

    def step_columns(
        self, names: Sequence[str], most: int | None = None
    ) -> tuple[dict[str, Array], npt.NDArray[np.int32]]:
        """Return some columns of ``steps``, and the row of each step's request; of about ``most`` steps."""
        total = self.steps.num_rows
        kept = thinned(0, total, total, most)
        return {name: self.column("steps", name)[kept] for name in names}, self.step_request[kept]

    def request_row(self, request_id: str) -> int:
        """Return the row of a request in ``requests``.

        Raises
        ------
        TraceError
            If there is no such request.
        """
        if request_id not in self._request_rows:
            raise TraceError(f"no request {request_id!r}", where=str(self.path), fix="see `asdsim inspect`")
        return self._request_rows[request_id]

    def where(self, table: str, row: int) -> str:
        """Say where a row stands: shard, row in it, request, step, position."""
        origin = self._origin.get(table)
        parts = [origin.locate(row)] if origin else []
        if 0 <= row < getattr(self, table).num_rows:
            parts.append(f"request {str(getattr(self, table)['request_id'][row])!r}")
            if table != "requests":
                parts.append(f"step {self.column(table, 'step_id')[row]}")
            if table == "positions":
                parts.append(f"position {self.column(table, 'i')[row]}")
        return ", ".join(parts)

    def request_records(self) -> list[RequestRecord]:
        """Return all requests as records."""
        names = ("request_id", "task", "prompt_text", "reference", "max_new_tokens", "stop", "prompt_ids", "eos_ids")
        return request_records({name: self.column("requests", name) for name in names})

    def steps_of(self, request_id: str) -> list[StepRecord]:
        """Return the steps of one request as records, by step_id.

        Raises
        ------
        TraceError
            If there is no such request.
        """
        request = self.request_row(request_id)
        return [self._step(row) for row in range(self.step_ptr[request], self.step_ptr[request + 1])]

    def _step(self, row: int) -> StepRecord:
        lo, hi = int(self.pos_ptr[row]), int(self.pos_ptr[row + 1])

        def rows(name: str, count: int = 0) -> Array:
            return self.column("positions", name)[lo : hi - count].copy()

        def optional(name: str) -> npt.NDArray[np.float32] | None:
            if self._is_empty(name):
                return None
            values = rows(name, 1)
            return None if len(values) and np.isnan(values).all() else values

        def whole(name: str) -> int:
            return int(self.column("steps", name)[row])

        def microseconds(name: str) -> float:
            return float(self.column("steps", name)[row])

        return StepRecord(
            step_id=whole("step_id"),
            parent_step_id=whole("parent_step_id"),
            parent_accepted=whole("parent_accepted"),
            start_pos=whole("start_pos"),
            draft_ids=rows("draft_id", 1),
            argmax_ids=rows("argmax_id"),
            draft_logits=rows("draft_logit", 1),
            ranks=rows("rank", 1),
            top_ids=rows("top_ids"),
            top_logits=rows("top_logits"),
            logsumexp=rows("logsumexp"),
            entropy=rows("entropy"),
            draft_logprobs=optional("draft_logprob"),
            divergences={name: values for name in DIVERGENCES if (values := optional(name)) is not None},
            draft_us=microseconds("draft_us"),
            verify_us=microseconds("verify_us"),
            select_us=microseconds("select_us"),
            wave=whole("wave"),
        )


def request_records(columns: Mapping[str, Array]) -> list[RequestRecord]:
    """Return rows of ``requests`` as records."""
    names = ("request_id", "task", "prompt_text", "reference", "max_new_tokens", "stop", "prompt_ids", "eos_ids")
    return [
        RequestRecord(
            request_id=request_id,
            task=task,
            prompt_ids=tuple(prompt_ids.tolist()),
            prompt_text=text,
            reference=reference,
            max_new_tokens=int(limit),
            eos_ids=tuple(eos_ids.tolist()),
            stop=stop,
        )
        for request_id, task, text, reference, limit, stop, prompt_ids, eos_ids in zip(
            *(columns[name] for name in names), strict=True
        )
    ]


@dataclass(frozen=True)
class Part:
    """Some rows of one table as they were read; without a shard, what a writer is about to store."""

    table: pa.Table
    shard: str = ""
    first: int = 0  # row of the shard that the first one is

    def locate(self, row: int) -> str:
        """Return shard and row in it; empty without a shard."""
        return f"{self.shard} row {self.first + row}" if self.shard else ""


@dataclass(frozen=True)
class Origin:
    """From a sorted row back to the shard and the row that it came from."""

    shards: list[tuple[str, int]]  # name, and row of the shard that a part begins with
    starts: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64] | None

    @classmethod
    def of(cls, parts: list[Part], order: npt.NDArray[np.int64] | None) -> Origin | None:
        """Return where the rows of parts went; None without parts or shards."""
        if not parts or not parts[0].shard:
            return None
        counts = [part.table.num_rows for part in parts]
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        return cls([(part.shard, part.first) for part in parts], starts, order)

    def locate(self, row: int) -> str:
        """Return shard and row in it."""
        raw = int(self.order[row]) if self.order is not None else row
        part = int(np.searchsorted(self.starts, raw, side="right")) - 1
        name, first = self.shards[part]
        return f"{name} row {first + raw - int(self.starts[part])}"
