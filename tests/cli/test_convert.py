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
            "acceptance_histogram": histogram, "completion_tokens": tokens,
        }, "row",
    )  # fmt: skip
    assert made["accepted_per_proposal"] == ratio


def test_a_ragged_record_is_read_with_its_own_drafted_tokens(tmp_path: Path) -> None:
    kind, rows = read(lines(tmp_path / "a.jsonl", RECORD, {"spec_decode": RECORD, "request_id": "x"}))
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
        ({"per_step_accepted": [1, 1, 5.5]}, "not a list of whole numbers"),
        ({"mean_acceptance_length": 7 / 3}, "the bonus token included"),
        ({"draft_acceptance_rate": 0.5}, "draft_acceptance_rate 0.5 is not"),
        ({"num_spec_steps": -1}, "not a whole number >= 0"),
        ({"num_spec_steps": None}, "not a finite number"),
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
