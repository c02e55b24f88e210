"""A cluster gives what one process gives, to the bit; what it loses is done again.

``ASDSIM_CLUSTER_MODEL=smollm2`` takes SmolLM2 with the EAGLE3 head of ``heads/`` in the place of a toy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asdsim.cli import main
from asdsim.cli.demo import HEAD
from asdsim.cluster.pool import Item, Pool, Where, connect, share_of
from asdsim.cluster.walk import Walking
from asdsim.errors import CaptureError, TraceError, UsageError
from asdsim.files import names_in, to_path
from asdsim.records import RequestRecord
from asdsim.result import replay_grid
from asdsim.rules.settings import Grid
from asdsim.trace import read_trace
from asdsim.trace.manifest import MANIFEST, TIMING
from asdsim.trace.writer import TraceWriter
from tests.cluster.replicas import Fragile
from tests.conftest import KEY, S3, SECRET
from tests.support.tracefiles import difference

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]
GRID = ("--B", "0,2,4", "--g", ".5,inf", "--M", "1,2")
LIMIT = 10
EAGLE = Path(__file__).parents[2] / "traces" / "smollm2-eagle3"  # a threshold cuts what strict matching accepts there
REAL = os.environ.get("ASDSIM_CLUSTER_MODEL", "toy") == "smollm2"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, args)])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return command


def capture(saved: Path, out: Path, *more: object) -> list[object]:
    models: list[object] = ["--target", saved / "model", "--drafter", "layer-skip:1"]
    task = f"jsonl:{saved / 'prompts.jsonl'}"
    if REAL:
        models, task = ["--target", "smollm2-135m", "--drafter", f"eagle3:{HEAD}"], "gsm8k"
    return [
        "capture", "-o", out, *models, "--limit", LIMIT, "--task", task, "--max-new-tokens", 16, "--K", 4, *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captured by one process, and covered group by group of one request."""
    folder = tmp_path_factory.mktemp("whole")
    for args in (capture(saved, folder / "bare"), ["cover", folder / "covered", *GRID, "--group", 1]):
        if args[0] == "cover":
            shutil.copytree(folder / "bare", folder / "covered")
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, args)])
        assert not stopped.value.code
    return folder


def same(path: Path, expected: Path) -> None:
    """Assert that two traces hold the same, times aside, the text of every token included."""
    found, wanted = read_trace(path), read_trace(expected)
    assert difference(found, wanted, times=False) is None
    assert found.vocabulary is not None and wanted.vocabulary is not None
    assert found.vocabulary.ids.tolist() == wanted.vocabulary.ids.tolist()
    named = {shard.name for shard in found.manifest.shards}
    assert {name for name in names_in(path) if not name.startswith("vocabulary")} == {MANIFEST, *named}


def test_capture_goes_on_and_equals_one_process(
    cluster: Any, saved: Path, whole: Path, tmp_path: Path, run: Run
) -> None:
    bare = read_trace(whole / "bare")
    # Requests 2, 3 and 7 are there, as where other replicas were lost; neither way of going on minds the gaps.
    for name in ("ray", "alone"):
        manifest = bare.manifest.replace(shards=[], notes={**bare.manifest.notes, "requests": LIMIT})
        with TraceWriter.create(tmp_path / name, manifest) as writer:
            for n in (7, 2, 3):
                record = bare.request_records()[n]
                writer.add_request(record, bare.steps_of(record.request_id), n)
        assert read_trace(tmp_path / name).request_ids() == [bare.request_ids()[n] for n in (2, 3, 7)]
    status, out, err = run(*capture(saved, tmp_path / "ray", "--ray", "local", "--replicas", 2, "--json"))
    row = json.loads(out)["rows"][0]
    assert status == 0 and (row["requests"], row["skipped"]) == (LIMIT - 3, 3), err
    same(tmp_path / "ray", whole / "bare")
    widths = [
        [one.get("width") for one in read_trace(path).manifest.notes[TIMING]["passes"]]
        for path in (tmp_path / "ray", whole / "bare")
    ]
    assert set(widths[0]) == set(widths[1]) >= {1, 2}
    assert run(*capture(saved, tmp_path / "alone", "--resume"))[0] == 0
    same(tmp_path / "alone", whole / "bare")
    # Once more: nothing is left to do. Other flags: another run.
    status, out, _ = run(*capture(saved, tmp_path / "ray", "--ray", "local", "--json"))
    assert status == 0 and json.loads(out)["rows"][0]["requests"] == 0
    status, _, err = run(*capture(saved, tmp_path / "ray", "--ray", "local", "--top-k", 9))
    assert status == 2 and "top_k is 8 there and 9 now" in err


def test_replicas_of_several_gpus_lie_on_one_node(
    cluster: Any, saved: Path, whole: Path, tmp_path: Path, run: Run
) -> None:
    args = capture(saved, tmp_path / "t", "--ray", "local", "--gpus-per-replica", 2)
    status, _, err = run(*args)
    assert status == 0 and "1 replica of 2 GPUs" in err
    same(tmp_path / "t", whole / "bare")
    assert cluster.util.placement_group_table() == {} or all(
        group["state"] == "REMOVED" and group["strategy"] == "STRICT_PACK"
        for group in cluster.util.placement_group_table().values()
    )


