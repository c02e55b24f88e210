"""``capture``, ``cover``, ``verify`` and ``join`` on an object store: the same trace as on disk, also after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asdsim.cli import main
from asdsim.files import names_in, to_path
from asdsim.trace import read_trace
from asdsim.trace.manifest import MANIFEST
from tests.capture.test_cli import usual
from tests.capture.test_kill import SERVER
from tests.conftest import KEY, S3, SECRET
from tests.support.tracefiles import difference

pytest.importorskip("upath")
ROOT = Path(__file__).parents[2]
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_capture_and_a_cover_killed_and_run_again(saved: Path, tmp_path: Path, s3: S3) -> None:
    rng, out = random.Random(7), f"{s3.url}/t"
    capture = ["capture", *map(str, usual(saved, Path("OUT"), "--limit", 6, "--flush-every", 1, "--resume"))]
    cover = ["cover", "OUT", *GRID, "--batch", "1"]
    assert run(*(word.replace("OUT", str(tmp_path / "t")) for word in capture)) == 0
    assert run(*(word.replace("OUT", str(tmp_path / "t")) for word in cover)) == 0
    server = subprocess.Popen(
        [sys.executable, "-c", f"import s3fs, upath\n{SERVER}", str(saved / "model")],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    partial = 0
    try:
        for words, kills in ((capture, 3), (cover, 2)):
            for number in range(kills + 1):
                server.stdin.write(json.dumps([0, [word.replace("OUT", out) for word in words]]) + "\n")
                server.stdin.flush()
                child = int(server.stdout.readline())
                if number < kills:
                    before, puts, until = written(s3), rng.randint(1, 6), time.monotonic() + 30
                    while written(s3) < before + puts and time.monotonic() < until:
                        time.sleep(0.002)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                status = int(server.stdout.readline())
                assert status in ((0, -signal.SIGKILL) if number < kills else (0,))
                if MANIFEST in names_in(to_path(out)):
                    partial += status != 0 and read_trace(out).requests.num_rows > 0
    finally:
        server.stdin.close()
        server.wait(20)
    assert partial >= 2 and same(out, tmp_path / "t")


def written(s3: S3) -> int:
    return sum(number for (method, _), number in list(s3.requests.items()) if method == "PUT")
