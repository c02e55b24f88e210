"""Seconds: what a step costs, and the speed-up that follows: the one model behind every predicted speed.

:class:`Cost` says what a model of cost answers: microseconds of drafting, of one pass of the target over some tokens of
some requests, and of deciding. Here is :class:`CostModel`, fitted to the timings of a trace or to a user's table of
steps, which knows one request at a time; :mod:`.step_table` interpolates measured passes by batch and width, and
:mod:`.roofline` computes them from a model's size and a device's data sheet.

In a :class:`CostModel` a step drafts, verifies and decides. Each part costs ``base + per_draft * K + per_context * L``
microseconds, with L the tokens (prompt and generated) that the step stands on. The first step of a request also reads
the prompt and is fitted on its own, with L the length of the prompt. Timings of captured steps (wave 0) are used, never
those of ``cover``: they are shares of a batch. Fits are robust (soft L1 beyond the spread of the residuals), since
timings have outliers on one side.

Where all blocks have one K, the trace cannot tell ``per_draft`` from ``base``: the fit leaves it out and says so.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, unknown_name

if TYPE_CHECKING:
    from ..trace.stored import Source
    from ..walk.batch import Times

Floats = npt.NDArray[np.float64]
PARTS = ("draft", "verify", "select")
TERMS = ("base", "per_draft", "per_context")
MAX_SCATTER = 0.10
"""Median distance of a step's time from the fit, over the median time, beyond which timings are not to be trusted: on a
quiet machine it is 2 %."""


@dataclass(frozen=True)
class Linear:
    """Microseconds of one part of a step: ``base + per_draft * K + per_context * L``."""

    base: float = 0.0
    per_draft: float = 0.0
    per_context: float = 0.0

    def at(self, drafted: Any, context: Any) -> Any:
        """Return microseconds for K draft tokens on L tokens."""
        return self.base + self.per_draft * drafted + self.per_context * context


class Cost:
    """What steps cost, in microseconds; a model of it gives the four parts.

    Attributes
    ----------
    source : str
        Where the figures come from.
    remarks : list of str
        Said with every figure, after what the model itself assumes.
    """

    source: str
    remarks: list[str]

    def draft_us(self, drafted: Any, context: Any = 0.0, batch: int = 1) -> Any:
        """Return microseconds of drafting at most K tokens for each of ``batch`` requests."""
        raise NotImplementedError

    def pass_us(self, tokens: Any, context: Any = 0.0, batch: int = 1) -> Any:
        """Return microseconds of one pass of the target.

        Parameters
        ----------
        tokens : array
            Tokens in the pass, of all its requests together: 1 each for the target alone, K + 1 for a verification.
        context : array
            Tokens that the requests stand on, together.
        batch : int
            Requests in the pass.
        """
        raise NotImplementedError

    def select_us(self, drafted: Any, context: Any = 0.0) -> Any:
        """Return microseconds of deciding on a block."""
        return 0.0

    def first_us(self, drafted: Any, prompt: Any) -> Any:
        """Return microseconds of the first step of a request, its prompt included."""
        return self.pass_us(prompt) + self.step(drafted, prompt)

    def notes(self) -> list[str]:
        """Return what the figures assume, for people."""
        return list(self.remarks)

    def step(self, drafted: Any, context: Any) -> Any:
        """Return microseconds of a whole step of one request that is not its first one."""
        return self.draft_us(drafted, context) + self.pass_us(drafted + 1, context) + self.select_us(drafted, context)

    def seconds(self, steps: Any, drafted: Any, tokens: Any, prompt: Any) -> Floats:
        """Return the predicted seconds of whole requests, one at a time.

        The steps of a walk are taken to be spread evenly over its tokens, so their mean context is the prompt and half
        of what was generated; on the committed traces this moves the sum by less than 1 % (see the tests).

        Parameters
        ----------
        steps, drafted, tokens : array
            Verifications, draft tokens proposed and tokens committed of each request.
        prompt : array
            Tokens of its prompt.
        """
        steps, drafted, tokens = (np.asarray(part, np.float64) for part in (steps, drafted, tokens))
        rest = np.maximum(steps - 1, 0)
        width = np.where(steps > 0, drafted / np.maximum(steps, 1), 0.0)
        # Steps 1 .. n - 1 stand behind tokens/n, 2 tokens/n, ..: on average half of all tokens.
        later = self.step(width, prompt + 0.5 * tokens)
        return np.asarray((np.where(steps > 0, self.first_us(width, prompt), 0.0) + rest * later) * 1e-6)

    def plain_seconds(self, tokens: Any, prompt: Any) -> Floats:
        """Return the predicted seconds of the target alone on whole requests: one forward pass per token, no draft.

        A forward pass of one token is a verification of no draft token. Traces hold passes over one token, timed
        beside the capture. Where one does not, and all its blocks have one K, the fit cannot tell what the draft tokens
        add, and a verification of K + 1 tokens stands for it: the target alone may then be faster than predicted, and a
        speed-up over it smaller. :meth:`notes` says so.

        Parameters
        ----------
        tokens, prompt : array
            Generated tokens, and tokens of the prompt, of each request.
        """
        tokens, prompt = np.asarray(tokens, np.float64), np.asarray(prompt, np.float64)
        begin = self.first_us(0, prompt) - self.draft_us(0, prompt) - self.select_us(0, prompt)
        begin = np.maximum(begin, self.pass_us(1, prompt))
        each = self.pass_us(1, prompt + 0.5 * tokens)
        return np.asarray((np.where(tokens > 0, begin, 0.0) + np.maximum(tokens - 1, 0) * each) * 1e-6)

    def verification(self, K: int, context: float, batch: int = 1) -> float:
        """Return how long a verification of K draft tokens takes, in passes over one token each."""
        return float(
            self.pass_us(batch * (K + 1), batch * context, batch) / self.pass_us(batch, batch * context, batch)
        )

    def times(self, batch: int, K: int, longest: int, chunk: int = 0) -> Times:
        """Return seconds of the parts of an iteration, for :func:`asdsim.walk.batch.simulate`.

        Parameters
        ----------
        batch, K, longest : int
            Largest batch, longest draft and longest prompt.
        chunk : int
            Prompt tokens read beside an iteration.

        Raises
        ------
        UsageError
            If the model knows one request at a time only, and ``batch`` is larger.
        """
        from ..walk.batch import Times

        memory, draft = np.zeros((batch + 1, batch * (K + 1) + chunk + 1)), np.zeros((batch + 1, K + 1))
        tokens, drafted = np.arange(memory.shape[1], dtype=np.float64), np.arange(K + 1, dtype=np.float64)
        for number in range(batch + 1):
            held, most = max(number, 1), number * (K + 1) + chunk + 1
            memory[number, :most] = self.pass_us(tokens[:most], 0.0, held) + number * self.select_us(np.float64(K))
            draft[number] = self.draft_us(drafted, 0.0, held) if number else 0.0
        draft[:, 0] = 0.0  # no draft, no drafter
        slope = float(self.pass_us(1.0, 1.0) - self.pass_us(1.0, 0.0))
        prompts = np.arange(longest + 1, dtype=np.float64)
        prompt = np.asarray(self.first_us(0.0, prompts) - self.step(0.0, prompts), np.float64)
        compute = np.zeros_like(memory)
        return Times(1e-6 * memory, compute, 1e-6 * slope, 0.0, 1e-6 * draft, 1e-6 * np.maximum(prompt, 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, in microseconds."""
        raise NotImplementedError


