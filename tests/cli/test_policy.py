"""What leads from a trace to an engine: rates for simulator modes, and a frozen policy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from asdsim.cli import cli
from asdsim.cli.policy import how_to_serve
from asdsim.errors import UsageError
from asdsim.formats.engines import ENGINES, rates_of, settings_for
from asdsim.rules.settings import Grid

TRACE = Path(__file__).resolve().parents[2] / "traces" / "smollm2-layerskip-k4"

PASSES = [
    {"batch": batch, "width": width, "milliseconds": max(8 + 0.05 * batch * width, 0.3 * batch * width),
     "draft_milliseconds": 0.3 * (width - 1)}
    for batch in (1, 4, 16, 64) for width in (1, 2, 4, 8, 200)
]  # fmt: skip


def run(*words: object) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)
    return done.stdout


def test_rates_by_hand() -> None:
    # Ten steps at K=3: 4 accept nothing, 3 one token, 1 two, 2 three.
    rates = rates_of([{"acceptance_histogram": [3, 2, 1, 1]}, {"acceptance_histogram": [1, 1, 0, 1]}])
    assert rates.steps == 10
    assert rates.unconditional == [0.6, 0.3, 0.2]
    assert rates.conditional == pytest.approx([0.6, 0.5, 2 / 3])
    assert rates.accepted == pytest.approx(1.1)  # (3 + 2 + 6) / 10

    config = settings_for("vllm-synthetic", rates)["options"]["speculative_config"]
    assert config["synthetic_acceptance_rates"] == [0.6, 0.3, 0.2] and config["num_speculative_tokens"] == 3
    assert settings_for("sglang-sim", rates)["environment"]["SGLANG_SIMULATE_ACC_LEN"] == "2.1"
    assert settings_for("trtllm", rates)["environment"] == {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "1.1"}
    assert settings_for("aiconfigurator", rates)["options"] == {"nextn": 3, "nextn_accepted": 1.1}
    dynamo = settings_for("dynamo", rates)["options"]
    given = [float(rate) for rate in dynamo["aic_nextn_accept_rates"].split(",")]
    assert dynamo["aic_nextn"] == 3 and np.cumprod(given).sum() == pytest.approx(1.1)  # as the mocker multiplies them
    for engine in set(ENGINES) - {"inference-sim"}:  # which runs no model
        assert "texts that it writes mean nothing" in settings_for(engine, rates)["notes"][0]
    with pytest.raises(UsageError, match="did you mean 'trtllm'"):
        settings_for("trtlm", rates)
    with pytest.raises(UsageError, match="no step"):
        rates_of([])


def test_flags_of_inference_sim_give_the_mean_back() -> None:
    """Read as its guide says: K whole, the rate in [0, 1] and required with K > 0, 1 + rate x K tokens a step."""
    rates = rates_of([{"acceptance_histogram": [3, 2, 1, 1]}, {"acceptance_histogram": [1, 1, 0, 1]}])
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-speculative-tokens", type=int, dest="K", default=0)
    parser.add_argument("--speculative-acceptance-rate", type=float, dest="rate")
    given = parser.parse_args(settings_for("inference-sim", rates)["options"]["flags"].split())
    assert given.K == 3 and 0 <= given.rate <= 1 and 1 + given.rate * given.K == pytest.approx(2.1, abs=1e-8)
    none = rates_of([{"acceptance_histogram": [5]}])  # no draft token: BLIS takes no rate beside K = 0
    assert parser.parse_args(settings_for("inference-sim", none)["options"]["flags"].split()).rate is None


def vllm_reads(config: dict[str, Any], largest: int) -> list[int]:
    """Return K of each batch 1 .. largest as vLLM's documented schema says, after the checks that it makes."""
    rows, longest = config["num_speculative_tokens_per_batch_size"], config["num_speculative_tokens"]
    assert rows[0][0] == 1 and longest > 0
    end, lengths = 0, []
    for first, last, K in rows:
        assert end < first <= last and 0 <= K <= longest
        lengths += lengths[-1:] * (first - 1 - end) + [K] * (last - first + 1)
        end = last
    return (lengths + [lengths[-1]] * largest)[:largest]


