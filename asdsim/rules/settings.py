"""One setting, a grid of settings, and how both are written on a command line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, DecimalException, InvalidOperation
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, unknown_name
from . import get_rule
from .asd import JUDGES, Reading
from .scoring import DEFAULT, LEDGERS, Layout, shown
from .spec import Value

MAX_SETTINGS = 20_000_000
"""Largest grid."""

KEPT_LEDGERS = ("request", "block")
"""Ledgers of a setting. The third one that may be asked for, ``none``, is B = inf."""

MAX_AXIS = 1_000_000
"""Longest list that one range may unfold to."""

DEFAULT_AXES: dict[str, Any] = {"B": "0,1,2,4,8,16", "g": ".1,.25,.5,1", "M": "1,2,inf"}
"""What is replayed or plotted where no setting is named and none is covered."""


def check_value(name: str, value: float) -> None:
    """Refuse a B, g or M that is negative, NaN or (M) not whole."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise UsageError(f"{name} must be a number, not {value!r}")
    try:
        float(value)
    except OverflowError:
        raise UsageError(f"{name} is larger than a float can hold", fix="use inf") from None
    if math.isnan(value):
        raise UsageError(f"{name} is NaN", fix="give a number >= 0, or inf")
    if value < 0:
        raise UsageError(f"{name}={value:g} is negative", fix="give a number >= 0, or inf")
    if name == "M" and not math.isinf(value) and value != int(value):
        raise UsageError(f"M={value:g} is not a whole number", fix="give a whole number of tokens per block, or inf")


@dataclass(frozen=True)
class Policy:
    """One setting of the rule.

    Attributes
    ----------
    budget : float
        B, regret that a request may spend in all, in logits; 0 is strict, ``inf`` allowed.
    gate : float
        g, largest r/q of one relaxed token, in logits; ``inf`` allowed.
    cap : float
        M, relaxed tokens per block; a whole number or ``inf``.
    semantics : str
        Who judges: a key of :data:`asdsim.rules.asd.JUDGES`.
    layout : Layout
        How mismatches are scored and charged. Under another rule than ASD, B and M are ``inf`` and g is its limit.
    label : str
        How to call a setting of another rule.
    ledger : {"request", "block"}
        Whether what earlier blocks spent counts, or every block starts from 0.
    """

    budget: float
    gate: float
    cap: float
    semantics: str = "paper"
    layout: Layout = DEFAULT
    label: str = field(default="", compare=False)
    ledger: str = "request"

    def __post_init__(self) -> None:
        check_value("B", self.budget)
        if self.layout.rule == "asd":
            check_value("g", self.gate)
        check_value("M", self.cap)
        if self.semantics not in JUDGES:
            raise unknown_name("semantics", self.semantics, list(JUDGES))
        if self.ledger not in KEPT_LEDGERS:
            raise unknown_name("ledger", self.ledger, list(KEPT_LEDGERS))

    @property
    def reading(self) -> Reading:
        """Who judges, and what it knows of the ledger."""
        return Reading(self.semantics, self.ledger)

    def __str__(self) -> str:
        parts = [f"B={self.budget:g} g={self.gate:g} M={self.cap:g}", *shown(self.layout.cuts)]
        return self.label or " ".join(parts)


SEMANTICS = {"paper": "suffix", "core": "suffix", "dspark": "normalised", "lightllm": "suffix"}
"""Readings of ASD, and the value scheme of each."""


def layout_of(
    semantics: str, *, regret: str = "logit", value: str = "", K: int = 0, draft_threshold: float = 0.0,
    draft_stop: str = "after",
) -> Layout:  # fmt: skip
    """Return how a reading of ASD lays out its mismatches, in blocks cut to K draft tokens and by a threshold (0: not).

    Raises
    ------
    UsageError
        On an unknown name.
    """
    if semantics not in SEMANTICS:
        raise unknown_name("semantics", semantics, list(SEMANTICS))
    mismatch = "regret" if semantics == "lightllm" else "id"
    return Layout(
        regret=regret, value=value or SEMANTICS[semantics], mismatch=mismatch, width=K, threshold=draft_threshold,
        stop=draft_stop,
    )  # fmt: skip


STRICT = Policy(0.0, 0.0, 0.0)
"""Strict matching by token id."""


