"""What the vectorised walks and the boxes take for granted of every judge.

They ask the gate once for all budgets, the cap once for all blocks, and cut ranges of settings where an answer turns.
That is sound where a verdict falls in the order gate, budget, cap, each depends on its own setting alone, and each
turns once.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asdsim.rules import asd as rule
from asdsim.rules.asd import ACCEPT, BUDGET, CAP, GATE, JUDGES, Reading, judge_of
from asdsim.walk import boxes, breakpoints, prepared, request
from tests.twins.cases import READINGS

INF = math.inf
numbers = st.one_of(st.sampled_from([0.0, 1e-9, 0.125, 0.25, 0.5, 1.0, 2.0, INF]), st.floats(0, 20))
scores = st.one_of(numbers, st.floats(-20, 0), st.just(math.nan))
caps = st.sampled_from([0.0, 1.0, 2.0, 3.0, 16.0, INF])
counts = st.integers(1, 17)


@pytest.mark.parametrize("reading", READINGS)
@given(scores, numbers, numbers, counts, numbers, numbers, numbers, caps, numbers, caps)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_a_verdict_falls_in_the_order_gate_budget_cap(
    reading, score, before, more, count, spent, budget, gate, cap, other_budget, other_cap
) -> None:
    judge = judge_of(reading)
    verdict = judge(score, before, before + more, count, spent, budget, gate, cap)
    refused_by_gate = judge(score, 0.0, 0.0, 0, 0.0, INF, gate, INF) == GATE
    assert (verdict == GATE) == refused_by_gate
    if refused_by_gate:
        return
    without_cap = judge(score, before, before + more, count, spent, budget, gate, INF)
    assert (verdict == BUDGET) == (without_cap == BUDGET)
    assert (judge(score, before, before + more, count, spent, budget, gate, other_cap) == BUDGET) == (verdict == BUDGET)
    if verdict != BUDGET:
        assert (verdict == CAP) == (judge(0.0, 0.0, 0.0, count, 0.0, INF, INF, cap) == CAP)
        assert verdict in (ACCEPT, CAP)
    looser = judge(score, before, before + more, count, spent, max(budget, other_budget), gate, cap)
    if verdict != BUDGET:
        assert looser == verdict, "what one budget pays for, a larger one does"
    if judge(score, before, before + more, count, spent, budget, gate, max(cap, other_cap)) == CAP:
        assert verdict == CAP


@pytest.mark.parametrize("semantics", list(JUDGES))
@given(scores, numbers, numbers, counts, numbers, numbers, numbers, caps)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_ledger_that_starts_anew_is_one_with_nothing_spent(
    semantics, score, before, more, count, spent, budget, gate, cap
) -> None:
    anew = judge_of(Reading(semantics, "block"))
    charge = before + more
    expected = JUDGES[semantics](score, before, charge, count, 0.0, budget, gate, cap)
    assert anew(score, before, charge, count, spent, budget, gate, cap) == expected


@pytest.mark.parametrize("module", [rule, request, boxes, breakpoints, prepared])
def test_nothing_decides_by_default(module) -> None:
    """A kernel that binds no judge fails, as Python and where it would be compiled."""
    for name in {"judge", "settle"} & set(vars(module)):
        assert getattr(module, name) is rule.unbound


def test_a_kernel_that_binds_no_judge_does_not_compile() -> None:
    block = [0], [0.0], [0.0], 0, 1, 1, 0.0, 1.0, 1.0, 1.0
    with pytest.raises(NotImplementedError, match="no judge"):
        rule.accept_block(*block)
    arrays = np.zeros(1, np.int32), np.zeros(1), np.zeros(1)
    with pytest.raises(numba.TypingError, match="judge"):
        numba.njit(rule.accept_block)(*arrays, *block[3:])


@pytest.mark.parametrize("reading", READINGS)
@given(scores, numbers, numbers)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_wider_gate_lets_pass_what_a_narrower_one_does(reading, score, gate, other) -> None:
    judge = judge_of(reading)
    if judge(score, 0.0, 0.0, 0, 0.0, INF, min(gate, other), INF) != GATE:
        assert judge(score, 0.0, 0.0, 0, 0.0, INF, max(gate, other), INF) != GATE
