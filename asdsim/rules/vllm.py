"""vLLM's relaxed acceptance while a reasoning model thinks."""

import math

from .spec import NEVER, Parameter, Params, Rule, Seen, above, steps


def score(seen: Seen, params: Params) -> float:
    """Return -p(x)/p(1) where x is among the top k, in the thinking phase."""
    return -math.exp(-seen.regret) if seen.thinking and seen.rank < int(params["k"]) else NEVER


RULE = Rule(
    name="vllm",
    title="vLLM relaxed thinking",
    source="vLLM, relaxed acceptance in the thinking phase, ratio .5, k = 3",
    accepts="p(x)/p(1) > ratio and x in top k, in the thinking phase",
    parameters=(
        Parameter("ratio", 0.5, "share of the best probability to exceed", high=1.0),
        Parameter("k", 3.0, "ranks looked at", low=1.0, whole=True),
        Parameter(
            "begin", -1.0, "token id that begins thinking; -1: the whole output is thinking", low=-1.0, whole=True
        ),
        Parameter("end", -1.0, "token id that ends it", low=-1.0, whole=True),
    ),
    score=score,
    limit=lambda params: above(float(params["ratio"])),
    knob="ratio",
    needs=("rank",),
    ladder=steps(1.0, 0.0, 81),
)
