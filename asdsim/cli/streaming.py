"""Options of commands that read a large trace group by group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ..provenance import own_cores
from .command import progress_bar

if TYPE_CHECKING:
    from ..trace.groups import StreamedTrace
    from ..trace.stored import Trace

NO_CACHE = "ASDSIM_NO_GRAPH_CACHE"
"""Environment variable that does what ``--no-cache`` does, unless it is empty."""


@dataclass(frozen=True)
class Streaming:
    """What the options say.

    Attributes
    ----------
    memory : float
        Bytes that the command should take on a trace that it reads group by group.
    keep : bool
        Whether graphs are kept beside the trace.
    """

    memory: float
    keep: bool = False

    def open(self, path: Path, *, verify: bool = True) -> Trace | StreamedTrace:
        """Open a trace; positions of one that is read group by group are counted on a bar."""
        from ..result import open_trace
        from ..trace.groups import StreamedTrace

        trace = open_trace(path, memory=self.memory, keep=self.keep, verify=verify)
        if isinstance(trace, StreamedTrace):
            threads = click.get_current_context().params.get("threads")
            trace.processes = threads or len(own_cores())
            total = sum(shard.rows for shard in trace.manifest.shards_of("positions"))
            bar = click.get_current_context().with_resource(progress_bar(total, "read", "position"))

            def count(rows: int) -> None:
                if bar.n + rows > (bar.total or 0):  # read once more
                    bar.total = (bar.total or 0) + total
                bar.update(rows)

            trace.progress = count
        return trace


def memory_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--memory``; the command gets ``streaming``, which keeps no graph."""

    @wraps(function)
    def command(memory: float, **given: Any) -> Any:
        if not 0 < memory < float("inf"):
            raise UsageError(f"--memory {memory:g} is no amount of memory", fix="give gigabytes, such as 2")
        return function(streaming=Streaming(memory * 1e9), **given)

    return click.option(
        "--memory", default=2.0, show_default=True, metavar="GB",
        help="Memory to aim at on a trace that is read group by group: one of more than 524,288 positions.",
    )(command)  # fmt: skip


def stream_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--memory`` and ``--no-cache``; the command gets them as ``streaming``."""

    @wraps(function)
    def command(streaming: Streaming, no_cache: bool, **given: Any) -> Any:
        keep = not (no_cache or os.environ.get(NO_CACHE))
        return function(streaming=replace(streaming, keep=keep), **given)

    return click.option("--no-cache", is_flag=True, help="Keep no graph of a large trace beside it for the next time.")(
        memory_option(command)
    )
