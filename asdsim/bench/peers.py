"""The same walk in recorded order, as it is usually written: plain Python, torch over a batch, numpy.

Each returns, for each request and setting, the accepted draft tokens of all steps and the ledger, so that results can
be compared. ``walk_python`` and ``walk_torch`` are built as the reference implementation's rules are: from token ids
and logits, block by block, or a batch with a row for each request and setting. ``walk_loop`` and ``walk_broadcast`` are
what is left of them if one writes for speed: from regrets per position (-1 where the draft token is the target's
choice), without objects, and without computing for every setting what is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, util
from typing import Any

import numpy as np
import numpy.typing as npt

from ..trace.graph import Graph

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Settings = tuple[Float64, Float64, Float64]


def regrets_of(graph: Graph, requests: int) -> Float64:
    """Return float64 (requests, steps, K): the regret of each mismatch, -1 where there is none."""
    steps = int(graph.path_ptr[1])
    number = requests * steps
    width = graph.max_draft
    regrets = np.full((number, width), -1.0)
    mismatches = int(graph.mm_ptr[number])
    rows = np.repeat(np.arange(number), np.diff(graph.mm_ptr[: number + 1]))
    regrets[rows, graph.mm_pos[:mismatches]] = graph.mm_regret[:mismatches]
    return regrets.reshape(requests, steps, width)


@dataclass(frozen=True)
class Scores:
    """What the target said of a block: its choice and that logit at each position, and the draft token's logit."""

    choice: tuple[int, ...]
    best: tuple[float, ...]
    drafted: tuple[float, ...]


