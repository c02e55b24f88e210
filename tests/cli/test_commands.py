"""The command line: what it prints, exit statuses, and one clear line for everything that cannot be meant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import asdsim
from asdsim.cli import COMMANDS, main
from asdsim.cli.common import counted
from asdsim.evaluate.figures import COLUMNS
from asdsim.walk.path import visits
from tests.support.toytrace import ToyModel, write_toy_trace

AXES = ["--B", "0,1,4", "--g", ".25,inf", "--M", "1,inf"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "trace"
    write_toy_trace(path, ToyModel(3, 40), count=5, cover=30)
    return path


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_replay_json_holds_every_figure(capsys, trace):
    status, out, _ = run(capsys, "replay", trace, *AXES, "--json")
    answer = json.loads(out)
    assert status == 0 and answer["schema_version"] == 1 and answer["command"] == "replay"
    assert len(answer["rows"]) == 3 * 2 * 2 and list(answer["rows"][0]) == list(COLUMNS)
    row = answer["rows"][-1]
    assert (row["B"], row["g"], row["M"]) == (4, "inf", "inf")
    assert sum(row["acceptance_histogram"]) == row["num_spec_steps"]
    assert sum(j * n for j, n in enumerate(row["acceptance_histogram"])) == row["num_accepted_draft_tokens"]


def test_replay_is_the_same_on_every_device_and_from_python(capsys, trace, tmp_path):
    frames = []
    for device in ("cpu", "reference", "python"):
        file = tmp_path / f"{device}.parquet"
        assert run(capsys, "replay", trace, *AXES, "--device", device, "-o", file)[0] == 0
        frames.append(pl.read_parquet(file))
    assert frames[0].equals(frames[1]) and frames[0].equals(frames[2])
    assert frames[0].equals(asdsim.replay(trace, B=[0, 1, 4], g=[0.25, float("inf")], M="1,inf").frame())


def test_one_is_singular(capsys, tmp_path):
    write_toy_trace(tmp_path / "trace", ToyModel(3, 40), count=1, empty=False)
    one = ["--B", "0", "--g", "1", "--M", "1"]
    _, _, err = run(capsys, "replay", tmp_path / "trace", *one, "-o", tmp_path / "t.csv")
    assert "wrote 1 row to" in err and "requests are few" not in err and "1 request gives no interval" in err
    words = ["calibrate", tmp_path / "trace", *one, "--cost", "none", "-o", tmp_path / "p.json", "--resamples", "9"]
    _, out, err = run(capsys, *words)
    assert "fastest per token of 1 setting," in out and "calibration, 1 request |" in out
    assert "1 request gives no interval" in err and "requests are few" not in err
    assert counted(0, "row") == "0 rows"


def test_a_table_is_written_as_csv_where_its_name_says_so(capsys, trace, tmp_path):
    for end in ("csv", "parquet"):
        assert run(capsys, "replay", trace, *AXES, "-o", tmp_path / f"rows.{end}")[0] == 0
    whole = pl.read_parquet(tmp_path / "rows.parquet")
    text = pl.read_csv(tmp_path / "rows.csv", schema_overrides=whole.schema | {"acceptance_histogram": pl.String})
    assert text.drop("acceptance_histogram").equals(whole.drop("acceptance_histogram"))
    histograms = [[int(steps) for steps in row.split()] for row in text["acceptance_histogram"]]
    assert histograms == whole["acceptance_histogram"].to_list()
    assert "give a .parquet table" in run(capsys, "plot", tmp_path / "rows.csv", "-o", tmp_path / "figures")[2]


def test_replay_table_says_what_is_not_exact(capsys, trace):
    status, out, err = run(capsys, "replay", trace, "--B", "4", "--g", "inf", "--M", "inf")
    assert status == 0 and "tokens/step" in out and "exact < 1: 1 of 1 setting, means over" in err
    for mode in ("aligned", "recorded", "pooled"):
        assert (
            "estimates" in run(capsys, "replay", trace, "--B", "4", "--g", "inf", "--M", "inf", "--off-trace", mode)[2]
        )


def test_what_is_missing_and_what_is_wrong_is_said_at_once(capsys, trace):
    words = ["--B", "1", "--M", "1.5", "--semantics", "papr", "--off-trace", "stopp", "--threads", "-1", "-o", "x.tsv"]
    status, out, err = run(capsys, "replay", trace, *words)
    assert status == 2 and not out and err.count("\n") == 1
    for part in ("Missing option '--g'", "M=1.5 is not a whole number", "did you mean 'paper'", "did you mean 'stop'",
                 "--threads -1 is negative", "ends in .parquet or .csv"):  # fmt: skip
        assert part in err


def test_replay_alone_shows_what_is_covered(capsys):
    status, out, err = run(capsys, "replay", "traces/smollm2-rules")
    assert (
        status == 0 and len(out.splitlines()) == 2 + 1 and out.splitlines()[2].startswith("| 8 | 0.25 | 2 | 12 of 12 |")
    )
    assert "no setting named: the 1 setting that the trace is covered for" in err
    assert "not shown: --rule strict, --rule mars" in err
    rows = json.loads(run(capsys, "replay", "traces/smollm2-rules", "--json")[1])["rows"]
    assert rows == asdsim.replay("traces/smollm2-rules").rows()


def test_replay_alone_estimates_a_default_grid_where_nothing_is_covered(capsys, trace):
    status, out, err = run(capsys, "replay", trace)
    assert status == 0 and "none covered: 72 settings estimated by --off-trace pooled; asdsim cover" in err
    answer = json.loads(run(capsys, "replay", trace, "--json")[1])
    assert answer["off_trace"] == "pooled" and answer["rows"] == asdsim.replay(trace).rows()
    answer = json.loads(run(capsys, "replay", trace, "--json", "--off-trace", "stop")[1])
    assert answer["off_trace"] == "stop" and len(answer["rows"]) == 72  # what is said is done


def test_survivors_look_like_no_result(capsys, tmp_path):
    # Four of 24 requests stay on the trace under MARS; their mean is 7.245, that of the estimate 6.2.
    words = ["replay", "traces/smollm2-layerskip", "--rule", "mars"]
    status, out, err = run(capsys, *words)
    cells = [cell.strip() for cell in out.splitlines()[2].split("|")[1:-1]]
    assert status == 0 and cells[2:4] == ["4 of 24", "~7.245"] and "95 %" not in out and "[" not in out
    assert all(cell.startswith("~") or cell == "-" for cell in cells[3:])
    assert "a biased sample; asdsim cover makes them exact, --off-trace pooled estimates them; marked ~" in err
    assert "few" not in err  # that is about intervals, and there is none
    row = json.loads(run(capsys, *words, "--json", "--intervals", "--cost", "trace")[1])["rows"][0]
    assert row["exact"] is False and row["acceptance_length_gain"] is None and set(row["intervals"].values()) == {None}
    assert {"mean_acceptance_length", "speed_up"} <= set(row["intervals"])
    for end in ("csv", "parquet"):
        run(capsys, *words, "-o", tmp_path / f"rows.{end}")
    assert pl.read_csv(tmp_path / "rows.csv")["exact"].to_list() == [False]
    stored = pl.read_parquet(tmp_path / "rows.parquet")
    assert stored["exact"].to_list() == [False] and stored["acceptance_length_gain"].to_list() == [None]


def test_the_baseline_of_a_reading_is_said(capsys):
    words = ["replay", "traces/smollm2-layerskip", "--B", "8", "--g", ".25", "--M", "2", "--cost", "trace"]
    _, out, err = run(capsys, *words, "--semantics", "lightllm")
    assert "B=0 tokens/step" in out and "over B=0, %" in out and "speed-up over B=0" in out and "strict" not in out
    assert "the baseline is B=0 of lightllm (accepts ties)" in err
    _, out, err = run(capsys, *words)
    assert "strict tokens/step" in out and "speed-up over strict" in out and "the baseline is" not in err


def test_breakpoints_are_shown_by_B_with_the_number_that_is_exact(capsys):
    words = ["replay", "traces/smollm2-layerskip", "--B", "exact:1", "--g", ".25", "--M", "2"]
    rows = json.loads(run(capsys, *words, "--json")[1])["rows"]
    status, out, err = run(capsys, *words)
    shown = [float(line.split("|")[1]) for line in out.splitlines()[2:]]
    assert status == 0 and len(rows) > 24 and shown == [row["B"] for row in rows[:24]]
    exact = sum(row["exact_share"] == 1 for row in rows)
    assert f"exact: {exact} of {len(rows)} rows" in err and f"24 of {len(rows)} settings shown, by B" in err


def test_a_config_file_lies_under_the_flags(capsys, trace, tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text('B = [0, 1]\ng = ".5"\n[replay]\nM = 2\n')
    rows = json.loads(run(capsys, "replay", trace, "--config", file, "--json")[1])["rows"]
    assert [(row["B"], row["g"], row["M"]) for row in rows] == [(0, 0.5, 2), (1, 0.5, 2)]
    rows = json.loads(run(capsys, "replay", trace, "--config", file, "--B", "3", "--json")[1])["rows"]
    assert [row["B"] for row in rows] == [3]
    file.write_text("Budget = 3\n")
    assert "unknown key 'Budget'" in run(capsys, "replay", trace, "--config", file)[2]
    file.write_text("[cover]\nbatch = 4\n[replay]\nB = 1\ng = 0.5\nM = 2\n")
    assert run(capsys, "replay", trace, "--config", file)[0] == 0  # a table of another command is no mistake


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[repaly]\nB = 1\n", "unknown table 'repaly' (did you mean 'replay'?"),
        ("[replay]\noff-trce = 'stop'\n", "unknown key 'off-trce' (did you mean 'off_trace'?"),
        ("devise = 'cpu'\n", "unknown key 'devise' (did you mean 'device'?"),
        ("[replay.B]\nfrom = 1\n", "key 'B' is a table (write B = VALUE)"),
    ],
)
def test_a_misspelt_table_or_key_of_a_config_is_named(capsys, trace, tmp_path, text, message):
    file = tmp_path / "grid.toml"
    file.write_text(text)
    status, out, err = run(capsys, "replay", trace, *AXES, "--config", file)
    assert status == 2 and not out and err.count("\n") == 1 and message in err and str(file) in err


@pytest.mark.parametrize(
    "command", ["audit", "calibrate", "compare", "cover", "fidelity", "replay", "timing", "verify"]
)
def test_no_missing_option_hides_a_wrong_path(capsys, tmp_path, command):
    where = tmp_path / "nowhere"
    for given in ([], ["--M", "1"]):
        if command in ("audit", "compare", "timing") and given:
            continue
        status, out, err = run(capsys, command, where, *given)
        assert status == 2 and not out and f"{where}: no such directory" in err
    assert "manifest.json: not a trace" in run(capsys, command, tmp_path)[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["repaly"], "did you mean 'replay'"),
        (["replay", "TRACE", "--B", "1", "--M", "1"], "Missing option '--g' (give --B, --g and --M together)"),
        (["cover", "TRACE"], "Missing options '--B', '--g', '--M'"),
        (["verify", "TRACE", "--semantics", "core"], "--semantics has no effect without settings"),
        (["verify", "TRACE", "--no-gate"], "--no-gate has no effect without settings"),
        (["replay", "TRACE", *AXES, "--rule", "asdd"], "did you mean 'asd'"),
        (["replay", "TRACE", *AXES, "--semantics", "papr"], "did you mean 'paper'"),
        (["replay", "TRACE", *AXES, "--off-trace", "stopp"], "did you mean 'stop'"),
        (["replay", "TRACE", *AXES, "--device", "gpu"], "known: auto"),
        (["replay", "TRACE", "--B", "-1", "--g", "1", "--M", "1"], "B=-1 is negative"),
        (["replay", "TRACE", "--B", "nan", "--g", "1", "--M", "1"], "B is NaN"),
        (["replay", "TRACE", "--B", "1", "--g", "1", "--M", "1.5"], "M=1.5 is not a whole number"),
        (["replay", "TRACE", "--B", "0:inf:1", "--g", "1", "--M", "1"], "never ends"),
        (["replay", "nowhere", *AXES], "nowhere"),
        (
            ["replay", "TRACE", "--B", "exact", "--g", "1", "--M", "1", "--off-trace", "pooled"],
            "take stop, aligned, rec",
        ),
        (["replay", "TRACE", *AXES, "-o", "x.tsv"], "ends in .parquet or .csv"),
        (["calibrate", "TRACE", *AXES, "--table", "x"], "ends in .parquet or .csv"),
        (["audit", "TRACE", "--sweep", "-o", "x.xlsx"], "ends in .parquet or .csv"),
        (["replay", "TRACE", *AXES, "--threads", "-1"], "negative"),
        (["verify", "TRACE", "--B", "1"], "give --B, --g and --M together"),
        (["verify", "TRACE"], "not covered for any grid"),
        (["fidelity", "TRACE"], "not covered for any grid"),
        (["cover", "TRACE", *AXES, "--batch", "0"], "--batch 0 is out of range"),
        (["cover", "nowhere", *AXES], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["capture", "-o", "TRACE", "--task", "gsm8k"], "already holds a trace"),
        (["capture", "-o", "new", "--task", "gsm9k"], "did you mean 'gsm8k'"),
        (["capture", "-o", "new", "--task", "gsm8k", "--drafter", "layerskip"], "did you mean 'layer-skip'"),
        (["capture", "-o", "new", "--task", "gsm8k", "--K", "0"], "K"),
        (["capture", "-o", "new", "--task", "gsm8k", "--temperature", "0.7"], "greedy"),
        (["capture", "-o", "new", "--task", "gsm8k", "--target", "smollm2-135"], "did you mean 'smollm2-135m'"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(capsys, trace, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    before = {file: file.read_bytes() for file in trace.iterdir()}
    status, out, err = run(capsys, *[trace if arg == "TRACE" else arg for arg in args])
    assert status == 2 and out == ""
    assert err.startswith("asdsim: error: ") and err.count("\n") == 1 and message in err
    assert {file: file.read_bytes() for file in trace.iterdir()} == before
    assert list(tmp_path.iterdir()) == []


def test_fidelity_measures_the_estimates(capsys, trace):
    status, _, err = run(capsys, "fidelity", trace, "--B", "4", "--g", "9", "--M", "9")
    assert status == 2 and "not exact" in err
    status, _, err = run(capsys, "fidelity", trace, "--B", "0", "--g", "9", "--M", "9")
    assert status == 2 and "acts as strict" in err


def test_heavy_packages_load_only_where_they_are_needed():
    script = (
        "import sys, asdsim.cli as c\n"
        "try: c.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'transformers', 'numba', 'polars', 'matplotlib', 'pyarrow', 'scipy'}))"
    )

    def loaded(*args: str) -> str:
        done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=True)
        return done.stdout.strip().splitlines()[-1]

    assert loaded("--help") == "[]"
    for name in COMMANDS:
        assert loaded(name, "--help") == "[]", name


def test_replay_never_imports_torch(trace):
    script = (
        "import sys\n"
        "import asdsim\n"
        "asdsim.replay(sys.argv[1], B=[0, 1], g=1, M=1).frame()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", script, str(trace)], check=True)


def test_closeness_is_in_the_unit_of_the_regret(capsys):
    result = asdsim.replay("traces/smollm2-layerskip", B=0.5, g=0.05, M=1, regret="probability")
    graph, source = result.graph, result.trace
    policy, tables = result.grid.policy(0), [source.column("positions", name) for name in
                                             ("top_logits", "draft_logit", "logsumexp")]  # fmt: skip
    checked = 0
    for r in range(graph.num_requests):
        visit = visits(graph, policy, r)[0][0]
        lo = int(graph.mm_ptr[visit.step])
        if lo == int(graph.mm_ptr[visit.step + 1]):
            continue
        row, i = int(source.pos_ptr[visit.step] + graph.mm_pos[lo]), int(graph.mm_pos[lo])
        top, draft, total = (float(np.ravel(table[row])[0]) for table in tables)
        gap = np.exp(top - total) - np.exp(draft - total)
        first = min(abs(gap - 0.05 * (int(graph.drafted[visit.step]) - i)), abs(gap - 0.5))
        assert 0 <= visit.closeness <= first + 1e-12 <= 1
        checked += visit.closeness == pytest.approx(first)
    assert checked > 5
    help_text = " ".join(run(capsys, "replay", "--help")[1].split())
    assert (
        "p(y) - p(x) from 0 to 1" in help_text and "figures of regret and decision margins are in its unit" in help_text
    )


def test_result_in_python(trace):
    result = asdsim.replay(trace, B="0,1,4", g="inf", M="1,inf", off_trace="aligned")
    assert len(result) == 6 and "<table" in result._repr_html_()
    shown = [repr(one) for one in (result, result.outputs(), result.quality(resamples=10), result.trace)]
    assert shown[0].startswith("Result(6 settings of asd on ") and shown[0].endswith("off_trace='aligned')")
    assert all(len(text) < 100 + len(str(trace)) and "\n" not in text for text in shown)
    front = result.pareto()
    assert front["regret_spent_mean"].is_sorted() and front["mean_acceptance_length"].is_sorted()
    with pytest.raises(asdsim.AsdsimError, match="no figure is called"):
        result.pareto(gain="speed")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["replay", "TRACE", "--B", "0:1e999999:1", "--g", "1", "--M", "1"], "values or more"),
        (["replay", "TRACE", "--B", "0:10:1e-999999", "--g", "1", "--M", "1"], "values or more"),
        (["replay", "TRACE", "--B", "0:999999:1", "--g", "0:999999:1", "--M", "1"], "settings"),
        (["cover", "TRACE", *AXES, "--kv-gb", "inf"], "--kv-gb inf is out of range"),
        (["verify", "TRACE", "--sample", "1", "--seed", "-1"], "negative"),
        (["fidelity", "TRACE", "--B", "", "--g", "1", "--M", "1"], "empty item"),
        (["replay", "TRACE", *AXES, "--off-trace", "poled"], "did you mean 'pooled'"),
        (["capture", "-o", "new", "--task", "gsm8k", "--drafter", "layer-skip:²"], "not a list of layers"),
    ],
)
def test_numbers_beyond_reason_are_one_clear_line_too(capsys, trace, args, message):
    status, _, err = run(capsys, *[trace if arg == "TRACE" else arg for arg in args])
    assert status == 2 and err.count("\n") == 1 and message in err


def test_a_config_can_hold_parameters_of_other_rules_and_is_refused_where_it_is_no_table(capsys, trace, tmp_path):
    file = tmp_path / "rule.toml"
    for text in ('rule = "additive"\nparam = ["delta=.1,.2"]\n', 'rule = "additive"\nparam = "delta=.1,.2"\n'):
        file.write_text(text)
        status, out, err = run(capsys, "replay", trace, "--config", file, "--json", "--off-trace", "aligned")
        assert status == 0, err
        assert len(json.loads(out)["rows"]) == 2
    file.write_text("replay = 3\n")
    assert "is not a table" in run(capsys, "replay", trace, "--config", file)[2]


def test_json_writes_infinities_as_text(capsys):
    status, out, _ = run(
        capsys, "fidelity", "traces/smollm2-layerskip", "--B", "4", "--g", ".25", "--M", "inf", "--json"
    )
    assert status == 0 and json.loads(out)["rows"][0]["M"] == "inf"
