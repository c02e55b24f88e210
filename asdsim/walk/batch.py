"""Requests of a trace share the steps of a batch: an event loop over exact walks.

An exact walk is a chain of steps, and nothing in it depends on the batch: the distinct chains of a trace are laid out
once (:func:`paths_of`), and every setting is a choice of one chain per request. Settings that choose alike are served
once.

Where the batch chooses the draft length, a walk depends on who shares its steps, and is walked here, block by block, on
a :class:`asdsim.walk.ladder.Ladder`. One loop serves both: ``row_of`` and ``take`` say what a request does next.

The engine is a static one. ``batch`` slots are refilled, in order, from a queue of the trace's own requests; every
iteration drafts and verifies one block for each request that is past its prompt, and takes as long as
:class:`Times` says. Prompts are read one at a time while everything else waits or, with ``chunk`` > 0, that many prompt
tokens an iteration beside the blocks.

        queue  [7 8 9 ..]
                  |  a slot falls free -> next request, its prompt first
        slots  [2: step 14] [5: prompt, 96 left] [6: step 2]     <- one iteration: b = 2 blocks, v = tokens verified
                  |  path at its end                                 (drafts, bonus rows, prompt), C = context
        done   [0 1 3 4]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..rules import asd as rule
from ..rules.asd import Reading, accept_block, settle
from ..rules.settings import STRICT, Grid, Policy, Schedule
from ..trace.graph import END, MISSING, Graph
from .compiled import compile_cached, compiled_rule, helper, named, python_rule
from .ladder import Ladder

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Times(NamedTuple):
    """Seconds of the parts of an iteration, for b blocks, v tokens in the pass and C tokens of context.

    A pass takes ``max(memory[b, v] + memory_per_context * C, compute[b, v] + compute_per_context * C)``; drafting for b
    blocks of at most k tokens takes ``draft[b, k]``; reading a prompt of p tokens by itself takes ``prompt[p]``.

    Attributes
    ----------
    memory, compute : float64 (batch + 1, most tokens in a pass + 1)
    memory_per_context, compute_per_context : float
    draft : float64 (batch + 1, largest K + 1)
    prompt : float64 (longest prompt + 1,)
    """

    memory: Floats
    compute: Floats
    memory_per_context: float
    compute_per_context: float
    draft: Floats
    prompt: Floats


class Paths(NamedTuple):
    """The distinct chains of steps that walks of a trace take, flat.

    Attributes
    ----------
    start : int64 (P + 1,)
        Steps of path p are ``start[p] .. start[p + 1] - 1``.
    drafted, tokens : int32
        Draft tokens verified and tokens committed by each step.
    proposed : int32, optional
        Draft tokens made for each step, where they are more than those verified.
    """

    start: Ints
    drafted: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    proposed: npt.NDArray[np.int32] | None = None


class ByBatch(NamedTuple):
    """A ladder and one setting, as the event loop takes them.

    Attributes
    ----------
    level : int64 (batch + 1,)
        First row of the rung on which a batch of each size stands.
    limit : int32 (R,)
    budget, gate, cap : float
        The others are arrays of the ladder, see :class:`asdsim.trace.graph.Graph`.
    """

    level: Ints
    limit: npt.NDArray[np.int32]
    drafted: npt.NDArray[np.int32]
    proposed: npt.NDArray[np.int32]
    mm_ptr: Ints
    mm_pos: npt.NDArray[np.int32]
    mm_score: Floats
    mm_charge: Floats
    edge_next: npt.NDArray[np.int32]
    edge_tokens: npt.NDArray[np.int32]
    budget: float
    gate: float
    cap: float


class Ends(NamedTuple):
    """What the event loop fills, for the R entries of a queue.

    Attributes
    ----------
    first, finish : float64 (R,)
        End of each request's first and last step, in seconds.
    gaps : float64
        Seconds between one emission of a request and the next, in the order of emissions; the first of a request counts
        from the end of its prompt.
    tokens : int64 (R,)
        Tokens committed.
    spent : float64 (R,)
        Ledger at the end; 0 on paths, which are walked already.
    edge : int64 (R,)
        Last edge, -1 on paths.
    """

    first: Floats
    finish: Floats
    gaps: Floats
    tokens: Ints
    spent: Floats
    edge: Ints


def paths_of(graph: Graph, grid: Grid, *, compiled: bool = True) -> tuple[Paths, Ints]:
    """Lay out the distinct paths of a grid's exact walks.

    Walks are told apart by a hash of 63 bits over their edges: the last edge alone names the output, not the blocks
    that it came in.

    Parameters
    ----------
    graph : Graph
        Laid out as the grid says.
    grid : Grid
        n settings, exact for every request.
    compiled : bool

    Returns
    -------
    paths : Paths
    which : int64 (n, R)
        Path of each walk.
    """
    requests = graph.num_requests
    setting, request = (part.ravel() for part in np.indices((len(grid), requests)))
    digest, steps = np.zeros(len(setting), np.int64), np.zeros(len(setting), np.int64)
    run = follow_kernel(grid.reading) if compiled else rule.bind(follow_walks, advance=_plain(grid.reading))
    walks = _on(graph, np.zeros(2, np.int64), STRICT)
    axes = (grid.budget, grid.gate, grid.cap, graph.root)
    none = np.zeros(0, np.int32)
    with np.errstate(over="ignore"):  # of the hash, in plain Python
        run(walks, *axes, setting, request, np.full(len(setting), -1, np.int64), digest, steps, none, none, none)
    _, first, which = np.unique(np.stack([digest, request, steps]), axis=1, return_index=True, return_inverse=True)
    start = np.concatenate([[0], np.cumsum(steps[first])]).astype(np.int64)
    drafted, tokens, proposed = (np.zeros(int(start[-1]), np.int32) for _ in range(3))
    with np.errstate(over="ignore"):
        run(walks, *axes, setting[first], request[first], start[:-1], digest, steps, drafted, tokens, proposed)
    return Paths(start, drafted, tokens, proposed), which.reshape(len(grid), requests).astype(np.int64)


def follow_walks(  # type: ignore[no-untyped-def]
    walks, budget, gate, cap, root, setting, request, at, digest, steps, drafted, tokens, proposed
):
    """Walk pairs of a setting and a request: hash and count their steps, and store these from ``at`` on, if >= 0."""
    for n in range(setting.shape[0]):
        owner, number = request[n], setting[n]
        step, spent, made, count = root[owner], 0.0, 0, 0
        mixed = np.int64(owner)
        while step >= 0:
            committed, after, spent, edge = advance(
                walks, step, owner, made, spent, budget[number], gate[number], cap[number]
            )
            if at[n] >= 0:
                drafted[at[n] + count] = walks.drafted[step]
                tokens[at[n] + count] = committed
                proposed[at[n] + count] = walks.proposed[step]
            mixed = (mixed ^ (edge + 1)) * 1099511628211 + (mixed >> 29)
            mixed &= 0x7FFFFFFFFFFFFFFF  # the bits on which plain and wrapping integers agree
            made += committed
            count += 1
            step = after
        if at[n] < 0:
            digest[n] = mixed
            steps[n] = count


def row_of(walks, step, busy):  # type: ignore[no-untyped-def]
    """Return the row of a step in a batch of ``busy`` requests: on a path, the step itself."""
    return step


def take(walks, row, until, owner, tokens, spent):  # type: ignore[no-untyped-def]
    """Return (tokens committed, next step, ledger, edge) of the step at a row, on a path that ends at ``until``."""
    after = row + 1
    return walks.tokens[row], after if after < until else END, spent, -1


def row_by_batch(walks, step, busy):  # type: ignore[no-untyped-def]
    """Return the row of a step on the rung of a batch."""
    return walks.level[busy] + step


def take_by_batch(walks, row, until, owner, tokens, spent):  # type: ignore[no-untyped-def]
    """Do what :func:`take` does on a ladder, for a request that has ``tokens`` and has ``spent``."""
    return advance(walks, row, owner, tokens, spent, walks.budget, walks.gate, walks.cap)


def advance(walks, row, owner, tokens, spent, budget, gate, cap):  # type: ignore[no-untyped-def]
    """Return what :func:`take` does, under a setting."""
    lo = walks.mm_ptr[row]
    room = walks.limit[owner] - tokens
    outcome, charge, count, verdict = accept_block(
        walks.mm_pos, walks.mm_score, walks.mm_charge, lo, walks.mm_ptr[row + 1], room, spent, budget, gate, cap
    )
    edge = lo + row + outcome
    committed = min(walks.edge_tokens[edge], room)
    return committed, walks.edge_next[edge] if committed < room else END, settle(spent, charge), edge


def serve(  # type: ignore[no-untyped-def]
    walks, begin, until, owner, prompt, arrival, batch, chunk, times, out
):
    """Serve every request once; the order of arrival is the order of the queue.

    Parameters
    ----------
    walks : Paths or ByBatch
    begin, until : int64 (R,)
        First step of each request, and the end of its path. A request that begins where it ends has none.
    owner : int64 (R,)
        Request of the graph, for its limit.
    prompt : int64 (R,)
        Tokens of each prompt.
    arrival : float64 (R,)
        Seconds, ascending; all 0 is a closed loop of ``batch`` requests at a time.
    batch, chunk : int
        Slots; prompt tokens read beside each iteration, 0 reads a prompt by itself.
    times : Times
    out : Ends
        Filled.

    Returns
    -------
    now : float
        Seconds at the end.
    iterations : int
    emitted : int
        Entries of ``out.gaps`` that were filled.
    lost : int
        Requests that met a prefix which was not captured; they end there, and nothing of the run is exact.
    """
    requests = begin.shape[0]
    request = np.zeros(batch, np.int64)
    step = np.zeros(batch, np.int64)
    context = np.zeros(batch, np.int64)
    unread = np.zeros(batch, np.int64)
    last = np.zeros(batch, np.float64)
    made = np.zeros(batch, np.int64)
    spent = np.zeros(batch, np.float64)
    now = 0.0
    busy, admitted, served, iterations, emitted, lost = 0, 0, 0, 0, 0, 0
    while served < requests:
        while busy < batch and admitted < requests and arrival[admitted] <= now:
            if begin[admitted] == until[admitted]:  # nothing to generate
                out.first[admitted] = now
                out.finish[admitted] = now
                served += 1
            else:
                request[busy] = admitted
                step[busy] = begin[admitted]
                made[busy] = 0
                spent[busy] = 0.0
                context[busy] = prompt[admitted]
                unread[busy] = prompt[admitted] if chunk > 0 else 0
                if chunk == 0:
                    now += times.prompt[prompt[admitted]]
                last[busy] = now
                busy += 1
            admitted += 1
        if busy == 0:
            if admitted < requests:
                now = max(now, arrival[admitted])
            continue
        blocks, verified, held, widest, room = 0, 0, 0, 0, chunk
        for slot in range(busy):
            if unread[slot] > 0:
                read = min(room, unread[slot])
                room -= read
                verified += read
                unread[slot] -= read
                if unread[slot] == 0:
                    unread[slot] = -1  # read now; its first block comes with the next iteration
            else:
                row = row_of(walks, step[slot], busy)
                blocks += 1
                verified += walks.drafted[row] + 1
                held += context[slot]
                widest = max(widest, walks.proposed[row])
        memory = times.memory[blocks, verified] + times.memory_per_context * held
        compute = times.compute[blocks, verified] + times.compute_per_context * held
        now += times.draft[blocks, widest] + max(memory, compute)
        iterations += 1
        together, kept = busy, 0  # requests stay in the order in which they came: prompts are read in that order
        for slot in range(busy):
            if unread[slot] < 0:
                unread[slot] = 0
                last[slot] = now
            elif unread[slot] == 0:
                who = request[slot]
                if step[slot] == begin[who]:
                    out.first[who] = now
                out.gaps[emitted] = now - last[slot]
                emitted += 1
                last[slot] = now
                row = row_of(walks, step[slot], together)
                committed, after, spent[slot], edge = take(walks, row, until[who], owner[who], made[slot], spent[slot])
                context[slot] += committed
                made[slot] += committed
                step[slot] = after
                if after < 0:
                    out.finish[who] = now
                    out.tokens[who] = made[slot]
                    out.spent[who] = spent[slot]
                    out.edge[who] = edge
                    served += 1
                    if after == MISSING:
                        lost += 1
                    continue
            request[kept] = request[slot]
            step[kept] = step[slot]
            context[kept] = context[slot]
            unread[kept] = unread[slot]
            last[kept] = last[slot]
            made[kept] = made[slot]
            spent[kept] = spent[slot]
            kept += 1
        busy = kept
    return now, iterations, emitted, lost


@cache
def kernel(reading: Reading | None = None) -> Any:
    """Return ``serve``, compiled; with a reading of the rule, for a ladder."""
    import numba

    if reading is None:
        bound = {"row_of": helper(named(rule.bind(row_of), "paths")), "take": helper(named(rule.bind(take), "paths"))}
        return compile_cached(numba.njit, named(rule.bind(serve, **bound), "paths"), nogil=True)
    walk = helper(named(rule.bind(take_by_batch, advance=_compiled(reading)), reading))
    bound = {"row_of": helper(named(rule.bind(row_by_batch), "all")), "take": walk}
    return compile_cached(numba.njit, named(rule.bind(serve, **bound), reading), nogil=True)


@cache
def follow_kernel(reading: Reading) -> Any:
    """Return ``follow_walks``, compiled."""
    import numba

    follow = rule.bind(follow_walks, advance=_compiled(reading))
    return compile_cached(numba.njit, named(follow, reading), nogil=True)


@cache
def _compiled(reading: Reading) -> Any:
    """Return ``advance``, compiled."""
    given = compiled_rule(reading)
    block = helper(named(rule.bind(accept_block, judge=given["judge"]), reading))
    return helper(named(rule.bind(advance, accept_block=block, settle=given["settle"]), reading))


def _plain(reading: Reading) -> Any:
    """Return ``advance`` as plain Python."""
    given = python_rule(reading)
    return rule.bind(advance, accept_block=rule.bind(accept_block, judge=given["judge"]), settle=given["settle"])


def python_kernel(reading: Reading) -> Any:
    """Return ``serve`` for a ladder as plain Python."""
    return rule.bind(serve, row_of=row_by_batch, take=rule.bind(take_by_batch, advance=_plain(reading)))


@dataclass(frozen=True)
class Served:
    """What one simulation gave.

    Attributes
    ----------
    seconds : float
        From the first arrival to the last token.
    iterations : int
    arrival, first, finish : float64 (R,)
        Seconds at which each request came, had its first tokens, and was done.
    gaps : float64
        Seconds between one emission of a request and the next, over all requests. Each emission is a burst of the
        tokens that its step committed.
    tokens : int64 (R,)
        Tokens of each request.
    spent : float64 (R,)
        Ledger at the end of each request, where it was walked here; else 0.
    edge : int64 (R,)
        Last edge in the ladder, where it was walked here; else -1.
    lost : int
        Requests that left the trace: with one or more, nothing here is exact.
    """

    seconds: float
    iterations: int
    arrival: Floats
    first: Floats
    finish: Floats
    gaps: Floats
    tokens: Ints
    spent: Floats
    edge: Ints
    lost: int = 0


def simulate(
    paths: Paths, which: Ints, prompt: Ints, times: Times, *, batch: int, arrival: Floats | None = None, chunk: int = 0,
    compiled: bool = True,
) -> Served:  # fmt: skip
    """Serve the requests of one setting, each on its path ``which`` int64 (R,); parameters as :func:`serve`."""
    whole = paths if paths.proposed is not None else paths._replace(proposed=paths.drafted)
    begin, until = paths.start[which], paths.start[which + 1]
    return _run(
        kernel() if compiled else serve, whole, (begin, until, which), int((until - begin).sum()), prompt, times,
        batch, arrival, chunk,
    )  # fmt: skip


def simulate_by_batch(
    ladder: Ladder, schedule: Schedule, policy: Policy, requests: Ints, prompt: Ints, times: Times, *, batch: int,
    arrival: Floats | None = None, chunk: int = 0, compiled: bool = True,
) -> Served:  # fmt: skip
    """Serve requests under a setting whose draft length the batch chooses at every step.

    The batch is all requests that hold a slot, those whose prompt is being read among them.

    Parameters
    ----------
    ladder : Ladder
        Laid out as the policy says, with a rung for every draft length of the schedule.
    schedule : Schedule
    policy : Policy
        B, g, M and their reading.
    requests : int64 (N,)
        Requests of the ladder, in the order of the queue.
    prompt, times, batch, arrival, chunk
        As :func:`serve`.

    Raises
    ------
    UsageError
        If the ladder has no rung for a draft length.
    """
    lacking = set(schedule.lengths) - set(ladder.lengths)
    if lacking:
        raise UsageError(f"no draft length {min(lacking)} in the ladder of {ladder.lengths}")
    rung = [0, *(ladder.lengths.index(schedule.at(busy)) for busy in range(1, batch + 1))]
    walks = _on(ladder, ladder.base * np.array(rung, np.int64), policy)
    begin = ladder.root[requests].astype(np.int64)
    run = kernel(policy.reading) if compiled else python_kernel(policy.reading)
    most = int(ladder.limit[requests].sum())  # every step commits a token at least
    return _run(run, walks, (begin, np.full(len(begin), END, np.int64), requests), most, prompt, times, batch, arrival,
                chunk)  # fmt: skip


def _on(graph: Graph, level: Ints, policy: Policy) -> ByBatch:
    same = {name: getattr(graph, name) for name in ByBatch._fields if hasattr(graph, name)}
    return ByBatch(level=level, budget=policy.budget, gate=policy.gate, cap=policy.cap, **same)


def _run(
    run: Any, walks: Paths | ByBatch, rows: tuple[Ints, Ints, Ints], most: int, prompt: Ints, times: Times, batch: int,
    arrival: Floats | None, chunk: int,
) -> Served:  # fmt: skip
    number = len(prompt)
    came = np.zeros(number) if arrival is None else arrival
    out = Ends(
        np.zeros(number), np.zeros(number), np.zeros(most), np.zeros(number, np.int64), np.zeros(number),
        np.full(number, -1, np.int64),
    )  # fmt: skip
    seconds, iterations, emitted, lost = run(walks, *rows, prompt, came, batch, chunk, times, out)
    return Served(
        float(seconds), int(iterations), came, out.first, out.finish, out.gaps[:emitted], out.tokens, out.spent,
        out.edge, int(lost),
    )  # fmt: skip
