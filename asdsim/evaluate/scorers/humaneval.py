"""HumanEval: does the program pass the task's tests? Both are run by :mod:`asdsim.evaluate.scorers.sandbox`."""

from __future__ import annotations

import os
import re

from ...errors import UsageError
from .reference import read_reference
from .sandbox import run_program

FENCE = re.compile(r"```[ \t]*(?:[\w+-]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def check_supported() -> None:
    """Refuse to start where programs cannot be run.

    Raises
    ------
    UsageError
    """
    if os.name != "posix":
        raise UsageError("programs are run on Linux and macOS only", fix="audit without --allow-code-execution")


def program_of(text: str, entry_point: str, prompt_text: str) -> str:
    """Return the program that an answer amounts to.

    The first code block that defines the function counts, with the imports that the task's own code starts with; else
    the first block, or the whole text, continues the task's code.

    Parameters
    ----------
    text : str
        The model's answer.
    entry_point : str
        Name of the function.
    prompt_text : str
        The user's message, which holds the task's code in a block.
    """
    given = FENCE.search(prompt_text)
    task = given.group(1) if given else ""
    blocks = FENCE.findall(text) or [text]
    defines = re.compile(rf"^\s*def {re.escape(entry_point)}\b", re.MULTILINE)
    whole = next((block for block in blocks if defines.search(block)), None)
    if whole is not None:
        return task.split("\ndef ")[0].partition("def ")[0] + "\n" + whole
    return task + "\n" + blocks[0]


def score(text: str, reference: str, prompt_text: str, *, timeout: float = 5.0, memory: int = 1 << 30) -> bool:
    """Tell whether an answer passes its tests; ``reference`` is JSON with the entry point and the tests.

    Raises
    ------
    UsageError
        If the reference is something else.
    """
    task = read_reference(reference)
    tests, entry_point = task.text("test"), task.text("entry_point")
    program = program_of(text, entry_point, prompt_text)
    return run_program(program, tests, entry_point, timeout=timeout, memory=memory)[0]
