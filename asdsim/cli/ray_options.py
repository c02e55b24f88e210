"""``--ray`` and what belongs to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .command import THREADS
from .common import note

if TYPE_CHECKING:
    from ..cluster.pool import Where
    from ..cluster.walk import Scoring, Walking


def ray_options(models: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--ray``, ``--replicas`` and, for commands that run ``models``, ``--gpus-per-replica``.

    The command gets them as ``cluster``, a :class:`asdsim.cluster.pool.Where`, or None without ``--ray``.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            address, replicas = given.pop("ray"), given.pop("replicas")
            gpus = given.pop("gpus_per_replica", 0)
            if address is None:
                for flag, value in (("replicas", replicas), ("gpus-per-replica", gpus)):
                    if value:
                        raise UsageError(f"--{flag} has no effect without --ray", fix="add --ray auto")
                return function(cluster=None, **given)
            from ..cluster.pool import Where

            asked = os.environ.get(THREADS) or os.environ.get("OMP_NUM_THREADS") or "1"
            threads = int(asked) if asked.isdecimal() and int(asked) else 1
            return function(cluster=Where(address, replicas, gpus, threads), **given)

        options = [
            click.option("--ray", metavar="ADDRESS|auto|local", help="Spread the work over a Ray cluster: that of this "
                         "machine (auto), one at an address, or one started here for this command (local). The same "
                         "command goes on where it was cut short."),
            click.option("--replicas", type=click.IntRange(1), metavar="N",
                         help="With --ray: processes at work.  [as many as the cluster's GPUs, or else cores, allow]"),
        ]  # fmt: skip
        if models:
            options.append(
                click.option("--gpus-per-replica", type=click.IntRange(0), metavar="TP",
                             help="With --ray: GPUs of each replica, on one node.  [1 where there are any]")
            )  # fmt: skip
        with_options: Callable[..., Any] = command
        for option in reversed(options):
            with_options = option(with_options)
        return with_options

    return add


def walk_on(cluster: Where, trace: Path, threads: int, *, timed: bool, scoring: Scoring | None = None) -> Walking:
    """Return a trace that a cluster walks until the command ends; see :class:`asdsim.cluster.walk.Walking`."""
    from ..cluster.walk import Walking

    where = replace(cluster, threads=threads or 1)
    return click.get_current_context().with_resource(
        Walking(trace, where, lambda text: note(f"asdsim: {text}"), timed, scoring)
    )  # fmt: skip
