"""MBPP: does the program pass the task's assertions? Both are run by :mod:`asdsim.evaluate.scorers.sandbox`."""

from __future__ import annotations

from .humaneval import FENCE
from .reference import read_reference
from .sandbox import run_program


def program_of(text: str) -> str:
    """Return the first code block of an answer, or the whole text where there is none.

    lm-eval puts the opening fence before the answer, and reads up to the closing one; here the model opens it.
    """
    block = FENCE.search(text)
    return block.group(1) if block else text


def score(text: str, reference: str, *, timeout: float = 5.0, memory: int = 1 << 30) -> bool:
    """Tell whether an answer passes its tests; ``reference`` is JSON with the tests.

    Raises
    ------
    UsageError
        If the reference is something else.
    """
    return run_program(program_of(text), read_reference(reference).text("test"), timeout=timeout, memory=memory)[0]
