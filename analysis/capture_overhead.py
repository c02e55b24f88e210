"""What recording costs: the same decoding loop with and without it, in one run, as JSON.

    python analysis/capture_overhead.py [--prompts 3] [--tokens 48] [--rounds 3]

Each round decodes every prompt both ways, in alternating order. Recording includes handing the steps to a trace writer
and storing them. ``median_percent`` is the median over pairs of (seconds with / seconds without) - 1;
``direct_percent`` times the recording itself inside the loop, over the rest of that loop, and suffers less from a busy
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from asdsim.capture.drafters import make_drafter
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.capture.run import Plan, Run
from asdsim.capture.tasks import load_prompts
from asdsim.engines.transformers.load import load_target
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT
from asdsim.trace.writer import TraceWriter


class Timed(Recorder):
    """A recorder with a stop watch."""

    seconds = 0.0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Record, and count the time."""
        begin = time.perf_counter()
        try:
            return super().step(*args, **kwargs)
        finally:
            Timed.seconds += time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafter", default="layer-skip")
    parser.add_argument("--K", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            out=Path(folder) / "trace", target="smollm2-135m", drafter=options.drafter, task="gsm8k", K=options.K,
            max_new_tokens=options.tokens, limit=options.prompts, stop="fixed",
        )  # fmt: skip
        target = load_target(plan.target)
        drafter = make_drafter(plan.drafter, target)
        requests: list[RequestRecord] = []
        survey = Run(target, drafter, load_prompts(plan.task, limit=plan.limit), plan).survey(
            lambda _, request: requests.append(request)
        )
        recorder = Timed()
        writing = 0.0
        ratios, seconds = [], {True: 0.0, False: 0.0}
        with TraceWriter.create(plan.out, survey.manifest) as writer:
            for turn in range(-1, options.rounds):
                for number, request in enumerate(requests):
                    took = {}
                    for recording in (True, False) if (turn + number) % 2 else (False, True):
                        begin = time.perf_counter()
                        result = decode(target, drafter, request, STRICT, options.K, recorder if recording else None)
                        if recording:
                            stored = time.perf_counter()
                            writer.add_request(_renamed(request, turn), result.steps)
                            writer.flush()
                            writing += time.perf_counter() - stored
                        took[recording] = time.perf_counter() - begin
                    if turn < 0:  # the first turn warms up
                        Timed.seconds = writing = 0.0
                    else:
                        ratios.append(took[True] / took[False])
                        for recording in took:
                            seconds[recording] += took[recording]
    extra = Timed.seconds + writing
    cost = 100 * (statistics.median(ratios) - 1)
    print(
        json.dumps(
            {
                "what": "cost of recording over the same loop without it",
                "drafter": options.drafter,
                "K": options.K,
                "tokens": options.tokens,
                "pairs": len(ratios),
                "threads": torch.get_num_threads(),
                "median_percent": round(cost, 2),
                "direct_percent": round(100 * extra / (seconds[True] - extra), 2),
                "seconds_with": round(seconds[True], 3),
                "seconds_without": round(seconds[False], 3),
                "limit_percent": 5.0,
                "within": cost <= 5.0,
            },
            indent=2,
        )
    )


def _renamed(request: RequestRecord, turn: int) -> RequestRecord:
    return RequestRecord(**{**vars(request), "request_id": f"{request.request_id}/turn{turn}"})


if __name__ == "__main__":
    main()
