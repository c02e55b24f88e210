"""Where the walk meets the model: complete a stored trace, and hold it against live decoding.

The walk knows no model and the capture knows no walk; here one is handed to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import UsageError
from .policy import Grid, reading, rule_grids
from .trace.graph import build_graph
from .trace.reader import Trace, load_manifest
from .trace.writer import TraceWriter
from .walk.demand import demand_of

if TYPE_CHECKING:
    from .capture.cover import Progress
    from .capture.verify import Difference


def grid_entry(grid: Grid, faithful: bool) -> dict[str, Any]:
    """Return how a manifest names a covered grid."""
    if grid.layout.rule != "asd":
        names = grid.params[0] if grid.params else {}
        params = {
            name: [
                "inf" if value == float("inf") else value for value in dict.fromkeys(row[name] for row in grid.params)
            ]
            for name in names
        }
        return {"rule": grid.layout.rule, "params": params, "faithful": faithful}
    base, _, scope = grid.semantics.partition(":")
    varied: dict[str, Any] = {}
    if grid.layout != reading(base)[1] or scope:
        varied = {"regret": grid.layout.regret, "value": grid.layout.value, "ledger": scope or "request"}
    return {
        "rule": "asd",
        "semantics": base,
        **varied,
        **{axis: ["inf" if value == float("inf") else value for value in values] for axis, values in grid.axes.items()},
        "faithful": faithful,
    }


def covered_grids(grids: list[dict[str, Any]]) -> list[Grid]:
    """Return the grids that a manifest says are covered."""

    # JSON has no infinity: the manifest writes "inf", which float() reads.
    def axis(entry: dict[str, Any], name: str) -> list[float]:
        return [float(value) for value in entry[name]]

    made: list[Grid] = []
    for entry in grids:
        if entry["rule"] != "asd":
            made += rule_grids(entry["rule"], entry["params"])
        else:
            varied = {name: entry[name] for name in ("regret", "value", "ledger") if name in entry}
            B, g, M = (axis(entry, name) for name in ("B", "g", "M"))
            made.append(Grid.product(B, g, M, entry["semantics"], **varied))
    return made


def covered_settings(trace: Trace) -> Grid:
    """Return every setting of the covered grids of ASD once: those of the first reading that is covered.

    Raises
    ------
    UsageError
        If none is covered.
    """
    grids = [grid for grid in covered_grids(trace.manifest.grids) if grid.layout.rule == "asd"]
    grids = [grid for grid in grids if (grid.semantics, grid.layout) == (grids[0].semantics, grids[0].layout)]
    if not grids:
        raise UsageError(
            "the trace is not covered for any grid", where=str(trace.path), fix="give --B --g --M, or run asdsim cover"
        )
    return Grid.of(list(dict.fromkeys(grid.policy(n) for grid in grids for n in range(len(grid)))))


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
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Complete a trace directory for a grid, or several; see :func:`asdsim.capture.cover.cover`.

    Raises
    ------
    TraceError
        If the trace cannot be trusted.
    CaptureError
        If the models at hand are not those of the trace, or their steps are no functions of the prefix.
    """
    load_manifest(path)  # refused before models are loaded
    with TraceWriter.append(path) as writer:
        from .capture.reload import check_exact, load_pair

        models = load_pair(writer.manifest, target=target, drafter=drafter, offline=offline)
        check_exact(models[1], writer.manifest)
        total: Progress | None = None
        for one in [grid] if isinstance(grid, Grid) else grid:
            steps = None if max_steps is None or total is None else max_steps - total.steps_added
            minutes = None if max_minutes is None or total is None else max_minutes - total.seconds / 60.0
            done = cover_with(
                writer, models, one, max_steps=max_steps if total is None else steps,
                max_minutes=max_minutes if total is None else minutes, batch=batch, group=group, kv_bytes=kv_bytes,
                faithful=faithful, report=report,
            )  # fmt: skip
            writer.flush()
            total = done if total is None else total.then(done)
            if total.interrupted:
                break
        assert total is not None
        return total


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
    # Said before the first step is added, so that a run that is killed cannot leave it untrue.
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
    return progress


