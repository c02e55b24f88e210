"""Strict matching: no mismatch is accepted."""

from .spec import NEVER, Rule

RULE = Rule(
    name="strict",
    title="strict token matching",
    source="arXiv 2211.17192, greedy case",
    accepts="never",
    parameters=(),
    score=lambda seen, params: NEVER,
    limit=lambda params: 0.0,
)
