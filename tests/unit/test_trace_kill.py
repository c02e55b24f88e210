"""``kill -9`` at random moments of writing, then resume: the trace equals an uninterrupted one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from asdsim.trace import TraceWriter, read_trace
from asdsim.trace import writer as writers
from tests.support.forks import Forks
from tests.support.toytrace import ToyModel, toy_manifest, toy_requests
from tests.support.tracefiles import difference

KILLS = 20


def write(folder: str) -> None:
    writers.MANY_SHARDS = 4
    model = ToyModel(seed=8, widths=(0, 2, 5))
    content = [(request, model.decode(request)) for request in toy_requests(model, 25, limit=5)]
    print("begins", flush=True)
    with TraceWriter.resume(folder, toy_manifest(model)) as writer:
        for request, steps in content:
            if request.request_id not in writer.completed:
                writer.add_request(request, steps)
                writer.flush()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    with Forks(__name__) as forks:

        def start(folder: Path) -> int:
            child = forks.start("write", folder)
            assert forks.line() == "begins"
            return child

        start(tmp_path / "whole")
        began = time.perf_counter()
        assert forks.wait() == 0
        seconds = time.perf_counter() - began
        expected = read_trace(tmp_path / "whole")
        rng = random.Random(1)
        kills, partial, runs = 0, 0, 0
        folder = tmp_path / "0"
        while kills < KILLS:
            child = start(folder)
            time.sleep(rng.uniform(0.0, seconds))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            if (status := forks.wait()) == 0:  # done before the signal came: begin another trace
                assert difference(read_trace(folder), expected) is None
                runs += 1
                folder = tmp_path / str(runs)
                continue
            assert status == -signal.SIGKILL
            kills += 1
            if (folder / "manifest.json").exists():
                found = read_trace(folder)
                assert found.request_ids() == expected.request_ids()[: found.requests.num_rows]
                partial += 0 < found.requests.num_rows < expected.requests.num_rows
        start(folder)
        assert forks.wait() == 0
    found = read_trace(folder)
    assert difference(found, expected) is None
    assert len(set(found.request_ids())) == found.requests.num_rows == 25
    assert partial >= 3, "the kills must fall into the writing"
