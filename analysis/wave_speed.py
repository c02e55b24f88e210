"""How much faster a wave of missing steps is than the same steps one by one, in one run.

    python analysis/wave_speed.py TRACE [--steps 32] [--repeat 5]

Takes steps that ``asdsim cover`` added to a covered trace, and computes them again: as one batch on pooled KV (the
prefixes' KV is there, as in a cover under way), and one by one with the KV cache carried along, which is what live
decoding does. Drafting and verification both count. Needs the model.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from asdsim.capture.cover import BatchRunner, FaithfulRunner, Job, Missing
from asdsim.capture.reload import load_pair, recorder_of
from asdsim.result import load
from asdsim.trace.tokens import prefix_tokens


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    trace = load(options.trace)
    models = load_pair(trace.manifest)
    recorder, K = recorder_of(trace.manifest), trace.manifest.num_draft_tokens
    records = trace.request_records()
    # Steps not far into their request: the state of live decoding before them has to be built again, step by step.
    start = trace.column("steps", "start_pos")
    added = np.flatnonzero((trace.column("steps", "wave") > 0) & (start > 0) & (start < 24))[: options.steps]
    jobs = []
    for row in added.tolist():
        r = int(trace.step_request[row])
        step = next(
            s for s in trace.steps_of(records[r].request_id) if s.step_id == trace.column("steps", "step_id")[row]
        )
        missing = Missing(r, step.parent_step_id, step.parent_accepted, tuple(prefix_tokens(trace, row)), 1)
        jobs.append(Job(records[r], step.step_id, 1, missing))
    ratios, batch_s, single_s = [], [], []
    for _ in range(options.repeat):
        batch = BatchRunner(*models, K, recorder, batch=options.steps)
        parents = [
            Job(job.request, 0, 1, Missing(job.missing.request, -1, -1, job.missing.tokens[:-1], 1))
            for job in jobs
            if job.missing.tokens
        ]
        list(batch(parents))  # what a cover under way holds: the KV of everything before the last committed token
        single = FaithfulRunner(*models, K, recorder, trace.steps_of, states=4 * len(jobs))
        for job in jobs:
            name = job.request.request_id
            single._after(job, single._steps.setdefault(name, {s.step_id: s for s in trace.steps_of(name)}))
        t0 = time.perf_counter()
        together = list(batch(jobs))
        t1 = time.perf_counter()
        alone = list(single(jobs))
        t2 = time.perf_counter()
        assert len(together) == len(alone) == len(jobs)
        batch_s.append(t1 - t0)
        single_s.append(t2 - t1)
        ratios.append((t2 - t1) / (t1 - t0))
    print(json.dumps({
        "steps": len(jobs), "batch_seconds": round(float(np.median(batch_s)), 3),
        "single_seconds": round(float(np.median(single_s)), 3), "ratio_median": round(float(np.median(ratios)), 2),
        "ratio_min": round(min(ratios), 2), "ratio_max": round(max(ratios), 2),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
