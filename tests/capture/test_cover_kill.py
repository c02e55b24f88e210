"""A cover that is killed, runs out of disk or is interrupted goes on where it was, and ends up the same."""

from __future__ import annotations

import contextlib
import errno
import json
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
from asdsim.errors import AsdsimError
from asdsim.live.cover import cover_with
from asdsim.live.verify import verify_trace
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.manifest import Manifest
from asdsim.trace.reader import read_trace
from asdsim.trace.writer import TraceWriter
from tests.support.toymodels import ToyDrafter, ToyTarget

GRID = Grid.product([0, 0.5, 1, 2, 4], [0.25, 0.5, 2], [1, 2, 3])
K = 4


def models() -> tuple[Any, Any]:
    target = ToyTarget(11, vocab=20)
    return target, ToyDrafter(target, 0.5)


def interrupted_models() -> tuple[Any, Any]:
    """Return models that Ctrl-C interrupts in the middle of a cover."""
    target, drafter = models()
    calls = 0
    plain = target.row

    def row(prefix: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 150:
            raise KeyboardInterrupt
        return plain(prefix)

    target.row = row  # type: ignore[method-assign]
    return target, drafter


def capture(path: Path) -> Path:
    target, drafter = models()
    manifest = Manifest(
        target=target.describe(), drafter=drafter.describe(), vocab_size=20, num_draft_tokens=K, max_new_tokens=40
    )
    with TraceWriter.create(path, manifest) as writer:
        for n in range(4):
            request = RequestRecord(f"toy/{n}", "toy", (1, n), "", None, 40, target.eos_ids)
            writer.add_request(request, decode(target, drafter, request, STRICT, K, Recorder()).steps)
    return path


def content(path: Path) -> dict[str, set[tuple[int, ...]]]:
    """Return, per request, the drafts of all steps by start: what must not depend on how often it was interrupted."""
    trace = read_trace(path)
    return {
        record.request_id: {(step.start_pos, *step.draft_ids.tolist()) for step in trace.steps_of(record.request_id)}
        for record in trace.request_records()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = capture(tmp_path_factory.mktemp("whole") / "trace")
    with TraceWriter.append(path) as writer:
        assert cover_with(writer, models(), GRID).complete
    return path


def test_killed_at_random_moments(whole: Path, tmp_path: Path) -> None:
    path = capture(tmp_path / "trace")
    rng = random.Random(0)
    kills = 0
    for _ in range(20):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                with TraceWriter.append(path) as writer:
                    writer.flush_seconds = 0.0
                    cover_with(writer, models(), GRID, batch=3)
            os._exit(0)
        time.sleep(rng.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        read_trace(path)  # whatever the moment, what is there is whole
    assert kills >= 3
    with TraceWriter.append(path) as writer:
        assert cover_with(writer, models(), GRID).complete
    assert content(path) == content(whole)
    found = verify_trace(path, models=models())
    assert found.identical == found.pairs == 4 * len(GRID)


def test_interrupted_keeps_what_was_computed(tmp_path: Path) -> None:
    path = capture(tmp_path / "trace")
    with TraceWriter.append(path) as writer:
        progress = cover_with(writer, interrupted_models(), GRID, batch=2)
    assert progress.interrupted and progress.steps_added > 0
    assert read_trace(path).steps.num_rows == progress.steps_held


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_command_claims_nothing_and_exits_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    path = capture(tmp_path / "trace")
    pair = interrupted_models()
    monkeypatch.setattr("asdsim.capture.reload.load_pair", lambda *_, **__: pair)
    grid = ["--B", "0,.5,1,2,4", "--g", ".25,.5,2", "--M", "1,2,3"]
    with pytest.raises(SystemExit) as ended:
        main(["cover", str(path), *grid, "--batch", "2", *(["--json"] if as_json else [])])
    out, err = capsys.readouterr()
    assert ended.value.code == 130 and "interrupted" in err
    if as_json:
        (row,) = json.loads(out)["rows"]
        assert row["interrupted"] and row["pairs"] == 4 * 45 and row["exact_pairs"] < row["pairs"]
    else:
        assert "replace" not in out and f"of {4 * 45} (request, setting) pairs exact" in out


def test_a_full_disk_is_one_clear_error_and_loses_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = capture(tmp_path / "trace")
    before = content(path)
    real = os.fsync
    count = 0

    def full(handle: int) -> None:
        nonlocal count
        count += 1
        if count > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AsdsimError, match="no space left"), TraceWriter.append(path) as writer:
        writer.flush_seconds = 0.0
        cover_with(writer, models(), GRID, batch=3)
    monkeypatch.undo()
    after = content(path)
    assert all(before[name] <= after[name] for name in before)
    with TraceWriter.append(path) as writer:
        assert cover_with(writer, models(), GRID).complete
    assert content(path) == content(whole)
