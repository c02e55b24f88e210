"""Open questions: a judge model compares two answers, in both orders, through any OpenAI-compatible endpoint.

The verdict is read as FastChat's MT-Bench does (Zheng et al. 2023): ``[[A]]``, ``[[B]]`` or ``[[C]]`` for a tie, and a
side wins only if it wins in both orders. The words of the question to the judge are asdsim's own, so win rates compare
with one another and not with published ones.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import EngineError, UsageError
from ..files import shown

VERDICT = re.compile(r"\[\[([ABC])\]\]")
SYSTEM = (
    "You compare two answers to the same request. Judge how helpful, correct, relevant and complete each is, and "
    "whether it does what was asked. Neither the order of the answers nor their length counts in itself. Explain your "
    "judgment in a few sentences, then end with one line: [[A]] if answer A is better, [[B]] if answer B is better, "
    "[[C]] for a tie."
)
MAX_TOKENS = 512
"""That the judge may write per comparison."""
CHARACTERS_PER_TOKEN = 4
"""Roughly, in English: for estimates of cost."""
RETRIES = 3

Messages = list[dict[str, str]]


def question(prompt: str, first: str, second: str) -> Messages:
    """Return what the judge is asked about two answers."""
    text = (
        f"# Request\n\n{prompt}\n\n# Answer A\n\n{first}\n\n# Answer B\n\n{second}\n\n# End\n\nWhich answer is better?"
    )
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def verdict_of(text: str) -> str | None:
    """Return the last verdict of a judge's answer, A, B or C; None where it gives none."""
    found = VERDICT.findall(text)
    return found[-1] if found else None


@dataclass(frozen=True)
class Endpoint:
    """A judge.

    Attributes
    ----------
    url : str
        Up to ``/v1``.
    model : str
    key : str
        Sent as a bearer token, where there is one.
    timeout : float
        Seconds for one answer.
    """

    url: str
    model: str
    key: str = ""
    timeout: float = 120.0

    def body(self, messages: Messages) -> dict[str, Any]:
        """Return the request for one comparison: greedy, as far as the server is."""
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}

    def ask(self, messages: Messages) -> str:
        """Return the judge's answer. A server that is busy or fails is asked again, :data:`RETRIES` times in all.

        Raises
        ------
        EngineError
            If it cannot be reached, refuses, or answers something else.
        """
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(self.body(messages)).encode(),
            {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})},
        )  # fmt: skip
        for attempt in range(1, RETRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return str(json.load(reply)["choices"][0]["message"]["content"])
            except urllib.error.HTTPError as error:
                if attempt == RETRIES or (error.code != 429 and error.code < 500):
                    raise EngineError(
                        f"the judge answers {error.code} {error.reason}", where=shown(self.url),
                        fix="check --endpoint, --model and the key; what was judged is kept",
                    ) from None  # fmt: skip
            except (OSError, TimeoutError) as error:
                if attempt == RETRIES:
                    raise EngineError(
                        f"cannot reach the judge: {error}", where=shown(self.url),
                        fix="run again; what was judged is kept",
                    ) from None  # fmt: skip
            except (ValueError, LookupError, TypeError):
                raise EngineError("this is no answer of a chat endpoint", where=shown(self.url)) from None
            time.sleep(0.5 * 2**attempt)
        raise AssertionError


class Answers:
    """What a judge has said, kept in a file: a comparison is paid for once.

    Parameters
    ----------
    path : Path
        An SQLite file; made where there is none.

    Raises
    ------
    UsageError
        If the file is something else or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._base = sqlite3.connect(path, isolation_level=None)
            self._base.execute("create table if not exists answers (key text primary key, answer text not null)")
        except sqlite3.Error as error:
            raise UsageError(
                f"cannot keep answers there: {error}", where=shown(path), fix="name another --cache"
            ) from None

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._base.close()

    @staticmethod
    def _key(endpoint: Endpoint, messages: Messages) -> str:
        return hashlib.sha256(json.dumps(endpoint.body(messages), sort_keys=True).encode()).hexdigest()

    def known(self, endpoint: Endpoint, messages: Messages) -> str | None:
        """Return an answer that was given before; the address of the endpoint does not count, its model does."""
        row = self._base.execute(
            "select answer from answers where key = ?", (self._key(endpoint, messages),)
        ).fetchone()
        return None if row is None else str(row[0])

    def ask(self, endpoint: Endpoint, messages: Messages) -> str:
        """Return the judge's answer, asking where it is not known."""
        answer = self.known(endpoint, messages)
        if answer is None:
            answer = endpoint.ask(messages)
            self._base.execute("insert or replace into answers values (?, ?)", (self._key(endpoint, messages), answer))
        return answer
