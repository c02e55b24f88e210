"""One request under one setting: the walk, in scalar Python, compiled for CPU and for CUDA.

Per step only mismatches are visited. ``accept_block`` decides; the edge that its outcome names says how many tokens are
committed and where the walk stands next.
"""

from ..rules.asd import accept_block, settle
from ..trace.graph import END, MISSING

STEPS, DRAFTED, ACCEPTED, TOKENS, RELAXED, BY_GATE, BY_BUDGET, BY_CAP, LEFT = range(9)
"""Columns of the counts that one walk fills. ``LEFT`` counts edges off the trace; 0 means an exact walk."""

NUM_COUNTS = 9

KEPT, EXACT, PAIRED, BASE_STEPS, BASE_ACCEPTED, BASE_TOKENS, LOST_STEPS, LOST_TOKENS, HISTOGRAM = range(NUM_COUNTS, 18)
"""Columns behind those, of sums over requests: requests that count, requests whose walk is exact, requests that count
and whose strict walk is exact; strict matching over those; what this setting did on the others that count; and the
first of the K + 1 columns of steps by accepted draft tokens."""

STRICT_EXACT, STRICT_STEPS, STRICT_ACCEPTED, STRICT_TOKENS = range(4)
"""Columns of what is known of a request's strict walk: whether it is exact, and its counts."""

STOP, ALIGNED, RECORDED = 0, 1, 2
"""What happens at an edge that was not captured."""

REFUSAL_BITS = 20
"""Bits of each of the three counts of refused blocks that a walk keeps in one number, to spare registers."""


def go_on(graph, off_trace, request, steps, tokens):
    """Return the step at which a walk goes on that met an edge which was not captured, ``END`` for none.

    ``steps`` and ``tokens`` are what the walk has behind it.
    """
    if off_trace == RECORDED:
        nth = graph.path_ptr[request] + steps
        if nth < graph.path_ptr[request + 1]:
            return graph.path_step[nth]
    elif off_trace == ALIGNED:
        near = graph.align_ptr[request] + tokens
        if near < graph.align_ptr[request + 1]:
            return graph.align_step[near]
    return END


def walk_request(graph, request, budget, gate, cap, off_trace, step, steps, tokens, spent, histogram):
    """Walk one request on from a step, with ``steps`` and ``tokens`` behind it and ``spent`` in the ledger.

    ``graph`` is a :class:`asdsim.trace.graph.GraphArrays`. ``histogram`` (int32, largest K + 1, steps by accepted draft
    tokens) is added to.

    Returns
    -------
    spent : float
        The ledger at the end, in the unit of ``mm_charge``.
    edge : int
        The last edge: the whole output where the walk is exact, the first edge that is not captured where
        ``off_trace`` is ``STOP`` and one was met; -1 where no step was walked.
    steps, offered, taken, tokens, relaxed, refused, left : int
        The counts, in the order of the columns above: ``steps`` and ``tokens`` with those from before, the others of
        the steps walked here; ``refused`` is three in one, see :func:`refusals`.
    """
    edge = -1
    offered, taken, relaxed, refused, left = 0, 0, 0, 0, 0
    while step >= 0:
        lo = graph.mm_ptr[step]
        hi = graph.mm_ptr[step + 1]
        room = graph.limit[request] - tokens
        outcome, charge, count, verdict = accept_block(
            graph.mm_pos, graph.mm_score, graph.mm_charge, lo, hi, room, spent, budget, gate, cap
        )
        spent = settle(spent, charge)
        edge = lo + step + outcome
        # Off the captured path a step may be met later than where it was recorded, with less room under the limit.
        accepted = min(graph.edge_accepted[edge], room)
        committed = min(graph.edge_tokens[edge], room)
        steps += 1
        offered += graph.drafted[step]
        taken += accepted
        tokens += committed
        relaxed += count
        refused += (1 << (REFUSAL_BITS * verdict)) >> REFUSAL_BITS
        histogram[accepted] += 1
        step = graph.edge_next[edge]
        if tokens >= graph.limit[request]:
            step = END
        if step == MISSING:
            left += 1
            step = go_on(graph, off_trace, request, steps, tokens)
    return spent, edge, steps, offered, taken, tokens, relaxed, refused, left


def refusals(refused, verdict):
    """Return how many blocks a verdict (``GATE``, ``BUDGET`` or ``CAP``) ended, from the packed count of a walk."""
    return (refused >> (REFUSAL_BITS * (verdict - 1))) & ((1 << REFUSAL_BITS) - 1)
