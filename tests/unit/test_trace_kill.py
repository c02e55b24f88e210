"""``kill -9`` at random moments of writing, then resume: the trace equals an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asdsim.trace import read_trace
from tests.support.tracefiles import difference

KILLS = 20
ROOT = Path(__file__).parents[2]

WRITER = """
import sys
from asdsim.trace import TraceWriter, writer as writers
from tests.support.toytrace import ToyModel, toy_manifest, toy_requests
writers.MANY_SHARDS = 4
model = ToyModel(seed=8, widths=(0, 2, 5))
content = [(request, model.decode(request)) for request in toy_requests(model, 25, limit=5)]
print("ready", flush=True)
with TraceWriter.resume(sys.argv[1], toy_manifest(model)) as writer:
    for request, steps in content:
        if request.request_id not in writer.completed:
            writer.add_request(request, steps)
            writer.flush()
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    began = time.perf_counter()
    assert start(tmp_path / "whole").wait() == 0
    expected = read_trace(tmp_path / "whole")
    seconds = 0.5 * (time.perf_counter() - began)
    rng = random.Random(1)
    kills, partial, runs = 0, 0, 0
    folder = tmp_path / "0"
    while kills < KILLS:
        process = start(folder)
        time.sleep(rng.uniform(0.0, seconds))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:  # done before the signal came: begin another trace
            assert difference(read_trace(folder), expected) is None
            runs += 1
            folder = tmp_path / str(runs)
            continue
        kills += 1
        if (folder / "manifest.json").exists():
            found = read_trace(folder)
            assert found.request_ids() == expected.request_ids()[: found.requests.num_rows]
            partial += 0 < found.requests.num_rows < expected.requests.num_rows
    assert start(folder).wait() == 0
    found = read_trace(folder)
    assert difference(found, expected) is None
    assert len(set(found.request_ids())) == found.requests.num_rows == 25
    assert partial >= 3, "the kills must fall into the writing"
