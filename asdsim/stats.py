"""Intervals and tests, paired by request.

Requests are the units that are resampled: steps of one request are not independent. A resample is a row of weights (how
often each request was drawn), so the sums of all resamples of all settings are one matrix product, and every setting,
baseline and figure sees the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UsageError

Floats = npt.NDArray[np.float64]
Totals = Mapping[str, Floats]
"""Sums over requests, by column."""
Statistic = Callable[[Totals], Floats]

LEVEL = 0.95
RESAMPLES = 2000
FEW = 30
"""Under so many requests an interval is wide, and its own level no longer sure: reports say so."""
MANY = 1000
"""Over so many requests a ratio is resampled draw by draw: a matrix of weights would take gigabytes, and seconds."""
FEWEST = 5
"""Below this many requests there is no interval: the resamples of so few are a handful of close values."""
MAX_SPREAD = 0.15
"""Relative spread of repeated timings, see :func:`half_spread`, beyond which they are not to be trusted."""


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals; NaN where there is none.

    Attributes
    ----------
    value, low, high : float64 (n,)
    """

    value: Floats
    low: Floats
    high: Floats

    def take(self, rows: npt.NDArray[np.int64]) -> Intervals:
        """Return some of them, in the order given."""
        return Intervals(self.value[rows], self.low[rows], self.high[rows])

    def only(self, sure: npt.NDArray[np.bool_]) -> Intervals:
        """Return the same values, with an interval only where ``sure`` (n,) is true."""
        return Intervals(self.value, np.where(sure, self.low, np.nan), np.where(sure, self.high, np.nan))

    @classmethod
    def concat(cls, parts: Sequence[Intervals]) -> Intervals:
        """Return the parts one after another."""
        value, low, high = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("value", "low", "high")
        )
        return cls(value, low, high)


