"""Intervals and tests against scipy and against published examples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from asdsim import stats
from asdsim.errors import UsageError


def ratio(sums):
    return sums["tokens"] / sums["steps"]


def test_vectorised_bca_agrees_with_scipys() -> None:
    rng = np.random.default_rng(3)
    steps = rng.integers(10, 30, 40).astype(float)
    tokens = steps * rng.gamma(9.0, 0.5, 40)
    ours = stats.Resampled({"tokens": tokens, "steps": steps}, stats.resample_weights(40, 40_000)).interval(
        ratio, expand=False
    )
    theirs = scipy_stats.bootstrap(
        (tokens, steps), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        n_resamples=40_000, method="BCa", rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    width = theirs.high - theirs.low
    assert abs(ours.low[0] - theirs.low) < 0.02 * width and abs(ours.high[0] - theirs.high) < 0.02 * width
    assert ours.value[0] == tokens.sum() / steps.sum()


def test_every_setting_sees_the_same_draws() -> None:
    rng = np.random.default_rng(4)
    steps, tokens = rng.integers(5, 20, (3, 25)), rng.integers(20, 60, (3, 25))
    weights = stats.resample_weights(25)
    together = stats.Resampled({"tokens": tokens, "steps": steps}, weights).interval(ratio)
    for n in range(3):
        alone = stats.Resampled({"tokens": tokens[n], "steps": steps[n]}, weights).interval(ratio)
        assert np.allclose([alone.low[0], alone.high[0]], [together.low[n], together.high[n]], rtol=1e-12)
    baseline = {"tokens": tokens, "steps": steps, "t0": tokens[0], "s0": steps[0]}
    gain = stats.Resampled(baseline, weights).interval(lambda s: s["tokens"] / s["steps"] / (s["t0"] / s["s0"]) - 1)
    assert gain.low[0] == gain.value[0] == gain.high[0] == 0.0  # a setting against itself, in every resample


def test_fewer_requests_give_wider_intervals_and_expansion_widens() -> None:
    rng = np.random.default_rng(5)
    values = rng.exponential(2.0, 200)

    def width(n: int, expand: bool) -> float:
        columns = {"tokens": values[:n], "steps": np.ones(n)}
        out = stats.Resampled(columns, stats.resample_weights(n, seed=1)).interval(ratio, expand=expand)
        return float(out.high[0] - out.low[0])

    assert width(10, True) > width(50, True) > width(200, True)
    assert width(10, True) > 1.15 * width(10, False) and width(200, True) < 1.03 * width(200, False)


def test_requests_that_do_not_count_leave_no_trace() -> None:
    keep = np.array([1, 1, 0, 1, 0, 1, 1, 1], float)
    tokens, steps = np.arange(8.0) + 5, np.full(8, 2.0)
    weights = stats.resample_weights(8)
    out = stats.Resampled({"tokens": tokens * keep, "steps": steps * keep}, weights, kept=6).interval(ratio)
    assert out.value[0] == (tokens * keep).sum() / 12 and out.low[0] < out.value[0] < out.high[0]
    none = stats.Resampled({"tokens": tokens * 0, "steps": steps * 0}, weights, kept=0).interval(ratio)
    assert np.isnan([none.value[0], none.low[0], none.high[0]]).all()
    one = stats.Resampled({"tokens": [3.0], "steps": [2.0]}, stats.resample_weights(1)).interval(ratio)
    assert one.value[0] == 1.5 and np.isnan(one.low[0])


def test_two_requests_have_no_interval_and_no_interval_excludes_its_value() -> None:
    tokens, steps = np.zeros(24), np.zeros(24)
    tokens[[3, 9]], steps[[3, 9]] = [69.0, 63.0], [13.0, 15.0]  # the other walks left the trace
    two = stats.Resampled({"tokens": tokens, "steps": steps}, stats.resample_weights(24), kept=2).interval(ratio)
    assert two.value[0] == 132 / 28 and np.isnan([two.low[0], two.high[0]]).all()
    assert stats.ratio_interval(np.array([69.0, 63.0]), np.array([13.0, 15.0])) is None

    rng = np.random.default_rng(6)
    for count in (3, 4, 6, 12, 24):  # lengths and rates as unequal as they come
        steps = np.round(rng.pareto(0.6, (400, count)) + 1)
        tokens = steps * (1 + rng.pareto(0.6, (400, count)))
        out = stats.Resampled({"tokens": tokens, "steps": steps}, stats.resample_weights(count)).interval(ratio)
        there = np.isfinite(out.low)
        slack = 1e-9 * out.value
        assert there.mean() > 0.9 and np.array_equal(there, np.isfinite(out.high))
        assert ((out.low <= out.value + slack) & (out.value <= out.high + slack))[there].all()

    drawn = np.full((1, 1000), 2.0)  # every resample lies above the value
    low, high = stats.bca(np.array([1.0]), drawn, np.array([[1.0, 1.1, 0.9, 1.0]]), 4)
    assert np.isnan([low[0], high[0]]).all()


def test_wilson_share() -> None:
    out = stats.share_interval([0, 81, 10], [10, 263, 10])
    assert np.allclose(out.low, [0.0, 0.2553, 0.7225], atol=1e-4)  # 81 of 263: Newcombe 1998, table I
    assert np.allclose(out.high, [0.2775, 0.3662, 1.0], atol=1e-4)
    assert np.isnan(stats.share_interval(0, 0).low[0])
    few = stats.share_interval([1, 9, 0], [10, 10, 10])  # (z^2 + 2k - z sqrt(z^2 + 4k(1 - k/n))) / 2(n + z^2)
    assert np.allclose(few.low, [0.0179, 0.5958, 0.0], atol=1e-4)
    assert np.allclose(few.high, [0.4042, 0.9821, 0.2775], atol=1e-4)


def test_newcombe_paired_difference() -> None:
    # Newcombe 1998, Improved confidence intervals for the difference between paired proportions: a, b, c, d = 36 12 2
    # 0.
    out = stats.paired_difference(36, 12, 2, 0)
    assert np.allclose([out.value[0], out.low[0], out.high[0]], [0.2, 0.0569, 0.3404], atol=1e-4)
    # With both kinds of agreement the continuity correction counts: phi = (20 x 16 - 12 x 2 - 25) / sqrt(32 18 22 28).
    out = stats.paired_difference(20, 12, 2, 16)
    assert np.allclose([out.value[0], out.low[0], out.high[0]], [0.2, 0.0562, 0.3292], atol=1e-4)
    still = stats.paired_difference(15, 0, 0, 5)
    assert still.value[0] == 0 and still.low[0] < 0 < still.high[0]


@pytest.mark.parametrize(("gains", "losses", "p"), [(0, 0, 1.0), (1, 6, 0.125), (5, 5, 1.0), (0, 8, 2 * 0.5**8)])
def test_exact_mcnemar(gains: int, losses: int, p: float) -> None:
    assert stats.mcnemar(gains, losses) == pytest.approx(p, rel=1e-12)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(UsageError, match="1 resamples give no interval"):
        stats.resample_weights(5, 1)
    with pytest.raises(UsageError, match="no request"):
        stats.resample_weights(0)
    assert "24 requests are few" in stats.few(24) and stats.few(30) == stats.few(30, 0, 40) == ""
    assert "5 requests are few" in stats.few(30, 5, 1, 0)  # figures without an interval have none that is wide
    assert stats.few(1) == stats.few(0, 1) == "1 request gives no interval"
    assert stats.few(2) == stats.few(1, 2, 0) == "2 requests give no interval"
    assert "3 requests are few" in stats.few(2, 3)
    assert stats.few(0) == stats.few() == "no request is left, which gives no interval"


def test_the_acceleration_leans_to_the_long_tail() -> None:
    """On skewed data, whose acceleration is large; against scipy's, and the very ends."""
    n = 20
    values = np.log(1 - (np.arange(1, n + 1) - 0.5) / n) ** 2  # squared exponentials, by their quantiles
    columns = {"tokens": values, "steps": np.ones(n)}
    ours = stats.Resampled(columns, stats.resample_weights(n, 40_000)).interval(ratio, expand=False)
    theirs = scipy_stats.bootstrap(
        (values,), lambda x, axis: x.mean(axis), vectorized=True, n_resamples=40_000, method="BCa",
        rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    assert ours.low[0] == pytest.approx(theirs.low, rel=0.02) and ours.high[0] == pytest.approx(theirs.high, rel=0.02)
    wide = stats.Resampled(columns, stats.resample_weights(n)).interval(ratio)
    assert [wide.low[0], wide.high[0]] == pytest.approx([0.8464, 4.5315], abs=1e-4)
    assert wide.high[0] - wide.value[0] > 2.5 * (wide.value[0] - wide.low[0])


def test_a_ratio_over_many_requests_has_the_same_interval_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    rng = np.random.default_rng(3)
    steps = rng.integers(20, 60, 1000).astype(float)
    tokens = steps * rng.gamma(9.0, 0.3, 1000)
    by_weights = stats.ratio_interval(tokens, steps)
    monkeypatch.setattr(stats, "MANY", 999)
    tracemalloc.start()
    one_by_one = stats.ratio_interval(tokens, steps)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert by_weights is not None and one_by_one is not None
    width = by_weights[1] - by_weights[0]
    assert np.allclose(one_by_one, by_weights, atol=0.06 * width)  # two draws of 2000 resamples


def test_resamples_equal_to_the_value_count_half_on_either_side() -> None:
    """Six right of twelve requests: a quarter of all resamples equal the value, and the interval is symmetric."""
    columns = {"tokens": np.repeat([0.0, 1.0], 6), "steps": np.ones(12)}
    for expand in (False, True):
        out = stats.Resampled(columns, stats.resample_weights(12, 20_000)).interval(ratio, expand=expand)
        assert out.low[0] + out.high[0] == pytest.approx(1.0, abs=0.01) and out.low[0] <= 0.25
