"""The walk in recorded order, many budgets at a time.

In recorded order every outcome of a step leads to the next recorded step, so under one gate and one cap all budgets
stand on the same step. What remains per budget (a *lane*) is its ledger and its counters, and the loops over lanes
become vector instructions.

What makes it fast, in the order of what it saves:

- A mismatch that the gate refuses is refused for every lane: one scalar comparison, not one per lane.
- Budgets that no ledger has met yet share one history. They are one lane, the top lane, until a mismatch is too dear
  for the lowest of them; that one and some above it then become lanes of their own.
- Gates between which no score of a request lies do the same, so their walk is done once; so do caps that never bind.
- Under the next gate a request does the same up to the first mismatch that only this one lets pass: its walk goes on
  from there, with lanes as they were kept (a *mark*).
- Counters are bit fields of a word or two per lane, unpacked once per request.

Per mismatch and lane there remain one addition, the judge's comparisons, a masked move of the ledger and two masked
additions. The numbers are those of :func:`asdsim.walk.request.walk_request`, to the bit: the judge is the same
function, and it sees the same sums, made in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..rules import asd as rule
from ..rules.asd import ACCEPT, BUDGET, GATE, Reading, judge, settle
from . import request
from .compiled import compile_cached, compiled_rule, helper, named, python_rule

WIDTH = 256
"""Budgets walked together. A compile-time constant: rows of the scratch are then known not to overlap, and LLVM
vectorises without a check at run time."""

PEEL = 16
"""Budgets that leave the top lane together; a multiple of the vector width."""

MARKS = 16
"""Marks of one request and cap that are kept at once."""

# Columns of a mark: place on the path; what was counted for all lanes, steps since the last unpacking, the top lane,
# tokens drafted; and the histogram that was counted for all lanes.
PLACE, BASE, SINCE, TOP, OFFERED, BASE_BINS = range(6)

TOKENS, RELAXED, BY_GATE, BY_BUDGET, BY_CAP, EXACT, DRAFTED, HISTOGRAM = range(8)
"""Rows of the sums; the histogram takes largest K + 1 rows from ``HISTOGRAM`` on."""

# The columns of asdsim.walk.request that the sums end up in.
STEPS, ACCEPTED = request.STEPS, request.ACCEPTED
OF_DRAFTED, OF_TOKENS, OF_RELAXED = request.DRAFTED, request.TOKENS, request.RELAXED
OF_GATE, OF_BUDGET, OF_CAP = request.BY_GATE, request.BY_BUDGET, request.BY_CAP

# A lane's counters since they were last unpacked, in one word: tokens take 14 bits, relaxed tokens 12, and the three
# refusals and the uncaptured edges 8 each. The histogram takes 8 bits a bin, 8 bins a word.
AT_RELAXED, AT_GATE, AT_BUDGET, AT_CAP, AT_LEFT = 14, 26, 34, 42, 50
MAX_STEPS, MAX_RELAXED = (1 << 8) - 1, (1 << 12) - 1

# Where the rows of a lane's state begin. Floats: its budget, its ledger now and at the start of the block.
BUDGETS, SPENT, START = 0, WIDTH, 2 * WIDTH
LEDGER_ROWS = 3
# Integers: its counters; near the end of its request whether that goes on (-1 or 0), what is left under the token
# limit, tokens drafted; whether it accepted all so far in this block, the outcome that it stands in; the histogram, a
# row for each word; and counters put aside before a field runs over, a row for each figure.
WORD, LIVE, ROOM, SEEN, ALIVE, TAKEN, TAKEN_TOKENS, TAKEN_NEXT, BINS = (row * WIDTH for row in range(9))


def accept_one(ledger, state, num, score, charge, gate, cap, move, shift):  # type: ignore[no-untyped-def]
    """Let each lane decide about the only mismatch of a block, and move those that accept to the next outcome."""
    for k in range(num):
        start = ledger[SPENT + k]
        ok = judge(score, 0.0, charge, 1, start, ledger[BUDGETS + k], gate, cap) == ACCEPT
        ledger[SPENT + k] = settle(start, charge) if ok else start
        state[WORD + k] += move if ok else 0
        state[BINS + k] += shift if ok else 0


def accept_two(  # type: ignore[no-untyped-def]
    ledger, state, num, score, charge, next_score, next_charge, gate, cap, move, shift, next_move, next_shift
):  # fmt: skip
    """The same for two mismatches, without storing in between."""
    for k in range(num):
        start, budget = ledger[SPENT + k], ledger[BUDGETS + k]
        ok = judge(score, 0.0, charge, 1, start, budget, gate, cap) == ACCEPT
        both = ok & (judge(next_score, charge, next_charge, 2, start, budget, gate, cap) == ACCEPT)
        spent = settle(start, charge) if ok else start
        ledger[SPENT + k] = settle(start, next_charge) if both else spent
        state[WORD + k] += (move if ok else 0) + (next_move if both else 0)
        state[BINS + k] += (shift if ok else 0) + (next_shift if both else 0)


def accept_one_of_two(  # type: ignore[no-untyped-def]
    ledger, state, num, score, charge, next_score, next_charge, gate, cap, move, shift, capped
):  # fmt: skip
    """The same for two mismatches of which the cap forbids the second; the budget may allow it: ``capped``."""
    for k in range(num):
        start, budget = ledger[SPENT + k], ledger[BUDGETS + k]
        ok = judge(score, 0.0, charge, 1, start, budget, gate, cap) == ACCEPT
        by_cap = ok & (judge(next_score, charge, next_charge, 2, start, budget, gate, cap) != BUDGET)
        ledger[SPENT + k] = settle(start, charge) if ok else start
        state[WORD + k] += (move if ok else 0) + (capped if by_cap else 0)
        state[BINS + k] += shift if ok else 0


def accept_next(ledger, state, num, score, before, charge, count, gate, cap, move):  # type: ignore[no-untyped-def]
    """Let each lane that is alive decide about a mismatch of a longer block."""
    for k in range(num):
        ok = (state[ALIVE + k] != 0) & (
            judge(score, before, charge, count, ledger[START + k], ledger[BUDGETS + k], gate, cap) == ACCEPT
        )
        ledger[SPENT + k] = settle(ledger[START + k], charge) if ok else ledger[SPENT + k]
        state[WORD + k] += move if ok else 0
        state[ALIVE + k] = -1 if ok else 0


def refuse(ledger, state, num, score, before, charge, count, gate, cap, capped):  # type: ignore[no-untyped-def]
    """Add ``capped`` where a mismatch that the cap forbids is within the budget."""
    for k in range(num):
        verdict = judge(score, before, charge, count, ledger[START + k], ledger[BUDGETS + k], gate, cap)
        state[WORD + k] += state[ALIVE + k] & (0 if verdict == BUDGET else capped)


def move_bin(state, num, accepted, sign):  # type: ignore[no-untyped-def]
    """Add one (``sign`` 1) or take one (-1) at ``accepted`` in the histogram of each lane that is alive."""
    row = BINS + (accepted >> 3) * WIDTH
    bins = state[row : row + WIDTH]  # a view: its indices are known not to be negative
    one = sign << (8 * (accepted & 7))
    for k in range(num):
        bins[k] += state[ALIVE + k] & one


def begin_block(ledger, state, num):  # type: ignore[no-untyped-def]
    """Note the ledgers at the start of a block; all lanes are alive."""
    for k in range(num):
        ledger[START + k] = ledger[SPENT + k]
        state[ALIVE + k] = -1


def clear(values):  # type: ignore[no-untyped-def]
    """Set all to zero."""
    for i in range(values.shape[0]):
        for k in range(values.shape[1]):
            values[i, k] = 0


def settle_all(state, base, base_bins, num):  # type: ignore[no-untyped-def]
    """Add to every lane what was counted for all of them together."""
    for k in range(num):
        state[WORD + k] += base
    for w in range(base_bins.shape[0]):
        add = base_bins[w]
        bins = state[BINS + w * WIDTH : BINS + (w + 1) * WIDTH]
        for k in range(num):
            bins[k] += add
        base_bins[w] = 0


def put_aside(state, num, largest, first):  # type: ignore[no-untyped-def]
    """Add the packed counters of ``num`` lanes to the rows behind the bins and clear them, before a field runs over.

    The ``first`` time in a row of the walk those rows hold what another one left.
    """
    words = largest // 8 + 1
    tally = BINS + words * WIDTH
    for row in range(tally // WIDTH, state.shape[0] // WIDTH if first else 0):
        kept = state[row * WIDTH : (row + 1) * WIDTH]
        for k in range(num):
            kept[k] = 0
    for k in range(num):
        word = state[WORD + k]
        state[tally + TOKENS * WIDTH + k] += word & ((1 << AT_RELAXED) - 1)
        state[tally + RELAXED * WIDTH + k] += (word >> AT_RELAXED) & MAX_RELAXED
        for f in range(4):
            state[tally + (BY_GATE + f) * WIDTH + k] += (word >> (AT_GATE + 8 * f)) & 255
        state[WORD + k] = 0
        for a in range(largest + 1):
            number = (state[BINS + (a >> 3) * WIDTH + k] >> (8 * (a & 7))) & 255
            state[tally + (HISTOGRAM + a) * WIDTH + k] += number
        for w in range(words):
            state[BINS + w * WIDTH + k] = 0


def fill(state, first, last, top, to):  # type: ignore[no-untyped-def]
    """Copy lane ``top`` to the lanes above it up to ``to``, in some rows."""
    for row in range(first, last):
        value = state[row * WIDTH + top]
        of_row = state[row * WIDTH : (row + 1) * WIDTH]
        for k in range(top + 1, to + 1):
            of_row[k] = value


def leave_top(  # type: ignore[no-untyped-def]
    ledger, state, top, n, lo, hi, room, mm_pos, mm_score, mm_before, mm_charge, gate, cap, careful, last_row
):  # fmt: skip
    """Take the lowest budgets out of the top lane where a mismatch of this block is too dear for them.

    They leave by ``PEEL``, so that they can be written as vectors, and take the history of the top lane up to this
    block along. Returns the new top lane.
    """
    spent = ledger[SPENT + top]
    to, j = top, lo
    while j < hi and to < n - 1 and mm_pos[j] < room:
        verdict = judge(mm_score[j], mm_before[j], mm_charge[j], j - lo + 1, spent, ledger[BUDGETS + to], gate, cap)
        if verdict == BUDGET:
            to = min(to + PEEL, n - 1)
        elif verdict == ACCEPT:
            j += 1
        else:
            break
    if to == top:
        return top
    for k in range(top + 1, to + 1):
        ledger[SPENT + k] = spent
    fill(state, 0, 4 if careful else 1, top, to)  # the word; and LIVE, ROOM, SEEN
    fill(state, BINS // WIDTH, last_row, top, to)
    return to


def copy_rows(from_ledger, from_state, to_ledger, to_state, from_lane, to_lane, num, words):  # type: ignore[no-untyped-def]
    """Copy ledgers, counters and histograms of ``num`` lanes; ``*_lane``: where the row behind the counters begins."""
    for k in range(num):
        to_ledger[k] = from_ledger[k]
    for k in range(num):
        to_state[k] = from_state[k]
    for w in range(words):
        source = from_state[from_lane + w * WIDTH : from_lane + (w + 1) * WIDTH]
        target = to_state[to_lane + w * WIDTH : to_lane + (w + 1) * WIDTH]
        for k in range(num):
            target[k] = source[k]


def careful_step(  # type: ignore[no-untyped-def]
    ledger, state, num, step, g, gate, cap, gate_from, largest,
    drafted, mm_ptr, mm_pos, mm_score, mm_before, mm_charge, edge_next, edge_accepted, edge_tokens,
):  # fmt: skip
    """Walk one step that may end a lane, at the token limit or at an end of sequence."""
    lo, hi = mm_ptr[step], mm_ptr[step + 1]
    edge = lo + step
    accepted, tokens, after = edge_accepted[edge], edge_tokens[edge], min(edge_next[edge], 0)
    for k in range(num):
        ledger[START + k] = ledger[SPENT + k]
        state[ALIVE + k] = state[LIVE + k]
    for k in range(num):
        state[TAKEN + k] = accepted
        state[TAKEN_TOKENS + k] = tokens
        state[TAKEN_NEXT + k] = after
    for j in range(lo, hi):
        count = j - lo + 1
        position, score, before, charge = mm_pos[j], mm_score[j], mm_before[j], mm_charge[j]
        accepted, tokens, after = (
            edge_accepted[edge + count],
            edge_tokens[edge + count],
            min(edge_next[edge + count], 0),
        )
        for k in range(num):
            reached = state[ALIVE + k] if position < state[ROOM + k] else 0
            verdict = judge(score, before, charge, count, ledger[START + k], ledger[BUDGETS + k], gate, cap)
            field = 1 << AT_GATE if verdict == GATE else (1 << AT_BUDGET if verdict == BUDGET else 1 << AT_CAP)
            field = 1 << AT_RELAXED if verdict == ACCEPT else field
            state[WORD + k] += reached & field
            state[ALIVE + k] = reached if verdict == ACCEPT else 0
        for k in range(num):
            ok = state[ALIVE + k] != 0
            ledger[SPENT + k] = settle(ledger[START + k], charge) if ok else ledger[SPENT + k]
            state[TAKEN + k] = accepted if ok else state[TAKEN + k]
            state[TAKEN_TOKENS + k] = tokens if ok else state[TAKEN_TOKENS + k]
            state[TAKEN_NEXT + k] = after if ok else state[TAKEN_NEXT + k]
        if gate_from[j] > g:
            break
    for w in range(largest // 8 + 1):
        bins = state[BINS + w * WIDTH : BINS + (w + 1) * WIDTH]
        for k in range(num):
            took = min(state[TAKEN + k], state[ROOM + k])
            bins[k] += state[LIVE + k] & (1 << (8 * (took & 7)) if took >> 3 == w else 0)
    offered = drafted[step]
    for k in range(num):
        live, room, then = state[LIVE + k], state[ROOM + k], state[TAKEN_NEXT + k]
        got = min(state[TAKEN_TOKENS + k], room)
        goes_on = (got < room) & (then != -1)
        state[WORD + k] += live & (got + (1 << AT_LEFT if goes_on & (then == -2) else 0))
        state[SEEN + k] += live & offered
        state[ROOM + k] = room - got
        state[LIVE + k] = live if goes_on else 0


def walk_row(  # type: ignore[no-untyped-def]
    ledger, state, base_bins, n, g, gate, cap, most, gate_from, passing, path_step, p_lo, safe, p_hi,
    limit, drafted, mm_ptr, mm_pos, mm_score, mm_before, mm_charge, edge_next, edge_accepted, edge_tokens, edge_word,
    largest, marks, num_marks, wanted, num_wanted, marked_ledger, marked_state,
):  # fmt: skip
    """Walk one request under one gate, one cap and all budgets.

    ``most`` is the number of relaxed tokens that the cap allows in a block; before ``safe`` no lane can end. The walk
    goes on from the last of the ``num_marks`` marks, which all still hold, and leaves further ones at the ``wanted``
    places, descending.
    Returns (top, drafted, aside, marks): the lane that stands for all budgets from its own on, the tokens drafted
    before ``safe``, whether counters were put aside, and the number of marks.
    """
    words = largest // 8 + 1
    period = min(MAX_STEPS, MAX_RELAXED // (largest + 1))
    for row in range(state.shape[0] // WIDTH):
        state[row * WIDTH] = 0
    ledger[SPENT] = 0.0
    base, since, top, offered = 0, 0, 0, 0
    aside, last_row = False, BINS // WIDTH + words
    begin = p_lo
    if num_marks > 0:
        mark = marks[num_marks - 1]
        begin, base, since, top, offered = mark[PLACE], mark[BASE], mark[SINCE], mark[TOP], mark[OFFERED]
        for w in range(words):
            base_bins[w] = mark[BASE_BINS + w]
        copy_rows(
            marked_ledger[num_marks - 1], marked_state[num_marks - 1], ledger[SPENT:], state, WIDTH, BINS, top + 1,
            words,
        )  # fmt: skip
    for p in range(begin, safe):
        step = path_step[p]
        if num_wanted > 0 and p == wanted[num_wanted - 1]:
            num_wanted -= 1
            if num_marks < MARKS and not aside and p > begin:
                mark = marks[num_marks]
                mark[PLACE], mark[BASE], mark[SINCE], mark[TOP], mark[OFFERED] = p, base, since, top, offered
                for w in range(words):
                    mark[BASE_BINS + w] = base_bins[w]
                copy_rows(
                    ledger[SPENT:], state, marked_ledger[num_marks], marked_state[num_marks], BINS, WIDTH, top + 1,
                    words,
                )  # fmt: skip
                num_marks += 1
        if since == period:
            settle_all(state, base, base_bins, top + 1)
            put_aside(state, top + 1, largest, not aside)
            aside, last_row = True, state.shape[0] // WIDTH
            base, since = 0, 0
        since += 1
        lo, hi = mm_ptr[step], mm_ptr[step + 1]
        edge = lo + step
        within = passing[p - p_lo]  # mismatches in a row that the gate lets pass
        count = min(within, most)  # and the cap
        offered += drafted[step]
        word = edge_word[edge]
        accepted = edge_accepted[edge]
        base_bins[accepted >> 3] += 1 << (8 * (accepted & 7))
        # Lanes that have accepted ``count`` mismatches are refused by the gate, the cap, or nothing.
        last = 0 if lo + count == hi else (1 << AT_GATE if count == within else 1 << AT_BUDGET)
        if within == 0:
            base += word + last
            continue
        base += word + (1 << AT_BUDGET)
        if top < n - 1:
            spent, budget = ledger[SPENT + top], ledger[BUDGETS + top]
            for i in range(within):
                verdict = judge(
                    mm_score[lo + i], mm_before[lo + i], mm_charge[lo + i], i + 1, spent, budget, gate, cap
                )  # fmt: skip
                if verdict == BUDGET:
                    top = leave_top(
                        ledger, state, top, n, lo, lo + within, largest + 1,
                        mm_pos, mm_score, mm_before, mm_charge, gate, cap, False, last_row,
                    )  # fmt: skip
                if verdict != ACCEPT:
                    break
        # All lanes stand in outcome 0, refused by the budget; who accepts moves on to the next outcome.
        num = top + 1
        if count == 1 and largest < 8:
            move = edge_word[edge + 1] - word + last - (1 << AT_BUDGET)
            shift = (1 << (8 * edge_accepted[edge + 1])) - (1 << (8 * accepted))
            if within == 1:
                accept_one(ledger, state, num, mm_score[lo], mm_charge[lo], gate, cap, move, shift)
            else:
                accept_one_of_two(
                    ledger, state, num, mm_score[lo], mm_charge[lo], mm_score[lo + 1], mm_charge[lo + 1], gate, cap,
                    move, shift, (1 << AT_CAP) - (1 << AT_BUDGET),
                )  # fmt: skip
        elif count == 2 and within == 2 and largest < 8:
            becomes = edge_accepted[edge + 1]
            accept_two(
                ledger, state, num, mm_score[lo], mm_charge[lo], mm_score[lo + 1], mm_charge[lo + 1], gate, cap,
                edge_word[edge + 1] - word, (1 << (8 * becomes)) - (1 << (8 * accepted)),
                edge_word[edge + 2] - edge_word[edge + 1] + last - (1 << AT_BUDGET),
                (1 << (8 * edge_accepted[edge + 2])) - (1 << (8 * becomes)),
            )  # fmt: skip
        else:
            begin_block(ledger, state, num)
            for i in range(count):
                move = edge_word[edge + i + 1] - edge_word[edge + i]
                move += last - (1 << AT_BUDGET) if i == count - 1 else 0
                accept_next(
                    ledger, state, num, mm_score[lo + i], mm_before[lo + i], mm_charge[lo + i], i + 1, gate, cap,
                    move,
                )  # fmt: skip
                move_bin(state, num, edge_accepted[edge + i], -1)
                move_bin(state, num, edge_accepted[edge + i + 1], 1)
            if count < within:
                refuse(
                    ledger, state, num, mm_score[lo + count], mm_before[lo + count], mm_charge[lo + count],
                    count + 1, gate, cap, (1 << AT_CAP) - (1 << AT_BUDGET),
                )  # fmt: skip
    settle_all(state, base, base_bins, top + 1)
    if safe < p_hi:
        for k in range(top + 1):
            state[ROOM + k] = limit - (state[WORD + k] & ((1 << AT_RELAXED) - 1))
            state[SEEN + k] = offered
            state[LIVE + k] = -1
        if aside:
            for k in range(top + 1):
                state[ROOM + k] -= state[BINS + (largest // 8 + 1 + TOKENS) * WIDTH + k]
    for p in range(safe, p_hi):
        if since == period:
            put_aside(state, top + 1, largest, not aside)
            aside, last_row = True, state.shape[0] // WIDTH
            since = 0
        since += 1
        step = path_step[p]
        if top < n - 1 and state[LIVE + top] != 0:
            top = leave_top(
                ledger, state, top, n, mm_ptr[step], mm_ptr[step + 1], state[ROOM + top],
                mm_pos, mm_score, mm_before, mm_charge, gate, cap, True, last_row,
            )  # fmt: skip
        careful_step(
            ledger, state, top + 1, step, g, gate, cap, gate_from, largest,
            drafted, mm_ptr, mm_pos, mm_score, mm_before, mm_charge, edge_next, edge_accepted, edge_tokens,
        )  # fmt: skip
    if aside:
        put_aside(state, top + 1, largest, False)
    return top, offered, aside, num_marks


def emit(values, before, sums, top, n):  # type: ignore[no-untyped-def]
    """Add one figure of all lanes to its sums, as the difference to the gate before."""
    for k in range(top):
        now = values[k]
        sums[k] += now - before[k]
        before[k] = now
    last = values[top]
    for k in range(top, n):
        sums[k] += last - before[k]
        before[k] = last


def emit_row(state, values, before, sums, top, n, largest, offered, ended, aside):  # type: ignore[no-untyped-def]
    """Unpack the counters of one row and add them to the sums."""
    tally = BINS + (largest // 8 + 1) * WIDTH
    for f in range(HISTOGRAM + largest + 1):
        source, shift, mask = WORD, AT_GATE + 8 * (f - BY_GATE), 255
        if f >= HISTOGRAM:
            source, shift = BINS + ((f - HISTOGRAM) >> 3) * WIDTH, 8 * ((f - HISTOGRAM) & 7)
        elif f == TOKENS:
            shift, mask = 0, (1 << AT_RELAXED) - 1
        elif f == RELAXED:
            shift, mask = AT_RELAXED, MAX_RELAXED
        if f == DRAFTED:
            for k in range(top + 1):
                values[k] = state[SEEN + k] if ended else offered
        else:
            packed, more = state[source : source + WIDTH], state[tally + f * WIDTH : tally + (f + 1) * WIDTH]
            for k in range(top + 1):
                values[k] = (packed[k] >> shift) & mask
            for k in range(top + 1 if aside else 0):
                values[k] += more[k]
        if f == EXACT:
            for k in range(top + 1):
                values[k] = 1 if values[k] == 0 else 0
        emit(values, before[f], sums[f], top, n)


def walk_lanes(  # type: ignore[no-untyped-def]
    requests, g_lo, g_hi, budgets, gates, caps, cap_most, gate_from, limit, path_ptr, path_step, plain,
    drafted, mm_ptr, mm_pos, mm_score, mm_before, mm_charge, edge_next, edge_accepted, edge_tokens, edge_word, largest,
    ledger, state, values, base_bins, gate_before, passing, tokens_at, first, wanted, marks, num_marks, marked_ledger,
    marked_state, sums, spent_of, row_of,
):  # fmt: skip
    """Walk some requests under the gates ``g_lo .. g_hi - 1``, all caps and all budgets.

    Parameters
    ----------
    requests : int64
        Which.
    budgets, gates, caps : float64
        Ascending; at most ``WIDTH`` budgets.
    cap_most : int64 (caps,)
        Relaxed tokens that each cap allows in a block, K at most.
    gate_from : int32 (m,)
        Index of the first gate that lets this mismatch and those before it in its block pass.
    plain : bool (S,)
        Steps of which no outcome ends the request.
    mm_before, mm_charge : float64 (m,)
        Block charge without and with a mismatch, all before it accepted.
    edge_word : int64 (S + m,)
        Counters of an edge, packed, without who refused.
    largest : int
        K.
    ledger .. marked_state
        See :func:`scratch`.
    sums : int32 (g_hi - g_lo, caps, HISTOGRAM + K + 1, budgets), out
        Sums over requests, as differences to the gate before.
    spent_of : float64 (R, g_hi - g_lo, caps, budgets), out
        Ledgers, at the first gate of each run of gates that do the same.
    row_of : int32 (R, g_hi - g_lo), out
        That first gate, counted from ``g_lo``.
    """
    n, num_caps = budgets.shape[0], caps.shape[0]
    aside = False
    for b in range(n):
        ledger[BUDGETS + b] = budgets[b]
    for place in range(requests.shape[0]):
        one = requests[place]
        p_lo, p_hi = path_ptr[one], path_ptr[one + 1]
        for g in range(first.shape[0]):
            first[g] = p_hi
        for p in range(p_lo, p_hi):
            for j in range(mm_ptr[path_step[p]], mm_ptr[path_step[p] + 1]):
                first[gate_from[j]] = min(first[gate_from[j]], p)  # the first step that this gate changes
        for c in range(num_caps):
            clear(gate_before[c])
            num_marks[c] = 0
        row = 0
        top, offered, longest = 0, 0, 0
        safe = p_hi
        for g in range(g_lo, g_hi):
            if g == g_lo or first[g] < p_hi:
                row = g - g_lo
            row_of[one, g - g_lo] = row
            if row != g - g_lo:
                continue
            start = p_lo if g == g_lo else first[g]
            # Marks are wanted where a later gate goes on, unless one before it goes on from farther up the path.
            num_wanted, above = 0, p_hi
            for later in range(g + 1, g_hi):
                if first[later] <= start or num_wanted == MARKS:
                    break
                if first[later] < above:
                    above = first[later]
                    wanted[num_wanted] = above
                    num_wanted += 1
            tokens = 0 if start == p_lo else tokens_at[start - p_lo]
            safe = safe if safe < start else -1
            for p in range(start, p_hi):
                step = path_step[p]
                tokens_at[p - p_lo] = tokens
                count = 0
                for j in range(mm_ptr[step], mm_ptr[step + 1]):
                    count += 1 if gate_from[j] <= g else 0  # ascending within a step
                passing[p - p_lo] = count
                longest = max(longest, count)
                if safe < 0 and not (plain[step] and tokens + drafted[step] + 1 < limit[one]):
                    safe = p
                tokens += edge_tokens[mm_ptr[step] + step + count]
            safe = p_hi if safe < 0 else safe
            for c in range(num_caps):
                while num_marks[c] > 0 and marks[c, num_marks[c] - 1, PLACE] > start:
                    num_marks[c] -= 1
                if c == 0 or cap_most[c - 1] < longest:  # else the cap below this one never bound: the same walk
                    top, offered, aside, num_marks[c] = walk_row(
                        ledger, state, base_bins, n, g, gates[g], caps[c], cap_most[c], gate_from, passing,
                        path_step, p_lo, safe, p_hi, limit[one], drafted, mm_ptr, mm_pos, mm_score, mm_before,
                        mm_charge, edge_next, edge_accepted, edge_tokens, edge_word, largest,
                        marks[c], num_marks[c], wanted, num_wanted, marked_ledger[c], marked_state[c],
                    )  # fmt: skip
                spent_row = spent_of[one, row, c]
                for b in range(top):
                    spent_row[b] = ledger[SPENT + b]
                spent = ledger[SPENT + top]
                for b in range(top, n):
                    spent_row[b] = spent
                emit_row(
                    state, values, gate_before[c], sums[row, c], top, n, largest, offered, safe < p_hi, aside
                )  # fmt: skip


def store(sums, at, paired, counts, histogram, exact, same):  # type: ignore[no-untyped-def]
    """Write the sums of a tile to where its settings stand: ``at`` int64 (gates, caps, budgets).

    Makes sums of the differences along the gates first, in place. The other arrays as in
    :class:`asdsim.walk.product.Sums`.
    """
    num_gates, num_caps, num_budgets = at.shape
    figures = sums.shape[2]
    for g in range(1, num_gates):
        for c in range(num_caps):
            for f in range(figures):
                for b in range(num_budgets):
                    sums[g, c, f, b] += sums[g - 1, c, f, b]
    # In blocks, so that neither side jumps through memory: a grid runs over its caps first, a tile over its budgets.
    for b_lo in range(0, num_budgets, 16):
        for g in range(num_gates):
            for b in range(b_lo, min(b_lo + 16, num_budgets)):
                for c in range(num_caps):
                    setting = at[g, c, b]
                    steps, accepted = 0, 0
                    for a in range(figures - HISTOGRAM):
                        number = sums[g, c, HISTOGRAM + a, b]
                        histogram[setting, a] += number
                        steps += number
                        accepted += a * number
                    counts[STEPS, setting] += steps
                    counts[ACCEPTED, setting] += accepted
                    counts[OF_DRAFTED, setting] += sums[g, c, DRAFTED, b]
                    counts[OF_TOKENS, setting] += sums[g, c, TOKENS, b]
                    counts[OF_RELAXED, setting] += sums[g, c, RELAXED, b]
                    counts[OF_GATE, setting] += sums[g, c, BY_GATE, b]
                    counts[OF_BUDGET, setting] += sums[g, c, BY_BUDGET, b]
                    counts[OF_CAP, setting] += sums[g, c, BY_CAP, b]
                    exact[setting] += sums[g, c, EXACT, b]
                    if paired:
                        same[0, setting] += steps
                        same[1, setting] += sums[g, c, TOKENS, b]


def scratch(gates: int, caps: int, largest: int, longest: int) -> tuple[Any, ...]:
    """Return what ``walk_lanes`` works in, for a number of gates and caps, a largest K and a longest captured path."""
    figures, words = HISTOGRAM + largest + 1, largest // 8 + 1
    return (
        np.zeros(LEDGER_ROWS * WIDTH),
        np.zeros(BINS + (words + figures) * WIDTH, np.int64),
        np.zeros(WIDTH, np.int32),
        np.zeros(words, np.int64),
        np.zeros((caps, figures, WIDTH), np.int32),
        np.zeros(longest, np.int64),
        np.zeros(longest, np.int64),
        np.zeros(gates + 1, np.int64),
        np.zeros(MARKS, np.int64),
        np.zeros((caps, MARKS, BASE_BINS + words), np.int64),
        np.zeros(caps, np.int64),
        np.zeros((caps, MARKS, WIDTH)),
        np.zeros((caps, MARKS, (1 + words) * WIDTH), np.int64),
    )


HELPERS = (
    accept_one, accept_two, accept_one_of_two, accept_next, refuse, move_bin, begin_block, settle_all, put_aside,
    fill, clear, copy_rows, leave_top, careful_step, walk_row, emit, emit_row,
)  # fmt: skip


@cache
def kernel(reading: Reading) -> Any:
    """Return ``walk_lanes`` compiled for one reading."""
    import numba

    names = compiled_rule(reading)
    for function in HELPERS:
        names[function.__name__] = helper(named(rule.bind(function, **names), reading))
    return compile_cached(numba.njit, named(rule.bind(walk_lanes, **names), reading), nogil=True, _nrt=False)


@cache
def store_kernel() -> Any:
    """Return ``store`` compiled."""
    import numba

    return compile_cached(numba.njit, named(rule.bind(store), "all"), nogil=True, _nrt=False)


def python_kernel(reading: Reading) -> Any:
    """Return the same sources as plain Python, for tests."""
    names = python_rule(reading)
    for function in HELPERS:
        names[function.__name__] = rule.bind(function, **names)
    return rule.bind(walk_lanes, **names)
