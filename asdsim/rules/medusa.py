"""Medusa's typical acceptance, on mismatches."""

import math

from .spec import Parameter, Params, Rule, Seen, above


def score(seen: Seen, params: Params) -> float:
    """Return -p(x) exp(H), or -inf where p(x) > eps."""
    p = seen.p
    return -math.inf if p > float(params["eps"]) else -(p * math.exp(seen.entropy))


RULE = Rule(
    name="medusa",
    title="Medusa, typical acceptance",
    source="arXiv 2401.10774, eps = .09, alpha = .3",
    accepts="p(x) > min(eps, alpha exp(-H))",
    parameters=(
        Parameter("eps", 0.09, "probability that is always enough", high=1.0),
        Parameter("alpha", 0.3, "share of exp(-H) that is enough", high=1.0, open_high=True),
    ),
    score=score,
    limit=lambda params: above(float(params["alpha"])),
    knob="alpha",
    needs=("entropy",),
    ladder=(0.99, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002,
            0.001),
    note="the target's own choice always passes: its probability is at least exp(-H)",
)  # fmt: skip
