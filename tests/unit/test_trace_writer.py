"""Starting, continuing and ending a trace: what is refused, and what a crash at any moment leaves behind."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asdsim.errors import TraceError
from asdsim.records import RequestRecord, StepRecord
from asdsim.trace import TraceWriter, read_trace
from asdsim.trace import writer as writers
from tests.support.toytrace import RAGGED, ToyModel, toy_manifest, toy_requests, write_toy_trace
from tests.support.tracefiles import difference

Content = list[tuple[RequestRecord, list[StepRecord], list[StepRecord]]]


@pytest.fixture(scope="module")
def content() -> Content:
    """Requests with their captured path and some steps off it."""
    found = []
    for request in toy_requests(count=4, limit=16):
        steps = RAGGED.decode(request)
        found.append((request, steps, RAGGED.cover(request, steps, 2)))
    return found


def write_all(path: Path, content: Content, *, each: bool = True) -> None:
    """Write what is not there yet, a shard per request, and add the covered steps at the end."""
    with TraceWriter.resume(path, toy_manifest()) as writer:
        for request, steps, _ in content:
            if request.request_id not in writer.completed:
                writer.add_request(request, steps)
                if each:
                    writer.flush()
        writer.flush()
        stored = read_trace(path).steps.select(["request_id", "wave"]).to_pylist()
        covered = {row["request_id"] for row in stored if row["wave"] > 0}
        for request, _, more in content:
            if request.request_id not in covered:
                writer.add_steps(request.request_id, more)
                if each:
                    writer.flush()
        grid = {"rule": "asd", "semantics": "paper", "B": [0, 2], "g": [0.5], "M": [1, "inf"], "faithful": False}
        writer.update_manifest(grids=[grid])


@pytest.fixture(scope="module")
def whole(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "t"
    write_all(path, content, each=False)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_create_refuses_a_directory_that_holds_a_trace(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t")
    before = files(tmp_path)
    with pytest.raises(TraceError, match=r"already holds a trace \(continue it with --resume"):
        TraceWriter.create(tmp_path / "t", toy_manifest())
    assert files(tmp_path) == before


def test_create_refuses_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TraceError, match=r"not empty: it holds 'notes\.txt'"):
        TraceWriter.create(tmp_path, toy_manifest())
    with pytest.raises(TraceError, match="is a file"):
        TraceWriter.create(tmp_path / "notes.txt", toy_manifest())
    with pytest.raises(TraceError, match="cannot be written"):
        TraceWriter.create(tmp_path / "notes.txt" / "t", toy_manifest())
    with pytest.raises(TraceError, match=r"no manifest\.json: not a trace"):
        TraceWriter.resume(tmp_path, toy_manifest())
    assert files(tmp_path) == {"notes.txt": b"mine"}


def test_create_makes_parents_and_takes_an_empty_directory(tmp_path: Path) -> None:
    TraceWriter.create(tmp_path / "a" / "b", toy_manifest()).close()
    (tmp_path / "c").mkdir()
    TraceWriter.create(tmp_path / "c", toy_manifest()).close()
    assert read_trace(tmp_path / "c").requests.num_rows == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"target": {"name": "toy-target", "revision": "r2", "sha256": "00" * 32}},
            "target.revision is 'r1' there and 'r2' now",
        ),
        ({"target": {"name": "toy-target", "sha256": "00" * 32}}, "target.revision is 'r1' there and None now"),
        ({"drafter": {"name": "toy-drafter", "agree": 0.5}}, "drafter.agree is 0.6 there and 0.5 now"),
        ({"num_draft_tokens": 17}, "num_draft_tokens is 16 there and 17 now"),
        ({"seed": 1}, "seed is 0 there and 1 now"),
        ({"rule": {"name": "asd", "B": float("inf")}}, "rule.B is None there and 'inf' now"),
        ({"stop": "fixed"}, "stop is 'natural' there and 'fixed' now"),
        ({"max_new_tokens": 25}, "max_new_tokens is 24 there and 25 now"),
        ({"logits_dtype": "bfloat16"}, "logits_dtype is 'float32' there"),
        ({"device": "cuda"}, "device is 'cpu' there"),
        ({"tasks": ["toy-a"]}, "tasks is"),
        ({"settings": {"temperature": 0}}, "settings.temperature is None there and 0 now"),
    ],
)
def test_resume_refuses_another_run_and_names_the_field(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    write_toy_trace(tmp_path / "t")
    before = files(tmp_path)
    with pytest.raises(TraceError, match="the trace is of another run") as refused:
        TraceWriter.resume(tmp_path / "t", toy_manifest(**fields))
    assert named in str(refused.value)
    assert files(tmp_path) == before


def test_resume_lets_versions_and_notes_differ(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t")
    TraceWriter.resume(tmp_path / "t", toy_manifest(software={"torch": "9"}, notes={"created": "later"})).close()


def test_resume_refuses_a_damaged_trace(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t")
    next((tmp_path / "t").glob("steps-*")).unlink()
    before = files(tmp_path)
    with pytest.raises(TraceError, match="the shard is missing"):
        TraceWriter.resume(tmp_path / "t", toy_manifest())
    assert files(tmp_path) == before


def test_two_writers_do_not_share_a_directory(tmp_path: Path) -> None:
    with (
        TraceWriter.create(tmp_path / "t", toy_manifest()),
        pytest.raises(TraceError, match="another process is writing"),
    ):
        TraceWriter.resume(tmp_path / "t", toy_manifest())
    TraceWriter.resume(tmp_path / "t", toy_manifest()).close()


def test_an_exception_drops_the_open_buffer_only(tmp_path: Path, content: Content) -> None:
    with pytest.raises(KeyError), TraceWriter.create(tmp_path / "t", toy_manifest()) as writer:
        writer.add_request(*content[0][:2])
        writer.flush()
        writer.add_request(*content[1][:2])
        raise KeyError
    assert read_trace(tmp_path / "t").request_ids() == [content[0][0].request_id]
    with pytest.raises(TraceError, match="the writer is closed"):
        writer.add_request(*content[2][:2])
    writer.close()


def test_a_reader_sees_whole_shards_while_a_writer_works(tmp_path: Path, content: Content) -> None:
    with TraceWriter.create(tmp_path / "t", toy_manifest()) as writer:
        for count, (request, steps, _) in enumerate(content):
            assert read_trace(tmp_path / "t").requests.num_rows == count
            writer.add_request(request, steps)
            writer.flush()


def test_a_reader_is_not_disturbed_by_merging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards vanish under a reader when they are merged; it then reads the new ones."""
    monkeypatch.setattr(writers, "MANY_SHARDS", 2)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    model = ToyModel(widths=(2,))
    requests = [dataclasses.replace(request, max_new_tokens=3) for request in toy_requests(model, 40, empty=False)]
    content = [(request, model.decode(request)) for request in requests]

    def write() -> None:
        with TraceWriter.resume(tmp_path / "t", toy_manifest(model)) as writer:
            for request, steps in content:
                writer.add_request(request, steps)
                writer.flush()

    TraceWriter.create(tmp_path / "t", toy_manifest(model)).close()
    thread = threading.Thread(target=write)
    thread.start()
    counts = [0]
    while thread.is_alive():
        counts.append(read_trace(tmp_path / "t").requests.num_rows)
    thread.join()
    assert counts == sorted(counts) and len(set(counts)) > 3
    assert read_trace(tmp_path / "t").requests.num_rows == 40


