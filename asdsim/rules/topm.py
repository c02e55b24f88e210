"""Top-m relaxation: any of the target's m best tokens will do."""

from .spec import Parameter, Rule

RULE = Rule(
    name="topm",
    title="top-m criterion",
    source="arXiv 2606.30265 (names the criterion and no setting; 2 is ours)",
    accepts="x among the m best tokens",
    parameters=(Parameter("m", 2.0, "tokens that will do", low=1.0, whole=True),),
    score=lambda seen, params: float(seen.rank),
    limit=lambda params: float(params["m"]) - 1.0,
    knob="m",
    needs=("rank",),
    ladder=(1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 512.0),
)
