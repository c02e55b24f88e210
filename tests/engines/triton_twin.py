"""The Triton kernel against the torch code, in Triton's interpreter; run where triton is installed."""

from __future__ import annotations

import math
import os
import random

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from asdsim.engines import accept_triton as fused
from asdsim.engines.accept import lay_blocks
from asdsim.engines.ledger import Ledger
from asdsim.rules.settings import Policy, layout_of

VOCAB, K = 11, 5
LOGITS = [0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 1.5, 3.0, -math.inf]
NUMBERS = [0.0, 0.05, 0.1, 0.125, 0.25, 0.3, 0.5, 0.7, 1.0, 8.0, math.inf]


def compare(semantics: str, scope: str, seed: int, steps: int = 12, number: int = 3) -> int:
    """Run both on the same random steps; return the relaxed tokens. Everything must be equal to the bit."""
    rng, draws = random.Random(seed), np.random.default_rng(seed)
    layout = layout_of(semantics)
    first = Policy(0, 0, 0, semantics, layout, ledger=scope)
    torch_side, triton_side = Ledger(first), Ledger(first)
    names = [f"r{n}" for n in range(number)]
    for name in names:
        policy = Policy(rng.choice(NUMBERS), rng.choice(NUMBERS), rng.choice([0.0, 1.0, 2.0, math.inf]), semantics,
                        layout, ledger=scope)  # fmt: skip
        limit, stops = rng.choice([3, 20, 40]), rng.choice([(), (2,), (2, 7)])
        for ledger in (torch_side, triton_side):
            ledger.admit(name, policy, limit=limit, stop_ids=stops)
    for _ in range(steps):
        widths = torch.tensor([rng.randint(0, K) for _ in names])
        if not int(widths.sum()):
            continue
        blocks = lay_blocks(widths, int(widths.max()), gap=1)
        logits = torch.tensor(draws.choice(LOGITS, (int(widths.sum()) + number, VOCAB)).astype(np.float32))
        logits[torch.isinf(logits).all(1), 0] = 0.0
        if rng.random() < 0.2:
            logits[rng.randrange(len(logits)), rng.randrange(VOCAB)] = math.nan
        best = logits.nan_to_num(nan=9.0).topk(3, dim=-1).indices
        drafts = best.gather(1, torch.tensor(draws.integers(0, 3, (len(logits), 1))))[:, 0]
        most = None if rng.random() < 0.7 else torch.tensor([rng.randint(0, K) for _ in names])
        lifts = rng.random() < 0.7
        mine, other = logits.clone(), logits.clone()
        slots = torch_side.slots(names)
        step = torch_side.verify(slots, blocks, drafts, mine, lifts=lifts, most=most)
        made = fused.verify(
            (triton_side._numbers, triton_side._counts, triton_side._stops), triton_side.slots(names), blocks, drafts,
            other, (semantics, scope, layout, lifts, most),
        )  # fmt: skip
        for name in ("accepted", "charge", "relaxed", "verdict", "spent"):
            left, right = getattr(step.decision, name), getattr(made, name)
            assert torch.equal(left, right), (semantics, scope, seed, name, left, right)
        assert torch.equal(torch_side._numbers, triton_side._numbers)
        assert torch.equal(torch_side._counts, triton_side._counts), (torch_side._counts[:6], triton_side._counts[:6])
        assert torch.equal(mine.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0))
    return sum(torch_side.report(name).relaxed for name in names)


def main() -> None:
    """Compare all semantics and ledgers."""
    relaxed = {
        (semantics, scope): sum(compare(semantics, scope, seed) for seed in range(5))
        for semantics in fused.SEMANTICS for scope in ("request", "block")
    }  # fmt: skip
    assert min(relaxed.values()) > 3, relaxed
    print(f"Triton kernel in the interpreter: equal to the bit, {sum(relaxed.values())} relaxed tokens")


if __name__ == "__main__":
    main()