def parse_axis(name: str, text: str) -> list[float]:
    """Read one axis of a sweep: ``"1,2,inf"``, ``"0:16:.5"`` (inclusive), or both mixed with commas.

    Ranges are unfolded in decimal arithmetic, so ``0:1:.1`` holds exactly the floats that ``.1``, ``.2``, .. denote.

    Raises
    ------
    UsageError
        On anything that is not a number, a range that never ends, or a value that ``name`` cannot take.
    """
    values = unfold(name, text)
    for value in values:
        check_value(name, value)
    return values


def parse_lengths(text: str) -> list[int]:
    """Read draft lengths: ``"3"``, ``"1:7"`` (every one from 1 to 7), ``"1,3,7"``.

    Raises
    ------
    UsageError
        On anything but whole numbers from 1 on.
    """
    pieces = ",".join(f"{item}:1" if item.count(":") == 1 else item for item in text.split(","))
    lengths = unfold("K", pieces)
    for length in lengths:
        if not (length >= 1 and float(length).is_integer()):
            raise UsageError(f"K={length:g} is no draft length", fix="give whole numbers from 1 on, such as 3 or 1:7")
    return [int(length) for length in lengths]


def parse_thresholds(text: str, stop: str = "after") -> list[float]:
    """Read thresholds on the drafter's probability: ``"0,.3,.5"`` or ``"0:.8:.2"``.

    Raises
    ------
    UsageError
        On anything but probabilities, or an unknown ``stop``.
    """
    return [Layout(threshold=tau, stop=stop).threshold for tau in unfold("draft-threshold", text)]


