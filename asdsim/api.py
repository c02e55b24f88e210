"""Replay a trace under a grid of settings, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .estimate import DRAWS, pooled_graph
from .metrics import COLUMNS
from .outputs import Outputs, outputs_of
from .policy import STRICT, Grid
from .trace.graph import Graph, build_graph, edge_tokens_of
from .trace.reader import Trace, read_trace
from .trace.records import FORBIDDEN_LOGIT
from .walk import reference
from .walk import request as columns
from .walk.path import path_of
from .walk.sweep import Walks, choose_device, off_trace_code, sweep, walk_grid

if TYPE_CHECKING:
    import polars as pl

Axis = float | str | Iterable[float]


def load(path: str | Path) -> Trace:
    """Read and validate a trace directory.

    Raises
    ------
    TraceError
        If anything about it cannot be trusted: which file, which row, what to do.
    """
    return read_trace(Path(path))


@dataclass
class Result:
    """Figures of a replay, one row per setting.

    Attributes
    ----------
    trace : Trace
        What was replayed.
    graph : Graph
        Its layout.
    grid : Grid
        The settings, in the order of the rows.
    off_trace : str
        What happened at prefixes that were not captured.
    device : str
        Where the walk ran.
    columns : dict of ndarray
        One entry per figure; see :data:`asdsim.metrics.COLUMNS`.
    """

    trace: Trace
    graph: Graph
    grid: Grid
    off_trace: str
    device: str
    columns: dict[str, npt.NDArray[Any]]
    rule: str = "asd"
    _walker: Callable[[Grid], Walks] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.grid)

    def frame(self) -> pl.DataFrame:
        """Return the rows as a polars data frame, with the columns of :data:`asdsim.metrics.COLUMNS` in order."""
        import polars as pl

        histogram = self.columns["acceptance_histogram"]
        data: dict[str, Any] = {
            "rule": pl.Series([self.rule] * len(self), dtype=pl.String),
            "semantics": pl.Series([self.grid.semantics] * len(self), dtype=pl.String),
            "B": self.grid.budget,
            "g": self.grid.gate,
            "M": self.grid.cap,
            "off_trace": pl.Series([self.off_trace] * len(self), dtype=pl.String),
            **{name: values for name, values in self.columns.items() if name != "acceptance_histogram"},
            "acceptance_histogram": pl.Series(histogram.tolist(), dtype=pl.List(pl.Int64)),
        }
        frame = pl.DataFrame({name: data[name] for name in COLUMNS})
        floats = [name for name, kind in frame.schema.items() if kind == pl.Float64]
        return frame.with_columns(pl.col(name).fill_nan(None) for name in floats)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as plain dictionaries, ready for JSON (an infinite B, g or M is the string ``"inf"``)."""
        rows = self.frame().to_dicts()
        for row in rows:
            for name in ("B", "g", "M"):
                if np.isinf(row[name]):
                    row[name] = "inf"
        return rows

    def pareto(self, gain: str = "mean_acceptance_length", risk: str = "regret_spent_mean") -> pl.DataFrame:
        """Return the settings that no other one beats: more ``gain`` for no more ``risk``, sorted by risk.

        Rows whose ``exact_share`` is below 1 compete only where no row is exact, since they stand on other requests.
        """
        import polars as pl

        for name in (gain, risk):
            if name not in COLUMNS or name == "acceptance_histogram":
                raise UsageError(f"no figure is called {name!r}", fix=f"choose from: {', '.join(COLUMNS)}")
        frame = self.frame()
        if (frame["exact_share"] == 1.0).any():
            frame = frame.filter(pl.col("exact_share") == 1.0)
        frame = frame.drop_nulls([gain, risk]).sort([risk, gain], descending=[False, True], maintain_order=True)
        return frame.filter(pl.col(gain) > pl.col(gain).cum_max().shift(1).fill_null(-np.inf))

    def walks(self) -> Walks:
        """Return every single walk (setting, request): counts, ledger, last edge. Memory grows with both."""
        return self._all_walks

    @cached_property
    def _all_walks(self) -> Walks:
        assert self._walker is not None
        return self._walker(self.grid)

    def tokens(self, setting: int, request: int) -> list[int]:
        """Return the generated tokens of one request under one setting.

        Raises
        ------
        UsageError
            If that walk left the trace, so that its output is not known.
        """
        walks = self._all_walks
        if not walks.exact[setting, request]:
            name = self.graph.request_ids[request]
            raise UsageError(
                f"the output of request {name} under {self.grid.policy(setting)} is not known",
                fix="its walk meets a prefix that was not captured: run asdsim cover for this setting",
            )
        edge = int(walks.edge[setting, request])
        return [] if edge < 0 else edge_tokens_of(self.trace, self.graph, edge)

    def outputs(self) -> Outputs:
        """Return the distinct outputs of each request, and which one every setting got.

        Raises
        ------
        UsageError
            On a replay by the oracle, which knows no edges.
        """
        if self.device == "reference":
            raise UsageError("the reference walk names no outputs", fix="replay on --device cpu or cuda")
        assert self._walker is not None
        strict = self._walker(Grid.of([STRICT.with_semantics(self.grid.semantics)]))
        return outputs_of(self.trace, self.graph, self.grid, self._all_walks, strict)

    def margin(self, setting: int, request: int) -> float:
        """Return how close one walk passed to a near-tie, in logits.

        The smaller of: the target's smallest gap between its two best tokens over the rows that the walk relied on, and
        the smallest distance of a regret to where the rule's decision would flip. Rounding that moves logits by less
        cannot have changed this walk (the drafter's own near-ties aside, which a trace does not record).
        """
        visits, _ = path_of(self.graph, self.grid.policy(setting), request)
        gaps = [min(visit.closeness, float(self.graph.edge_margin[visit.edge])) for visit in visits]
        return min(gaps, default=float("inf"))

    def write(self, path: str | Path, provenance: dict[str, Any] | None = None) -> None:
        """Write the rows to Parquet, whole or not at all; ``provenance`` goes into the file's metadata."""
        from .trace.writer import write_table

        write_table(self.frame().to_arrow(), Path(path), {"asdsim": {**self.provenance(), **(provenance or {})}})

    def provenance(self) -> dict[str, Any]:
        """Return what the rows were made from."""
        from . import __version__

        return {
            "asdsim": __version__,
            "trace": str(self.trace.path),
            "manifest_checksum": self.trace.manifest.checksum,
            "off_trace": self.off_trace,
            "semantics": self.grid.semantics,
            "settings": len(self),
            "device": self.device,
        }

    def plot(self, **options: Any) -> Any:
        """Return the heat map of acceptance length over B and g; see :mod:`asdsim.plots`."""
        from . import plots

        return plots.acceptance_heatmap(self.frame(), **options)

    def _repr_html_(self) -> str:
        return str(self.frame()._repr_html_())


