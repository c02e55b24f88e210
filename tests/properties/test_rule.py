"""Properties of the rule, for every block."""

import math

from hypothesis import given
from hypothesis import strategies as st

from asdsim.oracle import walk as reference
from asdsim.rules import asd as rule

REGRET = st.one_of(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 2.0]), st.floats(0.0, 20.0))
LIMIT = st.one_of(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 4.0, math.inf]), st.floats(0.0, 20.0))
CAP = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf])


@st.composite
def blocks(draw):
    width = draw(st.integers(0, 16))
    mismatch = draw(st.lists(st.booleans(), min_size=width, max_size=width))
    regret = [draw(REGRET) if bad else 0.0 for bad in mismatch]
    return [2 if bad else 1 for bad in mismatch], [1] * (width + 1), regret


@given(blocks(), LIMIT, CAP, LIMIT)
def test_strict_at_zero_budget(block, gate, cap, spent):
    draft, choice, regret = block
    leading = next((i for i, (x, y) in enumerate(zip(draft, choice, strict=False)) if x != y), len(draft))
    accepted, charge, count, _ = rule.decide(draft, choice, regret, len(draft), spent, 0.0, gate, cap)
    assert (accepted, charge, count) == (leading, 0.0, 0)


@given(blocks(), LIMIT, LIMIT, CAP, st.floats(0.0, 1.0))
def test_bounds_and_maximality(block, budget, gate, cap, share):
    draft, choice, regret = block
    spent = 0.0 if math.isinf(budget) else budget * share
    accepted, charge, count, verdict = rule.decide(draft, choice, regret, len(draft), spent, budget, gate, cap)
    assert 0 <= accepted <= len(draft)
    assert count <= cap
    assert spent + charge <= budget or charge == 0.0
    assert (verdict == rule.ACCEPT) == (accepted == len(draft))
    oracle = reference.Block((), draft, choice, regret)
    assert reference.broken_condition(oracle, accepted, spent, budget, gate, cap) == ""
    for longer in range(accepted + 1, len(draft) + 1):
        assert reference.broken_condition(oracle, longer, spent, budget, gate, cap) != ""


@given(blocks(), LIMIT, LIMIT, CAP, LIMIT, st.integers(0, 16))
def test_a_shorter_reach_cuts_and_changes_nothing_before(block, budget, gate, cap, spent, reach):
    draft, choice, regret = block
    reach = min(reach, len(draft))
    whole = rule.decide(draft, choice, regret, len(draft), spent, budget, gate, cap)
    cut = rule.decide(draft, choice, regret, reach, spent, budget, gate, cap)
    assert cut[0] == min(whole[0], reach)
    assert cut[1] == reference.charge_of(reference.Block((), draft, choice, regret), cut[0])
