"""A trace that many processes write and read in parts: each its requests, by the shards that hold them.

One process, the owner, holds the lock and alone stores the manifest. Others write shards under numbers that it hands
out and send back how the manifest will name them (:class:`PartWriter`); a shard belongs to the trace once the owner has
stored that (:meth:`OwnedTrace.take`). Numbers are never handed out twice, not even by the owner of a later run: a
process that outlives its owner can leave a file behind, but cannot touch one that the manifest names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..files import reason_of, shown
from .groups import CHANGED
from .manifest import NEXT_SHARD, PLANNED, SHARD_NAME, Manifest, Shard
from .reader import Part, Trace, build_trace, changed, load_manifest, read_shard
from .schema import TABLES, table_schema
from .sizes import RESTORE
from .tables import open_parquet, read_columns, to_numpy
from .writer import TraceWriter

RESERVED = 4096
"""Numbers that are reserved in the manifest at a time."""


class OwnedTrace(TraceWriter):
    """The writer of a trace whose shards other processes write.

    Opening it reads the requests, not their steps: whoever is given a part of the trace checks that part.

    Attributes
    ----------
    read : set of str
        Shards that others may still read, and that are not merged before the end.
    """

    def __init__(self, path: Path, manifest: Manifest, completed: Sequence[str], lock: int | None) -> None:
        super().__init__(path, manifest, completed, lock)
        self.read: set[str] = set()

    @classmethod
    def _held(cls, folder: Path) -> tuple[Manifest, list[str]]:
        manifest, _ = load_manifest(folder)
        return manifest, request_ids(folder, manifest)

    def number(self) -> int:
        """Return a number for shards that no process has ever been given."""
        if self._number >= (self.manifest.notes.get(NEXT_SHARD) or 0):
            self.update_manifest(notes={**self.manifest.notes, NEXT_SHARD: self._number + RESERVED})
        self._number += 1
        return self._number - 1

    def take(self, shards: Sequence[Shard], requests: Iterable[str] = (), **fields: Any) -> None:
        """Make shards that another process wrote part of the trace, with changes of the manifest.

        Parameters
        ----------
        shards : sequence of Shard
        requests : iterable of str
            Requests that they add.
        **fields
            As for :meth:`update_manifest`.
        """
        self._must_be_open()
        self._commit(self.manifest.replace(**fields), [*self.manifest.shards, *shards])
        self.completed.update(requests)
        self._count = len(self.completed)
        self._number = max(self._number, *(shard.number + 1 for shard in shards), 0)
        self.flush()  # merges many small shards

    def close(self) -> None:
        """Remove what lost processes left, and close; see :meth:`asdsim.trace.writer.TraceWriter.close`."""
        self.read.clear()
        try:
            if self._open:
                left = [(name, SHARD_NAME.fullmatch(name)) for name in self._leftovers()]
                # In a store, higher numbers are those of a later owner.
                self._remove(name for name, shard in left if not shard or int(shard[2]) < self._number)
        finally:
            super().close()

    def _mergeable(self, table: str) -> list[Shard]:
        return [shard for shard in self.manifest.shards_of(table) if shard.name not in self.read]


class PartWriter(TraceWriter):
    """Write shards of a trace that another process owns; :meth:`finish` tells how its manifest will name them.

    Parameters
    ----------
    path : Path
    manifest : Manifest
        Of the trace.
    number : int
        Of the shards, from :meth:`OwnedTrace.number`.
    held : Trace, optional
        The requests that steps are added to.
    """

    def __init__(self, path: Path, manifest: Manifest, number: int, held: Trace | None = None) -> None:
        super().__init__(path, manifest.replace(shards=[]), [] if held is None else held.request_ids(), None)
        self._number, self._trace = number, held
        self.flush_seconds = self.flush_rows = math.inf  # type: ignore[assignment]

    @classmethod
    def finish_all(cls, parts: Sequence[PartWriter]) -> list[Shard]:
        """Store what was added to several parts in the same shards; see :meth:`finish`."""
        first = parts[0]
        for part in parts[1:]:
            for table, rows in part._buffer.items():
                first._buffer[table] += rows
        return first.finish()

    def finish(self) -> list[Shard]:
        """Store what was added, each table whole or not at all, and return its shards."""
        self.flush()
        self.release()
        return self.manifest.shards

    def _store_manifest(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def _merge(self) -> None:
        return None


def request_ids(folder: Path, manifest: Manifest) -> list[str]:
    """Return the ids of all requests in the order of capture; their steps are not read.

    Raises
    ------
    TraceError
        If a shard of ``requests`` cannot be trusted.
    """
    parts = [part for shard in manifest.shards_of("requests") for part in read_shard(folder, shard, 1, True)]
    if not parts:
        return []
    table = pa.concat_tables([part.table.select(["request_index", "request_id"]) for part in parts])
    order = np.argsort(to_numpy(table["request_index"]), kind="stable")
    names: list[str] = to_numpy(table["request_id"])[order].tolist()
    return names


@dataclass
class Places:
    """Which shards hold the rows of which requests.

    Attributes
    ----------
    folder : Path
    manifest : Manifest
    ids : list of str (R,)
        Requests in the order of capture.
    rows : dict of str to int32 array
        By shard: the requests, by place in ``ids``, that it holds rows of.
    added : bool
        Whether ``cover`` has added steps.
    """

    folder: Path
    manifest: Manifest
    ids: list[str]
    rows: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    added: bool = False

    def part(self, first: int, end: int) -> PlacesOf:
        """Return where the requests from place ``first`` to below ``end`` are."""
        shards = []
        for shard in self.manifest.shards:
            rows = self.rows[shard.name]
            at = int(np.searchsorted(rows, first))
            if at < len(rows) and rows[at] < end:
                shards.append(shard)
        return PlacesOf(self.folder, self.manifest.replace(shards=shards), self.ids[first:end])

    def moved(self, part: PlacesOf) -> PlacesOf | None:
        """Return where requests are that could not be read where they were, or None if that is where they are.

        Raises
        ------
        TraceError
            As :meth:`renew`.
        """
        first = self.ids.index(part.ids[0])
        now = self.part(first, first + len(part.ids))
        if now.manifest.shards == part.manifest.shards and self.renew():
            now = self.part(first, first + len(part.ids))
        return None if now.manifest.shards == part.manifest.shards else now

    def renew(self) -> bool:
        """Look again where the rows are: a writer may have merged shards. Return whether they are elsewhere.

        Raises
        ------
        TraceError
            If there are other rows than before, so that what was read does not go with what would be.
        """
        now = find_places(self.folder)
        if now.ids != self.ids or now._sizes() != self._sizes():
            raise TraceError(CHANGED, where=str(self.folder), fix="run the command again")
        elsewhere = now.manifest.shards != self.manifest.shards
        self.manifest, self.rows = now.manifest, now.rows
        return elsewhere

    def _sizes(self) -> list[int]:
        """Return the number of rows of each table: rows are added, never changed."""
        return [sum(shard.rows for shard in self.manifest.shards_of(table)) for table in TABLES]


@dataclass(frozen=True)
class PlacesOf:
    """A few requests of a trace: their ids, and a manifest that names only the shards with rows of them."""

    folder: Path
    manifest: Manifest
    ids: list[str]

    def read(self) -> Trace:
        """Read and validate these requests alone, as a trace in which they are all.

        Raises
        ------
        TraceError
            As :func:`asdsim.trace.reader.read_trace`.
        """
        steps, positions = self._kept("steps"), self._kept("positions")
        manifest = self.manifest.replace(notes={**self.manifest.notes, PLANNED: len(self.ids)})
        return build_trace(
            self.folder, manifest, self._requests(), steps, positions,
            rows=sum(part.table.num_rows for part in positions),
        )  # fmt: skip

    def read_requests(self) -> pa.Table:
        """Return the rows of ``requests`` alone, in order."""
        parts = self._requests()
        table = pa.concat_tables([part.table for part in parts]) if parts else table_schema("requests").empty_table()
        return table.sort_by("request_index").combine_chunks()

    def _kept(self, table: str) -> list[Part]:
        """Return the rows of these requests in one table."""
        known = {name: n for n, name in enumerate(self.ids)}
        kept = []
        for shard in self.manifest.shards_of(table):
            for part in read_shard(self.folder, shard, self.manifest.top_k, True):
                rows = np.flatnonzero(_places(part.table["request_id"], known) >= 0)
                if len(rows):
                    kept.append(Part(part.table.take(pa.array(rows)), shard.name))
        return kept

    def _requests(self) -> list[Part]:
        """Return the rows of ``requests``, numbered from 0."""
        known = {name: n for n, name in enumerate(self.ids)}
        parts = []
        for part in self._kept("requests"):
            at = part.table.schema.get_field_index("request_index")
            places = pa.array(_places(part.table["request_id"], known))
            parts.append(Part(part.table.set_column(at, part.table.schema.field(at), places), part.shard))
        return parts


def find_places(folder: Path) -> Places:
    """Say which shards hold the rows of which requests, by reading the ids and waves alone.

    Raises
    ------
    TraceError
        If the trace cannot be read, or a row belongs to no request.
    """
    while True:
        manifest, raw = load_manifest(folder)
        try:
            return _find(folder, manifest)
        except TraceError:
            if not changed(folder, raw):
                raise


def _find(folder: Path, manifest: Manifest) -> Places:
    places = Places(folder, manifest, request_ids(folder, manifest))
    known = {name: row for row, name in enumerate(places.ids)}
    for shard in manifest.shards:
        names = ["request_id", "wave"] if shard.table == "steps" else ["request_id"]
        file = folder / shard.name
        try:
            with file.open("rb") as handle, open_parquet(handle, ["request_id"]) as parquet:
                table = read_columns(parquet, columns=names)
        except Exception as error:
            reason = reason_of(error)  # also of what the library of a store raises
            if not reason and not isinstance(error, (pa.ArrowException, ValueError, KeyError)):
                raise
            what = f"not a readable Parquet shard: {reason or shown(error)}"
            raise TraceError(what, where=str(file), fix=RESTORE) from None
        rows = np.unique(_places(table["request_id"].unify_dictionaries(), known))
        if len(rows) and rows[0] < 0:
            raise TraceError("holds rows of a request that the trace does not hold", where=str(file), fix=RESTORE)
        places.rows[shard.name] = rows
        if shard.table == "steps":
            places.added |= bool((to_numpy(table["wave"]) > 0).any())
    return places


def _places(column: pa.ChunkedArray, known: dict[str, int]) -> npt.NDArray[np.int32]:
    """Return what ``known`` says of each request id of a column; -1 where it says nothing."""
    keys = column.combine_chunks()
    if isinstance(keys, pa.ChunkedArray):  # no row at all
        return np.empty(0, np.int32)
    if not pa.types.is_dictionary(keys.type):
        return np.array([known.get(name, -1) for name in keys.to_pylist()], np.int32)
    lookup = np.array([known.get(name, -1) for name in keys.dictionary.to_pylist()] or [-1], np.int32)
    return np.asarray(lookup[keys.indices.to_numpy()], np.int32)
