"""``asdsim inspect``: what it prints, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asdsim.cli import main
from asdsim.cli.common import note_unfinished
from asdsim.errors import AsdsimError
from asdsim.trace import read_trace
from asdsim.trace.covered import covered_grids
from tests.support.toytrace import RAGGED, ToyModel, write_toy_trace
from tests.support.tracefiles import edit_manifest


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


def test_intervals_are_printed_as_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "traces/smollm2-layerskip")
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["all"]]
    assert "4.301  [3.933, 4.697]" in line and "3.330  [2.946, 3.732]" in line


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


def test_the_manifest_stands_for_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_toy_trace(tmp_path / "t")
    by_file = run(capsys, str(tmp_path / "t" / "manifest.json"))
    assert by_file == run(capsys, str(tmp_path / "t")) and by_file[0] == 0


OTHERS: list[Any] = [None, True, -1, 2.5, 10**400, "x\x1b[2J\u202e", "\ud800", [], [[]], {}, {"a": {"b": [None]}}]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON object, containers included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def test_values_of_other_types_in_a_signed_manifest_are_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every value of a manifest, at any depth, in turn replaced by values of other types."""
    folder = tmp_path / "t"
    write_toy_trace(folder, ToyModel(widths=(2,)), count=2, limit=6, empty=False)
    grids = [
        {"rule": "asd", "semantics": "paper", "B": [0.0, "inf"], "g": [0.5], "M": [2], "faithful": False},
        {"rule": "mars", "params": {"theta": [0.9]}, "faithful": False},
    ]
    notes = {"requests": 2, "created": "2026-01-01", "faithful_only": True, "threads": 1}

    def extend(content: dict[str, Any]) -> None:
        content.update(grids=grids, notes=notes, settings={"divergences": [], "limit": 2})
        content["drafter"].update(overrides={}, revision=None)

    edit_manifest(folder, extend)
    intact = (folder / "manifest.json").read_bytes()
    assert run(capsys, str(folder))[0] == 0
    refused = 0
    for path in leaves({key: value for key, value in json.loads(intact).items() if key != "checksum"}):
        for other in OTHERS:

            def replace(content: dict[str, Any], path: tuple[Any, ...] = path, other: Any = other) -> None:
                for key in path[:-1]:
                    content = content[key]
                content[path[-1]] = other

            (folder / "manifest.json").write_bytes(intact)
            edit_manifest(folder, replace)
            status, out, err = run(capsys, str(folder), "--no-checksums")
            assert status in (0, 2), (path, other)
            if status == 2:
                refused += 1
                assert out == "" and err.startswith("asdsim: error: ") and err.count("\n") == 1, (path, other)
                assert len(err) < 1000
            else:
                trace = read_trace(folder, verify=False)
                note_unfinished(trace)
                capsys.readouterr()
                with contextlib.suppress(AsdsimError):
                    covered_grids(trace.manifest.grids)
            assert not any(character in out + err for character in ("\x1b", "\u202e", "\ud800")), (path, other)
    assert refused > 300


def test_only_what_is_needed_is_imported(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "t")
    code = (
        "import sys\nfrom asdsim.cli import main\n"
        f"try: main(['inspect', {str(tmp_path / 't')!r}])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numba', 'polars', 'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
