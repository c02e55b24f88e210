"""Traces: steps of real decoding, stored once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .manifest import Manifest
    from .reader import Trace, read_trace
    from .writer import TraceWriter

_HOME = {
    "Manifest": "manifest",
    "Trace": "reader",
    "TraceWriter": "writer",
    "read_trace": "reader",
}


def __getattr__(name: str) -> Any:
    """Import on first use: pyarrow is slow to load."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)


__all__ = ["Manifest", "Trace", "TraceWriter", "read_trace"]
