"""Do 95 % intervals cover the truth in 93 to 97 of 100 cases? Run by `make slow`.

Two thousand samples are drawn from a population whose truth is known: requests of synthetic traces, walked under
settings of ASD, with the ratio over the whole population as truth; and requests from a model with a truth in closed
form. Each sample gets its interval from the same code that reports use.
"""

from __future__ import annotations

import numpy as np
import pytest

from asdsim import stats
from asdsim.evaluate.figures import FIGURES
from asdsim.evaluate.quality import COUNTS
from asdsim.records import MemoryTrace
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.graph import build_graph
from asdsim.walk.sweep import walk_grid
from tests.support.toygraph import toy_requests

pytestmark = pytest.mark.slow
TRIALS = 2000
POPULATION = 4000
NAMES = ("mean_acceptance_length", "accepted_per_proposal", "acceptance_length_gain", "regret_per_token",
         "regret_spent_mean", "bound_by_budget")  # fmt: skip


@pytest.fixture(scope="module")
def population() -> dict[str, np.ndarray]:
    """Return per-request columns of a population of walked toy requests."""
    parts = []
    for seed in range(POPULATION // 500):
        # Requests differ in how well their drafter agrees, as real ones do.
        agree = 0.55 + 0.05 * seed
        made = toy_requests(seed, requests=500, vocab=150, ks=(5,), limit=64, agree=agree, grain=0, extra=0)
        graph = build_graph(MemoryTrace(made))
        walks = [walk_grid(graph, Grid.of([policy]), off_trace="aligned", device="cpu") for policy in (
            Grid.product(2, 1, 2).policy(0), STRICT)]  # fmt: skip
        columns = {}
        for suffix, one in zip(("", "_strict"), walks, strict=True):
            columns |= {name + suffix: one.counts[0, :, number].astype(float) for name, number in COUNTS.items()}
            columns["spent" + suffix] = one.spent[0]
        columns["requests"] = np.ones(500)
        parts.append(columns)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("size", [24, 50, 200])
@pytest.mark.parametrize("name", NAMES)
def test_intervals_over_walked_requests_cover(population, size: int, name: str) -> None:
    figure = FIGURES[name]
    rng = np.random.default_rng([size, 7])
    picks = rng.integers(POPULATION, size=(TRIALS, size))
    columns = {need: population[need][picks] for need in figure.needs}
    truth = float(figure.formula({need: population[need].sum() for need in figure.needs}))
    found = stats.Resampled(columns, stats.resample_weights(size)).interval(figure.formula)
    covered = float(((found.low <= truth) & (truth <= found.high)).mean())
    print(f"{name:24s} n={size:4d} covered {100 * covered:.1f} %")
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("size", [24, 100, 400])
def test_intervals_cover_a_truth_in_closed_form(size: int) -> None:
    # A request has its own chance p ~ Beta(8, 4) that a draft token is accepted; K = 6 and 20 steps. The expected
    # number accepted in a block is the sum of E[p^j] over j = 1 .. K.
    width, steps = 6, 20
    truth, moment = 0.0, 1.0
    for j in range(width):
        moment *= (8 + j) / (12 + j)
        truth += moment
    rng = np.random.default_rng(size)
    chance = rng.beta(8, 4, (TRIALS, size, 1, 1))
    accepted = np.cumprod(rng.random((TRIALS, size, steps, width)) < chance, axis=3).sum(axis=(2, 3)).astype(float)
    columns = {"accepted": accepted, "steps": np.full((TRIALS, size), float(steps))}
    figure = FIGURES["accepted_per_proposal"]
    found = stats.Resampled(columns, stats.resample_weights(size)).interval(figure.formula)
    covered = float(((found.low <= truth) & (truth <= found.high)).mean())
    print(f"closed form n={size} covered {100 * covered:.1f} %")
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("size", [24, 100, 400])
def test_intervals_cover_a_change_of_length(size: int) -> None:
    # Output lengths vary by request; under another setting a request gets longer or shorter by a factor of mean 1.05.
    rng = np.random.default_rng([size, 11])
    strict = rng.gamma(4.0, 50.0, (TRIALS, size))
    columns = {"tokens": strict * rng.gamma(20.0, 1.05 / 20.0, (TRIALS, size)), "tokens_strict": strict}
    found = stats.Resampled(columns, stats.resample_weights(size)).interval(FIGURES["length_change"].formula)
    covered = float(((found.low <= 0.05) & (found.high >= 0.05)).mean())
    print(f"length_change n={size} covered {100 * covered:.1f} %")
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("size", [100, 400])
def test_wilson_covers(share: float, size: int) -> None:
    hits = np.random.default_rng(1).binomial(size, share, 40_000)
    found = stats.share_interval(hits, size)
    covered = ((found.low <= share) & (share <= found.high)).mean()
    assert 0.93 <= covered <= 0.975


@pytest.mark.parametrize("size", [100, 400])
def test_newcombe_covers(size: int) -> None:
    shares = np.array([0.5, 0.08, 0.12, 0.3])  # both, new only, old only, neither
    counts = np.random.default_rng(2).multinomial(size, shares, 40_000)
    found = stats.paired_difference(*counts.T)
    covered = ((found.low <= -0.04) & (found.high >= -0.04)).mean()
    assert 0.93 <= covered <= 0.975


def test_mcnemar_rejects_no_more_often_than_it_says() -> None:
    gains = np.random.default_rng(3).binomial(40, 0.5, 4000)
    p = np.array([stats.mcnemar(int(b), 40 - int(b)) for b in gains])
    assert 0.01 < (p <= 0.05).mean() <= 0.05
