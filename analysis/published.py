"""Recompute the published figures of ASD from their counters, and say where they do not agree.

    python analysis/published.py [-o docs/published.md]

Source of every number below: arXiv 2608.03447 (v3; tables and figure 3 in paper.json as of v1) and the reports of its
reference implementation. One run is published in full: DeepSeek-V4-Flash with a DSpark drafter, K = 5, 500 GSM8K
requests, native and ASD with B = g = 2.0625, M = 1.
"""

# ruff: noqa: E501 (a table cell is one line)

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from decimal import Decimal, getcontext
from pathlib import Path
from typing import Any

import numpy as np

from asdsim.evaluate.cost import from_rows

getcontext().prec = 40
ROOT = Path(__file__).resolve().parents[1]
REQUESTS = 500


@dataclass(frozen=True)
class Run:
    """Counters of one run, as printed."""

    name: str
    proposals: int
    accepted: int
    by_position: tuple[int, ...]
    histogram: tuple[int, ...]
    tokens: int
    seconds: Decimal
    matches: int
    printed_per_proposal: str
    printed_rate: str


NATIVE = Run(
    "native", 16045, 58473, (14904, 13227, 11688, 10119, 8535), (1141, 1677, 1539, 1569, 1584, 8535), 74594,
    Decimal("2348.31919839"), 478, "3.644312870052976", "31.76484698125425",
)  # fmt: skip
ASD = Run(
    "ASD", 15386, 60357, (14779, 13649, 12278, 10688, 8963), (607, 1130, 1371, 1590, 1725, 8963), 75819,
    Decimal("2263.710352404"), 474, "3.922851943325101", "33.493242595936465",
)  # fmt: skip
RELAXED, CHARGED, STRICT_ACCEPTABLE = 1427, 723.75, 56642
RATIOS = 484  # positive first-rejection ratios of the calibration
PAPER: dict[str, Any] = json.loads((ROOT / "analysis" / "paper.json").read_text(encoding="utf-8"))
README_MEAN, README_ENDS = 7.90, (3.86, 11.74)  # of the seven tasks, in the reference repository
# Pull request 1555 of ModelTC/LightLLM: tokens per second and accuracy in per cent, strict and ASD.
LIGHTLLM: dict[str, Any] = {"requests": 1319, "rate": (66.21, 75.04), "accuracy": (79.682, 79.454)}


def change(old: Decimal | float, new: Decimal | float) -> float:
    """Return a relative change in per cent."""
    return 100 * (float(new) / float(old) - 1)


def step_seconds(run: Run) -> float:
    """Return seconds per proposal."""
    return float(run.seconds) / run.proposals


def same(value: float, printed: str) -> str:
    """Say whether a float equals what was printed to its last digit."""
    return "yes" if repr(value) == printed else f"no: {value!r}"


def derived(run: Run) -> list[tuple[str, str, str]]:
    """Return (what, value, check) for the figures that follow from a run's counters."""
    per_proposal, rate = run.accepted / run.proposals, run.tokens / float(run.seconds)
    reach = np.cumsum(run.histogram[::-1])[::-1][1:]
    total = sum(j * count for j, count in enumerate(run.histogram))
    return [
        ("accepted per proposal", repr(per_proposal), f"as printed: {same(per_proposal, run.printed_per_proposal)}"),
        ("tokens per second", repr(rate), f"as printed: {same(rate, run.printed_rate)}"),
        ("sum of the histogram", str(sum(run.histogram)), f"proposals {run.proposals}: {sum(run.histogram) == run.proposals}"),
        ("histogram weighted by length", str(total), f"accepted {run.accepted}: {total == run.accepted}"),
        ("accepted at position 1..5, summed", str(sum(run.by_position)), f"accepted: {sum(run.by_position) == run.accepted}"),
        ("reached position 1..5 by the histogram", " ".join(map(str, reach)), f"as printed: {tuple(reach) == run.by_position}"),
        ("mean acceptance length, tokens / proposals", f"{run.tokens / run.proposals:.6f}",
         f"accepted per proposal + 1 = {per_proposal + 1:.6f}"),
        ("tokens - accepted - proposals", str(run.tokens - run.accepted - run.proposals),
         f"{REQUESTS} if each request had one more token"),
        ("seconds per proposal", f"{step_seconds(run):.6f}", ""),
        ("GSM8K accuracy", f"{100 * run.matches / REQUESTS:.1f} %", ""),
    ]  # fmt: skip


def shares() -> dict[str, float]:
    """Split the gain in accepted tokens into what reaches throughput, in per cent."""
    accepted = change(NATIVE.accepted / NATIVE.proposals, ASD.accepted / ASD.proposals)
    length = change(NATIVE.tokens / NATIVE.proposals, ASD.tokens / ASD.proposals)
    rate = change(NATIVE.tokens / NATIVE.seconds, ASD.tokens / ASD.seconds)
    step = change(step_seconds(NATIVE), step_seconds(ASD))
    return {"accepted": accepted, "length": length, "rate": rate, "step": step}


