"""The walk in recorded order, many budgets at a time.

In recorded order every outcome of a step leads to the next recorded step, so under one gate and one cap all budgets
stand on the same step. What differs per budget (a *lane*) is its ledger and its counters, and the loops over lanes
become vector instructions::

    step 0: [mismatch 0] -> all lanes, [mismatch 1] -> all lanes,   step 1: [mismatch 0] -> all lanes, ...

A mismatch that the gate or the cap refuses is refused for every lane, and what is counted for every lane is counted
once, in ``base``. Counters of a lane are bit fields of one word, and its histogram is 8 bits a bin: a mismatch that is
accepted moves a lane from one outcome to the next by one addition to each. Before a field can run over, they are
unpacked. Near its end a request may stop at different steps in different lanes; from there on each lane is walked by
:func:`asdsim.walk.request.walk_request`. The numbers are those of that walk, to the bit: the judge is the same
function, and it sees the same sums, made in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..rules import asd as rule
from ..rules.asd import ACCEPT, BUDGET, CAP, GATE, Reading, accept_block, judge, settle
from ..trace.graph import END, MISSING, Graph
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
    RECORDED,
    RELAXED,
    STEPS,
    STRICT_ACCEPTED,
    STRICT_EXACT,
    STRICT_STEPS,
    STRICT_TOKENS,
    TOKENS,
    go_on,
    refusals,
    walk_request,
)

WIDTH = 256
"""Lanes, at most. A compile-time constant: rows of a scratch are then known not to overlap, and LLVM vectorises without
a check at run time."""

AT_RELAXED, AT_GATE, AT_BUDGET, AT_CAP, AT_LEFT = 14, 26, 34, 42, 50
"""Where the fields of a lane's word begin; tokens are at 0."""

MAX_STEPS, MAX_RELAXED = (1 << 8) - 1, (1 << 12) - 1
"""What the fields hold: steps of any verdict, relaxed tokens. Tokens fit where relaxed tokens do."""

FIELDS = (
    (TOKENS, 0, (1 << AT_RELAXED) - 1), (RELAXED, AT_RELAXED, MAX_RELAXED), (BY_GATE, AT_GATE, MAX_STEPS),
    (BY_BUDGET, AT_BUDGET, MAX_STEPS), (BY_CAP, AT_CAP, MAX_STEPS), (LEFT, AT_LEFT, MAX_STEPS),
)  # fmt: skip
"""Column of each field of the word, where it begins, and its mask."""

SPENT, START, BUDGETS = 0, WIDTH, 2 * WIDTH
"""Rows of floats: the ledger now and before the block; the budget."""

ALIVE, WORD, BINS = 0, WIDTH, 2 * WIDTH
"""Rows of integers: whether all was accepted so far in this block (-1 or 0), the word, and a row for each 8 bins."""


class PathArrays(NamedTuple):
    """What is known of recorded order beside the graph.

    Attributes
    ----------
    word : int64 (S + m,)
        Counters of an edge, packed, without who refused.
    accepted : int64 (S + m,)
        As in the graph, in the width in which bins are shifted by it.
    plain : bool (S,)
        Steps of which no outcome ends the request.
    """

    word: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]
    plain: npt.NDArray[np.bool_]


def path_arrays(graph: Graph) -> PathArrays | None:
    """Lay out recorded order; None where some outcome of a captured step leads to another step than the next one."""
    step_of = np.repeat(np.arange(graph.num_steps), np.diff(graph.mm_ptr) + 1)
    first = graph.path_ptr[:-1]
    empty = first == graph.path_ptr[1:]
    begin = np.full(graph.num_requests, END, np.int64)
    begin[~empty] = graph.path_step[first[~empty]]
    after = np.full(graph.num_steps, END, np.int64)
    after[graph.path_step[:-1]] = graph.path_step[1:]
    after[graph.path_step[graph.path_ptr[1:][~empty] - 1]] = END
    on_path = np.zeros(graph.num_steps, bool)
    on_path[graph.path_step] = True
    in_order = (graph.edge_next < 0) | (graph.edge_next == after[step_of])
    if not (np.array_equal(begin, graph.root) and in_order[on_path[step_of]].all()):
        return None
    outcome = np.arange(len(step_of)) - (graph.mm_ptr[:-1] + np.arange(graph.num_steps))[step_of]
    missing = (graph.edge_next == MISSING).astype(np.int64)
    plain = np.ones(graph.num_steps, bool)
    plain[step_of[graph.edge_next == END]] = False
    word = graph.edge_tokens + (outcome << AT_RELAXED) + (missing << AT_LEFT)
    return PathArrays(word, graph.edge_accepted.astype(np.int64), plain)


