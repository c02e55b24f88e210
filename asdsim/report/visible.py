"""Text from outside, made safe to print: nothing in it can move a cursor, hide a character or turn a line around."""

from __future__ import annotations

import unicodedata

from ..files import shown


def escaped(text: str, *, keep: str = "") -> str:
    """Return a text in which every character that is not seen shows as an escape, all but those to ``keep``."""
    return "".join(sign if sign in keep else shown(sign) for sign in text)


def shown_token(text: str, blank: str = "·") -> str:
    """Return a token for a strip: blanks at its ends seen too."""
    text = escaped(text)
    core = text.strip(" ")
    if not core:
        return blank * len(text)
    return blank * (len(text) - len(text.lstrip(" "))) + core + blank * (len(text) - len(text.rstrip(" ")))


def width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) != 0 for sign in text)


def padded(text: str, columns: int) -> str:
    """Return a text with blanks up to some columns."""
    return text + " " * max(0, columns - width(text))


def wrapped(text: str, columns: int) -> list[str]:
    """Return the lines of a text, each at most so many columns wide, broken at blanks where there are any."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line, used = "", 0
        for word in _words(paragraph):
            wide = width(word)
            if used and used + wide > columns:
                lines.append(line.rstrip(" "))
                line, used = "", 0
                word = word.lstrip(" ")
                wide = width(word)
            while wide > columns:  # a word longer than a line
                head = _head(word, columns)
                lines.append(head)
                word = word[len(head) :]
                wide = width(word)
            line, used = line + word, used + wide
        lines.append(line.rstrip(" "))
    return lines


def _head(word: str, columns: int) -> str:
    """Return the longest beginning of a word that fits, at least one character."""
    used = 0
    for n, sign in enumerate(word):
        used += width(sign)
        if used > columns and n:
            return word[:n]
    return word


def _words(text: str) -> list[str]:
    """Split before each blank that follows something else, so that joined words give the text again."""
    words: list[str] = []
    for sign in text:
        if words and not (sign == " " and words[-1].strip(" ")):
            words[-1] += sign
        else:
            words.append(sign)
    return words
