"""A prompt, and a sequence of prompts that keeps few of them in memory."""

from __future__ import annotations

import contextlib
import pickle
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ...errors import CaptureError
from ...files import reason_of

IN_MEMORY = 64 << 20
"""Bytes up to which prompts are kept in memory; beyond that, they move to a temporary file."""


@dataclass(frozen=True)
class Message:
    """What one side of a conversation says: ``role`` is user, assistant, system or another that the template knows."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes
    ----------
    id : str
        Unique in a trace, for example ``"gsm8k/13"``.
    task : str
    text : str
        What the user says, before any chat template; with several messages, the contents of all. Without a template,
        this is the prompt.
    reference : str or None
        What an answer is compared with.
    messages : tuple of Message
        All messages, unless the user's is the only one.
    later : tuple of str
        Later turns of the user, asked only where a capture asks all turns.
    """

    id: str
    task: str
    text: str
    reference: str | None = None
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()

    @property
    def asked(self) -> tuple[Message, ...]:
        """All messages, or the text as the user's only message."""
        return self.messages or (Message("user", self.text),)


class Prompts(Sequence[Prompt]):
    """Prompts in a fixed order. Each is read when it is needed, so a million take little memory.

    The source may be a compressed file or a pipe, so prompts are copied once: into memory or, beyond
    :data:`IN_MEMORY` bytes, into an unnamed temporary file that ends with the process.
    """

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115  # closed when nothing refers to it
        self._ends, self._sizes = array("q", [0]), array("q")
        self._order: npt.NDArray[np.int64] | None = None

    def add(self, prompt: Prompt) -> None:
        """Append a prompt; not allowed after :meth:`take`.

        Raises
        ------
        CaptureError
            If there is no room for the temporary file. :meth:`take` raises it too.
        """
        data = pickle.dumps(prompt, pickle.HIGHEST_PROTOCOL)
        with self._room():
            self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))
        self._sizes.append(len(prompt.text.encode(errors="surrogatepass")))

    def take(self, order: npt.NDArray[np.int64]) -> Prompts:
        """Return these prompts in this order."""
        with self._room():
            self._file.flush()
        taken = Prompts.__new__(Prompts)
        taken._file, taken._ends, taken._sizes = self._file, self._ends, self._sizes
        taken._order = order if self._order is None else self._order[order]
        return taken

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CaptureError(
                f"no room for a copy of the prompts: {reason_of(error)}", where=f"prompt {len(self._ends)}",
                fix="set TMPDIR to a folder with more room, or give --limit",
            ) from None  # fmt: skip

    def longest(self, number: int) -> Prompts:
        """Return at most ``number`` prompts, those with most bytes of text; references and later turns do not count."""
        sizes = np.array(self._sizes)
        sizes = sizes if self._order is None else sizes[self._order]
        return self.take(np.argsort(-sizes, kind="stable")[:number])

    def __len__(self) -> int:
        return len(self._ends) - 1 if self._order is None else len(self._order)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Prompts: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Read one, or take some."""
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        row = range(len(self))[index]
        row = row if self._order is None else int(self._order[row])
        self._file.seek(self._ends[row])
        return pickle.loads(self._file.read(self._ends[row + 1] - self._ends[row]))
