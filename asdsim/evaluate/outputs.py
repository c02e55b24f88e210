"""The outputs that a grid leads to: each distinct one once, which one every setting got, and how likely each is.

A step is a prefix, so the last edge of an exact walk names the whole output. Two settings can reach one text through
blocks cut differently; outputs are therefore told apart by their tokens, not by their edge. The log-probability of an
output is that of the tokens before the step plus that of the tokens that the edge commits. Each edge is summed once;
any number of settings then look it up.

**Certificate.** At a prefix, the target's best token has log-probability max z - logsumexp and the token taken z -
logsumexp. Their difference is the regret: 0 for a token that is the target's choice, r for a relaxed one. Summed over
an output, the shortfall against the per-step maxima *on its own prefixes* is therefore the ledger, and B bounds it: an
output under budget B has at least exp(-B) times the probability that greedy choices on the same prefixes would have. It
says nothing about how likely the strict output is, which has other prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..records import FORBIDDEN_LOGIT, StepTables
from ..rules.settings import Grid
from ..stats import ratio
from ..trace.graph import Graph
from ..trace.tokens import edge_tokens, first_difference, parent_rows
from ..walk.sweep import Walks

if TYPE_CHECKING:
    import polars as pl

Floats = npt.NDArray[np.float64]

UNKNOWN = -1
"""In ``which``: the walk left the trace, so its output is not known."""


@dataclass
class Outputs:
    """Distinct outputs of a replay.

    Attributes
    ----------
    request_ids : list of str (R,)
    tokens : list (R,) of list of list of int
        Per request its distinct outputs; the strict one comes first where it is known.
    which : int32 (n, R)
        Per setting and request the number of its output, :data:`UNKNOWN` where the walk is not exact.
    strict : int32 (R,)
        Number of the strict output (0), :data:`UNKNOWN` where strict matching itself left the trace.
    grid : Grid
    decode : callable or None
        Turns token ids into text; None where the trace holds no vocabulary.
    """

    request_ids: list[str]
    tokens: list[list[list[int]]]
    which: npt.NDArray[np.int32]
    strict: npt.NDArray[np.int32]
    grid: Grid
    decode: Callable[[Sequence[int]], str] | None = None

    def __repr__(self) -> str:
        distinct = sum(map(len, self.tokens))
        return f"Outputs({distinct} distinct of {len(self.request_ids)} requests under {len(self.grid)} settings)"

    def first_differences(self) -> list[list[int]]:
        """Return, per request and output, the first generated token that differs from strict; -1 where none does.

        An output that is a beginning of the other differs where the shorter one ends.
        """
        return [
            [first_difference(outputs[0], output) if self.strict[r] == 0 else -1 for output in outputs]
            for r, outputs in enumerate(self.tokens)
        ]

    def divergence(self) -> pl.DataFrame:
        """Return, per setting, how its outputs part from the strict ones.

        Columns: B, g, M, ``requests`` (those whose output is known, under the setting and under strict), ``exact``
        (whether these are all), ``outputs_differ`` (number), ``outputs_differ_share``, and ``first_difference_mean``
        (generated tokens before the outputs part, over those that differ). The last two are null where not exact: the
        requests that leave the trace are those whose outputs differ.
        """
        import polars as pl

        first = self.first_differences()
        width = max((len(outputs) for outputs in self.tokens), default=1)
        table = np.full((len(self.tokens), max(1, width)), -1, np.int64)
        for r, row in enumerate(first):
            table[r, : len(row)] = row
        known = (self.which != UNKNOWN) & (self.strict == 0)[None, :]
        position = np.take_along_axis(table, np.maximum(self.which, 0).T.astype(np.int64), axis=1).T
        differ = known & (position >= 0)
        count, total, exact = differ.sum(axis=1), known.sum(axis=1), known.all(axis=1)
        before = np.where(differ, position, 0).sum(axis=1)
        return pl.DataFrame(
            {
                "B": self.grid.budget,
                "g": self.grid.gate,
                "M": self.grid.cap,
                "requests": total,
                "exact": exact,
                "outputs_differ": count,
                "outputs_differ_share": np.where(exact, ratio(count, total), np.nan),
                "first_difference_mean": np.where(exact, ratio(before, count), np.nan),
            }
        ).with_columns(pl.col("outputs_differ_share", "first_difference_mean").fill_nan(None))

    def frame(self, decode: Callable[[Sequence[int]], str] | None = None) -> pl.DataFrame:
        """Return one row per distinct output: request, number, the settings that got it, tokens, and text.

        ``settings`` is how many settings got it and ``setting_rows`` which: rows of the result's frame.

        Parameters
        ----------
        decode : callable, optional
            Turns token ids into text, for example a tokenizer's ``decode``; by default the trace's own vocabulary.
            Without either there is no ``text`` column.
        """
        import polars as pl

        decode = decode or self.decode
        first = self.first_differences()
        rows: list[dict[str, Any]] = []
        for r, outputs in enumerate(self.tokens):
            settings = np.bincount(self.which[:, r][self.which[:, r] >= 0], minlength=len(outputs))
            for number, tokens in enumerate(outputs):
                row: dict[str, Any] = {
                    "request_id": self.request_ids[r],
                    "output": number,
                    "settings": int(settings[number]),
                    "setting_rows": np.flatnonzero(self.which[:, r] == number).tolist(),
                    "strict": bool(self.strict[r] == number),
                    "first_difference": first[r][number] if first[r][number] >= 0 else None,
                    "tokens": tokens,
                }
                if decode is not None:
                    row["text"] = decode(tokens)
                rows.append(row)
        schema: dict[str, Any] = {
            "request_id": pl.String, "output": pl.Int32, "settings": pl.Int64,
            "setting_rows": pl.List(pl.Int64), "strict": pl.Boolean,
            "first_difference": pl.Int64, "tokens": pl.List(pl.Int32),
        }  # fmt: skip
        if decode is not None:
            schema["text"] = pl.String
        return pl.DataFrame(rows, schema=schema, orient="row")


def outputs_of(trace: StepTables, graph: Graph, grid: Grid, walks: Walks, strict: Walks) -> Outputs:
    """Collect the distinct outputs of walks.

    Parameters
    ----------
    trace, graph
        What was walked.
    grid : Grid
        n settings.
    walks : Walks
        Of the grid; needs last edges.
    strict : Walks
        Of strict matching, one setting.
    """
    number, requests = walks.edge.shape
    exact = walks.exact
    which = np.full((number, requests), UNKNOWN, np.int32)
    base = np.full(requests, UNKNOWN, np.int32)
    everything: list[list[list[int]]] = []
    for r in range(requests):
        seen: dict[tuple[int, ...], int] = {}
        by_edge: dict[int, int] = {}

        def place(edge: int, seen: dict[tuple[int, ...], int] = seen, by_edge: dict[int, int] = by_edge) -> int:
            if edge not in by_edge:
                tokens = tuple(edge_tokens(trace, graph, edge)) if edge >= 0 else ()
                by_edge[edge] = seen.setdefault(tokens, len(seen))
            return by_edge[edge]

        if strict.exact[0, r]:
            base[r] = place(int(strict.edge[0, r]))
        edges, back = np.unique(walks.edge[exact[:, r], r], return_inverse=True)
        names = np.array([place(int(edge)) for edge in edges], np.int32)
        which[exact[:, r], r] = names[back] if len(edges) else 0
        everything.append([list(tokens) for tokens in seen])
    return Outputs(list(graph.request_ids), everything, which, base, grid)


@dataclass
class EdgeTable:
    """Sums over the generated tokens up to and with those of each edge.

    Attributes
    ----------
    logprob : float64 (E,)
        Natural log-probability of the tokens under the target, greedy rows taken as they were recorded, in nats.
    best : float64 (E,)
        The same sum with the target's choice at every position in place of the token taken.
    """

    trace: StepTables
    graph: Graph
    logprob: Floats
    best: Floats

    @property
    def shortfall(self) -> Floats:
        """``best - logprob``, in nats: equal to the ledger under ASD's regret in logits."""
        return self.best - self.logprob

    def output(self, edge: int) -> bytes:
        """Return the generated tokens up to and with an edge, as little-endian int32; empty for edge -1."""
        if edge < 0:
            return b""
        return np.array(edge_tokens(self.trace, self.graph, edge), "<i4").tobytes()