def resample_weights(requests: int, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Return float64 (resamples, requests): how often each resample drew each request.

    Raises
    ------
    UsageError
        If nothing would be drawn.
    """
    if resamples < 2:
        raise UsageError(f"{resamples} resamples are too few for an interval", fix="give at least 2, preferably 2000")
    if requests < 1:
        raise UsageError("there is no request to resample")
    rng = np.random.default_rng(seed)
    return rng.multinomial(requests, np.full(requests, 1.0 / requests), resamples).astype(np.float64)


PIECE_BYTES, HELD_BYTES = 16 << 20, 256 << 20
"""Of the weights of some resamples at a time; up to which all are held, a byte each, rather than drawn again."""


class Draws:
    """The weights of :func:`resample_weights`, a piece at a time: whole, they take 8 bytes a request and resample.

    Parameters
    ----------
    requests, resamples, seed : int

    Raises
    ------
    UsageError
        If nothing would be drawn.
    """

    def __init__(self, requests: int, resamples: int = RESAMPLES, seed: int = 0) -> None:
        resample_weights(min(requests, 1), resamples, seed)  # refuses what it refuses
        self.shape = (resamples, requests)
        self.seed = seed
        self._held: list[npt.NDArray[np.uint8]] | None = None

    def pieces(self) -> Iterator[tuple[slice, Floats]]:
        """Yield some resamples, as a slice of all, and their weights, float64 (b, R)."""
        resamples, requests = self.shape
        size = max(1, PIECE_BYTES // (8 * requests))
        rng, chance = np.random.default_rng(self.seed), np.full(requests, 1.0 / requests)
        held: list[npt.NDArray[np.uint8]] | None = [] if resamples * requests <= HELD_BYTES else None
        for n, first in enumerate(range(0, resamples, size)):
            rows = slice(first, min(first + size, resamples))
            if self._held is not None:
                yield rows, self._held[n].astype(np.float64)
                continue
            drawn = rng.multinomial(requests, chance, rows.stop - first)
            if held is not None and drawn.max() < 256:
                held.append(drawn.astype(np.uint8))
            else:
                held = None
            yield rows, drawn.astype(np.float64)
        if held:
            self._held = held


class Resampled:
    """Sums over requests of several columns: as they are, of every resample, and with each request left out.

    Parameters
    ----------
    columns : mapping of str to float64 (n, R) or (R,)
        Per setting and request. A column of shape (R,) is shared by all settings, such as a strict baseline. A request
        that does not count under a setting has 0 in all its columns.
    weights : float64 (B, R), or Draws
        From :func:`resample_weights`.
    kept : int (n,) or int, optional
        Requests that count under each setting; all of them by default.
    """

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]], weights: Floats | Draws, kept: Any = None) -> None:
        self.requests = weights.shape[1]
        self.kept = np.asarray(self.requests if kept is None else kept)
        self.whole: dict[str, Floats] = {}
        self.drawn: dict[str, Floats] = {}
        self.left_out: dict[str, Floats] = {}
        tables = {
            name: np.atleast_2d(np.asarray(values, np.float64)) for name, values in columns.items()
        }  # (n or 1, R)
        for name, table in tables.items():
            whole = table.sum(axis=1)
            self.whole[name] = whole
            self.drawn[name] = np.empty((len(table), weights.shape[0]))
            self.left_out[name] = whole[:, None] - table  # (n or 1, R)
        for rows, piece in weights.pieces() if isinstance(weights, Draws) else [(slice(None), weights)]:
            for name, table in tables.items():
                self.drawn[name][:, rows] = table @ piece.T  # (n or 1, B)

    def interval(self, statistic: Statistic, *, level: float = LEVEL, expand: bool = True) -> Intervals:
        """Return a statistic of the sums and its bias-corrected, accelerated interval (Efron 1987).

        Parameters
        ----------
        statistic : callable
            From sums by name, broadcast over their last axes, to values.
        level : float
        expand : bool
            Widen the interval as Student's t does (Hesterberg 2015): a plain bootstrap of few requests is too narrow,
            by sqrt((n - 1) / n) and by taking the normal distribution for t.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.atleast_1d(statistic(self.whole))
            drawn, left_out = np.atleast_2d(statistic(self.drawn)), np.atleast_2d(statistic(self.left_out))
        low, high = bca(value, drawn, left_out, self.kept, level=level, expand=expand)
        return Intervals(value, low, high)


def ratio_interval(above: npt.NDArray[Any], below: npt.NDArray[Any]) -> list[float] | None:
    """Return the ends of the interval of sum(above) / sum(below), both (R,) by request; None where there is none."""
    requests = len(below)
    if requests < FEWEST:
        return None
    if requests <= MANY:
        found = Resampled({"above": above, "below": below}, resample_weights(requests)).interval(
            lambda of: of["above"] / of["below"]
        )
        low, high = found.low, found.high
    else:
        columns = np.stack([above, below]).astype(np.float64)  # (2, R)
        whole = columns.sum(axis=1, keepdims=True)
        rng = np.random.default_rng(0)
        drawn = np.stack([columns[:, rng.integers(requests, size=requests)].sum(axis=1) for _ in range(RESAMPLES)])
        ratios = [sums[0] / sums[1] for sums in (whole, drawn.T, whole - columns)]
        low, high = bca(ratios[0], ratios[1][None], ratios[2][None], requests)
    return None if np.isnan(low[0]) else [float(low[0]), float(high[0])]


def bca(
    value: Floats, drawn: Floats, left_out: Floats, requests: Any, *, level: float = LEVEL, expand: bool = True
) -> tuple[Floats, Floats]:
    """Return bias-corrected, accelerated bootstrap intervals of n statistics at once.

    Parameters
    ----------
    value : float64 (n,)
        The statistics.
    drawn : float64 (n, B)
        Of every resample; NaN entries are left out.
    left_out : float64 (n, R)
        With each request left out.
    requests : int or int (n,)
        Number of requests that count.
    level, expand
        See :meth:`Resampled.interval`.

    Returns
    -------
    low, high : float64 (n,)
        NaN where fewer than :data:`FEWEST` requests count, and where the corrections are so large that the ends do not
        hold the value: then the resamples say nothing of its spread.
    """
    from scipy.special import ndtr, ndtri, stdtrit  # scipy.stats takes half a second to import

    kept = np.broadcast_to(np.asarray(requests, np.float64), value.shape)
    count = np.isfinite(drawn).sum(axis=1)
    ordered = np.sort(np.where(np.isfinite(drawn), drawn, np.inf), axis=1)
    slack = 1e-12 * np.maximum(np.abs(value), 1.0)  # one sum taken in two orders differs in its last bits
    with np.errstate(divide="ignore", invalid="ignore"):
        below = (drawn < (value - slack)[:, None]).sum(axis=1)
        equal = (np.abs(drawn - value[:, None]) <= slack[:, None]).sum(axis=1)
        bias = ndtri(np.clip((below + 0.5 * equal) / np.maximum(count, 1), 1e-9, 1 - 1e-9))
        finite = np.isfinite(left_out)
        centre = np.where(finite, left_out, 0.0).sum(axis=1) / np.maximum(finite.sum(axis=1), 1)
        away = centre[:, None] - left_out
        away = np.where(np.isfinite(away), away, 0.0)
        scale = (away**2).sum(axis=1) ** 1.5
        lean = np.where(scale > 0, (away**3).sum(axis=1) / (6.0 * np.where(scale > 0, scale, 1.0)), 0.0)
        ends = []
        for tail in ((1 - level) / 2, (1 + level) / 2):
            z = np.full(value.shape, ndtri(tail))
            if expand:
                z = np.sqrt(kept / np.maximum(kept - 1, 1)) * stdtrit(np.maximum(kept - 1, 1), tail)
            at = ndtr(bias + (bias + z) / (1 - lean * (bias + z)))
            ends.append(_pick(ordered, count, at))
    with np.errstate(invalid="ignore"):
        outside = (ends[0] > value + slack) | (ends[1] < value - slack)
    none = (kept < FEWEST) | (count < 2) | ~np.isfinite(value) | outside
    return np.where(none, np.nan, ends[0]), np.where(none, np.nan, ends[1])


def _pick(ordered: Floats, count: npt.NDArray[np.int64], at: Floats) -> Floats:
    """Return the linear quantile ``at`` of the first ``count`` values of each row."""
    place = np.clip(np.nan_to_num(at), 0.0, 1.0) * np.maximum(count - 1, 0)
    low = np.floor(place).astype(np.int64)[:, None]
    high = np.ceil(place).astype(np.int64)[:, None]
    first = np.take_along_axis(ordered, low, axis=1)[:, 0]
    last = np.take_along_axis(ordered, high, axis=1)[:, 0]
    return np.where(first == last, first, first + (place - low[:, 0]) * (last - first))


def half_spread(times: Floats) -> float:
    """Return half the distance between the quartiles over the median; 0 where the median is 0."""
    low, middle, high = np.percentile(times, [25, 50, 75])
    return float((high - low) / 2 / middle) if middle > 0 else 0.0


def share_interval(hits: Any, total: Any, level: float = LEVEL) -> Intervals:
    """Return shares with Wilson's interval, which does not shrink to a point at 0 and 1 (a bootstrap's would).

    Parameters
    ----------
    hits, total : int (n,)
    """
    from scipy.special import ndtri

    k, n = np.broadcast_arrays(np.atleast_1d(np.asarray(hits, np.float64)), np.asarray(total, np.float64))
    z = float(ndtri((1 + level) / 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        p = k / n
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        reach = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        low = np.where(k == 0, 0.0, np.clip(middle - reach, 0.0, 1.0))
        high = np.where(k == n, 1.0, np.clip(middle + reach, 0.0, 1.0))
    none = n == 0
    return Intervals(np.where(none, np.nan, p), np.where(none, np.nan, low), np.where(none, np.nan, high))


def paired_difference(both: Any, only_new: Any, only_old: Any, neither: Any, level: float = LEVEL) -> Intervals:
    """Return the change of a share of correct answers from old to new on the same requests.

    The interval is Newcombe's for paired shares (1998, method 10), from Wilson's for each; it does not shrink to a
    point where no answer changed.

    Parameters
    ----------
    both, only_new, only_old, neither : int (n,)
        Requests that are right under both, under the new or the old only, and under neither.
    """
    a, b, c, d = (np.atleast_1d(np.asarray(count, np.float64)) for count in (both, only_new, only_old, neither))
    total = a + b + c + d
    new, old = share_interval(a + b, total, level), share_interval(a + c, total, level)
    with np.errstate(divide="ignore", invalid="ignore"):
        product = (a + b) * (c + d) * (a + c) * (b + d)
        cross = a * d - b * c
        cross = np.where(cross > 0, np.maximum(cross - total / 2, 0.0), cross)  # his continuity correction
        phi = np.where(product > 0, cross / np.sqrt(np.where(product > 0, product, 1.0)), 0.0)
        change = (b - c) / total
        down_new, up_new = new.value - new.low, new.high - new.value
        down_old, up_old = old.value - old.low, old.high - old.value
        low = change - np.sqrt(np.maximum(down_new**2 - 2 * phi * down_new * up_old + up_old**2, 0.0))
        high = change + np.sqrt(np.maximum(up_new**2 - 2 * phi * up_new * down_old + down_old**2, 0.0))
    return Intervals(change, low, high)


def mcnemar(only_new: int, only_old: int) -> float:
    """Return the exact two-sided p-value that changed answers are as often gains as losses (binomial, 1/2)."""
    from scipy.stats import binomtest

    changed = only_new + only_old
    return 1.0 if changed == 0 else float(binomtest(only_new, changed, 0.5).pvalue)


def few(*requests: int) -> str:
    """Say that intervals rest on few requests, or that there is none; empty where they rest on enough.

    Parameters
    ----------
    *requests : int
        Requests that each figure rests on. One with fewer than :data:`FEWEST` has no interval.
    """
    least = min((number for number in requests if number >= FEWEST), default=0)
    if not least:
        most = max(requests, default=0)
        who = {0: "no request is left, which gives", 1: "1 request gives"}.get(most, f"{most} requests give")
        return f"{who} no interval"
    if least >= FEW:
        return ""
    return f"{least} requests are few, so the 95 % intervals are wide and their level is approximate"


def ratio(numerator: npt.NDArray[Any], denominator: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return numerator / denominator, NaN where the denominator is 0."""
    out = np.full(np.broadcast_shapes(np.shape(numerator), np.shape(denominator)), np.nan)
    return np.divide(numerator, denominator, out=out, where=np.asarray(denominator) > 0)


# --- is it no worse than a margin allows? ---------------------------------------------------------------------------

POWER = 0.8
"""Chance of a decision that a sample size is given for."""
FRACTIONS = np.geomspace(0.02, 0.9, 16)
"""Stakes of the sequential test, as shares of the largest allowed one."""


@dataclass(frozen=True)
class Margin:
    """A verdict on whether accuracy falls by no more than a margin.

    Attributes
    ----------
    verdict : {"shown", "not shown", "refuted"}
        Shown: a fall of the margin or more is rejected. Refuted: a fall of less is rejected.
    shown_p, refuted_p : float
        One-sided p-values of these rejections; of a sequential test 1 / (largest e-value), at most 1.
    requests : int
        That it stands on.
    needed : int or None
        Where it is not shown: requests that would show it with a chance of :data:`POWER`, if accuracy does not change
        in truth and answers change as often as here.
    """

    verdict: str
    shown_p: float
    refuted_p: float
    requests: int
    needed: int | None = None


def check_margin(margin: float, alpha: float) -> None:
    """Refuse a margin or an error rate that says nothing; both are shares."""
    if not 0 < margin < 1:
        raise UsageError(f"a margin of {100 * margin:g} points", fix="give one between 0 and 100, such as 1")
    if not 0 < alpha < 0.5:
        raise UsageError(f"an error rate of {alpha:g}", fix="give one between 0 and 0.5, such as 0.05")


def within_margin(gained: int, lost: int, total: int, margin: float, alpha: float = 1 - LEVEL) -> Margin:
    """Tell whether accuracy falls by no more than a margin, by Tango's score test for paired shares (1998).

    The sample size is that of a test of paired shares with no true difference: (z(1 - alpha) + z(power))^2 times the
    share of answers that change, divided by the squared margin; one change is added, so that none gives a size too.

    Parameters
    ----------
    gained, lost : int
        Answers right under the setting only, and under strict only.
    total : int
        Requests with a score.
    margin, alpha : float
        As shares.

    Raises
    ------
    UsageError
        On a margin or an error rate that says nothing.
    """
    from scipy.special import ndtr, ndtri

    check_margin(margin, alpha)
    if total == 0:
        return Margin("not shown", 1.0, 1.0, 0)
    # The chance of a lost answer that is likeliest if accuracy changes by exactly -margin.
    a, b = 2.0 * total, -gained - lost - (2 * total - gained + lost) * margin
    c = lost * margin * (1 + margin)
    chance = (np.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    spread = np.sqrt(total * (2 * chance - margin * (1 + margin)))
    z = float((gained - lost + total * margin) / spread) if spread > 0 else 0.0
    shown, refuted = float(ndtr(-z)), float(ndtr(z))
    if shown <= alpha or refuted <= alpha:
        return Margin("shown" if shown <= alpha else "refuted", shown, refuted, total)
    changed = (gained + lost + 1) / (total + 1)
    needed = changed * ((ndtri(1 - alpha) + ndtri(POWER)) / margin) ** 2
    return Margin("not shown", shown, refuted, total, int(np.ceil(needed)))


class MarginBets:
    """The same question, answered as requests come in; to stop when it is decided costs no error.

    A gambler who stakes a share s on each change of an answer being above -margin multiplies his wealth by
    1 + s (change + margin), and one on the other side by 1 - s (change + margin). If the mean change is at most -margin
    (at least), wealth does not grow on average, so that it ever reaches 1 / alpha has a chance of alpha at most
    (Ville's inequality). The wealth here is the mean over the stakes :data:`FRACTIONS` (Waudby-Smith and Ramdas 2024).
    It holds for requests drawn in random order from a population of prompts.

    Parameters
    ----------
    margin, alpha : float
        As shares.
    """

    def __init__(self, margin: float, alpha: float = 1 - LEVEL) -> None:
        check_margin(margin, alpha)
        self.margin, self.alpha, self.requests = margin, alpha, 0
        self._logs = np.zeros((2, len(FRACTIONS)))
        self._best = np.ones(2)

    def add(self, change: int) -> Margin:
        """Take a request's change of score, -1, 0 or 1, and return the verdict so far."""
        moved = change + self.margin
        stakes = FRACTIONS / (1 - self.margin), FRACTIONS / (1 + self.margin)
        self._logs += np.log1p([stakes[0] * moved, -stakes[1] * moved])
        self._best = np.maximum(self._best, np.exp(np.minimum(self._logs, 700.0)).mean(axis=1))
        self.requests += 1
        shown, refuted = (1 / self._best).tolist()
        verdict = "shown" if shown <= self.alpha else "refuted" if refuted <= self.alpha else "not shown"
        return Margin(verdict, shown, refuted, self.requests)
