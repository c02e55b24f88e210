"""A trace as a graph of steps, laid out in flat arrays for the walk.

A step belongs to a token prefix. Whatever a rule decides, the step can only stop at one of its mismatches or run to the
end of its block, so it has (mismatches + 1) outcomes; each outcome commits known tokens and so leads to one next
prefix: to the step recorded there, to the end of the request, or to a prefix that was not captured.

Outcome ``j`` of step ``s`` is edge ``mm_ptr[s] + s + j``; ``j`` is the number of mismatches accepted, and the last
outcome is the full block. End of sequence and token limit are applied here, once: a mismatch behind them is not laid
out at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import TraceError, UsageError
from ..records import RequestRecord
from ..rules.scoring import (
    DEFAULT,
    Layout,
    Rows,
    draft_lengths,
    is_mismatch,
    lay_out,
    regrets_of,
    run_lengths,
)
from .tokens import parent_rows, prefix_tokens

if TYPE_CHECKING:
    from ..records import StepTables

END, MISSING = -1, -2
"""Values of ``edge_next`` (and of ``root``) that are not steps."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class GraphArrays(NamedTuple):
    """The arrays of a :class:`Graph` that compiled walks read: one argument, by name, for numba and for CUDA."""

    root: Int32
    limit: Int32
    drafted: Int32
    mm_ptr: Int64
    mm_pos: Int32
    mm_score: Float64
    mm_charge: Float64
    edge_next: Int32
    edge_accepted: Int32
    edge_tokens: Int32
    path_ptr: Int64
    path_step: Int32
    align_ptr: Int64
    align_step: Int32


@dataclass(frozen=True)
class Graph:
    """Flat arrays over R requests, S steps, m mismatches and S + m edges.

    Attributes
    ----------
    request_ids : list of str (R,)
    root : int32 (R,)
        First step of each request, ``END`` for a request without steps.
    limit : int32 (R,)
        Token limit of each request.
    step_request : int32 (S,)
        Request of each step.
    drafted : int32 (S,)
        Draft tokens K of each step that are verified.
    proposed : int32 (S,)
        Those that have to be drafted for it: with a threshold that drops the token it falls on, one more.
    start : int32 (S,)
        Tokens generated before each step.
    mm_ptr : int64 (S + 1,)
        Mismatches of step s are ``mm_ptr[s] .. mm_ptr[s + 1] - 1``.
    mm_pos : int32 (m,)
        Position i in the block.
    mm_regret : float64 (m,)
        r_i in logits.
    mm_score, mm_charge : float64 (m,)
        What the rule compares with its gate, and what it adds to the ledger: r_i / q_i and r_i for ASD; see
        :mod:`asdsim.rules.scoring`.
    edge_next : int32 (S + m,)
        Next step, ``END`` or ``MISSING``.
    edge_accepted, edge_tokens : int32 (S + m,)
        Draft tokens accepted, and tokens committed with the correction or bonus token.
    edge_margin : float64 (S + m,), or empty in a graph that was kept on disk
        Smallest gap, in logits, between the target's two best tokens over the rows that an outcome relies on: all
        accepted positions and the one that gave the correction or bonus token.
    path_ptr : int64 (R + 1,), path_step : int32
        Steps of the captured path of each request, in order.
    align_ptr : int64 (R + 1,), align_step : int32
        For each number of generated tokens, the captured step nearest to it (the earlier one on a tie).
    max_draft : int
        Largest K.
    """

    request_ids: list[str]
    root: Int32
    limit: Int32
    step_request: Int32
    drafted: Int32
    proposed: Int32
    start: Int32
    mm_ptr: Int64
    mm_pos: Int32
    mm_regret: Float64
    mm_score: Float64
    mm_charge: Float64
    edge_next: Int32
    edge_accepted: Int32
    edge_tokens: Int32
    edge_margin: Float64
    path_ptr: Int64
    path_step: Int32
    align_ptr: Int64
    align_step: Int32
    max_draft: int

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.request_ids)

    @property
    def num_steps(self) -> int:
        """S."""
        return int(self.drafted.shape[0])

    @property
    def num_mismatches(self) -> int:
        """m."""
        return int(self.mm_pos.shape[0])

    @property
    def num_parts(self) -> int:
        """Parts that it is in memory by: this one holds all requests."""
        return 1

    @property
    def room(self) -> float:
        """Bytes for a graph in one piece: this one is there."""
        return float("inf")

    def parts(self) -> Iterator[tuple[slice, Graph]]:
        """Yield the requests of each part and their graph; see :class:`Graphs`."""
        yield slice(0, self.num_requests), self

    @property
    def arrays(self) -> GraphArrays:
        """What a compiled walk reads."""
        return GraphArrays(*(getattr(self, name) for name in GraphArrays._fields))

    def edge_of(self, edge: int) -> tuple[int, int]:
        """Return (step, outcome) of an edge."""
        first = self.mm_ptr[:-1] + np.arange(self.num_steps)
        step = int(np.searchsorted(first, edge, side="right")) - 1
        return step, int(edge - first[step])


