"""Every figure of every setting with its interval: speed, risk, and what became of the outputs.

Pairs of (setting, request) are the data. They are made chunk by chunk from the walks, turned into sums over requests of
all resamples by one matrix product, and dropped, so memory does not grow with the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import stats
from ..rules.settings import Grid
from ..stats import Intervals
from ..trace.graph import Graph, build_graph
from ..walk import request as columns
from ..walk.sweep import Walks, walk_grid
from .cost import CostModel
from .figures import FIGURES
from .likelihood import EdgeTable, apart, edge_table

if TYPE_CHECKING:
    import polars as pl

    from ..trace.reader import Trace

Scorer = Callable[[int, bytes], "bool | None"]
"""Says of a request (by row) and an output (int32 tokens) whether it is right; None where the request is not scored.
Its attribute ``title``, where it has one, is how reports call it."""

CHUNK_BYTES = 192 << 20
COUNTS = {
    "steps": columns.STEPS, "drafted": columns.DRAFTED, "accepted": columns.ACCEPTED, "tokens": columns.TOKENS,
    "relaxed": columns.RELAXED, "by_gate": columns.BY_GATE, "by_budget": columns.BY_BUDGET, "by_cap": columns.BY_CAP,
}  # fmt: skip
OF_OUTPUTS = ("differ", "first_difference", "distance", "logprob", "scored", "correct", "ended")
SHARES = ("outputs_differ_share", "accuracy")


@dataclass
class Quality:
    """Figures of a grid, one entry per setting.

    Attributes
    ----------
    grid : Grid
    requests : int64 (n,)
        Requests in the figures of each setting.
    exact_share : float64 (n,)
        Share of requests whose walk met captured steps only.
    figures : dict of Intervals
        By name in :data:`asdsim.evaluate.figures.FIGURES`; those that the data do not allow are left out.
    mcnemar : float64 (n,) or None
        Exact p-value of the changed answers, where there are scores.
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
        exact = int((self.exact_share == 1.0).sum())
        return f"Quality({len(self.figures)} figures of {len(self)} settings, {exact} exact)"

    def row(self, setting: int) -> dict[str, Any]:
        """Return one setting as plain numbers: every figure as (value, low, high), None where there is none."""
        found: dict[str, Any] = {
            "requests": int(self.requests[setting]), "exact_share": float(self.exact_share[setting]),
            "regret_spent_max": float(self.largest_ledger[setting]),
        }  # fmt: skip
        for name, one in self.figures.items():
            values = [float(part[setting]) for part in (one.value, one.low, one.high)]
            found[name] = [None if np.isnan(value) else value for value in values]
        if self.mcnemar is not None and self.changed is not None:
            found["mcnemar_p"] = float(self.mcnemar[setting])
            found["answers_gained"], found["answers_lost"] = (int(n) for n in self.changed[setting])
        for names, counts in self._pairs():
            found.update(zip(names, counts[setting].tolist(), strict=True))
        return found

    def _pairs(self) -> list[tuple[tuple[str, str], npt.NDArray[np.int64]]]:
        """Return the counts that come in twos, with their names, where they are known."""
        pairs = ((("scored_requests", "strict_right"), self.scored), (("ended", "ended_strict"), self.ended))
        return [(names, counts) for names, counts in pairs if counts is not None]

    def about_scores(self, setting: int = 0) -> str:
        """Say who scored how many requests, and whether strict matching has anything right that could be lost."""
        if self.scored is None:
            return "no request has a score, so accuracy says nothing"
        number, right = self.scored[setting].tolist()
        have = "has" if number == 1 else "have"
        by = f" by {self.scorer}" if self.scorer else ""
        if not number:
            return f"none of {self.requests[setting]} requests has a score{by}, so accuracy says nothing"
        text = f"{number} of {self.requests[setting]} requests {have} a score{by}, strict matching has {right} right"
        return text if right else f"{text}: nothing can be lost, so a drop of accuracy cannot show"

    def frame(self) -> pl.DataFrame:
        """Return one row per setting: B, g, M, requests, exact_share, and every figure with ``_low`` and ``_high``."""
        import polars as pl

        data: dict[str, Any] = {
            "B": self.grid.budget, "g": self.grid.gate, "M": self.grid.cap, "requests": self.requests,
            "exact_share": self.exact_share, "regret_spent_max": self.largest_ledger,
        }  # fmt: skip
        for name, one in self.figures.items():
            data.update({name: one.value, f"{name}_low": one.low, f"{name}_high": one.high})
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
    strict_edge : int64 (R,)
        Last edge of strict matching per request.
    scorer : callable, optional
        See :data:`Scorer`.
    """

    def __init__(self, table: EdgeTable, strict_edge: npt.NDArray[np.int64], scorer: Scorer | None = None) -> None:
        self.table, self.scorer = table, scorer
        self.strict = [table.output(int(edge)) for edge in strict_edge]
        self.scores: dict[tuple[int, bytes], bool | None] = {}
        self._known: dict[tuple[int, bytes], tuple[float, ...]] = {}
        self._eos = [record.eos_ids if record.stop == "natural" else () for record in table.trace.request_records()]

    def of(self, request: int, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return float64 (len(edges), 7): the columns :data:`OF_OUTPUTS` for last edges of one request."""
        out = np.empty((len(edges), len(OF_OUTPUTS)))
        for n, edge in enumerate(edges):
            tokens = self.table.output(int(edge))
            first, distance, scored, correct, ended = self._look(request, tokens)
            logprob = float(self.table.logprob[edge]) if edge >= 0 else 0.0
            out[n] = (first >= 0, max(first, 0), distance, logprob, scored, correct, ended)
        return out

    def _look(self, request: int, tokens: bytes) -> tuple[float, ...]:
        key = (request, tokens)
        if key not in self._known:
            verdict = self.scorer(request, tokens) if self.scorer else None
            self.scores[key] = verdict
            first, distance = apart(self.strict[request], tokens)
            ended = bool(tokens) and int.from_bytes(tokens[-4:], "little", signed=True) in self._eos[request]
            self._known[key] = (first, distance, float(verdict is not None), float(bool(verdict)), float(ended))
        return self._known[key]