def test_ranges_of_advice_are_those_that_vllm_reads(tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    table = tmp_path / "passes.json"
    table.write_text(json.dumps(PASSES))
    words = ["advise", TRACE, "--cost", table, "--batch", "1,8,64", "--resamples", 5, "--json"]
    file.write_text(run(*words))
    advice = json.loads(file.read_text())
    got = json.loads(run("convert", file, "--to", "vllm-ranges", "--json"))
    read = vllm_reads(got["options"]["speculative_config"], 70)
    assert [read[batch - 1] for batch in (1, 8, 64)] == [row["K"] if row["pays"] else 0 for row in advice["rows"]]
    assert read[0] == 4 and read[63] == read[69] == 0
    assert "speculative_config: {" in run("convert", file, "--to", "vllm-ranges")
    for ranges, message in (
        ([[1, 4, 0]], "not to speculate"), ([[2, 4, 3]], "begin at"), ([[1, 4, 3], [4, 8, 1]], "in two ranges"),
        ([[1, 4]], "is not a list"), (None, "is not a list"), ([[1, 4, 2.5]], "is not a list"),
    ):  # fmt: skip
        file.write_text(json.dumps({**advice, "ranges": ranges}))
        with pytest.raises(UsageError, match=message):
            run("convert", file, "--to", "vllm-ranges")
    file.write_text("[]")
    with pytest.raises(UsageError, match="not the advice"):
        run("convert", file, "--to", "vllm-ranges")
    with pytest.raises(UsageError, match="asdsim advise"):
        run("convert", TRACE, "--to", "vllm-ranges")


def test_a_position_that_is_never_reached_has_rate_zero() -> None:
    rates = rates_of([{"acceptance_histogram": [2, 0, 0]}])
    assert rates.unconditional == [0.0, 0.0] and rates.conditional == [0.0, 0.0]


def test_convert_prints_the_rates_of_a_trace() -> None:
    rows = json.loads(run("convert", TRACE, "--json"))["rows"]
    steps = sum(row["num_spec_steps"] for row in rows)
    accepted = sum(row["num_accepted_draft_tokens"] for row in rows)
    got = json.loads(run("convert", TRACE, "--to", "trtllm", "--json"))
    assert got["num_spec_steps"] == steps
    assert got["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    text = run("convert", TRACE, "--to", "sglang-sim")
    assert f"SGLANG_SIMULATE_ACC_LEN={1 + accepted / steps:.6g}" in text and "mean nothing" in text


def test_rates_of_a_setting_that_leaves_the_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="left the trace .* biased sample"):
        run("convert", TRACE, "--B", "1", "--g", ".1", "--M", "1", "--to", "trtllm")


def policy_file(tmp_path: Path, **changed: object) -> Path:
    record = {
        "schema_version": 1, "kind": "asdsim policy", "rule": "asd", "B": 8.0, "g": 0.25, "M": "inf",
        "semantics": "paper", "regret": "logit", "value": "suffix", "ledger": "request",
        "target": {"name": "toy", "vocab_size": 96, "architecture": "LlamaForCausalLM", "dtype": "float32"},
        "drafter": {"name": "eagle3:heads/toy"}, "num_draft_tokens": 7, **changed,
    }  # fmt: skip
    (tmp_path / "policy.json").write_text(json.dumps(record))
    return tmp_path / "policy.json"


def test_policy_shows_how_to_serve(tmp_path: Path) -> None:
    policy_file(tmp_path)
    text = run("policy", tmp_path)
    assert "B=8 g=0.25 M=inf (paper), frozen for toy (float32) with eagle3:heads/toy, K=7" in text
    assert '"method": "eagle3", "num_speculative_tokens": 7, "model": "heads/toy"' in text
    assert "judged only on the requests it was chosen on" in text
    side = {"figures": {}}
    assert "judged on requests it was not" in run("policy", policy_file(tmp_path, holdout=side, folds=[]))
    assert "not this very setting" in run("policy", policy_file(tmp_path, holdout=side, folds=[{"held_out": 6}]))
    answer = json.loads(run("policy", tmp_path / "policy.json", "--json"))
    assert answer["setting"] == "B=8 g=0.25 M=inf" and "vllm serve toy" in answer["serve"]["vllm serve"]


def test_policy_is_held_against_a_model(tmp_path: Path) -> None:
    path = policy_file(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 96, "architectures": ["LlamaForCausalLM"]}))
    assert "fits: vocabulary, architecture as in the model" in run("policy", path, "--model", model)
    (model / "config.json").write_text(json.dumps({"vocab_size": 128, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UsageError, match="frozen for vocabulary 96, this model has 128"):
        run("policy", path, "--model", model)


@pytest.mark.parametrize(
    ("stop", "told"),
    [("after", "assistant_confidence_threshold = 0.4"), ("before", "--draft-p-min 0.4"), ("product", "")],
)
def test_a_policy_with_a_threshold_says_who_has_to_cut(stop: str, told: str) -> None:
    record = {"num_draft_tokens": 7, "target": {"name": "m"}, "drafter": {"name": "eagle3:head"}, "K": 5,
              "draft_threshold": 0.4, "draft_stop": stop}  # fmt: skip
    policy = Grid.product(8, 0.25, 2, K=5, draft_threshold=0.4, draft_stop=stop).policy(0)
    text = how_to_serve(policy, record, Path("policy.json"))["draft threshold"]
    assert f"cut {stop} a probability of 0.4" in text and told in text
    del record["draft_threshold"]
    assert "draft threshold" not in how_to_serve(policy, record, Path("policy.json"))
