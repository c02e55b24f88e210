"""Independent, slow readings of the rules other than ASD: oracles for :mod:`asdsim.rules`.

Each is written from the published inequality, straight on recorded columns; nothing is shared with the rules that the
walk runs. A function says whether the mismatch at position i of a block may be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .walk import Block

Numbers = dict[str, Any]


def probability(row: Numbers, logit: float) -> float:
    """Return the target's probability of a token with this logit."""
    return math.exp(logit - row["logsumexp"])


def mars(block: Block, i: int, params: Numbers) -> bool:
    """x is the second best token, and z2 / z1 > theta."""
    row = block.rows[i]
    return row["rank"] == 1 and row["top_logits"][1] / row["top_logits"][0] > params["theta"]


def fuzzy(block: Block, i: int, params: Numbers) -> bool:
    """The divergence of the two distributions is at most T."""
    return bool(block.rows[i][params["kind"]] <= params["T"])


def medusa(block: Block, i: int, params: Numbers) -> bool:
    """p(x) > min(eps, alpha exp(-H))."""
    row = block.rows[i]
    alpha = params["alpha"] or math.sqrt(params["eps"])
    return probability(row, row["draft_logit"]) > min(params["eps"], alpha * math.exp(-row["entropy"]))


def trtllm(block: Block, i: int, params: Numbers) -> bool:
    """x is among the N best, and p(x) > p1 - delta."""
    row = block.rows[i]
    best, drafted = probability(row, row["top_logits"][0]), probability(row, row["draft_logit"])
    return row["rank"] < params["N"] and drafted > best - params["delta"]


def vllm(block: Block, i: int, params: Numbers) -> bool:
    """x is among the k best, and p(x) / p1 > ratio."""
    row = block.rows[i]
    best, drafted = probability(row, row["top_logits"][0]), probability(row, row["draft_logit"])
    return row["rank"] < params["k"] and drafted / best > params["ratio"]


def fly(block: Block, i: int, params: Numbers) -> bool:
    """The three best tokens, renormalised, have an entropy of at least h, and the next W tokens match."""
    width = len(block.draft)
    window = int(params["W"]) or min(6, width - 1)
    if i + window >= width or any(block.draft[j] != block.choice[j] for j in range(i + 1, i + window + 1)):
        return False
    z = block.rows[i]["top_logits"][:3]
    p = [1 / sum(math.exp(other - logit) for other in z) for logit in z]
    return sum(-q * math.log(q) for q in p if q > 0) >= params["h"]


def sglang(block: Block, i: int, params: Numbers) -> bool:
    """p(x) >= single, or u <= p(x) / acc, where p(x) > 0."""
    row = block.rows[i]
    drafted = probability(row, row["draft_logit"])
    return drafted > 0 and (drafted >= params["single"] or row["u"] <= drafted / params["acc"])


def lenience(block: Block, i: int, params: Numbers) -> bool:
    """u <= p(x) / (l q(x)), where p(x) > 0."""
    row = block.rows[i]
    drafted = probability(row, row["draft_logit"])
    return drafted > 0 and row["u"] * params["l"] * math.exp(row["draft_logprob"]) <= drafted


def additive(block: Block, i: int, params: Numbers) -> bool:
    """p(x) >= p1 - delta."""
    row = block.rows[i]
    return probability(row, row["draft_logit"]) >= probability(row, row["top_logits"][0]) - params["delta"]


def multiplicative(block: Block, i: int, params: Numbers) -> bool:
    """p(x) >= ratio p1."""
    row = block.rows[i]
    return probability(row, row["draft_logit"]) >= params["ratio"] * probability(row, row["top_logits"][0])


def topm(block: Block, i: int, params: Numbers) -> bool:
    """x is among the m best."""
    return bool(block.rows[i]["rank"] < params["m"])


def entropy(block: Block, i: int, params: Numbers) -> bool:
    """The target's entropy is at least h, and x is among the m best."""
    return bool(block.rows[i]["entropy"] >= params["h"] and block.rows[i]["rank"] < params["m"])


def never(block: Block, i: int, params: Numbers) -> bool:
    """No mismatch is accepted."""
    return False


ALLOWS: dict[str, Callable[[Block, int, Numbers], bool]] = {
    "strict": never, "truncate": never, "mars": mars, "fuzzy": fuzzy, "medusa": medusa, "trtllm": trtllm, "vllm": vllm,
    "fly": fly, "sglang": sglang, "lenience": lenience, "additive": additive, "multiplicative": multiplicative,
    "topm": topm, "entropy": entropy,
}  # fmt: skip
"""One oracle per rule."""
