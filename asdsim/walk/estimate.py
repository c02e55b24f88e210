"""Estimates for walks that leave a trace of one path.

``aligned`` and ``recorded`` continue at one captured step, chosen by position or by count. ``pooled`` treats steps as
draws: what a block accepts depends on how the block before it ended (a block that follows a full one starts in easy
text, one that follows a correction starts right behind a hard token), and a relaxed rule changes how often each
happens. So at a prefix that was not captured it continues with a step drawn from all captured ones whose own
predecessor ended in the same way, and so on from there; the request ends where its captured output ended. Every
request is walked many times and the figures are averaged.

How far each is off is measured by :mod:`asdsim.studies.fidelity`. On SmolLM2 with layer-skip, on prompts that had no
part in its making, ``pooled`` was closer than both others; with prompt look-up, whose drafts feed on a text
that begins to repeat itself, all three are far off, ``aligned`` least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rules.settings import Grid
from ..trace.graph import END, MISSING, Graph, Graphs, whole_graph
from .off_trace import OFF_TRACE, off_trace_mode
from .request import ACCEPTED, LEFT, STEPS, TOKENS
from .sweep import Walks, walk_grid

ESTIMATORS = {name: mode.how for name, mode in OFF_TRACE.items() if mode.estimate}
"""Ways to continue at a prefix that was not captured."""

DRAWS = 32
COPIES = 4
"""Sizes of a graph that drawing takes: the captured steps, two copies of them, and the random numbers."""
SEED = 0


def pooled_graph(graph: Graph, draws: int = DRAWS, seed: int | np.random.Generator = SEED) -> Graph:
    """Return a graph in which every request occurs ``draws`` times, each with its own random continuations.

    Request r of draw d is request ``d * R + r``. Captured steps keep their captured edges; a missing edge leads to a
    second copy of the steps, in which every edge leads to a drawn step. Steps in which the request ended, or that the
    token limit cut short, are not drawn. One generator, handed in draw after draw, gives the draws of one call.
    """
    steps, requests = graph.num_steps, graph.num_requests
    follow = _follow(graph, draws, np.random.default_rng(seed))
    copies = 2 * draws
    mismatches = len(graph.mm_pos)
    shifts = np.repeat(np.arange(draws), requests)

    def many(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.tile(values, copies)

    return replace(
        graph,
        request_ids=graph.request_ids * draws,
        root=np.where(np.tile(graph.root, draws) >= 0, np.tile(graph.root, draws) + 2 * steps * shifts, END).astype(
            np.int32
        ),
        limit=np.tile(_captured_tokens(graph), draws),
        step_request=many(graph.step_request),
        drafted=many(graph.drafted),
        start=many(graph.start),
        mm_ptr=np.concatenate([[0], *(graph.mm_ptr[1:] + mismatches * copy for copy in range(copies))]).astype(
            np.int64
        ),
        mm_pos=many(graph.mm_pos),
        mm_regret=many(graph.mm_regret),
        mm_score=many(graph.mm_score),
        mm_charge=many(graph.mm_charge),
        edge_next=np.concatenate(follow) if follow else graph.edge_next,
        edge_accepted=many(graph.edge_accepted),
        edge_tokens=many(graph.edge_tokens),
        edge_margin=many(graph.edge_margin),
        path_ptr=np.zeros(requests * draws + 1, np.int64),
        path_step=np.zeros(0, np.int32),
        align_ptr=np.zeros(requests * draws + 1, np.int64),
        align_step=np.zeros(0, np.int32),
    )


def drawn_graphs(graph: Graph, draws: int, seed: int) -> Iterator[Graph]:
    """Yield :func:`pooled_graph` of one draw at a time, all from one generator; they share all but their edges."""
    rng = np.random.default_rng(seed)
    first: Graph | None = None
    for _ in range(draws):
        if first is None:
            first = pooled_graph(graph, 1, rng)
            yield first
        else:
            yield replace(first, edge_next=np.concatenate(_follow(graph, 1, rng)))


def _follow(graph: Graph, draws: int, rng: np.random.Generator) -> list[npt.NDArray[np.int32]]:
    """Return where the edges of each copy of the steps lead, see :func:`pooled_graph`."""
    steps, edges = graph.num_steps, len(graph.edge_next)
    place = np.arange(steps)
    first, last = graph.mm_ptr[:-1] + place, graph.mm_ptr[1:] + place
    full = np.zeros(edges, bool)
    full[last] = True
    pools = _pools(graph, first)
    follow: list[npt.NDArray[np.int32]] = []
    for draw in range(draws):
        offset = np.int32(2 * steps * draw)
        drawn = np.full(2 * edges, MISSING, np.int32)
        kind = np.concatenate([full, full])
        for ended_full in (False, True):
            wanted = np.flatnonzero(kind == ended_full)
            source = pools[ended_full]
            if len(source):
                drawn[wanted] = source[rng.integers(len(source), size=len(wanted))] + steps + offset
        captured = graph.edge_next
        shifted = np.where(captured >= 0, captured + offset, captured)
        follow.append(np.where(captured == MISSING, drawn[:edges], shifted).astype(np.int32))
        follow.append(drawn[edges:])
    return follow


def _pools(graph: Graph, first: npt.NDArray[np.int64]) -> dict[bool, npt.NDArray[np.int32]]:
    """Return the captured steps that may be drawn, by whether the step before them was accepted whole."""
    request = np.repeat(np.arange(graph.num_requests), np.diff(graph.path_ptr))
    before, step = graph.path_step[:-1], graph.path_step[1:]
    drawable = request[:-1] == request[1:]
    drawable &= graph.edge_next[first[step]] != END
    drawable &= graph.start[step] + graph.drafted[step] + 1 <= graph.limit[request[1:]]
    whole = graph.start[step] - graph.start[before] == graph.drafted[before] + 1
    pools = {key: step[drawable & (whole == key)].astype(np.int32) for key in (False, True)}
    for key in (False, True):
        if not len(pools[key]):
            pools[key] = pools[not key]
    return pools


def drawn_walks(
    graph: Graph, grid: Grid, true: Walks, *, draws: int = DRAWS, seed: int = SEED, device: str = "auto",
    threads: int = 0,
) -> Walks:  # fmt: skip
    """Walk a grid with random continuations; where nothing is missing every draw is the true walk.

    Parameters
    ----------
    graph : Graph
    grid : Grid
    true : Walks
        The grid as captured, (n, R).
    draws, seed : int
        As for :func:`pooled_graph`. The graph of no more than one draw is in memory.
    device, threads
        As for :func:`asdsim.walk.sweep.walk_grid`.

    Returns
    -------
    Walks
        (n, draws * R), request r of draw d in column ``d * R + r``. ``LEFT`` of the counts is that of the true walk, so
        that ``exact`` says what is captured. ``edge`` names no output.
    """
    counts, spent, edge = [], [], []
    histogram = np.zeros_like(true.histogram)
    for drawn in drawn_graphs(graph, draws, seed):
        # Only where there is no step to draw does an edge of the pooled graph lead nowhere.
        walks = walk_grid(drawn, grid, off_trace="aligned", device=device, threads=threads)
        # A drawn walk ends where the captured output ended, an exact one where it ends.
        counts.append(np.where(true.exact[..., None], true.counts, walks.counts))
        counts[-1][..., LEFT] = true.counts[..., LEFT]
        spent.append(np.where(true.exact, true.spent, walks.spent))
        edge.append(walks.edge)
        histogram += walks.histogram
    return Walks(
        np.concatenate(counts, axis=1), np.concatenate(spent, axis=1), np.concatenate(edge, axis=1),
        histogram + draws * _beyond(graph, grid, true),
    )  # fmt: skip


def mean_walks(
    graph: Graphs, grid: Grid, true: Walks, *, draws: int = DRAWS, seed: int = SEED, device: str = "auto",
    threads: int = 0,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:  # fmt: skip
    """Average walks over draws, where they leave the trace; elsewhere they are the true ones.

    Parameters
    ----------
    graph, grid, true, device, threads
        As for :func:`drawn_walks`.
    draws, seed : int
        As for :func:`pooled_graph`. No more than one draw is in memory.

    Returns
    -------
    counts : float64 (n, R, NUM_COUNTS)
    spent : float64 (n, R)
    """
    counts, spent = np.zeros(true.counts.shape, np.int64), np.zeros(true.spent.shape)
    for drawn in drawn_graphs(whole_graph(graph, COPIES), draws, seed) if not true.exact.all() else ():
        walks = walk_grid(drawn, grid, off_trace="aligned", device=device, threads=threads)
        counts += walks.counts
        spent += walks.spent
    exact = true.exact
    return np.where(exact[..., None], true.counts, counts / draws), np.where(exact, true.spent, spent / draws)


def _beyond(graph: Graph, grid: Grid, true: Walks) -> npt.NDArray[np.int64]:
    """Return what exact walks add to the histogram behind the end of the captured output, where draws end."""
    added = np.zeros_like(true.histogram)
    ends = _captured_tokens(graph)
    longer = true.exact & (true.counts[..., TOKENS] > ends)
    for r in np.flatnonzero(longer.any(axis=0)):
        rows = np.flatnonzero(longer[:, r])
        part = replace(grid, budget=grid.budget[rows], gate=grid.gate[rows], cap=grid.cap[rows], axes={}, params=[])
        whole, cut = (
            walk_grid(_one_request(graph, int(r), limit), part, device="cpu", threads=1).histogram
            for limit in (int(graph.limit[r]), int(ends[r]))
        )
        added[rows] += whole - cut
    return added


def _captured_tokens(graph: Graph) -> npt.NDArray[np.int32]:
    """Return int32 (R,): tokens of each captured output, at most the limit."""
    length = np.diff(graph.align_ptr).astype(np.int32)
    return np.where(length > 0, np.minimum(graph.limit, length), graph.limit).astype(np.int32)


def _one_request(graph: Graph, r: int, limit: int) -> Graph:
    return replace(
        graph, request_ids=graph.request_ids[r : r + 1], root=graph.root[r : r + 1], limit=np.array([limit], np.int32),
        path_ptr=graph.path_ptr[r : r + 2], align_ptr=graph.align_ptr[r : r + 2],
    )  # fmt: skip


def estimate(graph: Graph, grid: Grid, name: str, *, seed: int = SEED) -> npt.NDArray[np.float64]:
    """Estimate a grid on a graph of captured paths.

    Returns
    -------
    float64 (n, R, 4)
        Steps, accepted draft tokens, tokens and 1, per setting and request; averages over draws for ``pooled``.
    """
    if off_trace_mode(name, list(ESTIMATORS)).has_walks:
        counts = walk_grid(graph, grid, off_trace=name).counts.astype(np.float64)
    else:
        counts, _ = mean_walks(graph, grid, walk_grid(graph, grid), seed=seed)
    picked = counts[..., [STEPS, ACCEPTED, TOKENS]]
    return np.concatenate([picked, np.ones((*picked.shape[:2], 1))], axis=2)