@dataclass
class Ledger:
    """Budget of a request, and what it has spent."""

    budget: float
    spent: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What became of a block."""

    accepted: int
    exact: int
    relaxed: int
    charge: float
    regrets: tuple[float, ...]
    values: tuple[float, ...]


def choose(draft: tuple[int, ...], scores: Scores, ledger: Ledger, gate: float, cap: float) -> Decision:
    """Decide one block and charge the ledger."""
    width = len(draft)
    values = tuple(float(width - i) for i in range(width))
    regrets = tuple(max(0.0, best - own) for best, own in zip(scores.best, scores.drafted, strict=True))
    mismatches = tuple(token != best for token, best in zip(draft, scores.choice, strict=True))
    charge, total = 0.0, 0.0
    relaxed = 0
    accepted = 0
    for i, (mismatch, regret, value) in enumerate(zip(mismatches, regrets, values, strict=True)):
        if mismatch:
            total += regret
            within_gate = regret / value <= gate
            within_budget = ledger.budget != 0.0 and ledger.spent + total <= ledger.budget
            within_cap = relaxed + 1 <= cap
            if not (within_gate and within_budget and within_cap):
                break
            relaxed += 1
            charge = total
        accepted = i + 1
    ledger.spent += charge
    exact = sum(not mismatch for mismatch in mismatches[:accepted])
    return Decision(accepted, exact, accepted - exact, charge, regrets, values)


def blocks_of(regrets: Float64) -> list[list[tuple[tuple[int, ...], Scores]]]:
    """Return draft tokens and scores of every block, from regrets as :func:`regrets_of` gives them."""
    made = []
    for request in regrets.tolist():
        rows = []
        for block in request:
            draft = tuple(int(regret >= 0.0) for regret in block)
            rows.append((draft, Scores((0,) * len(block), tuple(max(r, 0.0) for r in block), (0.0,) * len(block))))
        made.append(rows)
    return made


def walk_python(blocks: list[list[tuple[tuple[int, ...], Scores]]], settings: Settings) -> tuple[Int64, Float64]:
    """Walk block by block, one request and one setting after another."""
    budgets, gates, caps = (axis.tolist() for axis in settings)
    accepted = np.zeros((len(blocks), len(budgets)), np.int64)
    ledgers = np.zeros((len(blocks), len(budgets)))
    for r, request in enumerate(blocks):
        for s in range(len(budgets)):
            ledger = Ledger(budgets[s])
            for draft, scores in request:
                accepted[r, s] += choose(draft, scores, ledger, gates[s], caps[s]).accepted
            ledgers[r, s] = ledger.spent
    return accepted, ledgers


def walk_loop(regrets: list[list[list[float]]], settings: Settings) -> tuple[Int64, Float64]:
    """Walk position by position, one request and one setting after another."""
    budgets, gates, caps = (axis.tolist() for axis in settings)
    accepted = np.zeros((len(regrets), len(budgets)), np.int64)
    ledgers = np.zeros((len(regrets), len(budgets)))
    for r, request in enumerate(regrets):
        for s in range(len(budgets)):
            budget, gate, cap = budgets[s], gates[s], caps[s]
            spent = 0.0
            total = 0
            for block in request:
                width = len(block)
                charge = 0.0
                relaxed = 0
                length = 0
                for i, regret in enumerate(block):
                    if regret >= 0.0:
                        if regret / (width - i) > gate:
                            break
                        if budget == 0.0 or spent + (charge + regret) > budget:
                            break
                        if relaxed + 1 > cap:
                            break
                        charge += regret
                        relaxed += 1
                    length += 1
                spent += charge
                total += length
            accepted[r, s] = total
            ledgers[r, s] = spent
    return accepted, ledgers


def walk_numpy(graph: Graph, requests: int, settings: Settings) -> tuple[Int64, Float64]:
    """Walk the list of mismatches of each step, all settings at once, with a histogram of accepted lengths."""
    budgets, gates, caps = settings
    paid = budgets != 0.0
    number = len(budgets)
    width = graph.max_draft
    steps = int(graph.path_ptr[1])
    accepted = np.zeros((requests, number), np.int64)
    ledgers = np.zeros((requests, number))
    histogram = np.zeros((width + 1, number), np.int32)
    for r in range(requests):
        spent = np.zeros(number)
        total = np.zeros(number, np.int64)
        for step in range(r * steps, (r + 1) * steps):
            alive = np.ones(number, bool)
            after = spent
            charge = 0.0
            for count, j in enumerate(range(graph.mm_ptr[step], graph.mm_ptr[step + 1]), 1):
                charge += graph.mm_charge[j]
                sums = spent + charge
                ok = alive & (gates >= graph.mm_score[j]) & paid & (sums <= budgets) & (caps >= count)
                stopped = alive & ~ok
                histogram[graph.mm_pos[j]] += stopped
                total += stopped * int(graph.mm_pos[j])
                after = np.where(ok, sums, after)
                alive = ok
                if not alive.any():
                    break
            histogram[width] += alive
            total += alive * width
            spent = after
        accepted[r], ledgers[r] = total, spent
    return accepted, ledgers


def has_torch() -> bool:
    """Whether torch can be timed."""
    return util.find_spec("torch") is not None


def walk_torch(regrets: Float64, settings: Settings) -> tuple[Int64, Float64]:
    """Walk a batch with a row for each request and setting, one step after another."""
    with one_thread() as torch:
        requests, steps, width = regrets.shape
        number = len(settings[0])
        rows = requests * number
        budgets, gates, caps = (torch.from_numpy(np.tile(axis, requests)) for axis in settings)
        best = torch.from_numpy(np.maximum(regrets, 0.0))
        drafts = torch.from_numpy((regrets >= 0.0).astype(np.int64))
        choice, drafted = torch.zeros((rows, width), dtype=torch.int64), torch.zeros((rows, width), dtype=torch.float64)
        spent = torch.zeros(rows, dtype=torch.float64)
        accepted = torch.zeros(rows, dtype=torch.int64)
        histogram = torch.zeros((number, width + 1), dtype=torch.int64)
        setting = torch.arange(number).repeat(requests)
        one = torch.ones(rows, dtype=torch.int64)
        values = torch.arange(width, 0, -1, dtype=torch.float64).expand(rows, width)
        for step in range(steps):
            top = best[:, step].repeat_interleave(number, dim=0)
            draft = drafts[:, step].repeat_interleave(number, dim=0)
            regret = (top - drafted).clamp_min(0.0)
            mismatch = draft != choice
            cost = torch.where(mismatch, regret, torch.zeros_like(regret))
            charge = cost.cumsum(dim=1)
            count = mismatch.to(torch.int64).cumsum(dim=1)
            within_gate = ~mismatch | (regret / values <= gates[:, None])
            within_budget = ~mismatch | ((budgets[:, None] != 0.0) & (spent[:, None] + charge <= budgets[:, None]))
            passed = within_gate & within_budget & (count <= caps[:, None])
            length = passed.to(torch.int64).cumprod(dim=1).sum(dim=1)
            charged = torch.nn.functional.pad(charge, (1, 0)).gather(1, length[:, None])[:, 0]
            spent = spent + charged
            accepted += length
            histogram.index_put_((setting, length), one, accumulate=True)
        return accepted.numpy().reshape(requests, number), spent.numpy().reshape(requests, number)


def walk_broadcast(regrets: Float64, settings: Settings) -> tuple[Int64, Float64]:
    """Walk requests x settings by broadcasting, one step after another."""
    with one_thread() as torch:
        budgets, gates, caps = (torch.from_numpy(axis)[None, :, None] for axis in settings)
        requests, steps, width = regrets.shape
        blocks = torch.from_numpy(np.ascontiguousarray(regrets))
        values = torch.arange(width, 0, -1, dtype=torch.float64)
        spent = torch.zeros((requests, budgets.shape[1]), dtype=torch.float64)
        accepted = torch.zeros((requests, budgets.shape[1]), dtype=torch.int64)
        histogram = torch.zeros((budgets.shape[1], width + 1), dtype=torch.int64)
        for step in range(steps):
            regret = blocks[:, step, None, :]
            mismatch = regret >= 0.0
            cost = torch.where(mismatch, regret, 0.0)
            charge = cost.cumsum(dim=-1)
            count = mismatch.to(torch.int64).cumsum(dim=-1)
            fits = (regret / values <= gates) & (spent[:, :, None] + charge <= budgets) & (budgets != 0.0)
            passed = ~mismatch | (fits & (count <= caps))
            length = passed.to(torch.int64).cumprod(dim=-1).sum(dim=-1)
            ends = torch.nn.functional.pad(charge, (1, 0)).expand(-1, budgets.shape[1], -1)
            spent = spent + ends.gather(-1, length[..., None])[..., 0]
            accepted += length
            histogram.scatter_add_(1, length.T, torch.ones_like(length.T))
        return accepted.numpy(), spent.numpy()


@contextmanager
def one_thread() -> Iterator[Any]:
    """Hand out torch, held to one thread."""
    # torch is measured here, not used: the package itself replays without it.
    torch: Any = import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield torch
    finally:
        torch.set_num_threads(before)
