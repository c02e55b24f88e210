"""What the simulator modes of serving engines ask for: how many draft tokens are accepted, position by position.

A stock engine can be told an acceptance rate, and then runs as fast as it would with a rule of that rate, without a
patch. Its texts mean nothing in that mode: tokens are accepted by lot.

Sources: vLLM 0.32, ``speculative_config`` (rates that all drafts up to a position are accepted); SGLang 0.5.23,
``SGLANG_SIMULATE_ACC_LEN`` (length with the bonus token); TensorRT-LLM, ``TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS``
(draft tokens, without it); AIConfigurator, ``nextn`` and ``nextn_accepted``, in older releases ``nextn_accept_rates``;
Dynamo's mocker, ``aic_nextn`` and ``aic_nextn_accept_rates`` (conditional, separated by commas); inference-sim (BLIS),
``--num-speculative-tokens`` K and ``--speculative-acceptance-rate``, the share of K accepted on average: a step gives
1 + rate x K tokens and costs a pass of K + 1 (its guide to latency models, from pull request 1538 on); vLLM's
``num_speculative_tokens_per_batch_size``, rows of [first batch, last batch, K] (its page on dynamic speculative
decoding, commit 015a47e1282c).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError, unknown_name
from ..rules.settings import schedule_of

ENGINES = ("vllm-synthetic", "sglang-sim", "trtllm", "aiconfigurator", "dynamo", "inference-sim")
RANGES = "vllm-ranges"
"""What is made from advice, not from a trace."""
NOTE = "for speed only: the engine accepts by lot in this mode, and the texts that it writes mean nothing"


@dataclass(frozen=True)
class Rates:
    """Acceptance by draft position.

    Attributes
    ----------
    steps : int
    unconditional : list of float (K,)
        Share of steps in which positions 0 .. i were all accepted.
    conditional : list of float (K,)
        Share of the steps that reached position i, in which it was accepted; 0 where none did.
    """

    steps: int
    unconditional: list[float]
    conditional: list[float]

    @property
    def accepted(self) -> float:
        """Draft tokens accepted per step."""
        return float(sum(self.unconditional))


def rates_of(records: Sequence[dict[str, Any]]) -> Rates:
    """Return the rates of acceptance records.

    Raises
    ------
    UsageError
        If they hold no step.
    """
    width = max((len(record["acceptance_histogram"]) for record in records), default=0)
    histogram = np.zeros(width, np.int64)
    for record in records:
        histogram[: len(record["acceptance_histogram"])] += np.asarray(record["acceptance_histogram"], np.int64)
    steps = int(histogram.sum())
    if not steps:
        raise UsageError("no step was taken, so there are no rates", fix="use a trace with requests in it")
    reached = histogram[::-1].cumsum()[::-1]  # steps that accepted at least i
    conditional = [float(b / a) if a else 0.0 for a, b in zip(reached[:-1], reached[1:], strict=True)]
    return Rates(steps, [float(count / steps) for count in reached[1:]], conditional)


def settings_for(engine: str, rates: Rates) -> dict[str, Any]:
    """Return what an engine is given: ``options``, ``environment`` and ``notes``.

    Raises
    ------
    UsageError
        On an unknown engine.
    """
    if engine not in ENGINES:
        raise unknown_name("engine", engine, list(ENGINES))
    width, accepted = len(rates.unconditional), rates.accepted
    options: dict[str, Any] = {}
    environment: dict[str, str] = {}
    notes = [NOTE]
    if engine == "vllm-synthetic":
        options["speculative_config"] = {
            "num_speculative_tokens": width, "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [round(rate, 6) for rate in rates.unconditional],
        }  # fmt: skip
        notes.append("add method and model of your drafter to speculative_config")
    elif engine == "sglang-sim":
        environment = {"SGLANG_SIMULATE_ACC_LEN": f"{1 + accepted:.6g}", "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}
        options["speculative_num_draft_tokens"] = width + 1
        notes.append("the length is met on average, by its two neighbouring whole numbers alone")
    elif engine == "trtllm":
        environment = {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": f"{accepted:.6g}"}
        options["max_draft_len"] = width
        notes.append(f"older releases take whole numbers only: {int(accepted)} and {int(accepted) + 1} bracket it")
    elif engine == "dynamo":
        options = {"aic_nextn": width, "aic_nextn_accept_rates": ",".join(f"{rate:.6g}" for rate in rates.conditional)}
        notes.append("arguments of the mocker's engine (MockEngineArgs, --aic-nextn); rates are conditional")
        if width > 5:
            notes.append(f"the mocker takes an aic_nextn of at most 5, not {width}: take --K 5 or less")
    elif engine == "inference-sim":
        rate = f"{accepted / width if width else 0.0:.9g}"
        options["flags"] = f"--num-speculative-tokens {width}" + (
            f" --speculative-acceptance-rate {rate}" if width else ""
        )
        notes = ["flags of blis run and blis replay; a step gives 1 + rate x K tokens, the mean of this setting"]
    else:
        options = {"nextn": width, "nextn_accepted": round(accepted, 6)}
        notes.append("older releases take nextn_accept_rates, the conditional rates, in place of nextn_accepted")
        if width > 5:
            notes.append(f"AIConfigurator takes a nextn of at most 5, not {width}: use a trace of K <= 5")
    return {"options": options, "environment": environment, "notes": notes}


def ranges_for_vllm(advice: Any, where: str) -> dict[str, Any]:
    """Return the draft lengths by batch of ``asdsim advise --json`` as vLLM takes them; keys as :func:`settings_for`.

    Raises
    ------
    UsageError
        If it is no advice, its ranges are none that vLLM takes, or it advises against speculation at every batch.
    """
    fix = "give a file that asdsim advise --json wrote"
    if not isinstance(advice, dict) or advice.get("command") != "advise":
        raise UsageError("not the advice of asdsim advise", where=where, fix=fix)
    rows = advice.get("ranges")
    whole = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 3 and all(type(number) is int for number in row) for row in rows
    )
    if not whole or not rows:
        raise UsageError("ranges is not a list of [first batch, last batch, K]", where=where, fix=fix)
    try:
        longest = max(schedule_of(rows).lengths)
    except UsageError as error:
        raise UsageError(error.what, where=where, fix=error.fix) from None
    if not longest:
        raise UsageError("the advice is not to speculate at any batch", where=where, fix="serve without a drafter")
    config = {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": rows}
    notes = [
        "add method and model of your drafter to speculative_config",
        f"vLLM takes the last K beyond batch {rows[-1][1]}, which was not looked at",
    ]
    return {"options": {"speculative_config": config}, "environment": {}, "notes": notes}
