"""Read a trace a group of requests at a time, in memory that does not grow with it.

A shard holds rows in the order in which they were captured: the captured path of one request after another, then the
steps that ``cover`` added, wave by wave. So the rows of a group of neighbouring requests stand close together in a few
shards, and one pass over all shards at once meets every row once::

    positions-00001  | 0 0 0 1 1 | 1 2 2 2 | 3 3 3 4 |        the captured path
    positions-00002  | 0 1 1 | 2 4 4 |                        added by cover
                       ^^^^^^^ group 0 .. 1: read row groups until the next one begins behind request 1,
                               and keep what belongs to later groups

Which requests a row group holds is looked up first, from one column. What is handed out is checked as by
:func:`asdsim.trace.reader.read_trace`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..files import to_path
from ..records import RequestRecord
from .fits import BASE, MEMORY, STEP, check_group_fits, group_rows, position_bytes
from .manifest import Shard
from .reader import build_trace, load_manifest, only_requests, read_shard
from .rows import request_rows
from .schema import TABLES, file_schema, table_schema
from .sizes import EXPANSION, RESTORE, ROOM, check_size, unpacked_bytes
from .stored import Part, Source, Trace, request_records, thinned
from .tables import Array, open_parquet, read_columns, to_numpy

Int64 = npt.NDArray[np.int64]

GROUP_ROWS = 1 << 19
"""Positions of a group; a request with more is a group of its own."""

NAME = 200
"""Bytes of the id and the length of a request."""

CHANGED = "the trace was changed while it was read"


class StreamedTrace(Source):
    """A trace on disk, of which one group of requests at a time is in memory.

    Parameters
    ----------
    path : path
        The directory.
    verify : bool
        False skips the SHA-256 of the shards; everything else is still checked.
    memory : float
        Bytes that reading it, and what is made of it, should take; sets ``rows``.
    keep : bool
        Whether graphs are kept beside it, see :mod:`asdsim.trace.store`.

    Attributes
    ----------
    path : Path
    manifest : Manifest
    rows : int
        Positions of a group, at most, unless a single request has more.
    bounds : list of int
        Group n holds the requests ``bounds[n] .. bounds[n + 1] - 1``.
    progress : callable, optional
        Called with the positions of each group that was read.
    processes : int
        How many processes may read groups and lay out graphs at once; see :mod:`asdsim.trace.spread`.

    Raises
    ------
    TraceError
        If the manifest or the requests cannot be trusted; everything else is checked as groups are read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        memory: float = MEMORY,
        keep: bool = True,
        rows: int | None = None,
    ) -> None:
        self.path, self.verify, self.memory, self.keep = to_path(path), verify, memory, keep
        self.progress: Callable[[int], None] | None = None
        self.processes = 1
        self.manifest = load_manifest(self.path)[0]
        self.rows = group_rows(memory, self.manifest.top_k, rows or GROUP_ROWS)
        self._spans: dict[str, list[tuple[int, int]]] = {}  # of each row group: its first request, and its last
        self._names, self._prompt_tokens = self._read_requests()
        self._known = {name: row for row, name in enumerate(self._names)}
        per_request = np.zeros(len(self._names), np.int64)
        for shard in self.manifest.shards:
            if shard.table == "requests":
                continue
            spans = self._spans[shard.name] = []
            for owners in self._owners(shard):
                spans.append(_span(owners))
                if shard.table == "positions":
                    per_request += np.bincount(owners, minlength=len(per_request))
        self.bounds = _cut(per_request, self.rows)
        check_group_fits(self.path, self.manifest, int(np.add.reduceat(per_request, self.bounds[:-1]).max(initial=0)))

    @property
    def num_requests(self) -> int:
        """Requests that it holds."""
        return len(self._names)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out ``progress``, which does not go to other processes."""
        return {**vars(self), "progress": None}

    def __repr__(self) -> str:
        return f"StreamedTrace({str(self.path)!r}: {self.num_requests} requests in {len(self.bounds) - 1} groups)"

    @property
    def prompt_tokens(self) -> Int64:
        """Tokens of each prompt, int64 (R,)."""
        return self._prompt_tokens

    def most_processes(self, weight: float = 1.0) -> int:
        """Return how many processes fit into ``memory``, at most ``processes``; for ``weight`` see :func:`.spread`."""
        each = BASE + self.rows * (position_bytes(self.manifest.top_k) + STEP) + NAME * self.num_requests
        return max(1, min(self.processes, int((self.memory - BASE) / (weight * each))))

    @property
    def room(self) -> float:
        """Bytes for what is known per request and setting, beside the group that is read."""
        return (self.memory - BASE) / 2

    def request_ids(self) -> list[str]:
        """Return the ids of all requests, in the order of capture."""
        return self._names

    def request_records(self) -> list[RequestRecord]:
        """Return all requests as records: these are in memory then, the steps are not."""
        kept = [part.table for shard in self.manifest.shards_of("requests") for part in self._parts(shard)]
        if not kept:
            return []
        table = pa.concat_tables(kept).sort_by("request_index")
        return request_records({name: to_numpy(table[name]) for name in table.column_names})

    def step_columns(
        self, names: Sequence[str], most: int | None = None
    ) -> tuple[dict[str, Array], npt.NDArray[np.int32]]:
        """Return some columns of ``steps`` and the row of each step's request; of about ``most`` steps."""
        streams = self._streams("steps")
        total, first = sum(shard.rows for shard in self.manifest.shards_of("steps")), 0
        columns: dict[str, list[Array]] = {name: [] for name in names}
        owners: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
        for end in self.bounds[1:]:
            parts = [part for stream in streams for part in stream.until(end)]
            if parts:
                owner = np.concatenate([request_rows(part, self._known, self.path) for part in parts])
                order = np.lexsort((np.concatenate([to_numpy(part.table["step_id"]) for part in parts]), owner))
                first, order = first + len(order), order[thinned(first, len(order), total, most)]
                owners.append(owner[order])
                for name in names:
                    columns[name].append(np.concatenate([to_numpy(part.table[name]) for part in parts])[order])
        none = to_numpy(table_schema("steps").empty_table()["step_id"])
        return {name: np.concatenate(found) if found else none for name, found in columns.items()}, np.concatenate(
            owners
        )

    def _parts(self, shard: Shard) -> Iterator[Part]:
        return read_shard(self.path, shard, self.manifest.top_k, self.verify)

    def _read_requests(self) -> tuple[list[str], Int64]:
        """Return id and prompt length of every request."""
        names: list[str] = []
        index: list[Int64] = [np.zeros(0, np.int64)]
        lengths: list[Int64] = [np.zeros(0, np.int64)]
        for shard in self.manifest.shards_of("requests"):
            spans = self._spans[shard.name] = []
            for part in self._parts(shard):
                names += part.table["request_id"].to_pylist()
                index.append(to_numpy(part.table["request_index"]).astype(np.int64))
                spans.append(_span(index[-1]))
                column = part.table["prompt_ids"].combine_chunks()
                if len(column):
                    lengths.append(np.diff(column.offsets.to_numpy()).astype(np.int64))
        place = np.concatenate(index)
        order = np.argsort(place, kind="stable")
        if len(set(names)) < len(names) or not np.array_equal(place[order], np.arange(len(names))):
            parts = [part for shard in self.manifest.shards_of("requests") for part in self._parts(shard)]
            only_requests(self.path, self.manifest, parts)  # says what is wrong
        return [names[row] for row in order.tolist()], np.concatenate(lengths)[order]

    def _owners(self, shard: Shard) -> Iterator[npt.NDArray[np.int32]]:
        """Yield the request of each row of a shard, a row group at a time: not verified, so a hint of where to look."""
        file, expected = self.path / shard.name, file_schema(shard.table, self.manifest.top_k)
        try:
            with file.open("rb") as handle, open_parquet(handle, ["request_id"]) as parquet:
                if parquet.metadata.schema.to_arrow_schema().remove_metadata().equals(expected):
                    check_size(unpacked_bytes(parquet.metadata, expected), ROOM + EXPANSION * shard.bytes, file)
                    for group in range(parquet.num_row_groups):
                        keys = read_columns(parquet, group, ["request_id"])
                        yield request_rows(Part(keys, shard.name), self._known, self.path)
                    return
        except (pa.ArrowException, OSError, ValueError):
            pass
        for _ in read_shard(self.path, shard, self.manifest.top_k, True):  # says what is wrong with it
            pass
        raise TraceError(CHANGED, where=str(file), fix=RESTORE)

    def groups(self, wanted: Container[int] | None = None) -> Iterator[Trace]:
        """Yield the trace a group of requests at a time, each a valid trace of its own.

        Parameters
        ----------
        wanted : container of int, optional
            Numbers of the groups to yield; rows of other groups are not read, or are skipped unchecked.

        Raises
        ------
        TraceError
            As :func:`asdsim.trace.reader.read_trace`, when the first group with something wrong is read.
        """
        numbers = range(len(self.bounds) - 1)
        if wanted is not None:
            asked = [n for n in numbers if n in wanted] or [0]
            numbers = range(asked[0], asked[-1] + 1)
        whole = len(numbers) == len(self.bounds) - 1
        needed = None if whole else range(self.bounds[numbers.start], self.bounds[numbers.stop])
        streams = {table: self._streams(table, needed) for table in TABLES}
        if needed:
            for stream in (stream for table in TABLES for stream in streams[table]):
                stream.until(needed.start)  # of row groups that begin before
        for n in numbers:
            first, end = self.bounds[n], self.bounds[n + 1]
            parts = {table: [part for stream in streams[table] for part in stream.until(end)] for table in TABLES}
            rows = sum(part.table.num_rows for part in parts["positions"])
            if wanted is None or n in wanted:
                group = build_trace(
                    self.path, self.manifest, parts["requests"], parts["steps"], parts["positions"], rows=rows,
                    first=first,
                )  # fmt: skip
                parts.clear()
                yield group
                del group  # before the next one is read
                pa.default_memory_pool().release_unused()  # or Arrow keeps what was freed for itself
            if self.progress:
                self.progress(rows)
        for stream in (stream for table in TABLES for stream in streams[table] if whole):
            if stream.until(self.num_requests + 1):
                raise TraceError(CHANGED, where=str(self.path), fix=RESTORE)

    def _streams(self, table: str, needed: range | None = None) -> list[_Stream]:
        return [_Stream(self, shard, needed) for shard in self.manifest.shards_of(table)]


