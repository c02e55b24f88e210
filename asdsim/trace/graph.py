"""A trace as a graph of steps, laid out in flat arrays for the walk.

A step stands at a token prefix. Whatever a rule decides, the step can only stop at one of its mismatches or run to the
end of its block, so it has (mismatches + 1) outcomes; each outcome commits known tokens and so leads to one next
prefix: to the step recorded there, to the end of the request, or to a prefix that was not captured.

Outcome ``j`` of step ``s`` is edge ``mm_ptr[s] + s + j``; ``j`` is the number of mismatches accepted, and the last
outcome is the full block. End of sequence and token limit are applied here, once: a mismatch behind them is not laid
out at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from ..records import FORBIDDEN_LOGIT
from ..rules.scoring import DEFAULT, Layout, Rows, is_mismatch, lay_out, run_lengths

if TYPE_CHECKING:
    from ..records import StepTables

END, MISSING = -1, -2
"""Values of ``edge_next`` (and of ``root``) that are no step."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


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
        Draft tokens K of each step.
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
    edge_margin : float64 (S + m,)
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
    def arrays(self) -> GraphArrays:
        """What a compiled walk reads."""
        return GraphArrays(*(getattr(self, name) for name in GraphArrays._fields))

    def edge_of(self, edge: int) -> tuple[int, int]:
        """Return (step, outcome) of an edge."""
        first = self.mm_ptr[:-1] + np.arange(self.num_steps)
        step = int(np.searchsorted(first, edge, side="right")) - 1
        return step, int(edge - first[step])


def build_graph(trace: StepTables, layout: Layout = DEFAULT) -> Graph:
    """Lay out a trace.

    Parameters
    ----------
    trace : StepTables
    layout : Layout
        The rule that scores and charges mismatches; by default ASD's r/q and r.

    Returns
    -------
    Graph

    Raises
    ------
    TraceError
        Where two steps of a request stand on the same prefix, a step's parent is not an earlier step, or the rule
        cannot score a row.
    """
    requests = trace.request_records()
    step_request = np.ascontiguousarray(trace.step_request, np.int32)
    drafted = trace.column("steps", "num_draft_tokens").astype(np.int32)
    start = trace.column("steps", "start_pos").astype(np.int32)
    step_id = trace.column("steps", "step_id")
    parent_id = trace.column("steps", "parent_step_id")
    parent_accepted = trace.column("steps", "parent_accepted")
    wave = trace.column("steps", "wave")
    pos_ptr = trace.pos_ptr
    draft = trace.column("positions", "draft_id").astype(np.int32)
    choice = trace.column("positions", "argmax_id").astype(np.int32)
    draft_logit = trace.column("positions", "draft_logit")
    top = trace.column("positions", "top_logits")[:, :2].astype(np.float64)
    regret = top[:, 0] - draft_logit.astype(np.float64)
    regret[draft_logit == FORBIDDEN_LOGIT] = np.inf

    num_steps = len(drafted)
    row_step = np.repeat(np.arange(num_steps), drafted + 1)
    if layout.width:
        drafted = np.minimum(drafted, np.int32(layout.width))
    row_pos = (np.arange(len(draft)) - pos_ptr[row_step]).astype(np.int32)
    stop, eos_end = _reach(requests, step_request, drafted, start, draft, row_step, row_pos)

    inside = row_pos < drafted[row_step]
    rows = np.flatnonzero(inside & is_mismatch(layout, draft, choice, regret) & (row_pos < stop[row_step]))
    mm_ptr = np.zeros(num_steps + 1, np.int64)
    np.cumsum(np.bincount(row_step[rows], minlength=num_steps), out=mm_ptr[1:])
    mm_pos, mm_regret = row_pos[rows], regret[rows]
    mm_score, mm_charge = lay_out(
        layout,
        Rows(
            tables=trace,
            rows=rows,
            step=row_step[rows],
            i=mm_pos.astype(np.int64),
            width=drafted[row_step[rows]].astype(np.int64),
            run=run_lengths(inside & (draft == choice), row_step, rows),
            regret=mm_regret,
            prefix=lambda step: prefix_tokens(trace, step),
        ),
    )

    num_edges = num_steps + len(rows)
    edge_accepted = np.empty(num_edges, np.int32)
    first_edge = mm_ptr[:-1] + np.arange(num_steps)
    edge_accepted[np.arange(len(rows)) + row_step[rows]] = mm_pos
    last_edge = mm_ptr[1:] + np.arange(num_steps)
    edge_accepted[last_edge] = stop
    # A correction or bonus token follows, except where the block ended in an EOS or at the limit.
    limit_of_step = np.array([request.max_new_tokens for request in requests], np.int32)[step_request]
    bonus = (stop == drafted) & ~eos_end & (start + stop < limit_of_step)
    edge_tokens = edge_accepted + 1
    edge_tokens[last_edge] = stop + bonus

    edge_next = np.full(num_edges, MISSING, np.int32)
    root = np.full(len(requests), END, np.int32)
    bounds = np.searchsorted(step_request, np.arange(len(requests) + 1))
    path_steps: list[Int32] = []
    align_steps: list[Int32] = []
    for index, request in enumerate(requests):
        lo, hi = int(bounds[index]), int(bounds[index + 1])
        path = np.flatnonzero(wave[lo:hi] == 0).astype(np.int32) + np.int32(lo)
        path_steps.append(path)
        if lo == hi:
            align_steps.append(np.zeros(0, np.int32))
            continue
        _link(
            request, lo, hi, step_id, parent_id, parent_accepted, pos_ptr, draft, choice,
            first_edge, last_edge, edge_accepted, edge_tokens, edge_next, root, index,
        )  # fmt: skip
        align_steps.append(_nearest(path, start, first_edge, edge_tokens))
    return Graph(
        request_ids=[request.request_id for request in requests],
        root=root,
        limit=np.array([request.max_new_tokens for request in requests], np.int32),
        step_request=step_request,
        drafted=drafted,
        start=start,
        mm_ptr=mm_ptr,
        mm_pos=mm_pos,
        mm_regret=mm_regret,
        mm_score=mm_score,
        mm_charge=mm_charge,
        edge_next=edge_next,
        edge_accepted=edge_accepted,
        edge_tokens=edge_tokens,
        edge_margin=_margins(top, pos_ptr, drafted, edge_accepted, edge_tokens, first_edge, last_edge),
        path_ptr=_offsets(path_steps),
        path_step=_joined(path_steps),
        align_ptr=_offsets(align_steps),
        align_step=_joined(align_steps),
        max_draft=int(drafted.max(initial=0)),
    )


