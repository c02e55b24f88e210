"""What happens at a prefix that was not captured: every mode, and what it makes of the figures, once.

Kept apart from the walk so that help texts and figures can name the modes without numba.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import unknown_name
from .request import ALIGNED, RECORDED, STOP


@dataclass(frozen=True)
class OffTrace:
    """One way to treat a prefix that was not captured.

    Attributes
    ----------
    name : str
    code : int or None
        The kernels' code; None where one walk is not enough, and many random ones are averaged.
    how : str
        Where a walk goes on; empty where it does not.
    note : str
        What a row that is not exact stands for, in tables.
    figure_note : str
        The same in the legend of a figure.
    """

    name: str
    code: int | None
    how: str
    note: str
    figure_note: str

    @property
    def estimate(self) -> bool:
        """Whether walks go on, so that every request counts."""
        return bool(self.how)

    @property
    def has_walks(self) -> bool:
        """Whether there is one walk for each request and setting: paired figures and intervals need it."""
        return self.code is not None


_ESTIMATES = "estimates; asdsim fidelity measures on a covered trace how far off they are"

OFF_TRACE = {
    mode.name: mode
    for mode in (
        OffTrace(
            "stop", STOP, "",
            "means over the requests that never left the trace, no fair sample; asdsim cover makes them exact, "
            "--off-trace pooled estimates them",
            "not exact; only the requests that stayed on captured steps",
        ),
        OffTrace(
            "aligned", ALIGNED, "the captured step nearest to the position reached", _ESTIMATES,
            "estimate; requests that left the captured steps go on at the nearest one",
        ),
        OffTrace(
            "recorded", RECORDED, "the next captured step", _ESTIMATES,
            "estimate; requests that left the captured steps go on with the next one",
        ),
        OffTrace(
            "pooled", None,
            "captured steps drawn from those whose predecessor ended in the same way, averaged over many draws",
            _ESTIMATES, "estimate; requests that left the captured steps go on at ones drawn at random",
        ),
    )
}  # fmt: skip
"""Every mode, by name."""

WALKED = [name for name, mode in OFF_TRACE.items() if mode.has_walks]
"""Modes of a single walk."""


def off_trace_mode(name: str, known: list[str] | None = None) -> OffTrace:
    """Return a mode by name.

    Raises
    ------
    UsageError
        If it is not among ``known``, all modes by default.
    """
    names = list(OFF_TRACE) if known is None else known
    if name not in names:
        raise unknown_name("off-trace mode", str(name), names)
    return OFF_TRACE[name]


def off_trace_code(name: str) -> int:
    """Return the kernels' code of a mode of a single walk."""
    code = off_trace_mode(name, WALKED).code
    assert code is not None
    return code
