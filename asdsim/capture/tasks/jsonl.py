"""A file of one's own: JSON lines ``{"prompt": ...}`` or ``{"turns": [...]}``, optionally with "reference" and "id"."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import UsageError
from . import Prompt


def check_file(path: str) -> Path:
    """Return the path of an existing file."""
    if not path:
        raise UsageError("task 'jsonl' names no file", fix="write jsonl:PATH")
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"there is no file {path!r}", fix="write jsonl:PATH with an existing file")
    return file


def load(argument: str, offline: bool) -> list[Prompt]:
    """Return the prompts; ids are ``FILENAME/LINE`` counted from 0 where a line gives none."""
    file = check_file(argument)
    prompts = []
    try:
        lines = file.read_text("utf-8-sig").split("\n")  # JSON strings may hold what splitlines takes for a line end
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the file: {error}", where=str(file)) from error
    stem = file.name.split(".")[0]
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        where = f"{file}:{number + 1}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"not a JSON object: {error.msg}", where=where) from None
        except RecursionError:
            raise UsageError("not a JSON object: nested too deeply", where=where) from None
        if not isinstance(row, dict):
            raise UsageError("not a JSON object", where=where, fix='write {"prompt": "..."}')
        turns = row.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        text = row.get("prompt", first)
        if not isinstance(text, str) or not text or not _is_text(text):
            raise UsageError("no prompt in this line", where=where, fix='write {"prompt": "..."} or {"turns": ["..."]}')
        reference = row.get("reference")
        if reference is not None and not isinstance(reference, str):
            reference = json.dumps(reference)
        prompts.append(Prompt(str(row.get("id", f"{stem}/{number}")), stem, text, reference))
    if not prompts:
        raise UsageError("the file holds no prompt", where=str(file))
    return prompts


def _is_text(text: str) -> bool:
    """Refuse lone surrogates, which JSON can write and no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
