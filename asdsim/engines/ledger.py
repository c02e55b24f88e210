"""What each request in an engine has spent, kept on the device and found by request id.

A request keeps its slot while it is reordered, preempted and admitted again; it gives it back when it ends, so nothing
grows with requests that are gone. Before a block is charged, **reach** is applied: what an engine would cut off later
(a stop id, the token limit) is never charged.

A step is :meth:`Ledger.verify` (decide, lift, charge) and :meth:`Ledger.commit` (what the engine made of
it). Neither waits for the device; :meth:`Ledger.release` does, once per request.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import EngineError
from ..rules.asd import ACCEPT
from ..rules.settings import STRICT, Policy
from .accept import Blocks, Decision, Rows, Settings, accept_blocks, lift, reach, read_rows, score_blocks

KERNEL_ENV = "ASDSIM_KERNEL"
"""``triton``: :mod:`asdsim.engines.accept_triton` decides, where the device is a GPU."""

NO_STOP = -1
"""Fills a row of stop ids; no token has it."""

BAD_LOGITS, TOO_MANY, DISAGREES, BYPASSED = 1, 2, 4, 8
FAULTS = {
    BAD_LOGITS: "the target's logits held NaN or +inf, or nothing but -inf",
    TOO_MANY: "the engine reports more accepted tokens than were drafted",
    DISAGREES: "the engine accepted other draft tokens than the rule",
    BYPASSED: "the engine verified draft tokens in a way that the rule does not reach",
}
"""What went wrong in a request, as bits."""


class Step(NamedTuple):
    """One verified step of a batch.

    Attributes
    ----------
    rows : Rows or None
        What the target said of the draft tokens; None where none was drafted.
    decision : Decision
    widths : int64 (N,)
        K of each block.
    slots : int64 (N,)
    """

    rows: Rows | None
    decision: Decision
    widths: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class Report:
    """What became of one request.

    Attributes
    ----------
    request_id : str
    policy : Policy
    tokens : int
        Generated, those behind a stop not counted.
    steps : int
        Decoding steps after the one that ended prefill: ``tokens == 1 + steps + accepted`` unless a stop cut a block.
    drafted, accepted, relaxed : int
        Draft tokens offered, committed, and committed against the target's own choice.
    spent : float
        Regret spent, in logits.
    faults : int
        Bits of :data:`FAULTS`; 0 where all went well.
    """

    request_id: str
    policy: Policy
    tokens: int
    steps: int
    drafted: int
    accepted: int
    relaxed: int
    spent: float
    faults: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite number is the string ``"inf"``."""

        def number(value: float) -> float | str:
            return "inf" if math.isinf(value) else float(value)

        policy = self.policy
        return {
            "request_id": self.request_id, "rule": policy.layout.rule, "B": number(policy.budget),
            "g": number(policy.gate), "M": number(policy.cap), "semantics": policy.semantics, "tokens": self.tokens,
            "steps": self.steps, "drafted": self.drafted, "accepted": self.accepted, "relaxed": self.relaxed,
            "regret_spent": self.spent, "budget_left": number(max(policy.budget - self.spent, 0.0)),
            "lossless": is_strict(policy), "faults": [text for bit, text in FAULTS.items() if self.faults & bit],
        }  # fmt: skip


def is_strict(policy: Policy) -> bool:
    """Return whether a setting can accept no mismatch at all, so that outputs are the engine's own."""
    if policy.layout.rule == "strict":
        return True
    if policy.layout.rule != "asd" or policy.semantics == "lightllm":  # lightllm accepts ties under every setting
        return False
    return policy.budget == 0.0 or policy.cap == 0.0 or (policy.semantics == "core" and policy.gate == 0.0)


