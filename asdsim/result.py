"""Replay a trace under a grid of settings, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .evaluate.figures import COLUMNS, baseline_of
from .evaluate.outputs import Outputs, outputs_of
from .evaluate.strips import Walk, html_of, relaxed_frame, request_row, walk_of
from .files import plain, to_path
from .oracle import walk as reference
from .oracle.rules import ALLOWS
from .provenance import trace_source
from .records import StepRecord
from .rules.scoring import DEFAULT, Layout, regrets_of, uniform
from .rules.settings import DEFAULT_AXES, Grid, check_value, rule_grids
from .trace import groups
from .trace.covered import covered_like
from .trace.fits import MEMORY
from .trace.graph import Graph, Graphs, build_graph, whole_graph
from .trace.groups import StreamedTrace
from .trace.reader import Trace, load_manifest, read_trace
from .trace.store import graph_of
from .trace.stored import Source
from .trace.tokens import edge_tokens, prefix_tokens
from .walk import request as columns
from .walk.estimate import COPIES, DRAWS, drawn_walks
from .walk.off_trace import OFF_TRACE, WALKED, off_trace_code, off_trace_mode
from .walk.path import visits
from .walk.sweep import Walks, choose_device, sweep, sweep_graph, walk_grid

if TYPE_CHECKING:
    import polars as pl

    from .evaluate.quality import Evaluator, Quality

Axis = float | str | Iterable[float]


def load(path: str | Path) -> Trace:
    """Read and validate a trace directory, whole.

    Raises
    ------
    TraceError
        If anything about it cannot be trusted: which file, which row, what to do.
    """
    return read_trace(path)


def open_trace(
    path: str | Path, *, memory: float = MEMORY, keep: bool = True, verify: bool = True
) -> Trace | StreamedTrace:
    """Read a trace: whole, or group by group where it holds more positions than a group does.

    Parameters
    ----------
    path : path
        The directory.
    memory : float
        Bytes that a command should take on a trace that is read group by group.
    keep : bool
        Whether the graph of such a trace is kept beside it for the next time; see :mod:`asdsim.trace.store`.
    verify : bool
        False skips the SHA-256 of the shards; everything else is still checked.

    Raises
    ------
    TraceError
        If it cannot be trusted; on a trace read group by group, when the group with the fault is reached.
    UsageError
        If ``memory`` is too little.
    """
    place = to_path(path)
    positions = sum(shard.rows for shard in load_manifest(place)[0].shards_of("positions"))
    if positions <= groups.GROUP_ROWS:
        return read_trace(place, verify=verify)
    return StreamedTrace(place, memory=memory, keep=keep, verify=verify)


@dataclass
class Result:
    """Figures of a replay, one row per setting.

    Attributes
    ----------
    trace : Trace or StreamedTrace
        What was replayed.
    graph : Graph or GraphStore
        Its layout. Single walks and outputs need both whole: they read a streamed trace into memory.
    grid : Grid
        The settings, in the order of the rows.
    off_trace : str
        What happened at prefixes that were not captured.
    device : str
        Where the walk ran.
    columns : dict of ndarray
        One entry per figure; see :data:`asdsim.evaluate.figures.COLUMNS`.
    below : float64 (n,), optional
        Of :func:`replay_breakpoints`: a row holds from its B up to below this one (the last: up to where was searched);
        column ``B_to`` of the frame.
    """

    trace: Trace | StreamedTrace
    graph: Graphs
    grid: Grid
    off_trace: str
    device: str
    columns: dict[str, npt.NDArray[Any]]
    below: npt.NDArray[np.float64] | None = None
    _walker: Callable[[Grid], Walks] | None = field(default=None, repr=False)
    _evaluator: Callable[..., Evaluator] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.grid)

    @property
    def has_intervals(self) -> bool:
        """Whether there is a walk for each request, known with its last edge: not so for pooled and the oracle."""
        return OFF_TRACE[self.off_trace].has_walks and self.device != "reference"

    def frame(self) -> pl.DataFrame:
        """Return the rows as a polars frame, with the columns of :data:`asdsim.evaluate.figures.COLUMNS` in order."""
        import polars as pl

        histogram = self.columns["acceptance_histogram"]
        asd = self.grid.layout.rule == "asd"
        none = pl.Series([None] * len(self), dtype=pl.Float64)
        if self.grid.params:
            parameters = [self.grid.parameters(n) for n in range(len(self))]
        else:
            parameters = [self.grid.parameters(0)] * len(self)  # how ASD is varied is the same for all
        data: dict[str, Any] = {
            "rule": pl.Series([self.grid.layout.rule] * len(self), dtype=pl.String),
            "semantics": pl.Series([self.grid.semantics if asd else None] * len(self), dtype=pl.String),
            "B": self.grid.budget if asd else none,
            "g": self.grid.gate if asd else none,
            "M": self.grid.cap if asd else none,
            "parameters": pl.Series(parameters, dtype=pl.String),
            "off_trace": pl.Series([self.off_trace] * len(self), dtype=pl.String),
            "baseline": pl.Series([baseline_of(self.grid.semantics)] * len(self), dtype=pl.String),
            **{name: values for name, values in self.columns.items() if name != "acceptance_histogram"},
            "acceptance_histogram": pl.Series(histogram).arr.to_list(),
        }
        frame = pl.DataFrame({name: data[name] for name in COLUMNS})
        if self.below is not None:
            frame.insert_column(frame.columns.index("B") + 1, pl.Series("B_to", self.below))
        floats = [name for name, kind in frame.schema.items() if kind == pl.Float64]
        return frame.with_columns(pl.col(name).fill_nan(None) for name in floats)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as plain dictionaries, ready for JSON (an infinite B, g or M is the string ``"inf"``).

        ``parameters`` is a dictionary here.
        """
        rows = self.frame().to_dicts()
        for n, row in enumerate(rows):
            if self.grid.params:
                row["parameters"] = dict(self.grid.params[n])
            else:
                row["parameters"] = dict(item.split("=") for item in row["parameters"].split())
        return cast("list[dict[str, Any]]", plain(rows))

    def pareto(self, gain: str = "mean_acceptance_length", risk: str = "regret_spent_mean") -> pl.DataFrame:
        """Return the settings that no other one beats: more ``gain`` for no more ``risk``, sorted by risk.

        Where some row is exact only exact rows compete. Estimates compete with each other where none is; means over
        the requests that stayed on the trace never do, since each row has its own.

        Raises
        ------
        UsageError
            On an unknown figure; where walks stop off the trace and no row is exact.
        """
        import polars as pl

        for name in (gain, risk):
            if name not in COLUMNS or name == "acceptance_histogram":
                raise UsageError(f"no figure is called {name!r}", fix=f"choose from: {', '.join(COLUMNS)}")
        frame = self.frame()
        if frame["exact"].any() or not OFF_TRACE[self.off_trace].estimate:
            frame = frame.filter("exact")
        if frame.is_empty():
            raise UsageError(
                "no setting is exact, and means over the requests that stayed on the trace cannot be compared",
                where=str(self.trace.path),
                fix="run asdsim cover for these settings, or replay with off_trace='pooled'",
            )
        frame = frame.drop_nulls([gain, risk]).sort([risk, gain], descending=[False, True], maintain_order=True)
        return frame.filter(pl.col(gain) > pl.col(gain).cum_max().shift(1).fill_null(-np.inf))

    @cached_property
    def whole(self) -> tuple[Trace, Graph]:
        """Trace and graph in memory; a streamed trace is read for it."""
        trace = self.trace if isinstance(self.trace, Trace) else load(self.trace.path)
        return trace, self.graph if isinstance(self.graph, Graph) else build_graph(trace, self.grid.layout)

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
            If that walk left the trace, so that its output is not known; on a replay by the oracle; on a setting or
            request that is not there.
        """
        self._need_edges()
        self._check(setting, request)
        walks = self._all_walks
        if not walks.exact[setting, request]:
            name = self.graph.request_ids[request]
            raise UsageError(
                f"the output of request {name} under {self.grid.policy(setting)} is not known",
                fix="its walk meets a prefix that was not captured: run asdsim cover for this setting",
            )
        edge = int(walks.edge[setting, request])
        return [] if edge < 0 else edge_tokens(*self.whole, edge)

    def walk(self, setting: int, request: int | str) -> Walk:
        """Return one walk token by token: what was kept, what each block paid, and what ended it.

        Parameters
        ----------
        setting : int
            Row of the frame.
        request : int or str
            Row of the request, or its id.

        Raises
        ------
        UsageError
            If there is no such setting or request; on pooled estimates, which have no single walk.
        """
        if not 0 <= setting < len(self):
            raise UsageError(f"no setting {setting}", fix=f"rows go from 0 to {len(self) - 1}")
        if self.off_trace == "pooled":
            raise UsageError("pooled estimates have no single walk", fix="replay with --off-trace stop or aligned")
        row = request_row(self.graph.request_ids, request)
        return walk_of(*self.whole, self.grid.policy(setting), row, self.off_trace)

    def text(self, setting: int, request: int | str, decode: Callable[[list[int]], str] | None = None) -> str:
        """Return the output of one request under one setting, as text.

        Parameters
        ----------
        setting, request
            As for :meth:`walk`.
        decode : callable, optional
            Turns token ids into text; by default the vocabulary that the trace holds.

        Raises
        ------
        UsageError
            If the output is not known, or there is nothing to read it with.
        """
        row = request_row(self.graph.request_ids, request)
        return (decode or self._decode())(self.tokens(setting, row))

    def _decode(self) -> Callable[[list[int]], str]:
        if self.trace.vocabulary is None:
            raise UsageError(
                "the trace lacks the text of its tokens: an older release wrote it", where=str(self.trace.path),
                fix="pass a tokenizer's decode",
            )  # fmt: skip
        return self.trace.vocabulary.text

    def relaxed(self, setting: int) -> pl.DataFrame:
        """Return every relaxed token of one setting; see :func:`asdsim.evaluate.strips.relaxed_frame`."""
        text = None if self.trace.vocabulary is None else self.trace.vocabulary.piece
        return relaxed_frame([self.walk(setting, r) for r in range(self.graph.num_requests)], text)

    def outputs(self) -> Outputs:
        """Return the distinct outputs of each request, and which one every setting got.

        Raises
        ------
        UsageError
            On a replay by the oracle, which knows no edges.
        """
        self._need_edges()
        assert self._walker is not None
        outputs = outputs_of(*self.whole, self.grid, self._all_walks, self._walker(self.grid.strict))
        outputs.decode = None if self.trace.vocabulary is None else self.trace.vocabulary.text
        return outputs

    def _need_edges(self) -> None:
        if self.device == "reference":
            raise UsageError("the reference walk returns no outputs", fix="replay on --device cpu or cuda")

    def _check(self, setting: int, request: int) -> None:
        for noun, number, size in (("setting", setting, len(self)), ("request", request, self.graph.num_requests)):
            if not 0 <= number < size:
                fix = f"{noun}s are numbered 0 to {size - 1}" if size else f"there is no {noun}"
                raise UsageError(f"no {noun} {number}", where=str(self.trace.path), fix=fix)

    def margin(self, setting: int, request: int) -> float:
        """Return how close one walk passed to a near-tie, in logits (see below for regret as probability).

        The smaller of: the target's smallest gap between its two best tokens over the rows that the walk relied on, and
        the smallest distance of a regret to where the rule's decision would flip. Rounding that moves logits by less
        cannot have changed this walk (the drafter's own near-ties aside, which a trace does not record).

        Under ``regret="probability"`` the second distance is one of probabilities, p(y) - p(x) from 0 to 1, and is
        compared with the first as a number; so is a score of another rule than ASD.

        Raises
        ------
        UsageError
            If the walk left the trace; on a setting or request that is not there.
        """
        self._check(setting, request)
        steps, exact = visits(self.whole[1], self.grid.policy(setting), request)
        if not exact:
            raise UsageError(
                f"the walk of request {self.graph.request_ids[request]} leaves the trace, so its margin is not known",
                fix="run asdsim cover for this setting",
            )
        gaps = [min(visit.closeness, float(self.whole[1].edge_margin[visit.edge])) for visit in steps]
        return min(gaps, default=float("inf"))

    def quality(self, **options: Any) -> Quality:
        """Return every figure of every setting with a 95 % interval, paired by request.

        Parameters
        ----------
        **options
            ``cost``, ``scorer``, ``resamples`` and ``seed`` of :class:`asdsim.evaluate.quality.Evaluator`, for example
            ``cost=asdsim.evaluate.cost_spec.cost_of_trace(trace)``; and ``figures`` of its ``evaluate``.

        Raises
        ------
        UsageError
            On a replay that has no single walk for each request: pooled estimates, or the oracle.
        """
        if not self.has_intervals:
            raise UsageError("these figures have no interval of this kind", fix="replay on --device cpu, not pooled")
        figures = options.pop("figures", None)
        return self.evaluator(**options).evaluate(self.grid, figures=figures, off_trace=self.off_trace)

    def evaluator(self, **options: Any) -> Evaluator:
        """Return what gives figures with intervals on this trace, with the layout at hand."""
        from .evaluate.quality import Evaluator

        if self._evaluator is not None:
            return self._evaluator(device=self.device, **options)
        return Evaluator(self.trace, device=self.device, graphs={self.grid.layout: self.graph}, **options)

    def write(self, path: str | Path, provenance: dict[str, Any] | None = None) -> None:
        """Write the rows to Parquet, whole or not at all; ``provenance`` goes into the file's metadata.

        A name in ``.csv`` gives CSV, which holds no provenance; see :func:`asdsim.trace.writer.write_frame`.
        """
        from .trace.writer import write_frame

        write_frame(self.frame(), to_path(path), {"asdsim": {**self.provenance(), **(provenance or {})}})

    def provenance(self) -> dict[str, Any]:
        """Return what the rows were made from."""
        return {
            **trace_source(self.trace),
            "subject": self.trace.subject,
            "off_trace": self.off_trace,
            "rule": self.grid.layout.rule,
            "semantics": self.grid.semantics,
            "ledger": self.grid.ledger,
            "settings": len(self),
            "device": self.device,
        }

    def plot(self, **options: Any) -> Any:
        """Return the heat map of acceptance length over B and g; see :mod:`asdsim.plots.heatmap`."""
        from .plots.heatmap import acceptance_heatmap

        return acceptance_heatmap(self.frame(), **options)

    def __repr__(self) -> str:
        exact = int(self.columns["exact"].sum())
        return (
            f"Result({len(self)} settings of {self.grid.layout.rule} on {self.graph.num_requests} requests of "
            f"{self.trace.path}, {exact} exact, off_trace={self.off_trace!r})"
        )

    def _repr_html_(self) -> str:
        """Show the table and, where the trace holds text, the first steps under the longest exact setting."""
        table = str(self.frame()._repr_html_())
        length = np.where(self.columns["exact_share"] == 1.0, self.columns["mean_acceptance_length"], np.nan)
        if self.trace.vocabulary is None or self.off_trace == "pooled" or np.isnan(length).all():
            return table
        return table + html_of(self.walk(int(np.nanargmax(length)), 0), self.trace.vocabulary.piece)


def replay(
    trace: Trace | StreamedTrace | str | Path,
    *,
    B: Axis | None = None,
    g: Axis | None = None,
    M: Axis | None = None,
    rule: str = "asd",
    semantics: str = "paper",
    regret: str = "logit",
    value: str = "",
    ledger: str = "request",
    gate: bool = True,
    K: Any = 0,
    draft_threshold: float = 0.0,
    draft_stop: str = "after",
    off_trace: str | None = None,
    device: str = "auto",
    threads: int = 0,
    progress: Callable[[int], None] | None = None,
    **params: Any,
) -> Result:
    """Walk a trace under every combination of B, g and M, or of another rule's parameters.

    Without B, g and M: under the settings that the trace is covered for, which are exact; where none is covered, under
    :data:`DEFAULT_AXES` by ``pooled`` estimates.

    Parameters
    ----------
    trace : Trace, StreamedTrace or path
        A trace, or its directory, read as :func:`open_trace` does.
    B, g, M : float, list of float, or str
        Axes of the grid; text as on the command line: ``"0,2,4"``, ``"0:16:.5"``, ``"1,2,inf"``.
    rule : str
        ``asd``, or a name in :data:`asdsim.rules.NAMES`.
    semantics : str
        Which reading of ASD.
    regret, value, ledger, gate, K, draft_threshold, draft_stop
        Variations of ASD, see :meth:`asdsim.rules.settings.Grid.product`.
    **params
        Parameters of another rule, such as ``theta=[.8, .9]``; only its knob may take several values (see
        :func:`replay_grid` for the rest).
    off_trace : {"stop", "aligned", "recorded", "pooled"}, optional
        ``stop`` unless said otherwise. At a prefix that was not captured: drop the request from that setting, which is
        then not exact and has neither a gain nor an interval; go on at the captured step nearest to the position
        reached; go on with the next captured step; or go on with steps drawn as :mod:`asdsim.walk.estimate` says
        (counts are then averages over draws, rounded). The last three are estimates; ``exact_share`` tells for how
        many requests nothing was estimated.
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
        On an invalid setting, mode or device.
    TraceError
        If the trace cannot be trusted.
    """
    how: dict[str, Any] = {"device": device, "threads": threads, "progress": progress}
    if rule == "asd":
        if params:
            raise UsageError(f"rule asd has no parameter {next(iter(params))}", fix="its parameters are B, g and M")
        varied: dict[str, Any] = {"regret": regret, "value": value, "ledger": ledger, "gate": gate, "K": K,
                                  "draft_threshold": draft_threshold, "draft_stop": draft_stop}  # fmt: skip
        if B is None and g is None and M is None:
            trace = _source(trace)
            grid, mode = default_settings(trace, semantics=semantics, **varied)
            return replay_grid(trace, grid, off_trace=off_trace or mode, **how)
        B = math.inf if B is None and ledger == "none" else B
        g = math.inf if g is None and not gate else g
        missing = [name for name, axis in (("B", B), ("g", g), ("M", M)) if axis is None]
        if B is None or g is None or M is None:
            raise UsageError(f"no value for {', '.join(missing)}", fix="rule asd needs B, g and M, or none of them")
        grids = [Grid.product(B, g, M, semantics, **varied)]
    else:
        grids = rule_grids(rule, {**params, "K": K} if K else params)
    if len(grids) > 1:
        raise UsageError(
            f"rule {rule}: these parameters need {len(grids)} layouts of the trace",
            fix="replay each by replay_grid(trace, grid) for grid in rule_grids(rule, parameters)",
        )
    return replay_grid(trace, grids[0], off_trace=off_trace or "stop", **how)


def default_settings(trace: Source, **varied: Any) -> tuple[Grid, str]:
    """Return what is replayed where no setting is named, and what then happens off the trace.

    Parameters
    ----------
    trace : Trace
    **varied
        ``semantics`` and the variations of ASD, as for :meth:`asdsim.rules.settings.Grid.product`.
    """
    grid = Grid.product(**DEFAULT_AXES, **varied)
    covered = covered_like(trace, grid)
    return (grid, "pooled") if covered is None else (covered, "stop")


def _source(trace: Trace | StreamedTrace | str | Path) -> Trace | StreamedTrace:
    if isinstance(trace, (Trace, StreamedTrace)):
        return trace
    return open_trace(trace)  # a path in a store is no Path


def replay_grid(
    trace: Trace | StreamedTrace | str | Path,
    grid: Grid,
    *,
    off_trace: str = "stop",
    device: str = "auto",
    threads: int = 0,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Result:
    """Walk a trace under a grid; parameters as :func:`replay`.

    ``note`` is called with a line for the user where a kernel has to be compiled first.
    """
    mode = off_trace_mode(off_trace)
    chosen = choose_device(device)
    source = _source(trace)
    if chosen == "reference" and not isinstance(source, Trace):
        source = load(source.path)
    graph = graph_of(source, grid.layout)
    name = off_trace if mode.has_walks else "stop"
    memory = 0.0 if isinstance(source, Trace) else source.room

    def walk_on(layout: Layout, part: Grid) -> Walks:
        where = graph if layout == grid.layout else graph_of(source, layout)
        if chosen == "reference":
            assert isinstance(source, Trace)
            return reference_walks(source, where, replace(part, layout=layout), name)
        return walk_grid(where, part, off_trace=name, device=chosen, threads=threads)

    def walk(part: Grid) -> Walks:
        return walk_on(grid.layout, part)

    strict = walk_on(grid.layout.of_strict, grid.strict) if grid.layout.cuts else None
    if not mode.has_walks:
        figures = _pooled_figures(
            whole_graph(graph, COPIES), grid, strict or walk(grid.strict), chosen, threads, progress
        )
    elif chosen in ("reference", "python"):
        figures = sweep(walk, grid, graph.num_requests, off_trace=off_trace, strict=strict, progress=progress)
    else:
        figures = sweep_graph(
            graph, grid, off_trace=off_trace, device=chosen, threads=threads, strict=strict, progress=progress,
            note=note, memory=memory,
        )  # fmt: skip
    return Result(source, graph, grid, off_trace, chosen, figures, _walker=walk)


def replay_breakpoints(
    trace: Trace | StreamedTrace | str | Path,
    *,
    g: Axis,
    M: Axis,
    upper: float = math.inf,
    semantics: str = "paper",
    regret: str = "logit",
    value: str = "",
    ledger: str = "request",
    off_trace: str = "stop",
    device: str = "auto",
    threads: int = 0,
) -> list[Result]:
    """Walk a trace under every budget that makes a difference, for each combination of g and M.

    Parameters
    ----------
    upper : float
        Budgets above it are left out.
    trace, g, M, semantics, regret, value, ledger, off_trace, device, threads
        As for :func:`replay`.

    Returns
    -------
    list of Result
        One for each g and M, g outermost. Row 0 holds from B = 0 on, each other row from a breakpoint on: a B, the very
        float, at which some request is decided otherwise than just below it. No decision changes within a row.

    Raises
    ------
    UsageError
        Where there are too many breakpoints (:data:`asdsim.walk.breakpoints.MOST`), or finding them takes too long.
    """
    grid = Grid.product(0.0, g, M, semantics, regret=regret, value=value, ledger=ledger)
    return replay_grid_breakpoints(trace, grid, upper=upper, off_trace=off_trace, device=device, threads=threads)


def replay_grid_breakpoints(
    trace: Trace | StreamedTrace | str | Path,
    grid: Grid,
    *,
    upper: float = math.inf,
    off_trace: str = "stop",
    device: str = "auto",
    threads: int = 0,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> list[Result]:
    """Do what :func:`replay_breakpoints` does for the g and M of each setting of a grid; its B is not looked at."""
    from .walk.breakpoints import breakpoints_of

    if grid.layout.rule != "asd":
        raise UsageError(f"rule {grid.layout.rule} has no budget, so no breakpoints in it")
    if not off_trace_mode(off_trace).has_walks:
        raise UsageError(
            f"no breakpoints in B under off-trace mode {off_trace}: its figures are averages over many random "
            "continuations, and no single B decides them",
            fix=f"take {', '.join(WALKED)}, or name budgets instead of exact",
        )
    chosen = choose_device(device)
    if chosen == "reference":
        raise UsageError("the reference walk finds no breakpoints", fix="use --device cpu or cuda")
    check_value("B", upper)
    source = _source(trace)
    graph = whole_graph(graph_of(source, grid.layout))
    pairs = list(zip(grid.gate.tolist(), grid.cap.tolist(), strict=True))
    thresholds = breakpoints_of(
        graph, pairs, off_trace_code(off_trace), grid.reading, upper=upper, threads=threads,
        compiled=chosen != "python", progress=progress, note=note,
    )  # fmt: skip
    results = []
    for points, (gate, cap) in zip(thresholds, pairs, strict=True):
        budgets = np.append(0.0, points)
        number = len(budgets)
        axes = {"B": budgets.tolist(), "g": [gate], "M": [cap]}
        part = replace(grid, budget=budgets, gate=np.full(number, gate), cap=np.full(number, cap), axes=axes)
        result = replay_grid(source, part, off_trace=off_trace, device=chosen, threads=threads, note=note)
        results.append(replace(result, below=np.append(points, upper)))
    return results


def write_results(results: list[Result], path: str | Path) -> None:
    """Write the rows of several results to one Parquet or CSV file, as :meth:`Result.write` does."""
    import polars as pl

    from .trace.writer import write_frame

    table = pl.concat([result.frame() for result in results])
    record = {**results[0].provenance(), "settings": sum(map(len, results))}
    write_frame(table, to_path(path), {"asdsim": record})


def _pooled_figures(
    graph: Graph, grid: Grid, strict: Walks, device: str, threads: int, progress: Callable[[int], None] | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the figures of many random continuations, counts as averages over draws; rows that are exact as walked."""
    if device == "reference":
        raise UsageError("the reference walk has no pooled estimate", fix="use --device cpu or cuda")
    how: dict[str, Any] = {"device": device, "threads": threads}

    def true(part: Grid) -> Walks:
        return walk_grid(graph, part, **how)

    def drawn(part: Grid) -> Walks:
        return drawn_walks(graph, part, true(part), **how)

    every = Walks(
        np.tile(strict.counts, (1, DRAWS, 1)), np.tile(strict.spent, (1, DRAWS)), np.tile(strict.edge, (1, DRAWS)),
        strict.histogram,
    )  # fmt: skip
    figures = sweep(drawn, grid, DRAWS * graph.num_requests, off_trace="aligned", strict=every, progress=progress)
    captured = sweep(true, grid, graph.num_requests, off_trace="stop", strict=strict)
    for name, values in figures.items():
        if values.dtype.kind in "iu":
            figures[name] = np.rint(values / DRAWS).astype(np.int64)
        whole = captured["exact"].reshape(-1, *[1] * (values.ndim - 1))
        figures[name] = np.where(whole, captured[name], figures[name])
    return figures


def reference_blocks(trace: Trace, layout: Layout = DEFAULT) -> Iterator[dict[tuple[int, ...], reference.Block]]:
    """Yield, request by request, the steps as the oracle takes them: by the tokens generated before each."""
    for index, request in enumerate(trace.request_records()):
        blocks: dict[tuple[int, ...], reference.Block] = {}
        first = int(np.searchsorted(trace.step_request, index))
        for row, step in enumerate(trace.steps_of(request.request_id), start=first):
            prefix = tuple(prefix_tokens(trace, row))
            best = step.top_logits[:, 0].astype(np.float64)
            regret = regrets_of(best[: step.num_draft_tokens], step.draft_logits)
            block = reference.Block(
                prefix, step.draft_ids.tolist(), step.argmax_ids.tolist(), regret.tolist(), captured=step.wave == 0
            )
            if layout.regret == "probability":
                total = step.logsumexp.astype(np.float64).tolist()
                pairs = zip(best.tolist(), step.draft_logits.astype(np.float64).tolist(), total, strict=False)
                block.cost = [math.exp(z1 - lse) - math.exp(z - lse) for z1, z, lse in pairs]
            if layout.rule != "asd":
                block.rows = _reference_rows(step, request.request_id, dict(layout.params))
            width = min(max(layout.width, 0), step.num_draft_tokens) if layout.width else step.num_draft_tokens
            if layout.threshold and step.draft_logprobs is not None:
                doubts = step.draft_logprobs[:width].astype(np.float64).tolist()
                width = reference.confident_length(doubts, layout.threshold, layout.stop)
            blocks[prefix] = reference.cut(block, width)
        yield blocks


def _allows(rule: str, params: dict[str, Any]) -> reference.Allows:
    oracle = ALLOWS[rule]
    return lambda block, i: oracle(block, i, params)


def _reference_rows(step: StepRecord, request_id: str, params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return recorded columns per draft position, for the oracle of a rule."""
    rows: list[dict[str, Any]] = []
    for i in range(step.num_draft_tokens):
        row: dict[str, Any] = {
            "rank": int(step.ranks[i]), "top_logits": step.top_logits[i].astype(np.float64).tolist(),
            "draft_logit": float(step.draft_logits[i]), "logsumexp": float(step.logsumexp[i]),
            "entropy": float(step.entropy[i]), **{name: float(values[i]) for name, values in step.divergences.items()},
        }  # fmt: skip
        if step.draft_logprobs is not None:
            row["draft_logprob"] = float(step.draft_logprobs[i])
        if "seed" in params:
            row["u"] = uniform(int(params["seed"]), request_id, step.start_pos + i)
        rows.append(row)
    return rows


def reference_walks(trace: Trace, graph: Graphs, grid: Grid, off_trace: str) -> Walks:
    """Walk with the oracle; ``edge`` is found from the tokens, and only for exact walks (-1 elsewhere)."""
    number, requests = len(grid), graph.num_requests
    counts = np.zeros((number, requests, columns.NUM_COUNTS), np.int32)
    spent = np.zeros((number, requests))
    histogram = np.zeros((number, graph.max_draft + 1), np.int64)
    reasons = {"gate": columns.BY_GATE, "budget": columns.BY_BUDGET, "cap": columns.BY_CAP}
    layout = grid.layout
    value = layout.value if layout.rule == "asd" else ""
    every = reference_blocks(trace, layout)
    for request, (record, blocks) in enumerate(zip(trace.request_records(), every, strict=True)):
        for setting in range(number):
            policy = grid.policy(setting)
            allows = None
            if layout.rule != "asd":
                name = layout.rule if policy.budget > 0.0 else "strict"  # B = 0 is the baseline of the other rule
                allows = _allows(name, grid.params[setting] if grid.params else {})
            out = reference.walk(
                blocks, B=policy.budget, g=policy.gate, M=policy.cap, max_new_tokens=record.max_new_tokens,
                eos=record.eos_ids if record.stop == "natural" else (), off_trace=off_trace,
                semantics=grid.semantics, ledger=grid.ledger, value=value, allows=allows,
            )  # fmt: skip
            row = counts[setting, request]
            row[columns.STEPS], row[columns.DRAFTED] = len(out.accepted), sum(out.drafted)
            row[columns.ACCEPTED], row[columns.TOKENS] = sum(out.accepted), len(out.tokens)
            row[columns.RELAXED], row[columns.LEFT] = out.relaxed, out.left
            for reason in out.refused_by:
                row[reasons[reason]] += 1
            spent[setting, request] = out.spent
            if off_trace != "stop" or out.left == 0:
                histogram[setting] += np.bincount(out.accepted, minlength=graph.max_draft + 1)
    return Walks(counts, spent, np.full((number, requests), -1, np.int64), histogram)