@pytest.mark.parametrize("group", [1, 4])
def test_cover_equals_one_process(cluster: Any, whole: Path, tmp_path: Path, run: Run, group: int) -> None:
    expected = whole / "covered"
    if group != 1:
        expected = tmp_path / "alone"
        shutil.copytree(whole / "bare", expected)
        assert run("cover", expected, *GRID, "--group", group)[0] == 0
    shutil.copytree(whole / "bare", tmp_path / "ray")
    options = ["--group", group] if group != 1 else []
    status, out, err = run("cover", tmp_path / "ray", *GRID, *options, "--ray", "local", "--json")
    row = json.loads(out)["rows"][0]
    assert status == 0 and row["exact_share"] == 1 and row["pairs"] == row["exact_pairs"] == 12 * LIMIT, err
    same(tmp_path / "ray", expected)
    assert row["steps_held"] == read_trace(expected).steps.num_rows
    assert (
        json.loads(run("cover", tmp_path / "ray", *GRID, "--ray", "local", "--json")[1])["rows"][0]["steps_added"] == 0
    )


def test_figures_equal_those_of_one_process(cluster: Any, whole: Path, tmp_path: Path, run: Run) -> None:
    trace = whole / "covered"
    replays: list[list[object]] = [
        ["replay", trace, *GRID, "--intervals", "--cost", "trace"],
        ["replay", trace, "--B", "0:4:.5", "--g", ".25,inf", "--M", "inf"],  # partly exact
        ["replay", trace, "--B", "0:4:1", "--g", ".25", "--M", "3", "--off-trace", "aligned", "--intervals"],
        ["replay", trace, "--B", "0,2", "--g", "inf", "--M", "1", "--K", "2,4", "--intervals"],
        ["replay", EAGLE, "--B", "0,4", "--g", ".5", "--M", "2", "--draft-threshold", ".6", "--off-trace", "recorded"],
        ["replay", trace, "--rule", "topm", "-p", "m=1,2"],
        ["verify", trace, "--sample", 20],
    ]
    for args in replays:
        alone, spread = run(*args, "--json"), run(*args, "--json", "--ray", "local")
        assert alone[0] == 0 and spread[:2] == alone[:2], (args, alone[2], spread[2])
    policies = []
    for more in ([], ["--ray", "local"]):
        policies.append(tmp_path / f"policy-{len(policies)}.json")
        args = ["calibrate", trace, "--split", 2, "--max-divergence", ".9", "-o", policies[-1], *more]
        status, _, err = run(*args)
        assert status == 0, err
    assert policies[0].read_bytes() == policies[1].read_bytes()


def test_a_trace_in_a_store_equals_one_on_disk(
    cluster: Any, saved: Path, whole: Path, tmp_path: Path, s3: S3, run: Run
) -> None:
    url, ray, printed = f"{s3.url}/t", ["--ray", "local", "--replicas", 2], []
    for args in (capture(saved, to_path(url), "--flush-every", 2), ["cover", url, *GRID]):
        status, *texts = run(*args, *ray)
        assert status == 0, texts
        printed += texts
        same(to_path(url), whole / ("bare" if args[0] == "capture" else "covered"))
    for args in (["replay", *GRID, "--intervals"], ["verify", "--sample", 8]):
        alone = run(args[0], whole / "covered", *args[1:], "--json")
        spread = run(args[0], url, *args[1:], "--json", *ray)
        printed += spread[1:]
        assert alone[0] == spread[0] == 0, spread[2]
        assert json.loads(spread[1])["rows"] == json.loads(alone[1])["rows"]
    policies = []
    for folder, more in ((tmp_path, []), (s3.url, ray)):  # both fit step times, which are the trace's own
        policies.append(to_path(f"{folder}/policy.json"))
        status, *texts = run("calibrate", url, "--split", 2, "--max-divergence", ".9", "-o", policies[-1], *more)
        assert status == 0, texts
        printed += texts
    assert policies[0].read_bytes() == policies[1].read_bytes()
    stored = s3.read()
    for word in (KEY, SECRET):
        assert not any(word in text for text in printed)
        assert not [name for name, data in stored.items() if word.encode() in data]


@pytest.mark.parametrize("more", [False, True])
def test_shards_merged_while_a_cluster_reads_them(cluster: Any, whole: Path, tmp_path: Path, more: bool) -> None:
    bare, path, grid = read_trace(whole / "bare"), tmp_path / "t", Grid.product([0, 2], [0.5], [1])
    records = bare.request_records()

    def add(writer: TraceWriter, record: RequestRecord) -> None:
        writer.add_request(record, bare.steps_of(record.request_id))
        writer.flush()

    with contextlib.closing(TraceWriter.create(path, bare.manifest.replace(shards=[]))) as writer:
        for record in records[:-1]:
            add(writer, record)
        with Walking(path, Where("local", 2), lambda text: None, False) as walking:
            if more:
                add(writer, records[-1])
            before = names_in(path)
            writer.close()  # merges
            assert len(names_in(path)) < len(before)
            if more:
                with pytest.raises(TraceError, match="was changed while it was read"):
                    walking.replay_grid(walking.trace, grid)
            else:
                found = walking.replay_grid(walking.trace, grid)
                assert found.rows() == replay_grid(read_trace(path), grid).rows()


