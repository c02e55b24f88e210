"""Generated tokens before a step, and up to the end of an edge; where two outputs part.

Only the tokens that an outcome commits are stored, once, with the step: whatever came before is read back along the
parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import TraceError

if TYPE_CHECKING:
    from ..records import StepTables


class Edges(Protocol):
    """What :func:`edge_tokens` asks of a graph."""

    @property
    def edge_accepted(self) -> npt.NDArray[np.int32]: ...

    @property
    def edge_tokens(self) -> npt.NDArray[np.int32]: ...

    def edge_of(self, edge: int) -> tuple[int, int]: ...


def parent_rows(trace: StepTables) -> npt.NDArray[np.int64]:
    """Return the row of each step's parent in the ``steps`` table, -1 at a root, int64 (S,).

    Raises
    ------
    TraceError
        Where the parent is not an earlier step of the request.
    """
    step_id, parent_id = (trace.column("steps", name).astype(np.int64) for name in ("step_id", "parent_step_id"))
    rows = np.full(len(step_id), -1, np.int64)
    child = np.flatnonzero(parent_id >= 0)
    if not len(child):
        return rows
    stride = 1 + max(int(step_id.max()), int(parent_id.max()))
    offset = trace.step_request.astype(np.int64) * stride
    key = offset + step_id
    order = np.argsort(key, kind="stable")
    wanted = offset[child] + parent_id[child]
    parent = order[np.minimum(np.searchsorted(key, wanted, sorter=order), len(order) - 1)]
    lost = np.flatnonzero((key[parent] != wanted) | (parent >= child))
    if len(lost):
        step = int(child[lost[0]])
        request = trace.request_records()[int(trace.step_request[step])]
        raise TraceError(
            f"parent step {parent_id[step]} is not an earlier step of the request",
            where=f"request {request.request_id}, step {step_id[step]}",
            fix="the trace is damaged; capture it again",
        )
    rows[child] = parent
    return rows


def prefix_tokens(trace: StepTables, step: int) -> list[int]:
    """Return the tokens generated before a step.

    Parameters
    ----------
    trace : StepTables
    step : int
        Row of the ``steps`` table.
    """
    step_id, parent_id = trace.column("steps", "step_id"), trace.column("steps", "parent_step_id")
    parent_accepted = trace.column("steps", "parent_accepted")
    first = int(np.searchsorted(trace.step_request, trace.step_request[step]))
    blocks: list[list[int]] = []  # latest first
    while parent_id[step] >= 0:
        accepted = int(parent_accepted[step])
        step = first + int(np.searchsorted(step_id[first:step], parent_id[step]))
        blocks.append(_committed(trace, step, accepted, accepted + 1))
    return [token for block in reversed(blocks) for token in block]


def edge_tokens(trace: StepTables, graph: Edges, edge: int) -> list[int]:
    """Return all generated tokens up to and with those that an edge of the graph commits."""
    step, _ = graph.edge_of(edge)
    block = _committed(trace, step, int(graph.edge_accepted[edge]), int(graph.edge_tokens[edge]))
    return prefix_tokens(trace, step) + block


def first_difference(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Return the first position at which two outputs part, -1 where they are equal.

    An output that is a beginning of the other parts from it where the shorter one ends.
    """
    for position, (token, another) in enumerate(zip(tokens, other, strict=False)):
        if token != another:
            return position
    return -1 if len(tokens) == len(other) else min(len(tokens), len(other))


def _committed(trace: StepTables, step: int, accepted: int, tokens: int) -> list[int]:
    """Return the accepted draft tokens of a step and, where ``tokens`` says so, the target's own token after them."""
    row = int(trace.pos_ptr[step])
    block: list[int] = trace.column("positions", "draft_id")[row : row + accepted].tolist()
    if tokens > accepted:
        block.append(int(trace.column("positions", "argmax_id")[row + accepted]))
    return block