def _margins(  # type: ignore[no-untyped-def]
    top, pos_ptr, drafted, edge_accepted, edge_tokens, first_edge, last_edge
):  # fmt: skip
    """Return the smallest gap between the two best logits over the rows that each outcome relies on."""
    if not len(edge_accepted):
        return np.zeros(0, np.float64)
    gap = top[:, 0] - top[:, 1] if top.shape[1] > 1 else np.full(len(top), np.inf)
    edges_of_step = last_edge - first_edge + 1
    step = np.repeat(np.arange(len(drafted)), edges_of_step)
    begin = pos_ptr[step]
    end = begin + np.maximum(edge_accepted, edge_tokens)  # one past the last row relied on
    out = np.full(len(step), np.inf)
    some = end > begin
    bounds = np.stack([begin[some], end[some]], axis=1).ravel()
    padded = np.append(gap, np.inf)
    out[some] = np.minimum.reduceat(padded, bounds)[::2]
    return out


def _reach(requests, step_request, drafted, start, draft, row_step, row_pos):  # type: ignore[no-untyped-def]
    """Return (stop, eos_end): draft tokens that can be committed at all, and whether the last of them is an EOS."""
    stop = drafted.copy()
    eos_end = np.zeros(len(drafted), bool)
    for index, request in enumerate(requests):
        lo, hi = np.searchsorted(step_request, [index, index + 1])
        stop[lo:hi] = np.minimum(stop[lo:hi], request.max_new_tokens - start[lo:hi])
    is_draft = row_pos < drafted[row_step]
    is_eos = np.zeros(len(draft), bool)
    by_eos: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        if request.stop == "natural":
            by_eos.setdefault(tuple(sorted(set(request.eos_ids))), []).append(index)
    row_request = step_request[row_step]
    for eos_ids, members in by_eos.items():
        is_eos |= np.isin(row_request, members) & np.isin(draft, eos_ids)
    is_eos &= is_draft
    rows = np.flatnonzero(is_eos)[::-1]  # reversed, so that the first EOS of a step is written last
    first_eos = np.full(len(drafted), np.iinfo(np.int32).max, np.int32)
    first_eos[row_step[rows]] = row_pos[rows]
    eos_end = first_eos < stop
    return np.where(eos_end, first_eos + 1, stop).astype(np.int32), eos_end


