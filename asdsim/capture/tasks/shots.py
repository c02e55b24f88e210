r"""Few-shot prompts: worked examples before each question, in the formats that lm-eval's tables use.

Where a chat template applies, every example is a turn of the user and one of the assistant, and what stands before all
of them a system message; without one the prompt is a single text. lm-eval does the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import UsageError
from ...files import Fields, shown
from . import NAMES, Message, Prompt

LETTERS = "ABCD"


@dataclass(frozen=True)
class Shots:
    """How many examples, and from where.

    Attributes
    ----------
    count : int
    path : Path or None
        A file with the fields of the data set; the hub's split of examples without one.
    seed : int
        Decides which examples are drawn, where a format draws them.
    """

    count: int
    path: Path | None = None
    seed: int = 0

    def title(self, name: str) -> str:
        """Return what a manifest says of the prompts of a task."""
        form = FORMATS[name]
        source = self.path.name if self.path is not None else " ".join((form.pool[0], form.pool[2]))
        return f"{form.title}, {self.count} examples from {source}, {form.chosen.format(seed=self.seed)}"


def parse_shots(text: str | None, seed: int = 0) -> Shots | None:
    """Read ``N`` or ``N:PATH``.

    Raises
    ------
    UsageError
        On anything else, or a file that does not exist.
    """
    if text is None:
        return None
    number, colon, path = text.partition(":")
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 64) or (colon and not path):
        raise UsageError(f"--shots {shown(text)!r} is not a number of examples", fix="write --shots 5, or 5:PATH")
    file = Path(path).expanduser() if path else None
    if file is not None and not file.is_file():
        raise UsageError(f"--shots: there is no file {shown(path)!r}", fix="write --shots N:PATH with an existing file")
    return Shots(int(number), file, seed)


def check_shots(shots: Shots | None, names: Iterable[str]) -> None:
    """Refuse examples for tasks that have none.

    Raises
    ------
    UsageError
        Naming the task.
    """
    names = list(dict.fromkeys(names))
    if shots is None:
        return
    for name in names:
        if name in NAMES and name not in FORMATS:  # unknown names are refused elsewhere
            raise UsageError(f"task {name} has no few-shot format", fix=f"leave --shots out; {', '.join(FORMATS)} have")
    if shots.path is not None and len(names) > 1:
        raise UsageError("--shots N:PATH names the examples of one task, not of several", fix="capture one task")


@dataclass(frozen=True)
class Format:
    """A few-shot format.

    Attributes
    ----------
    title : str
        Whose it is.
    pool : (str, str, str)
        Where the examples are: data set on the hub, configuration, split.
    chosen : str
        How they are chosen, as the manifest says it.
    ask, answer : callable
        From a row to the question as it is put, and to the answer of an example.
    between : str
        Between question and answer in a single text.
    about : callable
        What stands before all examples; only rows with the same text are examples of each other.
    order : callable
        Key by which examples are sorted, from seed and question; rows keep their order without one.
    usable : callable
        Whether a row may be an example.
    """

    title: str
    pool: tuple[str, str, str]
    chosen: str
    ask: Callable[[Fields], str]
    answer: Callable[[Fields], str]
    between: str = " "
    about: Callable[[Fields], str] = lambda row: ""
    order: Callable[[int, str], bytes] | None = None
    usable: Callable[[Fields], bool] = lambda row: True


def _drawn(seed: int, question: str) -> bytes:
    return hashlib.sha256(f"{seed}/{question}".encode()).digest()


def _ask_mbpp(row: Fields) -> str:
    tests = "\n".join(row.list_of("text", "test_list")[:3])
    return (
        f"You are an expert Python programmer, and here is your task:\n{row.text('text')}\n"
        f"Your code should pass these tests:\n{tests}"
    )


def _ask_mmlu(row: Fields) -> str:
    choices = row.list_of("text", "choices")
    lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    return f"{row.text('question').strip()}\n{lines}\nAnswer:"


def _letter(row: Fields) -> str:
    answer = row.get("answer")
    return LETTERS[answer] if isinstance(answer, int) and 0 <= answer < len(LETTERS) else row.text("answer")


FORMATS: dict[str, Format] = {
    "gsm8k": Format(
        "gsm8k of lm-eval", ("openai/gsm8k", "main", "train"), "drawn by seed {seed}, the same for all prompts",
        lambda row: f"Question: {row.text('prompt' if 'expected' in row.values else 'question')}\nAnswer:",
        lambda row: row.text("answer"), order=_drawn,
    ),
    "mbpp": Format(
        "mbpp_instruct of lm-eval, the code block opened by the model",
        ("google-research-datasets/mbpp", "full", "prompt"), "in order from task 2 on",
        _ask_mbpp, lambda row: f"```python\n{row.text('code')}\n```", between="\n",
        usable=lambda row: row.whole("task_id") >= 2,
    ),
    "mmlu": Format(
        "mmlu_generative of lm-eval", ("cais/mmlu", "all", "dev"), "the first of the same subject",
        _ask_mmlu, _letter,
        about=lambda row: "The following are multiple choice questions (with answers) about "
                          f"{row.text('subject').replace('_', ' ')}.",
    ),
}  # fmt: skip
"""By task."""


def with_examples(
    name: str, prompts: Iterable[Prompt], rows: Iterable[Fields], pool: Iterable[Fields], shots: Shots
) -> list[Prompt]:
    """Return prompts with worked examples before each question.

    Parameters
    ----------
    name : str
        Task, in :data:`FORMATS`.
    prompts, rows : iterable
        What is asked, and the rows that it was made of.
    pool : iterable of Fields
        Rows to take examples from; a question is never its own example.
    shots : Shots

    Raises
    ------
    UsageError
        If the pool holds too few examples for a question, or a row of it lacks a field.
    """
    form = FORMATS[name]
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in filter(form.usable, pool):
        groups.setdefault(form.about(row), []).append((form.ask(row), form.answer(row)))
    if form.order is not None:
        order = form.order
        for group in groups.values():
            group.sort(key=lambda pair: order(shots.seed, pair[0]))
    made = []
    for prompt, row in zip(prompts, rows, strict=True):
        about, question = form.about(row), form.ask(row)
        examples = [pair for pair in groups.get(about, []) if pair[0] != question][: shots.count]
        if len(examples) < shots.count:
            raise UsageError(
                f"{len(examples)} examples for {shown(prompt.id)}, not {shots.count}",
                fix=f"give a smaller --shots, or a file with more of them: --shots {shots.count}:PATH",
            )
        messages = [Message("system", about)] if about else []
        for asked, answer in examples:
            messages += [Message("user", asked), Message("assistant", answer)]
        blocks = [*([about] if about else []), *(asked + form.between + answer for asked, answer in examples), question]
        text = "\n\n".join(blocks)
        made.append(replace(prompt, text=text, messages=(*messages, Message("user", question))))
    return made
