"""Between records, the tables that a reader hands out, and the tables that a shard holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import TraceError
from ..records import NO_PARENT, RequestRecord, StepRecord
from .schema import BEYOND_TOP, DIVERGENCES, IMPLIED, SPREAD, columns_of, file_schema, spread_names, table_schema

Array = npt.NDArray[Any]


def open_parquet(source: bytes | BinaryIO, texts: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a Parquet file for :func:`read_columns`; columns named in ``texts`` are read as dictionaries."""
    where = pa.BufferReader(source) if isinstance(source, bytes) else source
    return pq.ParquetFile(where, read_dictionary=list(texts), page_checksum_verification=True, pre_buffer=False)


def read_columns(parquet: pq.ParquetFile, group: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns (by default all) of one row group (by default of all), without Arrow's threads.

    A thread of Arrow may release the file, a Python object, after the read has returned. If the interpreter is shutting
    down by then, the process aborts: https://github.com/apache/arrow/issues/34314.
    """
    if group is None:
        return parquet.read(columns, use_threads=False)
    return parquet.read_row_group(group, columns, use_threads=False)


def to_numpy(column: pa.ChunkedArray | pa.Array) -> Array:
    """Return an Arrow column as numpy: a missing integer is -1, a missing float NaN, a missing string None.

    Fixed-size lists give a matrix; lists and strings an array of objects.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # a table without a row has no chunk
            column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        flat = column.flatten()  # unlike .values, honours the slice
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(column), kind.list_size)
    if pa.types.is_list(kind):
        bounds = column.offsets.to_numpy() - (column.offsets[0].as_py() if len(column) else 0)
        flat = column.flatten().to_numpy(zero_copy_only=False)
        out = np.empty(len(column), object)
        for row in range(len(column)):
            out[row] = flat[bounds[row] : bounds[row + 1]]
        return out
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        return np.array(column.to_pylist(), object)
    if column.null_count:
        column = column.fill_null(float("nan") if pa.types.is_floating(kind) else -1)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def is_valid(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Return where a column holds a value, as bool (n,)."""
    if column.null_count == 0:
        return np.ones(len(column), bool)
    return np.asarray(column.is_valid().combine_chunks().to_numpy(zero_copy_only=False))


def matrix_column(values: npt.NDArray[np.generic]) -> pa.Array:
    """Return a matrix (n, k) as a fixed-size list column."""
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(values.dtype), nullable=False), values.shape[1])
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).ravel()), type=kind)


def requests_table(requests: Sequence[RequestRecord], first_index: int) -> pa.Table:
    """Return the rows of ``requests``."""
    columns = {
        "request_index": range(first_index, first_index + len(requests)),
        "request_id": [request.request_id for request in requests],
        "task": [request.task for request in requests],
        "prompt_ids": [list(request.prompt_ids) for request in requests],
        "prompt_text": [request.prompt_text for request in requests],
        "reference": [request.reference for request in requests],
        "max_new_tokens": [request.max_new_tokens for request in requests],
        "eos_ids": [list(request.eos_ids) for request in requests],
        "stop": [request.stop for request in requests],
    }
    schema = table_schema("requests")
    return _guard(
        lambda: pa.table({f.name: pa.array(columns[f.name], f.type) for f in schema}, schema=schema),
        f"request {requests[0].request_id!r}" if requests else "",
    )


def steps_table(request_id: str, steps: Sequence[StepRecord]) -> pa.Table:
    """Return the rows of ``steps`` for the steps of one request."""

    def build() -> pa.Table:
        columns: dict[str, pa.Array] = {"request_id": _repeat(request_id, len(steps))}
        for field in table_schema("steps"):
            if field.name == "request_id":
                continue
            values = [getattr(step, field.name) for step in steps]
            if field.name.startswith("parent_"):
                values = [None if value == NO_PARENT else value for value in values]
            columns[field.name] = pa.array(values, field.type)
        return pa.table(columns, schema=table_schema("steps"))

    return _guard(build, f"request {request_id!r}")


def positions_table(request_id: str, steps: Sequence[StepRecord], top_k: int) -> pa.Table:
    """Return the rows of ``positions`` for the steps of one request.

    Raises
    ------
    TraceError
        If an array of a step does not have the shape or kind that its K requires.
    """
    for step in steps:
        _check_shapes(request_id, step, top_k)
    schema = table_schema("positions", top_k)

    def build() -> pa.Table:
        rows = sum(step.num_draft_tokens + 1 for step in steps)
        i = _concat([np.arange(step.num_draft_tokens + 1) for step in steps], np.int16)
        bonus = _concat([np.arange(step.num_draft_tokens + 1) == step.num_draft_tokens for step in steps], np.bool_)

        def drafts(arrays: Sequence[Array | None], dtype: type) -> pa.Array:
            """K values per step, null at the bonus row, and all null where a step has none."""
            parts, nulls = [], []
            for step, array in zip(steps, arrays, strict=True):
                width = step.num_draft_tokens
                parts.append(np.append(np.zeros(width, dtype) if array is None else array, 0))
                nulls.append(np.full(width + 1, array is None))
            return pa.array(_concat(parts, dtype), mask=_concat(nulls, np.bool_) | bonus)

        columns: dict[str, pa.Array] = {
            "request_id": _repeat(request_id, rows),
            "step_id": pa.array(
                np.repeat([step.step_id for step in steps], [step.num_draft_tokens + 1 for step in steps]), pa.int32()
            ),
            "i": pa.array(i),
            "parent_position": pa.array(i - np.int16(1), mask=i == 0),
            "draft_id": drafts([step.draft_ids for step in steps], np.int32),
            "argmax_id": pa.array(_concat([step.argmax_ids for step in steps], np.int32)),
            "draft_logit": drafts([step.draft_logits for step in steps], np.float32),
            "rank": drafts([step.ranks for step in steps], np.int32),
            "top_ids": matrix_column(_concat([step.top_ids for step in steps], np.int32, (0, top_k))),
            "top_logits": matrix_column(_concat([step.top_logits for step in steps], np.float32, (0, top_k))),
            "logsumexp": pa.array(_concat([step.logsumexp for step in steps], np.float32)),
            "entropy": pa.array(_concat([step.entropy for step in steps], np.float32)),
            "draft_logprob": drafts([step.draft_logprobs for step in steps], np.float32),
        }
        for name in DIVERGENCES:
            columns[name] = drafts([step.divergences.get(name) for step in steps], np.float32)
        return pa.table(columns, schema=schema)

    return _guard(build, f"request {request_id!r}")


def _check_shapes(request_id: str, step: StepRecord, top_k: int) -> None:
    drafts = step.num_draft_tokens
    rows = drafts + 1
    shapes: list[tuple[str, Array | None, tuple[int, ...]]] = [
        ("draft_ids", step.draft_ids, (drafts,)),
        ("argmax_ids", step.argmax_ids, (rows,)),
        ("draft_logits", step.draft_logits, (drafts,)),
        ("ranks", step.ranks, (drafts,)),
        ("top_ids", step.top_ids, (rows, top_k)),
        ("top_logits", step.top_logits, (rows, top_k)),
        ("logsumexp", step.logsumexp, (rows,)),
        ("entropy", step.entropy, (rows,)),
        ("draft_logprobs", step.draft_logprobs, (drafts,)),
        *((name, array, (drafts,)) for name, array in step.divergences.items()),
    ]
    for name, array, shape in shapes:
        where = f"request {request_id!r}, step {step.step_id}"
        if array is None:
            continue
        if np.shape(array) != shape:
            raise TraceError(f"{name} has shape {np.shape(array)}, not {shape}", where=where)
        wanted = "integers" if name.endswith(("ids", "ranks")) else "numbers"
        kind = np.asarray(array).dtype.kind
        if kind not in ("iu" if wanted == "integers" else "iuf"):
            raise TraceError(f"{name} holds {np.asarray(array).dtype}, not {wanted}", where=where)
    unknown = set(step.divergences) - set(DIVERGENCES)
    if unknown:
        raise TraceError(
            f"unknown divergence {sorted(unknown)[0]!r}",
            where=f"request {request_id!r}, step {step.step_id}",
            fix=f"known: {', '.join(DIVERGENCES)}",
        )


def _concat(parts: Sequence[Array], dtype: type, empty: tuple[int, ...] = (0,)) -> Array:
    joined = np.concatenate(parts) if parts else np.empty(empty, dtype)
    if joined.dtype.kind in "iu" and joined.dtype != dtype and joined.size:
        limits = np.iinfo(dtype)  # type: ignore[type-var]
        if joined.min() < limits.min or joined.max() > limits.max:
            raise pa.ArrowInvalid(f"integer out of the range of {np.dtype(dtype)}")
    return joined.astype(dtype, copy=False)


def _repeat(text: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text], pa.string()))


def _guard(build: Callable[[], pa.Table], where: str) -> pa.Table:
    """Run ``build`` with every complaint of Arrow about a value turned into a :class:`TraceError`."""
    try:
        return build()
    except (pa.ArrowException, TypeError, ValueError, OverflowError, UnicodeError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"a value cannot be stored: {message}", where=where) from None


def pack(table_name: str, table: pa.Table, top_k: int) -> pa.Table:
    """Return a table as a shard holds it: without what other columns imply."""
    schema = file_schema(table_name, top_k)
    columns: list[pa.ChunkedArray | pa.Array] = []
    beyond = to_numpy(table["rank"]) >= top_k if table_name == "positions" else np.empty(0, bool)
    for column in columns_of(table_name):
        values = table[column.name]
        if column.in_file == IMPLIED:
            continue
        if column.in_file == SPREAD:
            matrix = to_numpy(values)
            columns += [pa.array(np.ascontiguousarray(matrix[:, rank])) for rank in range(top_k)]
        elif column.in_file == BEYOND_TOP:
            columns.append(pa.array(to_numpy(values), values.type, mask=~beyond))
        elif pa.types.is_dictionary(values.type):
            columns.append(values.cast(pa.string()))
        else:
            columns.append(values)
    return pa.table(columns, schema=schema)


def unpack(table_name: str, table: pa.Table, top_k: int) -> pa.Table:
    """Return the rows of a shard as the reader hands them out: the inverse of :func:`pack`.

    A value beyond the top k that a damaged shard lacks stays null, and is for the caller to refuse.
    """
    schema = table_schema(table_name, top_k)
    if table_name != "positions":
        columns = [
            _by_dictionary(table[field.name]) if pa.types.is_dictionary(field.type) else table[field.name]
            for field in schema
        ]
        return pa.table(columns, schema=schema)
    tops = {
        name: np.column_stack([to_numpy(table[flat]) for flat in spread_names(name, top_k)])
        for name in ("top_ids", "top_logits")
    }
    rank, known = to_numpy(table["rank"]), is_valid(table["rank"])
    ranked = known & (rank >= 0) & (rank < top_k)
    rows = np.flatnonzero(ranked)
    out: list[pa.ChunkedArray | pa.Array] = []
    for column in columns_of(table_name):
        if column.in_file == IMPLIED:
            out.append(pa.array(np.ascontiguousarray(tops["top_ids"][:, 0])))
        elif column.in_file == SPREAD:
            out.append(matrix_column(tops[column.name]))
        elif column.in_file == BEYOND_TOP:
            source = tops["top_ids" if column.name == "draft_id" else "top_logits"]
            stored = table[column.name]
            missing = ~is_valid(stored)
            values = to_numpy(stored).copy()
            fill = rows[missing[rows]]
            values[fill] = source[fill, rank[fill]]
            missing[fill] = False
            out.append(pa.array(values, stored.type, mask=missing))
        elif column.name == "request_id":
            out.append(_by_dictionary(table[column.name]))
        else:
            out.append(table[column.name])
    return pa.table(out, schema=schema)


def _by_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
