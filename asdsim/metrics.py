"""What a result row means: every figure, defined once.

Names follow vLLM and AIPerf. ``mean_acceptance_length`` counts the bonus token, ``accepted_per_proposal`` does not;
both are ratios of sums over requests. Tokens behind an end of sequence or the token limit count nowhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

COLUMNS: dict[str, str] = {
    "rule": "rule that was walked",
    "semantics": "which reading of the rule",
    "B": "budget, regret per request, in logits",
    "g": "gate on regret per suffix value, in logits",
    "M": "cap, relaxed tokens per block",
    "parameters": "parameters of another rule than ASD, or what this ASD varies",
    "off_trace": "what happened at prefixes that were not captured",
    "requests": "requests in the figures of this row",
    "exact_share": "share of all requests whose walk met captured steps only; below 1 the row is no exact figure",
    "mean_acceptance_length": "completion_tokens / num_spec_steps: tokens per verification, bonus included",
    "accepted_per_proposal": "num_accepted_draft_tokens / num_spec_steps: bonus excluded",
    "draft_acceptance_rate": "num_accepted_draft_tokens / num_draft_tokens",
    "strict_mean_acceptance_length": "mean_acceptance_length of strict matching on the same requests",
    "strict_accepted_per_proposal": "accepted_per_proposal of strict matching on the same requests",
    "acceptance_length_gain": "mean_acceptance_length / strict_mean_acceptance_length - 1",
    "completion_tokens": "tokens committed",
    "num_spec_steps": "verifications",
    "num_draft_tokens": "draft tokens proposed",
    "num_accepted_draft_tokens": "draft tokens committed",
    "relaxed_tokens": "accepted draft tokens that were not the target's choice",
    "regret_spent_mean": "ledger at the end of a request, mean, in logits",
    "regret_spent_p95": "the same, 95th percentile over requests (linear)",
    "regret_spent_max": "the same, largest",
    "rejected_by_gate": "blocks ended by a mismatch over the gate",
    "rejected_by_budget": "blocks ended by a mismatch within the gate but over the budget",
    "rejected_by_cap": "blocks ended by a mismatch over the cap alone",
    "acceptance_histogram": "steps by number of accepted draft tokens, 0 .. largest K",
}
"""Fields of a result row, in order."""


def ratio(numerator: npt.NDArray[Any], denominator: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return numerator / denominator, NaN where the denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / np.maximum(denominator, 1), np.nan).astype(np.float64)


def masked_quantile(values: npt.NDArray[np.float64], keep: npt.NDArray[np.bool_], q: float) -> npt.NDArray[np.float64]:
    """Return a linear quantile over the last axis of the kept values, NaN where none is kept."""
    count = keep.sum(axis=-1)
    ordered = np.sort(np.where(keep, values, np.inf), axis=-1)
    place = q * np.maximum(count - 1, 0)
    low = np.floor(place).astype(np.int64)
    high = np.ceil(place).astype(np.int64)
    at_low = np.take_along_axis(ordered, low[..., None], axis=-1)[..., 0]
    at_high = np.take_along_axis(ordered, high[..., None], axis=-1)[..., 0]
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, at_low + (place - low) * (at_high - at_low), np.nan)
