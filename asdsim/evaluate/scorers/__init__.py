"""Is an answer right? One file per way to tell; each has ``score(text, reference) -> bool``.

A request is scored by its task: ``gsm8k``, ``humaneval`` (which runs the program that the model wrote, so only where
that was allowed), and exact match for any other task whose requests have a reference answer. A user may name another
scorer for a task: see :mod:`asdsim.evaluate.scorers.custom`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UsageError, unknown_name

if TYPE_CHECKING:
    from ...records import RequestRecord
    from .custom import Score

NAMES = ("gsm8k", "humaneval", "exact", "contains")
OPEN = ("mt-bench",)
"""Tasks whose references are sample answers: no text has to equal them."""

PATTERN = "regex:"
Decode = Callable[[list[int]], str]


def scorer_name(record: RequestRecord, chosen: Mapping[str, str], allow_code: bool) -> str | None:
    """Return which scorer judges a request; None where none does.

    Parameters
    ----------
    record : RequestRecord
    chosen : mapping of str to str
        Scorer by task, where the user named one.
    allow_code : bool
        Whether programs that the model wrote may be run.
    """
    usual = None if record.task in OPEN else record.task if record.task in NAMES else "exact"
    name = chosen.get(record.task, usual)
    if record.reference is None and not (name and ":" in name):  # a pattern or a function may do without
        return None
    return None if name == "humaneval" and not allow_code else name


def parse_chosen(items: tuple[str, ...]) -> dict[str, str]:
    """Read ``TASK=SCORER`` items: a name in :data:`NAMES`, ``regex:PATTERN`` or ``MODULE:FUNCTION``.

    Raises
    ------
    UsageError
        On an item of another form, or an unknown scorer.
    """
    chosen = {}
    for item in items:
        task, equals, name = item.partition("=")
        if not equals or not task:
            raise UsageError(f"--scorer {item!r} is not TASK=SCORER", fix="write for example jsonl=gsm8k")
        module, colon, function = name.partition(":")
        named = colon and (
            module == "regex" or (function.isidentifier() and all(map(str.isidentifier, module.split("."))))
        )
        if name not in NAMES and not named:
            raise unknown_name("scorer", name, [*NAMES, "regex:PATTERN", "MODULE:FUNCTION"])
        chosen[task] = name
    return chosen


def given_answer(name: str | None, text: str) -> str | None:
    """Return the answer that a text gives, as its scorer reads it; None where it gives none, or is a program."""
    from . import gsm8k

    if name == "gsm8k":
        number = gsm8k.answer(text)
        return None if number is None else f"{number.normalize():f}"
    return " ".join(text.split()) if name == "exact" else None


@dataclass(frozen=True)
class TaskScorer:
    """Scores an output (int32 tokens) of a request (by row); None where it has no score. See :func:`make_scorer`."""

    records: list[RequestRecord]
    names: list[str | None]
    scores: Mapping[str, Score]
    decode: Decode
    timeout: float
    memory: int

    @property
    def title(self) -> str:
        """The scorers in use, in the order of the requests."""
        return ", ".join(dict.fromkeys(name for name in self.names if name is not None))

    def __call__(self, request: int, tokens: bytes) -> bool | None:
        """Return the verdict on an output."""
        name, record = self.names[request], self.records[request]
        if name is None:
            return None
        text = self.decode(np.frombuffer(tokens, "<i4").tolist())
        if name != "humaneval":
            return self.scores[name](text, record.reference)
        from . import humaneval

        return humaneval.score(
            text, record.reference or "", record.prompt_text, timeout=self.timeout, memory=self.memory
        )  # fmt: skip


def make_scorer(
    records: list[RequestRecord],
    decode: Decode,
    *,
    chosen: Mapping[str, str] | None = None,
    allow_code: bool = False,
    timeout: float = 5.0,
    memory: int = 1 << 30,
) -> TaskScorer:
    """Return what scores an output of a request by its task.

    Parameters
    ----------
    records : list of RequestRecord
    decode : callable
        Turns token ids into text.
    chosen, allow_code
        See :func:`scorer_name`.
    timeout, memory
        Seconds and bytes that one program may take.

    Raises
    ------
    UsageError
        If programs are to be run and cannot be on this system, or a pattern or function cannot be used.
    """
    from . import humaneval

    names = [scorer_name(record, chosen or {}, allow_code) for record in records]
    if "humaneval" in names:
        humaneval.check_supported()
    scores = {name: _score(name) for name in dict.fromkeys(names) if name not in (None, "humaneval")}
    return TaskScorer(records, names, scores, decode, timeout, memory)


def _score(name: str) -> Score:
    from . import custom, exact, gsm8k

    if name.startswith(PATTERN):
        return custom.by_pattern(name.removeprefix(PATTERN))
    if ":" in name:
        return custom.by_function(name)
    return {"gsm8k": gsm8k.score, "exact": exact.score, "contains": custom.contains}[name]
