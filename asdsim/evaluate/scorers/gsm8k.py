"""GSM8K: the last boxed answer or, where nothing is boxed, the last number, compared as numbers."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")


def answer(text: str) -> Decimal | None:
    r"""Return the number that a text gives as its answer, None where there is none.

    Of ``\boxed{..}`` the last one counts, braces inside it included, and of its content the last number; a box without
    a number is no answer, whatever stands before it. An unfinished box (the output was cut) counts as far as it goes.
    """
    start = text.rfind("\\boxed{")
    if start >= 0:
        text = _inside(text[start + len("\\boxed{") :])
    found = NUMBER.findall(text.replace("{,}", ",").replace("\\!", "").replace("\\,", ""))
    return _number(found[-1]) if found else None


def _inside(text: str) -> str:
    depth = 1
    for place, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[:place]
    return text


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def score(text: str, reference: str) -> bool:
    """Tell whether the answer equals the reference as a number: 18, 18.0, 1,800 and 1800 compare by value."""
    given, right = answer(text), _number(reference.strip())
    return given is not None and given == right
