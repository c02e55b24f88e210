"""Complete a stored trace for a grid: the walk says what is missing, the model supplies it.

The walk knows no model and the capture knows no walk; here one is passed to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.processes import own_directory
from ..rules.settings import Grid
from ..trace.covered import grid_entry
from ..trace.graph import build_graph
from ..trace.reader import load_manifest
from ..trace.writer import TraceWriter
from ..walk.demand import demand_of

if TYPE_CHECKING:
    from ..capture.cover import Progress
    from ..capture.memory import Load
    from ..capture.reload import Placing


def cover_trace(
    path: Path,
    grid: Grid | Sequence[Grid],
    *,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    batch: int = 32,
    group: int = 32,
    kv_bytes: int = 2 << 30,
    faithful: bool = False,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    placing: Placing | None = None,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Complete a trace directory for a grid, or several; see :func:`asdsim.capture.cover.cover`.

    Raises
    ------
    TraceError
        If the trace cannot be trusted.
    CaptureError
        If the models are not those of the trace, or their steps are not functions of the prefix.
    """
    load_manifest(path)  # refused before models are loaded
    path = own_directory(path)
    with TraceWriter.append(path) as writer:
        from ..capture.reload import check_exact, load_pair

        models = load_pair(
            writer.manifest, target=target, drafter=drafter, offline=offline, placing=placing,
            load=cover_load(path, batch=batch, kv_bytes=kv_bytes, faithful=faithful),
        )  # fmt: skip
        check_exact(models[1], writer.manifest)
        total: Progress | None = None
        grids = [grid] if isinstance(grid, Grid) else list(grid)
        for number, one in enumerate(grids, start=1):
            steps = None if max_steps is None or total is None else max_steps - total.steps_added
            minutes = None if max_minutes is None or total is None else max_minutes - total.seconds / 60.0
            done = cover_with(
                writer, models, one, max_steps=max_steps if total is None else steps,
                max_minutes=max_minutes if total is None else minutes, batch=batch, group=group, kv_bytes=kv_bytes,
                faithful=faithful, report=report,
            )  # fmt: skip
            writer.flush()
            total = done if total is None else total.then(done)
            if total.interrupted:  # the grids that were not looked at are not exact either
                total.pairs += done.pairs // len(one) * sum(map(len, grids[number:]))
                break
        assert total is not None
        return total


def cover_load(path: Path, *, batch: int = 32, kv_bytes: int = 2 << 30, faithful: bool = False) -> Load:
    """Return what the models of a trace have to hold to complete it."""
    from ..capture.reload import live_load
    from ..trace.reader import read_trace

    trace = read_trace(path, verify=False)
    alone = live_load(trace.manifest, trace.request_records())
    return replace(alone, sessions=64) if faithful else replace(alone, batch=batch, kv_bytes=kv_bytes)


def cover_with(
    writer: TraceWriter,
    models: tuple[Any, Any],
    grid: Grid,
    *,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    batch: int = 32,
    group: int = 32,
    kv_bytes: int = 2 << 30,
    faithful: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Do what :func:`cover_trace` does with an open writer and loaded models."""
    from ..capture.cover import BatchRunner, FaithfulRunner, cover
    from ..capture.reload import recorder_of
    from ..capture.vocabulary import keep_vocabulary
    from ..trace.reader import read_trace

    trace = read_trace(writer.path, verify=False)
    if grid.layout.width:
        trace.check_length(grid.layout.width)
    manifest = writer.manifest
    recorder = recorder_of(manifest)
    if faithful:
        runner: Any = FaithfulRunner(*models, manifest.num_draft_tokens, recorder, trace.steps_of)
    else:
        runner = BatchRunner(*models, manifest.num_draft_tokens, recorder, batch=batch, kv_bytes=kv_bytes)
    # Written before the first step is added, so that a killed run cannot leave it untrue.
    added_before = bool((trace.column("steps", "wave") > 0).any())
    pure = faithful and (not added_before or manifest.notes.get("faithful_only") is True)
    if manifest.notes.get("faithful_only") is not pure:
        writer.update_manifest(notes={**manifest.notes, "faithful_only": pure})
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
        build=lambda held: build_graph(held, grid.layout),
    )
    entry = grid_entry(grid, pure)
    if progress.complete and entry not in manifest.grids:
        writer.update_manifest(grids=[*manifest.grids, entry])
    keep_vocabulary(writer, getattr(models[0], "tokenizer", None))  # a target need not have one
    return progress
