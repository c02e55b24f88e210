"""``asdsim plot``, on a table, on a trace, and on what is neither."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import asdsim
from asdsim.cli import main
from asdsim.trace.manifest import Manifest
from asdsim.trace.writer import TraceWriter
from tests.support.toygraph import toy_requests

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
        (["{sweep}", "--off-trace", "aligned"], "fixed when a sweep is made"),
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


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "toy"
    manifest = Manifest(target={"name": "toy"}, drafter={"name": "toy"}, vocab_size=12, num_draft_tokens=4)
    with TraceWriter.create(path, manifest) as writer:
        for record, steps in toy_requests(5, requests=4, ks=(4,), limit=40, extra=0):
            writer.add_request(record, steps)
    return path


def test_a_trace_is_replayed_and_gives_regret_too(trace: Path, tmp_path: Path, capsys) -> None:
    words = ("--B", "0,8", "--g", ".25,.5", "--M", "2", "--off-trace", "recorded")
    code, out, _ = run(capsys, "plot", trace, "-o", tmp_path, *words)
    assert code == 0
    stems = {Path(line).stem for line in out.split()}
    assert stems == {"acceptance-length", "acceptance-by-position", "acceptance-heatmap", "regret"}
    told = json.loads((tmp_path / "regret.json").read_text())
    assert told["source"]["manifest_checksum"] == json.loads((trace / "manifest.json").read_text())["checksum"]
    assert told["data"]["gate"] == 0.25
    result = asdsim.replay(trace, B=8, g=0.25, M=2, off_trace="recorded")
    sizes = [group["n"] for group in told["data"]["groups"].values()]
    assert sizes == [
        len(result.graph.mm_pos),
        int((result.graph.mm_ptr[1:] > result.graph.mm_ptr[:-1]).sum()),
        result.frame()["relaxed_tokens"][0],  # the figure's own walk accepts what the kernel accepts
    ]


@pytest.mark.parametrize("off_trace", ["aligned", "recorded"])
@pytest.mark.parametrize("cap", [1.0, 3.0, float("inf")])
def test_accepted_mismatches_are_those_of_the_replay(trace: Path, off_trace: str, cap: float) -> None:
    from asdsim.plots.regret import accepted_mismatches

    result = asdsim.replay(trace, B=[0.0, 1.0, 6.0], g=[0.2, 0.6], M=cap, off_trace=off_trace)
    counts = [len(accepted_mismatches(result.graph, result.grid.policy(n), off_trace)) for n in range(len(result))]
    assert counts == result.frame()["relaxed_tokens"].to_list()


def test_a_folder_that_is_no_trace(tmp_path: Path, capsys) -> None:
    code, out, err = run(capsys, "plot", tmp_path, "-o", tmp_path / "figures")
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("B", pa.array(["0"] * 6), "numbers should be"),
        ("g", pa.array([0.5, None] * 3), "numbers should be"),
        ("exact_share", pa.array([True] * 6), "numbers should be"),
        ("mean_acceptance_length", pa.array([[1.0]] * 6), "numbers should be"),
        ("rule", pa.array([1] * 6), "text should be"),
        ("acceptance_histogram", pa.array(["1,2"] * 6), "lists of whole numbers should be"),
        ("acceptance_histogram", pa.array([["a"]] * 6), "lists of whole numbers should be"),
    ],
)
def test_a_column_of_another_type_is_named(sweep: Path, tmp_path: Path, capsys, name: str, values, says: str) -> None:
    table = pq.read_table(sweep)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), sweep)
    for words in ((), ("--B", "2")):
        code, out, err = run(capsys, "plot", sweep, "-o", tmp_path / "figures", *words)
        assert (
            (code, out) == (2, "") and err.startswith(f"asdsim: error: {sweep}: column {name} holds ") and says in err
        )
