"""How wrong the estimates are, measured where the truth is known.

On a covered trace the walks are exact. Hide everything but the captured path, replay it as a user with a plain capture
would have to, and compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import stats
from ..errors import UsageError
from ..records import MemoryTrace
from ..rules.settings import Grid
from ..trace.graph import build_graph
from ..trace.reader import Trace
from ..walk import request as columns
from ..walk.estimate import ESTIMATORS, estimate
from ..walk.sweep import walk_grid

if TYPE_CHECKING:
    import polars as pl

COMPARED = ("mean_acceptance_length", "accepted_per_proposal", "steps_per_request")
"""Figures whose estimates are compared with exact values."""


@dataclass
class Fidelity:
    """Errors of estimates, by setting and in short.

    Attributes
    ----------
    requests : int
        Requests compared.
    settings : pl.DataFrame
        One row per setting, estimator and figure: exact, estimate, error (estimate / exact - 1).
    summary : pl.DataFrame
        One row per estimator and figure: mean and largest absolute error over settings, with 95 % intervals over
        requests (percentile bootstrap, all settings and estimators resampled together); null where there are fewer
        than :data:`asdsim.stats.FEWEST` requests.
    """

    requests: int
    settings: pl.DataFrame
    summary: pl.DataFrame


def hidden(trace: Trace) -> MemoryTrace:
    """Return the trace without the steps that ``cover`` added."""
    return MemoryTrace(
        [
            (record, [step for step in trace.steps_of(record.request_id) if step.wave == 0])
            for record in trace.request_records()
        ]
    )


def measure(
    trace: Trace,
    grid: Grid,
    *,
    estimators: Sequence[str] = tuple(ESTIMATORS),
    seed: int = 0,
    resamples: int = stats.RESAMPLES,
) -> Fidelity:
    """Compare estimates with exact values.

    Parameters
    ----------
    trace : Trace
        Covered for ``grid``.
    grid : Grid
        Settings. Those that decide nothing differently from strict on any request are left out: every estimate is
        exact there.
    estimators : sequence of str
        Keys of :data:`asdsim.walk.estimate.ESTIMATORS`.
    seed, resamples : int
        Of the bootstrap.

    Raises
    ------
    UsageError
        If a walk of the grid is not exact, or nothing is left to compare.
    """
    import polars as pl

    graph = build_graph(trace, grid.layout)
    exact = walk_grid(graph, grid)
    if not exact.exact.all():
        raise UsageError(
            f"{int((~exact.exact).sum())} of {exact.exact.size} walks of this grid are not exact, so there is no truth "
            "to compare with",
            fix="run asdsim cover for the grid first",
        )
    relaxed = exact.counts[:, :, columns.RELAXED].sum(axis=1) > 0
    if not relaxed.any():
        raise UsageError("every setting of the grid acts as strict matching", fix="give larger budgets or gates")
    rows = np.flatnonzero(relaxed)
    settings = grid[rows]
    sums = {"exact": _sums(exact.counts[rows])}
    path_graph = build_graph(hidden(trace), grid.layout)
    for name in estimators:
        sums[name] = estimate(path_graph, settings, name)
    requests = graph.num_requests
    weights = stats.resample_weights(requests, resamples, seed)
    point = {name: _figures(value.sum(axis=1)[None]) for name, value in sums.items()}
    drawn = {name: _figures(np.einsum("br,nrc->bnc", weights, value)) for name, value in sums.items()}
    errors: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    for name in estimators:
        for figure in COMPARED:
            true, guess = point["exact"][figure][0], point[name][figure][0]
            error = guess / true - 1.0
            with np.errstate(divide="ignore", invalid="ignore"):  # a draw of requests without steps says nothing
                spread = np.abs(drawn[name][figure] / drawn["exact"][figure] - 1.0)
            mean, worst = _ends(spread, requests)
            summary.append({
                "estimator": name, "figure": figure, "settings": len(settings),
                "mean_error": float(np.abs(error).mean()), "mean_low": mean[0], "mean_high": mean[1],
                "worst_error": float(np.abs(error).max()), "worst_low": worst[0], "worst_high": worst[1],
                "bias": float(error.mean()),
            })  # fmt: skip
            for n in range(len(settings)):
                errors.append({
                    "B": float(settings.budget[n]), "g": float(settings.gate[n]), "M": float(settings.cap[n]),
                    "estimator": name, "figure": figure, "exact": float(true[n]), "estimate": float(guess[n]),
                    "error": float(error[n]),
                })  # fmt: skip
    return Fidelity(requests, pl.DataFrame(errors), pl.DataFrame(summary))


def _ends(
    spread: npt.NDArray[np.float64], requests: int
) -> tuple[tuple[float | None, float | None], tuple[float | None, float | None]]:
    """Return the 95 % ends of the mean and of the largest absolute error; ``spread`` is (draws, settings)."""
    known = spread[np.isfinite(spread).all(axis=1)]
    if requests < stats.FEWEST or not len(known):
        return (None, None), (None, None)
    mean, worst = (np.quantile(values, [0.025, 0.975]).tolist() for values in (known.mean(axis=1), known.max(axis=1)))
    return (mean[0], mean[1]), (worst[0], worst[1])


def _sums(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Return (n, R, 4): steps, accepted, tokens, requests."""
    picked = counts[:, :, [columns.STEPS, columns.ACCEPTED, columns.TOKENS]].astype(np.float64)
    return np.concatenate([picked, np.ones((*picked.shape[:2], 1))], axis=2)


def _figures(totals: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
    """Return ratios of sums over requests, each (draws, settings); ``totals`` is (draws, settings, 4)."""
    steps, accepted, tokens, requests = np.moveaxis(totals, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "mean_acceptance_length": tokens / steps,
            "accepted_per_proposal": accepted / steps,
            "steps_per_request": steps / requests,
        }
