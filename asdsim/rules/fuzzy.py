"""Fuzzy speculative decoding: accept where draft and target distributions are close."""

from .spec import Parameter, Params, Rule, Seen, steps

KINDS = ("js", "kl", "reverse_kl", "tv")


def score(seen: Seen, params: Params) -> float:
    """Return the divergence at this position."""
    return seen.divergence[str(params["kind"])]


RULE = Rule(
    name="fuzzy",
    title="Fuzzy speculative decoding",
    source="arXiv 2502.20704, T = .4",
    accepts="divergence(p, q) <= T",
    parameters=(
        Parameter("T", 0.4, "largest divergence, in nats (tv: 0 to 1)"),
        Parameter("kind", "js", "kl is KL(target || drafter), reverse_kl the other way", choices=KINDS),
    ),
    score=score,
    limit=lambda params: float(params["T"]),
    knob="T",
    needs=("<kind>",),
    ladder=(*steps(0.0, 0.2, 41), *steps(0.21, 0.69, 49)),
    note="needs a drafter with a distribution; the token itself plays no part in the decision",
)
