"""Requests of a trace share the steps of a batch: an event loop over exact walks.

An exact walk is the chain of steps that leads to its last edge, so nothing is walked again: the distinct chains of a
trace are laid out once (:func:`paths_of`), and every setting is a choice of one chain per request. Settings that choose
alike are simulated once.

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

from ..trace.graph import Graph
from .compiled import compile_cached

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
        Draft tokens and committed tokens of each step.
    """

    start: Ints
    drafted: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]


def paths_of(graph: Graph, parent: Ints, edges: Ints) -> tuple[Paths, Ints]:
    """Lay out the paths that end at the given edges.

    Parameters
    ----------
    graph : Graph
    parent : int64 (S,)
        The edge that leads to each step, -1 for a root.
    edges : int64 (settings, R)
        Last edge of each exact walk, -1 for a request without steps.

    Returns
    -------
    paths : Paths
    which : int64 (settings, R)
        Path of each walk.
    """
    distinct, which = np.unique(edges, return_inverse=True)
    first = graph.mm_ptr[:-1] + np.arange(graph.num_steps)
    drafted: list[int] = []
    tokens: list[int] = []
    start = [0]
    for last in distinct.tolist():
        chain = []
        edge = last
        while edge >= 0:
            step = int(np.searchsorted(first, edge, side="right")) - 1
            chain.append((int(graph.drafted[step]), int(graph.edge_tokens[edge])))
            edge = int(parent[step])
        for width, committed in reversed(chain):
            drafted.append(width)
            tokens.append(committed)
        start.append(len(drafted))
    flat = Paths(np.array(start, np.int64), np.array(drafted, np.int32), np.array(tokens, np.int32))
    return flat, which.reshape(edges.shape).astype(np.int64)


def parent_edges(graph: Graph) -> Ints:
    """Return the edge that leads to each step, int64 (S,); -1 for roots."""
    parent = np.full(graph.num_steps, -1, np.int64)
    edges = np.flatnonzero(graph.edge_next >= 0)
    parent[graph.edge_next[edges]] = edges
    return parent


def serve(  # type: ignore[no-untyped-def]
    paths, which, prompt, arrival, batch, chunk, times, first, finish, gaps
):
    """Serve every request once; the order of arrival is the order of the queue.

    Parameters
    ----------
    paths : Paths
    which : int64 (R,)
        Path of each request.
    prompt : int64 (R,)
        Tokens of each prompt.
    arrival : float64 (R,)
        Seconds, ascending; all 0 is a closed loop of ``batch`` requests at a time.
    batch, chunk : int
        Slots; prompt tokens read beside each iteration, 0 reads a prompt by itself.
    times : Times
    first, finish : float64 (R,)
        Filled with the end of each request's first and last step.
    gaps : float64 (steps of all requests,)
        Filled with the seconds between one emission of a request and the next; the first counts from the end of its
        prompt.

    Returns
    -------
    now : float
        Seconds at the end.
    iterations : int
    emitted : int
        Entries of ``gaps`` that were filled.
    """
    requests = which.shape[0]
    request = np.zeros(batch, np.int64)
    step = np.zeros(batch, np.int64)
    context = np.zeros(batch, np.int64)
    unread = np.zeros(batch, np.int64)
    last = np.zeros(batch, np.float64)
    now = 0.0
    busy, admitted, served, iterations, emitted = 0, 0, 0, 0, 0
    while served < requests:
        while busy < batch and admitted < requests and arrival[admitted] <= now:
            path = which[admitted]
            if paths.start[path] == paths.start[path + 1]:  # nothing to generate
                first[admitted] = now
                finish[admitted] = now
                served += 1
            else:
                request[busy] = admitted
                step[busy] = paths.start[path]
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
                width = paths.drafted[step[slot]]
                blocks += 1
                verified += width + 1
                held += context[slot]
                widest = max(widest, width)
        memory = times.memory[blocks, verified] + times.memory_per_context * held
        compute = times.compute[blocks, verified] + times.compute_per_context * held
        now += times.draft[blocks, widest] + max(memory, compute)
        iterations += 1
        kept = 0  # requests stay in the order in which they came: prompts are read in that order
        for slot in range(busy):
            if unread[slot] < 0:
                unread[slot] = 0
                last[slot] = now
            elif unread[slot] == 0:
                who = request[slot]
                path = which[who]
                if step[slot] == paths.start[path]:
                    first[who] = now
                gaps[emitted] = now - last[slot]
                emitted += 1
                last[slot] = now
                context[slot] += paths.tokens[step[slot]]
                step[slot] += 1
                if step[slot] == paths.start[path + 1]:
                    finish[who] = now
                    served += 1
                    continue
            request[kept] = request[slot]
            step[kept] = step[slot]
            context[kept] = context[slot]
            unread[kept] = unread[slot]
            last[kept] = last[slot]
            kept += 1
        busy = kept
    return now, iterations, emitted


@cache
def kernel() -> Any:
    """Return ``serve``, compiled."""
    import numba

    return compile_cached(numba.njit, serve, nogil=True)


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
    """

    seconds: float
    iterations: int
    arrival: Floats
    first: Floats
    finish: Floats
    gaps: Floats


def simulate(
    paths: Paths, which: Ints, prompt: Ints, times: Times, *, batch: int, arrival: Floats | None = None, chunk: int = 0,
    compiled: bool = True,
) -> Served:  # fmt: skip
    """Serve the requests of one setting; parameters as :func:`serve`."""
    number = len(which)
    came = np.zeros(number) if arrival is None else arrival
    first, finish = np.zeros(number), np.zeros(number)
    gaps = np.zeros(int((paths.start[which + 1] - paths.start[which]).sum()))
    run = kernel() if compiled else serve
    seconds, iterations, emitted = run(paths, which, prompt, came, batch, chunk, times, first, finish, gaps)
    assert emitted == len(gaps)
    return Served(float(seconds), int(iterations), came, first, finish, gaps)
