"""Write a trace so that a kill at any moment leaves a readable one.

Everything is stored in this order: shards, each whole or not at all (:func:`asdsim.files.write_atomically`), then
the manifest that names them, the same way. A shard that no manifest names is left over from a crash: readers ignore
it, and the next writer removes it.

A local directory is locked by its writer. An object store has no lock that ends with its process, so there the manifest
carries the mark of its writer, and is replaced only where it is as that writer left it: whoever opens the trace last
has it, and a writer before stops with an error at its next manifest, having changed nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import AsdsimError, TraceError
from ..files import (
    dump_json,
    is_remote,
    make_folder,
    names_in,
    reason_of,
    to_path,
    write_atomically,
    write_new,
    write_over,
)
from ..records import RequestRecord, StepRecord
from . import manifest as manifests
from .manifest import MANIFEST, SHARD_NAME, VOCABULARY, Manifest, Shard
from .reader import Part, Trace, build_trace, load_manifest, read_shard, read_trace
from .schema import TABLES, parquet_options
from .tables import pack, positions_table, requests_table, steps_table
from .vocabulary import LEADING, NAME, SCHEMA, Vocabulary

if TYPE_CHECKING:
    import polars as pl

FLUSH_SECONDS = 10.0
FLUSH_ROWS = 1 << 18
"""A shard is written when the oldest buffered request is this old, or the buffer holds this many positions."""

SHARD_ROWS = 1 << 20
"""Shards are merged up to this many positions."""

MANY_SHARDS = 64
"""Small shards of one table at which they are merged without waiting for the end."""

TEMPORARY = re.compile(r"\.tmp-.+")
WRITER = "writer"
"""Entry of the notes in an object store: the mark of the process that has the trace open."""


class TraceWriter:
    """Append requests and steps to a trace.

    Use :meth:`create` or :meth:`resume`, and the writer as a context manager: leaving it normally stores and merges
    what is buffered, leaving it by an exception drops the buffer, and the trace stays as after the last flush.

    Attributes
    ----------
    path : Path
    manifest : Manifest
        As it was last stored.
    completed : set of str
        Requests that the trace holds, the buffered ones included.
    """

    def __init__(self, path: Path, manifest: Manifest, completed: Sequence[str], lock: int | None) -> None:
        self.path = path
        self.manifest = without_mark(manifest)
        self._mark = secrets.token_hex(8) if is_remote(path) else ""
        self._stored: bytes | None = None  # the manifest in its store
        self.completed = set(completed)
        self.flush_seconds, self.flush_rows = FLUSH_SECONDS, FLUSH_ROWS
        self._lock = lock
        self._count = len(completed)
        used = 1 + max((shard.number for shard in manifest.shards), default=-1)
        self._number = max(used, manifest.notes.get(manifests.NEXT_SHARD) or 0)
        self._buffer: dict[str, list[pa.Table]] = {table: [] for table in TABLES}
        self._since: float | None = None
        self._open = True
        self._trace: Trace | None = None  # what was stored when steps were first added to it
        self._known: dict[str, dict[str, pa.Table]] = {}  # from then on, all rows of the requests that were touched

    # Opening

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: Manifest) -> TraceWriter:
        """Start a trace in a directory that is empty or does not exist yet.

        Raises
        ------
        TraceError
            If the directory holds another trace or anything else, or cannot be written. Nothing is touched then.
        """
        folder = to_path(path)
        with os_errors(folder):
            if folder.exists() and not folder.is_dir():
                raise TraceError("is a file, not a directory", where=str(folder), fix="give another output directory")
            names = names_in(folder)
            if MANIFEST in names:
                raise TraceError(
                    "the directory already holds a trace",
                    where=str(folder),
                    fix="continue it with --resume, or give another output directory",
                )
            foreign = [name for name in names if not TEMPORARY.fullmatch(name)]
            if foreign:
                raise TraceError(
                    f"the directory is not empty: it holds {foreign[0]!r}",
                    where=str(folder),
                    fix="give an empty or new output directory",
                )
            make_folder(folder)
        lock = lock_directory(folder)
        try:
            notes = {key: value for key, value in manifest.notes.items() if key != manifests.VOCABULARY}
            writer = cls(folder, manifest.replace(shards=[], notes=notes), [], lock)
            writer._remove(writer._leftovers())
            writer._store_manifest(writer.manifest)
        except BaseException:
            unlock(lock)
            raise
        return writer

    @classmethod
    def resume(cls, path: str | os.PathLike[str], manifest: Manifest) -> TraceWriter:
        """Continue a trace, or start it where there is nothing yet.

        Raises
        ------
        TraceError
            If the trace is from another run (the first field that differs is named), cannot be trusted, or is being
            written by another process.
        """
        folder = to_path(path)
        with os_errors(folder):
            names = names_in(folder) if folder.is_dir() else []
        if not folder.exists() or (folder.is_dir() and all(TEMPORARY.fullmatch(name) for name in names)):
            return cls.create(folder, manifest)
        stored, _ = load_manifest(folder)
        difference = manifests.first_difference(stored, manifest)
        if difference is not None:
            name, theirs, mine = difference
            raise TraceError(
                f"the trace is from another run: {name} is {_short(theirs)} there and {_short(mine)} now",
                where=str(folder),
                fix="resume with the settings of the trace, or give another output directory",
            )
        return cls.append(folder)

    @classmethod
    def append(cls, path: str | os.PathLike[str]) -> Self:
        """Open a stored trace to add to it, as the run that its manifest names.

        Raises
        ------
        TraceError
            If the trace cannot be trusted, or is being written by another process.
        """
        folder = to_path(path)
        _, stored = load_manifest(folder)
        lock = lock_directory(folder)
        try:
            writer = cls(folder, *cls._held(folder), lock)
            left = writer._leftovers()
            if is_remote(folder):  # from here on a writer before this one stores nothing: what it left can go
                writer._stored = stored
                writer._store_manifest(writer.manifest)
                taken = [int(match[2]) for name in left if (match := SHARD_NAME.fullmatch(name))]
                writer._number = max([writer._number - 1, *taken]) + 1
            writer._remove(left)
        except BaseException:
            unlock(lock)
            raise
        return writer

    @classmethod
    def _held(cls, folder: Path) -> tuple[Manifest, list[str]]:
        """Return the manifest of a trace and its requests, once all of it has been checked."""
        trace = read_trace(folder)
        return trace.manifest, trace.request_ids()

    # Adding

    def add_request(self, request: RequestRecord, steps: Sequence[StepRecord], index: int | None = None) -> None:
        """Add one request with all steps of its captured path.

        Parameters
        ----------
        request : RequestRecord
        steps : sequence of StepRecord
        index : int, optional
            Its place in the order of capture, where requests do not come in that order; by default the next one.

        Raises
        ------
        TraceError
            If the request is there already, or anything in it could not be read back (see
            :func:`asdsim.trace.reader.build_trace`); nothing is added then. Or if storing fails.
        """
        self._must_be_open()
        if request.request_id in self.completed:
            raise TraceError(f"the request {request.request_id!r} is in the trace already", where=str(self.path))
        tables = self._tables(request, steps, self._count if index is None else index)
        self._validate(tables)
        for table, part in tables.items():
            self._buffer[table].append(part)
        self._count += 1
        self.completed.add(request.request_id)
        if self._trace is not None:
            self._known[request.request_id] = tables
        self._after_adding()

    def add_steps(self, request_id: str, steps: Sequence[StepRecord]) -> None:
        """Add steps to a request that the trace holds.

        Raises
        ------
        TraceError
            If there is no such request, or a step does not fit it; nothing is added then. Or if storing fails.
        """
        self._must_be_open()
        if request_id not in self.completed:
            raise TraceError(f"no request {request_id!r} to add steps to", where=str(self.path))
        if not steps:
            return
        if self._trace is None:
            self.flush()
            self._trace = read_trace(self.path, verify=False)
        if request_id not in self._known:
            self._known[request_id] = _rows_of(self._trace, request_id)
        known = self._known[request_id]
        new = {
            "steps": steps_table(request_id, steps),
            "positions": positions_table(request_id, steps, self.manifest.top_k),
        }
        both = {name: pa.concat_tables([known[name], new[name]]).unify_dictionaries().combine_chunks() for name in new}
        both["requests"] = known["requests"]
        self._validate(both)
        self._known[request_id] = both
        for name, rows in new.items():
            self._buffer[name].append(rows)
        self._after_adding()

    def update_manifest(self, **fields: Any) -> None:
        """Change fields of the manifest, such as ``grids``, and store it together with what is buffered.

        Raises
        ------
        TraceError
            If a field identifies the run and there are requests already, is unknown, or cannot hold the value.
        """
        self._must_be_open()
        fixed = [name for name in fields if name not in manifests.NOT_IDENTITY or name == "shards"]
        changed = self.manifest.replace(**fields)
        if fixed and (self.completed or "shards" in fixed):
            raise TraceError(f"{fixed[0]} cannot change once a trace holds requests", where=str(self.path))
        if not self._write_buffer(changed):
            self._store_manifest(changed)

    def _tables(self, request: RequestRecord, steps: Sequence[StepRecord], index: int) -> dict[str, pa.Table]:
        return {
            "requests": requests_table([request], index),
            "steps": steps_table(request.request_id, steps),
            "positions": positions_table(request.request_id, steps, self.manifest.top_k),
        }

    def _validate(self, tables: dict[str, pa.Table]) -> None:
        """Check one request alone, as a reader would."""
        index = tables["requests"].schema.get_field_index("request_index")
        first = tables["requests"].set_column(index, tables["requests"].schema.field(index), pa.array([0], pa.int32()))
        try:
            build_trace(
                self.path, self.manifest, [Part(first)], [Part(tables["steps"])], [Part(tables["positions"])],
                rows=tables["positions"].num_rows,
            )  # fmt: skip
        except TraceError as error:
            raise TraceError(f"refused to store it: {error.what}", where=error.where) from None

    def _after_adding(self) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        rows = sum(part.num_rows for part in self._buffer["positions"])
        if now - self._since >= self.flush_seconds or rows >= self.flush_rows:
            self.flush()

    # Storing

    def flush(self) -> None:
        """Store what is buffered, as new shards.

        Raises
        ------
        TraceError
            If the disk is full or cannot be written. The trace stays as it was, and can be read and resumed.
        """
        self._must_be_open()
        self._write_buffer(self.manifest)
        if sum(shard.rows < SHARD_ROWS // 2 for shard in self._mergeable("positions")) >= MANY_SHARDS:
            self._merge()

    def close(self) -> None:
        """Store what is buffered, merge small shards, and let go of the directory.

        Raises
        ------
        TraceError
            If the disk is full or cannot be written. The trace stays as it was, and can be read and resumed.
        """
        if not self._open:
            return
        try:
            self._write_buffer(self.manifest)
            self._merge()
            if self._mark:
                self._mark = ""
                self._store_manifest(self.manifest)
        finally:
            self._abandon()

    def release(self) -> None:
        """Let go of the directory; drop what is buffered and leave shards as they are."""
        if self._open:
            self._abandon()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Drop the buffer and let go of the directory."""
        self._open = False
        self._buffer = {table: [] for table in TABLES}
        unlock(self._lock)
        self._lock = None

    def _must_be_open(self) -> None:
        if not self._open:
            raise TraceError("the writer is closed", where=str(self.path), fix="open the trace again with --resume")

    def _write_buffer(self, manifest: Manifest) -> bool:
        """Store the buffer as one shard per table, and ``manifest`` with them; return whether there was anything."""
        parts = {table: rows for table, rows in self._buffer.items() if rows}
        if not parts:
            return False
        tables = {table: pa.concat_tables(rows).unify_dictionaries() for table, rows in parts.items()}
        self._commit(manifest, [*manifest.shards, *self._write_shards(tables)])
        self._buffer = {table: [] for table in TABLES}
        self._since = None
        return True

    def _write_shards(self, tables: dict[str, pa.Table]) -> list[Shard]:
        shards: list[Shard] = []
        try:
            for table, rows in tables.items():
                data = _parquet_bytes(table, pack(table, rows, self.manifest.top_k), self.manifest.top_k)
                name = self._write_shard(table, data)
                shards.append(Shard(name, table, rows.num_rows, len(data), hashlib.sha256(data).hexdigest()))
        except BaseException:
            with contextlib.suppress(TraceError):
                self._remove(shard.name for shard in shards)
            raise
        self._number = 1 + max(shard.number for shard in shards)
        return shards

    def _write_shard(self, table: str, data: memoryview) -> str:
        """Store a shard under the next number; return its name."""
        for number in itertools.count(self._number):
            name = f"{table}-{number:05d}.parquet"
            with os_errors(self.path / name):
                if not is_remote(self.path):
                    write_atomically(self.path / name, data)
                elif not write_new(self.path / name, data):  # of a writer that lost the trace
                    continue
            return name
        raise AssertionError

    def _commit(self, manifest: Manifest, shards: list[Shard]) -> None:
        ordered = sorted(shards, key=lambda shard: (TABLES.index(shard.table), shard.name))
        self._store_manifest(manifest.replace(shards=ordered))

    def _store_manifest(self, manifest: Manifest) -> None:
        file, data = self.path / MANIFEST, manifests.dump(manifest)
        if is_remote(file):
            marked = {**manifest.notes, WRITER: self._mark} if self._mark else manifest.notes
            data = manifests.dump(manifest.replace(notes=marked))
        with os_errors(file):
            if not is_remote(file):
                write_atomically(file, data)
            elif not write_over(file, data, self._stored):
                raise TraceError(
                    "another process is writing this trace", where=str(self.path),
                    fix="let it end; what this one had not stored is lost, --resume captures it again",
                )  # fmt: skip
        self.manifest, self._stored = manifest, data

    def _merge(self) -> None:
        """Merge small shards into larger ones: new files first, then the manifest, then the old files go."""
        groups = [group for table in TABLES for group in _groups(self._mergeable(table)) if len(group) > 1]
        if not groups:
            return
        old = {shard.name for group in groups for shard in group}
        new: list[Shard] = []
        for group in groups:
            parts = [
                part.table for shard in group for part in read_shard(self.path, shard, self.manifest.top_k, verify=True)
            ]
            new += self._write_shards({group[0].table: pa.concat_tables(parts).unify_dictionaries()})
        self._commit(self.manifest, [shard for shard in self.manifest.shards if shard.name not in old] + new)
        self._remove(old)  # no more than these: another process may be writing shards that are not named yet

    def _mergeable(self, table: str) -> list[Shard]:
        return self.manifest.shards_of(table)

    def _leftovers(self) -> list[str]:
        """Return the names of temporary files and of shards that the manifest does not name."""
        named = {shard.name for shard in self.manifest.shards}
        with os_errors(self.path):
            names = names_in(self.path)
        return [
            name for name in names if TEMPORARY.fullmatch(name) or (SHARD_NAME.fullmatch(name) and name not in named)
        ]

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files; a directory of such a name stays."""
        with os_errors(self.path):
            for name in names:
                file = self.path / name
                if is_remote(file) or file.is_symlink() or not file.is_dir():
                    file.unlink(missing_ok=True)


def without_mark(manifest: Manifest) -> Manifest:
    """Return a manifest that names no writer."""
    return manifest.replace(notes={key: value for key, value in manifest.notes.items() if key != WRITER})


def _rows_of(trace: Trace, request_id: str) -> dict[str, pa.Table]:
    """Return all rows of one request."""
    row = trace.request_row(request_id)
    lo, hi = int(trace.step_ptr[row]), int(trace.step_ptr[row + 1])
    first, last = int(trace.pos_ptr[lo]), int(trace.pos_ptr[hi])
    return {
        "requests": trace.requests.slice(row, 1),
        "steps": trace.steps.slice(lo, hi - lo),
        "positions": trace.positions.slice(first, last - first),
    }


def _groups(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """Split neighbouring shards into groups of at most ``SHARD_ROWS`` rows."""
    group: list[Shard] = []
    for shard in shards:
        if group and sum(member.rows for member in group) + shard.rows > SHARD_ROWS:
            yield group
            group = []
        group.append(shard)
    if group:
        yield group


def _parquet_bytes(table: str, rows: pa.Table, top_k: int) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, **parquet_options(table, top_k))
    return memoryview(sink.getvalue())


def write_table(table: pa.Table, file: Path, metadata: dict[str, Any]) -> None:
    """Write any table to Parquet, whole or not at all.

    Parameters
    ----------
    metadata : dict
        Entries of the file's key-value metadata; values that are not text are stored as JSON.

    Raises
    ------
    TraceError
        If the disk is full or the file cannot be written.
    """
    text = {key: value if isinstance(value, str) else dump_json(value) for key, value in metadata.items()}
    sink = pa.BufferOutputStream()
    merged = {**(table.schema.metadata or {}), **text}
    pq.write_table(table.replace_schema_metadata(merged), sink, compression="zstd")
    with os_errors(file):
        make_folder(file.parent)
        write_atomically(file, memoryview(sink.getvalue()))


def write_frame(frame: pl.DataFrame, file: Path, metadata: dict[str, Any]) -> None:
    """Write a data frame by the ending of its name, whole or not at all.

    Parameters
    ----------
    frame : polars.DataFrame
    file : Path
        A name in ``.csv`` gives CSV: no place for metadata, lists as numbers with blanks between them, missing values
        empty. Any other gives Parquet.
    metadata : dict
        See :func:`write_table`.

    Raises
    ------
    TraceError
        If the disk is full or the file cannot be written.
    """
    if file.suffix != ".csv":
        write_table(frame.to_arrow(), file, metadata)
        return
    import polars as pl

    lists = [name for name, kind in frame.schema.items() if isinstance(kind, pl.List)]
    flat = frame.with_columns(pl.col(name).cast(pl.List(pl.String)).list.join(" ") for name in lists)
    with os_errors(file):
        make_folder(file.parent)
        write_atomically(file, flat.write_csv().encode())


@contextlib.contextmanager
def os_errors(where: Path) -> Iterator[None]:
    """Turn an error of the operating system into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TraceError(
                "no space left on the disk", where=str(where), fix="free some space, then continue with --resume"
            ) from None
        raise TraceError(f"cannot be written: {error.strerror or error}", where=str(where)) from None
    except AsdsimError:
        raise
    except Exception as error:
        if not reason_of(error):
            raise
        raise TraceError(f"cannot be written: {reason_of(error)}", where=str(where)) from None


