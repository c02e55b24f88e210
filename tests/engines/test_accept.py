"""The rule in torch against the scalar rule: the same decisions, charges and ledgers, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asdsim.capture.loop import Course
from asdsim.capture.record import Recorder, scan
from asdsim.engines.protocol import Proposal
from asdsim.errors import UsageError
from asdsim.records import NO_PARENT, RequestRecord
from asdsim.rules import get_rule
from asdsim.rules.asd import GATE, Reading
from asdsim.rules.scoring import DEFAULT, Layout, lay_block
from asdsim.rules.settings import Policy, layout_of

torch = pytest.importorskip("torch")
from asdsim.engines import accept as batch  # noqa: E402

VOCAB = 6
STOP_ID = 5
READINGS = [
    ("paper", {}), ("core", {}), ("dspark", {}), ("lightllm", {}),
    *((name, {"ledger": "block"}) for name in ("paper", "core", "dspark", "lightllm")),
    ("paper", {"value": "reuse"}), ("paper", {"value": "unit"}), ("paper", {"value": "reciprocal"}),
]  # fmt: skip

# Few values, with exact ties, sums that hit a budget exactly or miss it by rounding, and tokens ruled out.
logit = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 1.5, 3.0, -math.inf])
number = st.sampled_from([0.0, 0.05, 0.1, 0.125, 0.25, 0.3, 0.5, 0.7, 1.0, 1.5, 8.0, math.inf])
spent = st.sampled_from([0.0, 0.1, 0.25, 0.30000000000000004, 0.5, 0.88, 1.0])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], np.ndarray]:
    """Draft ids (K,) and logit rows (K + 1, V), each with at least one finite logit."""
    width = draw(st.integers(0, 7))
    rows = np.array([draw(st.lists(logit, min_size=VOCAB, max_size=VOCAB)) for _ in range(width + 1)], np.float32)
    rows[~np.isfinite(rows).any(axis=1), 0] = 0.0
    return draw(st.lists(st.integers(0, VOCAB - 1), min_size=width, max_size=width)), rows


one = st.tuples(blocks(), number, number, st.sampled_from([0.0, 1.0, 2.0, math.inf]), spent, st.integers(0, 9))


def decide_batch(cases, policies, layout, reading, logits=None):  # type: ignore[no-untyped-def]
    drafts = [case[0][0] for case in cases]
    widths = torch.tensor([len(ids) for ids in drafts])
    flat = torch.tensor([token for ids in drafts for token in ids], dtype=torch.int32)
    if logits is None:
        logits = torch.tensor(np.concatenate([case[0][1][:-1] for case in cases]))
    laid = batch.lay_blocks(widths, int(widths.max()))
    rows = batch.read_rows(logits, flat, layout)
    mismatch, score, charge = batch.score_blocks(layout, rows, laid)
    stop = batch.reach(
        laid, flat, torch.tensor([case[5] for case in cases]), torch.tensor([[-1, STOP_ID]]).expand(len(cases), 2)
    )
    numbers = batch.Settings(*(
        torch.tensor(values, dtype=torch.float64)
        for values in zip(*((case[4], p.budget, p.gate, p.cap) for case, p in zip(cases, policies, strict=True)),
                          strict=True)
    ))  # fmt: skip
    return laid, rows, batch.accept_blocks(mismatch, score, charge, stop, numbers, reading), logits


def decide_alone(case, policy):  # type: ignore[no-untyped-def]
    """Decide one block as live decoding does."""
    (ids, rows), _, _, _, start, remaining = case
    request = RequestRecord("r", "", (0,), "", None, remaining, (STOP_ID,))
    course = Course(request, policy, spent=start)
    seen = scan(rows, ids, "here")
    step = Recorder().step(
        seen, Proposal(ids), step_id=0, parent_step_id=NO_PARENT, parent_accepted=NO_PARENT, start_pos=0, where="here"
    )
    return course.take(ids, seen, step), course.spent


@pytest.mark.parametrize(("semantics", "varied"), READINGS)
@settings(max_examples=250)
@given(st.lists(one, min_size=1, max_size=6))
def test_a_ragged_batch_decides_as_the_scalar_rule(semantics, varied, cases) -> None:  # type: ignore[no-untyped-def]
    varied = dict(varied)
    reading = Reading(semantics, varied.pop("ledger", "request"))
    layout = layout_of(semantics, **varied)
    policies = [Policy(case[1], case[2], case[3], semantics, layout, ledger=reading.ledger) for case in cases]
    _, _, made, _ = decide_batch(cases, policies, layout, reading)
    for n, (case, policy) in enumerate(zip(cases, policies, strict=True)):
        outcome, after = decide_alone(case, policy)
        assert (made.accepted[n].item(), made.charge[n].item(), made.relaxed[n].item(), made.verdict[n].item()) == (
            outcome.accepted, outcome.charge, outcome.relaxed, outcome.verdict,
        )  # fmt: skip
        assert made.spent[n].item() == after


@settings(max_examples=200)
@given(st.lists(one, min_size=1, max_size=6))
def test_lifted_logits_make_a_greedy_kernel_accept_the_same(cases) -> None:  # type: ignore[no-untyped-def]
    policies = [Policy(case[1], case[2], case[3]) for case in cases]
    laid, rows, made, logits = decide_batch(cases, policies, DEFAULT, Reading())
    before = logits.clone()
    batch.lift(logits, rows, laid, made)
    best = logits.argmax(-1).tolist()
    row = 0
    for n, case in enumerate(cases):
        ids = case[0][0]
        matched = 0
        while matched < len(ids) and best[row + matched] == ids[matched]:
            matched += 1
        accepted = made.accepted[n].item()
        stop = min(matched, case[5], *(i + 1 for i, token in enumerate(ids) if token == STOP_ID)) if ids else 0
        assert stop == accepted or (made.verdict[n].item() == 0 and matched >= accepted)
        if made.verdict[n].item() != 0:
            assert matched == accepted and best[row + matched] == before[row + matched].argmax().item()
        row += len(ids)
    changed = (logits != before).any(-1).sum().item()
    assert changed == made.relaxed.sum().item()


OTHERS = ["strict", "mars", "medusa", "trtllm", "vllm", "fly", "additive", "multiplicative", "topm", "entropy"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_rules_score_as_they_do_in_a_replay(name: str) -> None:
    rng = np.random.default_rng(3)
    layout = Layout(name, params=tuple(get_rule(name).defaults.items()))
    limit = get_rule(name).limit(get_rule(name).defaults)
    cases = []
    for width in rng.integers(0, 8, 60):
        rows = (rng.normal(size=(width + 1, 40)) * 2 + 3).astype(np.float32)
        near = [int(np.argsort(-row)[rng.integers(0, 3)]) for row in rows[:-1]]
        cases.append(((near, rows), 0, 0, 0, 0.0, 99))
    flat = torch.tensor([token for case in cases for token in case[0][0]])
    laid = batch.lay_blocks(torch.tensor([len(case[0][0]) for case in cases]), 7)
    rows_read = batch.read_rows(torch.tensor(np.concatenate([case[0][1][:-1] for case in cases])), flat, layout)
    mismatch, score, charge = batch.score_blocks(layout, rows_read, laid)
    passed = 0
    for n, ((ids, rows), *_rest) in enumerate(cases):
        request = RequestRecord("r", "", (0,), "", None, 99, ())
        step = Recorder().step(
            scan(rows, ids, "here"), Proposal(ids), step_id=0, parent_step_id=NO_PARENT, parent_accepted=NO_PARENT,
            start_pos=0, where="here",
        )  # fmt: skip
        at, scores, charges = lay_block(layout, request, step, [])
        assert mismatch[n].nonzero()[:, 0].tolist() == at
        assert charge[n][at].tolist() == charges
        np.testing.assert_allclose(score[n][at].numpy(), scores, rtol=1e-6, atol=1e-7)
        passed += sum(value <= limit for value in scores)
        assert [(value <= limit) for value in score[n][at].tolist()] == [value <= limit for value in scores]
    assert passed > 5 or name == "strict"


def test_regret_in_probability() -> None:
    rows = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 0.0]], np.float32)
    layout = layout_of("paper", regret="probability")
    case = (([1, 2], rows), 1.0, 0.25, 2.0, 0.0, 9)
    policy = Policy(1.0, 0.25, 2.0, "paper", layout)
    _, _, made, _ = decide_batch([case], [policy], layout, Reading())
    # softmax(2, 1, 0) = .6652, .2447, .0900: r = .4205, r / 2 = .2103 <= .25; then p(3) - p(1) = .7229 > .25
    assert made.accepted.tolist() == [1] and made.charge[0].item() == pytest.approx(0.42051, abs=1e-5)
    assert made.verdict.tolist() == [GATE]


def test_rows_with_nan_or_inf_are_named_and_never_accepted() -> None:
    rows = torch.tensor([[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [1.0, 0.0]])
    read = batch.read_rows(rows, torch.tensor([0, 1, 1, 1]))
    assert read.unusable.tolist() == [True, True, True, False]
    laid = batch.lay_blocks(torch.tensor([1, 1, 1, 1]), 1)
    everything = batch.Settings(torch.zeros(4).double(), *(torch.full((4,), math.inf).double(),) * 3)
    made = batch.accept_blocks(*batch.score_blocks(DEFAULT, read, laid), torch.ones(4).long(), everything, Reading())
    assert made.accepted.tolist()[1:] == [0, 0, 1] and made.relaxed.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("name", ["sglang", "lenience", "fuzzy", "truncate"])
def test_a_rule_that_reads_more_than_the_row_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"rule {name} reads more"):
        batch.needs_of(Layout(name, params=tuple(get_rule(name).defaults.items())))


def test_nothing_waits_for_the_device() -> None:
    """No operator that brings a value to the host, whatever the batch: neither item() nor a shape made of data."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[int, list[str]] = {}

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    for number in (1, 64):
        names: list[str] = []
        widths, flat = torch.full((number,), 7), torch.randint(0, 50, (7 * number,))
        logits, ids = torch.randn(7 * number, 50), torch.full((number, 2), 3)
        numbers = batch.Settings(*(torch.ones(number, dtype=torch.float64) for _ in range(4)))
        with Names():
            laid = batch.lay_blocks(widths, 7)
            rows = batch.read_rows(logits, flat)
            stop = batch.reach(laid, flat, widths, ids)
            made = batch.accept_blocks(*batch.score_blocks(DEFAULT, rows, laid), stop, numbers, Reading())
            batch.lift(logits, rows, laid, made)
        seen[number] = names
    assert len(seen[1]) == len(seen[64])
    waits = ("local_scalar_dense", "nonzero", "masked_select", "aten.index.Tensor_out", "unique")
    assert not [name for name in seen[64] if any(word in name for word in waits)]
