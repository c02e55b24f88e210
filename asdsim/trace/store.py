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
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..files import write_made
from ..rules.scoring import DEFAULT, Layout
from .graph import MISSING, Graph, Graphs, build_graph
from .groups import StreamedTrace
from .stored import Trace

FOLDER = "graph-cache"
VERSION = 1
"""Of what a file holds; one of another version is not found."""

ARRAYS: dict[str, type[np.generic]] = {
    "root": np.int32, "limit": np.int32, "step_request": np.int32, "drafted": np.int32, "start": np.int32,
    "mm_ptr": np.int64, "mm_pos": np.int32, "mm_regret": np.float64, "mm_score": np.float64, "mm_charge": np.float64,
    "edge_next": np.int32, "edge_accepted": np.int32, "edge_tokens": np.int32, "path_ptr": np.int64,
    "path_step": np.int32, "align_ptr": np.int64, "align_step": np.int32,
}  # fmt: skip
"""Arrays of a graph that are kept: all that the walk reads, not the margins of edges."""

SAME_AS = {"mm_charge": "mm_regret"}
"""Left out of a file where it equals the other one, as it does for most rules."""

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

    Attributes
    ----------
    built : int
        Groups that had to be laid out from the trace.
    failure : TraceError or None
        Why the trace cannot be laid out so.
    """

    def __init__(self, trace: StreamedTrace, layout: Layout = DEFAULT, *, keep: bool | None = None) -> None:
        keep = trace.keep and layout.rule == "asd" and not layout.width if keep is None else keep
        self.trace, self.layout, self.built = trace, layout, 0
        self.failure: TraceError | None = None
        self._identity = {
            b"checksum": trace.manifest.checksum.encode(), b"layout": repr(layout).encode(),
            b"version": str(VERSION).encode(),
        }  # fmt: skip
        digest = hashlib.sha256(f"{VERSION} {layout!r}".encode()).hexdigest()[:16]
        self._prefix = trace.manifest.checksum[:16]
        self._kept = trace.path / FOLDER / f"{self._prefix}-{trace.rows}-{digest}" if keep else None
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
            if n not in self._sizes:
                for folder in self._folders():
                    if (found := self._open(folder / f"{n:05d}.arrow", n)) is not None:
                        self._sizes[n] = _size(found)
                        break
        return {n for n in range(self.num_parts) if n not in self._sizes}

    def _folders(self) -> list[Path]:
        return [folder for folder in (self._kept, self._temporary) if folder is not None]

    def _load(self, n: int) -> Graph | None:
        if n in self._held:
            return self._held[n]
        for folder in self._folders():
            if (graph := self._open(folder / f"{n:05d}.arrow", n, whole=True)) is not None:
                return graph
        return None

    def _open(self, file: Path, n: int, whole: bool = False) -> Graph | None:
        """Return a graph from a file: None where there is none, or it is not what it should be."""
        first, end = self.trace.bounds[n], self.trace.bounds[n + 1]
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
                about = reader.schema.metadata or {}
                if any(about.get(key) != value for key, value in self._identity.items()):
                    return None
                batch = reader.get_batch(0)
                arrays = {
                    name: np.asarray(batch.column(name).values.to_numpy(zero_copy_only=True))
                    for name in batch.schema.names
                }
                if whole:
                    # Copied: the walk is compiled for arrays that it may write, and the file can then be let go.
                    arrays = {name: values.copy() for name, values in arrays.items()}
                    if int(about[b"crc32"]) != _crc(arrays):
                        return None
                for name, other in SAME_AS.items():
                    if name not in arrays:
                        arrays[name] = arrays[other].copy() if whole else arrays[other]
                if {name: values.dtype.type for name, values in arrays.items()} != ARRAYS:
                    return None
                graph = Graph(
                    request_ids=self.request_ids[first:end], edge_margin=np.zeros(0),
                    max_draft=int(about[b"max_draft"]), **arrays,
                )  # fmt: skip
                return graph if not whole or is_sound(graph) else None
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, n: int, graph: Graph) -> None:
        """Put a graph where it can be loaded from: beside the trace, else in a temporary file, else in memory."""
        self.built += 1
        self._sizes[n] = _size(graph)
        while True:
            folder = self._kept or self._temporary
            try:
                if folder is None:
                    folder = self._temporary = Path(tempfile.mkdtemp(prefix="asdsim-graph-"))
                    weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
                write_made(folder / f"{n:05d}.arrow", lambda handle: _fill_file(handle, graph, self._identity))
                return
            except OSError:  # read-only, or full
                if self._kept is None:
                    self._held[n] = graph
                    return
                self._kept = None

    def _remove_stale(self) -> None:
        """Remove what belongs to another manifest, and what killed processes left behind."""
        if self._kept is None:
            return
        with contextlib.suppress(OSError):
            for folder in self._kept.parent.iterdir():
                if not folder.name.startswith(f"{self._prefix}-"):
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
    missing = [set() if store.failure else store._missing() for store in stores]
    wanted = set().union(*missing)
    if not wanted:
        return
    for store in stores:
        store._remove_stale()
    for n, group in zip(sorted(wanted), stores[0].trace.groups(wanted), strict=True):
        for store, absent in zip(stores, missing, strict=True):
            if n in absent and store.failure is None:
                try:
                    store._write(n, build_graph(group, store.layout))
                except TraceError as error:
                    store.failure = error


def _size(graph: Graph) -> tuple[int, int, int]:
    return graph.num_steps, len(graph.mm_pos), graph.max_draft


def _crc(arrays: dict[str, npt.NDArray[np.generic]]) -> int:
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(np.ascontiguousarray(arrays[name]).data.cast("B") if len(arrays[name]) else b"", crc)
    return crc


def _fill_file(handle: object, graph: Graph, identity: dict[bytes, bytes]) -> None:
    arrays = {name: np.ascontiguousarray(getattr(graph, name), kind) for name, kind in ARRAYS.items()}
    for name, other in SAME_AS.items():
        if np.array_equal(arrays[name], arrays[other]):
            del arrays[name]
    about = {**identity, b"max_draft": str(graph.max_draft).encode(), b"crc32": str(_crc(arrays)).encode()}
    columns = [
        pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), pa.array(values))
        for values in arrays.values()
    ]
    batch = pa.record_batch(columns, names=list(arrays)).replace_schema_metadata(about)
    with pa.ipc.new_file(handle, batch.schema) as writer:
        writer.write_batch(batch)


def is_sound(graph: Graph) -> bool:
    """Return whether every index of a graph leads to where there is something, and every edge leads on.

    Compiled walks do not look: what comes from a file must be told from what would lead them astray.
    """
    requests, steps, mismatches = graph.num_requests, graph.num_steps, len(graph.mm_pos)
    edges = steps + mismatches
    lengths = (
        (requests, graph.root, graph.limit), (steps, graph.step_request, graph.start),
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
        (graph.mm_pos, 0, largest), (graph.edge_accepted, 0, largest + 1), (graph.edge_tokens, 0, largest + 2),
    ):  # fmt: skip
        if len(values) and not (low <= values.min() and values.max() < high):
            return False
    step_of = np.repeat(np.arange(steps), np.diff(graph.mm_ptr) + 1)
    on = graph.edge_next >= 0
    return bool((graph.start[graph.edge_next[on]] > graph.start[step_of[on]]).all())
