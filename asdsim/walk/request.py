"""One request under one setting: the walk, in scalar Python, compiled for CPU and for CUDA.

Per step only mismatches are visited. ``accept_block`` decides; the edge that its outcome names says how many tokens are
committed and where the walk stands next.
"""

from ..rules.asd import accept_block, settle

STEPS, DRAFTED, ACCEPTED, TOKENS, RELAXED, BY_GATE, BY_BUDGET, BY_CAP, LEFT = range(9)
"""Columns of the counts that one walk fills. ``LEFT`` counts edges that were not captured; 0 means an exact walk."""

NUM_COUNTS = 9

STOP, ALIGNED, RECORDED = 0, 1, 2
"""What happens at an edge that was not captured."""

REFUSAL_BITS = 20
"""Bits of each of the three counts of refused blocks that a walk keeps in one number, to spare registers."""


def go_on(off_trace, request, steps, tokens, path_ptr, path_step, align_ptr, align_step):  # type: ignore[no-untyped-def]
    """Return the step at which a walk goes on that met an edge which was not captured, -1 for none.

    ``steps`` and ``tokens`` are what the walk has behind it.
    """
    if off_trace == RECORDED:
        nth = path_ptr[request] + steps
        if nth < path_ptr[request + 1]:
            return path_step[nth]
    elif off_trace == ALIGNED:
        near = align_ptr[request] + tokens
        if near < align_ptr[request + 1]:
            return align_step[near]
    return -1


def walk_request(  # type: ignore[no-untyped-def]
    request, budget, gate, cap, off_trace,
    root, limit, drafted, mm_ptr, mm_pos, mm_score, mm_charge, edge_next, edge_accepted, edge_tokens,
    path_ptr, path_step, align_ptr, align_step, histogram,
):  # fmt: skip
    """Walk one request from its root.

    ``histogram`` (int32, largest K + 1, steps by accepted draft tokens) is added to and must be zero before.

    Returns
    -------
    spent : float
        The ledger at the end, in the unit of ``mm_charge``.
    edge : int
        The last edge: the whole output where the walk is exact, the first edge that is not captured where
        ``off_trace`` is ``STOP`` and one was met; -1 for a request without steps.
    steps, offered, taken, tokens, relaxed, refused, left : int
        The counts, in the order of the columns above; ``refused`` is three in one, see :func:`refusals`.
    """
    spent = 0.0
    edge = -1
    steps, offered, taken, tokens, relaxed, refused, left = 0, 0, 0, 0, 0, 0, 0
    step = root[request]
    while step >= 0:
        lo = mm_ptr[step]
        hi = mm_ptr[step + 1]
        room = limit[request] - tokens
        outcome, charge, count, verdict = accept_block(
            mm_pos, mm_score, mm_charge, lo, hi, room, spent, budget, gate, cap
        )
        spent = settle(spent, charge)
        edge = lo + step + outcome
        # Off the captured path a step may be met later than where it was recorded, with less room under the limit.
        accepted = min(edge_accepted[edge], room)
        committed = min(edge_tokens[edge], room)
        steps += 1
        offered += drafted[step]
        taken += accepted
        tokens += committed
        relaxed += count
        refused += (1 << (REFUSAL_BITS * verdict)) >> REFUSAL_BITS
        histogram[accepted] += 1
        step = edge_next[edge]
        if tokens >= limit[request]:
            step = -1
        if step == -2:
            left += 1
            step = go_on(off_trace, request, steps, tokens, path_ptr, path_step, align_ptr, align_step)
    return spent, edge, steps, offered, taken, tokens, relaxed, refused, left


def refusals(refused, verdict):  # type: ignore[no-untyped-def]
    """Return how many blocks a verdict (``GATE``, ``BUDGET`` or ``CAP``) ended, from the packed count of a walk."""
    return (refused >> (REFUSAL_BITS * (verdict - 1))) & ((1 << REFUSAL_BITS) - 1)
