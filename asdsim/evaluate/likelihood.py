"""What the target says of whole outputs: log-probability, shortfall, and how outputs part.

A step is a prefix, so the last edge of an exact walk names the output, and its log-probability is that of the tokens
before the step plus that of the tokens that the edge commits. Each edge is summed once; any number of settings then
look it up.

**Certificate.** At a prefix, the target's best token has log-probability max z - logsumexp and the token taken z -
logsumexp. Their difference is the regret: 0 for a token that is the target's choice, r for a relaxed one. Summed over
an output, the shortfall against the per-step maxima *on its own prefixes* is therefore the ledger, and B bounds it: an
output under budget B has at least exp(-B) times the probability that greedy choices on the same prefixes would have. It
says nothing about how likely the strict output is, which stands on other prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..records import FORBIDDEN_LOGIT
from ..trace.graph import Graph
from ..trace.tokens import edge_tokens, parent_rows

if TYPE_CHECKING:
    from ..records import StepTables

Floats = npt.NDArray[np.float64]


@dataclass
class EdgeTable:
    """Sums over the generated tokens up to and with those of each edge.

    Attributes
    ----------
    logprob : float64 (E,)
        Natural log-probability of the tokens under the target, greedy rows taken as they were recorded, in nats.
    best : float64 (E,)
        The same sum with the target's choice at every position in place of the token taken.
    """

    trace: StepTables
    graph: Graph
    logprob: Floats
    best: Floats

    @property
    def shortfall(self) -> Floats:
        """``best - logprob``, in nats: equal to the ledger under ASD's regret in logits."""
        return self.best - self.logprob

    def output(self, edge: int) -> bytes:
        """Return the generated tokens up to and with an edge, as little-endian int32; empty for edge -1."""
        if edge < 0:
            return b""
        return np.array(edge_tokens(self.trace, self.graph, edge), "<i4").tobytes()


def edge_table(trace: StepTables, graph: Graph) -> EdgeTable:
    """Sum log-probabilities along the recorded steps.

    Parameters
    ----------
    trace, graph
        A trace and its layout, of any rule.
    """
    pos_ptr = trace.pos_ptr
    draft_logit = trace.column("positions", "draft_logit").astype(np.float64)
    total = trace.column("positions", "logsumexp").astype(np.float64)
    top = trace.column("positions", "top_logits")[:, 0].astype(np.float64) if len(total) else np.zeros(0)
    best_row = top - total
    # Bonus rows hold no draft, and a token that the target rules out is never accepted: neither is ever summed.
    usable = np.isfinite(draft_logit) & (draft_logit != FORBIDDEN_LOGIT)
    draft_row = np.where(usable, draft_logit - total, 0.0)
    of_draft = np.concatenate([[0.0], np.cumsum(draft_row)])
    of_best = np.concatenate([[0.0], np.cumsum(best_row)])
    steps = graph.num_steps
    parent = parent_rows(trace)
    taken = trace.column("steps", "parent_accepted").astype(np.int64)
    before_logprob, before_best = np.zeros(steps), np.zeros(steps)
    for step in range(steps):  # parents come first
        up = int(parent[step])
        if up >= 0:
            row, end = int(pos_ptr[up]), int(pos_ptr[up] + taken[step])
            before_logprob[step] = before_logprob[up] + (of_draft[end] - of_draft[row]) + best_row[end]
            before_best[step] = before_best[up] + (of_best[end + 1] - of_best[row])
    counts = np.diff(graph.mm_ptr) + 1
    step_of = np.repeat(np.arange(steps), counts)
    begin, accepted = pos_ptr[:-1][step_of], graph.edge_accepted.astype(np.int64)
    corrected = graph.edge_tokens > graph.edge_accepted
    last = np.minimum(begin + accepted, max(len(best_row) - 1, 0))
    extra = np.where(corrected, best_row[last], 0.0) if len(best_row) else np.zeros(0)
    logprob = before_logprob[step_of] + of_draft[begin + accepted] - of_draft[begin] + extra
    best = before_best[step_of] + of_best[begin + accepted] - of_best[begin] + extra
    return EdgeTable(trace, graph, logprob, best)


def apart(strict: bytes, other: bytes) -> tuple[int, float]:
    """Return where two outputs part and how far they are apart.

    Returns
    -------
    first : int
        First generated token that differs; the length of the shorter one where it is a beginning of the other; -1 where
        the outputs are equal.
    distance : float
        Levenshtein distance over tokens, divided by the longer length: 0 equal, 1 nothing in common.
    """
    if strict == other:
        return -1, 0.0
    from rapidfuzz.distance import Levenshtein

    a, b = (np.frombuffer(part, "<i4") for part in (strict, other))
    shared = min(len(a), len(b))
    differ = np.flatnonzero(a[:shared] != b[:shared])
    distance = Levenshtein.normalized_distance(a.tolist(), b.tolist())
    return int(differ[0]) if len(differ) else shared, float(distance)