@dataclass
class Verification:
    """What :func:`verify_trace` found.

    Attributes
    ----------
    pairs : int
        (request, setting) pairs asked for.
    not_captured : int
        Pairs whose walk leaves the trace, so that there is nothing to compare.
    identical : int
        Pairs whose live tokens equal the walk's.
    differences : list of Difference
        The others; ``near_tie`` tells which are explained by rounding.
    threshold : float
        Margin under which a difference counts as a near-tie, in logits.
    """

    pairs: int = 0
    not_captured: int = 0
    identical: int = 0
    differences: list[Difference] = field(default_factory=list)
    threshold: float = 0.0

    @property
    def real(self) -> list[Difference]:
        """Differences that no near-tie explains."""
        return [one for one in self.differences if not one.near_tie]


def verify_trace(
    path: Path,
    grids: list[Grid] | None = None,
    *,
    sample: int | None = None,
    seed: int = 0,
    near_tie: float | None = None,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    models: tuple[Any, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Decode live under the rule and compare with the walk, token for token.

    Parameters
    ----------
    path : Path
        Trace directory.
    grids : list of Grid, optional
        Settings; by default the grids that the manifest says are covered.
    sample : int, optional
        Draw so many (request, setting) pairs by ``seed`` instead of all.
    near_tie : float, optional
        Threshold in logits; by default :data:`asdsim.capture.verify.NEAR_TIE` of the trace's logits dtype.
    target, drafter, offline
        See :func:`asdsim.capture.reload.load_pair`.
    models : (Target, Drafter), optional
        At hand already.
    progress : callable, optional
        Called with (pairs done, pairs in all).

    Raises
    ------
    UsageError
        If no grid is given and none is covered.
    """
    from .api import load
    from .trace.graph import edge_tokens_of
    from .walk.path import path_of

    trace = load(path)
    chosen = grids if grids is not None else covered_grids(trace.manifest.grids) or [covered_settings(trace)]
    graphs = {layout: build_graph(trace, layout) for layout in {grid.layout for grid in chosen}}
    records = trace.request_records()
    policies = list(dict.fromkeys(grid.policy(n) for grid in chosen for n in range(len(grid))))
    pairs = [(r, policy) for policy in policies for r in range(len(records))]
    if sample is not None and sample < len(pairs):
        picks = np.random.default_rng(seed).choice(len(pairs), sample, replace=False)
        pairs = [pairs[n] for n in sorted(picks.tolist())]
    from .capture.reload import load_pair
    from .capture.verify import NEAR_TIE, Case, verify

    at_hand = models or load_pair(trace.manifest, target=target, drafter=drafter, offline=offline)
    found = Verification(pairs=len(pairs), threshold=NEAR_TIE.get(trace.manifest.logits_dtype, 1e-3))
    if near_tie is not None:
        found.threshold = near_tie
    for done, (r, policy) in enumerate(pairs, start=1):
        graph = graphs[policy.layout]
        visits, exact = path_of(graph, policy, r)
        if not exact:
            found.not_captured += 1
        else:
            steps = {step.step_id: step for step in trace.steps_of(records[r].request_id)}
            ids = trace.column("steps", "step_id")
            case = Case(
                records[r], policy, edge_tokens_of(trace, graph, visits[-1].edge) if visits else [],
                [(steps[int(ids[visit.step])], visit.accepted, visit.closeness) for visit in visits],
            )  # fmt: skip
            for difference in verify(*at_hand, trace.manifest.num_draft_tokens, [case], found.threshold):
                if difference is None:
                    found.identical += 1
                else:
                    found.differences.append(difference)
        if progress:
            progress(done, len(pairs))
    return found
