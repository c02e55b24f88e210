"""``asdsim verify --ray``: a replica decodes the pairs of a request live, and says where they part from the walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..live.verify import Verification, compared, pairs_of, threshold_of
from ..rules.settings import Grid, Policy
from ..trace.parts import PlacesOf, find_places
from .cover import Pair
from .pool import Item, Note, Pool, Replica, Where
from .walk import outline

if TYPE_CHECKING:
    from ..capture.reload import Placing
    from ..capture.verify import Difference

PAIRS = 32
"""Pairs of a request dealt out at once, at most."""


@dataclass(frozen=True)
class Some:
    """Pairs of one request: their places among all, and their settings."""

    places: PlacesOf
    numbers: list[int]
    policies: list[Policy]


class VerifyReplica(Replica):
    """The models of a trace."""

    def load(self) -> None:
        """Load the models."""
        pair: Pair = self.job[0]
        self.models = pair.load()

    def work(self, some: list[Some], threshold: float) -> list[list[Difference | bool]]:
        """Return what became of the pairs of each request; see :func:`asdsim.live.verify.compared`."""
        self.hello()
        found = []
        for one in some:
            pairs = [(0, policy) for policy in one.policies]
            found.append(list(compared(one.places.read(), self.models, pairs, threshold)))
            if self.stopped.is_set():
                break
        return found


def verify_on(
    path: Path,
    grids: list[Grid] | None,
    where: Where,
    *,
    sample: int | None = None,
    seed: int = 0,
    near_tie: float | None = None,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    placing: Placing | None = None,
    progress: Callable[[int, int], None] | None = None,
    note: Note = lambda text: None,
) -> Verification:
    """Decode live on a cluster and compare with the walk; see :func:`asdsim.live.verify.verify_trace`."""
    places = find_places(path)
    manifest = places.manifest
    pairs = pairs_of(outline(places), grids, sample, seed)
    of: dict[int, list[int]] = {}
    for number, (request, _) in enumerate(pairs):
        of.setdefault(request, []).append(number)
    items = []
    for request, every in of.items():
        for first in range(0, len(every), PAIRS):
            numbers = every[first : first + PAIRS]
            some = Some(places.part(request, request + 1), numbers, [pairs[n][1] for n in numbers])
            items.append(Item(some, f"request {places.ids[request]}"))
    outcomes: dict[int, Difference | bool] = {}

    def taken(some: list[Item], answer: list[list[Difference | bool]]) -> int:
        for item, found in zip(some, answer, strict=False):
            outcomes.update(zip(item.payload.numbers, found, strict=True))
        if progress:
            progress(len(outcomes), len(pairs))
        return len(answer)

    def moved(some: Some) -> Some | None:
        there = places.moved(some.places)
        return None if there is None else replace(some, places=there)

    found = Verification(pairs=len(pairs), threshold=threshold_of(manifest, near_tie))
    pair = Pair(manifest.replace(shards=[]), target, drafter, offline, placing)
    with Pool(where, VerifyReplica, (pair,), note) as pool:
        pool.run(items, taken, lambda: (found.threshold,), most=4, moved=moved)
        if pool.interrupted:
            raise KeyboardInterrupt
    for number in range(len(pairs)):
        found.count(outcomes[number])
    return found
