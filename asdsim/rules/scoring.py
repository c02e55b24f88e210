"""From recorded columns to what the walk compares: score and charge of every mismatch, for any rule.

Topology (which steps lead where) depends on what counts as a mismatch and on the draft length alone, and is laid out by
:mod:`asdsim.trace.graph`; here a rule fills in the numbers. Live decoding lays out its blocks with the same code, so a
replay and a live run compare the very same floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ..errors import TraceError, UsageError, unknown_name
from ..records import FORBIDDEN_LOGIT, MemoryTrace
from . import get_rule
from .spec import Rule, Seen, Value

if TYPE_CHECKING:
    from ..records import RequestRecord, StepRecord, StepTables

REGRETS = ("logit", "probability")
VALUES = ("suffix", "normalised", "reciprocal", "unit", "reuse")
STOPS = ("after", "before", "product")
MISMATCHES = ("id", "regret")
LEDGERS = ("request", "block", "none")

VALUE_TEXT = {
    "suffix": "K - i",
    "normalised": "(K - i) / K",
    "reciprocal": "(K - i) * (1 / K): the normalised value as some engines round it",
    "unit": "1",
    "reuse": "1 + the run of exact matches that follows in the block",
}

STOP_TEXT = {
    "after": "a token with q(x) < tau is the last one drafted, and is verified",
    "before": "a token with q(x) < tau is not verified, nor is what follows",
    "product": "as before, with the product of q over the block so far in place of q(x)",
}

NO_DRAFT = -1
"""Width of a layout that verifies no draft token: every step commits the target's own next token."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How mismatches are told, scored and charged.

    Attributes
    ----------
    rule : str
        ``asd``, or a name in :data:`asdsim.rules.NAMES`.
    regret : {"logit", "probability"}
        ASD: regret and charge as z(y) - z(x) in logits, or p(y) - p(x), from 0 to 1. B, the ledger, every figure of
        regret and the closeness of a decision are then in that unit, and g is one of it per suffix value.
    value : str
        ASD: what regret is divided by, see :data:`VALUE_TEXT`.
    mismatch : {"id", "regret"}
        Whether a draft token differs from the target's choice by its id, or only by a positive regret (ties match).
    width : int
        Draft tokens looked at in each step; 0 takes all, :data:`NO_DRAFT` none.
    threshold : float
        tau, the drafter's probability under which a block is cut; 0 never cuts.
    stop : str
        Where the threshold cuts, see :data:`STOP_TEXT`; see :func:`draft_lengths`.
    params : tuple of (name, value)
        Parameters of another rule that its scores depend on.
    """

    rule: str = "asd"
    regret: str = "logit"
    value: str = "suffix"
    mismatch: str = "id"
    width: int = 0
    params: tuple[tuple[str, Value], ...] = ()
    threshold: float = 0.0
    stop: str = "after"

    def __post_init__(self) -> None:
        for kind, name, known in (
            ("regret", self.regret, REGRETS),
            ("value scheme", self.value, VALUES),
            ("mismatch", self.mismatch, MISMATCHES),
            ("draft stop", self.stop, STOPS),
        ):
            if name not in known:
                raise unknown_name(kind, name, list(known))
        if self.width < NO_DRAFT:
            raise UsageError(f"draft length {self.width} is negative")
        if not 0.0 <= self.threshold <= 1.0:
            raise UsageError(
                f"draft threshold {self.threshold:g} is no probability", fix="give numbers from 0 to 1; 0 never cuts"
            )
        if not self.threshold:
            object.__setattr__(self, "stop", "after")  # without a threshold, all are one layout

    @property
    def plain(self) -> bool:
        """Whether draft ids, choices and regrets of a block are all that it needs."""
        return self.rule == "asd" and self.regret == "logit"

    @property
    def cuts(self) -> dict[str, int | float | str]:
        """What cuts blocks short, named as :meth:`asdsim.rules.settings.Grid.product` does; empty for whole blocks."""
        found: dict[str, int | float | str] = {"K": max(self.width, 0)} if self.width else {}
        if self.threshold:
            found["draft_threshold"] = self.threshold
        if self.stop != "after":
            found["draft_stop"] = self.stop
        return found

    @property
    def blocks(self) -> tuple[str, int, float, str]:
        """What says which positions of a step are looked at and are mismatches: layouts that agree here lead alike."""
        return self.mismatch, self.width, self.threshold, self.stop

    @property
    def whole(self) -> Layout:
        """The same on whole blocks."""
        return replace(self, width=0, threshold=0.0)

    @property
    def of_strict(self) -> Layout:
        """The layout of the strict baseline: whole blocks, even where this layout cuts them."""
        if not self.cuts:
            return self
        return self.whole if self.rule == "asd" else DEFAULT

    def __str__(self) -> str:
        if self.rule != "asd":
            return " ".join([self.rule, *(f"{name}={value}" for name, value in self.params)])
        return " ".join([f"asd regret={self.regret} value={self.value} mismatch={self.mismatch}", *shown(self.cuts)])


DEFAULT = Layout()
"""ASD as the paper defines it."""


def shown(cuts: dict[str, int | float | str]) -> list[str]:
    """Return what cuts blocks as people write it: ``K=3``, ``draft-threshold=0.4``."""
    return [
        f"{name.replace('_', '-')}={value:g}"
        if isinstance(value, (int, float))
        else f"{name.replace('_', '-')}={value}"
        for name, value in cuts.items()
    ]


def confidences(layout: Layout, logprobs: npt.ArrayLike) -> Floats:
    """Return what a layout compares with log tau: log q of each draft token, or its running sum over the block.

    Parameters
    ----------
    layout : Layout
    logprobs : (S, W)
        log q of each draft token, in nats. Sums are float64, from left to right.
    """
    given = np.asarray(logprobs, np.float64)
    return np.cumsum(given, axis=1) if layout.stop == "product" else given


def draft_lengths(layout: Layout, drafted: npt.ArrayLike, logprobs: npt.ArrayLike | None) -> npt.NDArray[np.int32]:
    """Return how many draft tokens of each block are verified, under a layout's draft length and threshold.

    Parameters
    ----------
    layout : Layout
    drafted : int (S,)
        Draft tokens of each block.
    logprobs : (S, W) or None
        log q of each draft token, anything behind a block's last one; read where there is a threshold.

    Returns
    -------
    int32 (S,)

    Raises
    ------
    ValueError
        Under a threshold, where the drafter's probabilities are missing; its argument is the first such block.
    """
    length = np.asarray(drafted, np.int32)
    if layout.width:
        length = np.minimum(length, np.int32(max(layout.width, 0)))
    if not layout.threshold or not length.any():
        return length
    if logprobs is None:
        raise ValueError(int(np.argmax(length > 0)))
    value = confidences(layout, logprobs)
    inside = np.arange(value.shape[1]) < length[:, None]
    lacking = (inside & np.isnan(value)).any(axis=1)
    if lacking.any():
        raise ValueError(int(np.argmax(lacking)))
    doubted = inside & (value < math.log(layout.threshold))
    kept = np.argmax(doubted, axis=1) + (layout.stop == "after")
    return np.where(doubted.any(axis=1), kept, length).astype(np.int32)


def regrets_of(best: Any, drafted: Any) -> Floats:
    """Return z(y) - z(x) in float64 from recorded logits, equation (3); infinite where the target rules x out."""
    regret = np.asarray(best, np.float64) - np.asarray(drafted, np.float64)
    regret[np.asarray(drafted) == FORBIDDEN_LOGIT] = np.inf
    return regret


def is_mismatch(layout: Layout, draft: Any, choice: Any, regret: Any) -> npt.NDArray[np.bool_]:
    """Return where a draft token is a mismatch; a NaN regret always is."""
    differs = np.asarray(draft != choice)
    return differs if layout.mismatch == "id" else differs & ~(np.asarray(regret) <= 0.0)


def uniform(seed: int, request_id: str, position: int) -> float:
    """Return a number in [0, 1) that depends on seed, request and output position alone (SplitMix64)."""
    mask = (1 << 64) - 1
    x = (crc32(request_id.encode()) << 32 ^ seed * 0x9E3779B97F4A7C15 ^ position * 0xD1342543DE82EF95) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor & mask
    return ((x ^ x >> 31) >> 11) * 2.0**-53


def suffix_values(scheme: str, width: Any, position: Any, run: Any = None) -> Any:
    """Return q_i under a value scheme; ``run`` is needed by ``reuse`` only."""
    if scheme == "suffix":
        return width - position
    if scheme == "normalised":
        return (width - position) / width
    if scheme == "reciprocal":
        return (width - position) * (1.0 / width)
    return np.ones(np.shape(position)) if scheme == "unit" else 1 + run


def run_lengths(matches: npt.NDArray[np.bool_], row_step: Any, rows: Any) -> Ints:
    """Return, for each of ``rows``, how many rows right behind it match, within its step."""
    number = len(matches)
    stop = np.where(~matches, np.arange(number), number)
    ahead = np.append(np.minimum.accumulate(stop[::-1])[::-1], number)  # first row >= i that does not match
    last = np.searchsorted(row_step, row_step[rows], side="right")
    return (np.minimum(ahead[rows + 1], last) - rows - 1).astype(np.int64)


@dataclass(frozen=True)
class Rows:
    """Mismatch rows of a trace, as a rule reads them.

    Attributes
    ----------
    tables : StepTables
        Where columns come from.
    rows : int64 (m,)
        Rows of ``positions``.
    step, i, width : int64 (m,)
        Step row, position in the block, and draft tokens of the block.
    run : int64 (m,)
        Exact matches that follow.
    regret : float64 (m,)
        In logits.
    prefix : callable
        Returns the generated tokens before a step.
    """

    tables: StepTables
    rows: Ints
    step: Ints
    i: Ints
    width: Ints
    run: Ints
    regret: Floats
    prefix: Callable[[int], Sequence[int]]

    def column(self, name: str, rule: str) -> npt.NDArray[Any]:
        """Return a column at these rows.

        Raises
        ------
        TraceError
            If a value is missing, naming the column, the row and how to capture it.
        """
        values = self.tables.column("positions", name)[self.rows]
        missing = values < 0 if name == "rank" else np.isnan(values)
        if missing.any():
            how = "with a drafter that has a distribution" if name == "draft_logprob" else f"--divergences {name}"
            raise TraceError(
                f"rule {rule} needs the column {name}, which is missing here",
                where=self.where(int(np.argmax(missing))),
                fix=f"capture again {'' if name == 'draft_logprob' else 'with '}{how}",
            )
        return values

    def where(self, m: int) -> str:
        """Name a row: request, step, position."""
        step = int(self.step[m])
        request = self.tables.request_records()[int(self.tables.step_request[step])]
        step_id = int(self.tables.column("steps", "step_id")[step])
        return f"request {request.request_id}, step {step_id}, position {int(self.i[m])}"


def lay_out(layout: Layout, rows: Rows) -> tuple[Floats, Floats]:
    """Return (score, charge) of every mismatch, float64 (m,) each.

    A token that the target rules out (infinite regret) has a NaN score under every rule: no limit lets it pass.

    Raises
    ------
    TraceError
        Where a column is missing or a row cannot be scored: which request, step and position.
    """
    if layout.rule == "asd":
        regret = rows.regret if layout.regret == "logit" else _probability_gap(rows)
        score = regret / suffix_values(layout.value, rows.width, rows.i, rows.run)
        charge = regret.copy()
    else:
        score = np.array(_rule_scores(layout, rows), np.float64).reshape(len(rows.rows))
        charge = rows.regret.copy()
    forbidden = np.isinf(rows.regret)
    score[forbidden] = np.nan
    charge[forbidden] = np.inf
    return score, charge


def lay_block(
    layout: Layout, request: RequestRecord, step: StepRecord, tokens: Sequence[int]
) -> tuple[list[int], list[float], list[float]]:
    """Lay out one block of live decoding: positions, scores and charges of its mismatches.

    Parameters
    ----------
    layout : Layout
    request : RequestRecord
    step : StepRecord
        The verified block, as a trace would hold it.
    tokens : sequence of int
        Generated before the step.

    Raises
    ------
    TraceError
        As :func:`lay_out`.
    """
    width = step.num_draft_tokens
    regret = regrets_of(step.top_logits[:width, 0], step.draft_logits)
    choice = step.argmax_ids[:width]
    rows = np.flatnonzero(is_mismatch(layout, step.draft_ids, choice, regret))
    matches = np.append(step.draft_ids == choice, False)
    score, charge = lay_out(
        layout,
        Rows(
            tables=MemoryTrace([(request, [step])]),
            rows=rows,
            step=np.zeros(len(rows), np.int64),
            i=rows.astype(np.int64),
            width=np.full(len(rows), width, np.int64),
            run=run_lengths(matches, np.zeros(width + 1, np.int64), rows),
            regret=regret[rows],
            prefix=lambda _: tokens,
        ),
    )
    return rows.tolist(), score.tolist(), charge.tolist()


def _probability_gap(rows: Rows) -> Floats:
    """Return p(y) - p(x); scalar exponentials, since vectorised ones may round differently from call to call."""
    best = rows.tables.column("positions", "top_logits")[rows.rows, 0].astype(np.float64).tolist()
    logit = rows.tables.column("positions", "draft_logit")[rows.rows].astype(np.float64).tolist()
    total = rows.column("logsumexp", "asd").astype(np.float64).tolist()
    return np.array(
        [math.exp(z1 - lse) - math.exp(z - lse) for z1, z, lse in zip(best, logit, total, strict=True)], np.float64
    )


def _rule_scores(layout: Layout, rows: Rows) -> list[float]:
    rule, params = get_rule(layout.rule), dict(layout.params)
    if rule.name in ("strict", "truncate") or not len(rows.rows):
        return [math.nan] * len(rows.rows)
    scores = []
    for m, seen in enumerate(seen_rows(rule, params, rows)):
        try:
            scores.append(rule.score(seen, params))
        except ValueError as error:
            raise TraceError(
                f"rule {rule.name}: {error}", where=rows.where(m), fix="use another rule on this trace"
            ) from None
    return scores


def seen_rows(rule: Rule, params: dict[str, Value], rows: Rows) -> list[Seen]:
    """Return what a rule sees of each mismatch; columns that it does not need stay empty."""
    needs = [str(params[need.strip("<>")]) if need.startswith("<") else need for need in rule.needs]
    top = rows.tables.column("positions", "top_logits")[rows.rows, :3].astype(np.float64).tolist()
    logit = rows.tables.column("positions", "draft_logit")[rows.rows].astype(np.float64).tolist()
    total = rows.column("logsumexp", rule.name).astype(np.float64).tolist()
    made = [
        Seen(i, width, regret, z, best, lse, run=run)
        for i, width, regret, z, best, lse, run in zip(
            rows.i.tolist(), rows.width.tolist(), rows.regret.tolist(), logit, top, total, rows.run.tolist(),
            strict=True,
        )
    ]  # fmt: skip
    for need in needs:
        values = rows.column(need, rule.name)
        for seen, value in zip(made, values.tolist(), strict=True):
            if need in ("kl", "reverse_kl", "js", "tv"):
                seen.divergence = {need: value}
            else:
                setattr(seen, need, value)
    if rule.sampled:
        start = rows.tables.column("steps", "start_pos")[rows.step].tolist()
        records = rows.tables.request_records()
        owner = rows.tables.step_request[rows.step].tolist()
        for seen, r, begin in zip(made, owner, start, strict=True):
            seen.u = uniform(int(params["seed"]), records[r].request_id, begin + seen.i)
    if "begin" in params and float(params["begin"]) >= 0:
        _mark_thinking(made, rows, int(params["begin"]), int(params["end"]))
    return made


def _mark_thinking(made: list[Seen], rows: Rows, begin: int, end: int) -> None:
    """Set ``thinking``: whether the last marker before a position begins the phase."""
    records, draft = rows.tables.request_records(), rows.tables.column("positions", "draft_id")
    before: dict[int, bool] = {}
    for m, seen in enumerate(made):
        step, row = int(rows.step[m]), int(rows.rows[m])
        if step not in before:
            prompt = records[int(rows.tables.step_request[step])].prompt_ids
            before[step] = _phase([*prompt, *rows.prefix(step)], begin, end, False)
        seen.thinking = _phase(draft[row - seen.i : row].tolist(), begin, end, before[step])


def _phase(tokens: Sequence[int], begin: int, end: int, thinking: bool) -> bool:
    for token in tokens:
        thinking = token == begin or (thinking and token != end)
    return thinking
