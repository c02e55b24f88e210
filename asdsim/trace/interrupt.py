"""Ctrl-C, held back until it is safe."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done: a writer that was cut short in the middle cannot continue."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in a background job
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
