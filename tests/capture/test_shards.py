"""A capture split over processes: each shard is a trace, and joined they are the trace of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from asdsim.capture.vocabulary import stored_ids
from asdsim.cli import main
from asdsim.trace import read_trace
from asdsim.trace.join import parse_shard
from asdsim.trace.writer import TraceWriter
from tests.support.tracefiles import difference

Capsys = pytest.CaptureFixture[str]


def run(capsys: Capsys, *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, args)])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def arguments(saved: Path, out: Path, *more: object) -> list[object]:
    return [
        "capture", "-o", out, "--target", saved / "model", "--drafter", "layer-skip:1", "--limit", 7,
        "--task", f"jsonl:{saved / 'prompts.jsonl'}", "--max-new-tokens", 20, "--K", 4, *more,
    ]  # fmt: skip


GRID = ("--B", "0,2", "--g", "inf", "--M", "inf")


@pytest.mark.parametrize("number", [1, 3])
def test_shards_join_to_the_undivided_trace(number: int, saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    assert run(capsys, *arguments(saved, tmp_path / "one"))[0] == 0
    assert run(capsys, "cover", tmp_path / "one", *GRID)[0] == 0
    for index in range(number, 0, -1):
        shard = tmp_path / f"many.shard-{index}-of-{number}"
        assert run(capsys, *arguments(saved, tmp_path / "many", "--shard", f"{index}/{number}"))[0] == 0
        assert run(capsys, "cover", shard, *GRID)[0] == 0
    status, out, _ = run(capsys, "join", tmp_path / "many", "--json")
    row = json.loads(out)["rows"][0]
    one, many = read_trace(tmp_path / "one"), read_trace(tmp_path / "many")
    assert status == 0 and row == {"requests": 7, "steps": one.steps.num_rows, "grids": 1}
    for trace in (one, many):  # the text of every token, those of cover too
        assert trace.vocabulary is not None
        assert trace.vocabulary.ids.tolist() == stored_ids(trace.path, trace.manifest).tolist()
    assert many.request_ids() == one.request_ids() and many.manifest.grids == one.manifest.grids
    replays = [run(capsys, "replay", tmp_path / name, *GRID, "--json")[1] for name in ("one", "many")]
    frames = [json.loads(text)["rows"] for text in replays]
    for left, right in zip(*frames, strict=True):  # other batches of cover: regrets may differ in their last bits
        assert left["exact_share"] == 1 and left.keys() == right.keys()
        for name, value in left.items():
            assert right[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
    assert run(capsys, *arguments(saved, tmp_path / "one", "--resume"))[0] == 0  # still the same run


def test_steps_are_kept_to_the_bit(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    assert run(capsys, *arguments(saved, tmp_path / "t", "--shard", "1/1"))[0] == 0
    assert run(capsys, "join", tmp_path / "t")[0] == 0
    assert difference(read_trace(tmp_path / "t"), read_trace(tmp_path / "t.shard-1-of-1")) is None


def test_an_unfinished_or_foreign_shard_is_named(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    target = tmp_path / "t"
    status, _, err = run(capsys, "join", target)
    assert status == 2 and "no shards lie beside it" in err
    assert run(capsys, *arguments(saved, target, "--shard", "1/2"))[0] == 0
    status, _, err = run(capsys, "join", target)
    assert status == 2 and "shard 2 of 2 is missing" in err and not target.exists()
    assert run(capsys, *arguments(saved, target, "--shard", "2/2", "--K", 3))[0] == 0
    status, _, err = run(capsys, "join", target)
    assert status == 2 and "num_draft_tokens differs" in err and "shard-2-of-2" in err
    shutil.rmtree(tmp_path / "t.shard-2-of-2")
    assert run(capsys, *arguments(saved, target, "--shard", "2/2"))[0] == 0
    shutil.copytree(tmp_path / "t.shard-2-of-2", tmp_path / "t.shard-3-of-3")
    status, _, err = run(capsys, "join", target)
    assert status == 2 and "shards of 2 and of 3" in err
    shutil.rmtree(tmp_path / "t.shard-3-of-3")
    names = ("t.shard-1-of-2", "t.shard-2-of-2", "aside")
    for old, new in ((0, 2), (1, 0), (2, 1)):
        (tmp_path / names[old]).rename(tmp_path / names[new])
    status, _, err = run(capsys, "join", target)
    assert status == 2 and "t.shard-1-of-2: is shard 2 of 2 under the name of another" in err
    for old, new in ((0, 2), (1, 0), (2, 1)):
        (tmp_path / names[old]).rename(tmp_path / names[new])
    target.mkdir()
    assert run(capsys, "join", target)[0] == 0
    status, _, err = run(capsys, "join", target)
    assert status == 2 and "holds something already" in err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


def test_a_capture_that_was_not_finished_says_so(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    full, part = tmp_path / "full", tmp_path / "part"
    assert run(capsys, *arguments(saved, full))[0] == 0
    trace = read_trace(full)
    with TraceWriter.create(part, trace.manifest.replace(grids=[], shards=[])) as writer:
        for record in trace.request_records()[:3]:
            writer.add_request(record, trace.steps_of(record.request_id))
    assert "requests   7\n" in run(capsys, "inspect", full)[1]
    assert "requests   3 of 7: asdsim capture --resume goes on\n" in run(capsys, "inspect", part)[1]
    assert "not finished" not in run(capsys, "replay", full, *GRID)[2]
    assert "3 of 7 requests; the capture was not finished" in run(capsys, "replay", part, *GRID)[2]
    status, _, err = run(capsys, "cover", part, *GRID)
    assert status == 0 and "3 of 7 requests; the capture was not finished, --resume goes on" in err
    assert "not finished" not in run(capsys, "cover", full, *GRID)[2]
    status, _, err = run(capsys, *arguments(saved, part, "--resume"))
    assert status == 0 and "the grids that were covered no longer are" in err
    assert read_trace(part).manifest.grids == []


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="is not i/n"):
        parse_shard(text)