class Ledger:
    """Settings and ledgers of the requests that an engine holds.

    Slot 0 belongs to requests without a setting of their own: they are strict, and their counts are not kept.

    Parameters
    ----------
    policy : Policy
        Gives semantics and layout for all requests; B, g and M are each request's own.
    device : torch.device or str
    capacity : int
        Slots to begin with; doubled when they run out.
    """

    def __init__(self, policy: Policy = STRICT, device: torch.device | str = "cpu", capacity: int = 64) -> None:
        self.policy = policy
        self.device = torch.device(device)
        self._slots: dict[str, int] = {}
        self._policies: dict[str, Policy] = {}
        self._parked: set[str] = set()
        self._free = list(range(capacity - 1, 0, -1))
        self._numbers = torch.zeros((capacity, 4), dtype=torch.float64, device=self.device)  # s, B, g, M
        # limit, generated, steps, drafted, accepted, relaxed, ended, faults
        self._counts = torch.zeros((capacity, 8), dtype=torch.int64, device=self.device)
        self._stops = torch.full((capacity, 1), NO_STOP, dtype=torch.int64, device=self.device)
        self._batch: tuple[list[str], torch.Tensor] | None = None
        self._fused = self.device.type == "cuda" and os.environ.get(KERNEL_ENV) == "triton"

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def admit(
        self, request_id: str, policy: Policy, *, limit: int, stop_ids: Sequence[int] = (), generated: int = 0
    ) -> None:
        """Take in a request, or take it up again after a preemption, with what it had spent.

        Parameters
        ----------
        request_id : str
        policy : Policy
        limit : int
            Most tokens that the request may generate.
        stop_ids : sequence of int
            Ids that end it; the stop token itself is generated.
        generated : int
            Tokens generated before this ledger met it.

        Raises
        ------
        EngineError
            If the id is in use, or the setting is of another reading than the ledger's.
        """
        if request_id in self._parked:
            self._parked.discard(request_id)
            return
        if request_id in self._slots:
            raise EngineError("this id is in use", where=f"request {request_id}", fix="give each request its own")
        mine = self.policy
        if (policy.reading, policy.layout) != (mine.reading, mine.layout):
            raise EngineError(
                f"a setting of {policy.semantics}, {policy.layout} beside {mine.semantics}, {mine.layout}",
                where=f"request {request_id}", fix="an engine runs one rule; B, g and M may differ",
            )  # fmt: skip
        if not self._free:
            self._grow()
        slot = self._free.pop()
        stops = sorted({int(token) for token in stop_ids})
        if len(stops) > self._stops.shape[1]:
            more = len(stops) - self._stops.shape[1]
            self._stops = torch.nn.functional.pad(self._stops, (0, more), value=NO_STOP)
        stops += [NO_STOP] * (self._stops.shape[1] - len(stops))
        self._numbers[slot] = self._row([0.0, policy.budget, policy.gate, policy.cap], torch.float64)
        self._counts[slot] = self._row([limit, generated, 0, 0, 0, 0, 0, 0], torch.int64)
        self._stops[slot] = self._row(stops, torch.int64)
        self._slots[request_id], self._policies[request_id] = slot, policy
        self._batch = None

    def park(self, request_id: str) -> None:
        """Note a preemption: the engine forgets the request and will admit it again; its ledger stays."""
        if request_id in self._slots:
            self._parked.add(request_id)

    def parked(self, request_id: str) -> bool:
        """Return whether a request waits to be taken up again."""
        return request_id in self._parked

    def release(self, request_id: str) -> Report | None:
        """Give back a request's slot and say what became of it; None for an id that is not here."""
        slot = self._slots.pop(request_id, None)
        if slot is None:
            return None
        self._parked.discard(request_id)
        self._free.append(slot)
        self._batch = None
        report = self._report(request_id, self._policies.pop(request_id), slot)
        return report

    def report(self, request_id: str) -> Report:
        """Say what became of a request so far."""
        return self._report(request_id, self._policies[request_id], self._slots[request_id])

    def slots(self, request_ids: Sequence[str]) -> torch.Tensor:
        """Return the slot of each request of a batch, int64 (N,)."""
        if self._batch is None or self._batch[0] != request_ids:
            slots = torch.tensor([self._slots.get(name, 0) for name in request_ids], dtype=torch.int64)
            self._batch = list(request_ids), slots.to(self.device, non_blocking=True)
        return self._batch[1]

    def verify(
        self,
        slots: torch.Tensor,
        blocks: Blocks,
        draft_ids: torch.Tensor,
        logits: torch.Tensor,
        *,
        lifts: bool = True,
        most: torch.Tensor | None = None,
    ) -> Step:
        """Decide every block, lift accepted near-ties in ``logits``, and charge the ledgers.

        Parameters
        ----------
        slots : int64 (N,)
        blocks : Blocks
            Where the rows of each request lie, see :func:`asdsim.engines.accept.lay_blocks`.
        draft_ids : int (T,)
            Draft token of each row; any id in rows outside the blocks.
        logits : float (T, V)
            Target rows; changed in place.
        lifts : bool
            False leaves the logits as they are: the engine is told the decision in another way.
        most : int (N,), optional
            Draft tokens that the engine can commit at most.
        """
        if self._fused and len(draft_ids):
            from .accept_triton import serves, verify

            if serves(self.policy.layout):
                how = (*self.policy.reading, self.policy.layout, lifts, most)
                tables = self._numbers, self._counts, self._stops
                return Step(None, verify(tables, slots, blocks, draft_ids, logits, how), blocks.widths, slots)
        rows = None
        counts = self._counts[slots]
        remaining = torch.where(counts[:, 6] > 0, 0, counts[:, 0] - counts[:, 1])
        stops = self._stops[slots]
        if len(draft_ids):
            rows = read_rows(logits, draft_ids, self.policy.layout)
            mismatch, score, charge = score_blocks(self.policy.layout, rows, blocks)
            bad = (blocks.grid(rows.unusable) & blocks.inside).any(1)
        else:
            shape = blocks.inside.shape
            mismatch = torch.zeros(shape, dtype=torch.bool, device=self.device)
            score = charge = torch.zeros(shape, dtype=torch.float64, device=self.device)
            bad = torch.zeros(len(slots), dtype=torch.bool, device=self.device)
        stop = reach(blocks, draft_ids, remaining, stops) if rows is not None else torch.zeros_like(blocks.widths)
        if most is not None:
            stop = torch.minimum(stop, most.long())
        decision = accept_blocks(mismatch, score, charge, stop, self.settings(slots), self.policy.reading)
        if rows is not None:
            if lifts:
                lift(logits, rows, blocks, decision)
            last = blocks.grid(rows.draft_ids).gather(1, (decision.accepted - 1).clamp(min=0)[:, None])
            ended = ((last == stops).any(1) & (decision.accepted > 0)).long()
        else:
            ended = torch.zeros_like(stop)
        # The target's own token follows a refusal, or a whole block that leaves room for it.
        whole = (decision.accepted == blocks.widths) & (remaining > blocks.widths) & (ended == 0)
        own = ((decision.verdict != ACCEPT) | whole).long()
        live = (remaining > 0).long()
        stepped = live * ((counts[:, 1] > 0) | (blocks.widths > 0)).long()  # no draft, no token yet: the end of prefill
        added = torch.stack([
            torch.zeros_like(live), (decision.accepted + own) * live, stepped, blocks.widths * live, decision.accepted,
            decision.relaxed, ended, torch.zeros_like(live),
        ], 1)  # fmt: skip
        counts = counts + added
        counts[:, 7] |= bad.long() * BAD_LOGITS
        self._numbers[slots, 0] = decision.spent
        self._counts[slots] = counts
        return Step(rows, decision, blocks.widths, slots)

    def commit(self, step: Step, tokens: torch.Tensor) -> None:
        """Take what the engine made of a step, and hold it against the rule.

        Parameters
        ----------
        step : Step
        tokens : int (N, L)
            Tokens of each request in this step, the target's own last; filled up with -1.
        """
        number = (tokens >= 0).sum(1)
        taken = number - 1
        refused = step.decision.verdict != ACCEPT
        wrong = (taken < step.decision.accepted) | (refused & (taken != step.decision.accepted))
        known = number > 0  # an engine may commit nothing at all, in the middle of prefill
        faults = (taken > step.widths).long() * TOO_MANY | (wrong & known).long() * DISAGREES
        last = tokens.gather(1, taken.clamp(min=0)[:, None])
        ended = ((last == self._stops[step.slots]).any(1) & known).long()
        counts = self._counts[step.slots]
        counts[:, 6] |= ended
        counts[:, 7] |= faults
        self._counts[step.slots] = counts

    def flag(self, slots: torch.Tensor, fault: int) -> None:
        """Note a fault of requests; strict ones lose nothing by it and are left out."""
        relaxes = (self._numbers[slots, 1:] > 0).all(1).long()
        self._counts[slots, 7] |= relaxes * fault

    def settings(self, slots: torch.Tensor) -> Settings:
        """Return ledger, B, g and M of each request."""
        return Settings(*self._numbers[slots].unbind(1))

    def _report(self, request_id: str, policy: Policy, slot: int) -> Report:
        _, tokens, steps, drafted, accepted, relaxed, _, faults = self._counts[slot].tolist()
        spent = float(self._numbers[slot, 0])
        return Report(request_id, policy, tokens, steps, drafted, accepted, relaxed, spent, faults)

    def _row(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def _grow(self) -> None:
        old = len(self._numbers)
        self._free = list(range(2 * old - 1, old - 1, -1))
        self._numbers, self._counts = (
            torch.cat([table, torch.zeros_like(table)]) for table in (self._numbers, self._counts)
        )
        self._stops = torch.cat([self._stops, torch.full_like(self._stops, NO_STOP)])
