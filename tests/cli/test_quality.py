"""calibrate, audit and timing on the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import asdsim
from asdsim.cli import main
from asdsim.cli.quality_options import scorer_of
from asdsim.errors import UsageError
from asdsim.evaluate.quality import Evaluator
from asdsim.live.timing import time_policy
from asdsim.result import load
from asdsim.rules.settings import Grid, rule_grids
from tests.support.toymodels import ToyDrafter, ToyTarget
from tests.support.toytrace import ToyModel, write_toy_trace
from tests.support.tracefiles import edit_manifest

TRACES = Path(__file__).resolve().parents[2] / "traces"
CAL, HELD = TRACES / "smollm2-layerskip", TRACES / "smollm2-layerskip-holdout"
AXES = ["--B", "0,4,8", "--g", ".1,.25,.5", "--M", "1,2"]


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def words(monkeypatch):
    """Decode to the number of tokens, without a tokenizer."""
    monkeypatch.setattr(
        "asdsim.engines.transformers.text.load_decoder", lambda *_, **__: lambda ids: f"\\boxed{{{len(ids)}}}"
    )


def test_calibrate_freezes_and_judges(capsys, tmp_path) -> None:
    file, table = tmp_path / "policy.json", tmp_path / "table.parquet"
    status, out, err = run(capsys, "calibrate", CAL, "--holdout", HELD, "-o", file, *AXES, "--table", table,
                           "--max-regret-per-token", 0.05)  # fmt: skip
    assert status == 0 and "| optimism |" in out and "24 requests are few" in err
    assert "| speed-up over strict, predicted |" in out
    assert "no limit" not in err and "no holdout" not in err
    record = json.loads(file.read_text())
    assert record["calibration"]["figures"]["regret_per_token"][0] <= 0.05 and record["candidates"] == 18
    assert len(pl.read_parquet(table)) == 18
    again = tmp_path / "again.json"
    status, out, _ = run(capsys, "calibrate", CAL, "--holdout", HELD, "-o", again, *AXES, "--json",
                         "--max-regret-per-token", 0.05)  # fmt: skip
    answer = json.loads(out)
    assert again.read_bytes() == file.read_bytes()
    assert answer["holdout"]["speed_up"]["low"] < answer["holdout"]["speed_up"]["value"]
    assert answer["optimism"]["mean_acceptance_length"] == record["optimism"]["mean_acceptance_length"]


def test_calibrate_says_what_its_figures_are_not(capsys, tmp_path) -> None:
    _, out, err = run(capsys, "calibrate", CAL, "-o", tmp_path / "p.json", *AXES, "--cost", "none")
    assert "no holdout" in err and "no limit was given" in err and "speed-up" not in out
    _, _, err = run(capsys, "calibrate", CAL, "-o", tmp_path / "p.json", *AXES, "--split", 3, "--resamples", 200)
    assert err.count("chosen without 8 requests") == 3
    quantile = ["calibrate", CAL, "-o", tmp_path / "p.json", "--method", "quantile", "--estimate", "aligned", "--M", 2]
    status, out, err = run(capsys, *quantile)
    assert status == 2 and "it holds a policy judged on parts held out in turn; the new one would not be judged" in err
    _, out, err = run(capsys, *quantile, "--force")
    assert "q25 of" in out and "M=2" in out and "estimates (aligned)" in err


def test_calibrate_replaces_only_a_file_that_was_named(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["calibrate", CAL, *AXES, "--resamples", 50]
    assert run(capsys, *words)[0] == 0
    frozen = Path("policy.json").read_bytes()
    status, out, err = run(capsys, *words, "--seed", 7)
    assert status == 2 and not out and Path("policy.json").read_bytes() == frozen
    assert "policy.json: the file exists, and is replaced only if -o names it (give -o policy.json" in err
    assert run(capsys, *words, "--seed", 7, "-o", "policy.json")[0] == 0
    assert Path("policy.json").read_bytes() != frozen


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["calibrate", CAL, "--holdout", CAL], "in the calibration set"),
        (["calibrate", CAL, "--holdout", HELD, "--split", "2"], "exclude each other"),
        (["calibrate", CAL, "--method", "qantile"], "did you mean 'quantile'"),
        (["calibrate", CAL, "--B", "1"], "give --B, --g and --M together"),
        (["calibrate", CAL, "--max-divergence", "-1"], "negative"),
        (["calibrate", CAL, "--cost", "no-such.csv"], "unknown cost"),
        (["calibrate", CAL, "--resamples", "1"], "is too small for an interval"),
        (["calibrate", CAL, "--seed", "-1"], "--seed -1 is negative"),
        (["compare", CAL, "--seed", "-1"], "--seed -1 is negative"),
        (["fidelity", CAL, "--seed", "-1"], "--seed -1 is negative"),
        (["calibrate", CAL, "-o", "no/such/dir/p.json"], "no such directory"),
        (["audit", CAL], "give --policy FILE or --sweep"),
        (["audit", CAL, "--policy", "no-such.json"], "cannot read it"),
        (["audit", CAL, "--sweep", "--scorer", "gsm8k"], "not TASK=SCORER"),
        (["timing", CAL], "Missing option '--policy'"),
        (["calibrate", CAL, "--rule", "mars"], "not covered for rule mars"),
        (["calibrate", CAL, "--rule", "marz"], "did you mean 'mars'"),
        (["calibrate", CAL, "--rule", "mars", "-p", "theta=2"], "outside its range"),
        (["calibrate", CAL, "--rule", "mars", "--method", "quantile"], "gives B and g of asd"),
        (["calibrate", CAL, "--rule", "topm", "-p", "m=2,3"], "is exact"),
        (["calibrate", CAL, "--quantile", "1"], "not between 0 and 1"),
        (["audit", CAL, "--sweep", "--scorer", "gsm8k=contain"], "did you mean 'contains'"),
        (["audit", CAL, "--sweep", "--scorer", "gsm8k=regex:("], "not a regular expression"),
        (["audit", CAL, "--sweep", "--scorer", "gsm8k=no_such_module:score"], "ModuleNotFoundError"),
        (["audit", CAL, "--sweep", "--timeout", "0"], "needs some time"),
        (["timing", CAL, "--policy", "no-such.json"], "cannot read it"),
    ],
)
def test_what_cannot_be_meant_ends_in_one_line(capsys, args, message: str, tmp_path, words) -> None:
    if args[0] == "calibrate" and "-o" not in args:
        args = [*args, "-o", tmp_path / "p.json"]
    status, out, err = run(capsys, *args)
    assert status == 2 and message in err and err.startswith("asdsim: error:") and err.count("\n") == 1 and not out


def test_audit_of_a_policy_and_of_a_grid(capsys, tmp_path, words) -> None:
    file = tmp_path / "policy.json"
    run(capsys, "calibrate", CAL, "-o", file, *AXES, "--resamples", 200)
    status, out, err = run(capsys, "audit", HELD, "--policy", file, "--resamples", 200)
    assert status == 0 and "McNemar, exact" in out and "8 of 24 requests are scored" in out
    assert "humaneval is not scored" in err and "mt-bench is not scored" in err
    status, out, _ = run(capsys, "audit", HELD, "--sweep", "--json", "--resamples", 200, "-o", tmp_path / "t.parquet")
    answer = json.loads(out)
    assert status == 0 and len(answer["rows"]) == len(pl.read_parquet(tmp_path / "t.parquet")) == 18
    assert answer["rows"][0]["accuracy"]["high"] <= 1 and set(answer["by_task"]) == {"gsm8k", "humaneval", "mt-bench"}
    status, out, _ = run(capsys, "audit", HELD, "--sweep", "--resamples", 200)
    assert status == 0 and "front of 18 exact settings" in out


def test_a_limit_on_accuracy_is_refused_where_strict_has_nothing_right(capsys, tmp_path, words) -> None:
    file = tmp_path / "policy.json"
    asked = ["calibrate", CAL, "-o", file, *AXES, "--resamples", 50, "--max-accuracy-drop", 0.01]
    status, out, err = run(capsys, *asked)
    assert status == 2 and not out and not file.exists() and err.count("\n") == 1
    assert "8 of 24 requests are scored by gsm8k, strict matching gets 0 right: there is nothing to lose" in err


def test_audit_and_calibrate_say_what_the_scores_stand_on(capsys, tmp_path, words, monkeypatch) -> None:
    file = tmp_path / "policy.json"
    run(capsys, "calibrate", CAL, "-o", file, *AXES, "--resamples", 50)
    _, out, _ = run(capsys, "audit", HELD, "--policy", file, "--resamples", 50)
    assert "strict gets none right |" in out and "a drop in accuracy cannot show; " in out
    ended, cut = map(int, re.search(r"(\d+) of 24 outputs end naturally, (\d+) at the token limit", out).groups())
    assert ended + cut == 24 and cut > 0
    _, out, _ = run(capsys, "audit", HELD, "--sweep", "--resamples", 50)
    assert "strict matching: " in out and "at the token limit" in out and "a drop in accuracy cannot show" in out
    monkeypatch.setattr("asdsim.evaluate.scorers.gsm8k.score", lambda text, reference: True)
    status, _, err = run(capsys, "calibrate", CAL, "-o", file, *AXES, "--resamples", 50, "--max-accuracy-drop", 0)
    assert status == 0
    assert "calibration: 8 of 24 requests are scored by gsm8k, strict matching gets 8 right\n" in err


def test_audit_refuses_other_models(capsys, tmp_path, words) -> None:
    file = tmp_path / "policy.json"
    run(capsys, "calibrate", CAL, "-o", file, *AXES, "--resamples", 200)
    status, _, err = run(capsys, "audit", TRACES / "smollm2-lookup", "--policy", file)
    assert status == 2 and "drafter name" in err


def test_timing_of_toy_models(tmp_path) -> None:
    write_toy_trace(tmp_path / "trace", ToyModel(3, 40), count=6, empty=False)
    target = ToyTarget(3, vocab=40)
    models = target, ToyDrafter(target, 0.7)
    done = []
    found = time_policy(tmp_path / "trace", Grid.product(4, 1, 2), limit=4, tokens=12, models=models, max_drift=9.0,
                        progress=done.append)  # fmt: skip
    assert found.requests == 4 and (found.tokens == 12).all() and len(done) == 16
    assert (found.steps[1] == found.steps[3]).all()
    assert (found.steps[0] == 12).all() and (found.drafted[0] == 0).all()  # the target alone: a token a step
    rates = found.tokens.sum(axis=1) / found.seconds.sum(axis=1)
    assert found.measured.value[0] == pytest.approx(rates[2] / (0.5 * (rates[1] + rates[3])))
    assert found.measured_plain.value[0] == pytest.approx(rates[2] / rates[0])
    assert found.measured_strict_plain == pytest.approx(0.5 * (rates[1] + rates[3]) / rates[0])
    assert found.drift == pytest.approx(rates[3] / rates[1] - 1) and found.problems == []
    assert found.predicted_live > 0.5 and np.isfinite(found.predicted_rate)
    turns = time_policy(tmp_path / "trace", Grid.product(4, 1, 2), limit=4, tokens=12, models=models, interleave=True)
    assert (turns.steps == found.steps).all() and (turns.seconds > 0).all()
    strict = time_policy(tmp_path / "trace", Grid.product(0, 1, 2), limit=4, tokens=12, models=models, max_drift=0.0)
    assert strict.predicted_live == pytest.approx(1.0) and "drifted" in strict.problems[0]
    with pytest.raises(UsageError, match="leaves no request"):
        time_policy(tmp_path / "trace", Grid.product(0, 1, 2), limit=0, models=models)


def test_replay_shows_intervals_beside_means(capsys) -> None:
    status, out, err = run(capsys, "replay", CAL, *AXES)
    assert status == 0 and "tokens/step, 95 %" in out and "regret mean, 95 %" in out and "24 requests are few" in err
    status, out, _ = run(capsys, "replay", CAL, *AXES, "--json", "--intervals")
    for row in json.loads(out)["rows"]:
        value, low, high = row["intervals"]["mean_acceptance_length"]
        assert low < row["mean_acceptance_length"] == value < high
    _, out, _ = run(capsys, "replay", CAL, *AXES, "--off-trace", "pooled")
    assert "95 %" not in out  # averages over draws have no interval of this kind
    _, out, _ = run(capsys, "replay", CAL, *AXES, "--cost", "h20-deepseek-v4-flash")
    assert "predicted speed-up over strict, 95 %" in out and out.count("1.000 [1.000, 1.000]") == 6  # B = 0 is strict
    wide = ["--B", "0:8:.5", "--g", ".1:1:.1", "--M", "1,2"]
    _, out, _ = run(capsys, "replay", CAL, *wide)
    assert out.count("\n") == 26 and "tokens/step, 95 %" in out


def test_replay_with_step_times_shows_accuracy_where_answers_can_be_scored(capsys, monkeypatch) -> None:
    monkeypatch.setattr("asdsim.evaluate.scorers.gsm8k.score", lambda text, reference: len(text) % 2 == 0)
    words = ["replay", CAL, "--B", "0,8", "--g", ".5", "--M", "2"]
    status, out, err = run(capsys, *words, "--cost", "trace")
    assert status == 0 and "| accuracy (%), 95 % | accuracy over strict (points), 95 % |" in out
    assert "8 of 24 requests are scored by gsm8k, strict matching gets" in err
    _, out, _ = run(capsys, *words, "--cost", "trace", "--json")
    strict, relaxed = (row["intervals"] for row in json.loads(out)["rows"])
    assert relaxed["accuracy_change"][0] == pytest.approx(relaxed["accuracy"][0] - strict["accuracy"][0])
    evaluator = Evaluator(load(CAL), scorer=scorer_of(load(CAL)))
    row = evaluator.evaluate(Grid.product(8, 0.5, 2), figures=["accuracy"]).row(0)
    assert relaxed["accuracy"] == row["accuracy"] and 0 < row["accuracy"][0] < 1
    _, out, err = run(capsys, *words)
    assert "accuracy" not in out + err  # without step times nothing is scored
    _, out, _ = run(
        capsys, "replay", CAL, "--B", "3", "--g", ".3", "--M", "3", "--cost", "trace", "--off-trace", "aligned"
    )
    assert "accuracy" not in out  # estimates know no answers


def test_a_fold_without_a_cap_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    grid = ("--B", "8", "--g", ".5", "--M", "inf", "--split", 2, "--resamples", 50)
    assert run(capsys, "calibrate", CAL, "-o", tmp_path / "p.json", *grid)[0] == 0
    folds = json.loads((tmp_path / "p.json").read_text())["folds"]
    assert [(fold["B"], fold["g"], fold["M"]) for fold in folds] == [(8.0, 0.5, "inf")] * 2


def test_calibrate_keeps_a_policy_that_was_judged_on_more(capsys, tmp_path) -> None:
    file = tmp_path / "p.json"
    words = ["calibrate", CAL, *AXES, "--resamples", 50, "-o", file]
    assert run(capsys, *words, "--holdout", HELD)[0] == 0
    judged = file.read_bytes()
    status, out, err = run(capsys, *words)
    assert status == 2 and not out and file.read_bytes() == judged
    assert f"it holds a policy judged on {HELD}; the new one would not be judged" in err and "--force" in err
    assert run(capsys, *words, "--split", 2)[0] == 0 and file.read_bytes() != judged
    assert run(capsys, *words)[0] == 2 and run(capsys, *words, "--force")[0] == 0
    assert json.loads(file.read_text())["holdout"] is None and run(capsys, *words)[0] == 0
    other = tmp_path / "notes.json"
    other.write_text("{}")
    status, _, err = run(capsys, *words[:-1], other)
    assert status == 2 and "not a policy file" in err and other.read_text() == "{}"


def test_another_rule_is_frozen_audited_and_refused_where_it_is_not_covered(capsys, tmp_path, words) -> None:
    rules, file = TRACES / "smollm2-rules", tmp_path / "mars.json"
    status, out, err = run(capsys, "calibrate", rules, "--rule", "vllm", "-o", file, "--resamples", 50, "--split", 2)
    assert status == 0 and out.startswith("vllm ratio=") and "chosen without" in err and ": ratio=" in err
    record = json.loads(file.read_text())
    assert record["rule"] == "vllm" and {"ratio", "k"} <= set(record["parameters"]) and "B" not in record
    status, out, err = run(capsys, "audit", rules, "--policy", file, "--resamples", 50)
    assert status == 0 and out.startswith("vllm ratio=") and "tokens per step" in out
    status, out, _ = run(capsys, "audit", rules, "--policy", file, "--resamples", 50, "--json")
    (row,) = json.loads(out)["rows"]
    assert row["rule"] == "vllm" and row["parameters"] == record["parameters"] and row["exact"] is True
    status, out, _ = run(
        capsys, "calibrate", rules, "--rule", "vllm", "-o", file, "--force", "--resamples", 50, "--json"
    )
    assert json.loads(out)["parameters"] == record["parameters"] and status == 0
    status, _, err = run(capsys, "calibrate", rules, "--rule", "topm", "-p", "m=3", "-o", file, "--force")
    assert status == 2 and "none of 1 settings is exact" in err


def test_figures_that_are_not_exact_are_marked(capsys, tmp_path) -> None:
    file = tmp_path / "p.json"
    loose = ["calibrate", CAL, "--B", 3, "--g", 0.3, "--M", 3, "-o", file, "--resamples", 50, "--estimate", "aligned"]
    status, out, err = run(capsys, *loose)
    assert status == 0 and "24 requests, NOT EXACT |" in out and "~: not exact, so without an interval" in err
    cells = [line.split("|")[2].strip() for line in out.splitlines() if line.startswith("| tokens per step")]
    assert re.fullmatch(r"~\d\.\d{3}", cells[0]) and "are few" not in err
    record = json.loads(run(capsys, *loose, "--json")[1])["calibration"]
    assert record["exact"] is False and record["speed_up"]["low"] is None and record["speed_up"]["value"] > 1
    file.unlink()
    assert run(capsys, *loose, "--bound", "--max-divergence", 1)[0] == 2  # an estimate bounds nothing


def test_a_bound_chooses_more_carefully(capsys, tmp_path) -> None:
    words = ["calibrate", CAL, *AXES, "--resamples", 50, "--max-regret-per-token", 0.065, "--json"]
    for flags, value_or_end in (([], "value"), (["--bound"], "high")):
        answer = json.loads(run(capsys, *words, *flags, "-o", tmp_path / f"{value_or_end}.json")[1])
        assert answer["calibration"]["regret_per_token"][value_or_end] <= 0.065
        assert answer["limits"]["bound"] is bool(flags)
        if not flags:
            assert answer["calibration"]["regret_per_token"]["high"] > 0.065


def test_speed_ups_say_what_they_are_over(capsys, tmp_path) -> None:
    file = tmp_path / "p.json"
    _, out, err = run(capsys, "calibrate", CAL, "-o", file, *AXES, "--resamples", 50)
    first, second = out.splitlines()[3:5]
    assert first.startswith("| speed-up over the target alone, predicted |")
    assert second.startswith("| speed-up over strict, predicted |")
    assert "over the target alone, one token per forward pass" in err
    assumed = "a pass over one token is taken to last as long as a verification"
    assert f"predicted from passes timed afterwards with the models of {CAL}" in err and assumed not in err
    older = tmp_path / "older"
    shutil.copytree(CAL, older)
    edit_manifest(older, lambda content: content["notes"].pop("timing"))
    _, _, err = run(capsys, "calibrate", older, "-o", file, *AXES, "--resamples", 50)
    assert f"predicted from timings of {older}" in err and assumed in err
    _, _, err = run(capsys, "calibrate", CAL, "-o", file, *AXES, "--resamples", 50, "--cost", "none")
    assert "target alone" not in err


def test_scorers_that_a_user_names(capsys, tmp_path, words, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def even(text, reference):\n    return len(text) % 2 == 0\n")
    for scorer, called in (("contains", "contains"), ("regex:boxed", "regex:boxed"), ("mine:even", "mine:even")):
        status, out, _ = run(capsys, "audit", HELD, "--sweep", "--resamples", 50, "--scorer", f"gsm8k={scorer}")
        assert status == 0 and f"8 of 24 requests are scored by {called}" in out
    status, out, _ = run(
        capsys, "audit", HELD, "--sweep", "--resamples", 50, "--scorer", "mt-bench=regex:\\d=?", "--json"
    )
    assert status == 0 and json.loads(out)["scored_requests"] == 16  # a pattern needs no reference


@pytest.fixture
def toy(tmp_path, monkeypatch, capsys):
    """Return a toy trace and a policy file of its models, which timing then runs."""
    write_toy_trace(tmp_path / "trace", ToyModel(3, 40), count=6, empty=False)
    target = ToyTarget(3, vocab=40)
    monkeypatch.setattr("asdsim.capture.reload.load_pair", lambda *_, **__: (target, ToyDrafter(target, 0.7)))
    grid = ["--B", 4, "--g", 1, "--M", 2, "--estimate", "aligned", "--cost", "none"]
    assert run(capsys, "calibrate", tmp_path / "trace", "-o", tmp_path / "p.json", *grid, "--resamples", 50)[0] == 0
    return ["timing", tmp_path / "trace", "--policy", tmp_path / "p.json", "--limit", 4, "--tokens", 12]


def test_timing_fails_where_the_machine_was_not_still(capsys, toy) -> None:
    status, out, err = run(capsys, *toy, "--max-drift", 1e9)
    assert status == 0 and out.splitlines()[6].startswith("measured speed-up over the target alone ")
    assert "measured speed-up over strict " in out and "drifted" not in err
    status, out, err = run(capsys, *toy, "--max-drift", 0)
    assert status == 1 and "measured speed-up over strict" in out and "the strict runs drifted by" in err
    status, out, _ = run(capsys, *toy, "--max-drift", 0, "--json")
    answer = json.loads(out)
    assert status == 1 and answer["problems"] and answer["speed_up_over"] == "strict speculative decoding"
    assert answer["predicted_over_target_alone"] > 0 and answer["over_target_alone"]["value"] > 0


def test_what_timing_found_goes_with_later_predictions(capsys, toy) -> None:
    """It is stored once for a setting, and not at all where the machine was not still."""
    trace = toy[1]
    audit = ["replay", trace, "--B", 4, "--g", 1, "--M", 2, "--off-trace", "aligned", "--cost", "trace"]
    status, _, err = run(capsys, *toy, "--max-drift", 0)
    assert status == 1 and "not stored in" in err and "asdsim timing measured" not in run(capsys, *audit)[2]
    for _ in range(2):
        status, out, err = run(capsys, *toy, "--max-drift", 1e9, "--json")
        answer = json.loads(out)
        assert status == 0 and answer["stored"] is True
    held = asdsim.load(trace).manifest.notes["speeds"]
    assert [entry["setting"] for entry in held] == ["B=4 g=1 M=2 (paper)"]
    assert held[0]["measured"] == answer["speed_up"]["value"] and held[0]["requests"] == 4
    assert held[0]["cost"].endswith(f" {Path(trace).name}") and "/" not in held[0]["cost"]
    assert held[0]["predicted"] == answer["predicted_from_live_steps"]
    said = f"asdsim timing measured {held[0]['measured']:.2f} over strict for B=4 g=1 M=2 (paper) on 4 requests"
    assert said in run(capsys, *audit)[2]
    os.chmod(trace, 0o500)
    try:
        found = run(capsys, *toy, "--max-drift", 1e9, "--json")
    finally:
        os.chmod(trace, 0o700)
    assert found[0] == 0 and json.loads(found[1])["stored"] is (os.geteuid() == 0)  # root may write anywhere


def test_timing_of_work_that_was_not_fixed_fails(capsys, toy, monkeypatch) -> None:
    from asdsim.capture import loop

    calls = []

    def shorter(target, drafter, request, *rest):
        calls.append(request)
        cut = 1 if len(calls) == 3 else 0  # the first call warms up
        return decode(target, drafter, replace(request, max_new_tokens=request.max_new_tokens - cut), *rest)

    decode = loop.decode
    monkeypatch.setattr(loop, "decode", shorter)
    status, _, err = run(capsys, *toy, "--max-drift", 1e9)
    assert status == 1 and "generated different numbers of tokens" in err


def test_an_interrupted_run_is_no_result(capsys, toy, monkeypatch) -> None:
    from asdsim.capture import loop

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "decode", stop)
    status, out, err = run(capsys, *toy)
    assert status == 130 and not out and err.strip().endswith("asdsim: interrupted")


def test_a_reader_that_has_gone_ends_quietly() -> None:
    """`asdsim audit ... | head`: nothing on stderr but the notes, and no failure."""
    script = (
        "import sys, asdsim.engines.transformers.text as text\n"
        "text.load_decoder = lambda *_, **__: str\n"
        "from asdsim.cli import main\n"
        f"main(['audit', {str(HELD)!r}, '--sweep', '--resamples', '10'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:  # fmt: skip
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        err = child.stderr.read()
        assert child.wait(120) == 0 and "Traceback" not in err and "Broken" not in err


def test_the_setting_of_another_rule_is_timed(tmp_path) -> None:
    write_toy_trace(tmp_path / "trace", ToyModel(3, 40), count=6, empty=False)
    target = ToyTarget(3, vocab=40)
    found = time_policy(tmp_path / "trace", rule_grids("topm", {"m": 12})[0], limit=3, tokens=12, max_drift=9.0,
                        models=(target, ToyDrafter(target, 0.7)))  # fmt: skip
    assert found.steps[1].sum() < found.steps[0].sum() and found.predicted_replay is None
    assert found.predicted_plain / found.predicted_strict_plain == pytest.approx(found.predicted_live)


def test_audit_tells_whether_accuracy_stays_within_a_margin(capsys, tmp_path, words, monkeypatch) -> None:
    file = tmp_path / "policy.json"
    run(capsys, "calibrate", CAL, "-o", file, *AXES, "--resamples", 50)
    asked = ["audit", HELD, "--policy", file, "--resamples", 50]
    monkeypatch.setattr("asdsim.evaluate.scorers.gsm8k.score", lambda text, reference: True)
    _, out, _ = run(capsys, *asked, "--margin", 50)
    assert "accuracy falls by less than 50 points: shown at alpha 0.05 (Tango's score test" in out
    assert "gsm8k, strict-match (lm-eval): 0.0 % (strict 0.0 %), 8 verdicts" in out
    assert "seconds per finished answer, predicted" in out and "answers that end by themselves (%)" in out
    _, out, _ = run(capsys, *asked, "--margin", 1)
    assert re.search(r"points: not shown at alpha 0.05 .*; some \d+ scored requests would show it", out)
    status, out, _ = run(capsys, *asked, "--margin", 70, "--until-decided", "--json")
    answer = json.loads(out)
    row = answer["rows"][0]
    assert status == 0 and row["within_margin"]["verdict"] == "shown" and "accuracy" not in row
    assert row["within_margin"]["requests"] == answer["scored_requests"] < 8
    assert answer["margin"] == {"points": 70.0, "alpha": 0.05, "sequential": True}
    assert 0 < row["answer_speed_up"]["low"] < row["answer_speed_up"]["high"]
    assert row["seconds_per_finished_answer"]["value"] == pytest.approx(
        row["seconds_per_answer"]["value"] / row["ended_share"]["value"]
    )
    _, out, _ = run(capsys, *asked, "--margin", 1, "--until-decided")
    assert "8 of 24 requests and" in out and "were scored, in random order" in out and "McNemar" not in out
    _, out, _ = run(capsys, "audit", HELD, "--sweep", "--resamples", 50, "--margin", 50)
    assert "| within margin |" in out and "| shown" in out
    for wrong in (["--margin", 0], ["--margin", 5, "--alpha", 0.6], ["--until-decided"]):
        status, out, err = run(capsys, *asked, *wrong)
        assert status == 2 and not out and err.count("\n") == 1


def test_calibrate_ranks_by_time_per_answer_and_limits_growth_and_accuracy(capsys, tmp_path, words) -> None:
    asked = ["calibrate", CAL, *AXES, "--resamples", 50, "--json"]
    table = tmp_path / "t.parquet"
    run(capsys, *asked, "-o", tmp_path / "a.json", "--table", table, "--rank", "token")
    rows = pl.read_parquet(table)
    assert json.loads((tmp_path / "a.json").read_text())["rank"] == "token"
    _, out, _ = run(capsys, *asked, "-o", tmp_path / "b.json")
    best = json.loads(out)["calibration"]
    assert best["answer_speed_up"]["value"] == rows["answer_speed_up"].max()
    assert best["accuracy"]["value"] == 0 and best["scored_requests"] == 8  # from the text that the trace holds
    assert json.loads((tmp_path / "b.json").read_text())["rank"] == "answer"
    run(capsys, *asked, "-o", tmp_path / "n.json", "--cost", "none")
    assert json.loads((tmp_path / "n.json").read_text())["rank"] == "token"  # there is no time to rank by
    most = float(np.median(rows["length_change"]))
    _, out, _ = run(capsys, *asked, "-o", tmp_path / "c.json", "--rank", "token",
                    "--max-length-growth", max(most, 0.0))  # fmt: skip
    kept = rows.filter(pl.col("length_change") <= max(most, 0.0))
    assert json.loads(out)["calibration"]["speed_up"]["value"] == kept["speed_up"].max()
    status, out, err = run(capsys, *asked, "-o", tmp_path / "d.json", "--min-accuracy", 0.5)
    assert status == 2 and "meets accuracy >= 0.5" in err and not out
    status, _, err = run(capsys, *asked, "-o", tmp_path / "e.json", "--rank", "answer", "--cost", "none")
    assert status == 2 and "needs step times" in err
    status, _, err = run(capsys, *asked, "-o", tmp_path / "e.json", "--rank", "answers")
    assert status == 2 and "did you mean 'answer'" in err
