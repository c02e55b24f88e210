"""One walk in detail: which steps it met, how each ended, and how close it came to a near-tie."""

from __future__ import annotations

from dataclasses import dataclass

from ..rules import asd as rule
from ..rules.settings import Policy
from ..trace.graph import MISSING, Graph


@dataclass(frozen=True)
class Visit:
    """One step of a walk.

    Attributes
    ----------
    step : int
        Row of the step.
    edge : int
        Edge taken.
    spent : float
        Ledger before the step, in the unit of the regret: logits, or probability.
    accepted, tokens : int
        Draft tokens accepted and tokens committed.
    closeness : float
        Smallest distance between what the rule compared and where its decision would flip: over the mismatches looked
        at, of regret to gate x suffix value and to what is left of the budget. It has the unit of the regret: logits,
        from 0 up, or under ``regret="probability"`` differences of probability, which are at most 1 for one mismatch
        and small where the target is unsure; under another rule than ASD, the unit of its score. ``inf`` where no
        mismatch was looked at. The target's own margins are another matter: see ``Graph.step_margin``.
    """

    step: int
    edge: int
    spent: float
    accepted: int
    tokens: int
    closeness: float


def path_of(graph: Graph, policy: Policy, request: int) -> tuple[list[Visit], bool]:
    """Walk one request under one setting.

    Returns
    -------
    visits : list of Visit
    exact : bool
        Whether every prefix met was captured.
    """
    block = rule.bind(rule.accept_block, judge=rule.JUDGES[policy.semantics])
    settle = rule.settle_of(policy.semantics)
    visits: list[Visit] = []
    spent, tokens, step = 0.0, 0, int(graph.root[request])
    while step >= 0:
        lo, hi = int(graph.mm_ptr[step]), int(graph.mm_ptr[step + 1])
        room = int(graph.limit[request]) - tokens
        outcome, charge, _, _ = block(
            graph.mm_pos, graph.mm_score, graph.mm_charge, lo, hi, room, spent, policy.budget, policy.gate, policy.cap
        )
        edge = lo + step + outcome
        close = float("inf")
        if policy.budget > 0.0 or policy.semantics.startswith("lightllm"):  # which is never strict
            total = 0.0
            for j in range(lo, min(hi, lo + outcome + 1)):
                score, regret = float(graph.mm_score[j]), float(graph.mm_charge[j])
                # Regret per score is q; another rule's score is compared with its limit as it is.
                value = regret / score if policy.layout.rule == "asd" and score > 0.0 else 1.0
                close = min(close, abs(score - policy.gate) * value, abs(spent + total + regret - policy.budget))
                total += regret
        visits.append(Visit(step, edge, spent, int(graph.edge_accepted[edge]), int(graph.edge_tokens[edge]), close))
        spent = settle(spent, charge)
        tokens += int(graph.edge_tokens[edge])
        step = int(graph.edge_next[edge])
    return visits, step != MISSING
