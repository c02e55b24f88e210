"""Faults that users of such tools reported, each with the right value by definition."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from asdsim.records import NO_PARENT, MemoryTrace, RequestRecord, StepRecord
from asdsim.rules.settings import Grid
from asdsim.trace.graph import build_graph
from asdsim.trace.tables import to_numpy
from asdsim.trace.tokens import edge_tokens
from asdsim.walk.sweep import sweep, walk_grid
from tests.support.toygraph import record_step

VOCAB = 300
EOS = 9


def logits_for(choice: list[int], draft: list[int], regret: float = 0.5) -> np.ndarray:
    """Return rows whose argmax is ``choice`` and in which a mismatching draft token lies ``regret`` below it."""
    rows = np.full((len(choice), VOCAB), -8.0, np.float32)
    for i, token in enumerate(choice):
        rows[i, token] = 4.0
        if i < len(draft) and draft[i] != token:
            rows[i, draft[i]] = 4.0 - regret
    return rows


def step(
    number: int, parent: StepRecord | None, taken: int, start: int, draft: list[int], choice: list[int]
) -> StepRecord:
    parent_id = NO_PARENT if parent is None else parent.step_id
    return record_step(number, parent_id, taken, start, np.array(draft, np.int32), logits_for(choice, draft))


def figures(
    steps: list[StepRecord], *, limit: int = 100, stop: str = "natural", B: float = 8, g: float = 9, M: float = 9
):
    """Replay one request under one setting; return (row, output)."""
    request = RequestRecord("r/0", "t", (1,), "", None, limit, (EOS,), stop)
    trace = MemoryTrace([(request, steps)])
    graph = build_graph(trace)
    grid = Grid.product(B, g, M)
    row = sweep(lambda part: walk_grid(graph, part, device="cpu"), grid, 1, off_trace="stop")
    edge = int(walk_grid(graph, grid, device="cpu").edge[0, 0])
    return {name: values[0] for name, values in row.items()}, edge_tokens(trace, graph, edge)


def test_fault_1_nothing_counts_past_an_eos():
    row, output = figures([step(0, None, -1, 0, [1, 2, EOS, 4, 5], [1, 3, EOS, 6, 7, 8])])
    assert output == [1, 2, EOS]
    assert (row["completion_tokens"], row["num_accepted_draft_tokens"], row["num_spec_steps"]) == (3, 3, 1)
    assert row["relaxed_tokens"] == 1 and row["regret_spent_max"] == 0.5  # the mismatches behind the EOS cost nothing
    assert row["mean_acceptance_length"] == 3.0


def test_fault_1_a_fixed_length_ignores_the_eos():
    row, output = figures([step(0, None, -1, 0, [1, EOS, 3], [1, EOS, 3, 4])], limit=4, stop="fixed")
    assert output == [1, EOS, 3, 4] and row["num_accepted_draft_tokens"] == 3


def test_fault_2_the_bonus_counts_in_one_length_only():
    row, _ = figures([step(0, None, -1, 0, [1, 2, 3], [1, 2, 3, 4])], limit=4)
    assert row["mean_acceptance_length"] == 4.0
    assert row["accepted_per_proposal"] == 3.0


def test_fault_3_only_a_prefix_is_accepted():
    row, output = figures([step(0, None, -1, 0, [1, 2, 3, 4], [1, 5, 3, 4, 6])], limit=2, B=0)
    assert output == [1, 5] and row["num_accepted_draft_tokens"] == 1


def ragged(widths: list[int], accepted: list[int]) -> list[StepRecord]:
    steps: list[StepRecord] = []
    start, parent, taken = 0, None, -1
    for number, (width, count) in enumerate(zip(widths, accepted, strict=True)):
        draft = [20 + number] * width
        choice = [token if i != count else 30 for i, token in enumerate(draft)] + [30]
        parent_step = step(number, parent, taken, start, draft, choice)
        steps.append(parent_step)
        start, parent, taken = start + count + 1, parent_step, count
    return steps


def test_fault_4_a_rate_over_ragged_blocks():
    row, _ = figures(ragged([1, 3, 5], [1, 1, 5]), limit=10, B=0)
    assert row["num_accepted_draft_tokens"] == 7 and row["num_draft_tokens"] == 9
    assert row["draft_acceptance_rate"] == 7 / 9


def test_fault_5_the_limit_cuts_a_block():
    first = step(0, None, -1, 0, [1, 2, 3], [1, 2, 3, 4])
    second = step(1, first, 3, 4, [5, 6, 7], [5, 6, 7, 8])
    row, output = figures([first, second], limit=6)
    assert output == [1, 2, 3, 4, 5, 6]
    assert (row["completion_tokens"], row["num_accepted_draft_tokens"]) == (6, 5)
    assert list(row["acceptance_histogram"]) == [0, 0, 1, 1]


def test_fault_6_the_lowest_id_wins_a_tie():
    from asdsim.capture.record import scan, top_k

    rows = np.zeros((2, VOCAB), np.float32)
    rows[0, [5, 256]] = 3.0
    rows[1] = np.where(np.arange(VOCAB) % 2, 0.0, -0.0)  # -0.0 and +0.0 are one value
    seen = scan(rows, [256], "request r/0, step 0")
    assert seen.argmax_ids.tolist() == [5, 0]
    assert seen.regrets.tolist() == [0.0]
    assert top_k(seen.logits, 8)[0][0, :2].tolist() == [5, 256]
    assert top_k(seen.logits, 8)[0][1].tolist() == list(range(8))


def test_fault_7_bfloat16_makes_a_tie_and_the_dtype_is_recorded():
    import torch

    from asdsim.capture.record import scan
    from asdsim.trace.manifest import Manifest

    wide = torch.full((2, VOCAB), -1.0)
    wide[0, 4], wide[0, 7] = 32.0, 32.125
    assert scan(wide, [4], "").argmax_ids[0] == 7 and scan(wide, [4], "").regrets[0] == 0.125
    narrow = scan(wide.bfloat16(), [7], "")
    assert narrow.argmax_ids[0] == 4 and narrow.regrets[0] == 0.0
    assert Manifest(target={}, drafter={}, vocab_size=VOCAB, num_draft_tokens=1).logits_dtype == "float32"


@pytest.mark.parametrize(
    ("bad", "message"), [(np.nan, "NaN"), (-np.inf, "nothing but -inf"), (np.inf, r"\+inf")]
)  # fmt: skip
def test_fault_8_rows_without_a_choice_are_refused(bad, message):
    from asdsim.capture.record import scan
    from asdsim.errors import CaptureError

    rows = np.zeros((3, VOCAB), np.float32)
    rows[1] = bad
    with pytest.raises(CaptureError, match=rf"request r/3, step 2, position 1: .*{message}"):
        scan(rows, [1, 2], "request r/3, step 2")


def test_fault_8_some_minus_infinity_is_fine():
    from asdsim.capture.record import scan

    assert scan(np.array([[-np.inf, 1.0]], np.float32), [], "").argmax_ids.tolist() == [1]


@pytest.mark.parametrize("token", [-1, 151_936])
def test_fault_9_tokens_outside_the_vocabulary_are_refused(token):
    from asdsim.capture.record import check_ids
    from asdsim.errors import CaptureError

    with pytest.raises(CaptureError, match=f"position 1: draft token {token} is outside"):
        check_ids([1, token], 151_936, "request r/0, step 0")


def test_fault_10_drafted_counts_what_was_drafted():
    row, _ = figures(ragged([5, 2], [5, 1]), limit=8, B=0)
    assert row["num_draft_tokens"] == 7


def test_fault_12_slices_nulls_and_nan_of_arrow():
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.int32)), 2)
    assert to_numpy(lists.slice(2, 2)).tolist() == [[4, 5], [6, 7]]
    ragged_lists = pa.array([[1], [2, 3], [4, 5, 6]], pa.list_(pa.int32())).slice(1)
    assert [part.tolist() for part in to_numpy(ragged_lists)] == [[2, 3], [4, 5, 6]]
    ints = to_numpy(pa.array([7, None], pa.int32()))
    assert ints.dtype == np.int32 and ints.tolist() == [7, -1]


def test_fault_12_a_nan_in_a_shard_is_found(tmp_path):
    from asdsim.errors import AsdsimError
    from asdsim.trace.reader import read_trace
    from tests.support.toytrace import ToyModel, write_toy_trace
    from tests.support.tracefiles import edit_shard, set_cell

    write_toy_trace(tmp_path / "t", ToyModel(1, 40), count=2)
    edit_shard(tmp_path / "t", "positions", set_cell("logsumexp", 3, float("nan")))
    with pytest.raises(AsdsimError, match="logsumexp"):
        read_trace(tmp_path / "t")