def replay(
    trace: Trace | str | Path,
    *,
    B: Axis,
    g: Axis,
    M: Axis,
    semantics: str = "paper",
    off_trace: str = "stop",
    device: str = "auto",
    threads: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Walk a trace under every combination of B, g and M.

    Parameters
    ----------
    trace : Trace or path
        A trace, or its directory.
    B, g, M : float, list of float, or str
        Axes of the grid; text as on the command line: ``"0,2,4"``, ``"0:16:.5"``, ``"1,2,inf"``.
    semantics : str
        Which reading of the rule.
    off_trace : {"stop", "aligned", "recorded", "pooled"}
        At a prefix that was not captured: drop the request from that setting (and from its strict baseline), go on at
        the captured step nearest to the position reached, go on with the next captured step, or go on with steps drawn
        as :mod:`asdsim.estimate` says (counts are then averages over draws, rounded). The last three are estimates;
        ``exact_share`` tells for how many requests nothing was estimated.
    device : {"auto", "cpu", "cuda", "reference", "python"}
        All give equal results; ``reference`` is the slow oracle, ``python`` the kernels' sources uncompiled.
    threads : int
        CPU threads; 0 takes all.
    progress : callable, optional
        Called with the number of settings done.

    Returns
    -------
    Result

    Raises
    ------
    UsageError
        On a setting, mode or device that cannot be meant.
    TraceError
        If the trace cannot be trusted.
    """
    grid = Grid.product(B, g, M, semantics)
    if off_trace != "pooled":
        off_trace_code(off_trace)
    chosen = choose_device(device)
    source = trace if isinstance(trace, Trace) else load(trace)
    graph = build_graph(source)

    def walk(part: Grid) -> Walks:
        mode = "stop" if off_trace == "pooled" else off_trace
        if chosen == "reference":
            return reference_walks(source, graph, part, mode)
        return walk_grid(graph, part, off_trace=mode, device=chosen, threads=threads)

    if off_trace == "pooled":
        figures = _pooled_figures(graph, grid, chosen, threads, progress)
    else:
        figures = sweep(walk, grid, graph.num_requests, off_trace=off_trace, progress=progress)
    return Result(source, graph, grid, off_trace, chosen, figures, _walker=walk)


def _pooled_figures(
    graph: Graph, grid: Grid, device: str, threads: int, progress: Callable[[int], None] | None
) -> dict[str, npt.NDArray[Any]]:
    """Average the figures of many random continuations; the exact share is that of the graph itself."""
    if device == "reference":
        raise UsageError("the reference walk has no pooled estimate", fix="use --device cpu or cuda")
    pooled = pooled_graph(graph)

    def drawn(part: Grid) -> Walks:
        return walk_grid(pooled, part, off_trace="aligned", device=device, threads=threads)

    def true(part: Grid) -> Walks:
        return walk_grid(graph, part, device=device, threads=threads)

    figures = sweep(drawn, grid, pooled.num_requests, off_trace="aligned", progress=progress)
    exact = sweep(true, grid, graph.num_requests, off_trace="stop")
    for name, values in figures.items():
        if values.dtype.kind in "iu":
            figures[name] = np.rint(values / DRAWS).astype(np.int64)
    return {**figures, "exact_share": exact["exact_share"], "requests": np.full(len(grid), graph.num_requests)}


def reference_blocks(trace: Trace) -> Iterator[dict[tuple[int, ...], reference.Block]]:
    """Yield, request by request, the steps as the oracle takes them: by the tokens generated before each."""
    for request in trace.request_records():
        blocks: dict[tuple[int, ...], reference.Block] = {}
        by_id: dict[int, reference.Block] = {}
        for step in trace.steps_of(request.request_id):
            prefix: tuple[int, ...] = ()
            if step.parent_step_id >= 0:
                parent, taken = by_id[step.parent_step_id], step.parent_accepted
                prefix = (*parent.prefix, *parent.draft[:taken], parent.choice[taken])
            best = step.top_logits[:, 0].astype(np.float64)
            regret = best[: step.num_draft_tokens] - step.draft_logits.astype(np.float64)
            regret[step.draft_logits == FORBIDDEN_LOGIT] = np.inf
            block = reference.Block(
                prefix, step.draft_ids.tolist(), step.argmax_ids.tolist(), regret.tolist(), captured=step.wave == 0
            )
            by_id[step.step_id] = blocks[prefix] = block
        yield blocks


def reference_walks(trace: Trace, graph: Graph, grid: Grid, off_trace: str) -> Walks:
    """Walk with the oracle; ``edge`` is found from the tokens, and only for exact walks (-1 elsewhere)."""
    number, requests = len(grid), graph.num_requests
    counts = np.zeros((number, requests, columns.NUM_COUNTS), np.int32)
    spent = np.zeros((number, requests))
    histogram = np.zeros((number, graph.max_draft + 1), np.int64)
    reasons = {"gate": columns.BY_GATE, "budget": columns.BY_BUDGET, "cap": columns.BY_CAP}
    for one, (record, blocks) in enumerate(zip(trace.request_records(), reference_blocks(trace), strict=True)):
        for setting in range(number):
            policy = grid.policy(setting)
            out = reference.walk(
                blocks, B=policy.budget, g=policy.gate, M=policy.cap, max_new_tokens=record.max_new_tokens,
                eos=record.eos_ids if record.stop == "natural" else (), off_trace=off_trace,
            )  # fmt: skip
            row = counts[setting, one]
            row[columns.STEPS], row[columns.DRAFTED] = len(out.accepted), sum(out.drafted)
            row[columns.ACCEPTED], row[columns.TOKENS] = sum(out.accepted), len(out.tokens)
            row[columns.RELAXED], row[columns.LEFT] = out.relaxed, out.left
            for reason in out.refused_by:
                row[reasons[reason]] += 1
            spent[setting, one] = out.spent
            if off_trace != "stop" or out.left == 0:
                histogram[setting] += np.bincount(out.accepted, minlength=graph.max_draft + 1)
    return Walks(counts, spent, np.full((number, requests), -1, np.int64), histogram)
