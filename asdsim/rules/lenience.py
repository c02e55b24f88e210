"""Lenience: rejection sampling with the draft probability scaled down, on mismatches of a greedy trace."""

import math

from .sglang import GREEDY
from .spec import NEVER, Parameter, Params, Rule, Seen, at_least, steps


def score(seen: Seen, params: Params) -> float:
    """Return -p(x)/(u q(x)), -inf where u = 0 < p(x)."""
    p = seen.p
    if p == 0.0:
        return NEVER  # also at u = 0: what cannot be sampled is never accepted
    drawn = seen.u * math.exp(seen.draft_logprob)
    return -math.inf if drawn == 0.0 else -(p / drawn)


RULE = Rule(
    name="lenience",
    title="lenience",
    source="arXiv 2211.17192, appendix A.5, l <= 1",
    accepts="u <= p(x)/(l q(x))",
    parameters=(
        Parameter("l", 1.0, "lenience; 1 is plain rejection sampling", high=1.0, open_low=True),
        Parameter("seed", 0.0, "of the uniform numbers, one per request and output position", whole=True),
    ),
    score=score,
    limit=lambda params: at_least(float(params["l"])),
    knob="l",
    needs=("draft_logprob",),
    ladder=(*steps(1.0, 0.1, 46), 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001),
    sampled=True,
    note=GREEDY,
)
