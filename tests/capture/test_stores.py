"""``capture``, ``cover``, ``verify`` and ``join`` on an object store: the same trace as on disk, also after a kill."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.cli import main
from asdsim.files import names_in, to_path
from asdsim.live.cover import cover_with
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace import TraceWriter, read_trace
from asdsim.trace.manifest import MANIFEST, Manifest
from tests.capture.test_cli import usual
from tests.capture.test_cover_kill import K, content, models
from tests.conftest import KEY, S3, SECRET
from tests.support.forks import Forks
from tests.support.tracefiles import difference

pytest.importorskip("upath")
SETTINGS = Grid.product([0, 1, 4], [0.25, 2], [1, 3])
GRID = ("--B", "0,4", "--g", ".5", "--M", "2")


def run(*words: object) -> int:
    try:
        main(list(map(str, words)))
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def same(url: str, folder: Path) -> bool:
    return difference(read_trace(url), read_trace(folder), times=False) is None


def test_a_capture_covered_verified_and_joined_in_a_store(
    saved: Path, tmp_path: Path, s3: S3, capfd: pytest.CaptureFixture[str]
) -> None:
    places: dict[str, Any] = {"disk": tmp_path, "store": s3.url}
    for place in places.values():
        out = f"{place}/t"
        assert run("capture", *usual(saved, out, "--limit", 3, "--flush-every", 1)) == 0  # type: ignore[arg-type]
        assert run("capture", *usual(saved, out, "--limit", 3)) == 2  # type: ignore[arg-type]
        assert run("capture", *usual(saved, out, "--limit", 3, "--resume")) == 0  # type: ignore[arg-type]
        assert run("cover", out, *GRID) == 0
        assert run("verify", out, *GRID) == 0
        for index in (1, 2):
            shard = usual(saved, f"{place}/s", "--limit", 3, "--shard", f"{index}/2")  # type: ignore[arg-type]
            assert run("capture", *shard) == 0
            assert run("cover", f"{place}/s.shard-{index}-of-2", *GRID) == 0
        assert run("join", f"{place}/s") == 0
    for name in ("t", "s", "s.shard-1-of-2"):
        assert same(f"{s3.url}/{name}", tmp_path / name), name
        assert read_trace(f"{s3.url}/{name}").manifest.grids
        named = {shard.name for shard in read_trace(f"{s3.url}/{name}").manifest.shards}
        left = {file for file in names_in(to_path(f"{s3.url}/{name}")) if not file.startswith("vocabulary-")}
        assert left == {MANIFEST, *named}
    printed = "".join(capfd.readouterr())
    for word in (KEY, SECRET):
        assert word not in printed and not [name for name, data in s3.read().items() if word.encode() in data]


def capture_into(place: str) -> None:
    target, drafter = models()
    manifest = Manifest(
        target=target.describe(), drafter=drafter.describe(), vocab_size=20, num_draft_tokens=K, max_new_tokens=40
    )
    with TraceWriter.resume(place, manifest) as writer:
        for n in range(4):
            request = RequestRecord(f"toy/{n}", "toy", (1, n), "", None, 40, target.eos_ids)
            if request.request_id not in writer.completed:
                writer.add_request(request, decode(target, drafter, request, STRICT, K, Recorder()).steps)
                writer.flush()


def cover_at(place: str) -> None:
    with TraceWriter.append(place) as writer:
        writer.flush_seconds = 0.2
        assert cover_with(writer, models(), SETTINGS, batch=3).complete


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_capture_and_a_cover_killed_at_random_moments(tmp_path: Path, s3: S3) -> None:
    """Four times each, counted in requests to the store; then they go on, and nothing is lost or twice."""
    local, url, rng, kills = str(tmp_path / "t"), f"{s3.url}/t", random.Random(1), 0
    with Forks(__name__) as forks:
        for work in (capture_into, cover_at):
            work(local)
            for _ in range(4):
                puts = written(s3) + rng.randint(1, 9)
                child = forks.start(work.__name__, url)
                with contextlib.suppress(ProcessLookupError):  # done before the signal
                    while written(s3) < puts:
                        os.kill(child, 0)
                        time.sleep(0.002)
                    os.kill(child, signal.SIGKILL)
                kills += forks.wait() == -signal.SIGKILL
                if MANIFEST in names_in(to_path(url)):  # whatever the moment, what is there is whole
                    found = read_trace(url).request_ids()
                    assert found == [f"toy/{n}" for n in range(len(found))]
            work(url)
    assert kills >= 5
    assert content(to_path(url)) == content(Path(local))
    assert read_trace(url).manifest.grids == read_trace(local).manifest.grids


def written(s3: S3) -> int:
    return sum(number for (method, _), number in list(s3.requests.items()) if method == "PUT")
