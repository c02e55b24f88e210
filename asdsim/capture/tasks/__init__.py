"""Prompts by task name: ``NAME``, ``NAME:SPLIT`` or ``NAME:PATH`` of a known set, or ``jsonl:PATH``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UsageError, unknown_name
from ...files import shown
from .prompt import Message, Prompt, Prompts

if TYPE_CHECKING:
    from .shots import Shots

__all__ = ["NAMES", "Message", "Prompt", "Prompts", "check_tasks", "load_prompts", "prompt_formats", "split_tasks"]

NAMES = ("gsm8k", "math500", "svamp", "humaneval", "mbpp", "mmlu", "ifeval", "mt-bench", "alpaca", "jsonl")


def split_tasks(spec: str) -> list[str]:
    """Split a comma list of tasks; a comma that belongs to the path of an existing file does not split."""
    tasks: list[str] = []
    for item in spec.split(","):
        before = tasks[-1] if tasks else ""
        known = item.strip().partition(":")[0] in NAMES
        name, colon, path = before.partition(":")
        if colon and name in NAMES and not known and not Path(path).expanduser().is_file():
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
        else:
            from .sets import check_argument

            check_argument(name, argument)
    if len(set(tasks)) < len(tasks):
        raise UsageError(f"task list {spec!r} names a task twice")
    return tasks


def load_prompts(
    spec: str,
    *,
    limit: int | None = None,
    offset: int = 0,
    offline: bool = False,
    shuffle: int | None = None,
    shots: Shots | None = None,
    progress: Callable[[int], None] = lambda number: None,
) -> Prompts:
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
    shuffle : int, optional
        Seed of an order by the hash of seed and id, the same on every machine; applied before ``offset`` and
        ``limit``. Without it, nothing past ``offset`` and ``limit`` is read.
    shots : Shots, optional
        Worked examples before each question.
    progress : callable
        Called with the number of prompts read so far.

    Raises
    ------
    UsageError, CaptureError
        On a bad name, range or file; if a prompt set cannot be had; if two prompts share an id.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit {limit} leaves no prompt", fix="give a limit >= 1")
    if offset < 0:
        raise UsageError(f"offset {offset} is negative")
    tasks = check_tasks(spec)
    if shots is not None:
        from .shots import check_shots

        check_shots(shots, (task.partition(":")[0] for task in tasks))
    prompts, chosen = Prompts(), [np.empty(0, np.int64)]
    end = None if limit is None else offset + limit
    seen: set[str] = set()
    for task in tasks:
        name, _, argument = task.partition(":")
        first, ids = len(prompts), []
        for prompt in islice(_load(name, argument, offline, shots), end if shuffle is None else None):
            prompts.add(prompt)
            ids.append(prompt.id)
            progress(len(prompts))
        rows = range(len(ids))
        if shuffle is not None:
            keys = [hashlib.sha256(f"{shuffle}/{name}".encode()).digest() for name in ids]
            rows = sorted(rows, key=keys.__getitem__)  # type: ignore[assignment]
        rows = rows[offset:end]
        if not rows:
            raise UsageError(f"task {task} has {len(ids)} prompts, none after offset {offset}")
        for row in rows:
            if ids[row] in seen:
                raise UsageError(
                    f"two prompts are called {shown(ids[row])!r}", where=f"prompt {row + 1} of {shown(task)}",
                    fix="give each row its own id",
                )  # fmt: skip
            seen.add(ids[row])
        chosen.append(first + np.array(rows, np.int64))
    return prompts.take(np.concatenate(chosen))


def _load(name: str, argument: str, offline: bool, shots: Shots | None) -> Iterable[Prompt]:
    from . import jsonl, sets

    return jsonl.load(argument, offline) if name == "jsonl" else sets.load(name, argument, offline, shots)


def prompt_formats(spec: str, shots: Shots | None = None) -> dict[str, str]:
    """Return whose prompt format each task of a comma list has."""
    from .sets import SETS

    names = (task.partition(":")[0] for task in check_tasks(spec))
    if shots is not None:
        return {name: shots.title(name) for name in names}
    return {name: SETS[name].format if name in SETS else "as the file says" for name in names}


def without_folder(task: str) -> str:
    """Return a task without the directory of its file, which is nobody else's business."""
    from .sets import SETS

    name, colon, argument = task.partition(":")
    named = name in SETS and argument in SETS[name].hub
    return f"{name}{colon}{argument if named else Path(argument).name}"
