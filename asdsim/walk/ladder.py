"""A trace laid out at several draft lengths at once: one rung for each.

A step belongs to a token prefix, whatever its draft length, so all rungs have the same steps and a walk may change the
rung at every step. Row ``n * base + s`` is step s on rung n; an edge leads to a step, and who walks picks the rung::

    K = 5   [ step 0 ][ step 1 ][ step 2 ] ..      rows 0 .. base - 1
    K = 1   [ step 0 ][ step 1 ][ step 2 ] ..      rows base .. 2 base - 1
                  |_______edge_______|             to a step, on whichever rung

Which walk it is depends on the batches that a request meets; :func:`demand_of_all` asks for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from ..rules import asd as rule
from ..rules.scoring import NO_DRAFT, Layout
from ..rules.settings import Grid
from ..trace.graph import END, MISSING, Graph, build_graph
from .demand import Demand

if TYPE_CHECKING:
    from ..records import StepTables


@dataclass(frozen=True)
class Ladder(Graph):
    """A graph whose steps stand there once for each draft length.

    Attributes
    ----------
    lengths : tuple of int
        Draft length of each rung; 0 verifies no draft token.
    base : int
        Steps of a rung. ``root``, ``edge_next`` and all that names a step count within it.
    """

    lengths: tuple[int, ...]
    base: int

    def edge_of(self, edge: int) -> tuple[int, int]:
        """Return (step, outcome) of an edge; the step without its rung."""
        row, outcome = super().edge_of(edge)
        return row % self.base, outcome


def ladder_of(trace: StepTables, layout: Layout, lengths: Sequence[int]) -> Ladder:
    """Lay out a trace at every draft length.

    Raises
    ------
    TraceError
        As :func:`asdsim.trace.graph.build_graph`.
    """
    rungs = [build_graph(trace, replace(layout, width=length or NO_DRAFT)) for length in lengths]
    first = rungs[0]
    joined = {
        field.name: np.concatenate([getattr(rung, field.name) for rung in rungs])
        for field in fields(Graph)
        if field.name in ("drafted", "proposed", "start", "step_request") or field.name.startswith(("mm_", "edge_"))
    }
    ends = np.cumsum([0, *(int(rung.mm_ptr[-1]) for rung in rungs)])
    joined["mm_ptr"] = np.concatenate([
        *(rung.mm_ptr[:-1] + end for rung, end in zip(rungs, ends[:-1], strict=True)), ends[-1:],
    ]).astype(np.int64)  # fmt: skip
    same = {field.name: getattr(first, field.name) for field in fields(Graph)}
    return Ladder(**{
        **same, **joined, "max_draft": max(rung.max_draft for rung in rungs), "lengths": tuple(lengths),
        "base": first.num_steps,
    })  # fmt: skip


def demand_of_all(ladder: Ladder, grid: Grid) -> Demand:
    """Return what walks lack that take any draft length of the ladder at any step.

    ``exact`` counts the settings under which no such walk of a request leaves the trace: whatever batches it meets, it
    is exact. ``steps`` counts the steps that they meet, each ledger once.
    """
    block = rule.bind(rule.accept_block, judge=rule.judge_of(grid.reading))
    settle = rule.settle_of(grid.semantics)
    pointer, position, score, charge, following = (
        getattr(ladder, name).tolist() for name in ("mm_ptr", "mm_pos", "mm_score", "mm_charge", "edge_next")
    )
    limit, start, rungs = ladder.limit.tolist(), ladder.start.tolist(), range(len(ladder.lengths))
    exact, steps = (np.zeros(ladder.num_requests, np.int64) for _ in range(2))
    weight: dict[int, int] = {}
    for setting in range(len(grid)):
        policy = grid.policy(setting)
        for request, root in enumerate(ladder.root.tolist()):
            missing: set[int] = set()
            met = {(root, 0.0)} if root != END else set()
            ahead = list(met)
            while ahead:
                step, spent = ahead.pop()
                room = limit[request] - start[step]
                for rung in rungs:
                    row = rung * ladder.base + step
                    lo = pointer[row]
                    outcome, cost, _, _ = block(
                        position, score, charge, lo, pointer[row + 1], room, spent, policy.budget, policy.gate,
                        policy.cap,
                    )  # fmt: skip
                    edge = lo + row + outcome
                    state = following[edge], settle(spent, cost)
                    if state[0] == MISSING:
                        missing.add(edge)
                    elif state[0] != END and state not in met:
                        met.add(state)
                        ahead.append(state)
            steps[request] += len(met)
            exact[request] += not missing
            for edge in missing:
                weight[edge] = weight.get(edge, 0) + 1
    order = sorted(weight)
    return Demand(np.array(order, np.int64), np.array([weight[edge] for edge in order], np.int64), exact, steps)
