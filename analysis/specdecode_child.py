"""Run SpecDecode-Bench's simulator in a process of its own: its modules have names such as ``request``.

Usage: ``python specdecode_child.py CHECKOUT DATA.jsonl 1,3,5``. Prints for each drafter and K the seconds of its walk
over all requests, each alone, and (from another run, not timed) what it accepted at each step.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from importlib import import_module
from typing import Any

checkout, data, draft_lengths = sys.argv[1:]
sys.path[0] = checkout
simulator, predictor, request = (import_module(name) for name in ("simulator", "predictor", "request"))


class Recorded(request.Request):  # type: ignore[name-defined, misc]
    """A request that notes how far each step takes it."""

    @property
    def cur_gen_len(self) -> int:
        """Tokens generated so far."""
        return int(self.noted[-1])

    @cur_gen_len.setter
    def cur_gen_len(self, value: int) -> None:
        self.noted.append(value)


def main() -> None:
    """Simulate all."""
    found: dict[str, Any] = {}
    dataset = data.rpartition("combined_")[2].removesuffix(".jsonl")
    for drafter, truth in (("eagle", "EAGLE"), ("ngram", "NGRAM")):
        for K in draft_lengths.split(","):
            method = predictor.AccLenPredictMethod[f"FIXED_{K}"]
            made = simulator.SpecSimulator(data, method, simulator.AccLenGroundTruth[truth], dataset)
            begin = time.perf_counter()
            for one in made.data:
                made.simulate_sd_batch([one])
            seconds = time.perf_counter() - begin
            lengths = []
            for one in made.data:
                one.noted = []
                one.__class__ = Recorded
                made.simulate_sd_batch([one])
                lengths.append([after - before for before, after in zip(one.noted, one.noted[1:], strict=False)])
            found[f"{drafter}/{K}"] = {"seconds": seconds, "lengths": lengths}
    print(json.dumps(found), file=sys.__stdout__)


with contextlib.redirect_stdout(sys.stderr):
    main()