def test_shards_are_written_by_age_and_size(tmp_path: Path, content: Content) -> None:
    with TraceWriter.create(tmp_path / "t", toy_manifest()) as writer:
        writer.add_request(*content[0][:2])
        assert read_trace(tmp_path / "t").requests.num_rows == 0
        writer.flush_seconds = 0.0
        writer.add_request(*content[1][:2])
        assert read_trace(tmp_path / "t").requests.num_rows == 2
        writer.flush_seconds, writer.flush_rows = 1e9, 1
        writer.add_request(*content[3][:2])
        assert read_trace(tmp_path / "t").requests.num_rows == 3


def test_many_shards_are_merged_on_the_way(tmp_path: Path, content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MANY_SHARDS", 3)
    writer = TraceWriter.create(tmp_path / "t", toy_manifest())
    for count, (request, steps, _) in enumerate(content):
        writer.add_request(request, steps)
        writer.flush()
        assert len(list((tmp_path / "t").glob("positions-*"))) < 3
        assert read_trace(tmp_path / "t").requests.num_rows == count + 1
    writer.release()


def test_merging_stops_at_the_size_of_a_shard(
    tmp_path: Path, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "SHARD_ROWS", 60)
    write_all(tmp_path / "t", content)
    trace = read_trace(tmp_path / "t")
    rows = [shard.rows for shard in trace.manifest.shards_of("positions")]
    assert len(rows) > 2 and all(a + b > 60 for a, b in zip(rows, rows[1:], strict=False))


def test_manifest_fields_of_the_run_cannot_change(tmp_path: Path, content: Content) -> None:
    with TraceWriter.create(tmp_path / "t", toy_manifest()) as writer:
        writer.update_manifest(seed=3)
        writer.add_request(*content[0][:2])
        for fields, message in (
            ({"seed": 4}, "seed cannot change"),
            ({"who": 1}, "unknown field 'who'"),
            ({"shards": []}, "shards cannot change"),
            ({"notes": {"x": float("nan")}}, "NaN cannot"),
            ({"notes": {"x": object()}}, "object cannot be stored"),
            ({"grids": 3}, "grids is int"),
        ):
            with pytest.raises(TraceError, match=message):
                writer.update_manifest(**fields)
        grid = {"rule": "asd", "semantics": "paper", "g": [0.5], "M": [1], "faithful": False}
        writer.update_manifest(grids=[{**grid, "B": (0, float("inf"))}], notes={"card": "x"})
    found = read_trace(tmp_path / "t")
    assert found.manifest.grids == [{**grid, "B": [0, "inf"]}] and found.manifest.seed == 3
    assert found.request_ids() == [content[0][0].request_id]


@contextmanager
def snapshots(folder: Path, into: Path) -> Iterator[list[Path]]:
    """Copy the directory before every rename and removal: each copy is what a kill before it would leave there."""
    taken: list[Path] = []
    real = {name: getattr(os, name) for name in ("replace", "unlink")}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if folder.exists():
                taken.append(into / f"{len(taken):03d}")
                shutil.copytree(folder, taken[-1])
            return real[name](*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, wrap(name))
        yield taken


def test_every_state_on_disk_reads_and_resumes_to_the_same(
    tmp_path: Path, content: Content, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "MANY_SHARDS", 3)
    with snapshots(tmp_path / "t", tmp_path / "s") as taken:
        write_all(tmp_path / "t", content)
    expected = read_trace(whole)
    assert difference(read_trace(tmp_path / "t"), expected) is None
    assert len(taken) > 50
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # for speed: no test can tell the difference
    ids = [request.request_id for request, *_ in content]
    unfinished = 0
    for state in taken:
        if (state / "manifest.json").exists():
            found = read_trace(state)
            assert found.request_ids() == ids[: found.requests.num_rows]
            unfinished += found.steps.num_rows < expected.steps.num_rows
        write_all(state, content, each=False)
        assert difference(read_trace(state), expected) is None, state
        assert not [name for name in os.listdir(state) if name.startswith(".")]
    assert unfinished > 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=["full", "quota", "broken"])
