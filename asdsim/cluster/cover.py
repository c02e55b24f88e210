"""``asdsim cover --ray``: a replica completes groups of requests; a wave is a barrier for its group alone.

All prefixes of a group are computed by one replica, which holds their KV. A group is stored whole or not at all, and
its steps depend on nothing outside it: whatever was lost and done again, they are those of one process to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..capture.cover import Progress
from ..capture.reload import Placing, check_exact, load_pair
from ..capture.vocabulary import grown_vocabulary
from ..live.cover import at_each_length, cover_requests, note_covered, note_faithful
from ..rules.settings import Grid, Schedule
from ..trace.interrupt import uninterrupted
from ..trace.manifest import Manifest, Shard
from ..trace.parts import OwnedTrace, PartWriter, PlacesOf, find_places
from ..trace.reader import load_manifest
from ..trace.vocabulary import Vocabulary
from ..trace.writer import store_vocabulary
from .pool import LEASE_SECONDS, Item, Note, Pool, Replica, Where

GROUPS = 8
"""Groups dealt out at once, at most."""


@dataclass(frozen=True)
class Pair:
    """How a replica loads the models of a trace; see :func:`asdsim.capture.reload.load_pair`."""

    manifest: Manifest
    target: str | None = None
    drafter: str | None = None
    offline: bool = False
    placing: Placing | None = None

    def load(self) -> tuple[Any, Any]:
        """Load target and drafter."""
        return load_pair(
            self.manifest, target=self.target, drafter=self.drafter, offline=self.offline, placing=self.placing
        )


@dataclass(frozen=True)
class Covered:
    """What a replica did: how it went with the first few of the groups it was given, and their new shards."""

    groups: list[Progress]
    shards: list[Shard]


class CoverReplica(Replica):
    """The models of a trace."""

    def load(self) -> None:
        """Load the models, and refuse those whose steps are not functions of the prefix."""
        pair: Pair = self.job[0]
        self.how: dict[str, Any] = self.job[1]
        self.models = pair.load()
        check_exact(self.models[1], pair.manifest)

    def work(self, groups: list[PlacesOf], grid: Grid, number: int) -> Covered:
        """Complete groups until the lease ends, and write their new steps under a number of shards."""
        self.hello()
        until = time.monotonic() + LEASE_SECONDS
        done: list[Progress] = []
        shards: list[Shard] = []
        fresh: list[PartWriter] = []
        for places in groups:
            trace = places.read()
            part = PartWriter(places.folder, places.manifest, number, trace)

            def report(_: Progress) -> None:
                if self.stopped.is_set():
                    raise KeyboardInterrupt

            progress = cover_requests(trace, self.models, grid, part.add_steps, report=report, **self.how)
            if progress.interrupted:
                break
            fresh.append(part)
            done.append(progress)
            if self.stopped.is_set() or time.monotonic() > until:
                break
        if fresh:
            shards = PartWriter.finish_all(fresh)
        return Covered(done, shards)

    def vocabulary(self, folder: Path) -> Vocabulary | None:
        """Return the text of every token id of the trace; see :func:`asdsim.capture.vocabulary.grown_vocabulary`."""
        self.hello()
        return grown_vocabulary(folder, load_manifest(folder)[0], getattr(self.models[0], "tokenizer", None))


def cover_on(
    path: Path,
    grids: Sequence[Grid],
    where: Where,
    *,
    batch: int = 32,
    group: int = 1,
    kv_bytes: int = 2 << 30,
    faithful: bool = False,
    by_batch: Schedule | None = None,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    placing: Placing | None = None,
    report: Callable[[Progress], None] | None = None,
    note: Note = lambda text: None,
) -> Progress:
    """Complete a trace on a cluster, or go on with it; see :func:`asdsim.live.cover.cover_trace`.

    The steps added are those that one process adds with the same ``group``, to the bit (times aside).
    """
    with OwnedTrace.append(path) as writer:
        assert isinstance(writer, OwnedTrace)
        pair = Pair(writer.manifest.replace(shards=[]), target, drafter, offline, placing)
        how = {"batch": batch, "group": group, "kv_bytes": kv_bytes, "faithful": faithful, "by_batch": by_batch}
        total = Progress(pairs=sum(map(len, grids)) * len(writer.completed))
        began = time.monotonic()
        with Pool(where, CoverReplica, (pair, how), note) as pool:
            for grid in grids:
                _cover(pool, writer, grid, group, faithful, by_batch, total, report)
                if pool.interrupted:
                    break
            total.interrupted = pool.interrupted
            if not pool.interrupted:
                vocabulary = pool.call("vocabulary", path)
                if vocabulary is not None:
                    with uninterrupted():
                        store_vocabulary(writer, vocabulary)
        total.seconds = time.monotonic() - began
    return total


def _cover(
    pool: Pool, writer: OwnedTrace, grid: Grid, group: int, faithful: bool, by_batch: Schedule | None,
    total: Progress, report: Callable[[Progress], None] | None,
) -> None:  # fmt: skip
    """Complete all requests for one grid, and add to what is known of the others."""
    places = find_places(writer.path)
    pure = note_faithful(writer, faithful, places.added)
    writer.read = {shard.name for shard in places.manifest.shards}
    number = len(places.ids)
    items = [
        Item(places.part(first, min(first + group, number)), f"request {places.ids[first]}")
        for first in range(0, number, group)
    ]
    held: list[Progress] = []
    before = total.steps_held

    def taken(_: list[Item], answer: Covered) -> int:
        if answer.shards:
            writer.take(answer.shards)
        for one in answer.groups:
            held.append(one)
            total.exact_pairs += one.exact_pairs
            total.waves += one.waves
            total.steps_added += one.steps_added
            total.steps_held += one.steps_held
            total.live_steps += one.live_steps
            for name, waves in one.waves_by_request.items():
                total.waves_by_request[name] = total.waves_by_request.get(name, 0) + waves
        if report:
            report(total)
        return len(answer.groups)

    total.steps_held = 0
    pool.run(items, taken, lambda: (grid, writer.number()), most=GROUPS)
    if len(held) < len(items):
        total.steps_held = max(before, total.steps_held)
    elif all(one.complete for one in held):
        note_covered(writer, at_each_length(grid, by_batch), pure)
