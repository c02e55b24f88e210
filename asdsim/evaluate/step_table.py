"""Passes of the target as measured: milliseconds by batch and width, interpolated.

A table (CSV or JSON) has one row per measurement: ``batch`` requests, ``width`` tokens of each in the pass (K + 1 in a
verification, 1 for the target alone) and ``milliseconds``; where known ``context``, tokens that each request stands on,
``draft_milliseconds`` of drafting width - 1 tokens, and ``spread``, half the distance between the quartiles of the
measurement over its median. A row with ``prompt`` in place of batch and width tells how
long a prompt of so many tokens takes by itself; a line is laid through these. ``asdsim profile`` writes such a table.

Between measurements the time is linear in the batch and in the width. Beyond them it goes on along the last two, is at
least that of the last one, and :meth:`StepTable.notes` says so once it was asked for. A table of one batch says nothing
of larger ones.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, unknown_name
from ..stats import MAX_SPREAD
from .cost import Cost, read_time

Floats = npt.NDArray[np.float64]
COLUMNS = ("batch", "width", "milliseconds", "context", "draft_milliseconds", "spread", "prompt")


@dataclass
class StepTable(Cost):
    """Measured passes.

    Attributes
    ----------
    batches, widths : float64 (b,), (w,)
        What was measured, ascending.
    passes : float64 (b, w)
        Microseconds at ``context`` tokens of context each.
    drafts : float64 (b, w) or None
        Microseconds of drafting width - 1 tokens.
    per_context : float
        Microseconds that one more token of context adds, of all requests together.
    context : float
        Mean context of the measurements.
    source : str
    prompts : (float, float) or None
        Microseconds of reading a prompt, and of each of its tokens.
    asked : list of float
        Largest batch and width asked for so far.
    longest : float
        Longest prompt asked for so far.
    spread : float
        Largest relative spread of a measurement; 0 where none was recorded.
    remarks : list of str
        More to say of every figure: why the measurements are not to be trusted, how far predictions were off.
    """

    batches: Floats
    widths: Floats
    passes: Floats
    drafts: Floats | None
    per_context: float
    context: float
    source: str
    prompts: tuple[float, float] | None = None
    asked: list[float] = field(default_factory=lambda: [1.0, 1.0])
    longest: float = 0.0
    spread: float = 0.0
    remarks: list[str] = field(default_factory=list)

    def pass_us(self, tokens: Any, context: Any = 0.0, batch: int = 1) -> Any:
        """Return microseconds of one pass; see :meth:`asdsim.evaluate.cost.Cost.pass_us`."""
        width = np.maximum(np.asarray(tokens, np.float64) / batch, 1.0)
        beyond = self.per_context * (np.asarray(context, np.float64) - batch * self.context)
        return np.maximum(self._at(self.passes, width, batch) + beyond, 0.0)

    def draft_us(self, drafted: Any, context: Any = 0.0, batch: int = 1) -> Any:
        """Return microseconds of drafting; 0 where the table does not say."""
        K = np.asarray(drafted, np.float64)
        return np.zeros_like(K) if self.drafts is None else np.where(K > 0, self._at(self.drafts, K + 1.0, batch), 0.0)

    def _at(self, table: Floats, width: Floats, batch: int) -> Floats:
        self.asked = [max(self.asked[0], batch), max(self.asked[1], float(np.max(width, initial=1.0)))]
        return self._interpolated(table, width, batch)

    def _interpolated(self, table: Floats, width: Floats, batch: int) -> Floats:
        if len(self.batches) == 1 and batch > self.batches[0]:
            raise UsageError(
                f"these passes were measured at a batch of {self.batches[0]:g}, and say nothing of a batch of {batch}",
                where=self.source, fix="measure batches with asdsim profile, or name roofline:DEVICE,model=CONFIG.json",
            )  # fmt: skip
        by_width = np.stack([_line(self.widths, row, width) for row in table])
        return _line(self.batches, by_width, np.float64(batch))

    def first_us(self, drafted: Any, prompt: Any) -> Any:
        """Return microseconds of the first step of a request: one pass over its prompt, and a step."""
        if self.prompts is not None:
            return self.prompts[0] + self.prompts[1] * np.asarray(prompt, np.float64) + self.step(drafted, prompt)
        length = np.maximum(np.asarray(prompt, np.float64), 1.0)
        self.longest = max(self.longest, float(np.max(length, initial=1.0)))
        return self._interpolated(self.passes, length, 1) + self.step(drafted, prompt)

    def notes(self) -> list[str]:
        """Return what the figures assume, and where they went beyond what was measured."""
        lines = []
        if self.spread > MAX_SPREAD:
            lines.append(f"these passes spread by {self.spread:.0%} about their median: the machine was not still when "
                         "they were taken, and a speed predicted from them means little")  # fmt: skip
        if self.drafts is None:
            lines.append("drafting is taken to cost nothing: the table has no draft_milliseconds")
        for name, largest, known in zip(("batch", "width"), self.asked, (self.batches, self.widths), strict=True):
            if largest > known[-1]:
                lines.append(f"extrapolated: {name} up to {largest:g}, measured up to {known[-1]:g}")
            if known[0] > 1:
                lines.append(f"extrapolated: {name} 1, measured from {known[0]:g}")
        if self.longest > self.widths[-1]:
            lines.append(f"reading prompts of up to {self.longest:g} tokens follows the slope of the widest passes "
                         f"measured, of {self.widths[-1]:g} tokens")  # fmt: skip
        return [*lines, *self.remarks]

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, in microseconds."""
        return {
            "source": self.source, "batches": self.batches.tolist(), "widths": self.widths.tolist(),
            "pass_us": self.passes.tolist(), "draft_us": None if self.drafts is None else self.drafts.tolist(),
            "per_context_us": self.per_context, "prompt_us": self.prompts, "spread": self.spread,
            "notes": self.notes(),
        }  # fmt: skip


