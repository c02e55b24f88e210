"""Time passes of SmolLM2 with the drafters of the committed traces, and store them in the traces, as a capture does.

    python analysis/add_timing.py traces/* [--rounds 1] [--requests 3]

All pairs take turns, round by round, so that they compare. Times are those of the process on one thread: other programs
that run meanwhile then weigh less. The committed traces were captured before passes were timed beside a capture.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from asdsim.capture.passes import PassTimes
from asdsim.capture.reload import load_pair
from asdsim.provenance import software
from asdsim.trace.manifest import TIMING
from asdsim.trace.reader import read_trace
from asdsim.trace.writer import TraceWriter

SOURCE = "passes timed afterwards with the models"


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=3, help="Requests of a round, spread over each trace.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs: dict[str, PassTimes] = {}
    folders: dict[str, list[Path]] = {}
    requests: dict[str, list[Any]] = {}
    first_weights: list[torch.Tensor] = []
    for folder in options.traces:
        trace = read_trace(folder, verify=False)
        key = json.dumps([trace.manifest.drafter, trace.manifest.K], sort_keys=True)
        folders.setdefault(key, []).append(folder)
        if key not in pairs:
            target, drafter = load_pair(trace.manifest, offline=True)
            for mine, shared in zip(target.model.parameters(), first_weights or [], strict=False):
                mine.data = shared  # one copy for all pairs
            first_weights = first_weights or [mine.data for mine in target.model.parameters()]
            pairs[key] = PassTimes(target, drafter, trace.manifest.K, time.process_time)
            records = trace.request_records()
            requests[key] = [records[n * len(records) // options.requests] for n in range(options.requests)]
    for number in range(options.rounds * options.requests):
        for key, times in pairs.items():
            times.measure(requests[key][number % options.requests])
        print(f"{number + 1} of {options.rounds * options.requests}, load {os.getloadavg()[0]:.1f}", flush=True)
    for key, times in pairs.items():
        found = times.record(1)
        assert found is not None
        # Process time does not count what other programs took; how far it still scatters says whether that sufficed.
        found["problems"] = [text for text in found["problems"] if "spread" in text]
        found |= {"source": SOURCE, "made_by": "analysis/add_timing.py", "load": round(os.getloadavg()[0], 1)}
        found["software"] = software("torch", "transformers")
        print([folder.name for folder in folders[key]], json.dumps(found))
        for folder in folders[key]:
            with TraceWriter.append(folder) as writer:
                writer.update_manifest(notes={**writer.manifest.notes, TIMING: found})


if __name__ == "__main__":
    main()
