"""Acceptance rules other than ASD, one file each, found by name and imported when asked for.

Adding a rule: write ``NAME.py`` with a ``RULE``, and put the name here; an oracle goes into
:mod:`asdsim.oracle.rules`, and the twin tests then run it.
"""

from __future__ import annotations

from importlib import import_module

from ..errors import unknown_name
from .spec import Rule

NAMES = (
    "strict", "truncate", "mars", "fuzzy", "medusa", "trtllm", "vllm", "fly", "sglang", "lenience", "additive",
    "multiplicative", "topm", "entropy",
)  # fmt: skip
"""Names of the rules; ``asd`` is walked by its own parameters B, g and M."""


def get_rule(name: str) -> Rule:
    """Return a rule by name.

    Raises
    ------
    UsageError
        If there is none, with the closest name.
    """
    if name not in NAMES:
        raise unknown_name("rule", name, ["asd", *NAMES])
    rule: Rule = import_module(f"asdsim.rules.{name}").RULE
    return rule