def accept_first(floats, ints, lanes, score, charge, gate, cap, move, shift):
    """Let each lane decide about the first mismatch of a block, and move those that accept to the next outcome.

    ``move`` is added to their word, ``shift`` to the first word of their bins.
    """
    for k in range(lanes):
        start = floats[SPENT + k]
        ok = judge(score, 0.0, charge, 1, start, floats[BUDGETS + k], gate, cap) == ACCEPT
        floats[START + k] = start
        floats[SPENT + k] = settle(start, charge) if ok else start
        ints[WORD + k] += move if ok else 0
        ints[BINS + k] += shift if ok else 0
        ints[ALIVE + k] = -1 if ok else 0


def accept_next(floats, ints, lanes, score, before, charge, count, gate, cap, move, shift):
    """The same for a later mismatch, where all before it were accepted."""
    for k in range(lanes):
        start = floats[START + k]
        ok = (ints[ALIVE + k] != 0) & (
            judge(score, before, charge, count, start, floats[BUDGETS + k], gate, cap) == ACCEPT
        )
        floats[SPENT + k] = settle(start, charge) if ok else floats[SPENT + k]
        ints[WORD + k] += move if ok else 0
        ints[BINS + k] += shift if ok else 0
        ints[ALIVE + k] = -1 if ok else 0


def refuse(floats, ints, lanes, score, before, charge, count, gate, cap):
    """Count a mismatch that the cap forbids to the cap in place of the budget, where the budget allows it."""
    for k in range(lanes):
        verdict = judge(score, before, charge, count, floats[START + k], floats[BUDGETS + k], gate, cap)
        ints[WORD + k] += ints[ALIVE + k] & (0 if verdict == BUDGET else (1 << AT_CAP) - (1 << AT_BUDGET))


def move_bin(ints, lanes, accepted, sign):
    """Add one (``sign`` 1) or take one (-1) at ``accepted`` in the histogram of each lane that is alive."""
    row = BINS + (accepted >> 3) * WIDTH
    bins = ints[row : row + WIDTH]  # a view: its indices are known not to be negative
    one_more = sign << (8 * (accepted & 7))
    for k in range(lanes):
        bins[k] += ints[ALIVE + k] & one_more


def walk_step(graph, tile, path, step, passing, g, c, lanes, floats, ints, base):
    """Walk one step that ends no lane, under one gate, which ``passing`` mismatches pass, and one cap.

    Adds to ``base`` what holds for every lane.
    """
    lo, hi = graph.mm_ptr[step], graph.mm_ptr[step + 1]
    edge, gate, cap = lo + step, tile.gates[g], tile.caps[c]
    count = min(passing, tile.cap_most[c])
    accepted = path.accepted[edge]
    base[1 + (accepted >> 3)] += 1 << (8 * (accepted & 7))
    # Behind the last mismatch that passes the gate stands one that does not, or the end of the block.
    last = 0 if lo + passing == hi else 1 << AT_GATE
    if passing == 0:
        base[0] += path.word[edge] + last
        return
    base[0] += path.word[edge] + (1 << AT_BUDGET)  # all lanes in outcome 0, refused by the budget; who accepts moves on
    for i in range(count):
        move = path.word[edge + i + 1] - path.word[edge + i]
        move += last - (1 << AT_BUDGET) if i == passing - 1 else 0
        score, charge = graph.mm_score[lo + i], tile.through[lo + i]
        accepted, becomes = path.accepted[edge + i], path.accepted[edge + i + 1]
        shift = (1 << (8 * becomes)) - (1 << (8 * accepted)) if becomes < 8 else 0
        if i == 0:
            accept_first(floats, ints, lanes, score, charge, gate, cap, move, shift)
        else:
            accept_next(floats, ints, lanes, score, tile.before[lo + i], charge, i + 1, gate, cap, move, shift)
        if becomes >= 8:  # bins of another word
            move_bin(ints, lanes, accepted, -1)
            move_bin(ints, lanes, becomes, 1)
    if count == 0:
        for k in range(lanes):
            floats[START + k] = floats[SPENT + k]
            ints[ALIVE + k] = -1
    if count < passing:
        j = lo + count
        refuse(floats, ints, lanes, graph.mm_score[j], tile.before[j], tile.through[j], count + 1, gate, cap)