def _link(  # type: ignore[no-untyped-def]
    request, lo, hi, step_id, parent_id, parent_accepted, pos_ptr, draft, choice,
    first_edge, last_edge, edge_accepted, edge_tokens, edge_next, root, index,
):  # fmt: skip
    """Connect the steps of one request: an edge leads to the step that stands on the prefix it commits."""
    natural = request.stop == "natural"
    eos = set(request.eos_ids) if natural else set()
    by_id = {int(step_id[step]): step for step in range(lo, hi)}
    prefix: dict[int, bytes] = {}
    standing: dict[bytes, int] = {}
    for step in range(lo, hi):
        if parent_id[step] < 0:
            prefix[step] = b""
        else:
            parent = by_id.get(int(parent_id[step]))
            if parent is None or parent not in prefix:
                raise TraceError(
                    f"parent step {int(parent_id[step])} is not an earlier step of the request",
                    where=f"request {request.request_id}, step {int(step_id[step])}",
                    fix="the trace is damaged; capture it again",
                )
            accepted, row = int(parent_accepted[step]), int(pos_ptr[parent])
            prefix[step] = (
                prefix[parent]
                + draft[row : row + accepted].tobytes()
                + choice[row + accepted : row + accepted + 1].tobytes()
            )
        other = standing.setdefault(prefix[step], step)
        if other != step:
            raise TraceError(
                f"steps {int(step_id[other])} and {int(step_id[step])} stand on the same prefix",
                where=f"request {request.request_id}",
                fix="the trace is damaged; capture it again",
            )
    root[index] = standing.get(b"", END)
    for step in range(lo, hi):
        row, here = int(pos_ptr[step]), prefix[step]
        for edge in range(int(first_edge[step]), int(last_edge[step]) + 1):
            accepted, tokens = int(edge_accepted[edge]), int(edge_tokens[edge])
            last = int(choice[row + accepted]) if tokens > accepted else int(draft[row + accepted - 1])
            if last in eos or len(here) // 4 + tokens >= request.max_new_tokens:
                edge_next[edge] = END
                continue
            key = here + draft[row : row + accepted].tobytes() + choice[row + accepted : row + accepted + 1].tobytes()
            edge_next[edge] = standing.get(key, MISSING)


def _nearest(path: Int32, start: Int32, first_edge: Int64, edge_tokens: Int32) -> Int32:
    """Return the captured step nearest to each position 0 .. L-1 of the captured output."""
    if not len(path):
        return np.zeros(0, np.int32)
    begin = start[path]
    length = int(begin[-1] + edge_tokens[first_edge[path[-1]]])
    where = np.arange(length)
    after = np.clip(np.searchsorted(begin, where), 1, len(path) - 1) if len(path) > 1 else np.zeros(length, np.int64)
    before = np.maximum(after - 1, 0)
    nearer = np.where(where - begin[before] <= begin[after] - where, before, after)
    return path[nearer].astype(np.int32)


def _offsets(parts: list[Int32]) -> Int64:
    pointer = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=pointer[1:])
    return pointer


def _joined(parts: list[Int32]) -> Int32:
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def edge_tokens_of(trace: StepTables, graph: Graph, edge: int) -> list[int]:
    """Return all generated tokens up to and with those that an edge commits."""
    step, outcome = graph.edge_of(edge)
    accepted, tokens = int(graph.edge_accepted[edge]), int(graph.edge_tokens[edge])
    row = int(trace.pos_ptr[step])
    draft = trace.column("positions", "draft_id")[row : row + accepted]
    choice = trace.column("positions", "argmax_id")[row + accepted : row + tokens]
    return [*prefix_tokens(trace, step), *map(int, draft), *map(int, choice)]


def prefix_tokens(trace: StepTables, step: int) -> list[int]:
    """Return the generated tokens before a step (a row of the ``steps`` table), in order."""
    step_id, parent_id = trace.column("steps", "step_id"), trace.column("steps", "parent_step_id")
    parent_accepted = trace.column("steps", "parent_accepted")
    draft, choice = trace.column("positions", "draft_id"), trace.column("positions", "argmax_id")
    parts: list[list[int]] = []
    lo = int(np.searchsorted(trace.step_request, trace.step_request[step]))
    while parent_id[step] >= 0:
        accepted = int(parent_accepted[step])
        hi = step
        step = lo + int(np.searchsorted(step_id[lo:hi], parent_id[step]))
        row = int(trace.pos_ptr[step])
        parts.append([*map(int, draft[row : row + accepted]), int(choice[row + accepted])])
    return [token for part in reversed(parts) for token in part]
