"""Accepted lengths of the four readings of ASD on hand-made blocks, as published, and how to walk such a block."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from asdsim.records import NO_PARENT, MemoryTrace, RequestRecord
from asdsim.rules.settings import Grid, Policy, layout_of
from asdsim.trace.graph import Graph, build_graph
from asdsim.walk.request import ACCEPTED
from asdsim.walk.sweep import walk_grid
from tests.support.toygraph import record_step

OK = None
NAN = float("nan")

# (regret of each draft token, or OK), B, g, M, spent before -> accepted length per reading
TABLE: list[tuple[list[float | None], float, float, int, float, dict[str, int]]] = [
    ([OK, 0.0, OK], 0.0, 1e6, 3, 0.0, {"paper": 1, "core": 1, "dspark": 1, "lightllm": 3}),
    ([OK, 0.0, OK], 0.25, 10.0, 2, 0.25, {"paper": 3, "core": 3, "dspark": 1, "lightllm": 3}),
    ([0.0, 0.1, OK], 9.0, 9.0, 1, 0.0, {"paper": 1, "core": 1, "dspark": 1, "lightllm": 3}),
    ([0.0, OK, OK], 1.0, 0.0, 1, 0.0, {"paper": 3, "core": 0, "dspark": 3, "lightllm": 3}),
    ([0.2500000005, OK, OK], 0.25, 9.0, 1, 0.0, {"paper": 0, "core": 3, "dspark": 0, "lightllm": 0}),
    ([0.7, OK, OK], 9.0, 0.25, 1, 0.0, {"paper": 3, "core": 3, "dspark": 0, "lightllm": 3}),
    ([OK, NAN, OK], 9.0, 9.0, 1, 0.0, {"paper": 1, "core": 1, "dspark": 1, "lightllm": 1}),
    # beyond the published rows: zero parameters, and a budget that sums of float32 and float64 see differently
    ([0.0, OK, OK], 1.0, 1.0, 0, 0.0, {"paper": 0, "core": 0, "dspark": 0, "lightllm": 3}),
    ([0.5, OK, OK], 0.0, 9.0, 2, 0.0, {"paper": 0, "core": 0, "dspark": 0, "lightllm": 0}),
    ([0.5, OK, OK], 0.5, 9.0, 2, 0.0, {"paper": 3, "core": 3, "dspark": 3, "lightllm": 3}),
    ([0.2, OK, OK], 0.3, 9.0, 2, 0.1, {"paper": 0, "core": 3, "dspark": 0, "lightllm": 0}),
]

READINGS = ("paper", "core", "dspark", "lightllm")


def one_block(regrets: list[float | None], spent: float, semantics: str) -> Graph:
    """Return the graph of a request whose first step spends ``spent``, and whose second is the block."""
    blocks: list[list[float | None]] = [[spent, OK, OK], regrets] if spent else [regrets]
    steps = []
    for number, block in enumerate(blocks):
        logits = np.full((4, 12), -40.0, np.float32)
        logits[:, 1] = 2.0
        draft = np.ones(3, np.int32)
        for i, regret in enumerate(block):
            if regret is not OK:
                draft[i] = 5
                logits[i, 5] = np.float32(2.0) if regret == 0.0 else np.float32(1.5)  # exact regrets are put in below
        steps.append(record_step(number, number - 1 if number else NO_PARENT, 3 if number else NO_PARENT, 4 * number,
                                 draft, logits))  # fmt: skip
    record = RequestRecord("golden/0", "made", (1,), "", None, 40, (), "fixed")
    layout = layout_of(semantics)
    graph = build_graph(MemoryTrace([(record, steps)]), layout)
    laid = [(i, r) for block in blocks for i, r in enumerate(block) if r is not OK and not (
        semantics == "lightllm" and r == 0.0)]  # fmt: skip
    assert graph.mm_pos.tolist() == [i for i, _ in laid]
    regret = np.array([r for _, r in laid], np.float64)
    value = np.array([(3 - i) / 3 if semantics == "dspark" else 3 - i for i, _ in laid], np.float64)
    return replace(graph, mm_regret=regret, mm_score=regret / value, mm_charge=regret.copy())


def walked(device: str) -> dict[str, int]:
    """Walk every row of the table; return the accepted length of the block by row and reading."""
    found = {}
    for row, (regrets, B, g, M, spent, _) in enumerate(TABLE):
        for semantics in READINGS:
            # The block before the one that counts spends under a gate and budget of its own: it must be accepted.
            policy = Policy(B, g, float(M), semantics, layout_of(semantics))
            walks = walk_grid(one_block(regrets, spent, semantics), Grid.of([policy]), device=device)
            found[f"{row} {semantics}"] = int(walks.counts[0, 0, ACCEPTED]) - (3 if spent else 0)
    return found


def main(path: str) -> None:
    """Write what the CUDA simulator finds; run in a process of its own with NUMBA_ENABLE_CUDASIM=1."""
    results: dict[str, Any] = walked("cuda")
    np.savez(path, names=np.array(list(results)), accepted=np.array(list(results.values())))


if __name__ == "__main__":
    main(sys.argv[1])
