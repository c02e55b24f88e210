"""Logit rows to columns: ties, ranks, sums, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp, rel_entr, softmax

from asdsim.capture.loop import Course
from asdsim.capture.record import Recorder, check_ids, divergences, ranks, scan, spread, top_k
from asdsim.engines.protocol import Proposal
from asdsim.errors import AsdsimError, CaptureError
from asdsim.records import FORBIDDEN_LOGIT, RequestRecord
from asdsim.rules.asd import GATE
from asdsim.rules.settings import STRICT, Policy


def ordered(row: np.ndarray) -> np.ndarray:
    """Ids by (-logit, id), the slow and plain way."""
    return np.array(sorted(range(len(row)), key=lambda i: (-row[i], i)))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(2, 300), grain=st.sampled_from([0.0, 0.25, 1.0, 4.0]))
def test_top_k_argmax_and_ranks_settle_ties_by_id(seed: int, vocab: int, grain: float) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 3, (5, vocab)).astype(np.float32)
    if grain:
        rows = (np.round(rows / grain) * grain).astype(np.float32)  # many ties, -0.0 among them
    drafts = rng.integers(0, vocab, 4).astype(np.int32)
    seen = scan(rows, drafts.tolist(), "here")
    ids, logits = top_k(seen.logits, 8)
    rank = ranks(seen.logits, drafts, ids)
    for i, row in enumerate(rows):
        expected = ordered(row)[:8]
        assert ids[i].tolist() == expected.tolist()
        assert logits[i].tolist() == row[expected].tolist()
        assert seen.argmax_ids[i] == expected[0]
    for i, token in enumerate(drafts):
        assert rank[i] == ordered(rows[i]).tolist().index(token)
        assert seen.regrets[i] == float(rows[i].max()) - float(rows[i][token])


def test_equal_maxima_take_the_lowest_id() -> None:  # fault 6
    rows = np.zeros((2, 300), np.float32)
    rows[:, [5, 256]] = 3.0
    seen = scan(rows, [256], "here")
    assert seen.argmax_ids.tolist() == [5, 5]
    assert seen.regrets.tolist() == [0.0]
    zeros = np.array([[-0.0, 0.0, -1.0]], np.float32)
    assert scan(zeros, [], "here").argmax_ids.tolist() == [0]
    assert top_k(torch.from_numpy(zeros), 8)[0].tolist() == [[0, 1, 2]]


def test_bfloat16_ties_stay_ties_in_what_is_recorded() -> None:  # fault 7
    wide = torch.tensor([[1.0, 32.0, 32.125], [0.0, 1.0, 2.0]])
    assert scan(wide, [1], "here").regrets.tolist() == [0.125]
    narrow = scan(wide.bfloat16(), [2], "here")
    assert narrow.argmax_ids.tolist() == [1, 2]
    assert narrow.regrets.tolist() == [0.0]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ([np.nan, np.nan, np.nan], "NaN"),
        ([0.0, np.nan, 1.0], "NaN"),
        ([-np.inf, -np.inf, -np.inf], "nothing but -inf"),
        ([0.0, np.inf, 1.0], r"\+inf"),
    ],
)
def test_logits_without_a_finite_maximum_are_refused(row: list[float], kind: str) -> None:  # fault 8
    rows = np.array([[0.0, 1.0, 2.0], row, [0.0, 1.0, 2.0]], np.float32)
    with pytest.raises(CaptureError, match=rf"request r/3, step 4, position 1: the target's logits hold {kind}"):
        scan(rows, [0, 1], "request r/3, step 4")


def test_a_row_with_some_minus_infinity_is_fine() -> None:  # fault 8
    seen = scan(np.array([[-np.inf, 1.0], [-np.inf, 1.0]], np.float32), [1], "here")
    assert seen.argmax_ids.tolist() == [1, 1]
    assert seen.regrets.tolist() == [0.0]
    record = Recorder().step(
        seen, Proposal([1]), step_id=0, parent_step_id=-1, parent_accepted=-1, start_pos=0, where="here"
    )
    assert record.top_logits.tolist() == [[1.0, FORBIDDEN_LOGIT]] * 2
    assert record.logsumexp.tolist() == [1.0, 1.0]
    assert record.entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("policy", [STRICT, Policy(np.inf, np.inf, np.inf)])
def test_a_token_that_the_target_rules_out_is_never_accepted(policy: Policy) -> None:
    rows = np.array([[0.0, 1.0, -1.0], [0.0, -np.inf, 1.0], [0.0, 1.0, 2.0]], np.float32)
    course = Course(RequestRecord("r", "t", (0,), "", None, 9, ()), policy)
    outcome = course.take([1, 1], scan(rows, [1, 1], "here"))
    assert (outcome.accepted, outcome.tokens, outcome.charge, outcome.verdict) == (1, [1, 2], 0.0, GATE)


@pytest.mark.parametrize(("ids", "position"), [([3, 151936], 1), ([-1], 0)])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int], position: int) -> None:  # fault 9
    with pytest.raises(CaptureError, match=f"position {position}: draft token {ids[position]} is outside .* 151936"):
        check_ids(ids, 151936, "request r, step 0")


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(CaptureError, match="expected 3 logit rows"):
        scan(np.zeros((2, 4), np.float32), [1, 2], "here")


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_logsumexp_and_entropy(scale: float) -> None:
    rows = (np.random.default_rng(3).normal(0, 1, (6, 5000)) * scale).astype(np.float32)
    rows[0, :4999] = -np.inf
    lse, entropy = spread(torch.from_numpy(rows).clamp(min=FORBIDDEN_LOGIT))
    p = softmax(rows.astype(np.float64), axis=1)
    # float32 sums over 5,000 terms: some units in the seventh digit
    np.testing.assert_allclose(lse, logsumexp(rows.astype(np.float64), axis=1), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(entropy, -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1), atol=3e-5)


def test_divergences() -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.normal(0, 2, (5, 400)).astype(np.float32) for _ in range(2))
    b[0] = a[0]
    p, q = softmax(a.astype(np.float64), axis=1), softmax(b.astype(np.float64), axis=1)
    m = (p + q) / 2
    found = divergences(torch.from_numpy(a), torch.from_numpy(b), ("kl", "reverse_kl", "js", "tv"))
    for name, expected in {
        "kl": rel_entr(p, q).sum(1),
        "reverse_kl": rel_entr(q, p).sum(1),
        "js": (rel_entr(p, m).sum(1) + rel_entr(q, m).sum(1)) / 2,
        "tv": np.abs(p - q).sum(1) / 2,
    }.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)


def test_divergence_from_what_is_ruled_out_is_infinite_one_way() -> None:
    rows = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, FORBIDDEN_LOGIT]])
    found = divergences(*rows, ("kl", "reverse_kl", "js", "tv"))
    assert found["kl"].tolist() == [np.inf]
    np.testing.assert_allclose(found["reverse_kl"], [np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(found["tv"], [0.5])
    assert np.isfinite(found["js"]).all()


def test_recorder_refuses_what_it_cannot_keep() -> None:
    with pytest.raises(AsdsimError, match="top-k 4 is too small"):
        Recorder(top_k=4)
    with pytest.raises(AsdsimError, match="did you mean 'reverse_kl'"):
        Recorder(divergences=("reverse_kll",))
    seen = scan(np.zeros((2, 4), np.float32), [1], "here")
    with pytest.raises(CaptureError, match="gives no distribution"):
        Recorder(divergences=("kl",)).step(
            seen, Proposal([1]), step_id=0, parent_step_id=-1, parent_accepted=-1, start_pos=0, where="here"
        )
