"""``asdsim replay --ray`` and ``calibrate --ray``: replicas walk parts of a trace, the driver adds up.

A replica reads its requests by the shards that hold them, and returns integer sums, ledgers and columns of single
requests. The driver puts these in the order of the requests and goes on as on one machine, so figures are equal to the
bit. It reads requests only, never steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError, UsageError
from ..evaluate.cost import PARTS
from ..evaluate.quality import COUNTS, OF_OUTPUTS, Columns, Evaluator, Pairing, Scorer
from ..result import Result
from ..rules.scoring import Layout
from ..rules.settings import Grid, Policy
from ..trace.graph import Graph, Graphs, build_graph
from ..trace.parts import Places, PlacesOf, find_places
from ..trace.reader import Trace
from ..trace.schema import table_schema
from ..walk.off_trace import off_trace_mode
from ..walk.request import NUM_COUNTS
from ..walk.sums import GridSums
from ..walk.sweep import choose_device, counted, figures_of, settings_at_once, walk_grid, with_ledgers
from .pool import Item, Note, Pool, Replica, Where

PART_ROWS = 1 << 19
"""Positions of a part of a trace that is walked at once, about."""
LEAST_PARTS = 16
"""Parts of a small trace."""
HELD = 2
"""Parts that a replica keeps in memory for the next question."""
LEDGER_BYTES = 256 << 20
"""Ledgers that the driver holds at once."""
COLUMNS, COLUMN_BYTES = 32, 1 << 30
"""Columns of single requests, and bytes of them that the driver holds at once."""

Scoring = Callable[[Trace], Any]
"""Makes the scorer of a trace; see :data:`asdsim.evaluate.quality.Scorer`."""

STEP_COLUMNS = ("wave", "start_pos", "num_draft_tokens", *(f"{part}_us" for part in PARTS))
"""What a cost model is fitted to."""


@dataclass(frozen=True)
class Ask:
    """What is asked of each part of a trace.

    Attributes
    ----------
    what : {"sums", "columns", "steps"}
    grid : Grid, optional
    base : Grid, optional
        Grid whose baseline the columns of outputs are compared with.
    off_trace, device : str
    scoring : callable, optional
    """

    what: str
    grid: Grid | None = None
    base: Grid | None = None
    off_trace: str = "stop"
    device: str = "auto"
    scoring: Scoring | None = None


class WalkReplica(Replica):
    """Walks parts of traces; holds no model."""

    def load(self) -> None:
        """Begin with no part in memory."""
        self.held: OrderedDict[tuple[Path, str], tuple[Trace, dict[Layout, Graphs]]] = OrderedDict()

    def work(self, parts: list[PlacesOf], ask: Ask) -> list[Any]:
        """Answer for each part."""
        self.hello()
        answers = []
        for part in parts:
            key = part.folder, part.ids[0]
            if key not in self.held:
                self.held[key] = part.read(), {}
                while len(self.held) > HELD:
                    self.held.popitem(last=False)
            self.held.move_to_end(key)
            answers.append(getattr(self, f"_{ask.what}")(*self.held[key], ask))
            if self.stopped.is_set():
                break
        return answers

    def _sums(self, trace: Trace, graphs: dict[Layout, Graphs], ask: Ask) -> tuple[GridSums, npt.NDArray[np.float64]]:
        grid = cast(Grid, ask.grid)
        how: dict[str, Any] = {"off_trace": ask.off_trace, "device": ask.device, "threads": self.threads}

        def graph(layout: Layout) -> Graphs:
            if layout not in graphs:
                graphs[layout] = build_graph(trace, layout)
            return graphs[layout]

        strict = walk_grid(graph(grid.layout.of_strict), grid.strict, **how)
        size = settings_at_once(len(trace.request_ids()))
        chunks = [
            counted(walk_grid(graph(grid.layout), grid[n : n + size], **how), strict, ask.off_trace)
            for n in range(0, len(grid), size)
        ]
        sums, spent = zip(*chunks, strict=True)
        axes = [SETTINGS_LAST.get(name, 0) for name in GridSums._fields]
        fields: Any = (np.concatenate(held, axis) for held, axis in zip(zip(*sums, strict=True), axes, strict=True))
        return GridSums(*fields), np.concatenate(spent)

    def _columns(self, trace: Trace, graphs: dict[Layout, Graphs], ask: Ask) -> tuple[Columns, Columns]:
        scorer = None if ask.scoring is None else ask.scoring(trace)
        evaluator = Evaluator(trace, scorer=scorer, device=ask.device, threads=self.threads, graphs=graphs)
        everyone = np.arange(len(trace.request_ids()))
        pairing = evaluator.pairing(cast(Grid, ask.base), everyone, ask.off_trace, 2)  # none is drawn here
        columns = pairing.columns_of(cast(Grid, ask.grid))
        graphs.update(evaluator._graphs)
        return pairing.strict, columns

    def _steps(self, trace: Trace, graphs: dict[Layout, Graphs], ask: Ask) -> tuple[pa.Table, npt.NDArray[np.int32]]:
        return trace.steps.select(list(STEP_COLUMNS)), trace.step_request


SETTINGS_LAST = {"counts": 1, "base": 1, "same": 1}
"""Axis of the settings in fields of GridSums, where it is not the first."""


class WalkPool(Pool):
    """A pool of :class:`WalkReplica`.

    Raises
    ------
    UsageError
        From :meth:`ask`: Ctrl-C, since half of a sum is no result.
    """

    def __init__(self, where: Where, note: Note) -> None:
        super().__init__(replace(where, gpus=0), WalkReplica, (), note)

    def ask(self, places: Places, ask: Ask, progress: Callable[[int], None] | None = None) -> list[Any]:
        """Return the answers for all parts of a trace, in the order of its requests."""
        positions = sum(shard.rows for shard in places.manifest.shards_of("positions"))
        number = len(places.ids)
        size = max(1, min(-(-number // LEAST_PARTS), number * PART_ROWS // max(1, positions)))
        starts = range(0, number, size)
        answers: dict[int, Any] = {}
        where = {places.ids[first]: first for first in starts}

        def taken(items: list[Item], found: list[Any]) -> int:
            for item, answer in zip(items, found, strict=False):
                answers[where[item.payload.ids[0]]] = answer
                if progress:
                    progress(len(item.payload.ids))
            return len(found)

        items = [Item(places.part(n, min(n + size, number)), f"request {places.ids[n]}") for n in starts]
        self.run(items, taken, lambda: (ask,), most=4, moved=places.moved)
        if self.interrupted:
            raise KeyboardInterrupt
        return [answers[first] for first in starts]


def outline(places: Places, pool: WalkPool | None = None) -> Trace:
    """Return a trace without its positions: its manifest and requests, and with a pool what is timed of its steps.

    Raises
    ------
    TraceError
        If a shard of ``requests`` cannot be trusted.
    """
    requests = _requests(places)
    manifest = places.manifest
    steps, owner = table_schema("steps").empty_table(), np.empty(0, np.int32)
    if pool is not None:
        tables, owners = zip(*pool.ask(places, Ask("steps")), strict=True)
        steps = pa.concat_tables(tables).combine_chunks()
        first = np.cumsum([0, *(int(one.max(initial=-1)) + 1 for one in owners)])
        owner = np.concatenate([one + n for one, n in zip(owners, first, strict=False)]).astype(np.int32)
    positions = table_schema("positions", manifest.top_k).empty_table()
    return Trace(
        places.folder, manifest, requests, steps, positions, owner,
        np.zeros(len(owner) + 1, np.int64), np.zeros(len(places.ids) + 1, np.int64),
    )  # fmt: skip


def _requests(places: Places) -> pa.Table:
    while True:
        named = places.manifest.replace(shards=places.manifest.shards_of("requests"))
        try:
            return replace(places.part(0, len(places.ids)), manifest=named).read_requests()
        except TraceError:
            if not places.renew():
                raise


class Walking(WalkPool):
    """A trace that a cluster walks; a context manager.

    Parameters
    ----------
    path : Path
    where : Where
    note : callable
    timed : bool
        Whether a cost model is to be fitted to the trace.
    scoring : callable, optional
        Makes what scores answers for results of :meth:`replay_grid` that are asked for accuracy.

    Attributes
    ----------
    trace : Trace
        Its :func:`outline`.
    """

    def __init__(self, path: Path, where: Where, note: Note, timed: bool, scoring: Scoring | None = None) -> None:
        self.places, self.timed, self.scoring = find_places(path), timed, scoring
        super().__init__(where, note)

    def __enter__(self) -> Walking:
        super().__enter__()
        try:
            self.trace = outline(self.places, self if self.timed else None)
        except BaseException:
            self.__exit__()
            raise
        return self

    def beside(self, path: Path) -> Walking:
        """Return another trace that the same replicas walk."""
        other = copy(self)
        other.places = find_places(path)
        other.trace = outline(other.places)
        return other

    def evaluator(self, **options: Any) -> ClusterEvaluator:
        """Return what gives figures with intervals."""
        return ClusterEvaluator(self, self.places, self.trace, **options)

    def replay_grid(
        self, trace: Trace, grid: Grid, *, off_trace: str = "stop", device: str = "auto",
        progress: Callable[[int], None] | None = None, **_: Any,
    ) -> Result:  # fmt: skip
        """Walk the trace under a grid; see :func:`asdsim.result.replay_grid`.

        The result knows figures and intervals, not single walks.

        Raises
        ------
        UsageError
            On pooled estimates, which draw over the whole trace, and the oracle.
        """

        def evaluator(scorer: Scorer | None = None, **options: Any) -> Evaluator:
            return self.evaluator(scoring=None if scorer is None else self.scoring, **options)

        figures = replay_on(self, self.places, grid, off_trace=off_trace, device=device, progress=progress)
        return Result(trace, cast(Any, None), grid, off_trace, choose_device(device), figures, _evaluator=evaluator)


def replay_on(
    pool: WalkPool, places: Places, grid: Grid, *, off_trace: str, device: str, progress: Callable[[int], None] | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the figures of a grid; see :meth:`Walking.replay_grid`."""
    if not off_trace_mode(off_trace).has_walks or device == "reference":
        what = "the oracle" if device == "reference" else f"off-trace mode {off_trace}"
        raise UsageError(f"{what} takes the whole trace at once", fix="leave --ray out")
    number = len(places.ids)
    size = max(1, LEDGER_BYTES // (8 * max(1, number)))
    parts: list[dict[str, npt.NDArray[Any]]] = []
    for first in range(0, len(grid), size):
        chunk = grid[first : first + size]
        answers = pool.ask(places, Ask("sums", chunk, off_trace=off_trace, device=device))
        sums = reduce(_plus, (sums for sums, _ in answers))
        parts.append(figures_of(with_ledgers(sums, np.concatenate([spent for _, spent in answers], axis=1)), number))
        if progress:
            progress(len(chunk))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _plus(one: GridSums, other: GridSums) -> GridSums:
    """Add sums of two parts of a trace, whose longest blocks may differ."""
    width = max(one.histogram.shape[1], other.histogram.shape[1])
    one, other = (
        held._replace(histogram=np.pad(held.histogram, ((0, 0), (0, width - held.histogram.shape[1]))))
        for held in (one, other)
    )
    fields: Any = (a + b for a, b in zip(one, other, strict=True))
    return GridSums(*fields)


class ClusterEvaluator(Evaluator):
    """An :class:`asdsim.evaluate.quality.Evaluator` whose walks and outputs come from a cluster.

    Parameters
    ----------
    pool : WalkPool
    places : Places
    trace : Trace
        Its :func:`outline`.
    scoring : callable, optional
    **options
        As for the other one.
    """

    def __init__(
        self, pool: WalkPool, places: Places, trace: Trace, *, scoring: Scoring | None = None, **options: Any
    ) -> None:
        super().__init__(trace, scorer=None if scoring is None else scoring(trace), **options)
        self.pool, self.places, self.scoring = pool, places, scoring
        self._of: tuple[Policy, str] | None = None  # the baseline and mode that the columns held belong to
        self._strict: Columns = {}
        self._held: dict[Policy, Columns] = {}

    def pairing(
        self, grid: Grid, rows: npt.NDArray[np.int64], off_trace: str, resamples: int,
        wanted: Sequence[str] | None = None,
    ) -> Pairing:  # fmt: skip
        """Return some requests with strict matching on them."""
        return ClusterPairing(self, grid, rows, off_trace, resamples, wanted)

    def exact(self, grid: Grid) -> npt.NDArray[np.bool_]:
        """Return, per setting and request (n, R), whether the walk meets captured steps only."""
        return np.asarray(self.columns(grid, grid, "stop")["exact"] > 0)

    def graph(self, layout: Layout) -> Graph:
        """Refuse: no graph is on this machine."""
        raise UsageError("--method quantile reads the graph of the whole trace", fix="leave --ray out")

    def strict(self, base: Grid, ahead: Grid, off_trace: str) -> Columns:
        """Return columns of strict matching beside ``base``, each float64 (1, R); ``ahead`` will be asked for next."""
        self.columns(base, ahead, off_trace)
        return self._strict

    def columns(self, base: Grid, grid: Grid, off_trace: str, ahead: Grid | None = None) -> Columns:
        """Return columns of a grid, each float64 (n, R); those of ``ahead`` are fetched in the same pass."""
        of = base.policy(0), off_trace
        if self._of != of:
            self._of, self._held = of, {}
        wanted = [grid.policy(n) for n in range(len(grid))]
        if any(policy not in self._held for policy in wanted):
            pass_over = grid if ahead is None else ahead
            if len(self._held) + len(pass_over) > most_settings(len(self.places.ids)):
                self._held = {}
            ask = Ask("columns", pass_over, base[:1], off_trace, self.device, self.scoring)
            strict, table = zip(*self.pool.ask(self.places, ask), strict=True)
            self._strict = _beside(strict)
            every = _beside(table)
            for n in range(len(pass_over)):
                self._held[pass_over.policy(n)] = {name: values[n] for name, values in every.items()}
        rows = [self._held[policy] for policy in wanted]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def most_settings(requests: int) -> int:
    """Return for how many settings the driver holds columns of single requests at once."""
    return max(1, COLUMN_BYTES // (8 * COLUMNS * max(1, requests)))


class ClusterPairing(Pairing):
    """Some requests, and strict matching on them as replicas walked it."""

    evaluator: ClusterEvaluator

    def begin(self) -> None:
        """Ask for strict matching, and for as much of the grid as can be held."""
        self._most = most_settings(len(self.evaluator.places.ids))
        strict = self.evaluator.strict(self.grid, self.grid[: self._most], self.off_trace)
        self.strict = self._of_rows(strict)
        self.strict_outputs = [] if "differ" in strict else None
        self._place = {self.grid.policy(n): n for n in range(len(self.grid))}

    def columns_of(self, grid: Grid) -> Columns:
        """Return per-request columns of the walks under a grid, and whether each walk is exact."""
        first = self._place.get(grid.policy(0))
        ahead = None if first is None else self.grid[first : first + max(self._most, len(grid))]
        return self._of_rows(self.evaluator.columns(self.grid, grid, self.off_trace, ahead))

    def _of_rows(self, columns: Columns) -> Columns:
        """Return columns of these requests, laid out in memory as :meth:`columns` does: sums round by the layout."""
        counts = np.zeros((*columns["spent"].shape, NUM_COUNTS))
        for name, place in COUNTS.items():
            counts[:, :, place] = columns[name]
        counts = counts[:, self.rows]
        table = {name: counts[:, :, place] for name, place in COUNTS.items()}
        table["spent"], table["exact"] = columns["spent"][:, self.rows], columns["exact"][:, self.rows]
        table["requests"] = np.ones(table["spent"].shape)
        self.add_times(table)
        outputs = np.zeros((*table["spent"].shape, len(OF_OUTPUTS)))
        for place, name in enumerate(OF_OUTPUTS):
            if name in columns:
                outputs[:, :, place] = columns[name][:, self.rows]
                table[name] = outputs[:, :, place]
        return table


def _beside(parts: Sequence[Columns]) -> Columns:
    """Put the columns of all parts side by side; a part whose strict outputs are unknown has none of outputs."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    width = len(parts[0]["spent"])
    return {
        name: np.concatenate(
            [part[name] if name in part else np.zeros((width, part["spent"].shape[1])) for part in parts], axis=1
        )
        for name in names
    }
