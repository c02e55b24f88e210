"""Traces in object stores: equal to local ones, never half written, one writer at a time, no credentials kept."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from asdsim.errors import AsdsimError, TraceError, UsageError
from asdsim.files import names_in, read_octets, read_text, to_path, write_atomically, write_new, write_over
from asdsim.result import replay_grid
from asdsim.rules.settings import Grid
from asdsim.trace import TraceWriter, read_trace
from asdsim.trace.groups import StreamedTrace
from asdsim.trace.join import NOTE, join, shard_path
from asdsim.trace.manifest import MANIFEST
from asdsim.trace.store import FOLDER
from asdsim.trace.writer import WRITER
from tests.conftest import S3
from tests.support.forks import Forks
from tests.support.toytrace import RAGGED, ToyModel, toy_manifest, toy_requests, write_toy_trace
from tests.support.tracefiles import difference

pytest.importorskip("upath")


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Any:
    """A folder in a store that nothing else uses."""
    if request.param == "memory":
        return to_path(f"memory://{uuid.uuid4().hex}/traces")
    return to_path(request.getfixturevalue("s3").url) / "traces"


def content(folder: Any) -> dict[str, bytes]:
    return {name: read_octets(folder / name) for name in names_in(folder)}


# --- paths ------------------------------------------------------------------------------------------------------------


def test_local_paths_stay_local(tmp_path: Path) -> None:
    for text in ("a/b", "/a/b", ".", "~/x", "C:/x", "a:b"):
        assert to_path(text) == Path(text)
    assert to_path(tmp_path) is not None and isinstance(to_path(tmp_path), Path)
    assert to_path(f"file://{tmp_path}") == tmp_path


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s3://key:hidden-word@bucket/x", "must hold no user"),
        ("s3://bucket/x?X-Amz-Signature=hidden-word", "must hold no user"),
        ("https://example.com/x", "unknown storage 'https://'"),
        ("S4://bucket/x", "did you mean 's3'|unknown storage 's4://'"),
        ("s3:///x", "names no bucket"),
        ("s3://", "names no bucket"),
    ],
)
def test_urls_that_are_refused(url: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as refused:
        to_path(url)
    assert "hidden-word" not in str(refused.value)


@pytest.mark.parametrize(("module", "url", "extra"), [("upath", "s3://b/x", "s3"), ("s3fs", "s3://b/x", "s3")])
def test_a_missing_package_is_named_by_its_extra(
    module: str, url: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, module, None)
    _registry.pop("s3", None)  # it is imported anew
    with pytest.raises(UsageError, match=rf"not installed \(pip install 'asdsim\[{extra}\]'\)"):
        to_path(url)


def test_names_and_parents(store: Any) -> None:
    trace = to_path(f"{store}/one/")
    assert str(trace) == f"{store}/one" and trace.name == "one"
    assert str(shard_path(trace, 2, 3)) == f"{store}/one.shard-2-of-3"
    assert str(trace / "x.parquet") == f"{store}/one/x.parquet" and (trace / "x.parquet").suffix == ".parquet"
    assert names_in(store) == [] and not store.exists()


# --- objects ----------------------------------------------------------------------------------------------------------


def test_objects_are_written_whole_and_replaced_only_as_they_were_left(store: Any) -> None:
    file = store / "one.json"
    assert write_new(file, b"1") and not write_new(file, b"2") and read_octets(file) == b"1"
    assert not write_over(file, b"2", None) and not write_over(file, b"2", b"0") and read_octets(file) == b"1"
    assert write_over(file, b"2", b"1") and read_octets(file) == b"2"
    assert write_over(store / "two.json", b"1", None) and names_in(store) == ["one.json", "two.json"]
    assert not write_over(store / "three.json", b"2", b"1") and not (store / "three.json").exists()
    write_atomically(file, "text \u2713")
    assert read_text(file) == "text \u2713" and read_octets(file, 2) == b"te"
    with pytest.raises(UsageError, match="cannot read it"):
        read_text(store / "absent.json")


def test_a_manifest_that_changes_between_looking_and_writing_is_kept(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    import asdsim.files as files

    file = to_path(s3.url) / "manifest.json"
    write_atomically(file, b"before")
    plain = files.read_octets

    def then_another_writes(path: Path, most: int | None = None) -> bytes:
        found = plain(path, most)
        if found == b"before":
            write_atomically(file, b"theirs")
        return found

    monkeypatch.setattr(files, "read_octets", then_another_writes)
    assert not write_over(file, b"mine", b"before")
    assert plain(file) == b"theirs"


def test_a_repeated_request_that_had_succeeded_counts_as_success(store: Any) -> None:
    write_atomically(store / MANIFEST, b"mine")
    assert write_over(store / MANIFEST, b"mine", None)


@pytest.mark.slow
def test_a_large_object_is_uploaded_in_parts(s3: S3) -> None:
    data = os.urandom(1 << 20) * 101
    write_atomically(to_path(s3.url) / "large.bin", data)
    assert sum(n for (method, key), n in s3.requests.items() if method == "PUT" and "partNumber=" in key) > 1
    assert read_octets(to_path(s3.url) / "large.bin") == data


# --- traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_a_trace_in_a_store_has_the_bytes_of_a_local_one(store: Any, tmp_path: Path, shards: int) -> None:
    for place in (tmp_path / "t", store / "t"):
        write_toy_trace(place, cover=12, shards=shards)
    local, remote = content(tmp_path / "t"), content(store / "t")
    if shards == 3:  # released, not closed: the mark of the writer is still there
        assert WRITER in read_trace(store / "t").manifest.notes
        for place in (tmp_path / "t", store / "t"):
            TraceWriter.append(place).close()
        local, remote = content(tmp_path / "t"), content(store / "t")
    assert sorted(local) == sorted(remote) and local == remote
    assert difference(read_trace(store / "t"), read_trace(tmp_path / "t")) is None
    assert read_trace(str(store / "t")).manifest.checksum == read_trace(tmp_path / "t").manifest.checksum


def test_a_trace_in_a_store_is_read_group_by_group(store: Any, tmp_path: Path) -> None:
    grid = Grid.product([0, 1, 4], [0.5, 9], [1, 7])
    for place in (tmp_path / "t", store / "t"):
        write_toy_trace(place, cover=12, shards=3)
    remote = StreamedTrace(store / "t", rows=40)
    assert len(remote.bounds) > 3
    figures = replay_grid(remote, grid).frame()
    assert figures.equals(replay_grid(tmp_path / "t", grid).frame())
    assert replay_grid(store / "t", grid).frame().equals(figures)
    assert FOLDER not in names_in(store / "t"), "no graph is kept in a store"


def test_a_folder_that_holds_something_else_is_refused(store: Any) -> None:
    write_atomically(store / "t" / "letter.txt", b"x")
    with pytest.raises(TraceError, match="is not empty: it holds 'letter.txt'"):
        TraceWriter.create(store / "t", toy_manifest())
    write_atomically(store / "file", b"x")
    with pytest.raises(TraceError, match="is a file"):
        TraceWriter.create(store / "file", toy_manifest())
    write_toy_trace(store / "trace")
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter.create(store / "trace", toy_manifest())
    with pytest.raises(TraceError, match="no such trace"):
        read_trace(store / "absent")


def test_damage_is_found(store: Any) -> None:
    write_toy_trace(store / "t")
    name = next(name for name in names_in(store / "t") if name.startswith("steps"))
    whole = read_octets(store / "t" / name)
    for damaged, what in (
        (whole[:-1], f"has {len(whole) - 1} bytes"), (whole + b"x", "has more bytes"),
        (whole[:50] + b"?" + whole[51:], "SHA-256"),
    ):  # fmt: skip
        write_atomically(store / "t" / name, damaged)
        with pytest.raises(TraceError, match=what):
            read_trace(store / "t")
    (store / "t" / name).unlink()
    with pytest.raises(TraceError, match="the shard is missing"):
        read_trace(store / "t")


def test_whoever_opens_a_trace_last_has_it(store: Any) -> None:
    requests = toy_requests(count=4)
    first = TraceWriter.create(store / "t", toy_manifest())
    first.add_request(requests[0], RAGGED.decode(requests[0]))
    first.flush()
    first.add_request(requests[1], RAGGED.decode(requests[1]))
    with TraceWriter.append(store / "t") as second:
        with pytest.raises(TraceError, match="another process is writing this trace"):
            first.flush()
        second.add_request(requests[2], RAGGED.decode(requests[2]))
    first.release()
    assert read_trace(store / "t").request_ids() == ["toy/0", "toy/2"]
    with TraceWriter.resume(store / "t", toy_manifest()) as third:
        third.add_request(requests[1], RAGGED.decode(requests[1]))
    assert read_trace(store / "t").request_ids() == ["toy/0", "toy/2", "toy/1"]
    manifest = read_trace(store / "t").manifest
    assert {*names_in(store / "t")} == {MANIFEST, *(shard.name for shard in manifest.shards)}


def test_shards_of_a_writer_that_lost_the_trace_are_in_nobodys_way(store: Any) -> None:
    requests = toy_requests(count=3)
    with TraceWriter.create(store / "t", toy_manifest()) as writer:
        writer.add_request(requests[0], RAGGED.decode(requests[0]))
    left = store / "t" / "positions-00001.parquet"
    write_atomically(left, b"killed before its manifest")
    with TraceWriter.append(store / "t") as writer:
        assert not left.exists()
        write_atomically(store / "t" / "steps-00002.parquet", b"of one that does not know yet")
        writer.add_request(requests[1], RAGGED.decode(requests[1]))
    assert read_trace(store / "t").request_ids() == ["toy/0", "toy/1"]
    TraceWriter.append(store / "t").close()
    named = {shard.name for shard in read_trace(store / "t").manifest.shards}
    assert {*names_in(store / "t")} == {MANIFEST, *named}


def test_two_begin_the_same_trace_and_one_gets_it(store: Any) -> None:
    got: list[TraceWriter] = []
    refused: list[AsdsimError] = []
    barrier = threading.Barrier(4)

    def begin() -> None:
        barrier.wait()
        try:
            got.append(TraceWriter.create(store / "t", toy_manifest()))
        except TraceError as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 3
    assert all("already holds a trace" in str(e) or "another process" in str(e) for e in refused)


def test_readers_see_a_whole_trace_at_any_time(s3: S3) -> None:
    folder = to_path(s3.url) / "t"
    requests = toy_requests(count=9)
    steps = [RAGGED.decode(request) for request in requests]
    seen: list[list[str]] = []
    wrong: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                seen.append(read_trace(folder).request_ids())
        except BaseException as error:
            wrong.append(error)

    TraceWriter.create(folder, toy_manifest()).close()
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(0, 9, 3):  # closing merges: shards that a reader wants go away
        with TraceWriter.append(folder) as writer:
            for request, path in zip(requests[n : n + 3], steps[n : n + 3], strict=True):
                writer.add_request(request, path)
                writer.flush()
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(seen) > 2
    names = [request.request_id for request in requests]
    assert all(ids == names[: len(ids)] for ids in seen)
    assert read_trace(folder).request_ids() == names


def write(folder: str) -> None:
    with TraceWriter.resume(folder, toy_manifest()) as writer:
        print("open", flush=True)
        for request in toy_requests(count=8):
            if request.request_id not in writer.completed:
                writer.add_request(request, RAGGED.decode(request))
                writer.flush()
                print("stored", flush=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_random_moments_and_resumed(s3: S3, tmp_path: Path) -> None:
    """At least six kills; whatever is there after each is a valid trace, and at the end nothing is lost or twice."""
    write_toy_trace(tmp_path / "whole", count=8)
    expected = read_trace(tmp_path / "whole")
    folder, rng, kills, partial = to_path(s3.url) / "t", random.Random(5), 0, 0
    with Forks(__name__) as forks:
        while True:
            child = forks.start("write", folder)
            if kills < 6:
                for _ in range(rng.randint(1, 3)):
                    forks.line()
                time.sleep(rng.uniform(0.0, 0.1))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            code = forks.wait()
            if code == 0 and kills >= 6:
                break
            if code == 0:  # done before the signal: begin again
                assert difference(read_trace(folder), expected) is None
                folder = folder.with_name(f"t{kills}")
                continue
            assert code == -signal.SIGKILL
            kills += 1
            if (folder / MANIFEST).exists():
                found = read_trace(folder).request_ids()
                assert found == expected.request_ids()[: len(found)]
                partial += 0 < len(found) < 8
    assert partial >= 1
    found = read_trace(folder)
    assert found.request_ids() == expected.request_ids() and difference(found, expected) is None
    assert {*names_in(folder)} == {MANIFEST, *(shard.name for shard in found.manifest.shards)}


# --- joining ----------------------------------------------------------------------------------------------------------


def write_shards(target: Any) -> None:
    model = ToyModel(seed=9, widths=(3,))
    requests = toy_requests(model, 5, empty=False)
    for index in (1, 2):
        note = {NOTE: {"index": index, "of": 2, "requests": len(requests)}}
        with TraceWriter.create(shard_path(target, index, 2), toy_manifest(model, notes=note)) as writer:
            for request in requests[index - 1 :: 2]:
                writer.add_request(request, model.decode(request))


def test_joined_in_a_store_as_on_disk(store: Any, tmp_path: Path) -> None:
    for place in (tmp_path / "t", store / "t"):
        write_shards(place)
    write_atomically(store / "t" / "steps-00000.parquet", b"of a join that was killed")
    joined = join(str(store / "t"))
    assert difference(joined, join(tmp_path / "t")) is None
    assert content(store / "t") == content(tmp_path / "t")
    with pytest.raises(TraceError, match="already exists"):
        join(store / "t")


def test_a_join_that_fails_leaves_no_trace(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import asdsim.trace.join as module

    write_shards(store / "t")
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_over", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(TraceError, match="No space left"):
            join(store / "t")
    assert MANIFEST not in names_in(store / "t")
    assert len(join(store / "t").request_ids()) == 5


def test_errors_of_a_store_are_told_in_one_line(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(TraceWriter.create(to_path(s3.url) / "t", toy_manifest())) as writer:
        request = toy_requests(count=1)[0]
        writer.add_request(request, RAGGED.decode(request))
        remote: Any = writer.path

        def lost(*args: Any, **kwargs: Any) -> None:
            from botocore.exceptions import EndpointConnectionError

            raise EndpointConnectionError(endpoint_url="http://nowhere")

        with monkeypatch.context() as patch:
            patch.setattr(remote.fs, "pipe_file", lost)
            with pytest.raises(TraceError, match=r"cannot be written: Could not connect to the endpoint.*nowhere"):
                writer.flush()
    assert read_trace(to_path(s3.url) / "t").request_ids() == ["toy/0"]
