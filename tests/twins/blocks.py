"""Very many random blocks per rule: the oracle's decision about each, and walks that meet every one of them.

A request is a chain of blocks walked in recorded order, so each block is decided whatever became of the one before, and
the ledger runs on through the chain. Columns are drawn as arrays, without records, and topology is laid out once.

Usage: ``NUMBA_ENABLE_CUDASIM=1 python -m tests.twins.blocks OUT.npz BLOCKS PART PARTS``, for every PARTS-th case from
PART on.
"""

from __future__ import annotations

import binascii
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from asdsim.oracle import walk as reference
from asdsim.oracle.rules import ALLOWS
from asdsim.records import RequestRecord
from asdsim.rules import NAMES
from asdsim.rules.scoring import Rows, lay_out, run_lengths
from asdsim.rules.settings import Grid, layout_of, rule_grids
from asdsim.trace.graph import Graph, build_graph
from asdsim.walk.request import ACCEPTED, RELAXED
from asdsim.walk.sweep import walk_grid
from tests.twins.cases import READINGS

CHAIN = 40
"""Blocks of one request."""

PARAMS: dict[str, dict[str, Any]] = {
    "trtllm": {"delta": 0.3},
    "fly": {"W": 1},
    "sglang": {"acc": 0.5},
    "lenience": {"l": 0.5},
}
"""Settings at which about half of what is looked at passes, where the published one lets nearly all or none."""


