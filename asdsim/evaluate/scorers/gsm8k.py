"""GSM8K: the last boxed answer or, where nothing is boxed, the last number or fraction, compared as numbers.

:func:`strict` and :func:`flexible` are the two readings that lm-eval reports (``gsm8k.yaml``, version 3), compared as
text as it does; the prompt of asdsim asks for a box, so they are printed beside the verdict, not in its place.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

NUMBER = re.compile(r"(?:([-+]?\d+)\s+(?=\d+/\d))?([-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+)(?:/(\d+))?")
"""A whole number before a fraction, the number, and what it is divided by."""
FRACTION = re.compile(r"((?<=\d))?\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
ANY_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def answer(text: str) -> Decimal | None:
    r"""Return the number that a text gives as its answer, None where there is none.

    Of ``\boxed{..}`` the last one counts, braces inside it included, and of its content the last number; 1/2 and 2 1/2
    are one number. A box without a number is no answer, whatever stands before it. An unfinished box (the output was
    cut) counts as far as it goes.
    """
    start = text.rfind("\\boxed{")
    if start >= 0:
        text = _inside(text[start + len("\\boxed{") :])
    text = FRACTION.sub(lambda of: f"{'' if of[1] is None else ' '}{of[2] or of[3]}/{of[4] or of[5]}", text)
    found = NUMBER.findall(text.replace("{,}", ",").replace("\\!", "").replace("\\,", ""))
    return _value(*found[-1]) if found else None


def _value(whole: str, text: str, divisor: str) -> Decimal | None:
    """Return the number that 2 1/2, 1/2 or 1,800 stands for; None for one that cannot be."""
    number, below = _number(text), Decimal(divisor or 1)
    if number is None or not below:
        return None
    part = number / below
    return part if not whole else (Decimal(whole) - part if whole.startswith("-") else Decimal(whole) + part)


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


def score(text: str, reference: str | None) -> bool:
    """Tell whether the answer equals the reference as a number: 18, 18.0, 1,800 and 1800 compare by value."""
    given, right = answer(text), _number((reference or "").strip())
    return given is not None and given == right


def strict(text: str, reference: str | None) -> bool:
    """Tell whether the first ``#### NUMBER`` is the reference: lm-eval's strict-match."""
    marked = MARKED.search(text)
    return marked is not None and _plain(marked.group(1)) == _plain(reference or "")


def flexible(text: str, reference: str | None) -> bool:
    """Tell whether the last number is the reference: lm-eval's flexible-extract."""
    numbers = ANY_NUMBER.findall(text)
    return bool(numbers) and _plain(next(filter(None, numbers[-1])).strip()) == _plain(reference or "")


def _plain(text: str) -> str:
    """Return a text without what lm-eval ignores: commas, dollar signs and one full stop at the end."""
    return re.sub(r"\.$", "", text.replace(",", "").replace("$", "")).lower()