def predicted() -> tuple[float, float]:
    """Return the throughput gain predicted from acceptance alone, and with the step time that both runs imply."""
    model = from_rows([{"verify_us": step_seconds(NATIVE) * 1e6}], "native run")
    slower = from_rows([{"verify_us": step_seconds(NATIVE) * 1e6,
                         "select_us": (step_seconds(ASD) - step_seconds(NATIVE)) * 1e6}], "both runs")  # fmt: skip

    def rate(run: Run, cost) -> float:  # type: ignore[no-untyped-def]
        return run.tokens / float(cost.seconds(run.proposals, 5 * run.proposals, run.tokens, 0))

    return change(rate(NATIVE, model), rate(ASD, model)), change(rate(NATIVE, model), rate(ASD, slower))


def mean(values: Any) -> float:
    """Return the mean of some numbers."""
    numbers = list(values)
    return float(sum(numbers) / len(numbers))


def cells() -> dict[tuple[str, str], dict[str, float]]:
    """Return the 15 different cells of the paper's two tables, by pair and task."""
    main = {("qwen3-14b-dspark", task): cell for task, cell in PAPER["table_1"].items()}
    others = {(pair, task): cell for pair, row in PAPER["table_2"].items() for task, cell in row.items()}
    return {**others, **main}


def speed_columns() -> str:
    """Say where the two columns of speed give another gain than the column of gains."""
    apart = {where: change(cell["strict"], cell["asd"]) - cell["gain"] for where, cell in cells().items()}
    # Two decimals of each column leave that much open.
    open_to = {
        where: 100 * 0.005 * (1 + cell["asd"] / cell["strict"]) / cell["strict"] for where, cell in cells().items()
    }
    differ = [where for where, gap in apart.items() if abs(gap) > open_to[where] + 0.005]
    over = sum(apart[where] > 0 for where in differ)
    low, high = min(apart, key=lambda w: apart[w]), max(apart, key=lambda w: apart[w])

    def cell(where: tuple[str, str]) -> str:
        found = cells()[where]
        return (
            f"{where[1]} on {where[0]}, {change(found['strict'], found['asd']):+.1f} % against {found['gain']:+.2f} %"
        )

    return (
        f"strict and ASD over the target alone give another gain than the one printed beside them in {len(differ)} of "
        f"{len(apart)} cells, by more than rounding allows: a larger one in {over}, a smaller one in {len(differ) - over}. "
        f"The ends: {cell(high)}; {cell(low)}. So the gain does not compare these two speeds."
    )


def lengths_against_gains() -> str:
    """Say how much of the gain in tokens per round is printed as throughput."""
    share = {w: c["gain"] / change(c["strict_length"], c["asd_length"]) for w, c in cells().items()}
    low, high = min(share, key=lambda w: share[w]), max(share, key=lambda w: share[w])
    return (
        f"throughput keeps {100 * share[low]:.0f} % ({low[1]} on {low[0]}) to {100 * share[high]:.0f} % ({high[1]} on "
        f"{high[0]}) of the gain in tokens per round, {100 * mean(share.values()):.0f} % on average over {len(share)} cells. "
        "More than 100 % needs cheaper rounds, or lengths from other runs than the gain."
    )


def speeds_against_lengths() -> str:
    """Say where a speed over the target alone is more than the tokens per round."""
    pairs = [(cell["strict"], cell["strict_length"]) for cell in cells().values()]
    bare = sum(speed > length for speed, length in pairs)
    bonus = sum(speed > length + 1 for speed, length in pairs)
    return (
        "a round costs at least one pass of the target, so strict decoding cannot be faster than the target alone by more than "
        f"its tokens per round. The printed speed is above the printed length in {bare} of {len(pairs)} cells, and above the "
        f"length plus a bonus token in {bonus}. Lengths and speeds are of other runs, or the target alone was run more slowly "
        "per pass than the target that verifies."
    )


