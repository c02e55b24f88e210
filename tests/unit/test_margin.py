"""Is accuracy no worse than a margin allows: the score test, and the sequential one."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from asdsim.errors import UsageError
from asdsim.stats import FRACTIONS, MarginBets, within_margin


def test_against_values_computed_by_hand() -> None:
    # Without a change the likeliest chance of a loss is the margin, and z = sqrt(n m / (1 - m)).
    clear = within_margin(0, 0, 100, 0.05)
    assert clear.shown_p == pytest.approx(0.010893, abs=1e-5) and clear.verdict == "shown"  # z = 2.2942
    assert clear.refuted_p == pytest.approx(1 - clear.shown_p) and clear.needed is None
    # Where the change observed is the margin, nothing speaks for either side.
    level = within_margin(5, 10, 100, 0.05)
    assert level.shown_p == pytest.approx(0.5) and level.verdict == "not shown"


@pytest.mark.parametrize(("gained", "lost", "total", "margin"), [(3, 9, 80, 0.05), (20, 35, 300, 0.1), (1, 2, 60, 0.3)])
def test_against_the_likelihood_maximised_numerically(gained: int, lost: int, total: int, margin: float) -> None:
    """The variance stands on the likeliest chances among those with a change of exactly -margin (Tango 1998)."""
    losses = np.linspace(margin, (1 + margin) / 2, 1_000_003)[1:-1]
    likelihood = (
        gained * np.log(losses - margin) + lost * np.log(losses)
        + (total - gained - lost) * np.log(1 - 2 * losses + margin)
    )  # fmt: skip
    loss = losses[likelihood.argmax()]
    z = (gained - lost + total * margin) / np.sqrt(total * (2 * loss - margin - margin**2))
    assert within_margin(gained, lost, total, margin).shown_p == pytest.approx(norm.sf(z), rel=1e-4)


def test_the_three_verdicts_and_the_size_needed() -> None:
    assert within_margin(10, 10, 1000, 0.05).verdict == "shown"
    assert within_margin(0, 30, 100, 0.05).verdict == "refuted"
    short = within_margin(2, 2, 50, 0.01)
    assert short.verdict == "not shown" and short.needed == int(np.ceil(5 / 51 * (1.6448536 + 0.8416212) ** 2 / 1e-4))
    enough = within_margin(round(short.needed * 2 / 50), round(short.needed * 2 / 50), short.needed, 0.01)
    assert enough.verdict == "shown"
    assert within_margin(0, 0, 0, 0.01).verdict == "not shown"
    p = [within_margin(5, lost, 100, 0.05).shown_p for lost in range(40)]
    assert p == sorted(p)  # more losses never speak for a setting


@pytest.mark.parametrize(
    ("margin", "alpha"), [(0, 0.05), (1, 0.05), (-0.1, 0.05), (0.01, 0), (0.01, 0.5), (np.nan, 0.05)]
)
def test_margins_that_say_nothing(margin: float, alpha: float) -> None:
    with pytest.raises(UsageError):
        within_margin(1, 1, 10, margin, alpha)
    with pytest.raises(UsageError):
        MarginBets(margin, alpha)


def test_wealth_is_the_mean_over_stakes() -> None:
    bets, changes, margin = MarginBets(0.1), [0, 1, 0, -1, 0, 0, 1], 0.1
    best = 1.0
    for n, change in enumerate(changes, 1):
        verdict = bets.add(change)
        wealth = np.mean([np.prod([1 + f / 0.9 * (c + margin) for c in changes[:n]]) for f in FRACTIONS])
        best = max(best, float(wealth))
        assert verdict.shown_p == pytest.approx(1 / best) and verdict.requests == n
    assert 0 < verdict.refuted_p <= 1


def test_a_sequence_is_decided_either_way() -> None:
    bets = MarginBets(0.1)
    same = next(n for n in range(1, 500) if bets.add(0).verdict == "shown")
    assert 20 < same < 120
    bets = MarginBets(0.1)
    worse = next(n for n in range(1, 500) if bets.add(-1).verdict == "refuted")
    assert worse <= 12


def test_wealth_does_not_grow_at_the_margin() -> None:
    # The mean over all outcomes of one round: 1 exactly where the mean change is -margin.
    margin = 0.2
    for sign, largest in ((1, 1 - margin), (-1, 1 + margin)):
        rounds = [1 + sign * FRACTIONS / largest * (change + margin) for change in (-1, 0, 1)]
        assert np.allclose(np.dot([0.3, 0.6, 0.1], rounds), 1.0) and np.min(rounds) > 0
