"""Scorers that a user names: the reference in the output, a pattern, or a function of theirs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from ...errors import UsageError

Score = Callable[[str, Any], bool]
"""From an output and the reference answer (None where there is none) to whether the output is right."""


def contains(text: str, reference: str | None) -> bool:
    """Tell whether the reference answer, spaces around it aside, stands in the output."""
    return reference is not None and bool(reference.strip()) and reference.strip() in text


def by_pattern(pattern: str) -> Score:
    """Return a scorer that looks for a regular expression.

    Without a group the output is right where the pattern is found. With one, the group of the last match must equal the
    reference answer, spaces around both aside.

    Raises
    ------
    UsageError
        If it is no regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--scorer regex:{pattern}: not a regular expression: {error}") from None

    def score(text: str, reference: str | None) -> bool:
        if not compiled.groups:
            return compiled.search(text) is not None
        groups = [match.group(1) for match in compiled.finditer(text)]
        answer = groups[-1] if groups else None
        return answer is not None and reference is not None and answer.strip() == reference.strip()

    return score


def by_function(name: str) -> Score:
    """Return a function ``MODULE:FUNCTION``, called with the output and the reference; it must return a bool.

    Modules are also looked for in the current directory.

    Raises
    ------
    UsageError
        If it cannot be imported; when it is called, if it fails or returns something else.
    """
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # the module is the user's: it may raise anything
        raise UsageError(
            f"--scorer {name}: {type(error).__name__}: {error}", fix="name a function in a module that Python finds"
        ) from error
    if not callable(function):
        raise UsageError(f"--scorer {name} is no function")

    def score(text: str, reference: str | None) -> bool:
        try:
            verdict = function(text, reference)
        except Exception as error:
            raise UsageError(f"scorer {name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(verdict, (bool, np.bool_)):
            raise UsageError(f"scorer {name} returned {verdict!r}, not True or False")
        return bool(verdict)

    return score