def disagreements() -> list[tuple[str, str]]:
    """Return published figures that do not agree with each other, and how."""
    found = shares()
    main, drawn = PAPER["table_1"], PAPER["figure_3b"]
    fourteen = drawn["qwen3-14b-dspark"]
    other = max(main, key=lambda task: abs(fourteen[task] - main[task]["gain"]))
    right = [round(LIGHTLLM["requests"] * share / 100) for share in LIGHTLLM["accuracy"]]
    over = {run.name: run.tokens - run.accepted - run.proposals for run in (NATIVE, ASD)}
    return [
        ("Tokens of the full run",
         f"completion - accepted - proposals is {over['native']} (native) and {over['ASD']} (ASD). Each proposal commits "
         f"its accepted tokens and one more, so it would be {REQUESTS} if each request had a first token from "
         "the prompt, and 0 if not; every request that ends inside a block lowers it. The counters therefore run past the "
         "end of sequence."),
        ("Acceptance length with and without the bonus",
         f"accepted per proposal + 1 is {NATIVE.accepted / NATIVE.proposals + 1:.4f} and "
         f"{ASD.accepted / ASD.proposals + 1:.4f}, tokens per proposal {NATIVE.tokens / NATIVE.proposals:.4f} and "
         f"{ASD.tokens / ASD.proposals:.4f}: off by {over['native'] / NATIVE.proposals:.4f}, the same surplus."),
        ("Accuracy within .30 points",
         f"the table of this model says within .30 points, the full run has {NATIVE.matches} and {ASD.matches} of "
         f"{REQUESTS}: {100 * (ASD.matches - NATIVE.matches) / REQUESTS:+.1f} points. The settings differ, so neither "
         "figure can stand for the other. (Without paired answers no test is possible; at least 4 answers changed.)"),
        ("Accepted per proposal, +10.08 to +11.48 %",
         f"the same table; the full run has {found['accepted']:+.2f} %."),
        ("Accepted length 3.85 -> 4.20 against throughput +7.78 %",
         f"the length grows by {change(3.85, 4.20):+.2f} %: throughput keeps {100 * 7.78 / change(3.85, 4.20):.0f} % of it, "
         f"which a step that takes {change(1.0778, 4.20 / 3.85):.2f} % longer would explain."),
        ("Strict speed-up 1.82-6.88x -> 1.94-7.32x",
         f"the ends are Medusa on MMLU and Qwen3-14B on MATH-500, which is not among the ten configurations; they grow by "
         f"{change(1.82, 1.94):+.1f} % and {change(6.88, 7.32):+.1f} %, where the tables print "
         f"{PAPER['table_2']['llama-3.1-8b-medusa']['mmlu']['gain']:+.2f} % and {main['math500']['gain']:+.2f} %."),
        ("Speed columns of tables 1 and 2", speed_columns()),
        ("Strict speed and length in tables 1 and 2", speeds_against_lengths()),
        ("Accepted length in tables 1 and 2", lengths_against_gains()),
        ("Mean over seven tasks, +7.78 % (3.64 to 11.73)",
         f"the reference repository's README has +{README_MEAN:.2f} % ({README_ENDS[0]} to {README_ENDS[1]}). Table 1 averages "
         f"{mean(cell['gain'] for cell in main.values()):+.2f} %, figure 3(b) of the same paper "
         f"{mean(fourteen.values()):+.2f} % ({min(fourteen.values())} to {max(fourteen.values())}): the README follows the "
         f"figure. They differ most on {other}, {main[other]['gain']:+.2f} % and {fourteen[other]:+.2f} %, so they are two "
         "sets of runs of one configuration; the intervals of the table do not cover the figure's values on "
         f"{sum(abs(fourteen[t] - c['gain']) > c['half_width'] for t, c in main.items())} of {len(main)} tasks."),
        ("Positive gains in every reported setting",
         f"figure 3(b) has {drawn['qwen3-8b-dspark']['humaneval']:+.2f} % for HumanEval on Qwen3-8B with DSpark, which is in "
         "neither table."),
        ("B=8 g=.25 M=2 on GSM8K with Qwen3-14B and DSpark, +10.08 %",
         f"the same setting and pair has {fourteen['gsm8k']:+.2f} % in figure 3(b), +6.53 % in table 3 and +6.5 % in figure 6(c), "
         "and +7.2 % at natural end in figure 5 (256 prompts, one seed). Table 3 and figure 6(c) do not say on which prompts."),
        ("MMLU on Qwen3-14B with DSpark, change of accuracy",
         f"{main['mmlu']['accuracy']:+.2f} points in table 1, {PAPER['table_2']['qwen3-14b-dspark']['mmlu']['accuracy']:+.2f} in "
         "table 2, with all other columns equal."),
        ("GSM8K on Qwen3-14B with DSpark, +10.08 % and +.15 points at B=8",
         f"LightLLM's pull request 1555 reports {change(*LIGHTLLM['rate']):+.2f} % ({LIGHTLLM['rate'][0]} to {LIGHTLLM['rate'][1]} "
         f"tokens per second on 8 x L20) and {100 * (right[1] - right[0]) / LIGHTLLM['requests']:+.3f} points "
         f"on all {LIGHTLLM['requests']:,} prompts at B = 2.0625, in the paper's own evaluator. That is {right[0]} and {right[1]} "
         f"right answers: {right[0] - right[1]} fewer. More speed from a quarter of the budget can only come from another gate, cap or "
         "measurement; g and M are not given, so neither figure can stand for the other."),
        ("Strict acceptance on two trajectories",
         f"of the tokens accepted by ASD {STRICT_ACCEPTABLE} would pass strict matching too: {STRICT_ACCEPTABLE / ASD.proposals:.4f} per "
         f"proposal, against {NATIVE.accepted / NATIVE.proposals:.4f} in the native run. A strict path alone is biased for any "
         "other setting, which is why `asdsim cover` exists."),
    ]  # fmt: skip


