"""The walk in detail adds up to what the kernels count, in every mode and to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from asdsim.errors import UsageError
from asdsim.records import MemoryTrace
from asdsim.rules.asd import ACCEPT, BUDGET, CAP, GATE
from asdsim.rules.settings import Grid, Policy
from asdsim.trace.graph import build_graph
from asdsim.walk import request as columns
from asdsim.walk.path import visits
from asdsim.walk.sweep import walk_grid
from tests.twins.cases import INF, MODES, cases, one_path, small_grid


def check(name: str, settings: Grid, mode: str) -> int:
    graph = build_graph(cases()[name], settings.layout)
    walks = walk_grid(graph, settings, off_trace=mode, device="cpu")
    left = 0
    for n in range(len(settings)):
        for r in range(graph.num_requests):
            met, exact = visits(graph, settings.policy(n), r, mode)
            counts = walks.counts[n, r]
            ended = [visit.verdict for visit in met]
            assert len(met) == counts[columns.STEPS]
            assert sum(int(graph.drafted[visit.step]) for visit in met) == counts[columns.DRAFTED]
            assert sum(visit.accepted for visit in met) == counts[columns.ACCEPTED]
            assert sum(visit.tokens for visit in met) == counts[columns.TOKENS]
            assert sum(visit.relaxed for visit in met) == counts[columns.RELAXED]
            for verdict, column in ((GATE, columns.BY_GATE), (BUDGET, columns.BY_BUDGET), (CAP, columns.BY_CAP)):
                assert ended.count(verdict) == counts[column]
            assert exact == walks.exact[n, r]
            assert (met[-1].edge if met else -1) == walks.edge[n, r]
            assert (met[-1].spent_after if met else 0.0) == walks.spent[n, r]
            tokens, spent = 0, 0.0
            for visit in met:
                assert (visit.tokens_before, visit.spent) == (tokens, spent)
                assert visit.edge == graph.mm_ptr[visit.step] + visit.step + visit.outcome
                tokens, spent = tokens + visit.tokens, visit.spent_after
            left += not exact
    return left


@pytest.mark.parametrize("mode", MODES)
def test_visits_add_up_to_the_counts_of_the_kernels(mode: str) -> None:
    assert sum(check(name, small_grid(), mode) for name in cases() if not name.startswith("K=16")) > 0


@pytest.mark.parametrize("semantics", ["core", "dspark", "lightllm"])
@pytest.mark.parametrize("ledger", ["request", "block"])
def test_every_reading(semantics: str, ledger: str) -> None:
    settings = Grid.product([0, 0.5, 1.3], [0.125, INF], [1, INF], semantics, ledger=ledger)
    for mode in MODES:
        check("arbitrary floats", settings, mode)


def test_a_walk_by_hand() -> None:
    """Two blocks: an EOS ends the request at its limit of 30; .25 of B = .5 is spent before the second mismatch."""
    graph = build_graph(cases()["eos inside a block"])
    [first] = visits(graph, Policy(0.5, 1.0, 2.0), 0).visits
    assert (first.verdict, first.outcome, first.relaxed, first.charge) == (ACCEPT, 1, 1, 0.25)
    assert (first.spent, first.spent_after, first.accepted, first.tokens) == (0.0, 0.25, 3, 3)
    refused, last = visits(graph, Policy(0.0, 1.0, 2.0), 0).visits
    assert (refused.verdict, refused.outcome, refused.accepted, refused.tokens) == (BUDGET, 0, 1, 2)
    assert (last.tokens_before, last.verdict, last.spent) == (2, BUDGET, 0.0)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"off-trace mode"):
        visits(build_graph(cases()["tie"]), Policy(0.0, 0.0, 0.0), 0, "pooled")


def test_the_ledger_is_a_float_of_the_rule() -> None:
    """Summed from left to right within a block and then added: .1 + .1 + .1 is not 3 x .1."""
    graph = build_graph(cases()["sums that round"])
    first = visits(graph, Policy(INF, INF, 3.0), 0).visits[0]
    regret = float(np.float32(2.0)) - float(np.float32(1.9))
    assert first.charge == regret + regret + regret


def test_closeness_knows_the_ledger_that_the_judge_knows() -> None:
    """.5 is spent before a mismatch of .25: under B = 1 it leaves .25 of the request's budget, .75 of the block's."""
    blocks = [([1], [2, 3], [0.5]), ([1], [2, 3], [0.25])]
    graph = build_graph(MemoryTrace([one_path(blocks, limit=9, stop="fixed")]))
    for ledger, left in (("request", 0.25), ("block", 0.75)):
        first, second = visits(graph, Policy(1.0, INF, INF, ledger=ledger), 0, "recorded").visits
        assert (first.closeness, second.spent, second.closeness) == (0.5, 0.5, left)
