"""Where the walk meets the model: complete a stored trace, and hold it against live decoding.

The walk knows no model and the capture knows no walk; here one is handed to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .policy import Grid
from .trace.reader import load_manifest
from .trace.writer import TraceWriter
from .walk.demand import demand_of

if TYPE_CHECKING:
    from .capture.cover import Progress


def grid_entry(grid: Grid, faithful: bool) -> dict[str, Any]:
    """Return how a manifest names a covered grid."""
    return {
        "rule": "asd",
        "semantics": grid.semantics,
        **{axis: list(values) for axis, values in grid.axes.items()},
        "faithful": faithful,
    }


def covered_grids(grids: list[dict[str, Any]]) -> list[Grid]:
    """Return the grids that a manifest says are covered."""
    return [Grid.product(entry["B"], entry["g"], entry["M"], entry["semantics"]) for entry in grids]


def cover_trace(
    path: Path,
    grid: Grid,
    *,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    batch: int = 32,
    group: int = 16,
    kv_bytes: int = 2 << 30,
    faithful: bool = False,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Complete a trace directory for a grid; see :func:`asdsim.capture.cover.cover`.

    Raises
    ------
    TraceError
        If the trace cannot be trusted.
    CaptureError
        If the models at hand are not those of the trace, or their steps are no functions of the prefix.
    """
    load_manifest(path)  # before models are loaded
    with TraceWriter.append(path) as writer:
        from .capture.reload import check_exact, load_pair

        models = load_pair(writer.manifest, target=target, drafter=drafter, offline=offline)
        check_exact(models[1], writer.manifest)
        return cover_with(
            writer, models, grid, max_steps=max_steps, max_minutes=max_minutes, batch=batch, group=group,
            kv_bytes=kv_bytes, faithful=faithful, report=report,
        )  # fmt: skip


def cover_with(
    writer: TraceWriter,
    models: tuple[Any, Any],
    grid: Grid,
    *,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    batch: int = 32,
    group: int = 16,
    kv_bytes: int = 2 << 30,
    faithful: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Do what :func:`cover_trace` does with a writer and models at hand."""
    from .capture.cover import BatchRunner, FaithfulRunner, cover
    from .capture.reload import recorder_of
    from .trace.reader import read_trace

    trace = read_trace(writer.path, verify=False)
    manifest = writer.manifest
    recorder = recorder_of(manifest)
    if faithful:
        runner: Any = FaithfulRunner(*models, manifest.num_draft_tokens, recorder, trace.steps_of)
    else:
        runner = BatchRunner(*models, manifest.num_draft_tokens, recorder, batch=batch, kv_bytes=kv_bytes)
    progress = cover(
        [(record, trace.steps_of(record.request_id)) for record in trace.request_records()],
        lambda graph: demand_of(graph, [grid]),
        runner,
        writer.add_steps,
        settings=len(grid),
        max_steps=max_steps,
        max_minutes=max_minutes,
        group=group,
        report=report,
    )
    entry = grid_entry(grid, faithful)
    if progress.complete and entry not in manifest.grids:
        writer.update_manifest(grids=[*manifest.grids, entry])
    return progress
