"""FLy: accept where the target is unsure and agrees again afterwards."""

import math

from .spec import NEVER, Parameter, Params, Rule, Seen, at_least, steps


def top3_entropy(top: list[float]) -> float:
    """Return the entropy of the three largest logits' softmax, in nats."""
    weights = [math.exp(z - top[0]) for z in top[:3]]
    total = math.fsum(weights)
    return -math.fsum(w / total * math.log(w / total) for w in weights if w > 0.0)


def score(seen: Seen, params: Params) -> float:
    """Return minus the top-3 entropy where the next W draft tokens all match."""
    window = int(params["W"]) if float(params["W"]) > 0 else min(6, seen.width - 1)
    return -top3_entropy(seen.top) if seen.run >= window else NEVER


RULE = Rule(
    name="fly",
    title="FLy, loosely speculative decoding",
    source="arXiv 2511.22972, entropy >= .3, W = min(6, K-1)",
    accepts="entropy of the top 3 >= h and the next W tokens of the block all match",
    parameters=(
        Parameter("h", 0.3, "smallest entropy of the three best tokens renormalised, in nats"),
        Parameter("W", 0.0, "window; 0: min(6, K-1)", whole=True, zero="min(6,K-1)"),
    ),
    score=score,
    limit=lambda params: at_least(float(params["h"])),
    knob="h",
    ladder=steps(1.1, 0.0, 56),
    note="a mismatch with fewer than W tokens behind it in its block is refused; short blocks leave this rule no room",
)
