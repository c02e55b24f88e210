"""Take trace directories apart in tests: compare them, edit a shard or the manifest and sign it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asdsim.trace.manifest import MANIFEST, first_difference, seal
from asdsim.trace.reader import Trace
from asdsim.trace.schema import TABLES, parquet_options

TIMES = ("draft_us", "verify_us", "select_us")


def difference(a: Trace, b: Trace, *, times: bool = True) -> str | None:
    """Return the first thing in which two traces differ, or None. ``times=False`` leaves timings out."""
    found = first_difference(a.manifest, b.manifest)
    if found is not None:
        return f"manifest field {found[0]}"
    if a.manifest.grids != b.manifest.grids:
        return "manifest field grids"
    for table in TABLES:
        left, right = getattr(a, table), getattr(b, table)
        if left.schema != right.schema or left.num_rows != right.num_rows:
            return f"{table}: schema or number of rows"
        for name in left.column_names:
            one, other = left[name], right[name]
            if pa.types.is_dictionary(one.type):  # the order inside a dictionary says nothing
                one, other = one.cast(pa.string()), other.cast(pa.string())
            if (times or name not in TIMES) and not one.equals(other):
                return f"{table}: column {name}"
    return None


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None], *, sign: bool = True) -> None:
    """Change the manifest in place; ``sign`` computes its checksum anew."""
    content = json.loads((folder / MANIFEST).read_text())
    edit(content)
    if sign:
        content.pop("checksum", None)
        (folder / MANIFEST).write_bytes(seal(content))
    else:
        (folder / MANIFEST).write_text(json.dumps(content))


def sign_shard(folder: Path, name: str, rows: int | None = None) -> None:
    """Bring the manifest up to date with a shard that was changed."""
    data = (folder / name).read_bytes()

    def edit(content: dict[str, Any]) -> None:
        for shard in content["shards"]:
            if shard["name"] == name:
                shard["sha256"], shard["bytes"] = hashlib.sha256(data).hexdigest(), len(data)
                shard["rows"] = shard["rows"] if rows is None else rows

    edit_manifest(folder, edit)


def edit_shard(folder: Path, table: str, edit: Callable[[pa.Table], pa.Table], number: int = 0) -> None:
    """Change the rows of the n-th shard of a table, keep its schema where it still fits, and sign everything again."""
    name = sorted(file.name for file in folder.glob(f"{table}-*"))[number]
    rows = edit(pq.read_table(folder / name))
    options = parquet_options(table)
    if set(options["column_encoding"]) - set(rows.column_names):  # type: ignore[call-overload]
        options = {}
    pq.write_table(rows, folder / name, **options)
    sign_shard(folder, name, rows.num_rows)


def set_cell(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    """Return an edit that puts one value into one row of a column."""

    def edit(table: pa.Table) -> pa.Table:
        at = table.column_names.index(column)
        values = table[column].to_pylist()
        values[row] = value
        return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))

    return edit
