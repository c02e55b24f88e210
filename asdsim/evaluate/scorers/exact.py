"""Exact match: the answer is the reference, runs of white space aside."""

from __future__ import annotations


def score(text: str, reference: str) -> bool:
    """Tell whether two texts are equal once white space is trimmed and collapsed; case counts."""
    return text.split() == reference.split()