def _line(known: Floats, values: Floats, where: Any) -> Floats:
    """Interpolate along the first axis of ``values``; beyond the ends along the two nearest, never less than 0.

    Beyond the last measurement time does not fall.
    """
    if len(known) == 1:
        return np.asarray(values[0] + 0.0 * where)
    left = np.clip(np.searchsorted(known, where, side="right") - 1, 0, len(known) - 2)
    share = (where - known[left]) / (known[left + 1] - known[left])
    value = values[left] + share * (values[left + 1] - values[left])
    return np.asarray(np.where(where > known[-1], np.maximum(value, values[-1]), np.maximum(value, 0.0)))


def from_pass_rows(rows: Sequence[Mapping[str, Any]], source: str) -> StepTable:
    """Return measured passes; rows as described above. Several rows of one batch and width are averaged.

    The largest ``spread`` counts for all of them.

    Raises
    ------
    UsageError
        On a missing or impossible figure, an unknown column, or a batch that lacks a width that another one has.
    """
    cells: dict[tuple[float, float], list[tuple[float, float, float]]] = {}
    prompts: list[tuple[float, float]] = []
    spread = 0.0
    for number, row in enumerate(rows, start=1):
        where = f"{source}: row {number}"
        for name in row:
            if name is None:
                raise UsageError("more cells than columns", where=where)
            if name not in COLUMNS:
                raise UsageError(str(unknown_name("column", name, list(COLUMNS))), where=where)
        values = {name: read_time(name, row.get(name), where) for name in COLUMNS}
        if values["prompt"] > 0:
            prompts.append((values["prompt"], values["milliseconds"]))
            continue
        values["batch"] = values["batch"] if row.get("batch") not in (None, "") else 1.0
        for name in ("batch", "width"):
            if not (values[name] >= 1 and values[name].is_integer()):
                raise UsageError(f"{name} {reprlib.repr(row.get(name))} is no whole number from 1 on", where=where)
        if not values["milliseconds"] > 0:
            raise UsageError("no milliseconds", where=where, fix="give the time of one pass")
        spread = max(spread, values["spread"])
        key = values["batch"], values["width"]
        cells.setdefault(key, []).append((values["milliseconds"], values["context"], values["draft_milliseconds"]))
    if not cells:
        raise UsageError("the table has no passes", where=source, fix="give rows with width and milliseconds")
    batches, widths = (np.array(sorted({key[n] for key in cells})) for n in (0, 1))
    for batch in batches:
        for width in widths:
            if (batch, width) not in cells:
                fix = "measure every width at every batch"
                raise UsageError(f"no row with batch {batch:g} and width {width:g}", where=source, fix=fix)
    per_context, context = _slope(cells)
    grid = [[np.mean(cells[batch, width], axis=0) for width in widths] for batch in batches]
    table = np.array(grid, np.float64)  # (b, w, 3)
    level = table[..., 0] - per_context * batches[:, None] * (table[..., 1] - context)
    drafts = 1e3 * table[..., 2] if (table[..., 2] > 0).any() else None
    read = _line_through(prompts) if prompts else None
    return StepTable(batches, widths, 1e3 * level, drafts, 1e3 * per_context, context, source, read, spread=spread)


def _line_through(prompts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return microseconds of reading a prompt, and of each of its tokens, neither below 0, by least squares."""
    from scipy.optimize import nnls

    lengths, times = (np.array([row[n] for row in prompts]) for n in (0, 1))
    found, _ = nnls(np.stack([np.ones_like(lengths), lengths], axis=1), 1e3 * times)
    return float(found[0]), float(found[1])


def _slope(cells: Mapping[tuple[float, float], Sequence[tuple[float, float, float]]]) -> tuple[float, float]:
    """Return milliseconds per token of context, at least 0, from cells measured at several; and the mean context."""
    above, below = 0.0, 0.0
    every = [row[1] for held in cells.values() for row in held]
    for (batch, _), held in cells.items():
        times, contexts = (np.array([row[n] for row in held]) for n in (0, 1))
        spread = batch * (contexts - contexts.mean())
        above += float(spread @ (times - times.mean()))
        below += float(spread @ spread)
    return (max(above / below, 0.0) if below > 0 else 0.0), float(np.mean(every))
