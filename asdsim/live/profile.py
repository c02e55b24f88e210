"""Passes measured on the machine at hand, by batch and width: a table for ``--cost``.

The very batches of :mod:`.batched` are run, for a few iterations at each batch and width, rounds over the whole table
one after the other, so that a neighbour who comes and goes weighs on all cells alike. The median of each cell is kept,
and its spread says whether the machine stood still.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import UsageError
from ..records import RequestRecord
from ..rules.settings import STRICT
from .batched import Batched

MAX_SPREAD = 0.15
"""Half the distance between the quartiles over the median beyond which a cell is not to be trusted."""


@dataclass
class Profile:
    """What was measured.

    Attributes
    ----------
    rows : list of dict
        As :mod:`asdsim.evaluate.step_table` reads them: passes, and prompts read by themselves.
    spread : float
        Largest relative spread of a cell.
    problems : list of str
        Why the figures are not to be trusted.
    """

    rows: list[dict[str, Any]]
    spread: float
    problems: list[str]


def profile(
    models: tuple[Any, Any],
    records: Sequence[RequestRecord],
    batches: Sequence[int],
    widths: Sequence[int],
    *,
    rounds: int = 3,
    iterations: int = 4,
    clock: Callable[[], float] = perf_counter,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """Measure drafting and passes.

    Parameters
    ----------
    models : (Target, Drafter)
    records : sequence of RequestRecord
        Requests to run, again and again where a batch needs more.
    batches, widths : sequence of int
        Requests of a pass, and tokens of each: 1 is the target alone, K + 1 a verification.
    rounds, iterations : int
        Rounds over the table, and iterations of each cell in one; the first iteration of a round is left out.
    clock : callable
        See :class:`asdsim.live.batched.Batched`.
    progress : callable, optional
        Called with 1 after each cell of each round.

    Raises
    ------
    UsageError
        If there is nothing to measure.
    """
    if not records or min((*batches, *widths, rounds), default=0) < 1 or iterations < 2:
        raise UsageError(
            "nothing to measure", fix="give batches and widths from 1 on, 1 round and 2 iterations at least"
        )
    taken: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    prompts: dict[int, list[float]] = {}
    busy = os.getloadavg()[0] - 1.0 > (os.cpu_count() or 1) if hasattr(os, "getloadavg") else False
    for _ in range(rounds):
        for batch in batches:
            for width in widths:
                engine = Batched(*models, STRICT, width - 1, clock)
                queue = [records[n % len(records)] for n in range(batch)]
                engine.serve(queue, batch, iterations)
                cell = taken.setdefault((batch, width), [])
                cell += [
                    (1e3 * (one.verify + one.decide), 1e3 * one.draft, one.context)
                    for one in engine.iterations[1:] if (one.batch, one.width) == (batch, width)
                ]  # fmt: skip
                for length, seconds in engine.prompts[: len(records)]:
                    prompts.setdefault(length, []).append(1e3 * seconds)
                if progress:
                    progress(1)
    rows: list[dict[str, Any]] = []
    spreads = []
    for (batch, width), cell in sorted(taken.items()):
        if not cell:
            raise UsageError(
                f"no iteration of batch {batch} had {width} tokens of each request",
                fix="the drafter offers fewer tokens, or requests end at once: give smaller widths, or other requests",
            )
        low, middle, high = np.percentile([pass_ms for pass_ms, _, _ in cell], [25, 50, 75])
        spreads.append(float((high - low) / 2 / middle))
        rows.append({
            "batch": batch, "width": width, "milliseconds": float(middle),
            "context": float(np.mean([context for *_, context in cell])),
            "draft_milliseconds": float(np.median([draft for _, draft, _ in cell])) if width > 1 else 0.0,
        })  # fmt: skip
    rows += [{"prompt": length, "milliseconds": float(np.median(times))} for length, times in sorted(prompts.items())]
    problems = []
    if max(spreads) > MAX_SPREAD:
        problems.append(f"times of one cell spread by {max(spreads):.0%} about their median: the machine was not still")
    if busy:
        problems.append("more programs wanted to run than there are cores: times are too long, and not alike")
    return Profile(rows, max(spreads), problems)