class Graphs(Protocol):
    """A graph as the walk takes it: whole, or the requests a group at a time, each with a graph of its own.

    The one of a trace on disk is :class:`asdsim.trace.store.GraphStore`.
    """

    @property
    def request_ids(self) -> list[str]: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def max_draft(self) -> int: ...

    @property
    def num_mismatches(self) -> int: ...

    @property
    def num_parts(self) -> int: ...

    @property
    def room(self) -> float:
        """Bytes for a graph in one piece."""
        ...

    def parts(self) -> Iterator[tuple[slice, Graph]]:
        """Yield the requests of each part, in order, and their graph."""
        ...


STEP_BYTES, MISMATCH_BYTES, EDGE_BYTES = 32, 28, 12


def whole_graph(graphs: Graphs, copies: int = 1) -> Graph:
    """Return a graph in one piece: memory grows with the trace.

    Parameters
    ----------
    graphs : Graphs
    copies : int
        Of the graph that its use takes in all.

    Raises
    ------
    UsageError
        If it is not in one piece yet, and takes more memory than the trace may.
    """
    if isinstance(graphs, Graph):
        return graphs
    steps, mismatches = graphs.num_steps, graphs.num_mismatches
    needed = copies * (STEP_BYTES * steps + MISMATCH_BYTES * mismatches + EDGE_BYTES * (steps + mismatches))
    if needed > graphs.room:
        raise UsageError(
            f"this takes the graph of all requests at once, about {needed / 1e9:.1f} GB, and {graphs.room / 1e9:.1f} "
            "GB are left for it",
            fix="raise --memory; off-trace modes other than pooled go group by group",
        )
    return join_graphs(graph for _, graph in graphs.parts())


def join_graphs(graphs: Iterable[Graph]) -> Graph:
    """Return one graph of all requests from those of neighbouring groups."""
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    names: list[str] = []
    largest = requests = steps = mismatches = on_path = aligned = 0
    for graph in graphs:
        names += graph.request_ids
        largest = max(largest, graph.max_draft)
        shifts = {
            "step_request": requests, "root": steps, "edge_next": steps, "path_step": steps, "align_step": steps,
            "mm_ptr": mismatches, "path_ptr": on_path, "align_ptr": aligned,
        }  # fmt: skip
        for field in fields(Graph):
            values = getattr(graph, field.name)
            if not isinstance(values, np.ndarray):
                continue
            if field.name.endswith("_ptr"):
                values = values[1:] + shifts[field.name]
            elif field.name in shifts:
                values = np.where(values >= 0, values + shifts[field.name], values).astype(np.int32)
            parts.setdefault(field.name, []).append(values)
        requests, steps = requests + graph.num_requests, steps + graph.num_steps
        mismatches, on_path = mismatches + len(graph.mm_pos), on_path + len(graph.path_step)
        aligned += len(graph.align_step)
    whole: dict[str, npt.NDArray[Any]] = {}
    for name in list(parts):  # each let go once it is joined
        first = [np.zeros(1, np.int64)] if name.endswith("_ptr") else []
        whole[name] = np.concatenate([*first, *parts.pop(name)])
    return Graph(request_ids=names, max_draft=largest, **whole)


class _Blocks(NamedTuple):
    """What steps hold, over S steps and P rows: the columns that the layout of a graph is made from."""

    pos_ptr: Int64  # (S + 1,)
    request: Int32  # (S,) row of the request
    limit: Int32  # (S,) its token limit
    drafted: Int32  # (S,) draft tokens looked at
    proposed: Int32  # (S,) draft tokens made
    start: Int32  # (S,)
    draft: Int32  # (P,) -1 in bonus rows
    choice: Int32  # (P,)
    top: Float64  # (P, 2) or (P, 1) largest logits
    regret: Float64  # (P,) inf where the target forbids the token, NaN in bonus rows
    step: Int64  # (P,) step of each row
    place: Int32  # (P,) position in the block


