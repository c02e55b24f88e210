"""What must hold of requests, steps and the edges between them; :mod:`asdsim.trace.rows` has the positions.

The writer checks each request before it stores it, the reader everything again: nothing downstream has to ask whether a
logit is finite, a token exists or an edge leads somewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from .stored import RECAPTURE, Trace
from .tables import is_valid

Mask = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]


def refuse(trace: Trace, table: str, bad: Mask, what: str, *values: str) -> None:
    """Raise for the first row where ``bad`` holds; ``{}`` in ``what`` takes the named columns of that row."""
    if not bad.any():
        return
    row = int(np.argmax(bad))
    cells = [trace.column(table, name)[row] for name in values]
    raise TraceError(
        what.format(*(cell.tolist() if hasattr(cell, "tolist") else cell for cell in cells)),
        where=f"{trace.path}: {trace.where(table, row)}",
        fix=RECAPTURE,
    )


def check_requests(trace: Trace) -> None:
    """Check the rows of ``requests``.

    Raises
    ------
    TraceError
        At the first invalid row, with what is wrong there.
    """
    names = trace.request_ids()
    seen: set[str] = set()
    for row, name in enumerate(names):
        if name in seen:
            where = f"{trace.path}: {trace.where('requests', row)}"
            raise TraceError(f"the request {name!r} appears twice", where=where, fix=RECAPTURE)
        seen.add(name)
    index = trace.column("requests", "request_index")
    # Several processes finish requests out of order: until all are there, some may be missing between others.
    unfinished = len(index) < trace.manifest.planned
    gaps = (np.diff(index, prepend=-1) < 1) | (index >= trace.manifest.planned)
    refuse(
        trace,
        "requests",
        gaps if unfinished else index != np.arange(trace.first, trace.first + len(index)),
        "request_index {} is not the next in the order of capture: a request is missing",
        "request_index",
    )
    limit = trace.column("requests", "max_new_tokens")
    refuse(trace, "requests", limit < 0, "max_new_tokens {} is negative", "max_new_tokens")
    stop = trace.column("requests", "stop")
    refuse(trace, "requests", ~np.isin(stop, ["natural", "fixed"]), "stop {!r} is neither natural nor fixed", "stop")
    for name in ("prompt_ids", "eos_ids"):
        column = trace.requests[name].combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # no request at all
            continue
        ids = column.flatten().to_numpy(zero_copy_only=False)
        outside = (ids < 0) | (ids >= trace.manifest.vocab_size)
        if outside.any():
            lengths = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False))
            row = int(np.repeat(np.arange(len(column)), lengths)[np.argmax(outside)])
            raise TraceError(
                f"{name} holds {ids[np.argmax(outside)]}, outside the vocabulary of {trace.manifest.vocab_size}",
                where=f"{trace.path}: {trace.where('requests', row)}",
                fix=RECAPTURE,
            )


def check_steps(trace: Trace) -> None:
    """Check that every request has steps, and check these except their edges; see :func:`check_requests`."""
    refuse(
        trace,
        "requests",
        (np.diff(trace.step_ptr) == 0) & (trace.column("requests", "max_new_tokens") > 0),
        "the request has no step, though {} tokens were asked for",
        "max_new_tokens",
    )
    step_id = trace.column("steps", "step_id")
    request = trace.step_request
    first = np.ones(len(step_id), bool)
    first[1:] = request[1:] != request[:-1]
    twice = np.zeros(len(step_id), bool)
    twice[1:] = ~first[1:] & (step_id[1:] == step_id[:-1])
    refuse(trace, "steps", twice, "the step {} appears twice", "step_id")
    place = np.arange(len(step_id)) - trace.step_ptr[request]
    refuse(trace, "steps", step_id != place, "step_id {} does not follow the one before: a step is missing", "step_id")
    width = trace.column("steps", "num_draft_tokens")
    refuse(
        trace,
        "steps",
        (width < 0) | (width > trace.manifest.num_draft_tokens),
        f"num_draft_tokens {{}} is not in 0 .. {trace.manifest.num_draft_tokens}",
        "num_draft_tokens",
    )
    start = trace.column("steps", "start_pos")
    limit = trace.column("requests", "max_new_tokens")[request]
    refuse(trace, "steps", (start < 0) | (start >= limit), "start_pos {} is not below the token limit", "start_pos")
    refuse(trace, "steps", trace.column("steps", "wave") < 0, "wave {} is negative", "wave")
    for name in ("draft_us", "verify_us", "select_us"):
        time = trace.column("steps", name)
        refuse(trace, "steps", ~(np.isfinite(time) & (time >= 0)), f"{name} {{}} is not a time", name)


class Reach(NamedTuple):
    """Blocks cut at an EOS and at the token limit.

    Attributes
    ----------
    drafts : int64 (S,)
        Draft tokens that can be committed at all: the least of K, the first draft EOS + 1, and what the limit leaves.
    open_end : bool (S,)
        Whether the bonus token follows where all of them are accepted.
    argmax_eos : bool (P,)
        Where the target's choice is an EOS.
    """

    drafts: Int64
    open_end: Mask
    argmax_eos: Mask


def _eos_masks(trace: Trace) -> tuple[Mask, Mask]:
    """Return where draft_id and argmax_id end a request that stops naturally, as bool (P,) each."""
    groups: dict[tuple[int, ...], list[int]] = {}
    ends = zip(trace.column("requests", "stop"), trace.column("requests", "eos_ids"), strict=True)
    for row, (stop, ids) in enumerate(ends):
        if stop == "natural" and len(ids):
            groups.setdefault(tuple(sorted(ids.tolist())), []).append(row)
    drafts, argmax = trace.column("positions", "draft_id"), trace.column("positions", "argmax_id")
    draft_eos, argmax_eos = np.zeros(len(drafts), bool), np.zeros(len(drafts), bool)
    for eos, members in groups.items():
        inside = np.zeros(trace.requests.num_rows, bool)
        inside[members] = True
        owned = np.repeat(inside[trace.step_request], np.diff(trace.pos_ptr))
        draft_eos |= owned & np.isin(drafts, eos)
        argmax_eos |= owned & np.isin(argmax, eos)
    return draft_eos, argmax_eos


def reachable_drafts(trace: Trace) -> Reach:
    """Cut every block at an EOS and at the token limit."""
    draft_eos, argmax_eos = _eos_masks(trace)
    widths = np.diff(trace.pos_ptr) - 1
    start = trace.column("steps", "start_pos").astype(np.int64)
    left = trace.column("requests", "max_new_tokens").astype(np.int64)[trace.step_request] - start
    far = np.iinfo(np.int64).max
    first = np.full(len(widths), far)
    rows = np.flatnonzero(draft_eos)[::-1]  # reversed, so that the first EOS of a step is written last
    step = np.searchsorted(trace.pos_ptr, rows, side="right") - 1
    first[step] = rows - trace.pos_ptr[step] + 1
    return Reach(np.minimum(np.minimum(widths, first), left), (first == far) & (widths < left), argmax_eos)


def strict_accepted(trace: Trace, reach: Reach) -> Int64:
    """Return how many drafts of each step are accepted when every mismatch is refused, as int64 (S,)."""
    differs = trace.column("positions", "draft_id") != trace.column("positions", "argmax_id")
    differs[trace.pos_ptr[1:] - 1] = True  # the bonus row ends every block
    rows = np.flatnonzero(differs)
    begin = trace.pos_ptr[:-1]
    return np.minimum(rows[np.searchsorted(rows, begin)] - begin, reach.drafts)


def leads_on(trace: Trace, reach: Reach, steps: Int64, accepted: Int64, cut: Mask | None = None) -> Mask:
    """Return whether a next step can follow ``accepted`` drafts of the given steps, as bool.

    It can where the request stops at a mismatch within reach, or accepts the whole block and the bonus token follows,
    and the token that the target then adds neither is an EOS nor reaches the limit. Where ``cut``, the block may also
    end behind any matching token, as it does for a shorter draft length.
    """
    widths = np.diff(trace.pos_ptr) - 1
    inside = (accepted >= 0) & (accepted <= widths[steps])
    row = trace.pos_ptr[steps] + np.where(inside, accepted, 0)
    differs = trace.column("positions", "draft_id")[row] != trace.column("positions", "argmax_id")[row]
    stops = (accepted < reach.drafts[steps]) & (differs if cut is None else differs | cut)
    full = (accepted == widths[steps]) & (reach.drafts[steps] == widths[steps]) & reach.open_end[steps]
    start = trace.column("steps", "start_pos").astype(np.int64)[steps]
    limit = trace.column("requests", "max_new_tokens").astype(np.int64)[trace.step_request[steps]]
    return inside & (stops | full) & ~reach.argmax_eos[row] & (start + accepted + 1 < limit)


def check_edges(trace: Trace) -> None:
    """Check that every step is at the prefix that its parent leads to; see :func:`check_requests`."""
    step_id = trace.column("steps", "step_id").astype(np.int64)
    parent_id = trace.column("steps", "parent_step_id").astype(np.int64)
    accepted = trace.column("steps", "parent_accepted").astype(np.int64)
    start, wave = trace.column("steps", "start_pos"), trace.column("steps", "wave")
    known, known_count = is_valid(trace.steps["parent_step_id"]), is_valid(trace.steps["parent_accepted"])
    refuse(trace, "steps", known != known_count, "parent_step_id and parent_accepted must be given together")
    root = step_id == 0
    refuse(trace, "steps", known & root, "step 0 has the parent {}", "parent_step_id")
    refuse(trace, "steps", ~known & ~root, "the step has no parent: an edge leads nowhere")
    refuse(trace, "steps", root & (start != 0), "step 0 starts at {}, not at the prompt", "start_pos")
    refuse(trace, "steps", root & (wave != 0), "step 0 is of wave {}", "wave")

    child = np.flatnonzero(known)
    base = trace.step_ptr[trace.step_request[child]]
    count = trace.step_ptr[trace.step_request[child] + 1] - base

    def refuse_child(bad: Mask, what: str, *values: str) -> None:
        mask = np.zeros(len(step_id), bool)
        mask[child] = bad
        refuse(trace, "steps", mask, what, *values)

    absent = (parent_id[child] < 0) | (parent_id[child] >= count)
    refuse_child(absent, "its parent, step {}, is not in the trace: an edge leads nowhere", "parent_step_id")
    parent = base + parent_id[child]
    reach = reachable_drafts(trace)
    refuse_child(
        ~leads_on(trace, reach, parent, accepted[child], wave[child] > 0),
        "no rule can continue from step {} with {} accepted draft tokens",
        "parent_step_id",
        "parent_accepted",
    )
    refuse_child(
        start[child] != start[parent] + accepted[child] + 1,
        "start_pos {} is not where step {} leads with {} accepted draft tokens",
        "start_pos",
        "parent_step_id",
        "parent_accepted",
    )
    path = wave[child] == 0
    off = path & (parent_id[child] != step_id[child] - 1)
    refuse_child(off, "step {} of the captured path does not follow step {}", "step_id", "parent_step_id")
    refuse_child(path & (wave[parent] != 0), "the captured path is interrupted before step {}", "step_id")
    edge = np.lexsort((accepted[child], parent))
    same = np.zeros(len(child), bool)
    same[edge[1:]] = (np.diff(parent[edge]) == 0) & (np.diff(accepted[child][edge]) == 0)
    refuse_child(same, "step {} has another child with {} accepted draft tokens", "parent_step_id", "parent_accepted")
    if trace.manifest.rule.get("name") == "strict":
        _check_strict_path(trace, reach, parent, child)


def _check_strict_path(trace: Trace, reach: Reach, parent: Int64, child: Int64) -> None:
    """On a strict capture, the captured path is the strict one and runs to its end."""
    wave = trace.column("steps", "wave")
    accepted = strict_accepted(trace, reach)
    path = child[wave[child] == 0]
    bad = np.zeros(len(wave), bool)
    bad[path] = trace.column("steps", "parent_accepted")[path] != accepted[parent[wave[child] == 0]]
    what = "the captured path is strict, yet step {} was left with {} accepted draft tokens"
    refuse(trace, "steps", bad, what, "parent_step_id", "parent_accepted")
    last = np.flatnonzero(wave == 0)
    follows = np.zeros(len(wave), bool)
    follows[parent[wave[child] == 0]] = True
    last = last[~follows[last]]
    cut = np.zeros(len(wave), bool)
    cut[last] = leads_on(trace, reach, last, accepted[last])
    refuse(trace, "steps", cut, "the captured path breaks off after step {}", "step_id")
