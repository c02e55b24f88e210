"""Is an answer right? One file per way to tell; each has ``score(text, reference) -> bool``.

A request is scored by its task: ``gsm8k`` (``svamp`` too), ``math500``, ``mmlu`` (by the letter alone, where the prompt
ends in ``Answer:``), ``ifeval``, ``humaneval`` and ``mbpp`` (which run the program that the model wrote, so only where
that was allowed), and exact match for any other task whose requests have a reference answer. A user may name another
scorer for a task: see :mod:`asdsim.evaluate.scorers.custom`. :func:`readings` says what else a published table may
report of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError, unknown_name
from ...files import shown

if TYPE_CHECKING:
    from ...records import RequestRecord
    from .custom import Score

PROGRAMS = ("humaneval", "mbpp")
"""Scorers that run what the model wrote."""
NAMES = (
    "gsm8k", "gsm8k-strict", "gsm8k-flexible", "math500", "mmlu", "mmlu-letter", "ifeval", *PROGRAMS, "exact",
    "contains",
)  # fmt: skip
BY_TASK = {"svamp": "gsm8k"}
"""Tasks that are scored as another one is."""
OPEN = ("mt-bench", "alpaca")
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
    task = BY_TASK.get(record.task, record.task)
    usual = None if task in OPEN else task if task in NAMES else "exact"
    if task == "mmlu" and record.prompt_text.endswith("\nAnswer:"):
        usual = "mmlu-letter"
    name = chosen.get(record.task, usual)
    if record.reference is None and not (name and ":" in name):  # a pattern or a function may do without
        return None
    return None if name in PROGRAMS and not allow_code else name


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
    from . import gsm8k, mmlu

    if name == "gsm8k":
        number = gsm8k.answer(text)
        return None if number is None else f"{number.normalize():f}"
    if name == "mmlu":
        return mmlu.answer(text)
    if name == "mmlu-letter":
        return mmlu.line(text) or None
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
        """Return the verdict on an output.

        Raises
        ------
        UsageError
            If the scorer cannot read the reference of the request, or a user's function fails.
        """
        try:
            return self._verdict(request, tokens)
        except UsageError as error:
            where = f"request {shown(self.records[request].request_id)}" + (f", {error.where}" if error.where else "")
            fix = error.fix or f"scorer {self.names[request]} cannot judge it; name another with --scorer"
            raise UsageError(error.what, where=where, fix=fix) from None

    def _verdict(self, request: int, tokens: bytes) -> bool | None:
        name, record = self.names[request], self.records[request]
        if name is None:
            return None
        text = self.decode(np.frombuffer(tokens, "<i4").tolist())
        if name not in PROGRAMS:
            return self.scores[name](text, record.reference)
        from . import humaneval, mbpp

        limits: dict[str, Any] = {"timeout": self.timeout, "memory": self.memory}
        if name == "mbpp":
            return mbpp.score(text, record.reference or "", **limits)
        return humaneval.score(text, record.reference or "", record.prompt_text, **limits)


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
        If programs are to be run and cannot be on this system, a package is missing, or a pattern or function cannot
        be used.
    """
    from . import humaneval, ifeval, math500

    names = [scorer_name(record, chosen or {}, allow_code) for record in records]
    checks = {"math500": math500.check_supported, "ifeval": ifeval.check_supported}
    checks |= dict.fromkeys(PROGRAMS, humaneval.check_supported)
    for name in dict.fromkeys(names):
        checks.get(name or "", lambda: None)()
    scores = {name: _score(name) for name in dict.fromkeys(names) if name is not None and name not in PROGRAMS}
    return TaskScorer(records, names, scores, decode, timeout, memory)


def _score(name: str) -> Score:
    from . import custom, exact, gsm8k, ifeval, math500, mmlu

    if name.startswith(PATTERN):
        return custom.by_pattern(name.removeprefix(PATTERN))
    if ":" in name:
        return custom.by_function(name)
    known: dict[str, Score] = {
        "gsm8k": gsm8k.score, "gsm8k-strict": gsm8k.strict, "gsm8k-flexible": gsm8k.flexible, "math500": math500.score,
        "mmlu": mmlu.score, "mmlu-letter": mmlu.first_line, "ifeval": ifeval.score, "exact": exact.score,
        "contains": custom.contains,
    }  # fmt: skip
    return known[name]


def readings(name: str | None, request_id: str, text: str, reference: str) -> dict[str, list[bool]]:
    """Return the other ways in which published tables score an answer, by name.

    Parameters
    ----------
    name : str or None
        Scorer of the request.
    request_id, text, reference : str

    Returns
    -------
    dict of str to list of bool
        One verdict for each thing that is counted: the answer, or each instruction of IFEval. The share that a table
        reports is the mean over all verdicts of all requests. ``"subject NAME"`` of MMLU are what its macro average is
        the mean of.
    """
    from . import gsm8k, ifeval, mmlu

    if name == "gsm8k":
        return {
            "strict-match (lm-eval)": [gsm8k.strict(text, reference)],
            "flexible-extract (lm-eval)": [gsm8k.flexible(text, reference)],
        }
    if name == "ifeval":
        exact, loose = (ifeval.followed(text, reference, loose=loose) for loose in (False, True))
        return {
            "prompt, strict": [all(exact)], "prompt, loose": [all(loose)],
            "instruction, strict": exact, "instruction, loose": loose,
        }  # fmt: skip
    if name in ("mmlu", "mmlu-letter") and "/" in request_id:
        right = mmlu.score if name == "mmlu" else mmlu.first_line
        return {f"subject {request_id.split('/')[1]}": [right(text, reference)]}
    return {}