class _Edges(NamedTuple):
    """Outcomes of all steps, over E = S + m edges."""

    first: Int64  # (S,) first edge of each step
    last: Int64  # (S,) last edge: the full block
    step: Int64  # (E,)
    accepted: Int32  # (E,)
    tokens: Int32  # (E,)


def build_graph(trace: StepTables, layout: Layout = DEFAULT, like: Graph | None = None) -> Graph:
    """Lay out a trace.

    Parameters
    ----------
    trace : StepTables
    layout : Layout
        The rule that scores and charges mismatches; by default ASD's r/q and r.
    like : Graph, optional
        Of the same trace under a layout with the same mismatches and draft length: steps lead where they lead there.

    Returns
    -------
    Graph

    Raises
    ------
    TraceError
        Where two steps of a request have the same prefix, a step's parent is not an earlier step, the rule cannot score
        a row, or blocks cannot be cut to the draft length asked for.
    """
    if layout.width > 0:
        trace.check_length(layout.width)
    requests = trace.request_records()
    blocks = _blocks(trace, requests, layout)
    stop, eos_end = _reach(requests, blocks)
    differs = is_mismatch(layout, blocks.draft, blocks.choice, blocks.regret)
    inside = blocks.place < blocks.drafted[blocks.step]
    rows = np.flatnonzero(inside & differs & (blocks.place < stop[blocks.step]))
    counts = np.bincount(blocks.step[rows], minlength=len(stop))
    mm_pos, mm_regret = blocks.place[rows], blocks.regret[rows]
    mm_score, mm_charge = lay_out(
        layout,
        Rows(
            tables=trace,
            rows=rows,
            step=blocks.step[rows],
            i=mm_pos.astype(np.int64),
            width=blocks.drafted[blocks.step[rows]].astype(np.int64),
            run=run_lengths(inside & (blocks.draft == blocks.choice), blocks.step, rows),
            regret=mm_regret,
            prefix=lambda step: prefix_tokens(trace, step),
        ),
    )
    if like is not None:
        return replace(like, mm_score=mm_score, mm_charge=mm_charge)
    edges = _outcomes(blocks, rows, counts, stop, eos_end)
    edge_next, root = _link(trace, requests, blocks, edges)
    path = np.flatnonzero(trace.column("steps", "wave") == 0).astype(np.int32)
    path_ptr = _offsets(np.bincount(blocks.request[path], minlength=len(requests)))
    aligned = [_nearest(path[lo:hi], blocks, edges) for lo, hi in pairwise(path_ptr.tolist())]
    return Graph(
        request_ids=[request.request_id for request in requests],
        root=root,
        limit=np.array([request.max_new_tokens for request in requests], np.int32),
        step_request=blocks.request,
        drafted=blocks.drafted,
        proposed=blocks.proposed,
        start=blocks.start,
        mm_ptr=_offsets(counts),
        mm_pos=mm_pos,
        mm_regret=mm_regret,
        mm_score=mm_score,
        mm_charge=mm_charge,
        edge_next=edge_next,
        edge_accepted=edges.accepted,
        edge_tokens=edges.tokens,
        edge_margin=_margins(blocks, edges),
        path_ptr=path_ptr,
        path_step=path,
        align_ptr=_offsets([len(steps) for steps in aligned]),
        align_step=np.concatenate(aligned) if aligned else np.zeros(0, np.int32),
        max_draft=int(blocks.drafted.max(initial=0)),
    )


def _offsets(counts: npt.ArrayLike) -> Int64:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _blocks(trace: StepTables, requests: list[RequestRecord], layout: Layout) -> _Blocks:
    drafted = trace.column("steps", "num_draft_tokens").astype(np.int32)
    draft_logit = trace.column("positions", "draft_logit")
    top = trace.column("positions", "top_logits")[:, :2].astype(np.float64)
    regret = regrets_of(top[:, 0], draft_logit)
    step = np.repeat(np.arange(len(drafted)), drafted + 1)
    request = np.ascontiguousarray(trace.step_request, np.int32)
    place = (np.arange(len(step)) - trace.pos_ptr[step]).astype(np.int32)
    verified = _verified(trace, layout, drafted, step, place)
    dropped = layout.threshold > 0 and layout.stop != "after"
    most = draft_lengths(replace(layout, threshold=0.0), drafted, None)
    return _Blocks(
        pos_ptr=trace.pos_ptr,
        request=request,
        limit=np.array([record.max_new_tokens for record in requests], np.int32)[request],
        drafted=verified,
        proposed=np.minimum(verified + np.int32(1), most) if dropped else verified,
        start=trace.column("steps", "start_pos").astype(np.int32),
        draft=trace.column("positions", "draft_id").astype(np.int32),
        choice=trace.column("positions", "argmax_id").astype(np.int32),
        top=top,
        regret=regret,
        step=step,
        place=place,
    )


