"""MMLU: the letter behind ``Answer:``, as simple-evals reads it.

:func:`first_line` is for prompts that end in ``Answer:`` and ask for the letter alone, as those with examples do.
"""

from __future__ import annotations

import re
import string

ANSWER = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")


def answer(text: str) -> str | None:
    """Return the letter of the first ``Answer: LETTER`` in capitals; None where there is none."""
    given = ANSWER.search(text)
    return given.group(1).upper() if given else None


def score(text: str, reference: str | None) -> bool:
    """Tell whether the letter given is the reference."""
    return reference is not None and answer(text) == reference.strip()


def line(text: str) -> str:
    """Return the first line of an answer in capitals, without punctuation and space around it."""
    bare = text.partition("\n")[0].strip().translate(str.maketrans("", "", string.punctuation))
    return bare.upper()


def first_line(text: str, reference: str | None) -> bool:
    """Tell whether the first line is the reference letter: exact match of lm-eval's ``mmlu_generative``."""
    return reference is not None and line(text) == reference.strip()
