"""Additive relaxation: a draft token may fall short of the best by a fixed probability."""

from .spec import Parameter, Rule, steps

RULE = Rule(
    name="additive",
    title="additive criterion",
    source="arXiv 2606.30265 (names the criterion and no setting; .1 is ours)",
    accepts="p(x) >= p(1) - delta",
    parameters=(Parameter("delta", 0.1, "probability by which x may fall short of the best", high=1.0),),
    score=lambda seen, params: seen.p1 - seen.p,
    limit=lambda params: float(params["delta"]),
    knob="delta",
    ladder=steps(0.0, 1.0, 81),
)
