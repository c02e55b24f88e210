"""Record a trace inside an engine, without holding it up.

In each step :class:`Recorder` reads what a trace keeps off the target's raw logits where they lie, and starts a copy
to the host. A thread of its own waits for the copies, puts requests together and hands whole ones to a *sink*, which
writes them. When more steps wait than the queue holds, the requests of the newest step are dropped, whole; so are
requests that were aborted, and those under logits processors, whose logits are not the model's. All of it is counted
and said.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, Protocol

import numpy as np
import torch

from ..records import FORBIDDEN_LOGIT, NO_PARENT, RequestRecord, StepRecord
from .accept import lay_blocks, ranks, spread

log = logging.getLogger("asdsim.record")
CHUNK = 64
IDLE_SECONDS = 10.0
SPARE = 24
"""Ranks looked at beyond the top k, so that ties there are ordered by id."""


class Sink(Protocol):
    """Where whole requests go."""

    def add(self, request: RequestRecord, steps: Sequence[StepRecord], batch_sizes: Sequence[int]) -> None:
        """Take one request; may raise, and is then not asked again."""
        ...

    def flush(self) -> None:
        """Store what is held, and go on."""
        ...

    def close(self) -> None:
        """Store what is held."""
        ...


@dataclass
class Columns:
    """One step of a batch on its way to the host; tensors by name, rows of all requests one after the other."""

    names: list[str]
    widths: list[int]
    tensors: dict[str, torch.Tensor]
    event: Any = None


@dataclass
class Gathered:
    """One request as it is put together."""

    request: RequestRecord
    tokens: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether a stop id or the limit was reached."""
        limit = self.request.max_new_tokens
        return len(self.tokens) >= limit or bool(self.tokens and self.tokens[-1] in self.request.eos_ids)

    def take(self, step: dict[str, Any], accepted: int, committed: Sequence[int], batch_size: int) -> None:
        """Append one step and what it committed, up to the stop."""
        number = len(self.steps)
        self.steps.append(StepRecord(
            step_id=number, parent_step_id=number - 1 if number else NO_PARENT,
            parent_accepted=self.accepted[-1] if number else NO_PARENT, start_pos=len(self.tokens), **step,
        ))  # fmt: skip
        self.accepted.append(accepted)
        self.batch_sizes.append(batch_size)
        for token in committed:
            if self.complete:
                break
            self.tokens.append(int(token))