def _verified(trace: StepTables, layout: Layout, drafted: Int32, step: Int64, place: Int32) -> Int32:
    """Return how many draft tokens of each step a layout looks at."""
    logprobs = None
    if layout.threshold:
        logprobs = np.full((len(drafted), int(drafted.max(initial=0)) + 1), np.nan)
        logprobs[step, place] = trace.column("positions", "draft_logprob")
    try:
        return draft_lengths(layout, drafted, logprobs)
    except ValueError as error:
        row = int(error.args[0])
        request = trace.request_records()[int(trace.step_request[row])]
        raise TraceError(
            "a draft threshold needs the column draft_logprob, which is missing here",
            where=f"request {request.request_id}, step {int(trace.column('steps', 'step_id')[row])}",
            fix="capture with a drafter that has a distribution: look-up has none",
        ) from None


def _ends_request(requests: list[RequestRecord], owner: Int32, tokens: Int32) -> Bools:
    """Return where a token is an EOS of the request that owns it and stops naturally."""
    by_eos: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        if request.stop == "natural":
            by_eos.setdefault(tuple(sorted(set(request.eos_ids))), []).append(index)
    ends = np.zeros(len(tokens), bool)
    for eos_ids, members in by_eos.items():
        ends |= np.isin(tokens, eos_ids) & np.isin(owner, members)
    return ends


def _reach(requests: list[RequestRecord], blocks: _Blocks) -> tuple[Int32, Bools]:
    """Return (stop, eos_end): draft tokens that can be committed at all, and whether the last of them is an EOS."""
    stop = np.minimum(blocks.drafted, blocks.limit - blocks.start)
    is_eos = _ends_request(requests, blocks.request[blocks.step], blocks.draft)
    is_eos &= blocks.place < blocks.drafted[blocks.step]
    rows = np.flatnonzero(is_eos)[::-1]  # reversed, so that the first EOS of a step is written last
    first_eos = np.full(len(stop), np.iinfo(np.int32).max, np.int32)
    first_eos[blocks.step[rows]] = blocks.place[rows]
    eos_end = first_eos < stop
    return np.where(eos_end, first_eos + 1, stop).astype(np.int32), eos_end


def _outcomes(blocks: _Blocks, rows: Int64, counts: Int64, stop: Int32, eos_end: Bools) -> _Edges:
    """Lay out the edges: one per mismatch, and the full block last."""
    number = np.arange(len(stop))
    last = np.cumsum(counts) + number
    accepted = np.empty(len(stop) + len(rows), np.int32)
    accepted[np.arange(len(rows)) + blocks.step[rows]] = blocks.place[rows]
    accepted[last] = stop
    # A correction or bonus token follows, except where the block ended in an EOS or at the limit.
    tokens = accepted + 1
    tokens[last] = stop + ((stop == blocks.drafted) & ~eos_end & (blocks.start + stop < blocks.limit))
    return _Edges(last - counts, last, np.repeat(number, counts + 1), accepted, tokens)


def _margins(blocks: _Blocks, edges: _Edges) -> Float64:
    """Return the smallest gap between the two best logits over the rows that each outcome relies on."""
    top = blocks.top
    gap = top[:, 0] - top[:, 1] if top.shape[1] > 1 else np.full(len(top), np.inf)
    begin = blocks.pos_ptr[edges.step]
    end = begin + np.maximum(edges.accepted, edges.tokens)  # one past the last row relied on
    out = np.full(len(begin), np.inf)
    some = end > begin
    bounds = np.stack([begin[some], end[some]], axis=1).ravel()
    if len(bounds):
        out[some] = np.minimum.reduceat(np.append(gap, np.inf), bounds)[::2]
    return out


