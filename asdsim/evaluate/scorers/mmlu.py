"""MMLU: the letter behind ``Answer:``, as simple-evals reads it."""

from __future__ import annotations

import re

ANSWER = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")


def answer(text: str) -> str | None:
    """Return the letter of the first ``Answer: LETTER`` in capitals; None where there is none."""
    given = ANSWER.search(text)
    return given.group(1).upper() if given else None


def score(text: str, reference: str | None) -> bool:
    """Tell whether the letter given is the reference."""
    return reference is not None and answer(text) == reference.strip()
