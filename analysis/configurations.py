"""What ASD gains with each drafter, K and task, on the committed covered traces.

It needs the target's tokenizer, not its weights.

    python analysis/configurations.py --allow-code-execution [-o docs/configurations.md]

Answers are scored where the task has right ones; HumanEval's are programs that the model wrote, and running them must
be allowed. Without it they count as not scored.

Speeds are predicted from the passes that each trace holds (`python analysis/add_timing.py`), as by every command; what
selection adds to a step under ASD comes from the published H20 run (`docs/published.md`).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

import asdsim
from asdsim.engines.transformers.text import load_decoder
from asdsim.evaluate.cost_spec import cost_of_trace
from asdsim.evaluate.per_step import reuse_curves
from asdsim.rules.settings import Grid, Policy
from asdsim.studies.audit import audit
from asdsim.trace.graph import build_graph

ROOT = Path(__file__).resolve().parents[1]
TRACES = (
    "smollm2-layerskip", "smollm2-layerskip-k4", "smollm2-lookup", "smollm2-lookup-k4", "smollm2-medusa",
    "smollm2-medusa-k3", "smollm2-eagle3", "smollm2-eagle3-k4", "smollm2-dspark", "smollm2-dspark-k4",
)  # fmt: skip
"""In ``traces/``; those that are not there are left out, and named."""

ASD = Policy(8.0, 0.25, 2.0)
CONTEXT = 150.0
"""Tokens that a step of the table of costs stands on."""
SELECTION = 147.128 / 146.358
"""Seconds per proposal, ASD over native, on 8 x H20 (arXiv 2608.03447; docs/published.md)."""

PUBLISHED = (
    (
        "Qwen3-14B + DSpark, K=7, seven tasks",
        "+3.64 to +11.73 % throughput, mean +7.78 %; accepted length 3.85 to 4.20 (+9.1 %)",
    ),
    ("ten configurations of DSpark, EAGLE3 and Medusa", "+3.05 to +15.26 % throughput, mean +7.52 %"),
    ("DeepSeek-V4-Flash + DSpark, K=5", "+7.64 % accepted per proposal, +5.44 % throughput"),
)  # fmt: skip


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/configurations.md"))
    parser.add_argument("--allow-code-execution", action="store_true", help="score HumanEval, by running the answers")
    options = parser.parse_args()
    os.chdir(ROOT)
    options.out.write_text(page(options.allow_code_execution), encoding="utf-8")
    print(options.out)


def page(allow_code: bool) -> str:
    """Return the page in Markdown."""
    rows, why = [], []
    for name in TRACES:
        folder = Path("traces") / name
        if folder.is_dir():
            rows += _rows(folder, allow_code)
            why.append(_why(folder))
    return HEAD.format(
        gains=_gain_table(rows), costs=_cost_table(rows), why=_why_table(why), published=_published(), setting=ASD
    )


def _rows(folder: Path, allow_code: bool) -> list[dict[str, Any]]:
    """Return one row per task, and one for all."""
    trace = asdsim.load(folder)
    kind, K = trace.manifest.drafter["name"].split(":")[0], trace.manifest.num_draft_tokens
    cost = cost_of_trace(trace)
    decode = load_decoder(trace.manifest.target, tokenizer=None, offline=False)
    result = audit(trace, Grid.of([Policy(0.0, 0.25, 2.0), ASD]), decode, allow_code=allow_code, cost=cost)
    found = []
    for task, judged in [*result.by_task.items(), ("all", result.quality)]:
        strict, asd = judged.row(0), judged.row(1)
        if strict["exact_share"] < 1 or asd["exact_share"] < 1:
            raise SystemExit(f"{folder} is not covered for {ASD}")
        found.append({
            "drafter": kind, "K": K, "task": task, "requests": int(strict["requests"]), "strict": strict, "asd": asd,
            "verification": cost.verification(K, CONTEXT), "draft": float(cost.draft_us(K) / cost.pass_us(1)),
            "notes": cost.notes(),
        })  # fmt: skip
    return found


def _why(folder: Path) -> dict[str, Any]:
    """Return what a drafter's mismatches look like on the captured path."""
    trace = asdsim.load(folder)
    graph = build_graph(trace)
    steps = graph.path_step[np.diff(graph.mm_ptr)[graph.path_step] > 0]
    first = graph.mm_ptr[steps]
    regret, room = graph.mm_regret[first], graph.drafted[steps] - graph.mm_pos[first]
    share, counted = reuse_curves(graph, [2.0], (1,))[1]
    taken = regret / room <= ASD.gate
    return {
        "drafter": trace.manifest.drafter["name"].split(":")[0], "K": trace.manifest.num_draft_tokens,
        "quartiles": np.quantile(regret, [0.25, 0.5, 0.75]).tolist(), "below_1": float((regret < 1).mean()),
        "passes_gate": float(taken.mean()), "reuse": [float(v[0]) for v in (share.value, share.low, share.high)],
        "near": int(counted[0]),
    }  # fmt: skip


def _percent(values: list[float | None], digits: int = 1) -> str:
    value, low, high = values
    if value is None:
        return "-"
    span = "" if low is None or high is None else f" [{100 * low:+.{digits}f}, {100 * high:+.{digits}f}]"
    return f"{100 * value:+.{digits}f} %{span}"


