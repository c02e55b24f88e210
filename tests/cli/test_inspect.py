"""``asdsim inspect``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asdsim.cli import main
from tests.support.toytrace import RAGGED, write_toy_trace


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *args])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = write_toy_trace(tmp_path / "t", cover=3)
    status, out, err = run(capsys, str(tmp_path / "t"), "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert (found["schema_version"], found["command"], found["trace"]) == (1, "inspect", str(tmp_path / "t"))
    assert found["steps"] == sum(len(steps) for _, steps in content)
    assert found["positions"] == sum(step.num_draft_tokens + 1 for _, steps in content for step in steps)
    assert found["target"]["name"] == "toy-target" and found["K"] == 16
    assert {shard["name"].split("-")[0] for shard in found["shards"]} == {"requests", "steps", "positions"}
    assert sum(found["steps_by_K"].values()) == found["steps"]


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_toy_trace(tmp_path / "t", RAGGED)
    status, out, err = run(capsys, str(tmp_path / "t"))
    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path / 't'}: valid\n")
    for part in (
        "toy-target (revision r1, sha256 00",
        "rule name strict",
        "tokens/step",
        "toy-b",
        "regret",
        "median us",
    ):
        assert part in out


@pytest.mark.parametrize("flags", [[], ["--json"], ["--no-checksums"]])
def test_a_damaged_trace_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    write_toy_trace(tmp_path / "t")
    next((tmp_path / "t").glob("steps-*")).unlink()
    status, out, err = run(capsys, str(tmp_path / "t"), *flags)
    assert (status, out) == (2, "")
    assert err.startswith("asdsim: error: ") and err.count("\n") == 1
    assert "steps-00000.parquet: the shard is missing (restore" in err


def test_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, str(tmp_path / "nowhere"))[0] == 2
    assert run(capsys, str(tmp_path))[0] == 2


def test_only_what_is_needed_is_imported(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t")
    code = (
        "import sys\nfrom asdsim.cli import main\n"
        f"try: main(['inspect', {str(tmp_path / 't')!r}])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numba', 'polars', 'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
