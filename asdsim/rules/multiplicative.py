"""Multiplicative relaxation: a draft token needs a share of the best probability."""

import math

from .spec import Parameter, Rule, at_least, steps

RULE = Rule(
    name="multiplicative",
    title="multiplicative criterion",
    source="arXiv 2606.30265 (names the criterion and no setting; .5 is ours)",
    accepts="p(x) >= ratio p(1)",
    parameters=(Parameter("ratio", 0.5, "share of the best probability that is enough", high=1.0),),
    score=lambda seen, params: -math.exp(-seen.regret),
    limit=lambda params: at_least(float(params["ratio"])),
    knob="ratio",
    ladder=steps(1.0, 0.0, 81),
    note="a bound on regret alone: ratio c is a gate of -ln(c) logits at value 1, without ledger and cap",
)