class _Stream:
    """Rows of one shard, read up to a given request; with ``needed``, only row groups that hold such requests."""

    def __init__(self, trace: StreamedTrace, shard: Shard, needed: range | None) -> None:
        self.trace, self.table = trace, shard.table
        spans = trace._spans[shard.name]
        self.groups = [
            n for n, (lowest, highest) in enumerate(spans)
            if needed is None or (lowest < needed.stop and highest >= needed.start)
        ]  # fmt: skip
        lowest = [spans[n][0] for n in self.groups]
        self.floors = np.minimum.accumulate(np.array([*lowest, trace.num_requests], np.int64)[::-1])[::-1]
        only = None if len(self.groups) == len(spans) else set(self.groups)
        skipped = bool(spans) and not self.groups
        self.parts = iter(()) if skipped else read_shard(
            trace.path, shard, trace.manifest.top_k, trace.verify, only
        )  # fmt: skip
        self.read = 0
        self.held: list[tuple[npt.NDArray[np.int64], Part]] = []

    def until(self, end: int) -> list[Part]:
        """Return the rows of requests below ``end`` that were not returned before."""
        found: list[Part] = []
        waiting, self.held = self.held, []
        for owner, held in waiting:
            self._split(owner, held, end, found)
        while self.read < len(self.groups) and self.floors[self.read] < end:
            part = next(self.parts, None)
            self.read += 1
            if part is None:
                break
            self._split(self._owner(part), part, end, found)
        if self.read == len(self.groups):
            self.read += 1
            if next(self.parts, None) is not None:  # to its end: the number of rows is checked there
                raise TraceError(CHANGED, where=str(self.trace.path), fix=RESTORE)
        return found

    def _owner(self, part: Part) -> npt.NDArray[np.int64]:
        if self.table == "requests":
            return to_numpy(part.table["request_index"]).astype(np.int64)
        return request_rows(part, self.trace._known, self.trace.path).astype(np.int64)

    def _split(self, owner: npt.NDArray[np.int64], part: Part, end: int, found: list[Part]) -> None:
        """Put the rows of requests below ``end`` into ``found``, and hold the others."""
        now = owner < end
        turns = np.flatnonzero(np.diff(now)) + 1
        for lo, hi in pairwise([0, *turns.tolist(), len(owner)]):
            if lo == hi:
                continue
            piece = Part(part.table.slice(lo, hi - lo), part.shard, part.first + lo)
            if now[lo]:
                found.append(piece)
            else:
                self.held.append((owner[lo:hi], piece))


def _span(owners: npt.NDArray[np.integer[Any]]) -> tuple[int, int]:
    """Return the first and the last request of a row group."""
    return int(owners.min(initial=np.iinfo(np.int32).max)), int(owners.max(initial=-1))


def _cut(per_request: Int64, rows: int) -> list[int]:
    """Return the bounds of groups of neighbouring requests of at most so many rows, or one request each."""
    bounds, before = [0], 0
    total = np.cumsum(per_request)
    while bounds[-1] < len(total):
        end = int(np.searchsorted(total, before + rows, side="right"))
        bounds.append(max(end, bounds[-1] + 1))
        before = int(total[bounds[-1] - 1])
    return bounds if len(bounds) > 1 else [0, 0]
