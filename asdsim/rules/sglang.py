"""SGLang's acceptance thresholds, on mismatches of a greedy trace."""

import math

from .spec import NEVER, Parameter, Params, Rule, Seen, at_least, steps

GREEDY = (
    "its guarantee concerns sampling: a greedy trace tells which draft tokens would pass on captured prefixes, but "
    "every rejection here is followed by the target's first choice, and a match is never drawn away; no distribution "
    "of outputs follows from it"
)


def score(seen: Seen, params: Params) -> float:
    """Return -p(x)/u, -inf where p(x) >= single or u = 0 < p(x)."""
    p = seen.p
    if p >= float(params["single"]):
        return -math.inf
    if p == 0.0:
        return NEVER  # also at u = 0: what cannot be sampled is never accepted
    return -math.inf if seen.u == 0.0 else -(p / seen.u)


RULE = Rule(
    name="sglang",
    title="SGLang thresholds",
    source="SGLang, speculative-accept-threshold-single and -acc, both 1.0",
    accepts="p(x) >= single, or u <= p(x)/acc",
    parameters=(
        Parameter("acc", 1.0, "divides the accumulated probability", high=1.0, open_low=True),
        Parameter("single", 1.0, "probability that is enough without a draw", high=1.0, open_low=True),
        Parameter("seed", 0.0, "of the uniform numbers, one per request and output position", whole=True),
    ),
    score=score,
    limit=lambda params: at_least(float(params["acc"])),
    knob="acc",
    ladder=(*steps(1.0, 0.1, 46), 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001),
    sampled=True,
    note=GREEDY,
)