@dataclass(frozen=True)
class CostModel(Cost):
    """What steps of one request at a time cost.

    Attributes
    ----------
    draft, verify, select : Linear
        Of every step but the first of a request.
    first : Linear
        The whole first step, prompt included; L is the length of the prompt.
    source : str
        Where the figures come from.
    fit : dict
        How well they fit: steps used, the median absolute residual of each part in microseconds, and ``scatter``, these
        over the median time of a step.
    remarks : list of str
        More to say of every figure, such as how far predictions were off.
    """

    draft: Linear
    verify: Linear
    select: Linear
    first: Linear
    source: str
    fit: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def draft_us(self, drafted: Any, context: Any = 0.0, batch: int = 1) -> Any:
        """Return microseconds of drafting K tokens."""
        self._check(batch)
        return self.draft.at(drafted, context)

    def pass_us(self, tokens: Any, context: Any = 0.0, batch: int = 1) -> Any:
        """Return microseconds of one pass over K + 1 tokens."""
        self._check(batch)
        return self.verify.at(np.asarray(tokens) - 1, context)

    def select_us(self, drafted: Any, context: Any = 0.0) -> Any:
        """Return microseconds of deciding on a block."""
        return self.select.at(drafted, context)

    def first_us(self, drafted: Any, prompt: Any) -> Any:
        """Return microseconds of the first step of a request, as fitted."""
        return self.first.at(drafted, prompt)

    def _check(self, batch: int) -> None:
        if batch > 1:
            raise UsageError(
                f"these step times are of one request at a time, and say nothing of a batch of {batch}",
                where=self.source, fix="name a table with a column batch, or roofline:DEVICE,model=CONFIG.json",
            )  # fmt: skip

    def notes(self) -> list[str]:
        """Return what the figures assume."""
        lines = []
        if self.verify.per_draft == 0.0:
            lines.append(
                "a pass over one token is taken to last as long as a verification: these step times do not tell them "
                "apart, so the target alone may be faster than predicted, and a speed-up over it smaller"
            )
        if self.fit.get("scatter", 0.0) > MAX_SCATTER:
            lines.append(
                f"these step times scatter by {self.fit['scatter']:.0%} about their fit: the machine was busy when "
                "they were taken, and a speed predicted from them means little"
            )
        return [*lines, *self.remarks]

    def step(self, drafted: Any, context: Any) -> Any:
        """Return microseconds of a whole step that is not the first one."""
        return sum(getattr(self, part).at(drafted, context) for part in PARTS)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, in microseconds."""
        return asdict(self)


# Published step times. One run of DeepSeek-V4-Flash with a DSpark drafter (K = 5, 8 x H20, arXiv 2608.03447): seconds
# over proposals, 146.36 ms native; the parts are not told apart there. See analysis/published.py.
PUBLISHED: dict[str, dict[str, Any]] = {
    "h20-deepseek-v4-flash": {
        "verify_us": 2348.31919839 / 16045 * 1e6,
        "source": "arXiv 2608.03447, 8 x H20, native run",
    }
}
"""Step times that ``--cost`` knows by name."""


FITTED = 1 << 18
"""Steps that a fit uses, at most: three terms need no more, and all steps of a large trace would fill memory."""


def fit_trace(trace: Source) -> CostModel:
    """Fit a cost model to the timings of the captured path; of a large trace, to about :data:`FITTED` of its steps.

    Raises
    ------
    UsageError
        If fewer than eight captured steps have timings.
    """
    names = ["wave", "start_pos", "num_draft_tokens", *(f"{part}_us" for part in PARTS)]
    held, owner = trace.step_columns(names, FITTED)
    wave, start = held["wave"], held["start_pos"].astype(np.float64)
    drafted = held["num_draft_tokens"].astype(np.float64)
    prompt = trace.prompt_tokens.astype(np.float64)
    context = prompt[owner] + start if len(prompt) else start
    times = {part: held[f"{part}_us"].astype(np.float64) for part in PARTS}
    whole = times["draft"] + times["verify"] + times["select"]
    timed = (wave == 0) & (whole > 0)
    inner = np.flatnonzero(timed & (start > 0))
    root = np.flatnonzero(timed & (start == 0))
    if len(inner) < 8:
        raise UsageError(
            f"{len(inner)} captured steps with timings are too few for a cost model", where=str(trace.path),
            fix="give step times with --cost FILE",
        )  # fmt: skip
    models: dict[str, Any] = {}
    residual: dict[str, float] = {}
    for part in PARTS:
        models[part], residual[part] = robust(drafted[inner], context[inner], times[part][inner])
    if len(root) >= 4:
        models["first"], residual["first"] = robust(drafted[root], context[root], whole[root])
    else:
        models["first"] = _sum(models[part] for part in PARTS)
    typical = sum(float(np.median(times[part][inner])) for part in PARTS)
    fit = {
        "steps": len(inner), "first_steps": len(root), "median_absolute_residual_us": residual,
        "scatter": sum(residual[part] for part in PARTS) / typical,
        "per_draft_known": bool(np.ptp(drafted[inner]) > 0),
    }  # fmt: skip
    return CostModel(**models, source=f"timings of {trace.path}", fit=fit)


def _sum(parts: Iterable[Linear]) -> Linear:
    held = list(parts)
    return Linear(*(sum(getattr(part, term) for part in held) for term in TERMS))


def robust(drafted: Floats, context: Floats, microseconds: Floats) -> tuple[Linear, float]:
    """Fit ``base + per_draft * K + per_context * L`` with non-negative terms; robust to outliers.

    Parameters
    ----------
    drafted, context, microseconds : float64 (n,)

    Returns
    -------
    Linear
    float
        Median absolute residual, in microseconds.
    """
    from scipy.optimize import least_squares

    columns = [np.ones_like(drafted), drafted, context]
    used = [0] + [n for n in (1, 2) if np.ptp(columns[n]) > 0]
    design = np.stack([columns[n] for n in used], axis=1)
    middle = float(np.median(microseconds))
    spread = max(float(np.median(np.abs(microseconds - middle))), 1e-3 * max(middle, 1.0), 1e-6)
    scale = np.maximum(np.abs(design).max(axis=0), 1e-12)
    unit = max(middle, 1e-6)
    start = np.zeros(len(used))
    start[0] = middle / unit
    for _ in range(3):  # the spread about the fit is what tells an outlier, and needs a fit
        fit = least_squares(
            lambda x: (design / scale) @ x - microseconds / unit, start, bounds=(0.0, np.inf), loss="soft_l1",
            f_scale=1.5 * spread / unit, x_scale="jac",
        )  # fmt: skip
        start = np.maximum(fit.x, 1e-12)
        away = np.abs(design @ (fit.x / scale * unit) - microseconds)
        spread = max(float(np.median(away)), 1e-6 * unit)
    terms = dict(zip((TERMS[n] for n in used), (fit.x / scale * unit).tolist(), strict=True))
    return Linear(**terms), float(np.median(away))


MAX_CELL = 1e12
"""Largest time or length in a table of step times: eleven days in microseconds."""
COLUMNS = ("draft_us", "verify_us", "select_us")


def from_rows(rows: Sequence[Mapping[str, Any]], source: str) -> CostModel:
    """Make a cost model from a table of step times.

    Parameters
    ----------
    rows : sequence of mapping
        ``verify_us`` and, where they are known, ``draft_us``, ``select_us``, ``num_draft_tokens``, ``context`` and
        ``first_us`` (the first step of a request, prompt included). One row gives constants; several are fitted.
    source : str

    Raises
    ------
    UsageError
        On a missing or negative figure, or an unknown column.
    """
    known = (*COLUMNS, "num_draft_tokens", "context", "first_us")
    table: dict[str, list[float]] = {name: [] for name in known}
    for nth, row in enumerate(rows, start=1):
        where = f"{source}: row {nth}"
        for name in row:
            if name is None:  # what csv calls the cells behind the last column
                raise UsageError("more cells than columns", where=where)
            if name not in known:
                raise UsageError(f"{where}: {unknown_name('column', name, list(known))}")
        if row.get("verify_us") in (None, ""):
            raise UsageError("no verify_us", where=where, fix="give microseconds of one verification")
        for name in known:
            table[name].append(read_time(name, row.get(name), where))
        if not table["verify_us"][-1] > 0:
            raise UsageError("verify_us is 0", where=where, fix="give microseconds of one verification")
    if not rows:
        raise UsageError("the table has no rows", where=source)
    arrays = {name: np.array(values) for name, values in table.items()}
    drafted, context = arrays["num_draft_tokens"], arrays["context"]
    parts: dict[str, Any] = {}
    for part in PARTS:
        times = arrays[f"{part}_us"]
        parts[part] = Linear(float(times[0])) if len(rows) == 1 else robust(drafted, context, times)[0]
    first = arrays["first_us"]
    if (first > 0).all():
        parts["first"] = Linear(float(first[0])) if len(rows) == 1 else robust(drafted, context, first)[0]
    else:
        parts["first"] = _sum(parts[part] for part in PARTS)
    return CostModel(**parts, source=source, fit={"rows": len(rows)})


def read_time(name: str, value: Any, where: str) -> float:
    """Return a cell as a number, 0 where it is empty."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = 0.0 if value in (None, "") else float(value)
    except OverflowError:
        number = float("inf")
    except (TypeError, ValueError):
        raise UsageError(f"{name} {reprlib.repr(value)} is not a number", where=where) from None
    if not 0 <= number <= MAX_CELL:
        fix = f"give a number from 0 to {MAX_CELL:g}"
        raise UsageError(f"{name} {reprlib.repr(value)} is no time or length", where=where, fix=fix)
    return number
