"""The walk on a graph, whole regions of a grid at a time.

On a product grid the settings that have decided alike so far form boxes: a range of gates, a range of caps and a range
of budgets. A box stands on one step with one ledger, so a mismatch is judged once for all of it: the gate cuts it at
one index, the budget at another, the cap at a third, and each part that is refused goes on as a box of its own. The
work follows the number of different behaviours, not the number of settings::

    budgets                          a mismatch that gates from g1 on let pass and that B >= b1 can pay for:
      ^  +-------+---------------+
      |  |       |   accepted    |   the part left of g1 is refused by the gate, the part below b1 by the budget;
    b1|  | gate  +---------------+   both wait on the stack, with their verdict, and walk on from this very step later;
      |  |       |    budget     |   the part that accepts stays in hand and meets the next mismatch of the block
      |  +-------+---------------+
      +----------g1--------------> gates        (and a third axis, caps, cut in the same way)

Prefixes form a tree, so boxes that parted never meet again on the trace; what would merge is at most the parts of one
box that different constraints refuse, and they stay apart for the count of who refused.

The cuts are found by asking the judge, so floats decide exactly as in the scalar walk: a judge's answer can turn once
along each axis, from refused to accepted (held by tests/twins/test_judges.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..rules import asd as rule
from ..rules.asd import ACCEPT, BUDGET, CAP, GATE, Reading, judge, settle
from ..trace.graph import END, MISSING
from .compiled import compile_cached, compiled_rule, helper, named, python_rule
from .request import (
    ACCEPTED,
    BASE_ACCEPTED,
    BASE_STEPS,
    BASE_TOKENS,
    BY_BUDGET,
    BY_CAP,
    BY_GATE,
    DRAFTED,
    EXACT,
    HISTOGRAM,
    KEPT,
    LEFT,
    LOST_STEPS,
    LOST_TOKENS,
    PAIRED,
    RELAXED,
    STEPS,
    STOP,
    STRICT_ACCEPTED,
    STRICT_EXACT,
    STRICT_STEPS,
    STRICT_TOKENS,
    TOKENS,
    go_on,
)

STEP, G_LO, G_HI, C_LO, C_HI, B_LO, B_HI, OUTCOME, COUNT, VERDICT = range(10)
"""Columns of a box: the step that it stands on, its ranges, and how the block of that step ended for it."""

BOX_COLUMNS = 10

UNDECIDED = -1
"""Outcome of a box whose block has not ended."""

SPENT, TOTAL = range(2)
"""Its ledger before the step, and what it accepted in the block so far."""


class Stack(NamedTuple):
    """Boxes that wait, and on top the one in hand.

    Attributes
    ----------
    boxes : int64 (n, BOX_COLUMNS)
    sums : float64 (n, 2)
    counts : int32 (n, HISTOGRAM + K + 1)
    """

    boxes: npt.NDArray[np.int64]
    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int32]


def stack_for(settings: int, largest: int, limit: int) -> Stack:
    """Return a stack for one request under a number of settings, with draft lengths of K at most and a token limit.

    Every box holds a setting of its own, so as many may wait as there are settings. A walk has at most ``limit`` steps
    of K mismatches, and each mismatch cuts the box in hand three times at most. Whichever is less.
    """
    room = min(settings, CUTS * max(1, largest) * max(1, limit)) + 1
    return Stack(
        np.zeros((room, BOX_COLUMNS), np.int64),
        np.zeros((room, 2)),
        np.zeros((room, HISTOGRAM + largest + 1), np.int32),
    )


CUTS = 3
"""Boxes that a mismatch may leave behind: refused by gate, by budget, by cap."""


def split(stack, top, low, cut, outcome, verdict, count, total):
    """Leave what is below ``cut`` along one axis at ``top``, refused; what is above it moves up, in hand.

    ``low`` is the column of the axis's lower end; the upper end's is the next one. ``count`` and ``total`` are what the
    block has accepted before. Returns the new top.
    """
    if top + 1 >= stack.boxes.shape[0]:
        raise IndexError("more boxes wait than there is room for")
    for k in range(BOX_COLUMNS):
        stack.boxes[top + 1, k] = stack.boxes[top, k]
    stack.boxes[top, low + 1] = cut
    stack.boxes[top, OUTCOME] = outcome
    stack.boxes[top, COUNT] = count
    stack.boxes[top, VERDICT] = verdict
    stack.boxes[top + 1, low] = cut
    stack.sums[top, TOTAL] = total
    stack.sums[top + 1, SPENT] = stack.sums[top, SPENT]
    for k in range(stack.counts.shape[1]):
        stack.counts[top + 1, k] = stack.counts[top, k]
    return top + 1


def budget_cut(tile, first, last, score, before, charge, count, spent, gate, cap):
    """Return the first of the budgets ``first .. last - 1`` that does not refuse a mismatch, ``last`` for none."""
    if judge(score, before, charge, count, spent, tile.budgets[first], gate, cap) != BUDGET:
        return first
    first += 1
    while first < last:
        middle = (first + last) // 2
        if judge(score, before, charge, count, spent, tile.budgets[middle], gate, cap) == BUDGET:
            first = middle + 1
        else:
            last = middle
    return first


def decide(graph, tile, stack, top, room):
    """Decide the block that the box in hand stands on; parts that end otherwise are left waiting. Returns the new top.

    Each axis is asked in the order of the verdicts. A cut at the upper end refuses the whole box, one at the lower end
    or before it nothing.
    """
    boxes, sums = stack.boxes, stack.sums
    step = boxes[top, STEP]
    lo, hi = graph.mm_ptr[step], graph.mm_ptr[step + 1]
    spent, total, count = sums[top, SPENT], 0.0, 0
    outcome, verdict = hi - lo, ACCEPT
    g_lo, c_lo, b_lo = boxes[top, G_LO], boxes[top, C_LO], boxes[top, B_LO]  # of the box in hand
    g_hi, c_hi, b_hi = boxes[top, G_HI], boxes[top, C_HI], boxes[top, B_HI]  # the same for all that it leaves waiting
    for j in range(lo, hi):
        if graph.mm_pos[j] >= room:
            break
        cut = tile.gate_from[j]
        if cut >= g_hi:
            outcome, verdict = j - lo, GATE
            break
        if cut > g_lo:
            top = split(stack, top, G_LO, cut, j - lo, GATE, count, total)
            g_lo = cut
        score, before, charge = graph.mm_score[j], tile.before[j], tile.through[j]
        cut = budget_cut(
            tile, b_lo, b_hi, score, before, charge, count + 1, spent, tile.gates[g_lo], tile.caps[c_hi - 1]
        )
        if cut == b_hi:
            outcome, verdict = j - lo, BUDGET
            break
        if cut > b_lo:
            top = split(stack, top, B_LO, cut, j - lo, BUDGET, count, total)
            b_lo = cut
        cut = tile.cap_from[count + 1]
        if cut >= c_hi:
            outcome, verdict = j - lo, CAP
            break
        if cut > c_lo:
            top = split(stack, top, C_LO, cut, j - lo, CAP, count, total)
            c_lo = cut
        total = charge
        count += 1
    boxes[top, OUTCOME], boxes[top, COUNT], boxes[top, VERDICT] = outcome, count, verdict
    sums[top, TOTAL] = total
    return top


def take(graph, stack, top, request, room, off_trace):
    """Take the edge that the box in hand decided for: count it, settle, and stand on the next step."""
    box, counts = stack.boxes[top], stack.counts[top]
    step, verdict = box[STEP], box[VERDICT]
    stack.sums[top, SPENT] = settle(stack.sums[top, SPENT], stack.sums[top, TOTAL])
    edge = graph.mm_ptr[step] + step + box[OUTCOME]
    accepted = min(graph.edge_accepted[edge], room)
    committed = min(graph.edge_tokens[edge], room)
    counts[STEPS] += 1
    counts[DRAFTED] += graph.drafted[step]
    counts[ACCEPTED] += accepted
    counts[TOKENS] += committed
    counts[RELAXED] += box[COUNT]
    if verdict == GATE:
        counts[BY_GATE] += 1
    elif verdict == BUDGET:
        counts[BY_BUDGET] += 1
    elif verdict == CAP:
        counts[BY_CAP] += 1
    counts[HISTOGRAM + accepted] += 1
    step = graph.edge_next[edge]
    if committed == room:
        step = END
    if step == MISSING:
        counts[LEFT] += 1
        step = go_on(graph, off_trace, request, counts[STEPS], counts[TOKENS])
    box[STEP] = step
    box[OUTCOME] = UNDECIDED


def paint(stack, top, request, strict, keep, corners, sums, spent_of):
    """Add the counts of a box that has ended to all its settings.

    With ``corners``, to differences along each axis: 8 numbers a figure, however large the box. In two dimensions::

        +v  .  .  -v        v  v  v  0        running sums along both axes
         .  .  .   .   ->   v  v  v  0        fill the box
        -v  .  .  +v        0  0  0  0

    """
    box, counts = stack.boxes[top], stack.counts[top]
    g_lo, g_hi, c_lo, c_hi, b_lo, b_hi = box[G_LO], box[G_HI], box[C_LO], box[C_HI], box[B_LO], box[B_HI]
    ledger = stack.sums[top, SPENT] if keep else -1.0
    for g in range(g_lo, g_hi):
        for c in range(c_lo, c_hi):
            for b in range(b_lo, b_hi):
                spent_of[request, g, c, b] = ledger
    if not keep:
        return
    figures = counts.shape[0]
    counts[KEPT] = 1
    counts[EXACT] = 1 if counts[LEFT] == 0 else 0
    if strict[request, STRICT_EXACT] > 0:
        counts[PAIRED] = 1
        counts[BASE_STEPS] = strict[request, STRICT_STEPS]
        counts[BASE_ACCEPTED] = strict[request, STRICT_ACCEPTED]
        counts[BASE_TOKENS] = strict[request, STRICT_TOKENS]
    else:
        counts[LOST_STEPS] = counts[STEPS]
        counts[LOST_TOKENS] = counts[TOKENS]
    if corners:
        for g, g_sign in ((g_lo, 1), (g_hi, -1)):
            for c, c_sign in ((c_lo, g_sign), (c_hi, -g_sign)):
                for f in range(figures):
                    value = counts[f] * c_sign
                    sums[g, c, b_lo, f] += value
                    sums[g, c, b_hi, f] -= value
    else:
        for g in range(g_lo, g_hi):
            for c in range(c_lo, c_hi):
                for b in range(b_lo, b_hi):
                    for f in range(figures):
                        sums[g, c, b, f] += counts[f]


def walk_boxes(graph, tile, requests, strict, off_trace, stack, corners, sums, spent_of):
    """Walk some requests under every combination of budgets, gates and caps.

    Parameters
    ----------
    graph : GraphArrays
    tile : TileArrays
    requests : int64
        Which.
    strict : int32 (R, 4)
        Of strict matching, in the columns ``STRICT_EXACT`` .. ``STRICT_TOKENS``.
    stack : Stack
        Room for boxes, see :func:`stack_for`.
    corners : bool
        Whether ``sums`` are differences along all three axes, see :func:`paint`.
    sums : int32 (gates, caps, budgets, HISTOGRAM + K + 1), out
        Added to; with ``corners`` one longer along each axis but the last.
    spent_of : float64 (R, gates, caps, budgets), out
        Ledgers; -1 where the request does not count.
    """
    for place in range(requests.shape[0]):
        request = requests[place]
        box = stack.boxes[0]
        box[STEP], box[OUTCOME] = graph.root[request], UNDECIDED
        box[G_LO], box[G_HI] = 0, tile.gates.shape[0]
        box[C_LO], box[C_HI] = 0, tile.caps.shape[0]
        box[B_LO], box[B_HI] = 0, tile.budgets.shape[0]
        stack.sums[0, SPENT] = 0.0
        for k in range(stack.counts.shape[1]):
            stack.counts[0, k] = 0
        top = 0
        while top >= 0:
            while stack.boxes[top, STEP] >= 0:
                room = graph.limit[request] - stack.counts[top, TOKENS]
                if stack.boxes[top, OUTCOME] == UNDECIDED:
                    top = decide(graph, tile, stack, top, room)
                take(graph, stack, top, request, room, off_trace)
            keep = off_trace != STOP or stack.counts[top, LEFT] == 0
            paint(stack, top, request, strict, keep, corners, sums, spent_of)
            top -= 1


@cache
def kernel(reading: Reading) -> Any:
    """Return ``walk_boxes`` compiled for one reading."""
    import numba

    bound = compiled_rule(reading)
    for function in (go_on, split, budget_cut, decide, take, paint):
        bound[function.__name__] = helper(named(rule.bind(function, **bound), reading))
    return compile_cached(numba.njit, named(rule.bind(walk_boxes, **bound), reading), nogil=True, _nrt=False)


def python_kernel(reading: Reading) -> Any:
    """Return the same sources as plain Python, for tests."""
    bound = python_rule(reading)
    for function in (budget_cut, decide, take):
        bound[function.__name__] = rule.bind(function, **bound)
    return rule.bind(walk_boxes, **bound)