def _gain_table(rows: list[dict[str, Any]]) -> str:
    names = (
        "drafter", "K", "task", "requests", "strict, accepted per step", "ASD, accepted per step",
        "tokens per step, ASD over strict (95 %)", "the same at the published cost of selection",
        "predicted speed over the target alone, strict / ASD", "outputs that differ",
        "answers right, strict / ASD, of scored",
    )  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        strict, asd = row["strict"], row["asd"]
        gain = asd["acceptance_length_gain"]
        speed = " / ".join(f"{one['speed_up_plain'][0]:.2f}" for one in (strict, asd))
        priced = (1 + gain[0]) / SELECTION - 1
        scored, right = asd["scored_requests"], asd["strict_right"]
        after = f"{right} / {right + asd['answers_gained'] - asd['answers_lost']} of {scored}" if scored else "-"
        lines.append(
            f"| {row['drafter']} | {row['K']} | {row['task']} | {row['requests']} "
            f"| {strict['accepted_per_proposal'][0]:.2f} | {asd['accepted_per_proposal'][0]:.2f} | {_percent(gain)} "
            f"| {100 * priced:+.1f} % | {speed} | {100 * asd['outputs_differ_share'][0]:.0f} % | {after} |"
        )
    return "\n".join(lines)


def _cost_table(rows: list[dict[str, Any]]) -> str:
    names = ("drafter", "K", "a draft", "a verification", "a step")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        if row["task"] == "all":
            draft, verify = row["draft"], row["verification"]
            lines.append(f"| {row['drafter']} | {row['K']} | {draft:.2f} | {verify:.2f} | {draft + verify:.2f} |")
    said = [
        f"- {row['drafter']}, K={row['K']}: {text}" for row in rows if row["task"] == "all" for text in row["notes"]
    ]
    return "\n".join([*lines, *([""] if said else []), *said])


def _why_table(rows: list[dict[str, Any]]) -> str:
    names = (
        "drafter", "K", "regret at the first mismatch, quartiles", "below 1 logit", "pass the gate",
        "near-ties (regret <= 2) followed by a match (95 %)",
    )  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        low, middle, high = row["quartiles"]
        value, *ends = (100 * share for share in row["reuse"])
        lines.append(
            f"| {row['drafter']} | {row['K']} | {low:.2f} / {middle:.2f} / {high:.2f} | {100 * row['below_1']:.0f} % "
            f"| {100 * row['passes_gate']:.0f} % | {value:.0f} % [{ends[0]:.0f}, {ends[1]:.0f}] of {row['near']} |"
        )
    return "\n".join(lines)


def _published() -> str:
    return "\n".join(
        ["| published (arXiv 2608.03447) | gain |", "|---|---|", *(f"| {a} | {b} |" for a, b in PUBLISHED)]
    )


HEAD = """# Where ASD helps

Made by `python analysis/configurations.py --allow-code-execution`. The target is SmolLM2-135M-Instruct, decoded
greedily up to 96 new tokens. The table compares {setting} with strict matching on traces covered for both, so
acceptance, outputs and answers are exact for these prompts; speeds are predicted. Intervals are 95 %, paired over
requests.

{gains}

Speed over the target alone is predicted as by every command: from passes over 1, 2, 4 and K + 1 tokens, from drafts and
from prompts, timed with the trace's models and stored in it. These traces were timed later, all in one run, in process
time of one thread, on a quiet machine (`analysis/add_timing.py`). In units of one pass over one token:

{costs}

On a CPU, unlike a GPU, verifying K + 1 tokens costs more than decoding one. Selection costs .53 % of a step in the
published run on H20.

## Why

{why}

ASD gains where a drafter's mistakes are small and the drafter agrees with the target again afterwards.

- **Layer-skip** is such a drafter, because it is nearly the target itself: about two thirds of its first mismatches
  are within one logit, and three quarters of its near-ties are followed by a match. Its gain at K=7 is the largest
  here, but nobody would deploy it.
- **Trained heads** make larger mistakes: 3.5 logits at the median for EAGLE3, 5 for DSpark and 9 for Medusa; 8 to 22 %
  of first mismatches are within one logit. EAGLE3 and DSpark condition on the previous token and match again after one
  near-tie in three. Medusa's heads do not see the tokens of their own block and match again after one in five. Both
  the gain and what it adds to are small: .1 to .7 more accepted tokens per step.
- **Look-up** copies earlier text. A relaxed output begins to repeat itself, and look-up then finds more to copy: this
  gain is not a real one.
- Published gains, with strong heads of large models, are smaller than those of EAGLE3 and DSpark here; Medusa's lie in
  the published range. Stronger heads leave less to gain, which may be the reason; this was not tested here.
- A smaller K gains less: the gate weighs regret against the suffix that a rejection would discard, and short blocks
  have short suffixes.
- Nearly every output differs from strict decoding. These traces cannot show whether answers stay right: within 96
  tokens this target gets none of them right under strict matching, and none or one under ASD. MT-Bench has no right
  answers.

With 8 requests per task the intervals are wide, and with 4 there is none. Medusa gains less than EAGLE3 and DSpark; the
order of those two is not settled.

## Published

{published}
"""


if __name__ == "__main__":
    main()
