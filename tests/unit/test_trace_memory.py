"""Traces are read in groups and without threads; one that does not fit, or lies about its size, is refused unread."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asdsim.errors import TraceError
from asdsim.evaluate.summary import summarise
from asdsim.trace import fits, read_trace, reader
from asdsim.trace.fits import available_memory, check_fits, estimated_bytes
from asdsim.trace.groups import StreamedTrace
from asdsim.trace.reader import load_manifest
from asdsim.trace.schema import TABLES
from asdsim.trace.stored import thinned
from tests.support.toytrace import RAGGED, ToyModel, write_toy_trace
from tests.support.tracefiles import sign_shard

MODEL = ToyModel(seed=5, widths=(4,), divergences=("kl", "js"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_toy_trace(tmp_path / "t", MODEL, empty=False, cover=3)
    return tmp_path / "t"


def replace_shard(folder: Path, table: str, rows: pa.Table, **options: Any) -> Path:
    file = next(folder.glob(f"{table}-*"))
    pq.write_table(rows, file, **{"store_schema": False, "compression": "zstd", **options})
    sign_shard(folder, file.name, rows.num_rows)
    return file


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "ROOM", 8 << 20)


@pytest.mark.usefixtures("small_room")
def test_rows_that_a_file_of_its_size_cannot_hold_are_refused_unread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = next(folder.glob("positions-*"))
    one = pq.read_table(file).slice(0, 1)
    number = 250_000
    columns = [
        pa.repeat(column[0], number) if column[0].is_valid else pa.nulls(number, column.type) for column in one.columns
    ]
    rows = pa.table(columns, schema=one.schema)
    replace_shard(folder, "positions", rows, use_dictionary=True, row_group_size=1 << 20)
    del rows, columns
    assert file.stat().st_size < 60_000
    read = pq.ParquetFile.read_row_group

    def unless_positions(parquet: pq.ParquetFile, *args: Any, **kwargs: Any) -> pa.Table:
        assert "draft_id" not in parquet.schema_arrow.names, "expanded"
        return read(parquet, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", unless_positions)
    with pytest.raises(TraceError, match=r"positions-\d+.parquet: the shard expands to more than \d+ MiB"):
        read_trace(folder)


@pytest.mark.usefixtures("small_room")
def test_text_that_repeats_is_refused_before_it_is_expanded(folder: Path) -> None:
    file = next(folder.glob("requests-*"))
    rows = pq.read_table(file)
    number = 60
    text = "x" * (1 << 20)
    place = rows.column_names.index("prompt_text")
    many = pa.concat_tables([rows.slice(0, 1)] * number)
    repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(number, np.int32)), pa.array([text]))
    many = many.set_column(place, "prompt_text", repeated).combine_chunks()
    schema = pa.schema([pa.field("prompt_text", repeated.type, nullable=False) if field.name == "prompt_text" else field
                        for field in rows.schema])  # fmt: skip
    replace_shard(folder, "requests", many.cast(schema), use_dictionary=["prompt_text"])
    assert file.stat().st_size < 200_000
    with pytest.raises(TraceError, match=r"requests-\d+.parquet: the shard expands to more than"):
        read_trace(folder)


@pytest.mark.usefixtures("small_room")
def test_a_list_that_repeats_is_refused(folder: Path) -> None:
    rows = pq.read_table(next(folder.glob("requests-*")))
    place = rows.column_names.index("prompt_ids")
    lists = pa.array([np.full(4_000_000, 4, np.int32)] + [[4]] * (rows.num_rows - 1), rows.schema.field(place).type)
    rows = rows.set_column(place, rows.schema.field(place), lists)
    replace_shard(folder, "requests", rows, use_dictionary=True)
    with pytest.raises(TraceError, match=r"requests-\d+.parquet: the shard expands to more than"):
        read_trace(folder)


def test_steps_that_claim_endless_blocks_reserve_nothing(folder: Path) -> None:
    """K of 32,766 in every step would be millions of positions: the first one that is missing is named."""
    from tests.support.tracefiles import edit_manifest, edit_shard

    edit_manifest(folder, lambda content: content.update(num_draft_tokens=32766))

    def widen(table: pa.Table) -> pa.Table:
        place = table.column_names.index("num_draft_tokens")
        wide = pa.array(np.full(table.num_rows, 32766, np.int16))
        return table.set_column(place, table.schema.field(place), wide)

    edit_shard(folder, "steps", widen)
    with pytest.raises(TraceError, match="is missing"):
        read_trace(folder)


def test_what_does_not_fit_is_said_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, _ = load_manifest(folder)
    needed = estimated_bytes(manifest)
    monkeypatch.setattr(fits, "available_memory", lambda: int(0.79 * needed))
    monkeypatch.setattr(reader, "read_shard", lambda *args: pytest.fail("read"))
    with pytest.raises(TraceError, match=r"reading it takes about 0\.3 GB of memory, and 0\.2 GB are free \(free some"):
        read_trace(folder)
    monkeypatch.setattr(fits, "available_memory", lambda: int(0.81 * needed))
    check_fits(folder, manifest)
    monkeypatch.setattr(fits, "available_memory", lambda: None)
    check_fits(folder, manifest)


def test_the_estimate_grows_with_the_rows() -> None:
    from asdsim.trace.manifest import Shard
    from tests.support.toytrace import toy_manifest

    shards = [
        Shard("steps-00000.parquet", "steps", 1_200_000, 1, ""),
        Shard("positions-00000.parquet", "positions", 9_600_000, 1, ""),
        Shard("requests-00000.parquet", "requests", 20_000, 5_000_000, ""),
    ]
    manifest = toy_manifest(shards=shards)
    assert estimated_bytes(manifest) == (300 << 20) + 20_000_000 + 120 * 1_200_000 + 372 * 9_600_000


def test_available_memory_is_that_of_this_machine() -> None:
    free = available_memory()
    assert free is None or 1 << 26 < free <= 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("rows", [1, 200, 1 << 20])
def test_a_trace_read_in_groups_has_the_same_rows_and_summary(tmp_path: Path, shards: int, rows: int) -> None:
    folder = tmp_path / "t"
    write_toy_trace(folder, RAGGED, count=9, cover=8, shards=shards)
    whole, streamed = read_trace(folder), StreamedTrace(folder, rows=rows)
    assert summarise(streamed) == summarise(whole)
    groups = list(streamed.groups())
    assert len(groups) == {1: 9, 200: len(groups), 1 << 20: 1}[rows] and len(groups) > (rows == 200)
    for table in TABLES:
        joined = pa.concat_tables([getattr(group, table) for group in groups])
        for name in joined.column_names:
            one, other = joined[name], getattr(whole, table)[name]
            if pa.types.is_dictionary(one.type):
                one, other = one.cast(pa.string()), other.cast(pa.string())
            assert one.equals(other), (table, name)
    assert streamed.request_ids() == whole.request_ids() and streamed.request_records() == whole.request_records()
    assert np.array_equal(streamed.prompt_tokens, whole.prompt_tokens)
    names = ["wave", "start_pos", "draft_us"]
    mine, owner = streamed.step_columns(names)
    assert all(np.array_equal(mine[name], whole.column("steps", name)) for name in names)
    assert np.array_equal(owner, whole.step_request)
    mine, owner = streamed.step_columns(["start_pos", "step_id"], 50)
    theirs, others = whole.step_columns(["start_pos", "step_id"], 50)
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine) and np.array_equal(owner, others)
    assert len(owner) in range(45, 56) and whole.steps.num_rows == 99


@pytest.mark.parametrize("every", [1, 7, 60])
def test_steps_that_are_kept_lie_evenly_in_requests_of_any_length(every: int) -> None:
    parts = [thinned(first, 10_000, 600_000, 20_000) for first in range(0, 600_000, 10_000)]
    kept = np.concatenate([first + part for first, part in zip(range(0, 600_000, 10_000), parts, strict=True)])
    assert np.array_equal(kept, thinned(0, 600_000, 600_000, 20_000))
    share = np.bincount(kept % every) / (600_000 / every)
    assert np.abs(share - 1 / 30).max() < 0.001
    assert thinned(5, 10, 100, 100) == thinned(5, 10, 100, None) == slice(None)


def test_every_edit_that_a_whole_read_refuses_one_in_groups_refuses_alike(tmp_path: Path) -> None:
    from tests.support.tracefiles import edit_shard
    from tests.unit.test_trace_refusals import EDITS
    from tests.unit.test_trace_refusals import MODEL as model

    write_toy_trace(tmp_path / "base", model, empty=False, cover=3)
    for name, table, edit, _ in EDITS:
        folder = Path(shutil.copytree(tmp_path / "base", tmp_path / name.replace("/", " ")))
        edit_shard(folder, table, edit)
        with pytest.raises(TraceError) as whole:
            read_trace(folder)
        with pytest.raises(TraceError) as in_groups:
            list(StreamedTrace(folder, rows=100).groups())
        assert str(in_groups.value) == str(whole.value), name


READING = """
import os, sys
from pathlib import Path
import pyarrow.compute, pyarrow.parquet
from asdsim.trace.groups import StreamedTrace
from asdsim.trace.parts import find_places
from asdsim.trace.reader import read_trace
path = Path(sys.argv[1])
before = os.listdir("/proc/self/task")
assert read_trace(path).vocabulary
assert find_places(path).ids == StreamedTrace(path).request_ids()
assert sum(group.positions.num_rows for group in StreamedTrace(path, rows=300).groups()) > 1000
assert os.listdir("/proc/self/task") == before
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system lists no threads")
def test_reading_starts_no_thread_that_could_abort_a_process_at_its_end() -> None:
    trace = Path(__file__).parents[2] / "traces" / "smollm2-dspark"
    done = subprocess.run([sys.executable, "-c", READING, str(trace)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
