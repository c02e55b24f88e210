"""TensorRT-LLM's relaxed acceptance for reasoning models."""

from .spec import NEVER, Parameter, Params, Rule, Seen, below, steps


def score(seen: Seen, params: Params) -> float:
    """Return p1 - p(x) where x is among the top N, in the thinking phase."""
    return seen.p1 - seen.p if seen.thinking and seen.rank < int(params["N"]) else NEVER


RULE = Rule(
    name="trtllm",
    title="TensorRT-LLM relaxed acceptance",
    source="TensorRT-LLM, use_relaxed_acceptance_for_thinking, N = 10 and delta = .6 (also 15 and .5)",
    accepts="x in top N and p(x) > p(1) - delta, in the thinking phase",
    parameters=(
        Parameter("delta", 0.6, "probability by which x may fall short of the best", high=1.0),
        Parameter("N", 10.0, "ranks looked at", low=1.0, whole=True),
        Parameter(
            "begin", -1.0, "token id that begins thinking; -1: the whole output is thinking", low=-1.0, whole=True
        ),
        Parameter("end", -1.0, "token id that ends it", low=-1.0, whole=True),
    ),
    score=score,
    limit=lambda params: below(float(params["delta"])),
    knob="delta",
    needs=("rank",),
    ladder=steps(0.0, 1.0, 81),
)
