"""MARS: accept the runner-up where the target hardly prefers its first choice."""

from .spec import NEVER, Parameter, Params, Rule, Seen, above, steps


def score(seen: Seen, params: Params) -> float:
    """Return -z(2)/z(1) where x is the runner-up."""
    if seen.rank != 1:
        return NEVER
    if not seen.top[0] > 0.0:
        raise ValueError(f"the largest logit is {seen.top[0]:g}: z(2)/z(1) is meaningless where z(1) <= 0")
    return -(seen.logit / seen.top[0])


RULE = Rule(
    name="mars",
    title="MARS, margin-aware verification",
    source="arXiv 2601.15498, theta = .9",
    accepts="x is top-2 and z(2)/z(1) > theta, raw logits",
    parameters=(Parameter("theta", 0.9, "ratio of raw logits to exceed", low=0.0, high=1.0),),
    score=score,
    limit=lambda params: above(float(params["theta"])),
    knob="theta",
    needs=("rank",),
    ladder=(*steps(1.0, 0.9, 41), *steps(0.89, 0.5, 40)),
    note="a ratio of raw logits changes when a constant is added to all, though no probability does",
)
