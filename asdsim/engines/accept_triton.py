"""The whole of :meth:`asdsim.engines.ledger.Ledger.verify` in one Triton kernel: from logits to charged ledgers.

One program scans one target row. The last program of a request to finish (an atomic counter tells) decides its block,
from left to right in float64 as :mod:`asdsim.rules.asd` does, raises accepted near-ties, and updates the ledger. Serves
ASD on regrets in logits under all four semantics, suffix and normalised values.

Held against the torch code in Triton's interpreter. It has not run on a GPU yet, so it is used only where
``ASDSIM_KERNEL=triton`` asks for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..rules.scoring import Layout
from .accept import Blocks, Decision

SEMANTICS = {"paper": 0, "core": 1, "dspark": 2, "lightllm": 3}
BLOCK = 4096
"""Logits that a program looks at in one go."""


@triton.jit
def verify_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, draft_ids, starts, widths, slots, numbers, counts, stops, most, best_at, draft_at, choice_at,
    arrived, accepted_out, charge_out, relaxed_out, verdict_out, vocab, num_stops, height,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, PER_BLOCK: tl.constexpr, NORMALISED: tl.constexpr,
    BY_REGRET: tl.constexpr, LIFTS: tl.constexpr,
):  # fmt: skip
    """Verify one batch; program ``n LONGEST + i`` scans row i of block n."""
    n = tl.program_id(0) // LONGEST
    i = tl.program_id(0) % LONGEST
    width = tl.load(widths + n)
    rows = tl.maximum(width, 1)  # an empty block has one program too, which counts its step
    if i < rows:
        lowest = tl.full((), -3.4028234663852886e38, tl.float32)
        if i < width:
            row = tl.load(starts + n) + i
            best = tl.full((), float("-inf"), tl.float32)
            choice = tl.full((), 0, tl.int64)
            broken = tl.full((), 0, tl.int32)
            for begin in range(0, vocab, BLOCK):
                place = begin + tl.arange(0, BLOCK)
                inside = place < vocab
                values = tl.load(logits + row * row_stride + place, mask=inside, other=float("-inf")).to(tl.float32)
                broken = tl.maximum(broken, tl.max((values != values).to(tl.int32), axis=0))
                top = tl.max(values, axis=0)
                first = tl.min(tl.where((values == top) & inside, place, vocab), axis=0)
                if top > best:
                    best = top
                    choice = first.to(tl.int64)
            best = tl.maximum(best, lowest)
            if broken > 0:
                best = tl.full((), float("nan"), tl.float32)
            token = tl.load(draft_ids + row).to(tl.int64)
            drafted = tl.maximum(tl.load(logits + row * row_stride + token).to(tl.float32), lowest)
            tl.store(best_at + row, best)
            tl.store(draft_at + row, drafted)
            tl.store(choice_at + row, choice)
        tl.debug_barrier()
        if tl.atomic_add(arrived + n, 1) == rows - 1:
            slot = tl.load(slots + n)
            start = tl.load(starts + n)
            spent = tl.load(numbers + slot * 4)
            budget = tl.load(numbers + slot * 4 + 1)
            gate = tl.load(numbers + slot * 4 + 2)
            cap = tl.load(numbers + slot * 4 + 3)
            generated = tl.load(counts + slot * 8 + 1)
            remaining = tl.load(counts + slot * 8) - generated
            if tl.load(counts + slot * 8 + 6) > 0:
                remaining = remaining * 0
            stop = tl.minimum(tl.maximum(remaining, 0), tl.minimum(width, tl.load(most + n)))
            seen = spent
            if PER_BLOCK:
                seen = spent * 0.0
            total = tl.full((), 0.0, tl.float64)
            count = tl.full((), 0, tl.int64)
            accepted = tl.full((), 0, tl.int64)
            verdict = tl.full((), 0, tl.int64)
            ended = tl.full((), 0, tl.int64)
            bad = tl.full((), 0, tl.int64)
            going = tl.full((), 1, tl.int32)
            for j in range(width):
                best = tl.load(best_at + start + j, volatile=True)
                unusable = (best != best) | (best > 3.4028234663852886e38) | (best <= lowest)
                if unusable:
                    bad = bad * 0 + 1
                if (going > 0) & (j < stop):
                    drafted = tl.load(draft_at + start + j, volatile=True)
                    token = tl.load(draft_ids + start + j).to(tl.int64)
                    charge = best.to(tl.float64) - drafted.to(tl.float64)
                    forbidden = drafted <= lowest
                    differs = token != tl.load(choice_at + start + j, volatile=True)
                    mismatch = differs | unusable
                    if BY_REGRET:
                        mismatch = mismatch & ((charge > 0.0) | (charge != charge) | forbidden)
                    value = (width - j).to(tl.float64)
                    if NORMALISED:
                        value = value / width.to(tl.float64)
                    after = total + charge
                    shut = forbidden | unusable | (charge / value > gate)
                    over = seen + after > budget
                    if MODE == 0:
                        over = over | (budget == 0.0)
                    if MODE == 1:
                        shut = shut | (gate == 0.0)
                        over = (after > (budget - seen) + tl.full((), 1e-9, tl.float64)) | (budget == 0.0)
                    if MODE == 2:
                        over = (total >= budget - seen) | (after > budget - seen)
                    refusal = tl.where(shut, 1, tl.where(over, 2, tl.where((count + 1).to(tl.float64) > cap, 3, 0)))
                    if mismatch & (refusal > 0):
                        verdict = refusal.to(tl.int64)
                        going = going * 0
                    else:
                        if mismatch:
                            total = after
                            count = count + 1
                        accepted = accepted + 1
                        if LIFTS & differs:
                            tl.store(logits + (start + j) * row_stride + token, height)
                        for s in range(num_stops):  # a stop id can be committed, and ends the block
                            if tl.load(stops + slot * num_stops + s) == token:
                                ended = ended * 0 + 1
                                going = going * 0
            own = (verdict > 0) | ((accepted == width) & (remaining > width) & (ended == 0))
            live = (remaining > 0).to(tl.int64)
            stepped = live * ((generated > 0) | (width > 0)).to(tl.int64)
            spent = spent + total
            if MODE == 3:
                spent = spent.to(tl.float32).to(tl.float64)
            tl.store(numbers + slot * 4, spent)
            tl.store(counts + slot * 8 + 1, generated + (accepted + own.to(tl.int64)) * live)
            tl.store(counts + slot * 8 + 2, tl.load(counts + slot * 8 + 2) + stepped)
            tl.store(counts + slot * 8 + 3, tl.load(counts + slot * 8 + 3) + width * live)
            tl.store(counts + slot * 8 + 4, tl.load(counts + slot * 8 + 4) + accepted)
            tl.store(counts + slot * 8 + 5, tl.load(counts + slot * 8 + 5) + count)
            tl.store(counts + slot * 8 + 6, tl.load(counts + slot * 8 + 6) + ended)
            tl.store(counts + slot * 8 + 7, tl.load(counts + slot * 8 + 7) | bad)
            tl.store(accepted_out + n, accepted)
            tl.store(charge_out + n, total)
            tl.store(relaxed_out + n, count)
            tl.store(verdict_out + n, verdict)


def serves(layout: Layout) -> bool:
    """Return whether the kernel knows how a layout scores."""
    return layout.rule == "asd" and layout.regret == "logit" and layout.value in ("suffix", "normalised")


def verify(
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    blocks: Blocks,
    draft_ids: torch.Tensor,
    logits: torch.Tensor,
    how: tuple[str, str, Layout, bool, torch.Tensor | None],
) -> Decision:
    """Decide, lift and charge; parameters as :meth:`asdsim.engines.ledger.Ledger.verify`.

    Parameters
    ----------
    tables : (numbers, counts, stops)
        The ledger's, changed in place.
    slots, blocks, draft_ids, logits
        At least one row, and one column in the blocks.
    how : (semantics, ledger, layout, lifts, most)
    """
    numbers, counts, stops = tables
    semantics, ledger, layout, lifts, most = how
    number, longest = blocks.inside.shape
    device = logits.device

    def whole(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    accepted, charge, relaxed, verdict = whole(number), whole(number, torch.float64), whole(number), whole(number)
    verify_kernel[(number * longest,)](
        logits, logits.stride(0), draft_ids, blocks.rows[:, 0].contiguous(), blocks.widths, slots, numbers, counts,
        stops, blocks.widths if most is None else most.long(), whole(len(logits), torch.float32),
        whole(len(logits), torch.float32), whole(len(logits)), whole(number, torch.int32), accepted, charge, relaxed,
        verdict, logits.shape[1], stops.shape[1], torch.finfo(logits.dtype).max / 2, LONGEST=longest,
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])), MODE=SEMANTICS[semantics],
        PER_BLOCK=ledger == "block", NORMALISED=layout.value == "normalised", BY_REGRET=layout.mismatch == "regret",
        LIFTS=lifts,
    )  # fmt: skip
    return Decision(accepted, charge, relaxed, verdict, numbers[slots, 0])
