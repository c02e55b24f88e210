"""Every figure of every setting with its interval: speed, risk, and what became of the outputs.

Pairs of (setting, request) are the data. They are made chunk by chunk from the walks, turned into sums over requests of
all resamples by one matrix product, and dropped, so memory does not grow with the grid.

A setting whose row is not exact has no interval: the requests that stayed on the trace are a biased sample, and the
error of an estimate is not that of sampling requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import stats
from ..rules.scoring import Layout
from ..rules.settings import STRICT, Grid
from ..stats import Intervals
from ..trace.graph import Graph, Graphs, build_graph
from ..trace.groups import StreamedTrace
from ..trace.store import graph_of
from ..trace.stored import Trace
from ..walk import request as columns
from ..walk.sweep import Walks, walk_grid
from .cost import Cost
from .figures import FIGURES
from .outputs import EdgeTable, apart, edge_table

if TYPE_CHECKING:
    import polars as pl

Scorer = Callable[[int, bytes], "bool | None"]
"""Says of a request (by row) and an output (int32 tokens) whether it is right; None where the request is not scored.
Its attribute ``title``, where it has one, is how reports call it."""

CHUNK_BYTES = 192 << 20
COUNTS = {
    "steps": columns.STEPS, "drafted": columns.DRAFTED, "accepted": columns.ACCEPTED, "tokens": columns.TOKENS,
    "relaxed": columns.RELAXED, "by_gate": columns.BY_GATE, "by_budget": columns.BY_BUDGET, "by_cap": columns.BY_CAP,
}  # fmt: skip
OF_OUTPUTS = ("differ", "first_difference", "distance", "logprob", "scored", "correct", "ended")
SHARES = ("outputs_differ_share", "accuracy", "ended_share")
PER_SETTING = ("requests", "exact_share", "exact", "largest_ledger", "mcnemar", "changed", "scored", "ended")
"""Fields of :class:`Quality` with one entry per setting, besides the figures."""

Columns = dict[str, npt.NDArray[np.float64]]
"""Per setting and request, each float64 (n, R), by the names of :class:`asdsim.evaluate.figures.Figure`."""


@dataclass
class Quality:
    """Figures of a grid, one entry per setting.

    Attributes
    ----------
    grid : Grid
    requests : int64 (n,)
        Requests in the figures of each setting: those whose strict walk is captured and, unless figures are estimated,
        whose walk is exact.
    exact_share : float64 (n,)
        Share of all requests whose walk met captured steps only.
    exact : bool (n,)
        Whether both walks, that of the setting and the strict one, met captured steps only for every request.
    figures : dict of Intervals
        By name in :data:`asdsim.evaluate.figures.FIGURES`; those that the data do not allow are left out. A setting
        that is not exact has values without intervals.
    mcnemar : float64 (n,) or None
        Exact p-value of the changed answers, where there are scores; NaN where the setting is not exact.
    changed : int64 (n, 2) or None
        Answers gained and lost against strict.
    largest_ledger : float64 (n,)
        Largest ledger of a request, logits.
    scored : int64 (n, 2) or None
        Requests with a score, and how many of them strict matching has right, where there is a scorer.
    scorer : str
        What the scorer is called.
    ended : int64 (n, 2) or None
        Outputs that end with an end of sequence, under the setting and under strict; the others hit the token limit.
        None for estimates, which know no outputs.
    resamples, seed : int
        Of the bootstrap.
    """

    grid: Grid
    requests: npt.NDArray[np.int64]
    exact_share: npt.NDArray[np.float64]
    exact: npt.NDArray[np.bool_]
    figures: dict[str, Intervals]
    largest_ledger: npt.NDArray[np.float64]
    mcnemar: npt.NDArray[np.float64] | None = None
    changed: npt.NDArray[np.int64] | None = None
    scored: npt.NDArray[np.int64] | None = None
    scorer: str = ""
    ended: npt.NDArray[np.int64] | None = None
    resamples: int = stats.RESAMPLES
    seed: int = 0

    def __len__(self) -> int:
        return len(self.grid)

    def __repr__(self) -> str:
        return f"Quality({len(self.figures)} figures of {len(self)} settings, {int(self.exact.sum())} exact)"

    def take(self, settings: Sequence[int] | npt.NDArray[np.int64]) -> Quality:
        """Return some settings, in the order given."""
        rows = np.asarray(settings, np.int64)
        known = [name for name in PER_SETTING if getattr(self, name) is not None]
        arrays: dict[str, Any] = {name: getattr(self, name)[rows] for name in known}
        figures = {name: interval.take(rows) for name, interval in self.figures.items()}
        return replace(self, grid=self.grid[rows], figures=figures, **arrays)

    @classmethod
    def concat(cls, grid: Grid, parts: Sequence[Quality]) -> Quality:
        """Return the parts one after another; ``grid`` holds their settings in that order."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in PER_SETTING
            if getattr(parts[0], name) is not None
        }
        figures = {name: Intervals.concat([part.figures[name] for part in parts]) for name in parts[0].figures}
        return replace(parts[0], grid=grid, figures=figures, **arrays)

    def row(self, setting: int) -> dict[str, Any]:
        """Return one setting as plain numbers: every figure as (value, low, high), None where there is none."""
        row: dict[str, Any] = {
            "requests": int(self.requests[setting]), "exact": bool(self.exact[setting]),
            "exact_share": float(self.exact_share[setting]), "regret_spent_max": float(self.largest_ledger[setting]),
        }  # fmt: skip
        for name, interval in self.figures.items():
            values = [float(ends[setting]) for ends in (interval.value, interval.low, interval.high)]
            row[name] = [None if np.isnan(value) else value for value in values]
        if self.mcnemar is not None and self.changed is not None:
            p = float(self.mcnemar[setting])
            row["mcnemar_p"] = None if np.isnan(p) else p
            row["answers_gained"], row["answers_lost"] = (int(n) for n in self.changed[setting])
        for names, counts in self._pairs():
            row.update(zip(names, counts[setting].tolist(), strict=True))
        return row

    def _pairs(self) -> list[tuple[tuple[str, str], npt.NDArray[np.int64]]]:
        """Return the counts that come in twos, with their names, where they are known."""
        pairs = ((("scored_requests", "strict_right"), self.scored), (("ended", "ended_strict"), self.ended))
        return [(names, counts) for names, counts in pairs if counts is not None]

    def about_scores(self, setting: int = 0) -> str:
        """Say who scored how many requests, and whether strict matching has anything right that could be lost."""
        if self.scored is None:
            return "no request is scored, so accuracy is not known"
        number, right = self.scored[setting].tolist()
        have = "is" if number == 1 else "are"
        by = f" by {self.scorer}" if self.scorer else ""
        if not number:
            return f"none of {self.requests[setting]} requests is scored{by}, so accuracy is not known"
        text = f"{number} of {self.requests[setting]} requests {have} scored{by}, strict matching gets {right} right"
        return text if right else f"{text}: there is nothing to lose, so a drop in accuracy cannot show"

    def frame(self) -> pl.DataFrame:
        """Return one row per setting: what it is, requests, exact, and every figure with ``_low`` and ``_high``.

        B, g and M are null for another rule than ASD, whose ``parameters`` say what was walked.
        """
        import polars as pl

        asd = self.grid.layout.rule == "asd"
        none = pl.Series([None] * len(self), dtype=pl.Float64)
        data: dict[str, Any] = {
            "rule": [self.grid.layout.rule] * len(self),
            "B": self.grid.budget if asd else none, "g": self.grid.gate if asd else none,
            "M": self.grid.cap if asd else none, "parameters": [self.grid.parameters(n) for n in range(len(self))],
            "requests": self.requests, "exact": self.exact, "exact_share": self.exact_share,
            "regret_spent_max": self.largest_ledger,
        }  # fmt: skip
        for name, interval in self.figures.items():
            data.update({name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high})
        if self.mcnemar is not None and self.changed is not None:
            data |= {"mcnemar_p": self.mcnemar, "answers_gained": self.changed[:, 0]}
            data["answers_lost"] = self.changed[:, 1]
        for names, counts in self._pairs():
            data.update(zip(names, counts.T, strict=True))
        frame = pl.DataFrame(data)
        floats = [name for name, kind in frame.schema.items() if kind == pl.Float64]
        return frame.with_columns(pl.col(name).fill_nan(None) for name in floats)


