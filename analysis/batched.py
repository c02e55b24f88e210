"""Batches decoded for real beside batches by replay: tokens per second at batch 1, 2, 4 and 8.

    python analysis/batched.py [TRACE] [--requests 8] [--tokens 48] [-o FILE]

The models of TRACE (by default traces/smollm2-eagle3) are profiled (`asdsim.live.profile`), then serve its first
requests in batches: the target alone, strict, and one covered setting, in turns. Beside them stands what
`asdsim.walk.batch` predicts from the profile and from the walks of the very same outputs. Time is that of the process
with one thread, not that on the wall: other programs then weigh on it through caches and the memory bus only.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from time import process_time

import numpy as np

from asdsim.capture.reload import load_pair
from asdsim.evaluate.step_table import from_pass_rows
from asdsim.live.batched import Batched
from asdsim.live.profile import profile
from asdsim.result import load
from asdsim.rules.settings import STRICT, Policy
from asdsim.walk.batch import Paths, simulate

BATCHES = (1, 2, 4, 8)
SETTING = Policy(8.0, 0.25, 2.0)


def main() -> None:
    """Measure, predict, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", nargs="?", type=Path, default=Path("traces/smollm2-eagle3"))
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("-o", "--output", type=Path, default=Path("analysis/results/batched.json"))
    asked = parser.parse_args()
    trace = load(asked.trace)
    K = trace.manifest.num_draft_tokens
    models = load_pair(trace.manifest, offline=True)
    queue = [replace(one, max_new_tokens=asked.tokens) for one in trace.request_records()[: asked.requests]]
    before = os.getloadavg()
    measured = profile(models, queue, BATCHES, (1, K + 1), rounds=2, iterations=3, clock=process_time)
    table = from_pass_rows(measured.rows, "profile")
    prompt = np.array([len(one.prompt_ids) for one in queue], np.int64)
    rows = []
    for batch in BATCHES:
        for name, policy, width in (("target alone", STRICT, 0), ("strict", STRICT, K), (str(SETTING), SETTING, K)):
            engine = Batched(*models, policy, width, process_time)
            courses = engine.serve(queue, batch)
            steps = [len(course.outcomes) for course in courses]
            taken = [outcome for course in courses for outcome in course.outcomes]
            paths = Paths(
                np.concatenate([[0], np.cumsum(steps)]).astype(np.int64),
                np.array([outcome.num_draft_tokens for outcome in taken], np.int32),
                np.array([len(outcome.tokens) for outcome in taken], np.int32),
            )
            times = table.times(batch, K, int(prompt.max()))
            replayed = simulate(paths, np.arange(len(queue)), prompt, times, batch=batch)
            tokens = sum(len(course.tokens) for course in courses)
            rows.append({
                "batch": batch, "setting": name, "tokens": tokens, "measured": tokens / engine.seconds,
                "predicted": tokens / replayed.seconds,
            })  # fmt: skip
            print(rows[-1], flush=True)
    alone = {row["batch"]: row for row in rows if row["setting"] == "target alone"}
    print("| batch | setting | tokens/s measured | predicted | error | over the target alone: measured | predicted |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        row["error"] = row["predicted"] / row["measured"] - 1
        gains = [row[kind] / alone[row["batch"]][kind] for kind in ("measured", "predicted")]
        row["gain_measured"], row["gain_predicted"] = gains
        print(f"| {row['batch']} | {row['setting']} | {row['measured']:.1f} | {row['predicted']:.1f} | "
              f"{row['error']:+.1%} | {gains[0]:.2f} | {gains[1]:.2f} |")  # fmt: skip
    load_then = {"before": before, "after": os.getloadavg()}
    record = {"trace": str(asked.trace), "load": load_then, "spread": measured.spread, "problems": measured.problems,
              "profile": measured.rows, "rows": rows}  # fmt: skip
    asked.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"load {before[0]:.1f} to {load_then['after'][0]:.1f}; spread of a cell up to {measured.spread:.0%}")


if __name__ == "__main__":
    main()
