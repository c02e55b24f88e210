"""How much memory a Parquet file of a trace may take: looked up before anything is unpacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import TraceError

RESTORE = "restore the file from a copy, or capture again"
ROOM, EXPANSION = 256 << 20, 64
"""A file may take this many bytes of memory, and this many times its size more. Real shards take some three times their
size, and the writer keeps them below about 100 MiB; a file of one repeated value can pretend to hold anything."""


def unpacked_bytes(metadata: pq.FileMetaData, schema: pa.Schema) -> int:
    """Return the bytes that a Parquet file says its columns take once read, text that repeats counted once."""
    total = 0
    widths = [_width(field.type) for field in schema]
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group)
        for column, width in zip(range(rows.num_columns), widths, strict=False):
            chunk = rows.column(column)
            total += max(chunk.total_uncompressed_size, width * max(chunk.num_values, rows.num_rows))
    return total


def _width(kind: pa.DataType) -> int:
    if pa.types.is_binary(kind):
        return 64  # each becomes an object of Python
    return 4 if pa.types.is_nested(kind) or pa.types.is_string(kind) else kind.bit_width // 8


def text_bytes(table: pa.Table) -> int:
    """Return the bytes of the text of a table that was read by dictionary, each repetition counted."""
    total = 0
    for column in table.columns:
        for chunk in column.chunks:
            if pa.types.is_dictionary(chunk.type):
                lengths = np.append(pc.binary_length(chunk.dictionary).fill_null(0).to_numpy(zero_copy_only=False), 0)
                total += int(lengths[chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False)].sum())
    return total


def check_size(size: int, room: int, file: Path, what: str = "shard") -> None:
    """Refuse a file that takes more memory than there is room for.

    Raises
    ------
    TraceError
    """
    if size > room:
        raise TraceError(
            f"the {what} expands to more than {room >> 20} MiB, which its size cannot account for",
            where=str(file), fix=RESTORE,
        )  # fmt: skip