@pytest.mark.parametrize("args, message", [
    (["replay", "--off-trace", "pooled", *GRID], "pooled takes the whole trace at once"),
    (["replay", "--B", "exact", "--g", "1", "--M", "1"], "--B exact takes the whole trace at once"),
    (["calibrate", "--method", "quantile", "-o", "p.json"], "quantile takes the whole trace at once"),
    (["cover", "--max-steps", "3", *GRID], "order the steps of all requests"),
])  # fmt: skip
def test_what_takes_the_whole_trace_is_refused(
    cluster: Any, whole: Path, run: Run, args: list[str], message: str
) -> None:
    status, _, err = run(args[0], whole / "covered", *args[1:], "--ray", "local")
    assert status == 2 and message in err


def work(items: list[object], file: Path, notes: list[str], replicas: int = 2) -> list[object]:
    """Return what fragile replicas make of items, in their order."""
    found: dict[int, object] = {}

    def done(some: list[Item], answer: list[object]) -> int:
        found.update(zip((int(item.label) for item in some), answer, strict=False))
        return len(answer)

    with Pool(Where("local", replicas, 0), Fragile, (str(file),), notes.append) as pool:
        pool.run([Item(item, str(n)) for n, item in enumerate(items)], done, most=4)
    return [found[n] for n in sorted(found)]


def test_a_lost_replica_loses_what_it_was_at(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes: list[str] = []
    items: list[object] = [*range(12), "once", *range(12)]
    squares = [n * n for n in range(12)]
    assert work(items, tmp_path / "seen", notes) == [*squares, "once", *squares]
    assert sum("was lost at" in line and "done again" in line for line in notes) == 1
    assert capsys.readouterr().out == "", "what Ray prints of it is no result"


def test_an_item_that_kills_every_replica_is_named(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="^3: 3 replicas died at it"):
        work([1, 2, 3, "die", 4], tmp_path / "seen", [])


def test_errors_come_over_as_they_are(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as caught:
        work([1, "error"], tmp_path / "seen", [])
    assert str(caught.value) == "model m: no such weights (copy them)"
    with pytest.raises(CaptureError, match="ZeroDivisionError: by zero"):
        work([1, "bug"], tmp_path / "seen", [])


def test_ctrl_c_keeps_what_is_finished(cluster: Any, tmp_path: Path) -> None:
    found: list[object] = []

    def done(some: list[Item], answer: list[object]) -> int:
        found.extend(answer)
        return len(answer)

    def press() -> None:
        while not started.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    started = tmp_path / "started"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
    try:
        with Pool(Where("local", 1, 0), Fragile, (str(started),), lambda text: None) as pool:
            threading.Thread(target=press, daemon=True).start()
            pool.run([Item(item, str(item)) for item in (1, 2, "slow", 3)], done, most=8)
    finally:
        signal.signal(signal.SIGINT, before)
    assert pool.interrupted and found == [1, 4, "slow"][: len(found)] and 9 not in found and "slow" in found


def test_without_ray_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'asdsim\[ray\]'.*--shard i/n"):
        connect(Where("auto"))


def test_options_of_ray_need_it(whole: Path, run: Run) -> None:
    status, _, err = run("cover", whole / "covered", *GRID, "--replicas", 2)
    assert status == 2 and "--replicas has no effect without --ray" in err


@pytest.mark.parametrize("where, nodes, expected", [
    (Where("a"), [(0, 8), (0, 4)], (0, 12)),
    (Where("a", threads=4), [(0, 8), (0, 6)], (0, 3)),
    (Where("a"), [(8, 64), (8, 64)], (1, 16)),
    (Where("a", gpus=4), [(8, 64), (4, 64), (2, 64)], (4, 3)),
    (Where("a", replicas=5, gpus=2), [(8, 64), (8, 64)], (2, 5)),
    (Where("a", gpus=0), [(8, 6)], (0, 6)),
])  # fmt: skip
def test_shares(where: Where, nodes: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    rows = [{"Alive": True, "Resources": {"GPU": float(gpu), "CPU": float(cpu)}} for gpu, cpu in nodes]
    assert share_of(where, [*rows, {"Alive": False, "Resources": {"GPU": 99.0, "CPU": 99.0}}]) == expected


def test_a_replica_that_fits_nowhere_is_refused() -> None:
    rows = [{"Alive": True, "Resources": {"GPU": 4.0, "CPU": 8.0}}]
    with pytest.raises(UsageError, match="no node of the cluster has 8 GPUs; the most is 4"):
        share_of(Where("a", gpus=8), rows)
    with pytest.raises(UsageError, match="no node of the cluster has 16 CPU cores"):
        share_of(Where("a", gpus=0, threads=16), rows)
