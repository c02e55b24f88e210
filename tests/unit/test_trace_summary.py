"""The numbers of ``inspect``: by hand for small blocks, against a count token by token for random traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asdsim.errors import TraceError
from asdsim.evaluate.summary import summarise
from asdsim.records import FORBIDDEN_LOGIT, RequestRecord, StepRecord
from asdsim.trace import TraceWriter, read_trace
from tests.support.toytrace import RAGGED, ToyModel, toy_manifest, write_toy_trace

EOS = 9


def block(
    step_id: int, start: int, accepted: int, drafts: list[int], choices: list[int], regrets: list[float] | None = None
) -> StepRecord:
    """Return a step over a vocabulary of 10 whose mismatches have the given regrets (1 where none is given)."""
    width = len(drafts)
    by_row = regrets or [1.0] * width
    rows = np.full((width + 1, 10), -5.0, np.float32)
    for i, choice in enumerate(choices):
        rows[i, choice] = 2.0
        if i < width and drafts[i] != choice:
            rows[i, drafts[i]] = 2.0 - by_row[i]
    order = np.argsort(-rows, axis=1, kind="stable")
    ids = np.array(drafts, np.int32)
    assert order[:, 0].tolist() == choices
    return StepRecord(
        step_id,
        step_id - 1,
        accepted,
        start,
        ids,
        order[:, 0].astype(np.int32),
        rows[np.arange(width), ids],
        (order[:-1] == ids[:, None]).argmax(1).astype(np.int32),
        order[:, :8].astype(np.int32),
        np.take_along_axis(rows, order[:, :8], 1),
        np.full(width + 1, 2.5, np.float32),
        np.full(width + 1, 0.5, np.float32),
        draft_us=100.0 * (step_id + 1),
        verify_us=7.0,
        select_us=1.0,
    )


def summary_of(path: Path, limit: int, steps: list[StepRecord], stop: str = "natural") -> dict[str, Any]:
    request = RequestRecord("r", "t", (1,), "", None, limit, (EOS,), stop)
    with TraceWriter.create(path, toy_manifest(vocab_size=10, num_draft_tokens=5)) as writer:
        writer.add_request(request, steps)
    return summarise(read_trace(path))


def test_counting_ends_at_an_eos(tmp_path: Path) -> None:
    """Fault 1: drafts [d1, d2, EOS, d4, d5], all acceptable: 3 tokens committed, 3 drafts accepted; not 6."""
    step = block(0, 0, -1, [1, 2, EOS, 4, 5], [1, 2, EOS, 4, 5, 6])
    found = summary_of(tmp_path / "t", 50, [step])["strict_acceptance"]
    assert (found["completion_tokens"], found["num_accepted_draft_tokens"], found["num_draft_tokens"]) == (3, 3, 5)
    assert found["acceptance_histogram"] == [0, 0, 0, 1, 0, 0]


def test_an_eos_is_a_token_like_others_under_a_fixed_stop(tmp_path: Path) -> None:
    step = block(0, 0, -1, [1, 2, EOS, 4, 5], [1, 2, EOS, 4, 5, 6])
    found = summary_of(tmp_path / "t", 6, [step], "fixed")["strict_acceptance"]
    assert (found["completion_tokens"], found["num_accepted_draft_tokens"]) == (6, 5)


def test_acceptance_with_and_without_the_bonus(tmp_path: Path) -> None:
    """Fault 2: K=3, all accepted: 4 with the bonus token, 3 without."""
    found = summary_of(tmp_path / "t", 4, [block(0, 0, -1, [1, 2, 3], [1, 2, 3, 4])])["strict_acceptance"]
    assert (found["mean_acceptance_length"], found["accepted_per_proposal"]) == (4.0, 3.0)


def test_only_a_prefix_counts(tmp_path: Path) -> None:
    """Fault 3: matches [1, 0, 1, 1]: 1 accepted."""
    found = summary_of(tmp_path / "t", 2, [block(0, 0, -1, [1, 2, 3, 4], [1, 7, 3, 4, 5])])["strict_acceptance"]
    assert (found["num_accepted_draft_tokens"], found["completion_tokens"]) == (1, 2)


def test_ragged_widths_in_the_rate(tmp_path: Path) -> None:
    """Fault 4: K = [1, 3, 5], accepted [1, 1, 5]: 7 of 9."""
    steps = [
        block(0, 0, -1, [1], [1, 2]),
        block(1, 2, 1, [1, 2, 3], [1, 7, 3, 4]),
        block(2, 4, 1, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]),
    ]
    found = summary_of(tmp_path / "t", 10, steps)["strict_acceptance"]
    assert found["draft_acceptance_rate"] == 7 / 9
    assert found["acceptance_histogram"] == [0, 2, 0, 0, 0, 1]


def test_the_limit_cuts_inside_a_block(tmp_path: Path) -> None:
    """Fault 5: two full K=3 blocks, limit 6: 6 tokens, the second block cut."""
    steps = [block(0, 0, -1, [1, 2, 3], [1, 2, 3, 4]), block(1, 4, 3, [1, 2, 3], [1, 2, 3, 4])]
    found = summary_of(tmp_path / "t", 6, steps)["strict_acceptance"]
    assert (found["completion_tokens"], found["num_accepted_draft_tokens"], found["num_draft_tokens"]) == (6, 5, 6)


def test_regret_and_ties_at_the_first_mismatch(tmp_path: Path) -> None:
    steps = [
        block(0, 0, -1, [1, 2, 3], [1, 7, 8, 4], [0, 0.5, 9]),
        block(1, 2, 1, [4, 3], [3, 3, 4], [0.0, 1]),  # a tie: 3 is the lower id
        block(2, 3, 0, [6], [7, 1], [2.0]),
        block(3, 4, 0, [6], [7, 1], [2.0 - FORBIDDEN_LOGIT]),
    ]
    found = summary_of(tmp_path / "t", 5, steps)
    first = found["first_mismatch"]
    assert (first["count"], first["ties"], first["forbidden"]) == (4, 1, 1)
    assert first["regret_quantiles"] == {"0.25": 0.25, "0.5": 0.5, "0.75": 1.25, "0.9": pytest.approx(1.7)}
    assert first["regret_max"] == 2.0
    assert found["ties"]["mismatches"] == 1
    assert found["median_us"] == {"draft": 250.0, "verify": 7.0, "select": 1.0}


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_against_a_count_token_by_token(tmp_path: Path, seed: int) -> None:
    model = ToyModel(seed=seed, widths=RAGGED.widths, agree=0.8)
    content = write_toy_trace(tmp_path / "t", model, cover=4)
    tokens = accepted = steps = 0
    histogram = [0] * 17
    for request, records in content:
        for step in records:
            if step.wave == 0:
                count, committed, _ = model.outcomes(request, step)[0]
                tokens, accepted, steps = tokens + len(committed), accepted + count, steps + 1
                histogram[count] += 1
    found = summarise(read_trace(tmp_path / "t"))
    strict = found["strict_acceptance"]
    assert (strict["completion_tokens"], strict["num_accepted_draft_tokens"]) == (tokens, accepted)
    assert strict["num_spec_steps"] == steps == found["steps_on_captured_path"]
    assert strict["acceptance_histogram"] == histogram
    assert sum(k * n for k, n in enumerate(histogram)) == accepted
    assert sum(row["completion_tokens"] for row in found["tasks"].values()) == tokens
    assert sum(row["requests"] for row in found["tasks"].values()) == found["requests"] == len(content)
    assert found["steps_added_by_cover"] == sum(step.wave for _, records in content for step in records)


def test_a_trace_without_requests_has_a_summary(tmp_path: Path) -> None:
    TraceWriter.create(tmp_path / "t", toy_manifest()).close()
    found = summarise(read_trace(tmp_path / "t"))
    assert found["requests"] == 0 and found["strict_acceptance"]["mean_acceptance_length"] is None
    assert found["bytes"]["positions_per_draft_position"] is None


def test_a_strict_path_must_be_strict(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the captured path is strict, yet step 0 was left with 2 accepted"):
        summary_of(tmp_path / "t", 8, [block(0, 0, -1, [1, 2, 3], [1, 7, 8, 4]), block(1, 3, 2, [1, 2], [3, 2, 1])])
