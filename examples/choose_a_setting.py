"""Choose a setting on one trace and judge it on another: the fastest that changes no more than you allow.

    python examples/choose_a_setting.py [trace holdout]

Needs no model and no torch: the committed traces are covered, so every figure is exact.
"""

from __future__ import annotations

import sys

import asdsim
from asdsim.evaluate.cost_spec import cost_of_trace
from asdsim.result import replay_grid
from asdsim.trace.covered import covered_settings

MOST_REGRET = 0.04
"""Largest regret per generated token to accept, in logits: the upper end of its 95 % interval must stay below."""


def main(trace_path: str, holdout_path: str) -> None:
    """Print the choice, what it promises on prompts of its own, and what became of one answer."""
    trace, holdout = asdsim.load(trace_path), asdsim.load(holdout_path)
    grid = covered_settings(holdout)  # settings that both traces know exactly
    quality = replay_grid(trace, grid).quality(cost=cost_of_trace(trace))
    rows = [quality.row(n) for n in range(len(grid))]
    allowed = [n for n, row in enumerate(rows) if (row["regret_per_token"][2] or 0.0) <= MOST_REGRET]
    best = max(allowed, key=lambda n: rows[n]["speed_up"][0])
    policy = grid.policy(best)
    print(f"chosen of {len(allowed)} allowed settings: {policy}")
    print("  where it was chosen: speed-up {:.2f} [{:.2f}, {:.2f}]".format(*rows[best]["speed_up"]))

    fresh = asdsim.replay(holdout, B=policy.budget, g=policy.gate, M=policy.cap)
    row = fresh.quality(cost=cost_of_trace(holdout)).row(0)
    print("  on other prompts:    speed-up {:.2f} [{:.2f}, {:.2f}]".format(*row["speed_up"]))
    print("  regret per token {:.4f} [{:.4f}, {:.4f}]".format(*row["regret_per_token"]))
    print(f"  outputs that differ from strict: {100 * row['outputs_differ_share'][0]:.0f} %")

    relaxed = fresh.relaxed(0).sort("regret", descending=True).head(5)
    print("the five dearest tokens that it accepted:")
    for token in relaxed.to_dicts():
        words = f"{token['token_text']!r} for {token['choice_text']!r}"
        print(f"  {token['request_id']:<14} {words}, regret {token['regret']:.2f}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["traces/smollm2-layerskip", "traces/smollm2-layerskip-holdout"]))
