"""MATH-500: the last boxed answer, or what stands for it, equal to the reference as mathematics, by ``math-verify``."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...errors import UsageError

SECONDS = 5
"""For parsing and for comparing one answer; one that takes longer is not right."""


def check_supported() -> None:
    """Refuse to start without the package.

    Raises
    ------
    UsageError
    """
    try:
        import math_verify  # noqa: F401
    except ImportError:
        raise UsageError(
            "math500 is scored by the package math-verify, which is not installed", fix="pip install 'asdsim[quality]'"
        ) from None


@cache
def _gold(reference: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{reference}}}", parsing_timeout=SECONDS)


def score(text: str, reference: str | None) -> bool:
    r"""Tell whether an answer equals the reference, as ``verify(parse(gold), parse(text))`` of math-verify does."""
    from math_verify import parse, verify

    return bool(verify(_gold(reference or ""), parse(text, parsing_timeout=SECONDS), timeout_seconds=SECONDS))