def test_a_full_disk_is_one_clear_error(
    tmp_path: Path, content: Content, whole: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let single writes fail, one by one from the first to the last."""
    countdown = [0]

    def failing(handle: int) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    message = r"cannot be written: " if code == errno.EIO else r"no space left on the disk \(free some, .* --resume\)"
    failures = 0
    for call in range(1, 200, 3 if code == errno.ENOSPC else 15):
        folder, countdown[0] = tmp_path / str(call), call
        try:
            write_all(folder, content)
        except TraceError as error:
            failures += 1
            assert re.search(message, str(error))
            assert not list(folder.glob(".tmp-*"))
            write_all(folder, content)
            assert difference(read_trace(folder), read_trace(whole)) is None
        else:
            break
    assert failures > (12 if code == errno.ENOSPC else 2)


def test_a_file_that_may_not_grow(tmp_path: Path, content: Content) -> None:
    """A real failing write: the process may write files of a few bytes only."""
    resource = pytest.importorskip("resource")
    writer = TraceWriter.create(tmp_path / "t", toy_manifest())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        writer.add_request(*content[0][:2])
        with pytest.raises(TraceError, match="cannot be written: File too large"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(os.listdir(tmp_path / "t")) == ["manifest.json"]
    writer.close()  # what is buffered is still there, and goes to disk once there is room
    assert read_trace(tmp_path / "t").request_ids() == [content[0][0].request_id]


def test_leftovers_are_passed_by_and_removed(tmp_path: Path, whole: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "t"))
    (folder / "positions-00099.parquet").write_bytes(b"half a sh")
    (folder / ".tmp-steps-00100.parquet").write_bytes(b"")
    (folder / "README.md").write_text("the card of the trace")
    assert difference(read_trace(folder), read_trace(whole)) is None
    TraceWriter.resume(folder, toy_manifest()).close()
    assert {file.name for file in folder.iterdir()} == {file.name for file in whole.iterdir()} | {"README.md"}


def test_the_identity_of_a_run_is_what_the_manifest_says() -> None:
    from asdsim.trace.manifest import NOT_IDENTITY, Manifest, dump, parse

    manifest = toy_manifest(rule={"name": "asd", "B": float("inf"), "g": 0.25}, notes={"n": (1, 2)})
    assert parse(dump(manifest), "x") == manifest
    assert manifest.rule["B"] == "inf"
    assert {field.name for field in dataclasses.fields(Manifest)} >= NOT_IDENTITY
    assert manifest.checksum in dump(manifest).decode()
