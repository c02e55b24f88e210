"""Parts of a trace: written by many under one owner, read by the shards that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asdsim.errors import TraceError
from asdsim.records import RequestRecord, StepRecord
from asdsim.trace import read_trace
from asdsim.trace import writer as writers
from asdsim.trace.manifest import NEXT_SHARD, PLANNED
from asdsim.trace.parts import OwnedTrace, PartWriter, find_places
from asdsim.trace.writer import TraceWriter
from tests.support.toytrace import RAGGED, toy_manifest, toy_requests, write_toy_trace
from tests.support.tracefiles import difference

Content = list[tuple[RequestRecord, list[StepRecord]]]


@pytest.fixture(scope="module")
def content() -> Content:
    return [(request, RAGGED.decode(request)) for request in toy_requests(count=6)]


def part(writer: OwnedTrace, content: Content, rows: list[int]) -> PartWriter:
    """Return a writer in place of another process, with some requests."""
    made = PartWriter(writer.path, writer.manifest, writer.number())
    for row in rows:
        made.add_request(*content[row], row)
    return made


def test_parts_in_any_order_are_the_trace_of_one_writer(content: Content, tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "alone", count=6)
    manifest = toy_manifest(notes={PLANNED: 6})
    with OwnedTrace.create(tmp_path / "t", manifest) as writer:
        assert isinstance(writer, OwnedTrace)
        for rows in ([4, 5], [0], [2, 3]):
            made = part(writer, content, rows)
            writer.take(made.finish(), made.completed)
    found = read_trace(tmp_path / "t")  # request 1 is still missing: that is an unfinished trace, not a damaged one
    assert found.request_ids() == [content[row][0].request_id for row in (0, 2, 3, 4, 5)]
    with OwnedTrace.resume(tmp_path / "t", manifest) as writer:
        assert isinstance(writer, OwnedTrace) and writer.completed == set(found.request_ids())
        made = part(writer, content, [1])
        writer.take(made.finish(), made.completed)
    assert difference(read_trace(tmp_path / "t"), read_trace(tmp_path / "alone")) is None


def test_a_finished_trace_with_a_gap_is_damaged(content: Content, tmp_path: Path) -> None:
    with OwnedTrace.create(tmp_path / "t", toy_manifest(notes={PLANNED: 1})) as writer:
        assert isinstance(writer, OwnedTrace)
        made = part(writer, content, [3])
        writer.take(made.finish(), made.completed)
    with pytest.raises(TraceError, match="request_index 3 is not the next in the order of capture"):
        read_trace(tmp_path / "t")


def test_a_process_that_outlives_its_owner_touches_nothing(content: Content, tmp_path: Path) -> None:
    path, manifest = tmp_path / "t", toy_manifest(notes={PLANNED: 6})
    writer = OwnedTrace.create(path, manifest)
    assert isinstance(writer, OwnedTrace)
    late, lost = part(writer, content, [0, 1]), part(writer, content, [2])
    lost.finish()
    writer.release()  # the owner is killed: it takes nothing
    assert read_trace(path).request_ids() == []
    writer = OwnedTrace.resume(path, manifest)
    assert isinstance(writer, OwnedTrace)
    assert not list(path.glob("*-*.parquet")), "what no manifest names is removed"
    made = part(writer, content, [0, 1, 2])
    writer.take(made.finish(), made.completed)
    names = {shard.name for shard in late.finish()}  # only now
    assert not names & {shard.name for shard in writer.manifest.shards}
    assert read_trace(path).request_ids() == [request.request_id for request, _ in content[:3]]
    writer.release()
    with TraceWriter.resume(path, manifest) as plain:  # nor does a writer that knows of no parts reuse a number
        assert plain.manifest.notes[NEXT_SHARD] > max(int(name[-13:-8]) for name in names)
        plain.add_request(*content[3])
        plain.flush()
        assert not names & {shard.name for shard in plain.manifest.shards}
    assert read_trace(path).requests.num_rows == 4


def test_what_a_lost_process_left_goes_with_the_last_close(content: Content, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with OwnedTrace.create(path, toy_manifest(notes={PLANNED: 2})) as writer:
        assert isinstance(writer, OwnedTrace)
        lost, made = part(writer, content, [0]), part(writer, content, [0, 1])
        assert lost.finish()  # and dies before it can say so
        (path / ".tmp-0123").write_bytes(b"half a sh")
        (path / "steps-90000.parquet").write_bytes(b"of a later owner")
        writer.take(made.finish(), made.completed)
    named = {shard.name for shard in read_trace(path).manifest.shards}
    assert {file.name for file in path.iterdir()} == {"manifest.json", "steps-90000.parquet", *named}


def test_small_shards_are_merged_under_way_but_those_that_are_read(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "MANY_SHARDS", 2)
    path = tmp_path / "t"
    with OwnedTrace.create(path, toy_manifest(notes={PLANNED: 6})) as writer:
        assert isinstance(writer, OwnedTrace)
        made = part(writer, content, [0])
        writer.take(made.finish(), made.completed)
        writer.read = kept = {shard.name for shard in writer.manifest.shards}
        waiting = part(writer, content, [5])
        waiting.finish()
        for row in (1, 2, 3, 4):
            made = part(writer, content, [row])
            writer.take(made.finish(), made.completed)
        named = {shard.name for shard in writer.manifest.shards}
        assert kept <= named and len(writer.manifest.shards_of("positions")) <= 3
        assert all((path / shard.name).exists() for shard in waiting.manifest.shards), "not named yet, and not removed"
        writer.take(waiting.manifest.shards, waiting.completed)
    assert read_trace(path).requests.num_rows == 6
    assert len(read_trace(path).manifest.shards) == 3


def test_a_part_is_read_by_its_shards(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t", count=6, cover=5, shards=3)
    whole, places = read_trace(tmp_path / "t"), find_places(tmp_path / "t")
    assert places.ids == whole.request_ids() and places.added
    for first in range(6):
        for end in range(first + 1, 7):
            one = places.part(first, end)
            found = one.read()
            assert found.request_ids() == whole.request_ids()[first:end]
            assert found.request_records() == whole.request_records()[first:end]
            for name in found.request_ids():
                for a, b in zip(found.steps_of(name), whole.steps_of(name), strict=True):
                    assert (a.step_id, a.wave, a.start_pos) == (b.step_id, b.wave, b.start_pos)
                    assert a.top_logits.tobytes() == b.top_logits.tobytes()
            shards = {shard.name for shard in one.manifest.shards_of("requests")}
            assert len(shards) == (end - 1) // 2 - first // 2 + 1, "no shard without a row of it is opened"
    write_toy_trace(tmp_path / "bare", count=2)
    assert not find_places(tmp_path / "bare").added


def test_steps_of_a_part_are_added_to_what_is_there(content: Content, tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_toy_trace(path, count=6, shards=2)
    places = find_places(path)
    more = {request.request_id: RAGGED.cover(request, steps, 3) for request, steps in content}
    with OwnedTrace.append(path) as writer:
        assert isinstance(writer, OwnedTrace)
        for first in (3, 0):
            parts = []
            number = writer.number()
            for row in range(first, first + 3):
                one = places.part(row, row + 1)
                parts.append(PartWriter(path, one.manifest, number, one.read()))
                if more[one.ids[0]]:
                    parts[-1].add_steps(one.ids[0], more[one.ids[0]])
            shards = PartWriter.finish_all(parts)
            assert {shard.table for shard in shards} == {"steps", "positions"}
            writer.take(shards)
    found = read_trace(path)
    for request, steps in content:
        assert len(found.steps_of(request.request_id)) == len(steps) + len(more[request.request_id])


def test_a_damaged_shard_is_refused_by_name(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t", count=3)
    file = next((tmp_path / "t").glob("positions-*"))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(TraceError, match=file.name):
        find_places(tmp_path / "t")