def edge_table(trace: StepTables, graph: Graph) -> EdgeTable:
    """Sum log-probabilities along the recorded steps.

    Parameters
    ----------
    trace, graph
        A trace and its layout, of any rule.
    """
    pos_ptr = trace.pos_ptr
    draft_logit = trace.column("positions", "draft_logit").astype(np.float64)
    total = trace.column("positions", "logsumexp").astype(np.float64)
    top = trace.column("positions", "top_logits")[:, 0].astype(np.float64) if len(total) else np.zeros(0)
    best_row = top - total
    # Bonus rows hold no draft, and a token that the target rules out is never accepted: neither is ever summed.
    usable = np.isfinite(draft_logit) & (draft_logit != FORBIDDEN_LOGIT)
    draft_row = np.where(usable, draft_logit - total, 0.0)
    # Each request by itself: how its sums round does not depend on what else the trace holds.
    starts = pos_ptr[np.append(np.flatnonzero(np.diff(trace.step_request, prepend=-1)), len(trace.step_request))]
    of_draft, of_best = np.zeros(len(draft_row)), np.zeros(len(draft_row))  # rows of the request before each
    for begin, end in pairwise(starts.tolist()):
        np.cumsum(draft_row[begin : end - 1], out=of_draft[begin + 1 : end])
        np.cumsum(best_row[begin : end - 1], out=of_best[begin + 1 : end])
    steps = graph.num_steps
    parent = parent_rows(trace)
    taken = trace.column("steps", "parent_accepted").astype(np.int64)
    before_logprob, before_best = np.zeros(steps), np.zeros(steps)
    for step in range(steps):  # parents come first
        up = int(parent[step])
        if up >= 0:
            row, end = int(pos_ptr[up]), int(pos_ptr[up] + taken[step])
            before_logprob[step] = before_logprob[up] + (of_draft[end] - of_draft[row]) + best_row[end]
            before_best[step] = before_best[up] + (of_best[end] - of_best[row]) + best_row[end]
    counts = np.diff(graph.mm_ptr) + 1
    step_of = np.repeat(np.arange(steps), counts)
    begin, accepted = pos_ptr[:-1][step_of], graph.edge_accepted.astype(np.int64)
    corrected = graph.edge_tokens > graph.edge_accepted
    last = np.minimum(begin + accepted, max(len(best_row) - 1, 0))
    extra = np.where(corrected, best_row[last], 0.0) if len(best_row) else np.zeros(0)
    logprob = before_logprob[step_of] + of_draft[begin + accepted] - of_draft[begin] + extra
    best = before_best[step_of] + of_best[begin + accepted] - of_best[begin] + extra
    return EdgeTable(trace, graph, logprob, best)


def apart(strict: bytes, other: bytes) -> tuple[int, float]:
    """Return where two outputs part and how far they are apart.

    Parameters
    ----------
    strict, other : bytes
        Tokens, as :meth:`EdgeTable.output` gives them.

    Returns
    -------
    first : int
        As :func:`asdsim.trace.tokens.first_difference`.
    distance : float
        Levenshtein distance over tokens, divided by the longer length: 0 equal, 1 nothing in common.
    """
    if strict == other:
        return -1, 0.0
    from rapidfuzz.distance import Levenshtein

    a, b = (np.frombuffer(tokens, "<i4").tolist() for tokens in (strict, other))
    return first_difference(a, b), float(Levenshtein.normalized_distance(a, b))
