"""``asdsim plot``, on a table and on what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asdsim.cli import main

MADE_FROM = {"asdsim": "0.1.0", "manifest_checksum": "abc", "off_trace": "stop"}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    rows = []
    for B in (0.0, 2.0, 4.0):
        for g in (0.25, 0.5):
            histogram = [4, 3, 2, 1 + int(B * g)]
            steps, accepted = sum(histogram), sum(n * count for n, count in enumerate(histogram))
            rows.append(
                {
                    "rule": "asd", "semantics": "paper", "B": B, "g": g, "M": 1.0, "off_trace": "stop", "requests": 3,
                    "exact_share": 1.0 if B < 4 else 0.5, "mean_acceptance_length": (steps + accepted) / steps,
                    "accepted_per_proposal": accepted / steps, "num_spec_steps": steps,
                    "acceptance_histogram": histogram,
                }
            )  # fmt: skip
    table = pa.Table.from_pylist(rows).replace_schema_metadata({b"asdsim": json.dumps(MADE_FROM).encode()})
    path = tmp_path / "sweep.parquet"
    pq.write_table(table, path)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    try:
        main([str(word) for word in words])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_sweep_gives_three_figures_with_their_source(sweep: Path, tmp_path: Path, capsys) -> None:
    code, out, _ = run(capsys, "plot", sweep, "-o", tmp_path / "figures")
    assert code == 0
    stems = ("acceptance-length", "acceptance-by-position", "acceptance-heatmap")
    expected = [tmp_path / "figures" / f"{stem}.{kind}" for stem in stems for kind in ("svg", "png", "json")]
    assert [Path(line) for line in out.split()] == expected
    assert all(path.stat().st_size > 0 for path in expected)
    told = json.loads(expected[-1].read_text())
    assert told["source"] == {"sweep": "sweep.parquet", **MADE_FROM}
    assert told["command"].startswith("asdsim plot ")
    assert told["data"]["B"] == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    assert told["data"]["exact_share"] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_part_of_a_sweep(sweep: Path, tmp_path: Path, capsys) -> None:
    code, out, err = run(capsys, "plot", sweep, "-o", tmp_path / "figures", "--B", "2", "--g", ".5", "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["schema_version"], told["command"], len(told["files"])) == (1, "plot", 6)
    assert "no heat map" in err
    data = json.loads((tmp_path / "figures" / "acceptance-length.json").read_text())["data"]
    assert (data["B"], data["g"]) == ([2.0], [0.5])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{sweep}", "--B", "3"], "no setting with B = 3 (B in the table: 0, 2, 4)"),
        (["{sweep}", "--B", "-1"], "negative"),
        (["{sweep}", "--g", "x"], "not a number"),
        (["{sweep}", "--off-trace", "aligned"], "settled when a sweep is made"),
        (["{folder}/nothing.parquet"], "no such file or directory"),
        (["{text}"], "not a readable Parquet table"),
        (["{other}"], "no column"),
        (["{sweep}", "-o", "{text}"], "is not a folder"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(sweep: Path, tmp_path: Path, capsys, words: list[str], message: str) -> None:
    text, other = tmp_path / "text.parquet", tmp_path / "other.parquet"
    text.write_text("no table")
    pq.write_table(pa.table({"a": [1]}), other)
    before = sorted(tmp_path.iterdir())
    output = [] if "-o" in words else ["-o", str(tmp_path / "figures")]
    places = {"sweep": sweep, "folder": tmp_path, "text": text, "other": other}
    code, out, err = run(capsys, "plot", *(word.format(**places) for word in words), *output)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before
