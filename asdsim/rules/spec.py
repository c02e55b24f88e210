"""What one acceptance rule is made of, and what it sees of a mismatch.

A rule other than ASD decides each mismatch on its own. It gives every mismatch a *score* and every setting a
*limit*: the mismatch is accepted where ``score <= limit``. That is ASD's gate with an unlimited budget and cap, so the
one walk serves all rules; the charge is the regret in logits, so the ledger shows what a rule spent. One parameter, the
*knob*, moves the limit alone; a sweep over it lays a trace out once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..errors import UsageError

Value = float | str
NEVER = math.nan
"""A score that no limit lets pass."""


@dataclass(slots=True)
class Seen:
    """One mismatch as a rule sees it.

    Attributes
    ----------
    i, width : int
        Position in the block, and K.
    regret : float
        z(y) - z(x), in logits.
    logit : float
        z(x), the target's logit of the draft token.
    top : sequence of float
        Largest logits of the row, falling.
    logsumexp, entropy : float
        Of the target's row, in nats.
    rank : int
        Rank of x by (-logit, id), from 0.
    run : int
        Draft tokens behind i that equal the target's choice, up to the next mismatch or the end of the block.
    draft_logprob : float
        log q(x) of the drafter, in nats.
    divergence : dict of str to float
        ``kl``, ``reverse_kl``, ``js``, ``tv`` between target and drafter.
    u : float
        Uniform number of this output position, in [0, 1).
    thinking : bool
        Whether the position lies in the thinking phase.
    """

    i: int
    width: int
    regret: float
    logit: float
    top: list[float]
    logsumexp: float
    entropy: float = math.nan
    rank: int = -1
    run: int = 0
    draft_logprob: float = math.nan
    divergence: dict[str, float] = field(default_factory=dict)
    u: float = math.nan
    thinking: bool = True

    @property
    def p(self) -> float:
        """p(x), the target's probability of the draft token."""
        return math.exp(self.logit - self.logsumexp)

    @property
    def p1(self) -> float:
        """Largest probability of the row."""
        return math.exp(self.top[0] - self.logsumexp)


@dataclass(frozen=True)
class Parameter:
    """One parameter: its published default, the range that it may take, and what 0 stands for if not for itself."""

    name: str
    default: Value
    meaning: str
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    whole: bool = False
    choices: tuple[str, ...] = ()
    zero: str = ""

    def shown(self, value: Value) -> str:
        """Return a value as people read it."""
        if self.zero and value == 0:
            return self.zero
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    @property
    def range(self) -> str:
        """The range in words."""
        if self.choices:
            return "|".join(self.choices)
        kind = "whole " if self.whole else ""
        left, right = "(" if self.open_low else "[", ")" if self.open_high or math.isinf(self.high) else "]"
        return f"{kind}{left}{self.low:g}, {self.high:g}{right}"

    def check(self, rule: str, value: Value) -> Value:
        """Return the value as float or name; refuse one outside the range.

        Raises
        ------
        UsageError
            Naming rule, parameter, value and range.
        """
        if self.choices:
            if value not in self.choices:
                raise UsageError(f"rule {rule}: {self.name}={value!r} is not one of {', '.join(self.choices)}")
            return value
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UsageError(f"rule {rule}: {self.name}={value!r} is not a number") from None
        inside = (self.low < number if self.open_low else self.low <= number) and (
            number < self.high if self.open_high else number <= self.high
        )
        if not inside or (self.whole and number != int(number)):
            raise UsageError(
                f"rule {rule}: {self.name}={number:g} is outside its range", fix=f"give one in {self.range}"
            )
        return number


Params = Mapping[str, Value]


@dataclass(frozen=True)
class Rule:
    """One acceptance rule.

    Attributes
    ----------
    name, title, source : str
        Name on the command line, what it is, and where it was published.
    accepts : str
        When a mismatch is accepted, as a formula.
    parameters : tuple of Parameter
        Defaults are the published setting.
    knob : str
        Parameter that moves the limit alone; empty where there is none.
    needs : tuple of str
        Columns of ``positions`` that must be filled.
    score : callable (Seen, Params) -> float
        NaN is never accepted. May raise ``ValueError`` saying why this row cannot be scored.
    limit : callable (Params) -> float
        Accepted where ``score <= limit``.
    ladder : tuple of float
        Values of the knob that comparisons try.
    sampled : bool
        Whether the rule draws random numbers.
    note : str
        What to know before believing a figure.
    """

    name: str
    title: str
    source: str
    accepts: str
    parameters: tuple[Parameter, ...]
    score: Callable[[Seen, Params], float]
    limit: Callable[[Params], float]
    knob: str = ""
    needs: tuple[str, ...] = ()
    ladder: tuple[float, ...] = ()
    sampled: bool = False
    note: str = ""

    @property
    def defaults(self) -> dict[str, Value]:
        """The published setting."""
        return {parameter.name: parameter.default for parameter in self.parameters}


def above(value: float) -> float:
    """Return the limit on ``-x`` that means ``x > value``."""
    return math.nextafter(-value, -math.inf)


def at_least(value: float) -> float:
    """Return the limit on ``-x`` that means ``x >= value``."""
    return -value


def below(value: float) -> float:
    """Return the limit on ``x`` that means ``x < value``."""
    return math.nextafter(value, -math.inf)


def steps(first: float, last: float, number: int) -> tuple[float, ...]:
    """Return evenly spaced values, both ends included."""
    return tuple(round(first + (last - first) * n / (number - 1), 12) for n in range(number))