def fill(row, lanes, value):
    """Set a row to a value."""
    for k in range(lanes):
        row[k] = value


def add(total, row, lanes, times):
    """Add a row to another one, a number of times."""
    for k in range(lanes):
        total[k] += times * row[k]


def unpack(packed, lanes, base, shift, mask, figure):
    """Add a field of a row of packed counters, and of what was counted for every lane, to a row of ``counts``."""
    for k in range(lanes):
        figure[k] += ((packed[k] + base) >> shift) & mask


def unpack_all(ints, lanes, base, counts):
    """Add all packed counters to ``counts`` and clear them."""
    word = ints[WORD : WORD + WIDTH]
    for column, shift, mask in FIELDS:
        unpack(word, lanes, base[0], shift, mask, counts[column])
    for a in range(counts.shape[0] - HISTOGRAM):
        bins = ints[BINS + (a >> 3) * WIDTH : BINS + (a >> 3) * WIDTH + WIDTH]
        unpack(bins, lanes, base[1 + (a >> 3)], 8 * (a & 7), MAX_STEPS, counts[HISTOGRAM + a])
    for w in range(base.shape[0]):  # the word, and the rows of bins behind it
        base[w] = 0
        fill(ints[WORD + w * WIDTH : WORD + (w + 1) * WIDTH], lanes, 0)


