"""The walk on a graph, whole regions of a grid at a time.

On a product grid the settings that have decided alike so far form boxes: a range of gates, a range of caps and a range
of budgets. A box stands on one step with one ledger, so a mismatch is judged once for all of it: the gate cuts it at
one index, the budget at another, the cap at a third, and each part that is refused goes on as a box of its own. The
work follows the number of different behaviours, not the number of settings. Prefixes form a tree, so boxes that parted
never meet again on the trace; what would merge is at most the parts of one box that different constraints refuse, and
they stay apart for the count of who refused.

The cuts are found by asking the judge, so floats decide exactly as in the scalar walk: a judge's answer can turn once
along each axis, from refused to accepted (held by tests/twins/test_judges.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..rules import asd as rule
from ..rules.asd import ACCEPT, BUDGET, CAP, GATE, Reading, judge, settle
from .compiled import compile_cached, compiled_rule, helper, named, python_rule
from .request import (
    ACCEPTED,
    BY_BUDGET,
    BY_CAP,
    BY_GATE,
    DRAFTED,
    LEFT,
    NUM_COUNTS,
    RELAXED,
    STEPS,
    STOP,
    TOKENS,
    go_on,
)

KEPT, EXACT, BASE_STEPS, BASE_ACCEPTED, BASE_TOKENS, LOST_STEPS, LOST_TOKENS = range(NUM_COUNTS, NUM_COUNTS + 7)
"""Columns of the sums behind those of one walk: requests that count, requests whose walk is exact; strict matching over
the requests that count and whose strict walk is exact; and what this setting did on those whose strict walk is not."""

HISTOGRAM = NUM_COUNTS + 7
"""First column of the histogram."""

# Rows of a waiting box: where it stands, its ranges, what the step that it stands on has decided.
STEP, G_LO, G_HI, C_LO, C_HI, B_LO, B_HI, OUTCOME, COUNT, VERDICT = range(10)
BOX_ROWS = 10


def waiting(boxes, spent_at, total_at, counts, top, step, g_lo, g_hi, c_lo, c_hi, b_lo, b_hi,  # type: ignore[no-untyped-def]
            outcome, count, verdict, spent, total, width):  # fmt: skip
    """Leave a box waiting at ``top``, decided as far as this step goes; the box in hand moves up with its counts."""
    boxes[top, STEP] = step
    boxes[top, G_LO] = g_lo
    boxes[top, G_HI] = g_hi
    boxes[top, C_LO] = c_lo
    boxes[top, C_HI] = c_hi
    boxes[top, B_LO] = b_lo
    boxes[top, B_HI] = b_hi
    boxes[top, OUTCOME] = outcome
    boxes[top, COUNT] = count
    boxes[top, VERDICT] = verdict
    spent_at[top] = spent
    total_at[top] = total
    for k in range(width):
        counts[top + 1, k] = counts[top, k]


def paint(  # type: ignore[no-untyped-def]
    sums, spent_of, counts, top, request, spent, keep, strict, g_lo, g_hi, c_lo, c_hi, b_lo, b_hi, corners,
    figures,
):  # fmt: skip
    """Add the counts of a box that has ended to all its settings."""
    if keep:
        counts[top, KEPT] = 1
        counts[top, EXACT] = 1 if counts[top, LEFT] == 0 else 0
        if strict[request, 0] > 0:
            counts[top, BASE_STEPS] = strict[request, 1]
            counts[top, BASE_ACCEPTED] = strict[request, 2]
            counts[top, BASE_TOKENS] = strict[request, 3]
        else:
            counts[top, LOST_STEPS] = counts[top, STEPS]
            counts[top, LOST_TOKENS] = counts[top, TOKENS]
    ledger = spent if keep else -1.0
    for g in range(g_lo, g_hi):
        for c in range(c_lo, c_hi):
            for b in range(b_lo, b_hi):
                spent_of[request, g, c, b] = ledger
    if not keep:
        return
    if corners:
        for g, g_sign in ((g_lo, 1), (g_hi, -1)):
            for c, c_sign in ((c_lo, g_sign), (c_hi, -g_sign)):
                for f in range(figures):
                    value = counts[top, f] * c_sign
                    sums[g, c, b_lo, f] += value
                    sums[g, c, b_hi, f] -= value
    else:
        for g in range(g_lo, g_hi):
            for c in range(c_lo, c_hi):
                for b in range(b_lo, b_hi):
                    for f in range(figures):
                        sums[g, c, b, f] += counts[top, f]


def walk_boxes(  # type: ignore[no-untyped-def]
    requests, budgets, gates, caps, cap_from, gate_from, off_trace, strict, root, limit,
    drafted, mm_ptr, mm_pos, mm_score, mm_before, mm_charge, edge_next, edge_accepted, edge_tokens,
    path_ptr, path_step, align_ptr, align_step, boxes, spent_at, total_at, counts, corners, sums, spent_of,
):  # fmt: skip
    """Walk some requests under every combination of budgets, gates and caps.

    Parameters
    ----------
    requests : int64
        Which.
    budgets, gates, caps : float64
        Ascending.
    cap_from : int64 (K + 2,)
        Index of the first cap that allows ``n`` relaxed tokens in a block.
    gate_from : int32 (m,)
        Index of the first gate that lets a mismatch pass.
    strict : int32 (R, 4)
        Of strict matching: whether its walk is exact; its steps, accepted draft tokens and tokens.
    mm_before, mm_charge : float64 (m,)
        Block charge without and with a mismatch, all before it accepted.
    boxes, spent_at, total_at, counts
        Room for waiting boxes: int64 (n, ``BOX_ROWS``), float64 (n,), float64 (n,), int32 (n, figures), see
        :func:`room_for`.
    corners : bool
        Whether ``sums`` are differences along all three axes, so that a box is added at its corners: less work for
        boxes of many settings.
    sums : int32 (gates, caps, budgets, HISTOGRAM + K + 1), out
        Added to; with ``corners`` one longer along each axis but the last.
    spent_of : float64 (R, gates, caps, budgets), out
        Ledgers; -1 where the request does not count.

    Returns
    -------
    int
        Steps of boxes that were walked.
    """
    figures = sums.shape[3]
    walked = 0
    for place in range(requests.shape[0]):
        request = requests[place]
        for k in range(figures):
            counts[0, k] = 0
        boxes[0, STEP] = root[request]
        boxes[0, G_LO], boxes[0, G_HI] = 0, gates.shape[0]
        boxes[0, C_LO], boxes[0, C_HI] = 0, caps.shape[0]
        boxes[0, B_LO], boxes[0, B_HI] = 0, budgets.shape[0]
        boxes[0, OUTCOME] = -1
        spent_at[0] = 0.0
        top = 0
        while top >= 0:
            step = boxes[top, STEP]
            g_lo, g_hi = boxes[top, G_LO], boxes[top, G_HI]
            c_lo, c_hi = boxes[top, C_LO], boxes[top, C_HI]
            b_lo, b_hi = boxes[top, B_LO], boxes[top, B_HI]
            outcome, count, verdict = boxes[top, OUTCOME], boxes[top, COUNT], boxes[top, VERDICT]
            spent, total = spent_at[top], total_at[top]
            while step >= 0:
                walked += 1
                lo, hi = mm_ptr[step], mm_ptr[step + 1]
                room = limit[request] - counts[top, TOKENS]
                if outcome < 0:
                    outcome, count, verdict, total = hi - lo, 0, ACCEPT, 0.0
                    for j in range(lo, hi):
                        if mm_pos[j] >= room:
                            break
                        cut = gate_from[j]
                        if cut >= g_hi:
                            outcome, verdict = j - lo, GATE
                            break
                        if cut > g_lo:
                            waiting(boxes, spent_at, total_at, counts, top, step, g_lo, cut, c_lo, c_hi, b_lo, b_hi,
                                    j - lo, count, GATE, spent, total, figures)  # fmt: skip
                            top += 1
                            g_lo = cut
                        score, before, charge = mm_score[j], mm_before[j], mm_charge[j]
                        gate, cap = gates[g_lo], caps[c_hi - 1]
                        if judge(score, before, charge, count + 1, spent, budgets[b_lo], gate, cap) == BUDGET:
                            cut, end = b_lo + 1, b_hi
                            while cut < end:
                                middle = (cut + end) // 2
                                if judge(score, before, charge, count + 1, spent, budgets[middle], gate, cap) == BUDGET:
                                    cut = middle + 1
                                else:
                                    end = middle
                            if cut == b_hi:
                                outcome, verdict = j - lo, BUDGET
                                break
                            waiting(boxes, spent_at, total_at, counts, top, step, g_lo, g_hi, c_lo, c_hi, b_lo, cut,
                                    j - lo, count, BUDGET, spent, total, figures)  # fmt: skip
                            top += 1
                            b_lo = cut
                        cut = cap_from[count + 1]
                        if cut >= c_hi:
                            outcome, verdict = j - lo, CAP
                            break
                        if cut > c_lo:
                            waiting(boxes, spent_at, total_at, counts, top, step, g_lo, g_hi, c_lo, cut, b_lo, b_hi,
                                    j - lo, count, CAP, spent, total, figures)  # fmt: skip
                            top += 1
                            c_lo = cut
                        total = charge
                        count += 1
                spent = settle(spent, total)
                edge = lo + step + outcome
                accepted = min(edge_accepted[edge], room)
                committed = min(edge_tokens[edge], room)
                counts[top, STEPS] += 1
                counts[top, DRAFTED] += drafted[step]
                counts[top, ACCEPTED] += accepted
                counts[top, TOKENS] += committed
                counts[top, RELAXED] += count
                if verdict == GATE:
                    counts[top, BY_GATE] += 1
                elif verdict == BUDGET:
                    counts[top, BY_BUDGET] += 1
                elif verdict == CAP:
                    counts[top, BY_CAP] += 1
                counts[top, HISTOGRAM + accepted] += 1
                step = edge_next[edge]
                outcome = -1
                if committed == room:
                    step = -1
                if step == -2:
                    counts[top, LEFT] += 1
                    step = go_on(
                        off_trace, request, counts[top, STEPS], counts[top, TOKENS],
                        path_ptr, path_step, align_ptr, align_step,
                    )  # fmt: skip
            keep = off_trace != STOP or counts[top, LEFT] == 0
            paint(
                sums, spent_of, counts, top, request, spent, keep, strict, g_lo, g_hi, c_lo, c_hi, b_lo, b_hi, corners,
                figures,
            )  # fmt: skip
            for k in range(KEPT, HISTOGRAM):
                counts[top, k] = 0
            top -= 1
    return walked


def store(sums, corners, at, counts, histogram, kept, exact, base, same):  # type: ignore[no-untyped-def]
    """Write the sums of a tile to where its settings stand: ``at`` int64 (gates, caps, budgets).

    Makes sums of differences first where ``corners`` says so, in place. The other arrays as in
    :class:`asdsim.walk.product.Sums`.
    """
    num_gates, num_caps, num_budgets = at.shape
    figures = sums.shape[3]
    if corners:
        for g in range(num_gates):
            for c in range(num_caps):
                for b in range(1, num_budgets):
                    for f in range(figures):
                        sums[g, c, b, f] += sums[g, c, b - 1, f]
                for b in range(num_budgets):
                    if c > 0:
                        for f in range(figures):
                            sums[g, c, b, f] += sums[g, c - 1, b, f]
            # Rows of this gate hold sums along budgets and caps; only now along the gates, from the last cap down
            for c in range(num_caps if g > 0 else 0):
                for b in range(num_budgets):
                    for f in range(figures):
                        sums[g, c, b, f] += sums[g - 1, c, b, f]
    # In blocks, so that neither side jumps through memory: a grid runs over its caps first, a tile over its budgets.
    for b_lo in range(0, num_budgets, 8):
        for g_lo in range(0, num_gates, 64):
            for b in range(b_lo, min(b_lo + 8, num_budgets)):
                for g in range(g_lo, min(g_lo + 64, num_gates)):
                    for c in range(num_caps):
                        setting = at[g, c, b]
                        for f in range(NUM_COUNTS):
                            counts[f, setting] += sums[g, c, b, f]
                        for a in range(HISTOGRAM, figures):
                            histogram[setting, a - HISTOGRAM] += sums[g, c, b, a]
                        kept[setting] += sums[g, c, b, KEPT]
                        exact[setting] += sums[g, c, b, EXACT]
                        base[0, setting] += sums[g, c, b, BASE_STEPS]
                        base[1, setting] += sums[g, c, b, BASE_ACCEPTED]
                        base[2, setting] += sums[g, c, b, BASE_TOKENS]
                        same[0, setting] += sums[g, c, b, STEPS] - sums[g, c, b, LOST_STEPS]
                        same[1, setting] += sums[g, c, b, TOKENS] - sums[g, c, b, LOST_TOKENS]


HELPERS = (go_on, waiting, paint)


def room_for(settings: int, largest: int, limit: int) -> int:
    """Return how many boxes may wait at once: one for each setting, or for each cut of one walk, whichever is less."""
    return min(settings, 3 * max(1, largest) * max(1, limit)) + 4


@cache
def kernel(reading: Reading) -> Any:
    """Return ``walk_boxes`` compiled for one reading."""
    import numba

    names = compiled_rule(reading)
    for function in HELPERS:
        names[function.__name__] = helper(named(rule.bind(function), "all"))
    return compile_cached(numba.njit, named(rule.bind(walk_boxes, **names), reading), nogil=True, _nrt=False)


@cache
def store_kernel() -> Any:
    """Return ``store`` compiled."""
    import numba

    return compile_cached(numba.njit, named(rule.bind(store), "all"), nogil=True, _nrt=False)


def python_kernel(reading: Reading) -> Any:
    """Return the same sources as plain Python, for tests."""
    return rule.bind(walk_boxes, **python_rule(reading))
