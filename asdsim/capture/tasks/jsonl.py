"""A file of one's own: JSON lines, an array or pretty-printed objects, plain or gzip; docs/prompts.md lists the forms.

The first of these keys that a row has makes the prompt: ``prompt``, ``turns``, ``messages``, ``conversations``,
``question``, ``instruction``. ``id`` and ``reference`` are optional.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...files import Fields, dump_json, read_rows, shown
from .prompt import Message, Prompt

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "developer": "system"}
"""Names of roles in ShareGPT files and elsewhere."""
FORMS = 'write {"prompt": "..."}, {"turns": [..]}, {"messages": [..]} or another form of docs/prompts.md'


def check_file(path: str) -> Path:
    """Return the path of an existing file; a pipe is one."""
    if not path:
        raise UsageError("task 'jsonl' names no file", fix="write jsonl:PATH")
    file = Path(path).expanduser()
    if not file.exists() or file.is_dir():
        raise UsageError(f"there is no file {shown(path)!r}", fix="write jsonl:PATH with an existing file")
    return file


def load(argument: str, offline: bool) -> Iterator[Prompt]:
    """Yield the prompts; ids are ``FILENAME/LINE`` (in an array ``FILENAME/ITEM``), from 0, where a row gives none."""
    file = check_file(argument)
    # Bytes of the name that are no UTF-8 would be refused by the trace.
    stem = os.fsencode(file.name).decode("utf-8", "replace").split(".")[0] or "prompts"
    where = ""
    for where, row in read_rows(file):
        fields = Fields(row, where)
        messages, later = _asked(fields)
        if not any(message.content.strip() for message in messages):
            raise UsageError("the prompt is empty", where=where)
        reference = fields.get("reference", None)
        if isinstance(reference, str):
            reference = fields.text("reference")
        elif reference is not None:
            try:
                reference = dump_json(reference)
            except RecursionError:
                raise UsageError("reference is nested too deeply", where=where) from None
        name = fields.get("id", f"{stem}/{int(where.rpartition(' ')[2]) - 1}")
        if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
            fields.refuse("id", "text or a whole number")
        name = str(name) if isinstance(name, int) else Fields({"id": name}, where).text("id")
        text = "\n\n".join(message.content for message in messages)
        single = len(messages) == 1 and messages[0].role == "user"
        yield Prompt(name, stem, text, reference, () if single else tuple(messages), tuple(later))
    if not where:
        raise UsageError("the file holds no prompt", where=shown(file))


def _asked(row: Fields) -> tuple[list[Message], list[str]]:
    """Return what is asked of a row, and the later turns of its user."""
    values = row.values
    key = next((key for key in ("prompt", "turns", "messages", "conversations", "question", "instruction")
                if values.get(key) is not None), None)  # fmt: skip
    if key is None:
        raise UsageError("no prompt in this row", where=row.where, fix=FORMS)
    value = values[key]
    if key == "instruction":
        more = row.text("input", "")
        return [Message("user", row.text("instruction") + (f"\n\n{more}" if more.strip() else ""))], []
    if isinstance(value, list) and value and key == "turns":
        first_turn, *later = row.list_of("text", "turns")
        return [Message("user", first_turn)], later
    if isinstance(value, list) and value and key in ("prompt", "messages", "conversations"):
        messages = [_message(Fields(item, f"{row.where}, {key}[{n}]")) for n, item in enumerate(value)]
        if messages[-1].role == "user":
            return messages, []  # as a server would get it
        first = next((n for n, message in enumerate(messages) if message.role == "user"), None)
        if first is None:
            raise UsageError(f"no user speaks in {key}", where=row.where)
        return messages[: first + 1], [message.content for message in messages[first + 1 :] if message.role == "user"]
    if not isinstance(value, str) or not value:
        row.refuse(key, "a prompt" if key in ("prompt", "question") else "a list with a prompt")
    return [Message("user", row.text(key))], []


def _message(item: Fields) -> Message:
    """Read {"role", "content"}, or ShareGPT's {"from", "value"}."""
    role = item.text("role", None) or item.text("from")
    key = "value" if item.get("content", None) is None and item.values.keys() & {"from", "value"} else "content"
    if key == "content" and item.get("content", None) is None and item.get("tool_calls", None) is not None:
        fix = "leave out the messages that call tools, or write their text as content"
        raise UsageError("content is null, and tool_calls are not supported", where=item.where, fix=fix)
    content: Any = item.get(key)
    if isinstance(content, list):  # [{"type": "text", "text": ".."}]
        parts = [Fields(part, f"{item.where}, {key}[{n}]") for n, part in enumerate(content)]
        content = "".join(part.text("text") for part in parts)
    else:
        content = item.text(key)
    return Message(ROLES.get(role.lower(), role.lower()), content)