def lock_directory(folder: Path) -> int | None:
    """Lock the directory for one writer; the system releases the lock when the process ends, however it ends."""
    if is_remote(folder):
        return None
    try:
        import fcntl
    except ImportError:
        return None
    with os_errors(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise TraceError("another process is writing this trace", where=str(folder), fix="wait for it to end") from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def unlock(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def store_vocabulary(writer: TraceWriter, vocabulary: Vocabulary) -> None:
    """Write a vocabulary beside the shards, name it in the manifest, and remove the one before.

    Raises
    ------
    TraceError
        If the disk is full or cannot be written.
    """
    columns = [
        pa.array(vocabulary.ids, pa.int32()), pa.array(vocabulary.pieces, pa.binary()),
        pa.array(vocabulary.special, pa.bool_()),
    ]  # fmt: skip
    leading = b"dropped" if vocabulary.drop_leading else b"kept"
    sink = pa.BufferOutputStream()
    table = pa.table(columns, schema=SCHEMA.with_metadata({LEADING: leading}))
    pq.write_table(table, sink, compression="zstd", compression_level=15, use_dictionary=False)
    data = bytes(sink.getvalue())
    checksum = hashlib.sha256(data).hexdigest()
    name = f"vocabulary-{checksum[:12]}.parquet"
    entry: dict[str, Any] = {"file": name, "tokens": len(vocabulary), "bytes": len(data), "sha256": checksum}
    if writer.manifest.notes.get(VOCABULARY) == entry:
        return
    with os_errors(writer.path / name):
        before = [other for other in names_in(writer.path) if NAME.fullmatch(other) and other != name]
        write_atomically(writer.path / name, data)
    writer.update_manifest(notes={**writer.manifest.notes, VOCABULARY: entry})
    writer._remove(before)