def walk_path(graph, tile, path, request, g, c, safe, strict, passing, floats, ints, base, counts):
    """Walk one request under one gate, one cap and all budgets; before ``safe`` no lane can end. Fills ``counts``."""
    lanes = tile.budgets.shape[0]
    p_lo, p_hi = graph.path_ptr[request], graph.path_ptr[request + 1]
    period = min(MAX_STEPS, MAX_RELAXED // (counts.shape[0] - HISTOGRAM))
    drafted = 0
    fill(floats[SPENT : SPENT + WIDTH], lanes, 0.0)
    for f in range(counts.shape[0]):
        fill(counts[f], lanes, 0)
    for p in range(p_lo, safe):
        walk_step(graph, tile, path, graph.path_step[p], passing[p - p_lo], g, c, lanes, floats, ints, base)
        drafted += graph.drafted[graph.path_step[p]]
        if (p - p_lo) % period == period - 1:
            unpack_all(ints, lanes, base, counts)
    unpack_all(ints, lanes, base, counts)
    fill(counts[STEPS], lanes, safe - p_lo)
    fill(counts[DRAFTED], lanes, drafted)
    for k in range(lanes if safe < p_hi else 0):
        spent, _, steps, offered, _, tokens, relaxed, refused, left = walk_request(
            graph, request, floats[BUDGETS + k], tile.gates[g], tile.caps[c], RECORDED,
            graph.path_step[safe], safe - p_lo, counts[TOKENS, k], floats[SPENT + k], counts[HISTOGRAM:, k],
        )  # fmt: skip
        floats[SPENT + k] = spent
        counts[STEPS, k], counts[TOKENS, k] = steps, tokens
        counts[DRAFTED, k] += offered
        counts[RELAXED, k] += relaxed
        for column, verdict in ((BY_GATE, GATE), (BY_BUDGET, BUDGET), (BY_CAP, CAP)):
            counts[column, k] += refusals(refused, verdict)
        counts[LEFT, k] += left
    for a in range(1, counts.shape[0] - HISTOGRAM):
        add(counts[ACCEPTED], counts[HISTOGRAM + a], lanes, a)
    fill(counts[KEPT], lanes, 1)
    exact, left_of = counts[EXACT], counts[LEFT]
    for k in range(lanes):
        exact[k] = 1 if left_of[k] == 0 else 0
    if strict[request, STRICT_EXACT] > 0:
        fill(counts[PAIRED], lanes, 1)
        fill(counts[BASE_STEPS], lanes, strict[request, STRICT_STEPS])
        fill(counts[BASE_ACCEPTED], lanes, strict[request, STRICT_ACCEPTED])
        fill(counts[BASE_TOKENS], lanes, strict[request, STRICT_TOKENS])
    else:
        add(counts[LOST_STEPS], counts[STEPS], lanes, 1)
        add(counts[LOST_TOKENS], counts[TOKENS], lanes, 1)


def reach(graph, tile, path, request, g, passing):
    """Return where on the path of a request a lane may first end under a gate, and the most mismatches that pass it.

    Fills ``passing``: the mismatches that pass it, of each step of the path.
    """
    tokens, longest = 0, 0
    p_lo, p_hi = graph.path_ptr[request], graph.path_ptr[request + 1]
    safe = p_hi
    for p in range(p_lo, p_hi):
        step = graph.path_step[p]
        lo = graph.mm_ptr[step]
        count = 0
        for j in range(lo, graph.mm_ptr[step + 1]):
            count += 1 if tile.gate_from[j] <= g else 0  # ascending within a step
        passing[p - p_lo] = count
        longest = max(longest, count)
        goes_on = path.plain[step] or p == p_hi - 1  # behind the last step nothing is walked anyway
        if safe == p_hi and not (goes_on and tokens + graph.drafted[step] + 1 < graph.limit[request]):
            safe = p
        tokens += graph.edge_tokens[lo + step + count]
    return safe, longest


def walk_recorded(graph, tile, path, requests, strict, passing, floats, ints, base, counts, sums, spent_of):
    """Walk some requests under every combination of budgets (``WIDTH`` at most), gates and caps, in recorded order.

    Parameters
    ----------
    graph, tile, path : GraphArrays, TileArrays, PathArrays
    requests, strict, spent_of
        As for :func:`asdsim.walk.boxes.walk_boxes`.
    sums : int32 (gates, caps, HISTOGRAM + K + 1, budgets), out
        Added to.
    passing, floats, ints, base, counts
        See :func:`scratch`.
    """
    num_budgets, num_caps = tile.budgets.shape[0], tile.caps.shape[0]
    for b in range(num_budgets):
        floats[BUDGETS + b] = tile.budgets[b]
    for place in range(requests.shape[0]):
        request = requests[place]
        for g in range(tile.gates.shape[0]):
            safe, longest = reach(graph, tile, path, request, g, passing)
            for c in range(num_caps):
                if c == 0 or tile.cap_most[c - 1] < longest:  # else the cap below never bound: the same walk
                    walk_path(graph, tile, path, request, g, c, safe, strict, passing, floats, ints, base, counts)
                spent_row = spent_of[request, g, c]
                for k in range(num_budgets):
                    spent_row[k] = floats[SPENT + k]
                for f in range(counts.shape[0]):
                    add(sums[g, c, f], counts[f], num_budgets, 1)


def scratch(largest: int, longest: int) -> tuple[npt.NDArray[Any], ...]:
    """Return what the kernel works in, for a largest K and a longest captured path.

    Mismatches that pass the gate, of each step; rows of floats and of integers; counters of all lanes, and of each.
    """
    words = largest // 8 + 1
    return (
        np.zeros(longest, np.int64),
        np.zeros(3 * WIDTH),
        np.zeros((2 + words) * WIDTH, np.int64),
        np.zeros(1 + words, np.int64),
        np.zeros((HISTOGRAM + largest + 1, WIDTH), np.int32),
    )


HELPERS = (accept_first, accept_next, refuse, move_bin, fill, add, walk_step, unpack, unpack_all, walk_path, reach)


@cache
def kernel(reading: Reading) -> Any:
    """Return ``walk_recorded`` compiled for one reading."""
    import numba

    bound = compiled_rule(reading)
    for function in (accept_block, go_on, refusals, walk_request, *HELPERS):
        bound[function.__name__] = helper(named(rule.bind(function, **bound), reading))
    return compile_cached(numba.njit, named(rule.bind(walk_recorded, **bound), reading), nogil=True, _nrt=False)


def python_kernel(reading: Reading) -> Any:
    """Return the same sources as plain Python, for tests."""
    bound = python_rule(reading)
    for function in (accept_block, walk_request, *HELPERS):
        bound[function.__name__] = rule.bind(function, **bound)
    return rule.bind(walk_recorded, **bound)
