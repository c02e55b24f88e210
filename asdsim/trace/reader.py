"""Read a trace: every file, checksum, row and edge is checked before anything is handed out."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..files import is_remote, read_octets, reason_of, shown, to_path
from . import manifest as manifests
from .check import check_edges, check_requests, check_steps
from .fits import check_fits
from .manifest import MANIFEST, Manifest, Shard
from .rows import Positions, request_rows
from .schema import file_schema, table_schema
from .sizes import EXPANSION, RESTORE, ROOM, check_size, text_bytes, unpacked_bytes
from .stored import Origin, Part, Trace
from .tables import Array, open_parquet, read_columns, to_numpy, unpack


def read_trace(path: str | os.PathLike[str], *, verify: bool = True) -> Trace:
    """Read and validate a trace.

    Parameters
    ----------
    path : path
        The directory, local or ``s3://BUCKET/NAME``.
    verify : bool
        False skips the SHA-256 of the shards; everything else is still checked.

    Raises
    ------
    TraceError
        If anything is missing, damaged, inconsistent or of another schema: which file, row, request, step and
        position, and what to do.
    """
    folder = to_path(path)
    while True:
        manifest, raw = load_manifest(folder)
        check_fits(folder, manifest)

        def parts(table: str, manifest: Manifest = manifest) -> Iterator[Part]:
            for shard in manifest.shards_of(table):
                yield from read_shard(folder, shard, manifest.top_k, verify)

        try:
            rows = sum(shard.rows for shard in manifest.shards_of("positions"))
            requests, steps = list(parts("requests")), list(parts("steps"))
            trace = build_trace(folder, manifest, requests, steps, parts("positions"), rows=rows)
            if verify and manifests.VOCABULARY in manifest.notes and not trace.vocabulary:
                raise TraceError("the vocabulary is empty", where=str(folder), fix=RESTORE)
            return trace
        except TraceError:
            # A writer may have merged shards since the manifest was read: then read it again.
            if not changed(folder, raw):
                raise


def changed(folder: Path, raw: bytes) -> bool:
    """Return whether the manifest of a trace is no longer the one with these bytes."""
    try:
        return read_octets(folder / MANIFEST) != raw
    except OSError:
        return False


def load_manifest(folder: Path) -> tuple[Manifest, bytes]:
    """Read the manifest of a trace; return it with the bytes of its file.

    Raises
    ------
    TraceError
        If the directory holds no trace, or its manifest cannot be trusted.
    """
    file = folder / MANIFEST
    try:
        raw = read_octets(file)
    except (FileNotFoundError, NotADirectoryError):
        absent = "no such trace" if is_remote(folder) else "no such directory"
        what = f"no {MANIFEST}: not a trace" if folder.is_dir() else absent
        raise TraceError(what, where=str(folder), fix="give the directory that `asdsim capture` wrote") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot be read: {_reason(error)}", where=str(file)) from None
    return manifests.parse(raw, str(file)), raw


def _reason(error: BaseException) -> str:
    return reason_of(error) or shown((str(error) or type(error).__name__).splitlines()[0])


def read_shard(
    folder: Path, shard: Shard, top_k: int, verify: bool, only: Container[int] | None = None
) -> Iterator[Part]:
    """Yield the rows of one shard, one row group at a time; with ``only``, those row groups alone.

    Raises
    ------
    TraceError
        If the file is missing, differs from what the manifest says, is not a Parquet file of the schema, or would take
        far more memory than its size can account for.
    """
    file = folder / shard.name
    data = _read_file(file, shard)
    if verify and hashlib.sha256(data).hexdigest() != shard.sha256:
        raise TraceError("the SHA-256 of the shard does not match the manifest", where=str(file), fix=RESTORE)
    expected = file_schema(shard.table, top_k)
    texts = [field.name for field in expected if pa.types.is_string(field.type)]
    try:
        with open_parquet(data, texts) as parquet:
            schema = parquet.metadata.schema.to_arrow_schema()
            if not schema.remove_metadata().equals(expected):
                raise TraceError(_schema_difference(schema, expected), where=str(file), fix=RESTORE)
            if parquet.metadata.num_rows != shard.rows:
                raise TraceError(
                    f"the shard has {parquet.metadata.num_rows} rows, the manifest says {shard.rows}",
                    where=str(file),
                    fix=RESTORE,
                )
            room = ROOM + EXPANSION * shard.bytes
            check_size(unpacked_bytes(parquet.metadata, expected), room, file)
            first = taken = 0
            for group in range(parquet.num_row_groups):
                if only is not None and group not in only:
                    first += parquet.metadata.row_group(group).num_rows
                    continue
                raw = read_columns(parquet, group)
                taken += text_bytes(raw)
                check_size(taken, room, file)
                raw = raw.cast(expected) if shard.table == "requests" else raw
                raw.validate(full=True)  # also refuses text that is not UTF-8
                yield Part(unpack(shard.table, raw, top_k), shard.name, first)
                first += raw.num_rows
        if first != shard.rows:
            raise TraceError(f"only {first} of {shard.rows} rows can be read", where=str(file), fix=RESTORE)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise TraceError(f"not a readable Parquet shard: {_reason(error)}", where=str(file), fix=RESTORE) from None


def _read_file(file: Path, shard: Shard) -> bytes:
    try:
        if is_remote(file):
            data = read_octets(file, shard.bytes + 1)
            if len(data) != shard.bytes:
                more = "more" if len(data) > shard.bytes else len(data)
                what = f"the shard has {more} bytes, the manifest says {shard.bytes}"
                raise TraceError(what, where=str(file), fix=RESTORE)
            return data
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0))) as handle:
            status = os.fstat(handle.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TraceError("the shard cannot be read: not a file", where=str(file), fix=RESTORE)
            size = status.st_size
            data = handle.read() if size == shard.bytes else b""
    except FileNotFoundError:
        raise TraceError("the shard is missing", where=str(file), fix=RESTORE) from None
    except OSError as error:
        raise TraceError(f"the shard cannot be read: {_reason(error)}", where=str(file), fix=RESTORE) from None
    if size != shard.bytes or len(data) != size:
        raise TraceError(f"the shard has {size} bytes, the manifest says {shard.bytes}", where=str(file), fix=RESTORE)
    return data


def _schema_difference(schema: pa.Schema, expected: pa.Schema) -> str:
    for field_ in expected:
        place = schema.get_field_index(field_.name)
        if place < 0:
            return f"column {field_.name!r} is missing"
        other = schema.field(place)
        if not other.equals(field_):
            return (
                f"column {field_.name!r} is {shown(other.type)}{'' if other.nullable else ' not null'}, "
                f"expected {field_.type}{'' if field_.nullable else ' not null'}"
            )
    extra = [name for name in schema.names if name not in expected.names]
    return f"unknown column {extra[0]!r}" if extra else "columns are out of order"


def only_requests(folder: Path, manifest: Manifest, requests: list[Part], first: int = 0) -> Trace:
    """Return a trace of checked requests that has no step yet; see :func:`build_trace`."""
    table = _joined(requests, "requests", manifest)
    order = _order(to_numpy(table["request_index"]))
    trace = Trace(
        path=folder,
        manifest=manifest,
        requests=_take(table, order),
        steps=table_schema("steps").empty_table(),
        positions=table_schema("positions", manifest.top_k).empty_table(),
        step_request=np.empty(0, np.int32),
        pos_ptr=np.zeros(1, np.int64),
        step_ptr=np.zeros(table.num_rows + 1, np.int64),
        first=first,
        _origin={"requests": Origin.of(requests, order)},
    )
    check_requests(trace)
    return trace


def build_trace(
    folder: Path,
    manifest: Manifest,
    requests: list[Part],
    steps: list[Part],
    positions: Iterable[Part],
    *,
    rows: int,
    first: int = 0,
) -> Trace:
    """Sort three tables, connect their rows, and check them.

    Parameters
    ----------
    folder : Path
        For messages, and the path of the trace.
    manifest : Manifest
    requests, steps, positions : parts of each table
        Positions are taken one at a time.
    rows : int
        Rows that the parts of ``positions`` hold together.
    first : int
        ``request_index`` of the first request.

    Raises
    ------
    TraceError
        See :func:`read_trace`.
    """
    trace = only_requests(folder, manifest, requests, first)

    known = {name: row for row, name in enumerate(trace.request_ids())}
    owner = np.concatenate([np.empty(0, np.int32), *(request_rows(part, known, folder) for part in steps)])
    table = _joined(steps, "steps", manifest)
    order = _order(owner, to_numpy(table["step_id"]))
    trace.steps = _take(table, order)
    trace.step_request = owner if order is None else owner[order]
    trace.step_ptr = np.searchsorted(trace.step_request, np.arange(trace.requests.num_rows + 1)).astype(np.int64)
    trace._origin["steps"] = Origin.of(steps, order)
    check_steps(trace)
    widths = trace.column("steps", "num_draft_tokens").astype(np.int64) + 1
    trace.pos_ptr = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)

    sorter = Positions(trace, known, rows)
    for part in positions:
        sorter.add(part)
    trace.positions, trace._origin["positions"] = sorter.finish()
    check_edges(trace)
    return trace


def _joined(parts: list[Part], table: str, manifest: Manifest) -> pa.Table:
    if not parts:
        return table_schema(table, manifest.top_k).empty_table()
    return pa.concat_tables([part.table for part in parts]).unify_dictionaries().combine_chunks()


def _order(*keys: Array) -> npt.NDArray[np.int64] | None:
    """Return the stable order by the keys, first key first, or None where the rows are in order already."""
    n = len(keys[0])
    ahead = np.zeros(max(n - 1, 0), bool)  # a row that is greater than the one before, by the keys so far
    sorted_already = True
    for key in keys:
        step = np.sign(np.diff(key.astype(np.int64)))
        if np.any((step < 0) & ~ahead):
            sorted_already = False
            break
        ahead |= step > 0
    return None if sorted_already else np.lexsort(tuple(reversed(keys))).astype(np.int64)


def _take(table: pa.Table, order: npt.NDArray[np.int64] | None) -> pa.Table:
    return table if order is None else table.take(pa.array(order)).combine_chunks()
