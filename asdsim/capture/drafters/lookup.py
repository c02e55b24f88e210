"""Prompt look-up: what followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engines.protocol import Drafter, DrafterSession, Proposal
from ...errors import UsageError

DEFAULT_NGRAM = 3


def parse_ngram(text: str) -> int:
    """Read ``"3"``; an empty text means 3."""
    try:
        ngram = int(text) if text else DEFAULT_NGRAM
    except ValueError:
        ngram = 0
    if ngram < 1:
        raise UsageError(f"lookup: {text!r} is not an n-gram length", fix="write lookup:3")
    return ngram


class Lookup(Drafter, DrafterSession):
    """Proposes the continuation of the most recent earlier occurrence of the last n tokens, longest n first.

    Parameters
    ----------
    ngram : int
        Longest n tried.
    """

    def __init__(self, ngram: int = DEFAULT_NGRAM) -> None:
        self.ngram = ngram
        self.name = f"lookup:{ngram}"

    def session(self, prompt_ids: Sequence[int]) -> Lookup:
        """Return the drafter itself: it remembers nothing."""
        return self

    def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        """Return up to ``num_draft_tokens`` tokens; none where no n-gram recurs."""
        ids = list(prefix_ids)
        for n in range(min(self.ngram, len(ids) - 1), 0, -1):
            tail, last = ids[-n:], ids[-1]
            for end in range(len(ids) - 1, n - 1, -1):  # the match is ids[end - n : end]
                if ids[end - 1] == last and ids[end - n : end] == tail:
                    return Proposal(ids[end : end + num_draft_tokens])
        return Proposal([])

    def fork(self) -> Lookup:
        """Return the drafter itself."""
        return self

    def describe(self) -> dict[str, Any]:
        """Return the kind and n."""
        return {"name": self.name, "kind": "lookup", "ngram": self.ngram}