def _link(trace: StepTables, requests: list[RequestRecord], blocks: _Blocks, edges: _Edges) -> tuple[Int32, Int32]:
    """Return (edge_next, root): an edge leads to the step at the prefix that it commits."""
    edge_next = np.full(len(edges.step), MISSING, np.int32)
    root = np.full(len(requests), END, np.int32)
    parent, taken = parent_rows(trace), trace.column("steps", "parent_accepted")
    bounds = np.searchsorted(blocks.request, np.arange(len(requests) + 1)).tolist()
    for index, (lo, hi) in enumerate(pairwise(bounds)):
        if lo == hi:
            continue
        prefixes = _Prefixes(blocks, lo, hi)
        for step in range(lo, hi):
            other = prefixes.stand(step, int(parent[step]), int(taken[step]))
            if other != step:
                step_id = trace.column("steps", "step_id")
                raise TraceError(
                    f"steps {int(step_id[other])} and {int(step_id[step])} have the same prefix",
                    where=f"request {requests[index].request_id}",
                    fix="the trace is damaged; capture it again",
                )
        root[index] = prefixes.standing.get(0, END)
        begin, end = int(edges.first[lo]), int(edges.last[hi - 1]) + 1
        accepted = edges.accepted[begin:end].tolist()
        first = (edges.first[lo:hi] - begin).tolist()
        for step, here, after in zip(range(lo, hi), first, [*first[1:], end - begin], strict=True):
            for place, reached in enumerate(prefixes.reached(step, accepted[here:after])):
                edge_next[begin + here + place] = reached
    row, corrected = blocks.pos_ptr[edges.step] + edges.accepted, edges.tokens > edges.accepted
    # The last token: the target's own, or the draft token that ended the block.
    token = np.where(corrected, blocks.choice[row], blocks.draft[row - 1]) if len(row) else np.zeros(0, np.int32)
    ended = blocks.start[edges.step] + edges.tokens >= blocks.limit[edges.step]
    edge_next[ended | _ends_request(requests, blocks.request[edges.step], token)] = END
    return edge_next, root


class _Prefixes:
    """Prefixes of one request as a tree of tokens: equal ones are one node, on whatever path they were met.

    The tree holds the tokens that lead from step to step, each once, so it grows with the tokens of the request and not
    with the lengths of its prefixes.
    """

    def __init__(self, blocks: _Blocks, lo: int, hi: int) -> None:
        first = int(blocks.pos_ptr[lo])
        rows = slice(first, int(blocks.pos_ptr[hi]))
        self.lo, self.row = lo, (blocks.pos_ptr[lo:hi] - first).tolist()
        self.draft, self.choice = blocks.draft[rows].tolist(), blocks.choice[rows].tolist()
        self.after: dict[int, int] = {}  # (node << 32 | token) -> node; the root is 0
        self.node: list[int] = []  # of each step
        self.standing: dict[int, int] = {}  # node -> step

    def stand(self, step: int, parent: int, accepted: int) -> int:
        """Place the next step behind its parent (-1: at the prompt); return the first step on that prefix."""
        node = 0
        if parent >= 0:
            row = self.row[parent - self.lo]
            node = self.node[parent - self.lo]
            for token in (*self.draft[row : row + accepted], self.choice[row + accepted]):
                node = self.after.setdefault(node << 32 | token, len(self.after) + 1)
        self.node.append(node)
        return self.standing.setdefault(node, step)

    def reached(self, step: int, accepted: list[int]) -> Iterator[int]:
        """Yield the step on the prefix that each outcome commits, or ``MISSING``; stop where all others are missing."""
        node, depth, row = self.node[step - self.lo], 0, self.row[step - self.lo]
        for count in accepted:
            for token in self.draft[row + depth : row + count]:
                following = self.after.get(node << 32 | token)
                if following is None:
                    return
                node = following
            depth = count
            corrected = self.after.get(node << 32 | self.choice[row + count])
            yield MISSING if corrected is None else self.standing.get(corrected, MISSING)


def _nearest(path: Int32, blocks: _Blocks, edges: _Edges) -> Int32:
    """Return the captured step nearest to each position 0 .. L-1 of the captured output."""
    if not len(path):
        return np.zeros(0, np.int32)
    begin = blocks.start[path]
    length = int(begin[-1] + edges.tokens[edges.first[path[-1]]])
    where = np.arange(length)
    after = np.clip(np.searchsorted(begin, where), 1, len(path) - 1) if len(path) > 1 else np.zeros(length, np.int64)
    before = np.maximum(after - 1, 0)
    nearer = np.where(where - begin[before] <= begin[after] - where, before, after)
    return path[nearer].astype(np.int32)
