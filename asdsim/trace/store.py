"""The graph of a streamed trace, a group of requests at a time, kept on disk between runs.

Laying out a graph means reading and checking the whole trace. What the walk needs of it is a quarter of the trace's
size, so it is kept beside the shards, one Arrow IPC file a group, memory-mapped when it is read again::

    my-trace/graph-cache/<manifest checksum>-<rows of a group>-<layout>/00000.arrow, 00001.arrow, ..

The folder is never part of the trace: a reader ignores it, and it may be deleted at any time. A file appears whole or
not at all, so several processes may read and write at once; files of another manifest are removed; a file that is
damaged is made again. Where nothing can be written, graphs go to a temporary directory for as long as they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..files import is_remote, write_made
from ..rules.scoring import DEFAULT, Layout
from .graph import MISSING, Graph, Graphs, build_graph
from .groups import StreamedTrace
from .spread import spread
from .stored import Trace

FOLDER = "graph-cache"
VERSION = 1
"""Of what a file holds; one of another version is not found."""

ARRAYS: dict[str, type[np.generic]] = {
    "root": np.int32, "limit": np.int32, "step_request": np.int32, "drafted": np.int32, "proposed": np.int32,
    "start": np.int32,
    "mm_ptr": np.int64, "mm_pos": np.int32, "mm_regret": np.float64, "mm_score": np.float64, "mm_charge": np.float64,
    "edge_next": np.int32, "edge_accepted": np.int32, "edge_tokens": np.int32, "path_ptr": np.int64,
    "path_step": np.int32, "align_ptr": np.int64, "align_step": np.int32,
}  # fmt: skip
"""Arrays of a graph that are kept: all that the walk reads, not the margins of edges."""

SAME_AS = {"mm_charge": "mm_regret", "proposed": "drafted"}
"""Left out of a file where it equals the other one, as it mostly does."""

SEVERAL = 1.2
"""Memory of laying out several graphs of a group, one after another, over that of one."""

LEFTOVER_SECONDS = 86400.0
"""After so long a temporary file belongs to no process that still runs."""


class GraphStore:
    """The graph of a trace under one layout, group by group.

    Parameters
    ----------
    trace : StreamedTrace
    layout : Layout
    keep : bool, optional
        Whether files stay beside the trace; if not, or where that cannot be, they are temporary. By default those of
        ASD on whole blocks stay, unless the trace says otherwise.
    base : GraphStore, optional
        Of the same trace with the same mismatches and draft length: then only scores and charges are kept here.

    Attributes
    ----------
    built : int
        Groups that had to be laid out from the trace.
    failure : TraceError or None
        Why the trace cannot be laid out so.
    """

    def __init__(
        self,
        trace: StreamedTrace,
        layout: Layout = DEFAULT,
        *,
        keep: bool | None = None,
        base: GraphStore | None = None,
    ) -> None:
        if keep is None:
            keep = trace.keep and layout.rule == "asd" and layout == layout.whole and not is_remote(trace.path)
        assert base is None or base.layout.blocks == layout.blocks
        self.trace, self.base, self.built = trace, base, 0
        self.layout: Layout = layout
        self.failure: TraceError | None = None
        self._identity = {
            b"checksum": trace.manifest.checksum.encode(), b"layout": repr(layout).encode(),
            b"version": str(VERSION).encode(),
        }  # fmt: skip
        digest = hashlib.sha256(f"{VERSION} {layout!r}".encode()).hexdigest()[:16]
        self._prefix = trace.manifest.checksum[:16]
        self._kept = trace.path / FOLDER / f"{self._prefix}-{trace.rows}-{digest}" if keep else None
        self._full = False  # whether writing there has failed
        self._lent = False  # to another process, which sees to nothing but files
        self._temporary: Path | None = None
        self._held: dict[int, Graph] = {}
        self._sizes: dict[int, tuple[int, int, int]] = {}

    @property
    def request_ids(self) -> list[str]:
        """Ids of all requests."""
        return self.trace.request_ids()

    @property
    def num_requests(self) -> int:
        """R."""
        return self.trace.num_requests

    @property
    def num_steps(self) -> int:
        """S."""
        return sum(steps for steps, _, _ in self._all_sizes())

    @property
    def num_mismatches(self) -> int:
        """m."""
        return sum(mismatches for _, mismatches, _ in self._all_sizes())

    @property
    def max_draft(self) -> int:
        """Largest K."""
        return max((largest for _, _, largest in self._all_sizes()), default=0)

    @property
    def room(self) -> float:
        """Bytes for a graph in one piece, when no group is being read."""
        return 2 * self.trace.room

    @property
    def num_parts(self) -> int:
        """Groups."""
        return len(self.trace.bounds) - 1

    def parts(self) -> Iterator[tuple[slice, Graph]]:
        """Yield the requests of each group, as a slice of all requests, and their graph."""
        self.fill()
        for n, (first, end) in enumerate(pairwise(self.trace.bounds)):
            graph = self._load(n)
            if graph is None:  # removed or damaged since
                graph = build_graph(next(self.trace.groups({n})), self.layout)
                self._write(n, graph)
            yield slice(first, end), graph

    def fill(self) -> None:
        """Lay out the groups that are not there yet, in one pass over the trace.

        Raises
        ------
        TraceError
            If the trace cannot be trusted, or cannot be laid out so; see :func:`asdsim.trace.graph.build_graph`.
        """
        fill([self])
        if self.failure is not None:
            raise self.failure

    def _all_sizes(self) -> list[tuple[int, int, int]]:
        self.fill()
        return list(self._sizes.values())

    def _missing(self) -> set[int]:
        """Return the groups that are neither held nor on disk."""
        for n in range(self.num_parts):
            if n not in self._sizes and (found := self._read(n, whole=False)) is not None:
                self._sizes[n] = found[1]
        return {n for n in range(self.num_parts) if n not in self._sizes}

    def _load(self, n: int) -> Graph | None:
        """Return the graph of a group: None where there is none, or it is not what it should be."""
        if n in self._held:
            return self._held[n]
        found = self._read(n, whole=True)
        if found is None:
            return None
        arrays, (_, _, largest) = found
        if self.base is not None:
            graph = self.base._load(n)
            if graph is None:
                return None
            score, charge = arrays.get("mm_score"), arrays.get("mm_charge", graph.mm_regret)
            if score is None or not len(score) == len(charge) == len(graph.mm_regret):
                return None
            return replace(graph, mm_score=score, mm_charge=charge)
        for name, other in SAME_AS.items():
            if name not in arrays:
                arrays[name] = arrays[other].copy()
        if {name: values.dtype.type for name, values in arrays.items()} != ARRAYS:
            return None
        names = self.request_ids[self.trace.bounds[n] : self.trace.bounds[n + 1]]
        graph = Graph(request_ids=names, edge_margin=np.zeros(0), max_draft=largest, **arrays)
        return graph if is_sound(graph) else None

    def _read(self, n: int, whole: bool) -> tuple[dict[str, npt.NDArray[Any]], tuple[int, int, int]] | None:
        """Return the arrays of a file, none unless ``whole``, and the sizes of its graph."""
        for folder in (self._kept, self._temporary):
            if folder is None:
                continue
            try:
                with pa.memory_map(str(folder / f"{n:05d}.arrow")) as source, pa.ipc.open_file(source) as reader:
                    about = reader.schema.metadata or {}
                    if any(about.get(key) != value for key, value in self._identity.items()):
                        continue
                    steps, mismatches, largest = (int(number) for number in about[b"sizes"].split())
                    arrays = {}
                    if whole:
                        batch = reader.get_batch(0)
                        # Copied: the walk is compiled for arrays that it may write, and the file can then be let go.
                        arrays = {
                            name: batch.column(name).values.to_numpy(zero_copy_only=True).copy()
                            for name in batch.schema.names
                        }
                        if int(about[b"crc32"]) != _crc(arrays):
                            continue
                    return arrays, (steps, mismatches, largest)
            except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
                continue
        return None

    def _write(self, n: int, graph: Graph) -> None:
        """Put a graph where it can be loaded from: beside the trace, else in a temporary file, else in memory."""
        self.built += 1
        self._sizes[n] = graph.num_steps, len(graph.mm_pos), graph.max_draft
        arrays = {name: np.ascontiguousarray(getattr(graph, name), kind) for name, kind in ARRAYS.items()}
        for name, other in SAME_AS.items():
            if np.array_equal(arrays[name], arrays[other]):
                del arrays[name]
        if self.base is not None:
            arrays = {name: values for name, values in arrays.items() if name in ("mm_score", "mm_charge")}
        sizes = " ".join(map(str, self._sizes[n]))
        about = {**self._identity, b"sizes": sizes.encode(), b"crc32": str(_crc(arrays)).encode()}
        if self._kept is not None and not self._full:
            try:
                self._kept.mkdir(parents=True, exist_ok=True)
                _write_file(self._kept / f"{n:05d}.arrow", arrays, about)
                return
            except OSError:  # read-only, or full
                self._full = True
        try:
            if self._temporary is None:
                if self._lent:
                    raise OSError("no directory to write to")
                self._temporary = self._temporary_folder()
            _write_file(self._temporary / f"{n:05d}.arrow", arrays, about)
        except OSError:
            if self._lent:
                raise
            self._held[n] = graph

    def _prepare(self) -> None:
        """Create the directories that will be needed."""
        if self._kept is not None and not self._full:
            try:
                self._kept.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self._kept).close()
            except OSError:
                self._full = True
        if self._temporary is None and (self._kept is None or self._full):
            with contextlib.suppress(OSError):
                self._temporary = self._temporary_folder()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out graphs in memory, which do not go to other processes."""
        return {**vars(self), "_held": {}, "_lent": True}

    def _temporary_folder(self) -> Path:
        """Return a new directory, beside the trace where that can be written, that goes when it is no longer used."""
        beside: Path | None = self.trace.path / FOLDER
        if self._full or not self.trace.keep or is_remote(self.trace.path):
            beside = None
        try:
            if beside is not None:
                beside.mkdir(exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{self._prefix}-tmp-", dir=beside))
        except OSError:
            folder = Path(tempfile.mkdtemp(prefix="asdsim-graph-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _remove_stale(self) -> None:
        """Remove what belongs to another manifest, and what killed processes left behind."""
        if self._kept is None:
            return
        with contextlib.suppress(OSError):
            for folder in self._kept.parent.iterdir():
                old = time.time() - folder.stat().st_mtime > LEFTOVER_SECONDS
                if not folder.name.startswith(f"{self._prefix}-") or ("-tmp-" in folder.name and old):
                    shutil.rmtree(folder, ignore_errors=True)
            for file in self._kept.glob(".tmp-*"):
                if time.time() - file.stat().st_mtime > LEFTOVER_SECONDS:
                    file.unlink(missing_ok=True)


def graph_of(trace: Trace | StreamedTrace, layout: Layout = DEFAULT) -> Graphs:
    """Return the graph of a trace under a layout, in parts where the trace is read so.

    Raises
    ------
    TraceError
        See :func:`asdsim.trace.graph.build_graph`; of a trace in parts, when they are asked for.
    """
    return GraphStore(trace, layout) if isinstance(trace, StreamedTrace) else build_graph(trace, layout)


def fill(stores: list[GraphStore]) -> None:
    """Lay out what several layouts of one trace are missing, in one pass over it."""
    bases = {id(store.base): store.base for store in stores if store.base is not None and store.base not in stores}
    stores = [*bases.values(), *stores]
    missing = _missing(stores)
    if not any(missing):
        return
    for store in stores:
        store._remove_stale()
        store._prepare()
    trace = stores[0].trace
    weight = 1.0 if len(stores) == 1 else SEVERAL
    spread(trace, partial(lay_out, stores, missing), sorted(set().union(*missing)), weight)
    left = _missing(stores)
    for store, before, after in zip(stores, missing, left, strict=True):
        store.built += len(before) - len(after)
    wanted = sorted(set().union(*left))
    for n, group in zip(wanted, trace.groups(set(wanted)) if wanted else (), strict=True):
        if not lay_out(stores, left, n, group):
            return


def _missing(stores: Sequence[GraphStore]) -> list[set[int]]:
    return [set() if store.failure else store._missing() for store in stores]


def lay_out(stores: Sequence[GraphStore], missing: Sequence[set[int]], n: int, group: Trace) -> bool:
    """Lay out group ``n`` for the stores that are missing it; return whether any of them can be laid out at all."""
    alike: tuple[Any, Graph] | None = None  # layouts of the same blocks lead alike, and come one after another
    for store, absent in sorted(zip(stores, missing, strict=True), key=lambda pair: pair[0].layout.blocks):
        if n not in absent or store.failure is not None:
            continue
        key = store.layout.blocks
        try:
            graph = build_graph(group, store.layout, alike[1] if alike and alike[0] == key else None)
        except TraceError as error:
            store.failure = error
            continue
        if alike is None or alike[0] != key:
            alike = key, graph
        store._write(n, graph)
    return not all(store.failure or not absent for store, absent in zip(stores, missing, strict=True))


def _crc(arrays: dict[str, npt.NDArray[np.generic]]) -> int:
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(np.ascontiguousarray(arrays[name]).data.cast("B") if len(arrays[name]) else b"", crc)
    return crc


def _write_file(file: Path, arrays: dict[str, npt.NDArray[Any]], about: dict[bytes, bytes]) -> None:
    columns = [
        pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), pa.array(values))
        for values in arrays.values()
    ]
    batch = pa.record_batch(columns, names=list(arrays)).replace_schema_metadata(about)

    def fill(handle: Any) -> None:
        with pa.ipc.new_file(handle, batch.schema) as writer:
            writer.write_batch(batch)

    write_made(file, fill)


def is_sound(graph: Graph) -> bool:
    """Return whether every index of a graph leads to where there is something, and every edge leads on.

    Compiled walks do not look: what comes from a file must be told from what would lead them astray.
    """
    requests, steps, mismatches = graph.num_requests, graph.num_steps, len(graph.mm_pos)
    edges = steps + mismatches
    lengths = (
        (requests, graph.root, graph.limit), (steps, graph.step_request, graph.start, graph.drafted, graph.proposed),
        (mismatches, graph.mm_regret, graph.mm_score, graph.mm_charge),
        (edges, graph.edge_next, graph.edge_accepted, graph.edge_tokens),
    )  # fmt: skip
    if any(len(values) != length for length, *arrays in lengths for values in arrays):
        return False
    for pointers, number, end in (
        (graph.mm_ptr, steps, mismatches), (graph.path_ptr, requests, len(graph.path_step)),
        (graph.align_ptr, requests, len(graph.align_step)),
    ):  # fmt: skip
        if len(pointers) != number + 1 or pointers[0] != 0 or pointers[-1] != end or (np.diff(pointers) < 0).any():
            return False
    largest = graph.max_draft
    for values, low, high in (
        (graph.root, -1, steps), (graph.edge_next, MISSING, steps), (graph.path_step, 0, steps),
        (graph.align_step, 0, steps), (graph.step_request, 0, requests), (graph.drafted, 0, largest + 1),
        (graph.proposed, 0, largest + 2),
        (graph.mm_pos, 0, largest), (graph.edge_accepted, 0, largest + 1), (graph.edge_tokens, 0, largest + 2),
    ):  # fmt: skip
        if len(values) and not (low <= values.min() and values.max() < high):
            return False
    step_of = np.repeat(np.arange(steps), np.diff(graph.mm_ptr) + 1)
    on = graph.edge_next >= 0
    return bool((graph.start[graph.edge_next[on]] > graph.start[step_of[on]]).all())
