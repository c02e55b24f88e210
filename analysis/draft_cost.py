"""What drafting costs beside the target, for several drafters in one run, as JSON.

    python analysis/draft_cost.py DRAFTER@K [DRAFTER@K ..] [--prompts 2] [--tokens 64] [--rounds 3] [-o FILE]

Each round decodes every prompt speculatively with every drafter (strict matching, steps timed as `asdsim capture` times
them) and, in turn, one token at a time with the target alone on its KV cache. Reported are medians over steps after the
first of a request, and the ratio of a whole draft of K tokens to one token of the target. Names as for `--drafter`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from asdsim.capture.drafters import make_drafter
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.capture.run import Plan, make_requests
from asdsim.capture.tasks import load_prompts
from asdsim.engines.transformers.forward import Thread
from asdsim.engines.transformers.load import load_target
from asdsim.rules.settings import STRICT


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER@K")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    pairs = []
    for spec in options.drafters:
        name, at, width = spec.rpartition("@")
        if not at or not width.isdigit():
            parser.error(f"{spec!r}: write DRAFTER@K, for example lookup@7")
        target = load_target("smollm2-135m")
        pairs.append((name, int(width), target, make_drafter(name, target)))
    plan = Plan(
        out=Path("unused"), target="smollm2-135m", drafter="lookup", task="gsm8k,humaneval,mt-bench",
        limit=options.prompts, max_new_tokens=options.tokens, K=7, resume=True,
    )  # fmt: skip
    prompts = load_prompts(plan.task, limit=plan.limit)
    single: list[float] = []
    steps: dict[int, list] = {n: [] for n in range(len(pairs))}
    for _ in range(options.rounds):
        for request in make_requests(pairs[0][2], prompts, plan):
            for n, (_, width, target, drafter) in enumerate(pairs):
                found = decode(target, drafter, request, STRICT, width, Recorder(8))
                steps[n] += found.steps[1:]
                single += one_by_one(target, [*request.prompt_ids, *found.tokens[:16]])
    token = statistics.median(single)
    rows = []
    for n, (name, width, _, _) in enumerate(pairs):
        draft = statistics.median(step.draft_us for step in steps[n])
        verify = statistics.median(step.verify_us for step in steps[n])
        rows.append({
            "drafter": name, "K": width, "draft_us": round(draft), "verify_us": round(verify),
            "draft_over_token": round(draft / token, 4), "verify_over_token": round(verify / token, 4),
            "steps": len(steps[n]),
        })  # fmt: skip
    made = {"token_us": round(token), "tokens": len(single), "threads": torch.get_num_threads(), "rows": rows}
    text = json.dumps(made, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


@torch.inference_mode()
def one_by_one(target, ids: list[int], tokens: int = 8) -> list[float]:  # type: ignore[no-untyped-def]
    """Return microseconds of single greedy tokens after ``ids``."""
    thread = Thread(target.lm)
    next_id = int(thread.rows(ids, 1).argmax())
    times = []
    for _ in range(tokens):
        ids = [*ids, next_id]
        start = time.perf_counter()
        next_id = int(thread.rows(ids, 1).argmax())
        times.append((time.perf_counter() - start) * 1e6)
    return times


if __name__ == "__main__":
    main()
