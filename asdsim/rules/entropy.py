"""Entropy-thresholded relaxation: any of the m best tokens will do where the target is unsure."""

from .spec import NEVER, Parameter, Params, Rule, Seen, at_least, steps


def score(seen: Seen, params: Params) -> float:
    """Return minus the entropy where x is among the m best tokens."""
    return -seen.entropy if seen.rank < int(params["m"]) else NEVER


RULE = Rule(
    name="entropy",
    title="entropy-thresholded criterion",
    source="arXiv 2606.30265 (names the criterion and no setting; h = 2 and m = 2 are ours)",
    accepts="entropy of p >= h and x among the m best tokens",
    parameters=(
        Parameter("h", 2.0, "smallest entropy of the target's distribution, in nats"),
        Parameter("m", 2.0, "tokens that will do", low=1.0, whole=True),
    ),
    score=score,
    limit=lambda params: at_least(float(params["h"])),
    knob="h",
    needs=("rank", "entropy"),
    ladder=steps(6.0, 0.0, 61),
)
