"""What must hold in a trace, checked for all rows at once.

The writer checks each request before it stores it, the reader everything again: nothing downstream has to ask whether a
logit is finite, a token exists or an edge leads somewhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..records import FORBIDDEN_LOGIT
from .schema import DIVERGENCES
from .stored import Origin, Trace
from .tables import is_valid

Mask = npt.NDArray[np.bool_]
RECAPTURE = "the trace is damaged or was written by something else: restore it from a copy, or capture again"


def check_unique_requests(requests: pa.Table, origin: Origin | None, folder: Path) -> None:
    """Refuse two requests of one name, and gaps in the order of capture."""
    names = requests["request_id"].to_pylist()
    seen: set[str] = set()
    for row, name in enumerate(names):
        if name in seen:
            at = f": {origin.locate(row)}" if origin else ""
            raise TraceError(f"the request {name!r} is there twice", where=f"{folder}{at}", fix=RECAPTURE)
        seen.add(name)


def check_trace(trace: Trace, pos_request: npt.NDArray[np.int32]) -> None:
    """Check every row of a trace.

    Parameters
    ----------
    trace : Trace
        Sorted tables.
    pos_request : int32 (P,)
        Row of ``requests`` of each position.

    Raises
    ------
    TraceError
        At the first row that cannot be, with what is wrong there.
    """
    _check_requests(trace)
    _check_steps(trace)
    _check_rows(trace, pos_request)
    _check_logits(trace)
    _check_edges(trace)


def refuse(trace: Trace, table: str, bad: Mask, what: str, *values: str) -> None:
    """Raise for the first row where ``bad`` holds; ``{}`` in ``what`` takes the named columns of that row."""
    if not bad.any():
        return
    row = int(np.argmax(bad))
    found = [trace.column(table, name)[row] for name in values]
    raise TraceError(
        what.format(*(value.tolist() if hasattr(value, "tolist") else value for value in found)),
        where=f"{trace.path}: {trace.where(table, row)}",
        fix=RECAPTURE,
    )


def _check_requests(trace: Trace) -> None:
    index = trace.column("requests", "request_index")
    refuse(
        trace,
        "requests",
        index != np.arange(len(index)),
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
    refuse(
        trace,
        "requests",
        (np.diff(trace.step_ptr) == 0) & (limit > 0),
        "the request has no step, though {} tokens were asked for",
        "max_new_tokens",
    )


def _check_steps(trace: Trace) -> None:
    step_id = trace.column("steps", "step_id")
    request = trace.step_request
    first = np.ones(len(step_id), bool)
    first[1:] = request[1:] != request[:-1]
    twice = np.zeros(len(step_id), bool)
    twice[1:] = ~first[1:] & (step_id[1:] == step_id[:-1])
    refuse(trace, "steps", twice, "the step {} is there twice", "step_id")
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


def _check_rows(trace: Trace, pos_request: npt.NDArray[np.int32]) -> None:
    """Rows of positions belong to steps, K + 1 each, numbered 0 .. K."""
    widths = np.diff(trace.pos_ptr)
    step = trace.column("positions", "step_id")
    i = trace.column("positions", "i")
    want_request = np.repeat(trace.step_request, widths)
    want_step = np.repeat(trace.column("steps", "step_id"), widths)
    want_i = np.arange(len(want_step)) - np.repeat(trace.pos_ptr[:-1], widths)
    n = min(len(step), len(want_step))
    differs = (pos_request[:n] != want_request[:n]) | (step[:n] != want_step[:n]) | (i[:n] != want_i[:n])
    if differs.any() or len(step) > n:
        row = int(np.argmax(differs)) if differs.any() else n
        raise TraceError(
            "the row fits no step: rows of a step must be 0 .. K, each once",
            where=f"{trace.path}: {trace.where('positions', row)}",
            fix=RECAPTURE,
        )
    if len(want_step) > n:
        owner = int(np.searchsorted(trace.pos_ptr, n, side="right")) - 1
        raise TraceError(
            f"position {n - int(trace.pos_ptr[owner])} of the step is missing",
            where=f"{trace.path}: {trace.where('steps', owner)}",
            fix=RECAPTURE,
        )
    bonus = np.zeros(n, bool)
    bonus[trace.pos_ptr[1:] - 1] = True
    for name in ("draft_id", "draft_logit", "rank"):
        known = is_valid(trace.positions[name])
        refuse(trace, "positions", ~known & ~bonus, f"{name} is missing")
        refuse(trace, "positions", known & bonus, f"{name} {{}} stands in the bonus row", name)
    parent, known = trace.column("positions", "parent_position"), is_valid(trace.positions["parent_position"])
    refuse(
        trace,
        "positions",
        np.where(known, (parent < 0) | (parent >= i), i > 0),
        "parent_position {} does not come before the position",
        "parent_position",
    )


def _check_logits(trace: Trace) -> None:
    vocab, top_k = trace.manifest.vocab_size, trace.manifest.top_k
    ids, logits = trace.column("positions", "top_ids"), trace.column("positions", "top_logits")
    stray: Mask = np.any((ids < 0) | (ids >= vocab), axis=1)
    refuse(trace, "positions", stray, f"a top id is outside the vocabulary of {vocab}: {{}}", "top_ids")
    refuse(trace, "positions", ~np.all(np.isfinite(logits), axis=1), "logits that are not finite: {}", "top_logits")
    refuse(trace, "positions", logits[:, 0] == FORBIDDEN_LOGIT, "no token of the row has a finite logit")
    fall = (logits[:, :-1] > logits[:, 1:]) | ((logits[:, :-1] == logits[:, 1:]) & (ids[:, :-1] < ids[:, 1:]))
    refuse(trace, "positions", ~fall.all(1), "top logits are not ordered by (-logit, id): {}", "top_logits")
    ordered = np.sort(ids, axis=1)
    refuse(trace, "positions", (ordered[:, 1:] == ordered[:, :-1]).any(1), "a top id is there twice: {}", "top_ids")
    argmax = trace.column("positions", "argmax_id")
    refuse(
        trace,
        "positions",
        argmax != ids[:, 0],
        "argmax_id {} is not the first of the top ids {}",
        "argmax_id",
        "top_ids",
    )

    draft = is_valid(trace.positions["draft_id"])
    draft_id, rank = trace.column("positions", "draft_id"), trace.column("positions", "rank")
    draft_logit = trace.column("positions", "draft_logit")
    outside = draft & ((draft_id < 0) | (draft_id >= vocab))
    refuse(trace, "positions", outside, f"draft_id {{}} is outside the vocabulary of {vocab}", "draft_id")
    refuse(trace, "positions", draft & ~np.isfinite(draft_logit), "draft_logit {} is not finite", "draft_logit")
    refuse(trace, "positions", draft & ((rank < 0) | (rank >= vocab)), "rank {} cannot be", "rank")
    rows = np.flatnonzero(draft & (rank < top_k))
    wrong = np.zeros(len(draft), bool)
    wrong[rows] = (ids[rows, rank[rows]] != draft_id[rows]) | (logits[rows, rank[rows]] != draft_logit[rows])
    last, last_id = logits[:, -1], ids[:, -1]
    far = draft & (rank >= top_k)
    beyond = (draft_logit < last) | ((draft_logit == last) & (draft_id > last_id))
    wrong |= far & (~beyond | (ids == draft_id[:, None]).any(1))
    refuse(
        trace,
        "positions",
        wrong,
        "rank {} does not fit draft token {} with logit {}",
        "rank",
        "draft_id",
        "draft_logit",
    )

    lse, entropy = trace.column("positions", "logsumexp"), trace.column("positions", "entropy")
    top = logits[:, 0]
    # Loose bounds: a float32 sum over a vocabulary rounds.
    slack = 1e-2 + 1e-3 * np.abs(top)
    bad = ~np.isfinite(lse) | (lse < top - slack) | (lse > top + np.log(vocab) + slack)
    refuse(trace, "positions", bad, "logsumexp {} does not fit the largest logit", "logsumexp")
    bad = ~np.isfinite(entropy) | (entropy < -1e-2) | (entropy > np.log(vocab) + 1e-2)
    refuse(trace, "positions", bad, f"entropy {{}} is not in 0 .. log {vocab}", "entropy")
    for name in ("draft_logprob", *DIVERGENCES):
        if trace.positions[name].null_count == len(draft):
            continue
        known, values = is_valid(trace.positions[name]), trace.column("positions", name)
        refuse(trace, "positions", known & ~draft, f"{name} {{}} stands in the bonus row", name)
        if name == "draft_logprob":
            bad = ~np.isfinite(values) | (values > 1e-2)
        elif name in ("kl", "reverse_kl"):  # infinite where one side gives no probability at all
            bad = np.isnan(values) | (values < -1e-2)
        else:
            bad = ~np.isfinite(values) | (values < -1e-2) | (values > 1.01)
        refuse(trace, "positions", known & bad, f"{name} {{}} cannot be", name)


def eos_masks(trace: Trace) -> tuple[Mask, Mask]:
    """Return where draft_id and argmax_id end a request that stops naturally, as bool (P,) each."""
    groups: dict[tuple[int, ...], list[int]] = {}
    ends = zip(trace.column("requests", "stop"), trace.column("requests", "eos_ids"), strict=True)
    for row, (stop, ids) in enumerate(ends):
        if stop == "natural" and len(ids):
            groups.setdefault(tuple(sorted(ids.tolist())), []).append(row)
    drafts, argmax = trace.column("positions", "draft_id"), trace.column("positions", "argmax_id")
    draft_eos, argmax_eos = np.zeros(len(drafts), bool), np.zeros(len(drafts), bool)
    of = np.repeat(trace.step_request, np.diff(trace.pos_ptr))
    for eos, members in groups.items():
        inside = np.zeros(trace.requests.num_rows, bool)
        inside[members] = True
        inside = inside[of]
        draft_eos |= inside & np.isin(drafts, eos)
        argmax_eos |= inside & np.isin(argmax, eos)
    return draft_eos, argmax_eos


def reachable_drafts(trace: Trace) -> tuple[npt.NDArray[np.int64], Mask, Mask]:
    """Cut every block at an EOS and at the token limit.

    Returns
    -------
    reach : int64 (S,)
        Draft tokens that can be committed at all: the least of K, the first draft EOS + 1, and what the limit leaves.
    open_end : bool (S,)
        Whether the bonus token follows where all of them are accepted.
    argmax_eos : bool (P,)
        Where the target's choice is an EOS.
    """
    draft_eos, argmax_eos = eos_masks(trace)
    widths = np.diff(trace.pos_ptr) - 1
    start = trace.column("steps", "start_pos").astype(np.int64)
    left = trace.column("requests", "max_new_tokens").astype(np.int64)[trace.step_request] - start
    far = np.iinfo(np.int64).max
    at = np.where(draft_eos, np.arange(len(draft_eos)) - np.repeat(trace.pos_ptr[:-1], widths + 1) + 1, far)
    first = np.minimum.reduceat(at, trace.pos_ptr[:-1]) if len(widths) else np.empty(0, np.int64)
    reach = np.minimum(np.minimum(widths, first), left)
    return reach, (first == far) & (widths < left), argmax_eos


def strict_accepted(trace: Trace, reach: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many drafts of each step are accepted when every mismatch is refused, as int64 (S,)."""
    differs = trace.column("positions", "draft_id") != trace.column("positions", "argmax_id")
    differs[trace.pos_ptr[1:] - 1] = True  # the bonus row ends every block
    at = np.where(differs, np.arange(len(differs)) - np.repeat(trace.pos_ptr[:-1], np.diff(trace.pos_ptr)), 1 << 40)
    first = np.minimum.reduceat(at, trace.pos_ptr[:-1]) if len(reach) else np.empty(0, np.int64)
    return np.minimum(first, reach)


