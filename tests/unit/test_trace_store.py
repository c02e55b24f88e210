"""What goes in comes out: rows, order, nulls, shards, and the columns as numpy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asdsim.errors import TraceError
from asdsim.records import FORBIDDEN_LOGIT, RequestRecord, StepRecord
from asdsim.trace import TraceWriter, read_trace
from asdsim.trace import schema as schemas
from asdsim.trace.tables import pack, positions_table, to_numpy, unpack
from tests.support.toytrace import RAGGED, ToyModel, big_request, toy_manifest, write_toy_trace
from tests.support.tracefiles import difference


def assert_equal_records(found: list[StepRecord], expected: list[StepRecord]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for field in dataclasses.fields(StepRecord):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype and np.array_equal(x, y), field.name
            elif field.name == "divergences":
                assert {k: v.tolist() for k, v in x.items()} == {k: v.tolist() for k, v in y.items()}
            else:
                assert x == y, field.name


@pytest.mark.parametrize("widths", [(7,), (1,), (16,), (0,), (0, 1, 2, 5, 7, 16)], ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_records_round_trip(tmp_path: Path, widths: tuple[int, ...], shards: int) -> None:
    model = ToyModel(seed=11, widths=widths, logprobs=max(widths) > 0)
    content = write_toy_trace(tmp_path / "t", model, cover=4, shards=shards)
    trace = read_trace(tmp_path / "t")
    assert trace.request_records() == [request for request, _ in content]
    for request, steps in content:
        assert_equal_records(trace.steps_of(request.request_id), steps)


def test_toy_traces_hold_what_tests_of_the_walk_need(tmp_path: Path) -> None:
    trace = None
    ends = set()
    for seed in range(4):
        content = write_toy_trace(tmp_path / str(seed), ToyModel(seed=seed, widths=RAGGED.widths), cover=3)
        trace = read_trace(tmp_path / str(seed))
        widths = set(trace.column("steps", "num_draft_tokens").tolist())
        assert {0, 16} <= widths
        ranks, logits = trace.column("positions", "rank"), trace.column("positions", "draft_logit")
        assert ((ranks > 0) & (logits == trace.column("positions", "top_logits")[:, 0])).any(), "no tied mismatch"
        for request, steps in content:
            for step in steps:
                eos = [i for i, x in enumerate(step.draft_ids) if x in request.eos_ids]
                if eos and request.stop == "natural" and eos[0] < step.num_draft_tokens - 1:
                    ends.add("eos inside a block")
                if step.num_draft_tokens > request.max_new_tokens - step.start_pos:
                    ends.add("limit inside a block")
    assert ends == {"eos inside a block", "limit inside a block"}


def test_steps_and_positions_are_sorted_and_pointed_at(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t", cover=5, shards=2)
    trace = read_trace(tmp_path / "t")
    widths = trace.column("steps", "num_draft_tokens").astype(np.int64)
    assert trace.step_request.dtype == np.int32 and trace.pos_ptr.dtype == np.int64
    assert np.array_equal(np.diff(trace.pos_ptr), widths + 1)
    assert np.array_equal(trace.column("requests", "request_index"), np.arange(6))
    key = trace.step_request.astype(np.int64) * 10**6 + trace.column("steps", "step_id")
    assert (np.diff(key) > 0).all()
    assert np.array_equal(
        trace.column("positions", "i"), np.concatenate([np.arange(width + 1) for width in widths.tolist()])
    )
    ids = np.array(trace.request_ids(), object)
    assert (ids[trace.step_request] == trace.column("steps", "request_id")).all()


def test_missing_values_are_minus_one_and_nan(tmp_path: Path) -> None:
    model = ToyModel(widths=(2, 3), logprobs=False, divergences=("js",))
    write_toy_trace(tmp_path / "t", model)
    trace = read_trace(tmp_path / "t")
    bonus = trace.pos_ptr[1:] - 1
    assert (trace.column("positions", "draft_id")[bonus] == -1).all()
    assert (trace.column("positions", "rank")[bonus] == -1).all()
    assert np.isnan(trace.column("positions", "draft_logit")[bonus]).all()
    assert np.isnan(trace.column("positions", "draft_logprob")).all()
    assert np.isfinite(np.delete(trace.column("positions", "js"), bonus)).all()
    assert (trace.column("positions", "parent_position") == trace.column("positions", "i") - 1).all()
    root = trace.column("steps", "step_id") == 0
    assert np.array_equal(trace.column("steps", "parent_step_id") == -1, root)
    assert trace.column("positions", "draft_id").dtype == np.int32
    assert trace.column("positions", "top_logits").shape == (trace.positions.num_rows, 8)
    with pytest.raises(ValueError, match="read-only"):
        trace.column("positions", "rank")[0] = 1


def test_ragged_widths_are_counted_by_their_own_k(tmp_path: Path) -> None:
    """Fault 10: K = [5, 2] is 7 draft tokens, not twice the largest K."""
    request = RequestRecord("r", "t", (1,), "", None, 100, (), "fixed")
    steps = []
    for step_id, width in enumerate((5, 2)):
        logits = np.tile(np.linspace(5, 1, 8, dtype=np.float32), (width + 1, 1))
        top = np.tile(np.arange(8, dtype=np.int32), (width + 1, 1))
        drafts = np.array([0] * (width - 1) + [1], np.int32)  # the last one differs
        steps.append(
            StepRecord(
                step_id,
                step_id - 1,
                -1 if step_id == 0 else 4,
                0 if step_id == 0 else 5,
                drafts,
                top[:, 0],
                logits[np.arange(width), drafts],
                drafts.copy(),
                top,
                logits,
                np.full(width + 1, 5.5, np.float32),
                np.full(width + 1, 1.0, np.float32),
            )  # fmt: skip
        )
    with TraceWriter.create(tmp_path / "t", toy_manifest(rule={"name": "other"}, max_new_tokens=100)) as writer:
        writer.add_request(request, steps)
    trace = read_trace(tmp_path / "t")
    assert trace.column("steps", "num_draft_tokens").sum() == 7
    assert trace.positions.num_rows == 9


def test_forbidden_tokens_are_finite_numbers(tmp_path: Path) -> None:
    """Fault 8: a row such as [-inf, 1.0] is fine; the trace holds the most negative float instead."""
    request = RequestRecord("r", "t", (1,), "", None, 1, (), "fixed")
    step = StepRecord(
        0, -1, -1, 0, np.array([0], np.int32), np.array([1, 1], np.int32), np.array([FORBIDDEN_LOGIT], np.float32),
        np.array([1], np.int32), np.array([[1, 0], [1, 0]], np.int32),
        np.array([[1.0, FORBIDDEN_LOGIT]] * 2, np.float32), np.ones(2, np.float32), np.zeros(2, np.float32),
    )  # fmt: skip
    manifest = toy_manifest(vocab_size=2, top_k=2, num_draft_tokens=1)
    with TraceWriter.create(tmp_path / "t", manifest) as writer:
        writer.add_request(request, [step])
    assert read_trace(tmp_path / "t").column("positions", "draft_logit")[0] == np.float32(FORBIDDEN_LOGIT)


def test_sliced_list_columns_honour_the_slice() -> None:
    """Fault 12: ``.values`` of a sliced list column is the whole buffer."""
    lists = pa.array([[1, 2], [3], [], [4, 5, 6]], pa.list_(pa.int32())).slice(1, 3)
    assert [row.tolist() for row in to_numpy(lists)] == [[3], [], [4, 5, 6]]
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(range(8), pa.int32()), 2).slice(1, 2)
    assert to_numpy(fixed).tolist() == [[2, 3], [4, 5]]
    assert to_numpy(pa.chunked_array([fixed, fixed])).tolist() == [[2, 3], [4, 5]] * 2
    numbers = pa.array([7, None, 9], pa.int32()).slice(1)
    assert to_numpy(numbers).tolist() == [-1, 9] and to_numpy(numbers).dtype == np.int32


def test_packing_is_undone_by_unpacking() -> None:
    request, steps = big_request(0, steps=20)
    table = positions_table(request.request_id, steps, 8)
    packed = pack("positions", table, 8)
    assert packed.schema == schemas.file_schema("positions", 8)
    assert packed["draft_id"].null_count > 0.9 * table.num_rows, "nearly all draft tokens are among the top 8"
    assert unpack("positions", packed, 8).equals(table)


def test_registry_and_schemas_agree() -> None:
    for table in schemas.TABLES:
        schema = schemas.table_schema(table, 8)
        assert schema.names == [column.name for column in schemas.columns_of(table)]
        for column in schemas.columns_of(table):
            assert column.meaning and schema.field(column.name).nullable == column.nullable
            assert f"`{column.name}`" in schemas.describe()
    assert len(schemas.BY_NAME) == len(schemas.COLUMNS)
    assert "wave" in schemas.table_schema("steps").names


def test_a_shard_is_plain_parquet(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t")
    raw = pq.read_table(tmp_path / "t" / "positions-00000.parquet")
    trace = read_trace(tmp_path / "t")
    assert raw["top1_id"].to_pylist() == trace.positions["argmax_id"].to_pylist()
    assert raw["top3_logit"].to_pylist() == [row[2] for row in trace.positions["top_logits"].to_pylist()]


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    with pytest.raises(TraceError, match="no column 'rnak' in table 'positions'"):
        trace.column("positions", "rnak")
    with pytest.raises(TraceError, match="no request 'nobody'"):
        trace.steps_of("nobody")


def test_small_shards_are_merged_at_the_end(tmp_path: Path) -> None:
    content = write_toy_trace(tmp_path / "many", shards=6)
    assert len(list((tmp_path / "many").glob("positions-*"))) == 6
    before = read_trace(tmp_path / "many")
    TraceWriter.resume(tmp_path / "many", before.manifest).close()
    after = read_trace(tmp_path / "many")
    assert [shard.table for shard in after.manifest.shards] == list(schemas.TABLES)
    assert len(list((tmp_path / "many").iterdir())) == 4
    assert difference(before, after) is None
    assert after.request_records() == [request for request, _ in content]


def test_the_order_of_shards_does_not_matter(tmp_path: Path) -> None:
    from tests.support.tracefiles import edit_manifest

    write_toy_trace(tmp_path / "t", cover=3, shards=3)
    before = read_trace(tmp_path / "t")
    edit_manifest(tmp_path / "t", lambda content: content["shards"].reverse())
    assert difference(before, read_trace(tmp_path / "t")) is None


def test_a_trace_without_requests(tmp_path: Path) -> None:
    TraceWriter.create(tmp_path / "t", toy_manifest()).close()
    trace = read_trace(tmp_path / "t")
    assert trace.request_records() == [] and trace.pos_ptr.tolist() == [0]
    assert trace.column("positions", "top_ids").shape == (0, 8)


@pytest.mark.parametrize(("bfloat16", "limit"), [(False, 64.0), (True, 40.0)], ids=["float32", "bfloat16"])
def test_bytes_per_draft_position(tmp_path: Path, bfloat16: bool, limit: float) -> None:
    manifest = toy_manifest(vocab_size=49152, num_draft_tokens=7, max_new_tokens=1000)
    with TraceWriter.create(tmp_path / "t", manifest) as writer:
        for index in range(24):
            writer.add_request(*big_request(index, steps=25, bfloat16=bfloat16))
    trace = read_trace(tmp_path / "t")
    drafts = int(trace.column("steps", "num_draft_tokens").sum())
    size = sum(file.stat().st_size for file in (tmp_path / "t").glob("positions-*"))
    assert drafts == 24 * 25 * 7
    assert size / drafts <= limit