@dataclass(frozen=True)
class Schedule:
    """Draft length by batch: the requests that share a step choose its K.

    Attributes
    ----------
    ranges : tuple of (int, int)
        First batch and K of each range, ascending from batch 1. A range ends where the next one begins, and the last
        one never; K = 0 does not speculate.
    """

    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        first = [batch for batch, _ in self.ranges]
        if not first or first[0] != 1 or any(later <= batch for batch, later in pairwise(first)):
            raise UsageError(
                f"ranges of batches begin at {first}", fix="let the first begin at 1, and each behind the one before"
            )
        if any(K < 0 for _, K in self.ranges):
            raise UsageError("a draft length by batch is negative", fix="give whole numbers; 0 does not speculate")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every K of the table once, ascending."""
        return tuple(sorted({K for _, K in self.ranges}))

    def at(self, batch: int) -> int:
        """Return the K of a batch."""
        return next(K for first, K in reversed(self.ranges) if first <= batch)

    def rows(self, largest: int) -> list[list[int]]:
        """Return [first batch, last batch, K] of each range up to a largest batch.

        As vLLM takes it for ``num_speculative_tokens_per_batch_size``.
        """
        ends = [*(first - 1 for first, _ in self.ranges[1:]), largest]
        return [
            [first, min(last, largest), K]
            for (first, K), last in zip(self.ranges, ends, strict=True) if first <= largest
        ]  # fmt: skip

    def __str__(self) -> str:
        ends = [*(str(first - 1) for first, _ in self.ranges[1:]), ""]
        return ",".join(f"{first}-{last}:{K}" for (first, K), last in zip(self.ranges, ends, strict=True))


def schedule_of(rows: Sequence[Sequence[int]]) -> Schedule:
    """Read rows of [first batch, last batch, K] as vLLM does: a gap belongs to the range before it.

    Raises
    ------
    UsageError
        Where ranges overlap, are not in order or do not begin at 1.
    """
    for row in rows:
        if len(row) != 3 or row[0] > row[1]:
            raise UsageError(f"{list(row)} is not [first batch, last batch, K]")
    for (_, last, _), (first, _, _) in pairwise(rows):
        if first <= last:
            raise UsageError(f"batch {first} is in two ranges", fix="let each range begin behind the one before")
    return Schedule(tuple((int(row[0]), int(row[2])) for row in rows))


def parse_schedule(text: str) -> Schedule:
    """Read draft lengths by batch: ``"1-4:5,5-16:3,17-:1"``; ``"8:2"`` is batch 8 alone, up to the next range.

    Raises
    ------
    UsageError
        On anything else, and as :func:`schedule_of`.
    """
    rows = []
    for item in text.split(","):
        batches, _, K = item.strip().partition(":")
        first, dash, last = batches.partition("-")
        words = (first, last or (first if not dash else str(2**31)), K)
        if not all(word.strip().isdecimal() for word in words):
            raise UsageError(
                f"K by batch: {item!r} is not a range of batches", fix="write for example 1-4:5,5-16:3,17-:1"
            )
        rows.append([int(word) for word in words])
    return schedule_of(rows)


def unfold(name: str, text: str) -> list[float]:
    """Do what :func:`parse_axis` does for any numbers."""
    values: list[float] = []
    for part in text.split(","):
        item = part.strip()
        if not item:
            raise UsageError(
                f"empty item in {name}={text!r}", fix="write a comma list such as 0,2,4 or a range 0:16:.5"
            )
        pieces = item.split(":")
        if len(pieces) == 1:
            values.append(_number(name, item))
        elif len(pieces) == 3:
            values.extend(_range(name, item, pieces))
        else:
            raise UsageError(f"{name}: {item!r} is not a range", fix="write start:stop:step")
    return list(dict.fromkeys(values))


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name}: {text!r} is not a number") from None


def _range(name: str, item: str, pieces: Sequence[str]) -> list[float]:
    try:
        start, stop, step = (Decimal(piece.strip()) for piece in pieces)
    except InvalidOperation:
        raise UsageError(f"{name}: {item!r} is not a range of numbers", fix="write start:stop:step") from None
    if not (start.is_finite() and stop.is_finite() and step.is_finite()):
        raise UsageError(
            f"{name}: the range {item!r} never ends", fix="use finite bounds; add inf as an item of its own"
        )
    if step <= 0 and start != stop:
        raise UsageError(f"{name}: the range {item!r} never ends", fix="give a step > 0")
    if stop < start:
        raise UsageError(f"{name}: the range {item!r} is empty", fix="give stop >= start")
    try:
        count = 1 if start == stop else int(min((stop - start) / step, Decimal(MAX_AXIS))) + 1
    except DecimalException:
        count = MAX_AXIS + 1
    if count > MAX_AXIS:
        raise UsageError(
            f"{name}: the range {item!r} has {MAX_AXIS} values or more", fix="take a larger step or a shorter range"
        )
    return [float(start + n * step) for n in range(count)]


def axis_values(name: str, values: float | str | Iterable[float]) -> list[float]:
    """Return an axis given as text, one number, or numbers."""
    if isinstance(values, str):
        return parse_axis(name, values)
    if isinstance(values, (bytes, dict)):
        raise UsageError(f"{name} is {type(values).__name__}", fix="give numbers, or text such as '0,2,4'")
    if isinstance(values, np.ndarray):
        values = np.atleast_1d(values).ravel()
    items = list(values) if isinstance(values, Iterable) else [values]
    if not items:
        raise UsageError(f"{name} is empty", fix="give at least one value")
    for item in items:
        check_value(name, item)
    return list(dict.fromkeys(float(item) for item in items))


@dataclass(frozen=True)
class Grid:
    """A list of settings, as parallel arrays.

    Attributes
    ----------
    budget, gate, cap : float64 (n,)
        B, g and M of each setting.
    semantics : str
        Shared by all settings.
    layout : Layout
        Shared by all settings.
    params : list of dict
        Parameters of each setting of another rule than ASD.
    ledger : {"request", "block"}
        Shared by all settings.
    """

    budget: npt.NDArray[np.float64]
    gate: npt.NDArray[np.float64]
    cap: npt.NDArray[np.float64]
    semantics: str = "paper"
    axes: dict[str, list[float]] = field(default_factory=dict, compare=False)
    layout: Layout = DEFAULT
    params: list[dict[str, Value]] = field(default_factory=list, compare=False)
    ledger: str = "request"

    def __len__(self) -> int:
        return int(self.budget.shape[0])

    def __getitem__(self, rows: slice | Sequence[int] | npt.NDArray[np.int64]) -> Grid:
        """Return some settings: a slice, or rows in the order given."""
        if isinstance(rows, slice):
            params = self.params[rows]
        else:
            rows = np.asarray(rows, np.int64)
            params = [self.params[n] for n in rows] if self.params else []
        return replace(
            self, budget=self.budget[rows], gate=self.gate[rows], cap=self.cap[rows], axes={}, params=params
        )  # fmt: skip

    def policy(self, index: int) -> Policy:
        """Return one setting."""
        numbers = float(self.budget[index]), float(self.gate[index]), float(self.cap[index])
        return Policy(*numbers, self.semantics, self.layout, self.label(index), self.ledger)

    @property
    def reading(self) -> Reading:
        """Who judges all settings, and what it knows of the ledger."""
        return Reading(self.semantics, self.ledger)

    @property
    def strict(self) -> Grid:
        """B = g = M = 0 in the same reading: strict matching by token id (under ``lightllm``, ties match)."""
        return Grid.of([replace(STRICT, semantics=self.semantics, ledger=self.ledger)])

    def label(self, index: int) -> str:
        """Return how a setting of another rule than ASD is called; empty for ASD."""
        return f"{self.layout.rule} {self.parameters(index)}".strip() if self.params else ""

    def parameters(self, index: int) -> str:
        """Return what tells a setting apart besides B, g and M: parameters of another rule, or how ASD was varied."""
        if self.params:
            return " ".join(f"{name}={_short(value)}" for name, value in self.params[index].items() if value != -1.0)
        varied = {"regret": (self.layout.regret, "logit"), "value": (self.layout.value, SEMANTICS[self.semantics]),
                  "ledger": (self.ledger, "request")}  # fmt: skip
        told = [f"{name}={value}" for name, (value, usual) in varied.items() if value != usual]
        return " ".join([*told, *shown(self.layout.cuts)])

    @classmethod
    def product(
        cls,
        B: float | str | Iterable[float],
        g: float | str | Iterable[float],
        M: float | str | Iterable[float],
        semantics: str = "paper",
        *,
        regret: str = "logit",
        value: str = "",
        ledger: str = "request",
        gate: bool = True,
        K: int = 0,
        draft_threshold: float = 0.0,
        draft_stop: str = "after",
    ) -> Grid:
        """Return every combination, B outermost and M innermost.

        Parameters
        ----------
        B, g, M : float, list of float, or str
        semantics : str
            Key of :data:`SEMANTICS`.
        regret, value, ledger : str
            See :class:`asdsim.rules.scoring.Layout`; by default the value scheme of the semantics. ``ledger`` is
            ``request``, ``block`` (spent starts from 0 in every block) or ``none`` (no budget: B is ignored).
        gate : bool
            False lifts the gate: g is ignored.
        K : int
            Cut every block to its first K draft tokens, as a drafter that proposes K would; 0 takes whole blocks. The
            value of a position is that of the shorter block: K - i for ASD.
        draft_threshold, draft_stop : float, str
            Cut every block where the drafter's probability falls below tau; see :data:`asdsim.rules.scoring.STOP_TEXT`
            and :func:`asdsim.rules.scoring.draft_lengths`. K is then the length of the cut block.

        Raises
        ------
        UsageError
            On an invalid value, or an unknown name.
        """
        layout = layout_of(
            semantics, regret=regret, value=value, K=K, draft_threshold=draft_threshold, draft_stop=draft_stop
        )
        if ledger not in LEDGERS:
            raise unknown_name("ledger", ledger, list(LEDGERS))
        kept = "block" if ledger == "block" else "request"
        axes = {
            "B": axis_values("B", B if ledger != "none" else math.inf),
            "g": axis_values("g", g if gate else math.inf),
            "M": axis_values("M", M),
        }
        size = math.prod(len(axis) for axis in axes.values())
        if size > MAX_SETTINGS:
            raise UsageError(
                f"the grid has {size} settings", fix=f"at most {MAX_SETTINGS} are allowed; use larger steps"
            )
        budget, limit, cap = (axis.ravel() for axis in np.meshgrid(axes["B"], axes["g"], axes["M"], indexing="ij"))
        return cls(budget, limit, cap, semantics, axes, layout, ledger=kept)

    @classmethod
    def of(cls, policies: Sequence[Policy]) -> Grid:
        """Return the given settings in their order; all must share one reading."""
        if not policies:
            raise UsageError("no setting given")
        if any(policy.label for policy in policies):
            raise UsageError("settings of a rule other than ASD", fix="use rule_grids")
        shared = {(policy.reading, policy.layout) for policy in policies}
        if len(shared) > 1:
            listed = ", ".join(
                sorted(f"{reading.semantics} {layout} ledger={reading.ledger}" for reading, layout in shared)
            )
            raise UsageError(f"settings of several semantics or rules in one grid: {listed}")
        (semantics, ledger), layout = shared.pop()
        return cls(
            np.array([policy.budget for policy in policies], np.float64),
            np.array([policy.gate for policy in policies], np.float64),
            np.array([policy.cap for policy in policies], np.float64),
            semantics,
            layout=layout,
            ledger=ledger,
        )


def _short(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else value


def rule_grids(name: str, given: Mapping[str, Value | Sequence[Value]] | None = None) -> list[Grid]:
    """Return every combination of a rule's parameters, one grid for each way to score mismatches.

    Parameters
    ----------
    name : str
        A name in :data:`asdsim.rules.NAMES`.
    given : mapping
        Parameters by name: one value, a list, or text as on the command line; the others take their published default.

    Raises
    ------
    UsageError
        On an unknown rule or parameter, or a value outside its range.
    """
    rule = get_rule(name)
    known = [parameter.name for parameter in rule.parameters]
    for key in given or {}:
        if key not in known:
            raise unknown_name(f"parameter of rule {name}", key, known)
    axes: dict[str, list[Value]] = {}
    for parameter in rule.parameters:
        values: Any = (given or {}).get(parameter.name, parameter.default)
        if isinstance(values, str):
            values = values.split(",") if parameter.choices else unfold(parameter.name, values)
        elif not isinstance(values, Iterable):
            values = [values]
        axes[parameter.name] = list(dict.fromkeys(parameter.check(name, value) for value in values))
        if not axes[parameter.name]:
            raise UsageError(f"{parameter.name} is empty", fix="give at least one value")
    moved = {rule.knob: axes.pop(rule.knob)} if rule.knob else {}
    grids = []
    for chosen in product(*axes.values()):
        fixed = dict(zip(axes, chosen, strict=True))
        settings = [{**fixed, **dict(zip(moved, knob, strict=True))} for knob in product(*moved.values())]
        params = [{key: setting[key] for key in known} for setting in settings]
        width = int(fixed.pop("K")) if name == "truncate" else 0
        unlimited = np.full(len(params), math.inf)
        limits = np.array([rule.limit(setting) for setting in params], np.float64)
        layout = Layout(name, width=width, params=tuple(fixed.items()))
        grids.append(Grid(unlimited, limits, unlimited, layout=layout, params=params))
    return grids


def parse_setting(text: str, like: Grid | None = None) -> Grid:
    """Read one setting as people write it: ``strict``, ``B=8 g=.25 M=2``, or a rule, ``mars theta=.9``.

    Parameters
    ----------
    text : str
    like : Grid, optional
        Whose semantics and layout ``strict`` and ASD settings take; by default those of the paper.

    Raises
    ------
    UsageError
        If it names no setting, or several.
    """
    words = text.replace(",", " ").split()
    pairs = [word.partition("=") for word in words]
    name = "asd" if pairs and pairs[0][1] else words[0].lower() if words else ""
    given = {key: value for key, equals, value in pairs if equals}
    fix = "write for example strict, 'B=8 g=.25 M=2' or 'mars theta=.9'"
    if not words or len(given) != len(words) - (name != "asd" or not pairs[0][1]):
        raise UsageError(f"{text!r} is not a setting", fix=fix)
    if name == "strict" and not given:
        base = like if like is not None else Grid.of([STRICT])
        zero = np.zeros(1)
        return replace(base, budget=zero, gate=zero, cap=zero, axes={}, params=[])
    if name != "asd":
        grids = rule_grids(name, given)
        if len(grids) != 1 or len(grids[0]) != 1:
            raise UsageError(f"{text!r} names several settings", fix="give each parameter one value")
        return grids[0]
    missing = {"B", "g", "M"} - set(given)
    unknown = set(given) - {"B", "g", "M"}
    if missing or unknown:
        what = f"{sorted(unknown)[0]!r} is unknown" if unknown else f"{sorted(missing)[0]} is missing"
        raise UsageError(f"setting {text!r}: {what}", fix=fix)
    grid = Grid.product(given["B"], given["g"], given["M"])
    if len(grid) != 1:
        raise UsageError(f"{text!r} names several settings", fix="give B, g and M one value each")
    if like is not None and like.layout.rule == "asd":
        return replace(grid, semantics=like.semantics, layout=like.layout)
    return grid