class Tables:
    """Random columns of a trace of ``blocks`` blocks, K from 1 to 5."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        requests = -(-blocks // CHAIN)
        number = requests * CHAIN
        width = rng.integers(1, 6, number)
        self.pos_ptr = np.concatenate([[0], np.cumsum(width + 1)]).astype(np.int64)
        rows = int(self.pos_ptr[-1])
        self.step_request = np.repeat(np.arange(requests, dtype=np.int32), CHAIN)
        bonus = np.zeros(rows, bool)
        bonus[self.pos_ptr[1:] - 1] = True
        gaps = np.round(rng.exponential(0.6, (rows, 8)) * 8) / 8 * (rng.random((rows, 1)) < 0.5) + rng.exponential(
            0.3, (rows, 8)
        ) * (rng.random((rows, 1)) < 0.5)  # multiples of 1/8, many ties, or arbitrary
        gaps[:, 0] = 0.0
        top = (20.0 + rng.normal(0.0, 2.0, (rows, 1)) - np.cumsum(gaps, axis=1)).astype(np.float32)
        rank = np.where(rng.random(rows) < 0.55, 0, rng.integers(1, 8, rows)).astype(np.int32)
        ids = np.tile(np.arange(8, dtype=np.int32), (rows, 1))
        drafted = top[np.arange(rows), rank]
        lse = (top[:, 0] + np.log1p(rng.exponential(0.8, rows))).astype(np.float32)
        mismatch = ~bonus & (rank > 0)
        first = np.minimum.reduceat(np.where(mismatch | bonus, np.arange(rows), rows), self.pos_ptr[:-1])
        accepted = (first - self.pos_ptr[:-1]).reshape(requests, CHAIN)
        start = np.cumsum(accepted + 1, axis=1) - accepted - 1
        place = np.tile(np.arange(CHAIN), requests)
        parent_accepted = np.where(place == 0, -1, np.roll(accepted.ravel(), 1))
        self.columns: dict[tuple[str, str], np.ndarray] = {
            ("steps", "num_draft_tokens"): width, ("steps", "start_pos"): start.ravel(), ("steps", "step_id"): place,
            ("steps", "parent_step_id"): place - 1, ("steps", "parent_accepted"): parent_accepted,
            ("steps", "wave"): np.zeros(number, np.int32), ("positions", "draft_id"): np.where(bonus, -1, rank),
            ("positions", "argmax_id"): ids[:, 0], ("positions", "draft_logit"): np.where(bonus, np.nan, drafted),
            ("positions", "top_ids"): ids, ("positions", "top_logits"): top, ("positions", "logsumexp"): lse,
            ("positions", "entropy"): rng.exponential(1.5, rows).astype(np.float32),
            ("positions", "rank"): np.where(bonus, -1, rank),
            ("positions", "draft_logprob"): -rng.exponential(0.7, rows).astype(np.float32),
        }  # fmt: skip
        for name in ("kl", "reverse_kl", "js", "tv"):
            self.columns["positions", name] = rng.exponential(0.5, rows).astype(np.float32)
        self.records = [
            RequestRecord(f"block/{n}", "made", (1,), "", None, 1 << 20, (), "fixed") for n in range(requests)
        ]
        self.drafted_twice = width

    def request_records(self) -> list[RequestRecord]:
        """Return the requests."""
        return self.records

    def column(self, table: str, name: str) -> np.ndarray:
        """Return a column."""
        return self.columns[table, name]


def cases() -> dict[str, Grid]:
    """Return one setting per reading of ASD and per rule."""
    asd = {}
    for semantics, ledger in READINGS:
        budget, gate = 6.0 if ledger == "request" else 0.6, 0.9 if semantics == "dspark" else 0.3
        asd[f"asd {semantics} {ledger}"] = Grid.product(budget, gate, 2, semantics, ledger=ledger)
    asd["asd probability"] = Grid.product(1.0, 0.08, 2, regret="probability", value="reuse")
    rules = {name: rule_grids(name, PARAMS.get(name))[0] for name in NAMES if name != "truncate"}
    return {**asd, **rules}


def rows_of(tables: Tables, graph: Graph) -> Rows:
    """Return the mismatch rows of a laid-out graph."""
    step = np.repeat(np.arange(graph.num_steps), np.diff(graph.mm_ptr))
    row_step = np.repeat(np.arange(graph.num_steps), graph.drafted + 1)
    matches = tables.column("positions", "draft_id") == tables.column("positions", "argmax_id")
    rows = tables.pos_ptr[step] + graph.mm_pos
    return Rows(
        tables, rows, step, graph.mm_pos.astype(np.int64), graph.drafted[step].astype(np.int64),
        run_lengths(matches, row_step, rows), graph.mm_regret, lambda _: [],
    )  # type: ignore[arg-type]  # fmt: skip


def graphs(tables: Tables, chosen: dict[str, Grid]) -> dict[str, Graph]:
    """Return a graph per case; topology is laid out once per meaning of a mismatch."""
    bare: dict[str, Graph] = {}
    made = {}
    for name, grid in chosen.items():
        kind = grid.layout.mismatch
        if kind not in bare:
            bare[kind] = build_graph(tables, layout_of("lightllm" if kind == "regret" else "paper"))  # type: ignore[arg-type]
        score, charge = lay_out(grid.layout, rows_of(tables, bare[kind]))
        made[name] = replace(bare[kind], mm_score=score, mm_charge=charge)
    return made


def walked(tables: Tables, device: str, part: int = 0, parts: int = 1) -> dict[str, np.ndarray]:
    """Walk cases; return accepted and relaxed tokens, ledger and histogram."""
    found = {}
    chosen = dict(list(cases().items())[part::parts])
    laid = graphs(tables, chosen)
    for name, grid in chosen.items():
        walks = walk_grid(laid[name], grid, off_trace="recorded", device=device)
        found[f"{name}|counts"] = walks.counts[0][:, [ACCEPTED, RELAXED]]
        found[f"{name}|spent"] = walks.spent[0]
        found[f"{name}|histogram"] = walks.histogram[0]
    return found


def drawn(request: str, position: int) -> float:
    """Return the uniform number of seed 0, from its definition: the top 53 bits of a mixed 64-bit word."""
    word = np.array([(binascii.crc32(request.encode()) << 32) ^ (position * 0xD1342543DE82EF95 % 2**64)], np.uint64)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word = word ^ (word >> np.uint64(31))
    return float(word[0] >> np.uint64(11)) / 2**53


def decided(tables: Tables) -> dict[str, np.ndarray]:
    """Let the oracle decide every block of every case."""
    import math

    ptr, columns = tables.pos_ptr.tolist(), {key[1]: value.tolist() for key, value in tables.columns.items()}
    names = (
        "rank",
        "top_logits",
        "logsumexp",
        "entropy",
        "draft_logit",
        "draft_logprob",
        "kl",
        "reverse_kl",
        "js",
        "tv",
    )
    blocks = []
    for step, (lo, hi) in enumerate(zip(ptr, ptr[1:], strict=False)):
        regret = [columns["top_logits"][row][0] - columns["draft_logit"][row] for row in range(lo, hi - 1)]
        block = reference.Block((), columns["draft_id"][lo : hi - 1], columns["argmax_id"][lo:hi], regret)
        block.rows = [{name: columns[name][row] for name in names} for row in range(lo, hi - 1)]
        request = tables.records[step // CHAIN].request_id
        for i, row in enumerate(block.rows):
            row["u"] = drawn(request, columns["start_pos"][step] + i)
        blocks.append(block)
    found = {}
    for name, grid in cases().items():
        policy, layout = grid.policy(0), grid.layout
        oracle = None if layout.rule == "asd" else ALLOWS[layout.rule]
        counts = np.zeros((len(tables.records), 2), np.int32)
        spent, histogram = np.zeros(len(tables.records)), np.zeros(int(max(tables.drafted_twice)) + 1, np.int64)
        for step, block in enumerate(blocks):
            block.cost = None
            request = step // CHAIN
            if layout.regret == "probability":
                block.cost = [
                    math.exp(row["top_logits"][0] - row["logsumexp"]) - math.exp(row["draft_logit"] - row["logsumexp"])
                    for row in block.rows
                ]
            if oracle is None:
                known = spent[request] if policy.ledger == "request" else 0.0
                length = reference.accepted_length(
                    block, known, policy.budget, policy.gate, policy.cap, policy.semantics, layout.value
                )
            else:
                length = reference.allowed_length(block, lambda b, i, f=oracle, at=grid.params[0]: f(b, i, at))
            counts[request] += length, len(reference.relaxed_positions(block, length, policy.semantics))
            charge = reference.charge_of(block, length, policy.semantics)
            spent[request] = reference.settled(spent[request], charge, policy.semantics)
            histogram[length] += 1
        found[f"{name}|counts"], found[f"{name}|spent"], found[f"{name}|histogram"] = counts, spent, histogram
    return found


if __name__ == "__main__":
    np.savez(sys.argv[1], **walked(Tables(int(sys.argv[2])), "cuda", *map(int, sys.argv[3:])))
