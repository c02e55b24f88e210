"""Commands about rules: rules, convert-policy, compare, and rules in replay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asdsim.cli import main
from asdsim.rules import NAMES
from asdsim.trace.manifest import Manifest
from asdsim.trace.writer import TraceWriter
from tests.support.toygraph import toy_requests
from tests.support.toytrace import ToyModel, write_toy_trace


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def write(path: Path, *, shift: float = 12.0, columns: bool = True) -> Path:
    manifest = Manifest(
        target={"name": "toy"}, drafter={"name": "toy"}, vocab_size=12, num_draft_tokens=5, top_k=8, max_new_tokens=20,
        stop="natural", rule={"name": "strict"}, tasks=["toy"], seed=0, logits_dtype="float32", device="cpu",
        settings={}, software={}, notes={},
    )  # fmt: skip
    with TraceWriter.create(path, manifest) as writer:
        for record, steps in toy_requests(7, requests=8, ks=(5,), grain=0.0, extra=0, shift=shift, columns=columns):
            writer.add_request(record, steps)
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rules") / "trace")


def test_rules_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "rules", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0 and [row["name"] for row in rows] == ["asd", *NAMES]
    assert all(row["source"] and row["accepts"] for row in rows)
    assert {row["name"] for row in rows if row["sampled"]} == {"sglang", "lenience"}
    text = run(capsys, "rules")[1]
    assert "arXiv 2601.15498, theta = .9" in text and "needs: draft_logprob" in text


@pytest.mark.parametrize("name", ["asd", *NAMES])
def test_rules_describes_one_rule(capsys: pytest.CaptureFixture[str], name: str) -> None:
    (row,) = json.loads(run(capsys, "rules", name, "--json")[1])["rows"]
    status, text, _ = run(capsys, "rules", name)
    assert status == 0 and row["name"] == name and text.startswith(f"{name}: {row['title']}")
    assert row["source"] in text and row["accepts"] in text
    assert all(f"{one['name']} = " in text and one["meaning"] in text for one in row["parameters"])
    assert ("default setting, published unless" in text) == bool(row["parameters"])


def test_rules_describes_no_other_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert "otherwise: eps=0.09 alpha=0\n" in run(capsys, "rules", "medusa")[1]
    status, out, err = run(capsys, "rules", "marz")
    assert status == 2 and not out and "unknown rule 'marz' (did you mean 'mars'?" in err


def test_convert_policy_there_and_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "dspark.json"
    assert (
        run(capsys, "convert-policy", "--B", 8, "--g", 0.25, "--M", 2, "--to", "dspark", "--K", 7, "-o", file)[0] == 0
    )
    assert json.loads(file.read_text()) == {
        "B": 8.0, "g": 1.75, "m": 2, "value_scheme": "normalized_suffix", "block_size": 7,
    }  # fmt: skip
    out = json.loads(run(capsys, "convert-policy", file, "--to", "paper", "--json")[1])["rows"][0]
    assert (out["B"], out["g"], out["M"]) == ("8.0", "0.25", "2.0")
    core = tmp_path / "core.json"
    core.write_text('{"risk_budget": 8.0, "max_regret_per_value": 0.25, "max_relaxed_tokens_per_block": 2, "x": 1}')
    out = json.loads(run(capsys, "convert-policy", core, "--to", "lightllm", "--json")[1])["rows"][0]
    assert (out["B"], out["g"], out["M"]) == ("8.0", "0.25", "2.0") and "ties" in out["notes"][0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--B", 8, "--g", 0.25, "--M", 2, "--to", "dspark"], "give the block size K"),
        (["--B", 8, "--g", 0, "--M", 2, "--to", "core"], "core is strict there"),
        (["--B", 0, "--g", 1, "--M", 2, "--to", "lightllm"], "none is strict by token id"),
        (["--B", 0, "--g", 1, "--M", 2, "--from", "lightllm", "--to", "paper"], "accepts ties at B = 0"),
        (["--B", 1, "--g", 1, "--M", 2, "--to", "dsparc"], "did you mean 'dspark'"),
        (["--B", 1, "--to", "core"], "give CONFIG, or"),
    ],
)
def test_convert_policy_refuses_with_the_reason(
    capsys: pytest.CaptureFixture[str], args: list[object], message: str
) -> None:
    status, _, err = run(capsys, "convert-policy", *args)
    assert status == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"B": 1}', "neither a configuration of the core"),
        (
            '{"B": 1, "g": 1, "m": 1, "value_scheme": "suffix", "block_size": 5}',
            "value_scheme is 'suffix', not normalized_suffix",
        ),
        ('{"B": 1, "g": 1, "m": 1, "block_size": 0}', "block_size is 0, not a whole number >= 1"),
        ('{"B": "x", "g": 1, "m": 1, "block_size": 5}', "B is 'x', not a finite number"),
        ('{"B": -1, "g": 1, "m": 1, "block_size": 5}', "B=-1 is negative"),
    ],
)
def test_a_bad_configuration_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    status, _, err = run(capsys, "convert-policy", file, "--to", "paper")
    assert status == 2 and message in err and str(file) in err and err.count("\n") == 1


def test_core_without_a_gate_is_strict(capsys) -> None:
    numbers = ("--B", 8, "--g", 0, "--M", 2, "--from", "core", "--to", "paper", "--json")
    row = json.loads(run(capsys, "convert-policy", *numbers)[1])["rows"][0]
    assert (row["B"], row["notes"]) == ("0.0", [])


def test_a_policy_of_asdsim_is_converted(capsys, tmp_path: Path) -> None:
    policy = {
        "schema_version": 1, "kind": "asdsim policy", "rule": "asd", "B": 8.0, "g": 0.25, "M": "inf",
        "semantics": "paper", "regret": "logit", "value": "suffix", "ledger": "request", "target": {}, "drafter": {},
    }  # fmt: skip

    def convert(*more: object, **change: object) -> tuple[int, str, str]:
        (tmp_path / "policy.json").write_text("\ufeff" + json.dumps({**policy, **change}, indent=1))
        return run(capsys, "convert-policy", tmp_path / "policy.json", *more)

    status, out, _ = convert("--to", "dspark", "--K", 7, "--json")
    row = json.loads(out)["rows"][0]
    assert status == 0 and (row["B"], row["g"], row["M"]) == ("8.0", "1.75", "inf")
    assert "M = inf cannot be written" in convert("--to", "core", "-o", tmp_path / "c.json")[2]
    assert convert("--to", "core", "-o", tmp_path / "c.json", M=2.0)[0] == 0
    assert json.loads((tmp_path / "c.json").read_text()) == {
        "risk_budget": 8.0, "max_regret_per_value": 0.25, "max_relaxed_tokens_per_block": 2,
    }  # fmt: skip
    for change, message in (
        ({"rule": "mars"}, "a policy of rule 'mars' has no reading of ASD"),
        ({"B": "many"}, "policy.json: B is 'many', not a number"),
        ({"B": -1}, "policy.json: B"),
        ({"ledger": "block"}, "with variations has no other reading"),
        ({"regret": "probability"}, "with variations has no other reading"),
        ({"semantics": "papr"}, "policy.json: unknown semantics 'papr'"),
        ({"semantics": 3}, "policy.json: semantics is 3, not text"),
    ):
        status, out, err = convert("--to", "core", **change)
        assert status == 2 and message in err and out == "" and err.count("\n") == 1, err


def test_compare_published_and_matched(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    status, out, _ = run(capsys, "compare", trace, "--json", "--draft-cost", 0.1)
    found = json.loads(out)
    rows = {row["rule"]: row for row in found["rows"]}
    assert status == 0 and set(rows) == {"asd", *NAMES} and not found["skipped"]
    assert rows["strict"]["exact_share"] == 1.0 and rows["strict"]["acceptance_length_gain"] == 0.0
    assert rows["asd"]["parameters"] == {"B": 8.0, "g": 0.25, "M": 2.0}
    assert rows["asd"]["regret_max"] <= 8.0
    exact = [row for row in rows.values() if row["exact"]]
    assert all(row["gain_low"] <= row["acceptance_length_gain"] <= row["gain_high"] for row in exact)
    assert all(row["gain_low"] is row["gain_high"] is None for row in rows.values() if not row["exact"])
    assert 2 <= len(exact) < len(rows)
    found = json.loads(run(capsys, "compare", trace, "--json", "--draft-cost", 0.1, "--level", 1, "--rules",
                           "asd,mars,fuzzy,medusa")[1])  # fmt: skip
    assert all(row["regret_max"] <= 1.0 for row in found["rows"])
    status, text, err = run(capsys, "compare", trace, "--draft-cost", 0.1, "-o", tmp_path)
    assert text.splitlines()[1].startswith("| rule | speed-up over the target alone, predicted | tokens/step |")
    assert "| over strict, 95 % (%) |" in text and "| strict | 1." in text and "| +0.0 [+0.0, +0.0] |" in text
    assert status == 0 and "| asd B=8 g=0.25 M=2 |" in text and (tmp_path / "compare.svg").exists()
    assert "asd does not win" in text or "asd has the longest" in text
    assert "a greedy trace cannot tell" in err and "estimates, since walks left" in err
    assert "| medusa eps=0.09 alpha=sqrt(eps) |" in text and "| fly h=0.3 W=min(6,K-1) |" in text
    assert re.search(r"\| truncate K=\d \|", text) and "truncate has no published K: it is shown at the one with" in err
    assert rows["medusa"]["parameters"]["alpha"] == rows["fly"]["parameters"]["W"] == 0.0  # as -p takes them


def test_compare_says_that_requests_which_stayed_are_no_fair_sample(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    words = ("compare", trace, "--draft-cost", 0.1, "--off-trace", "stop", "--rules", "strict,asd,mars")
    status, text, err = run(capsys, *words, "-o", tmp_path)
    assert status == 0 and "estimate" not in text + err
    assert "2 of 3 rows not ranked: not exact, on requests that are no fair sample; asdsim cover" in text
    assert "longe" not in text  # neither ASD nor mars is exact, so neither is ranked nor named
    rows = {row["rule"]: row for row in json.loads((tmp_path / "compare.json").read_text())["data"]["rows"]}
    assert rows["asd"]["requests"] < 8 == rows["strict"]["requests"]
    noted = next(line for line in err.splitlines() if "no fair sample" in line)
    assert f"asd {rows['asd']['requests']}" in noted and "strict" not in noted


def test_replay_shows_an_interval_beside_exact_rows_only(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("replay", "traces/smollm2-eagle3", "--rule", "mars", "-p", "theta=.9,1")
    status, text, err = run(capsys, *words)
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    where = cells[0].index("tokens/step, 95 %")
    assert status == 0 and cells[2][where] == "~4.714" and cells[2][where - 1] == "2 of 24"
    value, low, high = map(float, re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", cells[3][where]).groups())
    assert low < value < high and cells[3][where - 1] == "24 of 24" and "24 requests are few" in err


def test_replay_shows_no_interval_of_two_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "trace", ToyModel(3, 40), count=2, empty=False)
    status, text, err = run(capsys, "replay", tmp_path / "trace", "--B", "0", "--g", "1", "--M", "1")
    assert status == 0 and "2 of 2" in text and "95 %" not in text and "2 requests give no interval" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rules", "asd,marz"], "did you mean 'mars'"),
        (["--risk", "regret", "--level", 1], "unknown risk measure"),
        (["--risk", "regret_per_token"], "says nothing without --level"),
        (["--level", -1], "is negative"),
        (["--draft-cost", -1], "is no cost"),
    ],
)
def test_compare_refuses(capsys: pytest.CaptureFixture[str], trace: Path, args: list[object], message: str) -> None:
    status, _, err = run(capsys, "compare", trace, *args)
    assert status == 2 and message in err


def test_rules_in_replay(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    rows = json.loads(run(capsys, "replay", trace, "--rule", "fuzzy", "-p", "T=.1,.4", "-p", "kind=js,kl", "--json")[1])
    assert [row["parameters"] for row in rows["rows"]] == [
        {"T": T, "kind": kind} for kind in ("js", "kl") for T in (0.1, 0.4)
    ]
    file = tmp_path / "rows.parquet"
    assert run(capsys, "replay", trace, "--rule", "vllm", "-p", "k=1,3", "-o", file)[0] == 0 and file.exists()
    status, _, err = run(capsys, "plot", file, "-o", tmp_path / "figures")
    assert status == 2 and "rule vllm, and these figures are over B, g and M" in err
    out = run(
        capsys, "replay", trace, "--B", 8, "--M", 2, "--no-gate", "--value", "reuse", "--ledger", "block", "--json"
    )
    row = json.loads(out[1])["rows"][0]
    assert row["g"] == "inf" and row["parameters"] == {"value": "reuse", "ledger": "block"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rule", "mars", "-p", "theta=2"], "theta=2 is outside its range"),
        (["--rule", "mars", "-p", "tau=.5"], "unknown parameter of rule mars 'tau'"),
        (["--rule", "mars", "-p", "theta"], "is not NAME=LIST"),
        (["--rule", "topm", "-p", "m=1.5"], "m=1.5 is outside its range"),
        (["--rule", "fuzzy", "-p", "kind=kll"], "is none of js, kl"),
        (["--rule", "mars", "--B", 1], "--B belongs to rule asd"),
        (["--B", 1, "--g", 1, "--M", 1, "-p", "theta=1"], "--param belongs to another rule"),
        (["--B", 1, "--g", 1, "--M", 1, "--value", "suffx"], "did you mean 'suffix'"),
        (["--B", 1, "--g", 1, "--M", 1, "--ledger", "blocks"], "did you mean 'block'"),
    ],
)
def test_replay_refuses(capsys: pytest.CaptureFixture[str], trace: Path, args: list[object], message: str) -> None:
    status, _, err = run(capsys, "replay", trace, *args)
    assert status == 2 and message in err and err.count("\n") == 1


def test_a_rule_that_cannot_run_names_row_and_column(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cold = write(tmp_path / "cold", shift=-40.0, columns=False)
    err = run(capsys, "replay", cold, "--rule", "mars")[2]
    assert "request toy/" in err and "step" in err and "position" in err and "z(1) <= 0" in err
    err = run(capsys, "replay", cold, "--rule", "lenience")[2]
    assert "needs the column draft_logprob" in err and "drafter that has a distribution" in err
    err = run(capsys, "replay", cold, "--rule", "fuzzy", "-p", "kind=tv")[2]
    assert "needs the column tv" in err and "--divergences tv" in err
    found = json.loads(run(capsys, "compare", cold, "--draft-cost", 1, "--json")[1])
    assert {"mars", "fuzzy", "lenience"} == set(found["skipped"])
