"""Read a trace: every file, checksum, row and edge is checked before anything is handed out."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import TraceError
from . import manifest as manifests
from .check import check_trace, check_unique_requests
from .manifest import MANIFEST, Manifest, Shard
from .schema import TABLES, file_schema, table_schema
from .stored import Origin, Trace
from .tables import Array, to_numpy, unpack

RESTORE = "restore the file from a copy, or capture again"


def read_trace(path: str | os.PathLike[str], *, verify: bool = True) -> Trace:
    """Read and validate a trace.

    Parameters
    ----------
    path : path
        The directory.
    verify : bool
        False skips the SHA-256 of the shards; everything else is still checked.

    Raises
    ------
    TraceError
        If anything is missing, damaged, inconsistent or of another schema: which file, row, request, step and
        position, and what to do.
    """
    folder = Path(path)
    while True:
        manifest, raw = load_manifest(folder)
        try:
            tables = {table: _read_table(folder, manifest, table, verify) for table in TABLES}
        except TraceError:
            # A writer may have merged shards since the manifest was read: then read anew.
            if _changed(folder, raw):
                continue
            raise
        trace = build_trace(folder, manifest, {name: found[0] for name, found in tables.items()}, tables)
        if verify and manifests.VOCABULARY in manifest.notes and not trace.vocabulary:
            raise TraceError("the vocabulary is empty", where=str(folder), fix=RESTORE)
        return trace


def _changed(folder: Path, raw: bytes) -> bool:
    try:
        return (folder / MANIFEST).read_bytes() != raw
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
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        what = f"no {MANIFEST}: not a trace" if folder.is_dir() else "no such directory"
        raise TraceError(what, where=str(folder), fix="give the directory that `asdsim capture` wrote") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot be read: {_reason(error)}", where=str(file)) from None
    return manifests.parse(raw, str(file)), raw


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def _read_table(folder: Path, manifest: Manifest, table: str, verify: bool) -> tuple[pa.Table, list[Shard]]:
    shards = manifest.shards_of(table)
    parts = [read_shard(folder, shard, manifest.top_k, verify) for shard in shards]
    if not parts:
        return table_schema(table, manifest.top_k).empty_table(), []
    return pa.concat_tables(parts).unify_dictionaries().combine_chunks(), shards


def read_shard(folder: Path, shard: Shard, top_k: int, verify: bool) -> pa.Table:
    """Read one shard as rows of its table.

    Raises
    ------
    TraceError
        If the file is missing, differs from what the manifest says, or is no Parquet file of the schema.
    """
    file = folder / shard.name
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise TraceError("the shard is missing", where=str(file), fix=RESTORE) from None
    except OSError as error:
        raise TraceError(f"the shard cannot be read: {_reason(error)}", where=str(file), fix=RESTORE) from None
    if len(data) != shard.bytes:
        raise TraceError(
            f"the shard has {len(data)} bytes, the manifest says {shard.bytes}", where=str(file), fix=RESTORE
        )
    if verify and hashlib.sha256(data).hexdigest() != shard.sha256:
        raise TraceError("the SHA-256 of the shard is not that of the manifest", where=str(file), fix=RESTORE)
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet:
            schema = parquet.schema_arrow
            expected = file_schema(shard.table, top_k)
            if not schema.remove_metadata().equals(expected):
                raise TraceError(_schema_difference(schema, expected), where=str(file), fix=RESTORE)
            if parquet.metadata.num_rows != shard.rows:
                raise TraceError(
                    f"the shard has {parquet.metadata.num_rows} rows, the manifest says {shard.rows}",
                    where=str(file),
                    fix=RESTORE,
                )
            raw = parquet.read()
        raw.validate(full=True)  # also refuses text that is not UTF-8
        if raw.num_rows != shard.rows:
            raise TraceError(f"only {raw.num_rows} of {shard.rows} rows can be read", where=str(file), fix=RESTORE)
        return unpack(shard.table, raw, top_k)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise TraceError(f"not a readable Parquet shard: {_reason(error)}", where=str(file), fix=RESTORE) from None


def _schema_difference(found: pa.Schema, expected: pa.Schema) -> str:
    for field_ in expected:
        at = found.get_field_index(field_.name)
        if at < 0:
            return f"column {field_.name!r} is missing"
        other = found.field(at)
        if not other.equals(field_):
            return (
                f"column {field_.name!r} is {other.type}{'' if other.nullable else ' not null'}, expected {field_.type}"
                f"{'' if field_.nullable else ' not null'}"
            )
    extra = [name for name in found.names if name not in expected.names]
    return f"unknown column {extra[0]!r}" if extra else "columns are out of order"


def build_trace(
    folder: Path,
    manifest: Manifest,
    tables: dict[str, pa.Table],
    origins: dict[str, tuple[pa.Table, list[Shard]]] | None = None,
) -> Trace:
    """Sort three tables, connect their rows, and check them.

    Raises
    ------
    TraceError
        See :func:`read_trace`.
    """
    order: dict[str, npt.NDArray[np.int64] | None] = dict.fromkeys(TABLES)
    requests, steps, positions = (tables[name] for name in TABLES)

    order["requests"] = _order(to_numpy(requests["request_index"]))
    requests = _take(requests, order["requests"])
    origin = _origins(origins, order)
    check_unique_requests(requests, origin.get("requests"), folder)
    request_row = {name: row for row, name in enumerate(requests["request_id"].to_pylist())}

    def rows_of(table_name: str, table: pa.Table) -> npt.NDArray[np.int32]:
        keys = table["request_id"].combine_chunks()
        if isinstance(keys, pa.ChunkedArray):
            keys = keys.chunk(0) if keys.num_chunks else pa.array([], keys.type)
        names = keys.dictionary.to_pylist()
        lookup = np.array([request_row.get(name, -1) for name in names] or [-1], np.int32)
        found = lookup[keys.indices.to_numpy()] if len(keys) else np.empty(0, np.int32)
        lost = np.flatnonzero(found < 0)
        if lost.size:
            at = origin[table_name].locate(int(lost[0])) if table_name in origin else ""
            raise TraceError(
                f"belongs to request {str(table['request_id'][int(lost[0])])!r}, which the trace does not hold",
                where=f"{folder}: {at}" if at else str(folder),
                fix=RESTORE,
            )
        return found

    step_request = rows_of("steps", steps)
    step_id = to_numpy(steps["step_id"])
    order["steps"] = _order(step_request, step_id)
    steps = _take(steps, order["steps"])
    if order["steps"] is not None:
        step_request = step_request[order["steps"]]

    pos_request, pos_step, pos_i = (
        rows_of("positions", positions),
        to_numpy(positions["step_id"]),
        to_numpy(positions["i"]),
    )
    order["positions"] = _order(pos_request, pos_step, pos_i)
    positions = _take(positions, order["positions"])
    if order["positions"] is not None:
        pos_request = pos_request[order["positions"]]

    widths = to_numpy(steps["num_draft_tokens"]).astype(np.int64) + 1
    trace = Trace(
        path=folder,
        manifest=manifest,
        requests=requests,
        steps=steps,
        positions=positions,
        step_request=step_request,
        pos_ptr=np.concatenate([[0], np.cumsum(widths)]).astype(np.int64),
        step_ptr=np.searchsorted(step_request, np.arange(requests.num_rows + 1)).astype(np.int64),
        _origin=_origins(origins, order),
    )
    check_trace(trace, pos_request)
    return trace


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


def _origins(
    origins: dict[str, tuple[pa.Table, list[Shard]]] | None, order: dict[str, npt.NDArray[np.int64] | None]
) -> dict[str, Origin]:
    found = {}
    for name, (_, shards) in (origins or {}).items():
        if shards:
            starts = np.concatenate([[0], np.cumsum([shard.rows for shard in shards])[:-1]]).astype(np.int64)
            found[name] = Origin([shard.name for shard in shards], starts, order[name])
    return found
