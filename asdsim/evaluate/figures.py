"""What a result row means: every figure, defined once.

Names follow vLLM and AIPerf. ``mean_acceptance_length`` counts the bonus token, ``accepted_per_proposal`` does not;
both are ratios of sums over requests. Tokens behind an end of sequence or the token limit count nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..stats import Totals

COLUMNS: dict[str, str] = {
    "rule": "rule that was walked",
    "semantics": "which reading of the rule",
    "B": "budget, regret per request, in logits",
    "g": "gate on regret per suffix value, in logits",
    "M": "cap, relaxed tokens per block",
    "parameters": "parameters of another rule than ASD, or what this ASD varies",
    "off_trace": "what happened at prefixes that were not captured",
    "baseline": "what strict_* and the gain compare with: strict matching by token id, or B = 0 of a reading that "
    "accepts ties",
    "requests": "requests in the figures of this row",
    "exact": "whether the walk of every request met captured steps only; false: no result, but an estimate, or under "
    "off_trace stop a mean over the requests that stayed",
    "exact_share": "share of all requests whose walk met captured steps only",
    "paired_requests": "requests of this row whose strict walk is captured as well",
    "mean_acceptance_length": "completion_tokens / num_spec_steps: tokens per verification, bonus included",
    "accepted_per_proposal": "num_accepted_draft_tokens / num_spec_steps: bonus excluded",
    "draft_acceptance_rate": "num_accepted_draft_tokens / num_draft_tokens",
    "strict_mean_acceptance_length": "mean_acceptance_length of the baseline on the same requests; null unless "
    "paired_requests is requests",
    "strict_accepted_per_proposal": "accepted_per_proposal of the baseline on the same requests; null likewise",
    "acceptance_length_gain": "mean_acceptance_length / strict_mean_acceptance_length - 1; null likewise, and where "
    "requests have left the row",
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


def baseline_of(semantics: str) -> str:
    """Return what ``strict_*`` and gains compare with under a reading: what B = 0 does there."""
    return "B=0 of lightllm (accepts ties)" if semantics == "lightllm" else "strict (token ids)"


# --- what a setting gains and costs, as ratios of sums over requests ------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A figure that has an interval.

    Attributes
    ----------
    meaning : str
        Definition and unit.
    needs : tuple of str
        Per-request columns it is made of: counts of a walk (``steps``, ``drafted``, ``accepted``, ``tokens``,
        ``relaxed``, ``by_gate``, ``by_budget``, ``by_cap``), ``spent`` (ledger, logits), ``requests`` (1 where the
        request counts), ``seconds`` (predicted), ``plain`` (seconds of the target alone, predicted), of outputs
        ``differ``, ``first_difference``, ``distance`` and ``logprob``, and ``scored``, ``correct``; with ``_strict``
        those of strict matching on the same requests.
    formula : callable
        From sums of these columns to the figure.
    """

    meaning: str
    needs: tuple[str, ...]
    formula: Callable[[Totals], npt.NDArray[np.float64]]


def _over(top: str, bottom: str) -> Callable[[Totals], npt.NDArray[np.float64]]:
    return lambda s: s[top] / s[bottom]


def _change(top: str, bottom: str) -> Callable[[Totals], npt.NDArray[np.float64]]:
    """Return the relative change of a ratio against strict matching."""
    return lambda s: (s[top] / s[bottom]) / (s[f"{top}_strict"] / s[f"{bottom}_strict"]) - 1.0


def _with_strict(*names: str) -> tuple[str, ...]:
    return (*names, *(f"{name}_strict" for name in names))


