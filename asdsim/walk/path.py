"""One walk in detail: which steps it met, how each ended, and how close it came to a near-tie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..rules import asd as rule
from ..rules.settings import Policy
from ..trace.graph import END, MISSING, Graph
from .off_trace import off_trace_code
from .request import go_on


@dataclass(frozen=True)
class Visit:
    """One step of a walk.

    Attributes
    ----------
    step : int
        Row of the step.
    edge : int
        Edge taken.
    outcome : int
        Mismatches accepted before the block ended: the edge's place among those of its step.
    verdict : int
        What ended the block: ``GATE``, ``BUDGET`` or ``CAP``; ``ACCEPT`` where nothing was refused.
    charge, relaxed : float, int
        C and N of the block.
    spent, spent_after : float
        Ledger before and after the step, in the unit of the regret: logits, or probability.
    tokens_before : int
        Tokens committed by the steps before.
    accepted, tokens : int
        Draft tokens accepted and tokens committed.
    closeness : float
        Smallest distance between what the rule compared and where its decision would flip: over the mismatches looked
        at, of regret to gate x suffix value and to what is left of the budget. It has the unit of the regret: logits,
        from 0 up, or under ``regret="probability"`` differences of probability, which are at most 1 for one mismatch
        and small where the target is unsure; under another rule than ASD, the unit of its score. ``inf`` where no
        mismatch was looked at. The target's own margins are another matter: see ``Graph.edge_margin``.
    """

    step: int
    edge: int
    outcome: int
    verdict: int
    charge: float
    relaxed: int
    spent: float
    spent_after: float
    tokens_before: int
    accepted: int
    tokens: int
    closeness: float


class Path(NamedTuple):
    """The steps of a walk, and whether it is exact: every prefix that it met was captured."""

    visits: list[Visit]
    exact: bool


def visits(graph: Graph, policy: Policy, request: int, off_trace: str = "stop") -> Path:
    """Walk one request under one setting, step by step, as the kernels do.

    Parameters
    ----------
    graph : Graph
        Laid out under ``policy.layout``.
    policy : Policy
    request : int
        Row of the request.
    off_trace : {"stop", "aligned", "recorded"}
        Where to go on at an edge that was not captured. The steps behind the first such edge are an estimate.

    Raises
    ------
    UsageError
        On an unknown ``off_trace``.
    """
    mode = off_trace_code(off_trace)
    block = rule.bind(rule.accept_block, judge=rule.judge_of(policy.reading))
    settle = rule.settle_of(policy.semantics)
    met: list[Visit] = []
    exact = True
    limit = int(graph.limit[request])
    spent, tokens, step = 0.0, 0, int(graph.root[request])
    while step >= 0:
        lo, hi = int(graph.mm_ptr[step]), int(graph.mm_ptr[step + 1])
        room = limit - tokens
        outcome, charge, relaxed, verdict = block(
            graph.mm_pos, graph.mm_score, graph.mm_charge, lo, hi, room, spent, policy.budget, policy.gate, policy.cap
        )
        edge = lo + step + outcome
        after = settle(spent, charge)
        # Off the captured path a step may be met with less room under the limit than where it was recorded.
        accepted, committed = min(int(graph.edge_accepted[edge]), room), min(int(graph.edge_tokens[edge]), room)
        close = _closeness(graph, policy, spent, lo, min(hi, lo + outcome + 1))
        met.append(
            Visit(step, edge, outcome, verdict, charge, relaxed, spent, after, tokens, accepted, committed, close)
        )
        spent = after
        tokens += committed
        step = END if tokens >= limit else int(graph.edge_next[edge])
        if step == MISSING:
            exact = False
            step = int(go_on(graph, mode, request, len(met), tokens))
    return Path(met, exact)


def _closeness(graph: Graph, policy: Policy, spent: float, first: int, last: int) -> float:
    """Return how close the decisions about the mismatches ``first .. last - 1`` came to flip."""
    closest = float("inf")
    if policy.budget == 0.0 and policy.semantics != "lightllm":  # which is never strict
        return closest
    known = spent if policy.ledger == "request" else 0.0
    total = 0.0
    for j in range(first, last):
        score, regret = float(graph.mm_score[j]), float(graph.mm_charge[j])
        # Regret per score is q; another rule's score is compared with its limit as it is.
        value = regret / score if policy.layout.rule == "asd" and score > 0.0 else 1.0
        closest = min(closest, abs(score - policy.gate) * value, abs(known + total + regret - policy.budget))
        total += regret
    return closest
