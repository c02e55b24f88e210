"""Complete a stored trace for a grid: the walk says what is missing, the model supplies it.

The walk knows no model and the capture knows no walk; here one is passed to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.processes import own_directory
from ..rules.settings import Grid, Schedule
from ..trace.covered import grid_entry
from ..trace.graph import Graph, build_graph
from ..trace.reader import load_manifest
from ..trace.writer import TraceWriter
from ..walk.demand import Demand, demand_of
from ..walk.ladder import demand_of_all, ladder_of

if TYPE_CHECKING:
    from ..capture.cover import Progress
    from ..capture.memory import Load
    from ..capture.reload import Placing
    from ..records import StepRecord, StepTables
    from ..trace.reader import Trace


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
    by_batch: Schedule | None = None,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    placing: Placing | None = None,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Complete a trace directory for a grid, or several; see :func:`asdsim.capture.cover.cover`.

    With ``by_batch`` for every walk that takes any draft length of the table at any step, whatever batches a request
    meets; that takes in the walks at each one of these lengths.

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
                faithful=faithful, by_batch=by_batch, report=report,
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
    by_batch: Schedule | None = None,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Do what :func:`cover_trace` does with an open writer and loaded models."""
    from ..capture.vocabulary import keep_vocabulary
    from ..trace.reader import read_trace

    trace = read_trace(writer.path, verify=False)
    added_before = bool((trace.column("steps", "wave") > 0).any())
    pure = note_faithful(writer, faithful, added_before)
    progress = cover_requests(
        trace, models, grid, writer.add_steps, max_steps=max_steps, max_minutes=max_minutes, batch=batch, group=group,
        kv_bytes=kv_bytes, faithful=faithful, by_batch=by_batch, report=report,
    )  # fmt: skip
    if progress.complete:
        note_covered(writer, at_each_length(grid, by_batch), pure)
    keep_vocabulary(writer, getattr(models[0], "tokenizer", None))  # a target need not have one
    return progress


def at_each_length(grid: Grid, by_batch: Schedule | None) -> list[Grid]:
    """Return the grids that are covered with one: itself, or with a table one at each draft length of the table."""
    if by_batch is None:
        return [grid]
    return [replace(grid, layout=replace(grid.layout, width=length)) for length in by_batch.lengths if length]


def note_faithful(writer: TraceWriter, faithful: bool, added_before: bool) -> bool:
    """Store whether all steps that were added are faithful ones, and return it.

    Called before the first step is added, so that a killed run cannot leave it untrue.
    """
    notes = writer.manifest.notes
    pure = faithful and (not added_before or notes.get("faithful_only") is True)
    if notes.get("faithful_only") is not pure:
        writer.update_manifest(notes={**notes, "faithful_only": pure})
    return pure


def note_covered(writer: TraceWriter, grids: Sequence[Grid], pure: bool) -> None:
    """Store that a trace is complete for some grids."""
    entries = [grid_entry(grid, pure) for grid in grids]
    fresh = [entry for n, entry in enumerate(entries) if entry not in [*writer.manifest.grids, *entries[:n]]]
    if fresh:
        writer.update_manifest(grids=[*writer.manifest.grids, *fresh])


def cover_requests(
    trace: Trace,
    models: tuple[Any, Any],
    grid: Grid,
    save: Callable[[str, list[StepRecord]], None],
    *,
    batch: int,
    group: int,
    kv_bytes: int,
    faithful: bool,
    by_batch: Schedule | None = None,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Complete the requests of a trace in memory; ``save`` is given what is new.

    Steps of a group depend on nothing outside the group. See :func:`asdsim.capture.cover.cover`.
    """
    from ..capture.cover import BatchRunner, FaithfulRunner, cover
    from ..capture.reload import recorder_of

    lengths = by_batch.lengths if by_batch else (grid.layout.width,)
    for length in lengths:
        if length > 0:
            trace.check_length(length)
    manifest = trace.manifest
    recorder = recorder_of(manifest)
    if faithful:
        runner: Any = FaithfulRunner(*models, manifest.num_draft_tokens, recorder, trace.steps_of)
    else:
        runner = BatchRunner(*models, manifest.num_draft_tokens, recorder, batch=batch, kv_bytes=kv_bytes)

    def demand(graph: Any) -> Demand:
        return demand_of_all(graph, grid) if by_batch else demand_of(graph, [grid])

    def build(held: StepTables) -> Graph:
        return ladder_of(held, grid.layout, lengths) if by_batch else build_graph(held, grid.layout)

    return cover(
        [(record, trace.steps_of(record.request_id)) for record in trace.request_records()],
        demand,
        runner,
        save,
        settings=len(grid),
        max_steps=max_steps,
        max_minutes=max_minutes,
        group=group,
        report=report,
        build=build,
        between=runner.forget,
    )