def quantile_checks() -> list[tuple[str, str]]:
    """Return checks of the linear 25th percentile."""
    place = (RATIOS - 1) / 4
    low, high = 2.0, 2.083333333333333
    weight = place - int(place)
    return [
        ("[1, 2, 3, 4]", f"{np.quantile([1, 2, 3, 4], 0.25):g}"),
        ("1 .. 32", f"{np.quantile(np.arange(1, 33), 0.25):g}"),
        (f"{RATIOS} ratios: h = (n - 1)/4", f"{place:g}"),
        (f"between {low} and {high}", f"{low + weight * (high - low)!r} (printed: 2.0625)"),
    ]


def document() -> str:
    """Return the page for the documentation."""
    found = shares()
    alone, full = predicted()
    extra_ms = 1e3 * (step_seconds(ASD) - step_seconds(NATIVE))
    lines = [
        "# Published figures, recomputed", "",
        "Made by `python analysis/published.py -o docs/published.md`. Source: arXiv 2608.03447 (v3; tables 1 and 2 and figure",
        "3(b) as of v1, in `analysis/paper.json`) and the reports of its reference implementation. One run is published in",
        "full: DeepSeek-V4-Flash (284B) with a DSpark drafter, K = 5, 500",
        "GSM8K requests on 8 x H20, native and ASD with B = g = 2.0625, M = 1 (semantics `dspark`).", "",
    ]  # fmt: skip
    for run in (NATIVE, ASD):
        lines += [f"## {run.name}", "", "| figure | recomputed | check |", "|---|---|---|"]
        lines += [f"| {what} | {value} | {check} |" for what, value, check in derived(run)] + [""]
    lines += [
        "## From acceptance to throughput", "",
        "| figure | change |", "|---|---|",
        f"| accepted per proposal | {found['accepted']:+.2f} % |",
        f"| tokens per proposal, bonus included | {found['length']:+.2f} % |",
        f"| seconds per proposal | {found['step']:+.2f} % |",
        f"| tokens per second | {found['rate']:+.2f} % |",
        f"| predicted from acceptance alone, steps cost the same | {alone:+.2f} % |",
        f"| predicted with the step time of both runs | {full:+.2f} % |", "",
        f"{100 * found['rate'] / found['accepted']:.0f} % of the gain in accepted tokens becomes throughput. The bonus token, "
        f"which every step has anyway, accounts for most of the difference: {found['accepted']:.2f} % more accepted tokens are "
        f"{found['length']:.2f} % more tokens. The rest is the step itself, which takes {found['step']:.2f} % longer: {extra_ms:.2f} ms of "
        f"{1e3 * step_seconds(NATIVE):.1f} ms, or {extra_ms / (ASD.tokens / ASD.proposals):.3f} ms per token. (Elsewhere the "
        "paper gives +.045 and +.083 ms per token for selection.)",
        "",
        f"Each of the {RELAXED} relaxed tokens charged {CHARGED / RELAXED:.3f} logits and brought "
        f"{(ASD.accepted - STRICT_ACCEPTABLE) / RELAXED:.2f} accepted tokens with it. A request spent "
        f"{CHARGED / REQUESTS:.3f} logits of its budget of 2.0625.",
        "",
        "If a verification costs v ms and nothing else costs time, 3.85 -> 4.20 tokens per step saves v (1/3.85 - 1/4.20) per token:",
        f"the published -1.479 and -1.509 ms per token mean v = {1.479 / (1 / 3.85 - 1 / 4.20):.1f} and "
        f"{1.509 / (1 / 3.85 - 1 / 4.20):.1f} ms, if they belong to that configuration.",
        "", "## The frozen quantile", "", "| values | linear 25th percentile |", "|---|---|",
    ]  # fmt: skip
    lines += [f"| {what} | {value} |" for what, value in quantile_checks()]
    lines += ["", "## What does not agree", "", "| published | what else is published, or follows |", "|---|---|"]
    lines += [f"| {what} | {how} |" for what, how in disagreements()]
    return "\n".join(lines) + "\n"


def main(args: list[str]) -> None:
    """Print the page, or write it."""
    if args[:1] == ["-o"] and len(args) == 2:
        (ROOT / args[1]).write_text(document(), encoding="utf-8")
    else:
        print(document())


if __name__ == "__main__":
    main(sys.argv[1:])