def take(grid: Grid, rows: Sequence[int] | npt.NDArray[np.int64]) -> Grid:
    """Return some settings of a grid, in the order given."""
    at = np.asarray(rows, np.int64)
    params = [grid.params[n] for n in at] if grid.params else []
    return replace(grid, budget=grid.budget[at], gate=grid.gate[at], cap=grid.cap[at], axes={}, params=params)


def judge(
    trace: Trace,
    grid: Grid,
    *,
    cost: CostModel | None = None,
    scorer: Scorer | None = None,
    figures: Sequence[str] | None = None,
    off_trace: str = "stop",
    device: str = "auto",
    threads: int = 0,
    resamples: int = stats.RESAMPLES,
    seed: int = 0,
    requests: Sequence[int] | None = None,
    graph: Graph | None = None,
    progress: Callable[[int], None] | None = None,
) -> Quality:
    """Return every figure of every setting, with intervals.

    Parameters
    ----------
    trace : Trace
    grid : Grid
    cost : CostModel, optional
        Without it there is no speed.
    scorer : callable, optional
        Without it there is no accuracy.
    figures : sequence of str, optional
        Names in :data:`asdsim.evaluate.figures.FIGURES`; by default all that the data allow.
    off_trace : {"stop", "aligned", "recorded"}
        As in :func:`asdsim.result.replay`. Estimates know no outputs: figures of outputs are then left out.
    device, threads
        Of the walk.
    resamples, seed : int
        Of the bootstrap.
    requests : sequence of int, optional
        Rows of the requests to use; all by default.
    graph : Graph, optional
        The trace's layout under the grid, if at hand.
    progress : callable, optional
        Called with the number of settings done in each chunk.
    """
    layout = graph if graph is not None else build_graph(trace, grid.layout)
    chosen = np.arange(layout.num_requests) if requests is None else np.asarray(requests, np.int64)
    weights = stats.resample_weights(len(chosen), resamples, seed)
    prompt = np.array([len(record.prompt_ids) for record in trace.request_records()], np.float64)[chosen]

    def walk(part: Grid) -> Walks:
        return walk_grid(layout, part, off_trace=off_trace, device=device, threads=threads)

    strict = walk(grid.strict)
    verdicts = None
    if off_trace == "stop" and bool(strict.exact.any()):
        verdicts = Verdicts(edge_table(trace, layout), np.where(strict.exact[0], strict.edge[0], -1), scorer)
    base = _columns(strict, chosen, prompt, cost, verdicts)
    known = set(base) | {f"{name}_strict" for name in base}
    names = [name for name in (figures or FIGURES) if set(FIGURES[name].needs) <= known]
    needed = sorted({column for name in names for column in FIGURES[name].needs})
    size = max(1, CHUNK_BYTES // (8 * (len(needed) + 4) * (resamples + 3 * len(chosen))))
    parts: list[Quality] = []
    for first in range(0, len(grid), size):
        part = grid[first : first + size]
        walks = walk(part)
        parts.append(
            _chunk(part, walks, strict, base, chosen, prompt, cost, verdicts, names, needed, weights, off_trace)
        )
        if progress:
            progress(len(part))
    return _joined(grid, parts, resamples, seed)


def judge_assigned(
    trace: Trace,
    grid: Grid,
    assigned: Sequence[int],
    *,
    cost: CostModel | None = None,
    scorer: Scorer | None = None,
    resamples: int = stats.RESAMPLES,
    seed: int = 0,
) -> Quality:
    """Judge a choice that differs from request to request, as one row: request r under setting ``assigned[r]``.

    For figures over requests that were held out in turn. Parameters as :func:`judge`; ``off_trace`` is ``stop``.
    """
    graph = build_graph(trace, grid.layout)
    chosen = np.arange(graph.num_requests)
    walks, strict = walk_grid(graph, grid), walk_grid(graph, grid.strict)
    which = np.asarray(assigned, np.int64)
    one = Walks(
        walks.counts[which, chosen][None], walks.spent[which, chosen][None], walks.edge[which, chosen][None],
        walks.histogram[:1],
    )  # fmt: skip
    prompt = np.array([len(record.prompt_ids) for record in trace.request_records()], np.float64)
    verdicts = Verdicts(edge_table(trace, graph), np.where(strict.exact[0], strict.edge[0], -1), scorer)
    base = _columns(strict, chosen, prompt, cost, verdicts)
    known = set(base) | {f"{name}_strict" for name in base}
    names = [name for name in FIGURES if set(FIGURES[name].needs) <= known]
    needed = sorted({column for name in names for column in FIGURES[name].needs})
    weights = stats.resample_weights(len(chosen), resamples, seed)
    return _chunk(grid[:1], one, strict, base, chosen, prompt, cost, verdicts, names, needed, weights, "stop")


def _columns(
    walks: Walks, chosen: npt.NDArray[np.int64], prompt: npt.NDArray[np.float64], cost: CostModel | None,
    verdicts: Verdicts | None,
) -> dict[str, npt.NDArray[np.float64]]:  # fmt: skip
    """Return per-request columns, each float64 (n, R)."""
    counts = walks.counts[:, chosen].astype(np.float64)
    made = {name: counts[:, :, column] for name, column in COUNTS.items()}
    made["spent"] = walks.spent[:, chosen]
    made["requests"] = np.ones(made["spent"].shape)
    if cost is not None:
        made["seconds"] = cost.seconds(made["steps"], made["drafted"], made["tokens"], prompt[None, :])
    if verdicts is not None:
        outs = np.zeros((*made["spent"].shape, len(OF_OUTPUTS)))
        exact = walks.exact[:, chosen]
        for n, r in enumerate(chosen):
            rows = np.flatnonzero(exact[:, n])
            edges, back = np.unique(walks.edge[rows, r], return_inverse=True)
            if len(edges):
                outs[rows, n] = verdicts.of(int(r), edges)[back]
        made.update({name: outs[:, :, n] for n, name in enumerate(OF_OUTPUTS)})
        if verdicts.scorer is None:
            del made["scored"], made["correct"]
    return made


def _chunk(
    part: Grid, walks: Walks, strict: Walks, base: dict[str, Any], chosen: npt.NDArray[np.int64],
    prompt: npt.NDArray[np.float64], cost: CostModel | None, verdicts: Verdicts | None, names: list[str],
    needed: list[str], weights: npt.NDArray[np.float64], off_trace: str,
) -> Quality:  # fmt: skip
    exact = walks.exact[:, chosen]
    keep = exact & strict.exact[:, chosen] if off_trace == "stop" else np.ones_like(exact)
    made = _columns(walks, chosen, prompt, cost, verdicts)
    whole = bool(keep.all())
    table: dict[str, Any] = {}
    for name in needed:
        column = base[name.removesuffix("_strict")] if name.endswith("_strict") else made[name]
        table[name] = column if whole else column * keep
    sums = stats.Resampled(table, weights, kept=keep.sum(axis=1))
    found: dict[str, Intervals] = {}
    width = len(part)
    for name in names:
        if name in SHARES:
            top, bottom = FIGURES[name].needs
            found[name] = stats.share_interval(_wide(sums.whole[top], width), _wide(sums.whole[bottom], width))
        elif name != "accuracy_change":
            one = sums.interval(FIGURES[name].formula)
            found[name] = Intervals(*(_wide(values, width) for values in (one.value, one.low, one.high)))
    ledger = np.where(keep, walks.spent[:, chosen], 0.0).max(axis=1, initial=0.0)
    quality = Quality(part, keep.sum(axis=1), exact.mean(axis=1), found, ledger)

    def counted(*columns: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        return np.stack([(column * keep).sum(axis=1) for column in columns], axis=1).astype(np.int64)

    if verdicts is not None:
        quality.ended = counted(made["ended"], base["ended"])
        if verdicts.scorer is not None:
            quality.scored, quality.scorer = (
                counted(made["scored"], base["correct"]),
                getattr(verdicts.scorer, "title", ""),
            )
    if "accuracy_change" in names:
        right, before = made["correct"] * keep, base["correct"] * keep
        scored = made["scored"] * keep
        both = (right * before).sum(axis=1)
        gained, lost = right.sum(axis=1) - both, before.sum(axis=1) - both
        found["accuracy_change"] = stats.paired_difference(
            both, gained, lost, scored.sum(axis=1) - both - gained - lost
        )
        quality.changed = np.stack([gained, lost], axis=1).astype(np.int64)
        quality.mcnemar = np.array([stats.mcnemar(int(b), int(c)) for b, c in quality.changed])
    return quality


def _wide(values: npt.NDArray[Any], width: int) -> npt.NDArray[np.float64]:
    return np.broadcast_to(np.asarray(values, np.float64), (width,)).copy()


def _joined(grid: Grid, parts: list[Quality], resamples: int, seed: int) -> Quality:
    def join(pick: Callable[[Quality], Any]) -> Any:
        return np.concatenate([pick(part) for part in parts])

    figures: dict[str, Intervals] = {}
    for name in parts[0].figures:
        found_parts = [part.figures[name] for part in parts]
        figures[name] = Intervals(
            np.concatenate([one.value for one in found_parts]),
            np.concatenate([one.low for one in found_parts]),
            np.concatenate([one.high for one in found_parts]),
        )
    found = Quality(
        grid, join(lambda part: part.requests), join(lambda part: part.exact_share), figures,
        join(lambda part: part.largest_ledger), scorer=parts[0].scorer, resamples=resamples, seed=seed,
    )  # fmt: skip
    if parts[0].scored is not None:
        found.scored = join(lambda part: part.scored)
    if parts[0].ended is not None:
        found.ended = join(lambda part: part.ended)
    if parts[0].changed is not None:
        found.changed, found.mcnemar = join(lambda part: part.changed), join(lambda part: part.mcnemar)
    return found