def leads_on(
    trace: Trace, steps: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64], cut: Mask | None = None
) -> Mask:
    """Return whether a next step stands where ``accepted`` drafts of the given steps lead, as bool.

    It does where the request stops at a mismatch within reach, or accepts the whole block and the bonus token follows,
    and the token that the target then adds neither is an EOS nor reaches the limit. Where ``cut``, the block may also
    end behind any matching token, as it does for a shorter draft length.
    """
    reach, open_end, argmax_eos = reachable_drafts(trace)
    widths = np.diff(trace.pos_ptr) - 1
    inside = (accepted >= 0) & (accepted <= widths[steps])
    row = trace.pos_ptr[steps] + np.where(inside, accepted, 0)
    differs = trace.column("positions", "draft_id")[row] != trace.column("positions", "argmax_id")[row]
    stops = (accepted < reach[steps]) & (differs if cut is None else differs | cut)
    full = (accepted == widths[steps]) & (reach[steps] == widths[steps]) & open_end[steps]
    start = trace.column("steps", "start_pos").astype(np.int64)[steps]
    limit = trace.column("requests", "max_new_tokens").astype(np.int64)[trace.step_request[steps]]
    return inside & (stops | full) & ~argmax_eos[row] & (start + accepted + 1 < limit)


def _check_edges(trace: Trace) -> None:
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
    refuse_child(
        ~leads_on(trace, parent, accepted[child], wave[child] > 0),
        "no rule can go on from step {} with {} accepted draft tokens",
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
        _check_strict_path(trace, parent, child)


def _check_strict_path(trace: Trace, parent: npt.NDArray[np.int64], child: npt.NDArray[np.int64]) -> None:
    """On a strict capture, the captured path is the strict one and runs to its end."""
    wave = trace.column("steps", "wave")
    accepted = strict_accepted(trace, reachable_drafts(trace)[0])
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
    cut[last] = leads_on(trace, last, accepted[last])
    refuse(trace, "steps", cut, "the captured path breaks off after step {}", "step_id")
