"""Joining shards: whole or not at all, and nothing left behind by a join that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asdsim.errors import TraceError
from asdsim.trace import TraceWriter, read_trace
from asdsim.trace.join import NOTE, join, shard_path
from asdsim.trace.writer import lock_directory, unlock
from tests.support.toytrace import ToyModel, toy_manifest, toy_requests
from tests.support.tracefiles import difference, edit_manifest

MODEL = ToyModel(seed=9, widths=(3,))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return where two finished shards of five requests belong, and write the undivided trace as ``whole``."""
    requests = toy_requests(MODEL, 5, empty=False)
    for index in (1, 2):
        note = {NOTE: {"index": index, "of": 2, "requests": len(requests)}}
        with TraceWriter.create(shard_path(tmp_path / "t", index, 2), toy_manifest(MODEL, notes=note)) as writer:
            for request in requests[index - 1 :: 2]:
                writer.add_request(request, MODEL.decode(request))
    with TraceWriter.create(tmp_path / "whole", toy_manifest(MODEL)) as writer:
        for request in requests:
            writer.add_request(request, MODEL.decode(request))
    return tmp_path / "t"


def temporaries(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path.name.startswith(".tmp"))


def test_a_killed_join_leaves_nothing_for_ever(target: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "os.rename = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from asdsim.trace.join import join\n"
        "join(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(temporaries(target)) == 1 and not target.exists()
    (target.parent / ".tmp-other-0123456789abcdef").mkdir()  # of another trace
    foreign = target.parent / ".tmp-t-0123456789abcdef"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("not of a trace")
    os.symlink(target.parent / "whole", target.parent / ".tmp-t-fedcba9876543210")
    joined = join(target)
    assert difference(joined, read_trace(target.parent / "whole")) is None
    assert temporaries(target) == [".tmp-other-0123456789abcdef", foreign.name, ".tmp-t-fedcba9876543210"]
    assert (foreign / "letter.txt").exists() and read_trace(target.parent / "whole").request_ids()


def test_a_failed_join_leaves_nothing(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*paths: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(TraceError, match="No space left"):
        join(target)
    assert temporaries(target) == [] and not target.exists()


def test_one_process_joins_at_a_time(target: Path) -> None:
    lock = lock_directory(shard_path(target, 1, 2))
    with pytest.raises(TraceError, match="another process is writing this trace"):
        join(target)
    unlock(lock)
    assert len(join(target).request_ids()) == 5


@pytest.mark.parametrize(
    "note", [3, [], {"index": "1"}, {"index": 1, "of": []}, {"index": 1, "of": 2, "requests": "5"}, {"index": 1.5}]
)
def test_a_note_of_another_type_is_one_error(target: Path, note: object) -> None:
    edit_manifest(shard_path(target, 1, 2), lambda content: content["notes"].update({NOTE: note}))
    with pytest.raises(TraceError, match=r"t\.shard-1-of-2"):
        join(target)
