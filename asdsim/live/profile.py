"""Passes measured on the machine at hand, by batch and width: a table for ``--cost``.

The very batches of :mod:`.batched` are run, for a few iterations at each batch and width, rounds over the whole table
one after the other, so that a neighbour who comes and goes weighs on all cells alike. The median of each cell is kept,
and its spread says whether the machine stood still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ..capture.passes import Sample, crowded, table_rows
from ..errors import UsageError
from ..records import RequestRecord
from ..rules.settings import STRICT
from ..stats import MAX_SPREAD
from .batched import Batched


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
    taken: dict[tuple[int, int], list[Sample]] = {}
    prompts: dict[int, list[float]] = {}
    before = crowded()
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
    for (batch, width), cell in sorted(taken.items()):
        if not cell:
            raise UsageError(
                f"no iteration of batch {batch} had {width} tokens of each request",
                fix="the drafter offers fewer tokens, or requests end at once: give smaller widths, or other requests",
            )
    rows = table_rows(taken, prompts)
    spread = max(row.get("spread", 0.0) for row in rows)
    problems = []
    if spread > MAX_SPREAD:
        problems.append(f"times of one cell spread by {spread:.0%} about their median: the machine was not still")
    if busy := before or crowded():
        problems.append(f"{busy}; times are too long, and not alike")
    return Profile(rows, spread, problems)
