"""From prompts to token ids: the target's chat template, its arguments and its date, and one BOS at most."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cached_property
from typing import Any

from ..errors import CaptureError, UsageError, unknown_name
from ..files import shown
from .tasks import Message, Prompt

CLOCK = "strftime_now"
"""What Transformers calls the clock that templates may read."""
CALL = re.compile(rf"{CLOCK}\s*\(\s*(['\"])(.*?)\1\s*\)")
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", CLOCK})


def parse_template_args(texts: Iterable[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` of each text: a value is JSON where it can be read so (false, 3, "3"), and text elsewhere.

    Raises
    ------
    UsageError
        On anything else, or a name given twice.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier() or name in RESERVED or name in values:
            raise UsageError(
                f"--chat-template-arg {shown(text)!r} is not NAME=VALUE"
                if not equals or not name.isidentifier()
                else f"--chat-template-arg {name} " + ("is given twice" if name in values else "is not for you to set"),
                fix="write for example --chat-template-arg enable_thinking=false",
            )
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value
    return values


def parse_date(text: str | None) -> date | None:
    """Read ``YYYY-MM-DD``.

    Raises
    ------
    UsageError
        On anything else.
    """
    if text is None:
        return None
    try:
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--template-date {shown(text)!r} is no date", fix="write YYYY-MM-DD") from None


@dataclass
class Encoder:
    """Turns prompts into token ids as the target reads them.

    Attributes
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    template : bool
        Put prompts through the chat template, where the tokenizer has one.
    arguments : mapping
        More variables for the template.
    day : date, optional
        What a template with a clock takes for today.
    noticed : Counter
        How many prompts were taken in another way than asked, by what was seen.
    """

    tokenizer: Any
    template: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    day: date | None = None
    noticed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        source = self.source
        if self.arguments and source is None:
            raise UsageError("--chat-template-arg, but no chat template is applied", fix="leave it out")
        if self.day is not None and not self.has_clock:
            raise UsageError("--template-date, but the chat template has no date", fix="leave it out")
        for name in self.arguments:
            if source is not None and name not in self._variables(source):
                known = sorted(self._variables(source) - RESERVED)
                raise UsageError(f"the chat template: {unknown_name('variable', name, known or ['(none)'])}")

    @cached_property
    def source(self) -> str | None:
        """The template that applies, or None.

        Raises
        ------
        CaptureError
            If the tokenizer has several and no default among them.
        """
        held = getattr(self.tokenizer, "chat_template", None) if self.template else None
        if isinstance(held, dict) and isinstance(held.get("default"), str):
            held = held["default"]
        if held is not None and not isinstance(held, str):
            names = ", ".join(map(str, held)) if isinstance(held, dict) else f"a {type(held).__name__}"
            raise CaptureError(
                f"the chat template is no text: {shown(names)[:200]}",
                fix="keep one template in the tokenizer's directory, or add --no-chat-template",
            )
        return held or None

    @property
    def has_clock(self) -> bool:
        """Whether the template reads the date."""
        return CLOCK in (self.source or "")

    @cached_property
    def _dated(self) -> str | None:
        """The template with each reading of the clock replaced by what it gives: it cannot be handed another clock."""
        if not self.has_clock:
            return self.source
        now = datetime.combine(self.day or date.today(), datetime.min.time())
        dated = CALL.sub(lambda call: json.dumps(now.strftime(call[2])), self.source or "")
        if re.search(rf"{CLOCK}\s*\(", dated):
            raise CaptureError(
                "the chat template reads the clock in a format that it computes", fix="add --no-chat-template"
            )
        return dated

    def _variables(self, source: str) -> set[str]:
        try:
            import jinja2
            from jinja2 import meta

            environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
            return set(meta.find_undeclared_variables(environment.parse(source)))
        except Exception:  # Transformers' own tags; a template that does not parse is refused when it is applied
            return set(re.findall(r"[A-Za-z_]\w*", source))

    @cached_property
    def _marks(self) -> re.Pattern[str] | None:
        """What a rendered prompt begins with: BOS, a special token of the template, or its words before the user's."""
        bos = str(getattr(self.tokenizer, "bos_token", None) or "")
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if getattr(token, "special", False)}
        marks = {bos, *(token for token in special if token in (self.source or ""))}
        if self.source is not None:
            with contextlib.suppress(CaptureError):  # then the first prompt says so
                frame = self.render([Message("user", "\ufffc")], "").partition("\ufffc")[0]
                marks.add(frame.removeprefix(bos).strip())
        marks.discard("")
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None

    def render(self, messages: Iterable[Message], where: str) -> str:
        """Return messages as the template writes them.

        Raises
        ------
        CaptureError
            If the template does not parse, or refuses them.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [{"role": message.role, "content": message.content} for message in messages],
                    chat_template=self._dated, add_generation_prompt=True, tokenize=False, **self.arguments,
                )
            )  # fmt: skip
        except Exception as error:  # whatever the template raises, and Jinja's own kinds
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise CaptureError(
                f"the chat template fails: {shown(first)[:300]}", where=where,
                fix="mend chat_template in the tokenizer's directory, or add --no-chat-template",
            ) from error  # fmt: skip

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, with one BOS at most.

        A prompt that begins with a special token or with the template's own words is taken as it is: it went through
        a template before.
        """
        rendered = self._marks is not None and len(prompt.asked) == 1 and self._marks.match(prompt.text.lstrip())
        if rendered and self.source is not None:
            self.noticed["begin with a special token or hold a chat template, and are taken as they are"] += 1
        if self.source is not None and not rendered:
            whole = self.render(prompt.asked, f"request {shown(prompt.id)}")
            return self._one_bos(self.tokenizer(whole, add_special_tokens=False)["input_ids"])
        return self._one_bos(self.tokenizer(prompt.text)["input_ids"])

    def _one_bos(self, ids: Iterable[int]) -> list[int]:
        ids, bos = list(ids), getattr(self.tokenizer, "bos_token_id", None)
        if bos is not None and ids[:2] == [bos, bos]:
            self.noticed["begin with BOS, and get no other"] += 1
            while ids[:2] == [bos, bos]:
                del ids[0]
        return ids

    def settings(self) -> dict[str, Any]:
        """Return what a manifest says of it."""
        found: dict[str, Any] = {"chat_template": self.source is not None}
        if self.arguments:
            found["chat_template_args"] = dict(self.arguments)
        if self.has_clock:
            found["template_date"] = (self.day or date.today()).isoformat()
        return found


def encode(tokenizer: Any, text: str, chat_template: bool) -> list[int]:
    """Return the token ids of a user message, through the chat template where there is one and it is wanted."""
    return Encoder(tokenizer, chat_template).ids(Prompt("", "", text))
