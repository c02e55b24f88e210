"""The rule against its definition, on blocks written by hand."""

import math

import pytest

from asdsim.oracle import walk as reference
from asdsim.rules import asd as rule

INF = math.inf


def block(spec: list[float | None]) -> tuple[list[int], list[int], list[float]]:
    """Make a block: ``None`` is an exact match, a number is a mismatch of that regret."""
    draft = [1 if regret is None else 2 for regret in spec]
    return draft, [1] * (len(spec) + 1), [0.0 if regret is None else regret for regret in spec]


# (block, s, B, g, M) -> (a, C, N, verdict)
CASES = [
    ([None, None, None], 0.0, 0.0, 0.0, 0, (3, 0.0, 0, rule.ACCEPT)),
    ([None, 0.0, None], 0.0, 0.0, 1e6, 3, (1, 0.0, 0, rule.BUDGET)),  # a tie is a mismatch, and B = 0 is strict
    ([None, 0.0, None], 0.25, 0.25, 10.0, 2, (3, 0.0, 1, rule.ACCEPT)),  # budget used up: a tie costs nothing
    ([0.0, 0.1, None], 0.0, 9.0, 9.0, 1, (1, 0.0, 1, rule.CAP)),  # a tie counts against the cap
    ([0.0, None, None], 0.0, 1.0, 0.0, 1, (3, 0.0, 1, rule.ACCEPT)),  # g = 0 lets ties pass
    ([0.2500000005, None, None], 0.0, 0.25, 9.0, 1, (0, 0.0, 0, rule.BUDGET)),  # no tolerance
    ([0.7, None, None], 0.0, 9.0, 0.25, 1, (3, 0.7, 1, rule.ACCEPT)),  # .7 / 3 <= .25
    ([None, None, 0.7], 0.0, 9.0, 0.25, 1, (2, 0.0, 0, rule.GATE)),  # .7 / 1 > .25
    ([1.0, None, 1.0, 1.0], 0.0, 2.0, INF, INF, (3, 2.0, 2, rule.BUDGET)),
    ([1.0, None, 1.0, 1.0], 0.0, INF, INF, INF, (4, 3.0, 3, rule.ACCEPT)),
    ([], 0.0, 8.0, 1.0, 2, (0, 0.0, 0, rule.ACCEPT)),
]


@pytest.mark.parametrize(("spec", "spent", "B", "g", "M", "expected"), CASES)
def test_decides_by_definition(spec, spent, B, g, M, expected):
    assert rule.decide(*block(spec), len(spec), spent, B, g, float(M)) == expected
    draft, choice, regret = block(spec)
    assert reference.accepted_length(reference.Block((), draft, choice, regret), spent, B, g, M) == expected[0]


def test_mismatches_behind_the_reach_are_neither_accepted_nor_charged():
    draft, choice, regret = block([1.0, None, 1.0, 1.0])
    assert rule.decide(draft, choice, regret, 2, 0.0, INF, INF, INF) == (2, 1.0, 1, rule.ACCEPT)


def test_budget_adds_the_block_to_what_was_spent():
    # s + r <= B and r <= B - s are not the same in floats; the paper's semantics is the former.
    spent, regret, budget = 0.1, 0.2, 0.3
    assert spent + regret > budget and not regret > budget - spent + 1e-12
    assert rule.decide(*block([regret]), 1, spent, budget, INF, 1.0)[0] == 0


@pytest.mark.parametrize("regret", [math.nan, INF, -0.5])
def test_refuses_what_is_no_regret(regret):
    with pytest.raises(ValueError, match="position 1 is not a finite number"):
        rule.decide(*block([None, regret]), 2, 0.0, 8.0, 1.0, 1.0)


def test_a_judge_refuses_nan():
    assert rule.judge_paper(math.nan, 0.0, math.nan, 1, 0.0, INF, INF, INF) == rule.GATE


def test_core_adds_its_tolerance_to_what_is_left():
    """C <= (B - s) + 1e-9 in this order: s + C <= B + 1e-9 would accept this mismatch."""
    spent, budget, regret = 0.12, 1.0, 0.8800000010000001
    assert spent + regret <= budget + 1e-9 and not regret <= (budget - spent) + 1e-9
    assert rule.decide(*block([regret]), 1, spent, budget, INF, 1.0, "core") == (0, 0.0, 0, rule.BUDGET)
    assert rule.decide(*block([0.88]), 1, spent, budget, INF, 1.0, "core") == (1, 0.88, 1, rule.ACCEPT)


def test_a_block_ledger_knows_nothing_of_blocks_before():
    judge = rule.judge_of(rule.Reading("paper", "block"))
    assert judge(0.1, 0.0, 1.0, 1, 5.0, 1.0, INF, INF) == rule.ACCEPT
    assert rule.judge_paper(0.1, 0.0, 1.0, 1, 5.0, 1.0, INF, INF) == rule.BUDGET