class Verdicts:
    """What is known of the output that each edge names; every distinct output is looked at once.

    Parameters
    ----------
    table : EdgeTable
    strict : list of bytes (R,)
        Output of strict matching per request.
    scorer : callable, optional
        See :data:`Scorer`.
    scores : dict
        Verdicts of the scorer by (request, output): read, and added to.
    first, first_edge : int
        Request and edge that the first of the table are among all.
    """

    def __init__(
        self, table: EdgeTable, strict: list[bytes], scorer: Scorer | None,
        scores: dict[tuple[int, bytes], bool | None], first: int = 0, first_edge: int = 0,
    ) -> None:  # fmt: skip
        self.table, self.strict, self.scorer, self.scores = table, strict, scorer, scores
        self.first, self.first_edge = first, first_edge
        self._known: dict[tuple[int, bytes], tuple[float, ...]] = {}
        self._eos = [record.eos_ids if record.stop == "natural" else () for record in table.trace.request_records()]

    def of(self, request: int, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return float64 (len(edges), 7): the columns :data:`OF_OUTPUTS` for last edges of one request."""
        out = np.empty((len(edges), len(OF_OUTPUTS)))
        for n, edge in enumerate(np.where(edges >= 0, edges - self.first_edge, -1)):
            tokens = self.table.output(int(edge))
            first, distance, scored, correct, ended = self._look(request, tokens)
            logprob = float(self.table.logprob[edge]) if edge >= 0 else 0.0
            out[n] = (first >= 0, max(first, 0), distance, logprob, scored, correct, ended)
        return out

    def _look(self, request: int, tokens: bytes) -> tuple[float, ...]:
        key = (request, tokens)
        if key not in self._known:
            verdict = None
            if self.scorer is not None:
                if key not in self.scores:
                    self.scores[key] = self.scorer(request, tokens)
                verdict = self.scores[key]
            first, distance = apart(self.strict[request], tokens)
            ended = (
                bool(tokens) and int.from_bytes(tokens[-4:], "little", signed=True) in self._eos[request - self.first]
            )
            self._known[key] = (first, distance, float(verdict is not None), float(bool(verdict)), float(ended))
        return self._known[key]


class Evaluator:
    """Figures with intervals, of any settings on one trace.

    Parameters
    ----------
    trace : Trace
    cost : Cost, optional
        Without it there is no speed.
    scorer : callable, optional
        Without it there is no accuracy.
    resamples, seed : int
        Of the bootstrap over requests: one seed gives the same intervals for the same figures.
    device, threads
        Of the walk.
    graphs : mapping of Layout to Graph, optional
        Layouts of the trace that are already built.

    Attributes
    ----------
    scores : dict of (int, bytes) to (bool or None)
        Verdict of the scorer on each (request, output) that was met.
    """

    def __init__(
        self,
        trace: Trace | StreamedTrace,
        *,
        cost: Cost | None = None,
        scorer: Scorer | None = None,
        resamples: int = stats.RESAMPLES,
        seed: int = 0,
        device: str = "auto",
        threads: int = 0,
        graphs: Mapping[Layout, Graphs] | None = None,
    ) -> None:
        self.trace, self.cost, self.scorer = trace, cost, scorer
        self.resamples, self.seed, self.device, self.threads = resamples, seed, device, threads
        self.scores: dict[tuple[int, bytes], bool | None] = {}
        self._graphs: dict[Layout, Graphs] = dict(graphs or {})
        self._tables: dict[Layout, EdgeTable] = {}

    def graph(self, layout: Layout) -> Graphs:
        """Return the trace under a layout; built once."""
        if layout not in self._graphs:
            self._graphs[layout] = graph_of(self.trace, layout)
        return self._graphs[layout]

    def edges(self, layout: Layout) -> EdgeTable:
        """Return what each edge of a layout says of its output; built once. Of a trace in memory."""
        if layout not in self._tables:
            graph = self.graph(layout)
            assert isinstance(self.trace, Trace) and isinstance(graph, Graph)
            self._tables[layout] = edge_table(self.trace, graph)
        return self._tables[layout]

    def edge_parts(self, layout: Layout) -> Iterator[tuple[slice, int, EdgeTable]]:
        """Yield the requests, the first edge and the edges of each part of a trace; see :meth:`edges`."""
        if isinstance(self.trace, Trace):
            yield slice(0, self.trace.num_requests), 0, self.edges(layout)
            return
        first_edge = 0
        for group in self.trace.groups():
            graph = build_graph(group, layout)
            yield slice(group.first, group.first + group.num_requests), first_edge, edge_table(group, graph)
            first_edge += len(graph.edge_next)

    def walk(self, grid: Grid, off_trace: str = "stop") -> Walks:
        """Walk every request under every setting."""
        return walk_grid(
            self.graph(grid.layout), grid, off_trace=off_trace, device=self.device, threads=self.threads
        )  # fmt: skip

    def exact(self, grid: Grid) -> npt.NDArray[np.bool_]:
        """Return, per setting and request (n, R), whether the walk meets captured steps only."""
        return self.walk(grid).exact

    def pairing(
        self, grid: Grid, rows: npt.NDArray[np.int64], off_trace: str, resamples: int,
        wanted: Sequence[str] | None = None,
    ) -> Pairing:  # fmt: skip
        """Return some requests with strict matching on them, as the baseline of ``grid``."""
        return Pairing(self, grid, rows, off_trace, resamples, wanted)

    def evaluate(
        self,
        grid: Grid,
        *,
        figures: Sequence[str] | None = None,
        off_trace: str = "stop",
        requests: Sequence[int] | None = None,
        resamples: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Quality:
        """Return every figure of every setting, with intervals where the setting is exact.

        Parameters
        ----------
        grid : Grid
        figures : sequence of str, optional
            Names in :data:`asdsim.evaluate.figures.FIGURES`; by default all that the data allow.
        off_trace : {"stop", "aligned", "recorded"}
            As in :func:`asdsim.result.replay`. Estimates know no outputs: figures of outputs are then left out.
        requests : sequence of int, optional
            Rows of the requests to use; all by default.
        resamples : int, optional
            In place of the evaluator's.
        progress : callable, optional
            Called with the number of settings done in each chunk.
        """
        rows = np.arange(self.trace.num_requests) if requests is None else np.asarray(requests, np.int64)
        pairing = self.pairing(grid, rows, off_trace, resamples or self.resamples, figures)
        names = pairing.allowed(figures)
        parts: list[Quality] = []
        size = pairing.settings_at_once(names)
        for first in range(0, len(grid), size):
            part = grid[first : first + size]
            parts.append(pairing.quality(part, pairing.columns_of(part), names))
            if progress:
                progress(len(part))
        return Quality.concat(grid, parts)

    def evaluate_assigned(self, settings: Sequence[Grid], assigned: Sequence[int]) -> Quality:
        """Evaluate a choice that differs from request to request, as one row.

        For figures over requests that were held out in turn.

        Parameters
        ----------
        settings : sequence of Grid
            One setting each, of one rule and reading; each may have a layout of its own.
        assigned : sequence of int (R,)
            Request r is walked under ``settings[assigned[r]]``.
        """
        which = np.asarray(assigned, np.int64)
        everyone = np.arange(len(which))
        pairing = self.pairing(settings[0], everyone, "stop", self.resamples)
        tables = [pairing.columns_of(grid) for grid in settings]
        mixed = {name: np.concatenate([table[name] for table in tables])[which, everyone][None] for name in tables[0]}
        return pairing.quality(settings[0], mixed, pairing.allowed(None))


def strict_beside(grid: Grid) -> Grid:
    """Return strict matching as the baseline of a grid.

    Of a reading of ASD it is B = 0 of that reading (under ``lightllm``, which compares logits, ties are accepted); of
    another rule strict matching by token id. Both on whole blocks, even where the grid cuts them.
    """
    if grid.layout.rule == "asd":
        return replace(grid.strict, layout=grid.layout.whole)
    return Grid.of([STRICT])


@dataclass
class Pairing:
    """Some requests, and strict matching on them: what every setting of one call is paired with."""

    evaluator: Evaluator
    grid: Grid
    rows: npt.NDArray[np.int64]
    off_trace: str
    resamples: int
    wanted: Sequence[str] | None = None
    weights: stats.Draws = field(init=False)
    prompt: npt.NDArray[np.float64] = field(init=False)
    strict: Columns = field(init=False)
    strict_outputs: list[bytes] | None = field(init=False, default=None)
    verdicts: dict[Layout, Verdicts] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        evaluator = self.evaluator
        self.weights = stats.Draws(len(self.rows), self.resamples, evaluator.seed)
        self.prompt = evaluator.trace.prompt_tokens.astype(np.float64)[self.rows]
        self.begin()

    def begin(self) -> None:
        """Walk under strict matching."""
        evaluator = self.evaluator
        baseline = strict_beside(self.grid)
        walks = evaluator.walk(baseline, self.off_trace)
        if self.off_trace == "stop" and bool(walks.exact.any()) and self._of_outputs():
            edges = np.where(walks.exact[0], walks.edge[0], -1)
            self.strict_outputs = [
                table.output(int(edge) - first if edge >= 0 else -1)
                for rows, first, table in evaluator.edge_parts(baseline.layout) for edge in edges[rows]
            ]  # fmt: skip
        self.strict = self.columns(baseline, walks)

    def _of_outputs(self) -> bool:
        """Return whether outputs are looked at: on a trace that is read group by group only if a figure needs them."""
        names = self.wanted or FIGURES
        needed = {column for name in names for column in FIGURES[name].needs}
        return isinstance(self.evaluator.trace, Trace) or any(
            column.removesuffix("_strict") in OF_OUTPUTS for column in needed
        )

    def allowed(self, figures: Sequence[str] | None) -> list[str]:
        """Return the names of the figures that the data allow."""
        known = set(self.strict) | {f"{name}_strict" for name in self.strict}
        return [name for name in (figures or FIGURES) if set(FIGURES[name].needs) <= known]

    def settings_at_once(self, names: Sequence[str]) -> int:
        """Return how many settings fit in :data:`CHUNK_BYTES`."""
        needed = {column for name in names for column in FIGURES[name].needs}
        trace = self.evaluator.trace
        room = CHUNK_BYTES if isinstance(trace, Trace) else int(trace.room / 2)
        return max(1, room // (8 * (len(needed) + 4) * (self.resamples + 3 * len(self.rows))))

    def columns_of(self, grid: Grid) -> Columns:
        """Return per-request columns of the walks under a grid, and whether each walk is exact."""
        return self.columns(grid, self.evaluator.walk(grid, self.off_trace))

    def columns(self, grid: Grid, walks: Walks) -> Columns:
        """Return what :meth:`columns_of` does, of walks at hand."""
        rows = self.rows
        counts = walks.counts[:, rows].astype(np.float64)
        table = {name: counts[:, :, column] for name, column in COUNTS.items()}
        table["spent"] = walks.spent[:, rows]
        table["exact"] = walks.exact[:, rows].astype(np.float64)
        table["requests"] = np.ones(table["spent"].shape)
        self.add_times(table)
        if self.strict_outputs is not None:
            outputs = np.zeros((*table["spent"].shape, len(OF_OUTPUTS)))
            for part, verdicts in self._verdicts(grid.layout, self.strict_outputs):
                for n in np.flatnonzero((rows >= part.start) & (rows < part.stop)):
                    known = np.flatnonzero(table["exact"][:, n])
                    edges, back = np.unique(walks.edge[known, rows[n]], return_inverse=True)
                    if len(edges):
                        outputs[known, n] = verdicts.of(int(rows[n]), edges)[back]
            table.update({name: outputs[:, :, n] for n, name in enumerate(OF_OUTPUTS)})
            if self.evaluator.scorer is None:
                del table["scored"], table["correct"]
        return table

    def add_times(self, table: Columns) -> None:
        """Add predicted seconds to columns, where there is a cost model."""
        cost = self.evaluator.cost
        if cost is not None:
            table["seconds"] = cost.seconds(table["steps"], table["drafted"], table["tokens"], self.prompt[None, :])
            table["plain"] = cost.plain_seconds(table["tokens"], self.prompt[None, :])

    def _verdicts(self, layout: Layout, strict: list[bytes]) -> Iterator[tuple[slice, Verdicts]]:
        """Yield the requests of each part of the trace, and what is known of their outputs."""
        evaluator = self.evaluator
        for part, first_edge, table in evaluator.edge_parts(layout):
            if not isinstance(evaluator.trace, Trace):
                yield part, Verdicts(table, strict, evaluator.scorer, evaluator.scores, part.start, first_edge)
                continue
            if layout not in self.verdicts:
                self.verdicts[layout] = Verdicts(table, strict, evaluator.scorer, evaluator.scores)
            yield part, self.verdicts[layout]

    def quality(self, grid: Grid, table: Columns, names: Sequence[str]) -> Quality:
        """Turn columns of a grid into figures."""
        exact, strict_exact = table["exact"] > 0, self.strict["exact"] > 0
        # A request whose strict walk is not known cannot be paired.
        keep = strict_exact & (exact if self.off_trace == "stop" else True)
        sure = np.asarray((exact & strict_exact).all(axis=1))
        whole, width = bool(keep.all()), len(grid)
        needed = sorted({column for name in names for column in FIGURES[name].needs})
        kept: dict[str, npt.NDArray[np.float64]] = {}
        for name in needed:
            column = self.strict[name.removesuffix("_strict")] if name.endswith("_strict") else table[name]
            kept[name] = column if whole else column * keep
        sums = stats.Resampled(kept, self.weights, kept=keep.sum(axis=1))
        figures: dict[str, Intervals] = {}
        for name in names:
            if name in SHARES:
                top, bottom = FIGURES[name].needs
                figures[name] = stats.share_interval(_wide(sums.whole[top], width), _wide(sums.whole[bottom], width))
            elif name != "accuracy_change":
                drawn = sums.interval(FIGURES[name].formula)
                figures[name] = Intervals(*(_wide(ends, width) for ends in (drawn.value, drawn.low, drawn.high)))
        ledger = np.where(keep, table["spent"], 0.0).max(axis=1, initial=0.0)
        quality = Quality(
            grid, _wide(keep.sum(axis=1), width).astype(np.int64), exact.mean(axis=1), sure, figures, ledger,
            resamples=self.resamples, seed=self.evaluator.seed,
        )  # fmt: skip
        self._count_outputs(quality, table, keep, "accuracy_change" in names)
        quality.figures = {name: interval.only(sure) for name, interval in figures.items()}
        if self.off_trace == "stop" and "acceptance_length_gain" in figures:  # a biased sample has no gain
            gain = quality.figures["acceptance_length_gain"]
            value = np.where(exact.all(axis=1), gain.value, np.nan)
            quality.figures["acceptance_length_gain"] = Intervals(value, gain.low, gain.high)
        return quality

    def _count_outputs(self, quality: Quality, table: Columns, keep: npt.NDArray[np.bool_], change: bool) -> None:
        """Add what is counted of outputs and answers, where these are known."""

        def counted(*columns: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
            return np.stack([(column * keep).sum(axis=1) for column in columns], axis=1).astype(np.int64)

        if self.strict_outputs is not None:
            quality.ended = counted(table["ended"], self.strict["ended"])
            if self.evaluator.scorer is not None:
                quality.scored = counted(table["scored"], self.strict["correct"])
                quality.scorer = getattr(self.evaluator.scorer, "title", "")
        if change:
            right, before = table["correct"] * keep, self.strict["correct"] * keep
            scored = table["scored"] * keep
            both = (right * before).sum(axis=1)
            gained, lost = right.sum(axis=1) - both, before.sum(axis=1) - both
            quality.figures["accuracy_change"] = stats.paired_difference(
                both, gained, lost, scored.sum(axis=1) - both - gained - lost
            )
            quality.changed = np.stack([gained, lost], axis=1).astype(np.int64)
            p = np.array([stats.mcnemar(int(b), int(c)) for b, c in quality.changed])
            quality.mcnemar = np.where(quality.exact, p, np.nan)


def _wide(values: npt.NDArray[Any], width: int) -> npt.NDArray[np.float64]:
    return np.broadcast_to(np.asarray(values, np.float64), (width,)).copy()
