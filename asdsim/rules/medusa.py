"""Medusa's typical acceptance, on mismatches."""

import math

from .spec import Parameter, Params, Rule, Seen, above, steps


def score(seen: Seen, params: Params) -> float:
    """Return minus the largest eps under which x would pass."""
    p, alpha = seen.p, float(params["alpha"])
    typical = p * math.exp(seen.entropy)  # p(x) / exp(-H)
    if alpha == 0.0:  # alpha is sqrt(eps)
        return -max(p, typical * typical)
    return -math.inf if typical > alpha else -p


RULE = Rule(
    name="medusa",
    title="Medusa, typical acceptance",
    source="arXiv 2401.10774, eps = .09, alpha = sqrt(eps) = .3",
    accepts="p(x) > min(eps, alpha exp(-H))",
    parameters=(
        Parameter("eps", 0.09, "probability that is always enough", high=1.0),
        Parameter("alpha", 0.0, "share of exp(-H) that is enough; 0: sqrt(eps)", high=1.0, zero="sqrt(eps)"),
    ),
    score=score,
    limit=lambda params: above(float(params["eps"])),
    knob="eps",
    needs=("entropy",),
    ladder=(*steps(1.0, 0.1, 46), 0.09, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001),
    note="the target's own choice always passes: its probability is at least exp(-H)",
)
