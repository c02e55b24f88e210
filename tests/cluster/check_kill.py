"""``kill -9`` of a replica, the driver and the raylet while a cluster captures, covers and replays, on disk and on S3.

Each command runs as a process of its own with a cluster of its own (``--ray local``), is hit at a random moment, and is
then run again as it is. What must come out is what one process makes, to the bit, times aside: nothing lost, nothing
twice. Where a replica dies, the first run itself must get there. ``make cluster`` runs this; it takes some minutes.

``ASDSIM_KILLS`` sets the kills of each command and victim, ``ASDSIM_KILL_SEED`` the seed, and
``ASDSIM_CLUSTER_MODEL=smollm2`` takes that model with the EAGLE3 head of ``heads/`` in the place of a toy.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asdsim.files import make_folder, names_in, read_octets, to_path, write_atomically
from asdsim.trace import Trace, read_trace
from asdsim.trace.manifest import MANIFEST, Shard, parse
from asdsim.trace.schema import TABLES
from tests.cluster.check_cluster import GRID, REAL, capture, same, whole  # noqa: F401  (fixture)
from tests.conftest import S3

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"), pytest.mark.timeout(3600)
]  # fmt: skip
ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("ASDSIM_KILLS", "2"))
SEED = int(os.environ.get("ASDSIM_KILL_SEED", "0"))
PATIENCE = 600.0


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the processes below one, with their command lines."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                int(entry.name)
            )
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            waiting.append(child)
            with contextlib.suppress(OSError):
                yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def of_cluster(driver: int, victim: str) -> list[int]:
    """Return the processes that may be hit."""
    if victim == "driver":
        return [driver]
    below = list(descendants(driver))
    if victim == "raylet":
        return [pid for pid, line in below if line.split(" ")[0].endswith("/raylet")]
    return [pid for pid, line in below if line.startswith("ray::") and "Replica" in line]


class Command:
    """One run of the command line."""

    def __init__(self, args: list[object]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asdsim", *map(str, args)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def wait(self) -> tuple[int, str, str]:
        """Return status, stdout and stderr; no process that it started is left behind."""
        below = [pid for pid, _ in descendants(self.process.pid)]
        out, err = self.process.communicate(timeout=PATIENCE)
        end = time.monotonic() + 60.0
        while any(Path(f"/proc/{pid}").exists() and not zombie(pid) for pid in below) and time.monotonic() < end:
            time.sleep(0.1)
        return self.process.returncode, out, err


def zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def completed(args: list[object]) -> str:
    """Run a command to its end, again where a busy machine starts the cluster too slowly; return its stdout."""
    for _ in range(4):
        status, out, err = Command(args).wait()
        if status == 0:
            return out
        assert "no cluster answers" in err, err[-3000:]
    raise AssertionError("no cluster")


@pytest.mark.parametrize("place", ["disk", "s3"])
@pytest.mark.parametrize("victim", ["replica", "driver", "raylet"])
@pytest.mark.parametrize("command", ["capture", "cover", "replay"])
def test_killed_and_run_again(
    command: str, victim: str, place: str, saved: Path, whole: Path, tmp_path: Path,  # noqa: F811
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    store: S3 | None = request.getfixturevalue("s3") if place == "s3" else None
    base = store.url if store else str(tmp_path)
    rng = random.Random(f"{SEED} {command} {victim}" + (" s3" if store else ""))
    expected = whole / ("bare" if command == "capture" else "covered")
    trace = to_path(f"{base}/covered")
    wanted = ""
    if command == "replay":
        copy(expected, trace)
        wanted = completed(["replay", expected, *GRID, "--intervals", "--json"]).replace(str(expected), str(trace))
    kills = 0
    # How long replicas live and how often they change the trace, about: less where a run ends before its kill.
    seconds, changes = 30.0 if REAL and command != "replay" else 6.0, 30
    for attempt in range(10 * KILLS):
        path = to_path(f"{base}/{attempt}")
        ray: list[object] = ["--ray", "local", "--replicas", 2]
        args: dict[str, list[object]] = {
            "capture": capture(saved, path, "--flush-every", 1, *ray),
            "cover": ["cover", path, *GRID, *ray],
            "replay": ["replay", trace, *GRID, "--intervals", "--json", *ray],
        }
        if command == "cover":
            copy(whole / "bare", path)
        run = Command(args[command])
        early = victim != "replica" and rng.random() < 0.2  # the cluster itself is still starting
        first, number = ("raylet", 1) if early else ("replica", 2)
        while run.process.poll() is None and len(of_cluster(run.process.pid, first)) < number:
            time.sleep(0.3)
        targets = of_cluster(run.process.pid, victim)
        # Any time from now on, models still being loaded; or the moment after a change: a file that is being written, a
        # shard that no manifest names yet, a new manifest.
        began, seen, before = time.monotonic(), 0, state(path, store)
        by_changes = command != "replay" and not early and rng.random() < 0.5
        due = rng.uniform(0.0, min(seconds, 4.0) if early else seconds)
        count, late = rng.randint(1, changes), rng.uniform(0.0, 0.03)
        while run.process.poll() is None and (seen < count if by_changes else time.monotonic() - began < due):
            time.sleep(0.003)
            if by_changes:
                now = state(path, store)
                seen, before = seen + (now != before), now
        if by_changes:
            time.sleep(late)
        known, after = stamp(path), time.monotonic() - began
        if not targets or run.process.poll() is not None:
            if run.wait()[0] == 0 and by_changes:
                changes = max(seen, 1)
            elif run.process.returncode == 0:
                seconds = min(seconds, after)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(targets), signal.SIGKILL)
        unnamed = {name for name in names_in(path) if not name.startswith((MANIFEST, "vocabulary"))}
        unnamed -= {shard.name for shard in shards_of(known)}
        status, out, err = run.wait()
        kills += 1
        kept = 0
        if command != "replay" and (path / MANIFEST).exists():
            found = read_trace(path)  # whole, whatever the moment
            kept = found.requests.num_rows if command == "capture" else steps_of_cover(found)
            assert all(now >= then for now, then in zip(rows(stamp(path)), rows(known), strict=True)), "it stays"
        print(
            f"{command} on {place}: kill -9 of the {victim} {after:.1f} s after the {first} started, {rows(known)} "
            f"rows stored and {sorted(unnamed)} beside them: status {status}, {kept} kept", file=sys.stderr,
        )  # fmt: skip
        if victim == "replica":
            assert status == 0, err[-3000:]
        else:
            assert status != 0 or command == "replay" or kept, err[-3000:]
            out = completed([*args[command], *(["--json"] if command != "replay" else [])])
            if command != "replay" and status:
                row = json.loads(out)["rows"][0]
                if command == "capture":
                    assert row["skipped"] == kept, "what was stored is not decoded again"
                else:
                    assert row["steps_added"] == steps_of_cover(read_trace(expected)) - kept, "nor computed again"
        if command == "replay":
            assert out == wanted
        else:
            same(path, expected)
        if kills == KILLS:
            break
    assert kills == KILLS


def copy(folder: Path, path: Path) -> None:
    make_folder(path)
    for name in names_in(folder):
        if (folder / name).is_file():  # no kept graphs
            write_atomically(path / name, (folder / name).read_bytes())


def steps_of_cover(trace: Trace) -> int:
    return int((trace.column("steps", "wave") > 0).sum())


def stamp(path: Path) -> bytes:
    """Return the manifest as it is stored."""
    with contextlib.suppress(OSError):
        return read_octets(path / MANIFEST)
    return b""


def shards_of(manifest: bytes) -> list[Shard]:
    return parse(manifest, MANIFEST).shards if manifest else []


def rows(manifest: bytes) -> list[int]:
    """Return the number of rows of each table."""
    return [sum(shard.rows for shard in shards_of(manifest) if shard.table == table) for table in TABLES]


def state(path: Path, store: S3 | None) -> object:
    """Return something that is another one after each write: the files, or how many objects the store was given."""
    if store:
        return sum(number for (method, _), number in list(store.requests.items()) if method == "PUT")
    return names_in(path), stamp(path)
