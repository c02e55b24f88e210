"""One family of errors: what is wrong, where it is, and what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class AsdsimError(Exception):
    """Base of every error that a user can cause.

    Parameters
    ----------
    what : str
        What is wrong, in one clause.
    where : str, optional
        File, request, step, position: as much as is known.
    fix : str, optional
        What the user can do.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text} ({fix})" if fix else text)


class UsageError(AsdsimError):
    """A flag, name or setting that cannot be meant."""


class TraceError(AsdsimError):
    """A trace directory that cannot be trusted: missing, damaged, inconsistent or of another schema."""


class CaptureError(AsdsimError):
    """A model, drafter, task or decoding step that cannot be recorded."""


class Problems:
    """Collects what several checks refuse, so that it can be said at once."""

    def __init__(self) -> None:
        self.errors: list[AsdsimError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the error that is raised within."""
        try:
            yield
        except AsdsimError as error:
            self.errors.append(error)

    def check(self, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Return what a function returns, None where it raises an error, which is noted."""
        with self.noted():
            return function(*values, **options)
        return None

    def end(self) -> None:
        """Raise what was noted, several errors as one."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise UsageError("; ".join(dict.fromkeys(map(str, self.errors))))


class EngineError(AsdsimError):
    """An inference engine that cannot do what was asked of it, or that does something else."""


def unknown_name(kind: str, name: str, known: list[str]) -> UsageError:
    """Return an error for an unknown name, with the closest known one as a suggestion."""
    import difflib

    folded = [one.lower() for one in known]  # MARS is mars
    close = difflib.get_close_matches(name.lower(), folded, n=1)
    hint = f"did you mean {known[folded.index(close[0])]!r}? " if close else ""
    return UsageError(f"unknown {kind} {name!r}", fix=f"{hint}known: {', '.join(known)}")