class Recorder:
    """Columns of each step, a queue, and a thread that empties it.

    Parameters
    ----------
    sink : Sink
    top_k : int
        Logits kept per row.
    size : int
        Steps that may wait.
    """

    def __init__(self, sink: Sink, top_k: int = 8, size: int = 1024, log: logging.Logger = log) -> None:
        self.sink: Sink | None = sink
        self.top_k = top_k
        self.lost: Counter[str] = Counter()
        self.written = 0
        self._size, self._log = size, log
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._dropped: set[str] = set()
        self._running: dict[str, Gathered] = {}
        self._live: set[str] = set()  # of the engine's side
        self._thread = threading.Thread(target=self._work, name="asdsim-recorder", daemon=True)
        self._thread.start()
        Finalize(None, self.close, exitpriority=100)  # also in a child process, which runs no atexit functions

    # The engine's side

    def admit(
        self, request_id: str, prompt_ids: Sequence[int], limit: int, stop_ids: Sequence[int], refused: str = ""
    ) -> None:
        """Begin a request; ``refused`` says why it cannot be recorded."""
        if refused or self.sink is None:
            self.lost[refused or "after a failed write"] += 1
            return
        record = RequestRecord(request_id, "engine", tuple(prompt_ids), "", None, limit, tuple(sorted(set(stop_ids))))
        self._live.add(request_id)
        self._put(Gathered(record), [request_id])

    def see(
        self, names: Sequence[str], widths: Sequence[int], drafts: torch.Tensor | None, logits: torch.Tensor
    ) -> Columns | None:
        """Read a step's columns off the raw logits.

        Parameters
        ----------
        names : sequence of str (N,)
            Request of each block; others than those admitted are passed by.
        widths : sequence of int (N,)
        drafts : int (T,) or None
        logits : float (T + N, V)
            K + 1 rows of each request.
        """
        if self.sink is None or not any(name in self._live for name in names):
            return None
        rows = logits.float()
        number = min(self.top_k + SPARE, rows.shape[1])
        values, ids = largest(rows, number)
        values = values.clamp(min=FORBIDDEN_LOGIT)
        ids, order = ids.sort(dim=-1)  # by id, and then by value without disturbing that order
        values, again = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, again)
        k = min(self.top_k, rows.shape[1])
        crowded = values[:, k - 1] == values[:, -1] if number > k and number < rows.shape[1] else None
        total, entropy = spread(rows)
        columns = {
            "top_ids": ids[:, :k].int(), "top_logits": values[:, :k], "logsumexp": total.float(),
            "entropy": entropy.float(),
        }  # fmt: skip
        if crowded is not None:
            columns["crowded"] = crowded
        if drafts is not None and len(drafts):
            blocks = lay_blocks(torch.tensor(widths, device=rows.device), max(widths))
            behind = torch.arange(len(widths), device=rows.device)[:, None]  # bonus rows before a block
            own = torch.zeros(len(drafts), dtype=torch.int64, device=rows.device)
            own.index_add_(0, blocks.rows.flatten(), ((blocks.rows + behind) * blocks.inside).flatten())
            chosen = drafts.long()
            columns |= {
                "draft_ids": drafts.int(), "draft_logits": rows[own, chosen].clamp(min=FORBIDDEN_LOGIT),
                "ranks": ranks_of(rows, own, chosen, ids).int(),
            }  # fmt: skip
        return Columns(list(names), list(widths), columns)

    def commit(self, seen: Columns, accepted: torch.Tensor, tokens: torch.Tensor) -> None:
        """Send a step off, with the draft tokens accepted (N,) and the tokens committed (N, L), filled up with -1."""
        seen.tensors |= {"accepted": accepted, "tokens": tokens}
        seen.tensors, seen.event = to_host(seen.tensors)
        self._put(seen, seen.names)

    def finish(self, request_id: str) -> None:
        """End a request; one that had not come to its stop is dropped."""
        if request_id in self._live:
            self._live.discard(request_id)
            self._queue.put(request_id)

    def close(self, seconds: float = 30.0) -> None:
        """Write what is complete, and say what was lost."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._log.error("asd: the trace was not written to its end within %g s", seconds)

    def _put(self, item: Any, names: Sequence[str]) -> None:
        if self._queue.qsize() < self._size:
            self._queue.put(item)
            return
        for name in names:
            if name in self._live:
                self._live.discard(name)
                self._dropped.add(name)
                self.lost["dropped: the queue was full"] += 1
                self._queue.put(name)
                self._log.warning("asd: request %s is not recorded: more steps wait than the queue holds", name)

    # The thread

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                if isinstance(item, Gathered):
                    self._running[item.request.request_id] = item
                elif isinstance(item, str):
                    if self._running.pop(item, None) is not None and item not in self._dropped:
                        self.lost["ended before its stop"] += 1
                    self._dropped.discard(item)
                else:
                    self._step(item)
            except Exception:
                self._log.exception("asd: a step was not recorded")
                self.lost["error"] += 1
        if left := [name for name in self._running if name not in self._dropped]:
            self.lost["ended before its stop"] += len(left)
        self._end()

    def _next(self) -> Any:
        """Return what comes next; store what is held while nothing comes."""
        while True:
            try:
                return self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._try(lambda sink: sink.flush())

    def _try(self, act: Callable[[Sink], None]) -> bool:
        """Have the sink do something; after its first failure there is none."""
        if self.sink is None:
            return False
        try:
            act(self.sink)
            return True
        except Exception as error:
            self._log.error("asd: recording ends here, the trace keeps what was stored before: %s", error)
            self.lost["after a failed write"] += len(self._running)
            self._running.clear()
            self.sink = None
            return False

    def _step(self, seen: Columns) -> None:
        if seen.event is not None:
            seen.event.synchronize()
        host = {name: value.numpy() for name, value in seen.tensors.items()}
        row = draft = 0
        for n, (name, width) in enumerate(zip(seen.names, seen.widths, strict=True)):
            course = self._running.get(name)
            rows, drafts = slice(row, row + width + 1), slice(draft, draft + width)
            row, draft = row + width + 1, draft + width
            if name in self._dropped:
                self._running.pop(name, None)
                continue
            if course is None or course.complete:
                continue
            if "crowded" in host and host["crowded"][rows].any():
                self._running.pop(name)
                self.lost["too many equal logits"] += 1
                continue
            step = _columns(host, rows, drafts)
            accepted = int(host["accepted"][n])
            course.take(step, accepted, host["tokens"][n, : accepted + 1], len(seen.names))
            if course.complete:
                self._write(self._running.pop(name))

    def _write(self, course: Gathered) -> None:
        if self._try(lambda sink: sink.add(course.request, course.steps, course.batch_sizes)):
            self.written += 1
        else:
            self.lost["after a failed write"] += 1

    def _end(self) -> None:
        self._try(lambda sink: sink.close())
        lost = ", ".join(f"{number} {why}" for why, number in self.lost.items() if number)
        self._log.info("asd: %d requests recorded%s", self.written, f"; lost: {lost}" if lost else "")


def _columns(host: dict[str, Any], rows: slice, drafts: slice) -> dict[str, Any]:
    """Return the fields of a step record."""
    none = np.zeros(0, np.int32)
    copies = {name: host[name][rows].copy() for name in ("top_ids", "top_logits", "logsumexp", "entropy")}
    return {
        **copies, "argmax_ids": copies["top_ids"][:, 0].copy(),
        "draft_ids": host["draft_ids"][drafts].copy() if "draft_ids" in host else none,
        "draft_logits": host["draft_logits"][drafts].copy() if "draft_ids" in host else none.astype(np.float32),
        "ranks": host["ranks"][drafts].copy() if "draft_ids" in host else none,
    }  # fmt: skip


def largest(rows: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and ids of the largest entries of each row; which of several equal ones, is left open.

    They lie in those chunks of the row whose own maxima are largest: one fast pass, and a search in little.
    """
    chunks = rows.shape[1] // CHUNK
    if chunks <= 2 * number:
        return rows.topk(number, dim=-1)
    head = rows[:, : chunks * CHUNK].unflatten(1, (chunks, CHUNK))
    best = head.amax(-1).topk(number, dim=-1).indices
    inner = head.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    places = (best[:, :, None] * CHUNK + torch.arange(CHUNK, device=rows.device)).flatten(1)
    tail = torch.arange(chunks * CHUNK, rows.shape[1], device=rows.device).expand(len(rows), -1)
    values, order = torch.cat([inner, rows[:, chunks * CHUNK :]], 1).topk(number, dim=-1)
    return values, torch.cat([places, tail], 1).gather(1, order)


def ranks_of(rows: torch.Tensor, own: torch.Tensor, ids: torch.Tensor, top_ids: torch.Tensor) -> torch.Tensor:
    """Return the rank of ``ids[t]`` in row ``own[t]``; ``top_ids`` are the first of each row in order."""
    if rows.device.type != "cpu":  # looking which are found would wait for the device
        return ranks(rows[own], ids)
    hits = top_ids[own] == ids[:, None]
    rank = hits.int().argmax(1)
    far = (~hits.any(1)).nonzero()[:, 0]
    rank[far] = ranks(rows[own[far]], ids[far])
    return rank


def to_host(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
    """Start copies to the host; return them, and an event to wait for (None where nothing has to be waited for)."""
    first = next(iter(tensors.values()))
    if first.device.type != "cuda":
        return {name: value.detach().clone() for name, value in tensors.items()}, None
    copies = {}
    for name, value in tensors.items():
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        copies[name] = pinned.copy_(value.detach(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copies, event
