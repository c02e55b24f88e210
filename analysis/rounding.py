"""How far a step is a function of its prefix: what batch shape and the history of the KV cache do to it.

    python analysis/rounding.py [-o analysis/results/rounding.json] [--limit 2]

Decodes prompts live, one by one, with the KV cache carried along (the shapes of live decoding). Then the target scores
the very same blocks again: alone and from scratch (another KV history), in a batch of 16 from scratch (another shape as
well), and in batches of 16 on pooled KV, as ``asdsim cover`` does. Counted is how many steps have another argmax in a
row that strict matching or the published setting relies on, how many end otherwise under the published setting
(B=8, g=.25, M=2, nothing spent before), and how far the largest logit gap moved. Needs the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from asdsim.capture.drafters import make_drafter
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder, scan
from asdsim.capture.run import Plan, make_requests
from asdsim.capture.tasks import load_prompts
from asdsim.engines.transformers.load import load_target
from asdsim.rules.asd import decide
from asdsim.rules.settings import STRICT, Policy

PUBLISHED = Policy(8.0, 0.25, 2.0)
BATCH = 16


def outcome(seen: Any, draft: list[int], policy: Policy) -> tuple[int, ...]:
    """Return accepted draft tokens and the target's choices that the outcome relies on."""
    accepted = decide(
        draft, seen.argmax_ids, seen.regrets, len(draft), 0.0, policy.budget, policy.gate, policy.cap
    )[0]  # fmt: skip
    return accepted, *seen.argmax_ids[: accepted + 1].tolist()


def study(dtype: str, logits_dtype: str, limit: int) -> dict[str, Any]:
    """Measure one dtype."""
    plan = Plan(out=Path("unused-by-analysis"), target="smollm2-135m", drafter="layer-skip",
                task="gsm8k,humaneval,mt-bench", limit=limit, dtype=dtype, logits_dtype=logits_dtype)  # fmt: skip
    target = load_target(plan.target, logits_dtype=logits_dtype, **plan.loading)
    drafter = make_drafter(plan.drafter, target, **plan.loading)
    requests = list(make_requests(target, load_prompts(plan.task, limit=limit, offset=0, offline=False), plan))
    prefixes: list[list[int]] = []
    drafts: list[list[int]] = []
    live: list[Any] = []
    for request in requests:
        made = decode(target, drafter, request, STRICT, plan.K, Recorder())
        session = target.session(request.prompt_ids)
        for step in made.steps:
            prefix, draft = [*request.prompt_ids, *made.tokens[: step.start_pos]], step.draft_ids.tolist()
            prefixes.append(prefix)
            drafts.append(draft)
            live.append(scan(session.score(prefix, draft), draft, request.request_id))
            assert live[-1].argmax_ids.tolist() == step.argmax_ids.tolist(), "live decoding does not repeat"
    pooled = target.pooled(1 << 30)
    ways = {
        "alone, KV from scratch": (lambda p, d: [target.session(p[0]).score(p[0], d[0])], 1),
        "batch of 16, KV from scratch": (target.score_many, BATCH),
        "batch of 16, pooled KV": (pooled.score_many, BATCH),
    }
    rows = []
    for name, (score, size) in ways.items():
        strict = published = 0
        moved = []
        for first in range(0, len(prefixes), size):
            part = slice(first, first + size)
            for seen, before, draft in zip(score(prefixes[part], drafts[part]), live[part], drafts[part], strict=True):
                again = scan(seen, draft, name)
                strict += outcome(again, draft, STRICT) != outcome(before, draft, STRICT)
                published += outcome(again, draft, PUBLISHED) != outcome(before, draft, PUBLISHED)
                same = again.argmax_ids[:-1] == before.argmax_ids[:-1]
                moved.append(np.abs(again.regrets - before.regrets)[same].max(initial=0.0))
        rows.append({
            "against live": name, "steps": len(prefixes), "strict_changed": strict, "published_changed": published,
            "regret_moved_median": float(np.median(moved)), "regret_moved_max": float(np.max(moved)),
        })  # fmt: skip
    return {"dtype": dtype, "logits_dtype": logits_dtype, "rows": rows}


def main() -> None:
    """Measure float32, bfloat16, and bfloat16 with a float32 projection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("analysis/results/rounding.json"))
    parser.add_argument("--limit", type=int, default=4, help="prompts of each task")
    options = parser.parse_args()
    studies = [
        study(dtype, logits, options.limit)
        for dtype, logits in (("float32", "model"), ("bfloat16", "model"), ("bfloat16", "float32"))
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"command": "python analysis/rounding.py", "studies": studies}, indent=1) + "\n"
    )
    head = "dtype|logits|against live decoding|steps|strict changed|published changed|regret moved, median / max"
    print("| " + " | ".join(head.split("|")) + " |")
    print("|---|---|---|---|---|---|---|")
    for one in studies:
        for row in one["rows"]:
            print(
                f"| {one['dtype']} | {one['logits_dtype']} | {row['against live']} | {row['steps']} "
                f"| {row['strict_changed']} | {row['published_changed']} "
                f"| {row['regret_moved_median']:.2g} / {row['regret_moved_max']:.2g} |"
            )


if __name__ == "__main__":
    main()
