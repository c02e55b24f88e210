"""Rows of ``positions``, a part at a time: whether each is valid, and where it belongs.

A part is some rows of a shard. Only one is needed at a time, so a trace can be checked in little memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..records import FORBIDDEN_LOGIT
from .schema import DIVERGENCES
from .stored import RECAPTURE, Origin, Part
from .tables import is_valid, to_numpy

if TYPE_CHECKING:
    from .stored import Trace

Mask = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]

NO_STEP = "the row fits no step: rows of a step must be 0 .. K, each once"


def request_rows(part: Part, known: dict[str, int], folder: Any) -> npt.NDArray[np.int32]:
    """Return the row of ``requests`` of each row of a part.

    Raises
    ------
    TraceError
        If a row names a request that the trace does not hold.
    """
    keys = part.table["request_id"].combine_chunks()
    if isinstance(keys, pa.ChunkedArray):  # no row at all
        return np.empty(0, np.int32)
    lookup = np.array([known.get(name, -1) for name in keys.dictionary.to_pylist()] or [-1], np.int32)
    rows = lookup[keys.indices.to_numpy()] if len(keys) else np.empty(0, np.int32)
    lost = np.flatnonzero(rows < 0)
    if lost.size:
        row = int(lost[0])
        where = part.locate(row)
        raise TraceError(
            f"belongs to request {str(keys[row])!r}, which the trace does not hold",
            where=f"{folder}: {where}" if where else str(folder),
            fix=RECAPTURE,
        )
    return rows


class Positions:
    """Check the rows of ``positions`` part by part, and put them where their steps have them.

    Parameters
    ----------
    trace : Trace
        With its requests and steps, sorted and checked.
    known : dict of str to int
        Row of each request.
    rows : int
        Rows that all parts together hold.
    """

    def __init__(self, trace: Trace, known: dict[str, int], rows: int) -> None:
        self.trace, self.known = trace, known
        self.total = int(trace.pos_ptr[-1])
        # Of rows + 1 places one stays free: no need to hold more, whatever K the steps claim.
        self.taken = np.zeros(min(self.total, rows + 1), bool)
        self.parts: list[Part] = []
        self.places: list[Int64] = []
        self.done = 0
        self.in_order = True

    def add(self, part: Part) -> None:
        """Check some rows.

        Raises
        ------
        TraceError
            At the first invalid row.
        """
        rows = _PartRows(self.trace, part)
        place, bonus = self._place(rows)
        _check_nulls(rows, bonus)
        _check_logits(rows)
        _check_drafts(rows, ~bonus)
        _check_sums(rows, ~bonus)
        self.in_order &= bool((place == np.arange(self.done, self.done + len(place))).all())
        self.parts.append(part)
        self.places.append(place)
        self.done += len(place)

    def finish(self) -> tuple[pa.Table, Origin | None]:
        """Return all rows in order, and where they came from.

        Raises
        ------
        TraceError
            If a row is missing.
        """
        free = np.flatnonzero(~self.taken)
        if free.size:
            trace, place = self.trace, int(free[0])
            step = int(np.searchsorted(trace.pos_ptr, place, side="right")) - 1
            raise TraceError(
                f"position {place - int(trace.pos_ptr[step])} of the step is missing",
                where=f"{trace.path}: {trace.where('steps', step)}",
                fix=RECAPTURE,
            )
        if not self.parts:
            return self.trace.positions, None
        table = pa.concat_tables([part.table for part in self.parts]).unify_dictionaries().combine_chunks()
        order = None
        if not self.in_order:
            order = np.empty(self.total, np.int64)
            order[np.concatenate(self.places)] = np.arange(self.total)
            table = table.take(pa.array(order)).combine_chunks()
        return table, Origin.of(self.parts, order)

    def _place(self, rows: _PartRows) -> tuple[Int64, Mask]:
        """Return the place of each row among all positions, and which are bonus rows."""
        trace = self.trace
        request = request_rows(rows.part, self.known, trace.path)
        step_id, i = rows.column("step_id").astype(np.int64), rows.column("i").astype(np.int64)
        first = trace.step_ptr[request]
        fits = (step_id >= 0) & (step_id < trace.step_ptr[request + 1] - first)
        rows.refuse(~fits, NO_STEP)
        step = first + step_id
        begin, end = trace.pos_ptr[step], trace.pos_ptr[step + 1]
        place = begin + i
        twice = (i < 0) | (place >= end)
        inside = np.minimum(place, len(self.taken) - 1)
        twice |= (place < len(self.taken)) & self.taken[inside]
        if not (np.diff(place) > 0).all():
            order = np.argsort(place, kind="stable")
            twice[order[1:]] |= np.diff(place[order]) == 0
        rows.refuse(twice, NO_STEP)
        self.taken[place[place < len(self.taken)]] = True
        return place, place == end - 1


@dataclass
class _PartRows:
    """Columns of a part as numpy arrays, and how to refuse one of its rows."""

    trace: Trace
    part: Part

    def __post_init__(self) -> None:
        self._columns: dict[str, npt.NDArray[Any]] = {}

    def column(self, name: str) -> npt.NDArray[Any]:
        if name not in self._columns:
            self._columns[name] = to_numpy(self.part.table[name])
        return self._columns[name]

    def known(self, name: str) -> Mask:
        return is_valid(self.part.table[name])

    def refuse(self, bad: Any, what: str, *values: str) -> None:
        """Raise for the first row where ``bad`` holds; ``{}`` in ``what`` takes the named columns of that row."""
        if not bad.any():
            return
        row = int(np.argmax(bad))
        cells = [self.column(name)[row].tolist() for name in values]
        request = f"request {str(self.part.table['request_id'][row])!r}"
        step, i = self.column("step_id")[row], self.column("i")[row]
        located = ", ".join(filter(None, [self.part.locate(row), request, f"step {step}", f"position {i}"]))
        raise TraceError(what.format(*cells), where=f"{self.trace.path}: {located}", fix=RECAPTURE)


def _check_nulls(rows: _PartRows, bonus: Mask) -> None:
    for name in ("draft_id", "draft_logit", "rank"):
        known = rows.known(name)
        rows.refuse(~known & ~bonus, f"{name} is missing")
        rows.refuse(known & bonus, f"{name} {{}} is set in the bonus row", name)
    i, parent, known = rows.column("i"), rows.column("parent_position"), rows.known("parent_position")
    rows.refuse(
        np.where(known, (parent < 0) | (parent >= i), i > 0),
        "parent_position {} does not come before the position",
        "parent_position",
    )


def _check_logits(rows: _PartRows) -> None:
    vocab = rows.trace.manifest.vocab_size
    # One contiguous array a rank: comparing neighbours in rows of k is several times slower.
    ids = np.ascontiguousarray(rows.column("top_ids").T)
    logits = np.ascontiguousarray(rows.column("top_logits").T)
    rows.refuse(((ids < 0) | (ids >= vocab)).any(0), f"a top id is outside the vocabulary of {vocab}: {{}}", "top_ids")
    rows.refuse(~np.isfinite(logits).all(0), "logits that are not finite: {}", "top_logits")
    rows.refuse(logits[0] == FORBIDDEN_LOGIT, "no token of the row has a finite logit")
    falls = (logits[:-1] > logits[1:]) | ((logits[:-1] == logits[1:]) & (ids[:-1] < ids[1:]))
    rows.refuse(~falls.all(0), "top logits are not ordered by (-logit, id): {}", "top_logits")
    twice = np.zeros(ids.shape[1], bool)
    for rank in range(1, len(ids)):
        twice |= (ids[:rank] == ids[rank]).any(0)
    rows.refuse(twice, "a top id appears twice: {}", "top_ids")
    rows.refuse(
        rows.column("argmax_id") != ids[0],
        "argmax_id {} is not the first of the top ids {}",
        "argmax_id",
        "top_ids",
    )


def _check_drafts(rows: _PartRows, draft: Mask) -> None:
    """Check id, logit and rank of draft tokens against the largest logits; ``draft`` says which rows hold one."""
    vocab, top_k = rows.trace.manifest.vocab_size, rows.trace.manifest.top_k
    ids, logits = rows.column("top_ids"), rows.column("top_logits")
    draft_id, rank, draft_logit = rows.column("draft_id"), rows.column("rank"), rows.column("draft_logit")
    outside = draft & ((draft_id < 0) | (draft_id >= vocab))
    rows.refuse(outside, f"draft_id {{}} is outside the vocabulary of {vocab}", "draft_id")
    rows.refuse(draft & ~np.isfinite(draft_logit), "draft_logit {} is not finite", "draft_logit")
    rows.refuse(draft & ((rank < 0) | (rank >= vocab)), f"rank {{}} is not in 0 .. {vocab - 1}", "rank")
    wrong = np.zeros(len(draft), bool)
    near = np.flatnonzero(draft & (rank < top_k))
    wrong[near] = (ids[near, rank[near]] != draft_id[near]) | (logits[near, rank[near]] != draft_logit[near])
    far = np.flatnonzero(draft & (rank >= top_k))
    last, last_id = logits[far, -1], ids[far, -1]
    beyond = (draft_logit[far] < last) | ((draft_logit[far] == last) & (draft_id[far] > last_id))
    wrong[far] = ~beyond | (ids[far] == draft_id[far, None]).any(1)
    rows.refuse(wrong, "rank {} does not fit draft token {} with logit {}", "rank", "draft_id", "draft_logit")


def _check_sums(rows: _PartRows, draft: Mask) -> None:
    """Check what was summed over the vocabulary; the bounds are loose, since a float32 sum rounds."""
    most = np.log(rows.trace.manifest.vocab_size)
    lse, entropy, top = rows.column("logsumexp"), rows.column("entropy"), rows.column("top_logits")[:, 0]
    slack = 1e-2 + 1e-3 * np.abs(top)
    bad = ~np.isfinite(lse) | (lse < top - slack) | (lse > top + most + slack)
    rows.refuse(bad, "logsumexp {} does not fit the largest logit", "logsumexp")
    bad = ~np.isfinite(entropy) | (entropy < -1e-2) | (entropy > most + 1e-2)
    rows.refuse(bad, f"entropy {{}} is not in 0 .. log {rows.trace.manifest.vocab_size}", "entropy")
    for name in ("draft_logprob", *DIVERGENCES):
        if rows.part.table[name].null_count == len(draft):
            continue
        known, values = rows.known(name), rows.column(name)
        rows.refuse(known & ~draft, f"{name} {{}} is set in the bonus row", name)
        if name == "draft_logprob":
            bad = ~np.isfinite(values) | (values > 1e-2)
        elif name in ("kl", "reverse_kl"):  # infinite where one side gives no probability at all
            bad = np.isnan(values) | (values < -1e-2)
        else:
            bad = ~np.isfinite(values) | (values < -1e-2) | (values > 1.01)
        rows.refuse(known & bad, f"{name} {{}} is out of range", name)
