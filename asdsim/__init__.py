"""Replay speculative decoding under other acceptance rules, from one capture.

>>> import asdsim
>>> result = asdsim.replay("traces/smollm2-layerskip", B="0,4,8", g=".1,.25,.5", M="1,2")
>>> result.frame()  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["AsdsimError", "Grid", "Policy", "Result", "Trace", "__version__", "load", "replay", "replay_breakpoints"]

_HOMES = {
    "AsdsimError": "errors",
    "Grid": "rules.settings",
    "Policy": "rules.settings",
    "Result": "result",
    "Trace": "trace.reader",
    "load": "result",
    "replay": "result",
    "replay_breakpoints": "result",
}

if TYPE_CHECKING:
    __version__: str
    from .errors import AsdsimError
    from .result import Result, load, replay, replay_breakpoints
    from .rules.settings import Grid, Policy
    from .trace.reader import Trace


def __getattr__(name: str) -> Any:
    # Imported on first use: `asdsim --help` must not pay for numba, pyarrow and polars.
    if name == "__version__":
        from .provenance import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module 'asdsim' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"asdsim.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
