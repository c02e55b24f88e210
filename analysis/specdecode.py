"""SpecDecode-Bench's simulator beside the walk, on its own data.

    python analysis/specdecode.py CHECKOUT

The simulator (github.com/SpecDecode-Bench/simulator) walks recorded acceptance lengths under a fixed draft length K,
and predicts times as it goes. What is timed of it is ``simulate_sd_batch`` with one request, the walk without the
baseline; of ours, laying the lengths out as a graph and walking that. Every accepted length must be the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asdsim.errors import UsageError
from asdsim.files import read_rows
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.graph import END, MISSING, Graph
from asdsim.walk.request import STEPS, TOKENS
from asdsim.walk.sweep import walk_grid

DRAFT_LENGTHS = (1, 3, 5)
"""What the simulator knows as FIXED_1, FIXED_3 and FIXED_5."""

CHILD = Path(__file__).with_name("specdecode_child.py")


def lengths_graph(lengths: list[npt.NDArray[np.int64]], K: int) -> Graph:
    """Lay out acceptance lengths as a graph of one step per token, walked by strict matching.

    As in the simulator, the first token comes from the prompt, and a walk ends with the step that reaches the last
    length, which is never used.

    Parameters
    ----------
    lengths : list of int64 (n,)
        Per request and token, the tokens that a verification there emits, bonus included; n >= 1.
    K : int
        Draft tokens of every step.
    """
    sizes = np.array([len(values) for values in lengths], np.int64)
    number = sizes - 1
    begin = np.concatenate([[0], np.cumsum(number)])
    steps = int(begin[-1])
    emitted = np.concatenate([values[:-1] for values in lengths]) if steps else np.zeros(0, np.int64)
    emitted = np.minimum(emitted, K + 1)
    request = np.repeat(np.arange(len(lengths)), number)
    after = np.arange(steps) + emitted
    refused = emitted <= K
    mm_ptr = np.concatenate([[0], np.cumsum(refused)]).astype(np.int64)
    first = mm_ptr[:-1] + np.arange(steps)
    edges = steps + int(mm_ptr[-1])
    accepted = np.full(edges, K, np.int32)
    accepted[first] = emitted - 1
    following = np.full(edges, MISSING, np.int32)
    following[first] = np.where(after < begin[request + 1], after, END)
    regret = np.full(int(mm_ptr[-1]), np.inf)
    none = np.zeros(0, np.int32)
    return Graph(
        request_ids=[str(index) for index in range(len(lengths))],
        root=np.where(number > 0, begin[:-1], END).astype(np.int32),
        limit=(sizes + K + 1).astype(np.int32),  # out of reach
        step_request=request.astype(np.int32),
        drafted=np.full(steps, K, np.int32),
        proposed=np.full(steps, K, np.int32),
        start=(np.arange(steps) - begin[request]).astype(np.int32),
        mm_ptr=mm_ptr,
        mm_pos=(emitted - 1)[refused].astype(np.int32),
        mm_regret=regret,
        mm_score=regret,
        mm_charge=regret,
        edge_next=following,
        edge_accepted=accepted,
        edge_tokens=accepted + np.int32(1),
        edge_margin=np.full(edges, np.inf),
        path_ptr=np.zeros(len(lengths) + 1, np.int64),
        path_step=none,
        align_ptr=np.zeros(len(lengths) + 1, np.int64),
        align_step=none,
        max_draft=K,
    )


def strict_lengths(graph: Graph) -> list[list[int]]:
    """Return the tokens of each step of strict matching, per request."""
    first = graph.mm_ptr[:-1] + np.arange(graph.num_steps)
    following, tokens = graph.edge_next[first].tolist(), graph.edge_tokens[first].tolist()
    requests = []
    for step in graph.root.tolist():
        taken = []
        while step >= 0:
            taken.append(tokens[step])
            step = following[step]
        requests.append(taken)
    return requests


def compare(checkout: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Run the simulator and the walk on every data file of a checkout.

    Returns
    -------
    dict
        ``rows``: for each file, drafter and K the steps walked, the seconds of both, and their ratios: over laying out
        and walking, over the walk alone.

    Raises
    ------
    UsageError
        Where ``checkout`` is no checkout of the simulator, or the simulator fails.
    RuntimeError
        Where the accepted lengths differ.
    """
    files = sorted(checkout.glob("data/*/combined_*.jsonl"))
    if not (checkout / "simulator.py").is_file() or not files:
        raise UsageError(
            "no simulator.py with data/*/combined_*.jsonl in it", where=str(checkout),
            fix="give a checkout of github.com/SpecDecode-Bench/simulator",
        )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for file in files:
        note(f"SpecDecode-Bench: {file.name}")
        theirs = _simulate(checkout, file)
        recorded = [row for _, row in read_rows(file)]
        for drafter in ("eagle", "ngram"):
            # Not by read_specdecode_bench: the simulator takes lengths behind the output for output.
            every = [np.array(row[f"acc_{drafter}"]["acc_len"], np.int64) for row in recorded]
            lengths = [values for values in every if len(values)]
            for K in DRAFT_LENGTHS:
                simulated = theirs[f"{drafter}/{K}"]
                row = _walk(lengths, K, simulated["lengths"], f"{file.name}, {drafter}, K={K}")
                rows.append({
                    "data": file.stem.removeprefix("combined_"), "drafter": drafter, "K": K, **row,
                    "simulator_seconds": simulated["seconds"], "ratio": simulated["seconds"] / row["seconds"],
                    "walk_ratio": simulated["seconds"] / row["walk_seconds"],
                })  # fmt: skip
    return {"rows": rows}


def _simulate(checkout: Path, file: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, CHILD, str(checkout.resolve()), str(file.resolve()), ",".join(map(str, DRAFT_LENGTHS))],
        cwd=checkout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"the simulator failed: {last}", where=str(file))
    simulated: dict[str, Any] = json.loads(done.stdout)
    return simulated


def _walk(lengths: list[npt.NDArray[np.int64]], K: int, expected: list[list[int]], where: str) -> dict[str, Any]:
    grid = Grid.of([STRICT])
    walk_grid(lengths_graph(lengths[:1], K), grid, device="cpu", threads=1)  # compile
    best = alone = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        graph = lengths_graph(lengths, K)
        laid = time.perf_counter()
        walks = walk_grid(graph, grid, device="cpu", threads=1)
        end = time.perf_counter()
        best, alone = min(best, end - begin), min(alone, end - laid)
    tokens, steps = [sum(taken) for taken in expected], [len(taken) for taken in expected]
    same = walks.counts[0, :, TOKENS].tolist() == tokens and walks.counts[0, :, STEPS].tolist() == steps
    if not same or strict_lengths(graph) != expected:
        raise RuntimeError(f"{where}: the accepted lengths are not those of the simulator")
    return {"requests": len(lengths), "steps": sum(steps), "seconds": best, "walk_seconds": alone}


def main() -> None:
    """Print a row for each data file, drafter and K."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    rows = compare(parser.parse_args().checkout, lambda line: print(line, file=sys.stderr))["rows"]
    print("the simulator's time over ours, same accepted lengths: walk with layout, walk alone")
    for row in rows:
        print(f"{row['data']}, {row['drafter']}, K={row['K']:<4} {row['ratio']:,.0f} {row['walk_ratio']:,.0f}")


if __name__ == "__main__":
    main()