FIGURES: dict[str, Figure] = {
    "mean_acceptance_length": Figure(
        "tokens per verification, bonus included", ("tokens", "steps"), _over("tokens", "steps")
    ),
    "accepted_per_proposal": Figure(
        "accepted draft tokens per verification, bonus excluded", ("accepted", "steps"), _over("accepted", "steps")
    ),
    "acceptance_length_gain": Figure(
        "mean_acceptance_length against strict, minus 1", _with_strict("tokens", "steps"), _change("tokens", "steps")
    ),
    "relaxed_per_token": Figure(
        "accepted draft tokens that are not the target's choice, per token", ("relaxed", "tokens"),
        _over("relaxed", "tokens"),
    ),
    "regret_spent_mean": Figure(
        "ledger at the end of a request, logits", ("spent", "requests"), _over("spent", "requests")
    ),
    "regret_per_token": Figure("ledger per generated token, logits", ("spent", "tokens"), _over("spent", "tokens")),
    "bound_by_gate": Figure("share of blocks that the gate ended", ("by_gate", "steps"), _over("by_gate", "steps")),
    "bound_by_budget": Figure(
        "share of blocks that the budget ended", ("by_budget", "steps"), _over("by_budget", "steps")
    ),
    "bound_by_cap": Figure("share of blocks that the cap ended", ("by_cap", "steps"), _over("by_cap", "steps")),
    "length_change": Figure(
        "generated tokens against strict, minus 1", _with_strict("tokens"),
        lambda s: s["tokens"] / s["tokens_strict"] - 1.0,
    ),
    "tokens_per_second": Figure("predicted by the cost model", ("tokens", "seconds"), _over("tokens", "seconds")),
    "speed_up_plain": Figure(
        "predicted tokens per second over those of the target alone (plain decoding), as a factor",
        ("tokens", "seconds", "tokens_strict", "plain_strict"),
        lambda s: (s["tokens"] / s["seconds"]) / (s["tokens_strict"] / s["plain_strict"]),
    ),
    "speed_up": Figure(
        "predicted tokens per second over those of strict speculative decoding, as a factor",
        _with_strict("tokens", "seconds"),
        lambda s: 1.0 + _change("tokens", "seconds")(s),
    ),
    "outputs_differ_share": Figure(
        "share of outputs that are not the strict one, token for token", ("differ", "requests"),
        _over("differ", "requests"),
    ),
    "first_difference_mean": Figure(
        "tokens before the first one that differs from strict, over the outputs that differ",
        ("first_difference", "differ"), _over("first_difference", "differ"),
    ),
    "edit_distance_mean": Figure(
        "Levenshtein distance to the strict output over tokens, divided by the longer length; mean over requests",
        ("distance", "requests"), _over("distance", "requests"),
    ),
    "logprob_per_token": Figure(
        "log-probability of the output under the target, nats per token", ("logprob", "tokens"),
        _over("logprob", "tokens"),
    ),
    "logprob_change_mean": Figure(
        "log-probability of the output minus that of the strict output, nats per request",
        (*_with_strict("logprob"), "requests"), lambda s: (s["logprob"] - s["logprob_strict"]) / s["requests"],
    ),
    "accuracy": Figure("share of scored requests that are right", ("correct", "scored"), _over("correct", "scored")),
    "accuracy_change": Figure(
        "accuracy minus that of strict matching on the same requests", (*_with_strict("correct"), "scored"),
        lambda s: (s["correct"] - s["correct_strict"]) / s["scored"],
    ),
}  # fmt: skip
"""Figures with an interval. Shares of requests get Wilson's and Newcombe's intervals, the others a paired bootstrap;
see :mod:`asdsim.stats`."""


def suffix_reuse(
    regret: npt.NDArray[np.float64],
    run: npt.NDArray[np.integer],
    room: npt.NDArray[np.integer],
    thresholds: npt.NDArray[np.float64],
    lengths: Sequence[int],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Tell which mismatches are cheap enough, and which of these are followed by exact draft tokens.

    The suffix reuse of (tau, p) is the share, among mismatches with regret <= tau that have at least p draft positions
    behind them in their block, of those whose next p draft tokens all equal the target's choice.

    Parameters
    ----------
    regret : float64 (m,)
        In logits.
    run : int (m,)
        Exact draft tokens that follow at once.
    room : int (m,)
        Draft positions behind the mismatch, up to an EOS or the token limit.
    thresholds : float64 (t,)
        tau, in logits.
    lengths : sequence of int (l,)
        p.

    Returns
    -------
    reused, counted : bool (t, l, m)
    """
    wide = np.asarray(lengths)[None, :, None]
    counted = (regret[None, None, :] <= np.asarray(thresholds)[:, None, None]) & (room[None, None, :] >= wide)
    return counted & (run[None, None, :] >= wide), counted
