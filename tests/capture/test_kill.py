"""``kill -9`` at 20 random moments of a real capture, then ``--resume``: as if it had never been interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asdsim.trace import read_trace
from tests.support.tracefiles import difference

KILLS, REQUESTS = 20, 12
ROOT = Path(__file__).parents[2]

# Imports once, then forks one child per attempt: each runs the command line as it is.
SERVER = """
import os, signal, sys, json, threading
import pyarrow.compute, torch, tqdm
tqdm.tqdm.set_lock(threading.RLock())  # its own lock is shared by all children, and a killed one would keep it
from transformers import AutoModelForCausalLM, AutoTokenizer
import asdsim.capture.run, asdsim.capture.loop, asdsim.engines.transformers.model
import asdsim.trace.writer, asdsim.cli.capture
from asdsim.cli import main
torch.set_num_threads(1)
AutoModelForCausalLM.from_pretrained(sys.argv[1])(torch.tensor([[1, 2]]))
AutoTokenizer.from_pretrained(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
        interrupted, args = json.loads(line)
        if interrupted:  # Ctrl-C while that request is decoded
            plain, calls = asdsim.capture.loop.decode, []
            def decode(*rest):
                calls.append(1)
                if len(calls) == interrupted:
                    os.kill(os.getpid(), signal.SIGINT)
                return plain(*rest)
            asdsim.capture.loop.decode = decode
        main(args)
        os._exit(99)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def folder_in_memory(tmp_path: Path) -> Iterator[Path]:
    """A directory that need not wait for a disk: what a killed process has written is there either way."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_killed_at_random_moments_and_resumed(saved: Path, folder_in_memory: Path) -> None:
    tmp_path = folder_in_memory
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(saved / "model")],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None

    def start(folder: Path, interrupted: int = 0) -> int:
        args = [
            "capture", "-o", str(folder), "--target", str(saved / "model"), "--drafter", "lookup:2",
            "--task", f"jsonl:{saved / 'prompts.jsonl'}", "--max-new-tokens", "12", "--K", "4",
            "--flush-every", "1", "--resume", "--limit", str(REQUESTS),
        ]  # fmt: skip
        server.stdin.write(json.dumps([interrupted, args]) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def status() -> int:
        return int(server.stdout.readline())

    def wait_for_writes(folder: Path, child: int, count: int) -> None:
        """Wait until the directory was seen to change ``count`` times, or the process is gone."""
        last = stamp(folder)
        with contextlib.suppress(ProcessLookupError):
            while count:
                os.kill(child, 0)
                now = stamp(folder)
                count -= now != last
                last = now
                time.sleep(0.0005)

    def stamp(folder: Path) -> int:
        return folder.stat().st_mtime_ns if folder.exists() else 0

    try:
        assert server.stdout.readline() == "ready\n"
        began = time.perf_counter()
        start(tmp_path / "whole")
        assert status() == 0
        seconds = time.perf_counter() - began
        expected = read_trace(tmp_path / "whole")
        assert expected.requests.num_rows == REQUESTS

        rng = random.Random(3)
        kills, partial, runs = 0, 0, 0
        folder = tmp_path / "0"
        while kills < KILLS:
            child = start(folder)
            if kills % 4:  # while it decodes and writes; counted in writes, so that a busy machine changes nothing
                wait_for_writes(folder, child, rng.randint(1, 6))
                time.sleep(rng.uniform(0.0, 0.03))
            else:  # any moment, loading included
                time.sleep(rng.uniform(0.0, seconds))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            if status() == 0:  # done before the signal came: begin another trace
                assert difference(read_trace(folder), expected, times=False) is None
                runs += 1
                folder = tmp_path / str(runs)
                continue
            kills += 1
            if (folder / "manifest.json").exists():
                found = read_trace(folder)
                assert found.request_ids() == expected.request_ids()[: found.requests.num_rows]
                partial += 0 < found.requests.num_rows < expected.requests.num_rows
        start(folder)
        assert status() == 0
        found = read_trace(folder)
        assert len(set(found.request_ids())) == found.requests.num_rows == REQUESTS
        assert difference(found, expected, times=False) is None
        assert partial >= 2, "some kills must fall into the decoding"

        # Ctrl-C once some requests are done: they are kept, and the rest follows.
        folder = tmp_path / "ctrl-c"
        start(folder, interrupted=6)
        assert status() == 130
        found = read_trace(folder)
        assert found.requests.num_rows == 5
        assert found.request_ids() == expected.request_ids()[: found.requests.num_rows]
        start(folder)
        assert status() == 0
        assert difference(read_trace(folder), expected, times=False) is None
    finally:
        server.stdin.close()
        server.wait(20)
