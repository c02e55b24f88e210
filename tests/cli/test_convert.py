"""Import and export: formats of other tools, their invariants, and what each broken row is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from asdsim.formats.acceptance import ImportRefused, check_acceptance, read, read_calibration, read_specdecode_bench
from tests.cli.test_rules import run, write

# One published run (DeepSeek-V4-Flash with DSpark, 500 requests), native and under ASD.
PUBLISHED = [
    ([1141, 1677, 1539, 1569, 1584, 8535], 16045, 58473, 3.644312870052976, 74594),
    ([607, 1130, 1371, 1590, 1725, 8963], 15386, 60357, 3.922851943325101, 75819),
]
RECORD: dict[str, Any] = {
    "num_spec_steps": 3, "num_accepted_draft_tokens": 7, "num_draft_tokens": 9, "completion_tokens": 10,
    "per_step_accepted": [1, 1, 5], "per_step_drafted": [1, 3, 5], "acceptance_histogram": [0, 2, 0, 0, 0, 1],
    "mean_acceptance_length": 10 / 3, "draft_acceptance_rate": 7 / 9, "num_spec_tokens": 5,
}  # fmt: skip


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("histogram", "steps", "accepted", "ratio", "tokens"), PUBLISHED)
def test_published_counters_hold(histogram, steps, accepted, ratio, tokens):
    made = check_acceptance(
        {
            "num_spec_steps": steps, "num_accepted_draft_tokens": accepted, "num_draft_tokens": 5 * steps,
            "acceptance_histogram": histogram, "completion_tokens": tokens, "requests": 500,
        }, "row",
    )  # fmt: skip
    assert made["accepted_per_proposal"] == ratio


def test_a_ragged_record_is_read_with_its_own_drafted_tokens(tmp_path: Path) -> None:
    kind, found = read(lines(tmp_path / "a.jsonl", RECORD, {"spec_decode": RECORD, "request_id": "x"}))
    rows = found.rows
    assert kind == "acceptance" and [row["request_id"] for row in rows] == [0, "x"]
    assert rows[0]["draft_acceptance_rate"] == 7 / 9 and rows[0]["mean_acceptance_length"] == 10 / 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acceptance_histogram": [1, 2, 0, 0, 0, 1]}, "sums to 4, not to 3 steps"),
        ({"acceptance_histogram": [1, 1, 0, 0, 0, 1]}, "holds 6 accepted tokens, not 7"),
        ({"acceptance_histogram": {"0": 0, "x": 1}}, "no number of tokens"),
        ({"acceptance_histogram": {"-1": 3}}, "no number of tokens"),
        ({"acceptance_histogram": [0, 1, 0, 2]}, "does not count per_step_accepted"),
        ({"num_draft_tokens": 6}, "7 draft tokens accepted, but only 6 drafted"),
        ({"num_draft_tokens": 15}, "per_step_drafted has 3 steps and sums to 9"),
        ({"per_step_accepted": [1, 1]}, "per_step_accepted has 2 steps"),
        ({"per_step_accepted": [3, 1, 3]}, "step 0 accepted 3 of 1"),
        ({"per_step_accepted": [1, 1, 5.5]}, "per_step_accepted[2] is 5.5, not a whole number >= 0"),
        ({"per_step_accepted": "115"}, "per_step_accepted is '115', not a list"),
        ({"mean_acceptance_length": 7 / 3}, "the bonus token included"),
        ({"draft_acceptance_rate": 0.5}, "draft_acceptance_rate 0.5 is not"),
        ({"num_spec_steps": -1}, "not a whole number >= 0"),
        ({"num_spec_steps": None}, "no num_spec_steps"),
        ({"num_spec_steps": True}, "num_spec_steps is True, not a whole number"),
        ({"completion_tokens": 12}, "completion_tokens 12 is more than 7 accepted + 3 steps + 1 from prefill"),
        ({"num_spec_tokens": 4}, "num_spec_tokens is 4, but a step accepted 5"),
        ({"num_spec_tokens": 4, "per_step_accepted": None, "per_step_drafted": None}, "but a step accepted 5"),
        (
            {"num_spec_tokens": 2, "per_step_accepted": None, "per_step_drafted": None, "acceptance_histogram": None},
            "num_spec_tokens is 2, but a step accepted 3",
        ),
        (
            {"num_spec_tokens": 5, "num_draft_tokens": 10, "per_step_drafted": [1, 3, 6], "draft_acceptance_rate": 0.7},
            "num_spec_tokens is 5, but a step drafted 6",
        ),
        ({"acceptance_histogram": {"1000000000": 3}}, "no number of tokens"),
        ({"acceptance_histogram": {"99999": 3}}, "a step of 99999 accepted tokens"),
        ({"acceptance_histogram": {"01": 3}}, "no number of tokens"),
        ({"acceptance_histogram": {"\u0663": 3}}, "no number of tokens"),
        ({"acceptance_histogram": [0] * 40_000}, "acceptance_histogram has 40000 entries"),
        ({"per_step_accepted": [1, 1, 10**9]}, "per_step_accepted[2] is 1000000000, not a whole number >= 0 and <="),
        ({"num_spec_steps": 0}, "9 draft tokens in no step"),
        ({"draft_acceptance_rate": 0.7771}, "draft_acceptance_rate 0.7771 is not 0.777778"),
        ({"mean_acceptance_length": 11 / 3}, "mean_acceptance_length 3.66667 is not 3.33333"),
        ({"engine": "asdsim", "completion_tokens": 11}, "completion_tokens 11 is more than 7 accepted + 3 steps"),
    ],
)
def test_a_broken_record_names_its_row(capsys, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = lines(tmp_path / "a.jsonl", RECORD, {**RECORD, **change})
    status, _, err = run(capsys, "convert", file)
    assert status == 2 and message in err and f"{file}, line 2" in err and err.count("\n") == 1


def test_a_trace_comes_out_as_records_and_goes_in_again(capsys, tmp_path: Path) -> None:
    trace, file = write(tmp_path / "trace"), tmp_path / "out.jsonl"
    status, out, _ = run(capsys, "convert", trace, "-o", file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert status == 0 and len(rows) == 8
    for row in rows:
        assert sum(row["acceptance_histogram"]) == row["num_spec_steps"] == len(row["per_step_accepted"])
        assert sum(j * n for j, n in enumerate(row["acceptance_histogram"])) == row["num_accepted_draft_tokens"]
        assert row["mean_acceptance_length"] == row["completion_tokens"] / row["num_spec_steps"]
    assert run(capsys, "convert", file)[1] == out
    replayed = json.loads(run(capsys, "replay", trace, "--B", 0, "--g", 0, "--M", 0, "--json")[1])["rows"][0]
    assert replayed["completion_tokens"] == sum(row["completion_tokens"] for row in rows)
    status, _, err = run(capsys, "convert", trace, "--rule", "topm", "-p", "m=8")
    assert (status == 0) == ("all 8 requests leave the trace" not in err)


def calibration(*ratios: float) -> list[dict[str, Any]]:
    return [{"regret": r * 2.0, "value": 2.0, "regret_per_value": r, "rid": str(n)} for n, r in enumerate(ratios)]


@pytest.mark.parametrize(("ratios", "first"), [([1, 2, 3, 4], 1.75), (list(range(1, 33)), 8.75)])
def test_calibration_quartiles_are_linear(tmp_path: Path, ratios: list[float], first: float) -> None:
    assert read_calibration(lines(tmp_path / "c.jsonl", *calibration(*ratios))).quartiles()[0] == first


def test_every_quartile_is_linear(tmp_path: Path) -> None:
    assert read_calibration(lines(tmp_path / "c.jsonl", *calibration(4, 1, 3, 2))).quartiles() == [1.75, 2.5, 3.25]


def test_requests_that_leave_the_trace_are_left_out_and_counted(capsys, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace")
    setting = ("--B", 1, "--g", "inf", "--M", "inf")
    status, out, err = run(capsys, "convert", trace, *setting, "--json")
    payload = json.loads(out)
    row = json.loads(run(capsys, "replay", trace, *setting, "--off-trace", "stop", "--json")[1])["rows"][0]
    assert status == 0 and payload["left_out"] == 2 and len(payload["rows"]) == 6 and row["exact_share"] == 6 / 8
    assert "left out: 2 requests that left the trace under B=1" in err
    for name in ("completion_tokens", "num_spec_steps", "num_accepted_draft_tokens"):
        assert sum(record[name] for record in payload["rows"]) == row[name]
    assert all(record["engine"] == "asdsim" for record in payload["rows"])


def test_a_trace_is_converted_under_one_setting_into_a_file_of_rows(capsys, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace")
    status, out, err = run(capsys, "convert", trace, "--B", "0,1", "--g", "1,inf", "--M", 1)
    assert (status, out) == (2, "") and "4 settings given" in err
    status, out, err = run(capsys, "convert", trace, "-o", tmp_path / "rows.txt")
    assert (status, out) == (2, "") and "cannot tell the format of" in err and not (tmp_path / "rows.txt").exists()
    status, _, err = run(capsys, "convert", lines(tmp_path / "a.jsonl", RECORD), "--B", 0, "--g", 0, "--M", 0)
    assert status == 2 and "a setting belongs to a trace" in err


def test_calibration_is_marked_not_replayable(capsys, tmp_path: Path) -> None:
    source, out = lines(tmp_path / "c.jsonl", *calibration(1, 2)), tmp_path / "c.parquet"
    status, text, err = run(capsys, "convert", source, "-o", out, "--json")
    assert status == 0 and json.loads(text)["replayable"] is False and "not replayable" in err
    table = pq.read_table(out)
    assert table["regret_per_value"].to_pylist() == [1, 2]
    assert b"not replayable" in table.schema.metadata[b"asdsim"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"regret": 0.0}, "regret 0 is not positive"),
        ({"value": 0}, "value 0 is not positive"),
        ({"regret_per_value": 1.00001}, "is not 2 / 2"),
        ({"regret": "2"}, "regret is '2', not a finite number"),
    ],
)
def test_a_broken_calibration_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good, bad = calibration(1)[0], {**calibration(1)[0], **change}
    with pytest.raises(ImportRefused, match=message) as error:
        read_calibration(lines(tmp_path / "c.jsonl", good, bad))
    assert "line 2" in str(error.value)
    read_calibration(lines(tmp_path / "c.jsonl", {**good, "regret_per_value": 1.0000005}))  # within tolerance


BENCH = {"id": 7, "prompt_token_ids": [1], "generated_token_ids": [0] * 6,
         "acc_eagle": {"acc_len": [3, 1, 1, 4, 1, 1]}, "acc_ngram": {"acc_len": [1, 2, 1]}}  # fmt: skip


def test_specdecode_bench_replays_strict_and_draft_length(capsys, tmp_path: Path) -> None:
    eagle, ngram = read_specdecode_bench(lines(tmp_path / "b.jsonl", BENCH))
    assert (eagle.drafter, eagle.longest, ngram.longest) == ("eagle", 3, 1)
    whole = eagle.replay(3)  # 3 tokens, then 4 of which the output takes 3
    assert (whole["num_spec_steps"], whole["completion_tokens"], whole["mean_acceptance_length"]) == (2, 6, 3.0)
    short = eagle.replay(1)  # 0 -> 2 -> 3 -> 5 -> 6
    assert (short["num_spec_steps"], short["completion_tokens"], short["acceptance_histogram"]) == (4, 6, [2, 2])
    assert ngram.replay(1)["completion_tokens"] == 3  # a row that ends before the output
    status, out, err = run(capsys, "convert", tmp_path / "b.jsonl")
    assert status == 0 and "| eagle | 3 | 3.000 |" in out and "draft length only" in err
    assert "ngram: of 1 rows 1 have fewer acceptance lengths than tokens" in err and "eagle: of" not in err
    longer = {**BENCH, "acc_eagle": {"acc_len": [3, 1, 1, 4, 1, 1, 2]}}  # goes on behind the output: the same answer
    assert read_specdecode_bench(lines(tmp_path / "c.jsonl", longer))[0].replay(3) == whole
    assert "eagle: of 1 rows 0 have fewer acceptance lengths than tokens, and end there; 1 have more" in " ".join(
        run(capsys, "convert", tmp_path / "c.jsonl")[2].split()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acc_eagle": {"acc_len": [0]}}, "acc_len 0 at token 0 is not >= 1"),
        ({"acc_eagle": {}}, "no list acc_len"),
        ({"generated_token_ids": 3}, "not a list"),
        ({"acc_other": {"acc_len": []}}, "the rows before have acc_eagle, acc_ngram"),
    ],
)
def test_a_broken_bench_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportRefused, match=message) as error:
        read_specdecode_bench(lines(tmp_path / "b.jsonl", BENCH, {**BENCH, **change}))
    assert "line 2" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "there is no row"), ("{", "line 1: not valid JSON"), ("3\n", "not a JSON object"), ('{"a": 1}', "no format")],
)
def test_files_that_are_something_else(capsys, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    status, _, err = run(capsys, "convert", file)
    assert status == 2 and message in err and err.count("\n") == 1
    assert "cannot read it" in run(capsys, "convert", tmp_path / "none.jsonl")[2]


def test_random_lengths_agree_with_a_slow_replay(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(30):
        total = int(rng.integers(1, 40))
        row = {"id": number, "generated_token_ids": [0] * total,
               "acc_x": {"acc_len": rng.integers(1, 6, total).tolist()}}  # fmt: skip
        [part] = read_specdecode_bench(lines(tmp_path / "r.jsonl", row))
        for K in range(1, 6):
            steps, at = 0, 0
            while at < total:
                at += min(row["acc_x"]["acc_len"][at], K + 1)
                steps += 1
            assert part.replay(K)["num_spec_steps"] == steps and part.replay(K)["completion_tokens"] == total


# --- what serving engines write -----------------------------------------------------------------------------------

# Every draft of K=3 accepted in one step; the first of 5 tokens came from prefill.
ENGINE: dict[str, Any] = {
    "mean_acceptance_length": 4.0, "draft_acceptance_rate": 1.0, "acceptance_histogram": [0, 0, 0, 1],
    "num_accepted_draft_tokens": 3, "num_draft_tokens": 3, "num_spec_steps": 1, "num_spec_tokens": 3,
    "completion_tokens": 5,
}  # fmt: skip
# The example of vLLM's pull request 48915: 39 steps accepted nothing, 1 step one draft, 3 steps all three.
VLLM = {
    "mean_acceptance_length": 1.2325581395348837, "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43, "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129, "num_spec_tokens": 3,
}  # fmt: skip
# 20 steps: 8 accepted nothing, 6 two drafts, 6 three.
TRTLLM = {
    "acceptance_rate": 0.5, "total_accepted_draft_tokens": 30, "total_draft_tokens": 60, "num_spec_steps": 20,
    "acceptance_histogram": [8, 0, 6, 6], "num_spec_tokens": 3,
}  # fmt: skip
SGLANG = {
    "id": "s1", "finish_reason": {"type": "length", "length": 9}, "completion_tokens": 9, "spec_verify_ct": 4,
    "spec_accept_token_num": 4, "spec_draft_token_num": 12, "spec_accept_rate": 0.3333, "spec_accept_length": 2.25,
    "spec_accept_histogram": [2, 1, 0, 1],
}  # fmt: skip


def test_the_first_token_of_an_engine_comes_from_prefill(capsys, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", ENGINE)
    status, out, _ = run(capsys, "convert", file, "-o", tmp_path / "b.jsonl", "--json")
    payload = json.loads(out)
    assert status == 0 and payload["summary"]["mean_acceptance_length"] == 4.0
    assert payload["rows"][0]["mean_acceptance_length"] == 4.0 and payload["rows"][0]["completion_tokens"] == 5
    assert "4.000 tokens/step, 3.000 accepted/step" in run(capsys, "convert", file)[1]
    assert "4.000 tokens/step, 3.000 accepted/step" in run(capsys, "convert", tmp_path / "b.jsonl")[1]
    # Without the mean it is the same: it follows from the steps. Cut at the end, the steps still drafted as they did.
    for change in ({"mean_acceptance_length": None}, {"completion_tokens": None}, {"completion_tokens": 3}):
        assert check_acceptance({**ENGINE, **change}, "row")["mean_acceptance_length"] == 4.0


def test_a_record_of_asdsim_counts_every_token_of_its_steps() -> None:
    own = {"num_spec_steps": 2, "num_accepted_draft_tokens": 5, "num_draft_tokens": 6, "completion_tokens": 6}
    assert check_acceptance({**own, "engine": "asdsim"}, "row")["mean_acceptance_length"] == 3.0
    unnamed = check_acceptance({**own, "mean_acceptance_length": 3.0}, "row")  # written before it named itself
    assert unnamed["mean_acceptance_length"] == 3.0 and unnamed["engine"] == "asdsim"
    assert check_acceptance(own, "row")["mean_acceptance_length"] == 3.5


def test_printed_digits_are_taken_for_what_they_round(tmp_path: Path) -> None:
    base = {"num_spec_steps": 4, "num_accepted_draft_tokens": 5, "num_draft_tokens": 12}
    for rate in (5 / 12, 0.4167, 0.417, 0.42):
        assert check_acceptance({**base, "draft_acceptance_rate": rate}, "row")["draft_acceptance_rate"] == 5 / 12
    for rate in (0.4166, 0.416, 0.41, 0.4, 0.41671):
        with pytest.raises(ImportRefused, match="draft_acceptance_rate"):
            check_acceptance({**base, "draft_acceptance_rate": rate}, "row")
    assert check_acceptance({**base, "mean_acceptance_length": 2.25}, "row")["mean_acceptance_length"] == 2.25
    with pytest.raises(ImportRefused, match="mean_acceptance_length 2.24 is not 2.25"):
        check_acceptance({**base, "mean_acceptance_length": 2.24}, "row")


@pytest.mark.parametrize(
    ("row", "name", "length", "tokens"),
    [
        ({"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 54}, "metrics": {"speculative_decoding": VLLM}},
         "cmpl-1", 53 / 43, 54),
        ({"data": {"id": "x", "usage": {"completion_tokens": 35}, "metrics": {"speculative_decoding": VLLM}}},
         "x", 53 / 43, 35),
        ({"id": "batch_req_1", "custom_id": "mine", "error": None, "response": {"status_code": 200, "body": {
            "id": "cmpl", "usage": {"completion_tokens": 54}, "metrics": {"speculative_decoding": VLLM}}}},
         "mine", 53 / 43, 54),
        ({"id": "c", "usage": {"completion_tokens": 54}, "choices": [
            {"index": 0, "speculative_decoding_stats": {**VLLM, "acceptance_histogram": {"0": 39, "1": 1, "3": 3}}}]},
         "c", 53 / 43, 54),
        ({"metadata": {"x_request_id": "u1", "session_num": 0}, "metrics": {"ttft": {"value": 3.0, "unit": "ms"}},
          "error": None, "spec_decode_acceptance": {"engine": "vllm", "completion_tokens": 54, **VLLM}},
         "u1", 53 / 43, 54),
        ({"id": "t", "usage": {"completion_tokens": 51}, "choices": [
            {"index": 0, "finish_reason": "stop", "avg_decoded_tokens_per_iter": 2.5, "speculative_decoding": TRTLLM}]},
         "t", 2.5, 51),
        ({"text": "..", "meta_info": SGLANG}, "s1", 2.0, 9),
        ({"text": "..", "meta_info": {**SGLANG, "spec_accept_length": 2.0}}, "s1", 2.0, 9),
        ({"id": "o", "usage": {"completion_tokens": 9}, "choices": [{"index": 0, "meta_info": {
            "spec_verify_ct": 4, "spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 12,
            "spec_correct_drafts_histogram": [2, 1, 0, 1]}}]}, "o", 2.0, 9),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["lines", "pretty", "array"])
def test_responses_of_engines_are_read(tmp_path: Path, row, name, length, tokens, form) -> None:
    file = tmp_path / "r.json"
    file.write_text({"lines": json.dumps(row), "pretty": json.dumps(row, indent=1), "array": json.dumps([row])}[form])
    kind, found = read(file)
    [record] = found.rows
    assert kind == "acceptance" and record["request_id"] == name
    assert record["mean_acceptance_length"] == length and record["completion_tokens"] == tokens
    assert sum(record["acceptance_histogram"]) == record["num_spec_steps"]
    assert read(file, "acceptance")[1] == found


def test_each_choice_is_a_request_of_its_own(tmp_path: Path) -> None:
    choices = [{"index": n, "speculative_decoding": TRTLLM} for n in range(2)]
    file = lines(tmp_path / "r.jsonl", {"id": "t", "usage": {"completion_tokens": 100}, "choices": choices})
    rows = read(file)[1].rows
    assert [row["request_id"] for row in rows] == ["t/0", "t/1"]
    assert [row["completion_tokens"] for row in rows] == [None, None]  # the usage is that of both


def test_counters_of_a_run_of_vllm_bench_serve(capsys, tmp_path: Path) -> None:
    run_of_36 = {
        "completed": 9, "failed": 1, "total_output_tokens": 45, "request_rate": "inf", "spec_decode_num_drafts": 12,
        "spec_decode_draft_tokens": 36, "spec_decode_accepted_tokens": 24, "spec_decode_acceptance_length": 3.0,
        "spec_decode_acceptance_rate": 66.67, "spec_decode_per_position_acceptance_rates": [1.0, 8 / 12, 4 / 12],
        "ttfts": [0.1, float("nan")],
    }  # fmt: skip
    file = lines(tmp_path / "run.json", run_of_36)
    [row] = read(file)[1].rows
    assert row["acceptance_histogram"] == [0, 4, 4, 4] and row["mean_acceptance_length"] == 3.0
    assert row["draft_acceptance_rate"] == 24 / 36 and row["requests"] == 9 and row["num_spec_tokens"] == 3
    status, out, err = run(capsys, "convert", file)
    assert status == 0 and "9 requests, 12 steps: 3.000 tokens/step" in out and "left out: 1 request that failed" in err
    with pytest.raises(ImportRefused, match="spec_decode_acceptance_rate 50 is not 66.6667 %"):
        read(lines(file, {**run_of_36, "spec_decode_acceptance_rate": 50.0}))
    rounded = {**run_of_36, "spec_decode_per_position_acceptance_rates": [0.97, 0.7, 0.3]}
    assert read(lines(file, rounded))[1].rows[0]["acceptance_histogram"] is None


def test_failed_requests_and_plain_responses_are_counted_not_read(capsys, tmp_path: Path) -> None:
    good = {"id": "g", "usage": {"completion_tokens": 54}, "metrics": {"speculative_decoding": VLLM}}
    failed = [
        {"error": {"message": "busy", "code": 503}}, {"object": "error", "message": "no"}, {"success": False},
        {"metadata": {}, "metrics": {}, "error": {"type": "Timeout"}}, {**good, "error": "cut"},
        {"response": {"body": {"error": {"code": 400}}}}, {"meta_info": {"finish_reason": {"type": "abort"}}},
    ]  # fmt: skip
    plain = [{"id": "p", "choices": [{"index": 0}], "usage": {"completion_tokens": 3}}, {**good, "metrics": None}]
    file = lines(tmp_path / "r.jsonl", *failed, *plain, good)
    found = read(file)[1]
    assert (len(found.rows), found.failed, found.without) == (1, 7, 2)
    status, _, err = run(capsys, "convert", file)
    assert status == 0 and "left out: 7 requests that failed, 2 without statistics" in err
    status, out, err = run(capsys, "convert", lines(file, *failed, *plain))
    assert status == 2 and "there is no row in it: 7 failed, 2 without statistics" in err and out == ""
    status, _, err = run(capsys, "convert", lines(file, {"choices": [{"avg_decoded_tokens_per_iter": 2.5}]}))
    assert status == 2 and "avg_decoded_tokens_per_iter alone says neither" in err
    status, _, err = run(capsys, "convert", lines(file, good, {"weather": "\x1b[31m"}))
    assert status == 2 and "line 2: the keys weather belong to no format" in err


def test_a_step_that_the_output_cuts_counts_what_it_gave(tmp_path: Path) -> None:
    row = {"id": 0, "generated_token_ids": [0, 0], "acc_x": {"acc_len": [4, 1]}}
    [part] = read_specdecode_bench(lines(tmp_path / "b.jsonl", row))
    whole = part.replay(5)
    assert (whole["num_spec_steps"], whole["completion_tokens"], whole["num_accepted_draft_tokens"]) == (1, 2, 2)
    assert whole["acceptance_histogram"] == [0, 0, 1, 0, 0, 0]
    with pytest.raises(ImportRefused, match="acc_len 1000000000 at token 0 is not >= 1 and <= 1,025"):
        read_specdecode_bench(lines(tmp_path / "b.jsonl", {**row, "acc_x": {"acc_len": [10**9]}}))


def test_a_pipe_is_read_once_and_names_may_hold_anything(capsys, tmp_path: Path) -> None:
    import os
    import threading

    pipe = tmp_path / "p"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_text(json.dumps(ENGINE))).start()
    assert read(pipe)[1].rows[0]["mean_acceptance_length"] == 4.0
    file = lines(tmp_path / "a,gr\u00fcn \x1b[31m.jsonl", ENGINE)
    assert run(capsys, "convert", file, "-o", tmp_path / "b,\u00fc.jsonl")[0] == 0
    assert (tmp_path / "b,\u00fc.jsonl").is_file()
    status, _, err = run(capsys, "convert", lines(file, "{"))
    assert status == 2 and "\\x1b[31m" in err and "\x1b" not in err
