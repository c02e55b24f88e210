"""Write a valid trace of any size from a seed, to measure memory and time on: see docs/scale.md.

    python analysis/synthetic_trace.py /tmp/trace-2e7 --positions 2e7
    python analysis/synthetic_trace.py /tmp/trace-1e6 --positions 1e6 --cover .2

Requests have 60 captured steps of K = 7 under strict matching, with the match rate of a real drafter, logits with full
mantissas and token ids by Zipf's law, so that sizes and timings are those of a real capture. ``--cover`` adds, for that
share of the steps, the step behind the first relaxed mismatch, in shards of their own as ``asdsim cover`` does.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asdsim.files import write_atomically
from asdsim.trace.manifest import MANIFEST, Manifest, Shard, dump
from asdsim.trace.schema import parquet_options, table_schema
from asdsim.trace.tables import matrix_column, pack
from asdsim.trace.writer import SHARD_ROWS

STEPS, K, VOCAB, TOP = 60, 7, 49152, 8
WIDTH = K + 1
PROMPT = 120
MATCH = 0.8
"""Chance that a draft token is the target's choice."""

Array = Any


def rows_of(rng: np.random.Generator, blocks: int) -> dict[str, Array]:
    """Draw the rows of some blocks of K drafts and a bonus; a list of columns by name, (blocks * WIDTH,)."""
    rows = blocks * WIDTH
    ids = np.sort((VOCAB - 64) ** rng.random((rows, TOP), np.float32), axis=1).astype(np.int32)
    place = np.arange(TOP, dtype=np.int32)
    ids = rng.permuted(np.maximum.accumulate(ids - place, axis=1) + place, axis=1)  # distinct
    falls = np.cumsum(rng.exponential(2.0, (rows, TOP - 1)) / np.arange(1, TOP) + 0.01, axis=1)
    peak = 18.0 + 3.0 * rng.standard_normal((rows, 1))
    top = np.concatenate([peak, peak - falls], axis=1).astype(np.float32)
    rank = np.where(rng.random(rows) < MATCH, 0, rng.geometric(0.3, rows)).astype(np.int32)
    near, at = np.minimum(rank, TOP - 1), np.arange(rows)
    far = rank >= TOP
    draft = np.where(far, ids.max(axis=1) + 1, ids[at, near]).astype(np.int32)
    logit = np.where(far, top[:, -1] - rng.exponential(1.0, rows) - 0.2, top[at, near]).astype(np.float32)
    bonus = np.arange(rows) % WIDTH == K
    return {
        "i": (np.arange(rows) % WIDTH).astype(np.int16), "bonus": bonus, "draft_id": draft, "argmax_id": ids[:, 0],
        "draft_logit": logit, "rank": rank, "top_ids": ids, "top_logits": top,
        "logsumexp": (top[:, 0] + np.minimum(rng.exponential(0.7, rows), 9.0)).astype(np.float32),
        "entropy": np.minimum(rng.exponential(1.2, rows), 9.0).astype(np.float32),
        "draft_logprob": -rng.exponential(1.0, rows).astype(np.float32),
    }  # fmt: skip


def positions_of(names: list[str], owner: Array, step_id: Array, drawn: dict[str, Array]) -> pa.Table:
    """Return rows of ``positions``."""
    rows, bonus, first = len(drawn["i"]), drawn["bonus"], drawn["i"] == 0
    columns: dict[str, pa.Array] = {
        "request_id": _names(names, np.repeat(owner, WIDTH)),
        "step_id": pa.array(np.repeat(step_id, WIDTH).astype(np.int32)),
        "i": pa.array(drawn["i"]),
        "parent_position": pa.array(drawn["i"] - np.int16(1), mask=first),
        **{name: pa.array(drawn[name], mask=bonus) for name in ("draft_id", "draft_logit", "rank", "draft_logprob")},
        **{name: pa.array(drawn[name]) for name in ("argmax_id", "logsumexp", "entropy")},
        **{name: matrix_column(drawn[name]) for name in ("top_ids", "top_logits")},
        **{name: pa.nulls(rows, pa.float32()) for name in ("kl", "reverse_kl", "js", "tv")},
    }
    schema = table_schema("positions", TOP)
    return pa.table({field.name: columns[field.name].cast(field.type) for field in schema}, schema=schema)


def steps_of(names: list[str], owner: Array, wave: int, rng: np.random.Generator, **columns: Array) -> pa.Table:
    """Return rows of ``steps``."""
    number = len(owner)
    root = columns["parent_step_id"] < 0
    made: dict[str, pa.Array] = {
        "request_id": _names(names, owner),
        "num_draft_tokens": pa.array(np.full(number, K, np.int16)),
        "wave": pa.array(np.full(number, wave, np.int16)),
        **{name: pa.array(rng.gamma(9.0, 100.0, number).astype(np.float32)) for name in
           ("draft_us", "verify_us", "select_us")},
        **{name: pa.array(values.astype(np.int32), mask=root if name.startswith("parent") else None)
           for name, values in columns.items()},
    }  # fmt: skip
    schema = table_schema("steps")
    return pa.table({field.name: made[field.name].cast(field.type) for field in schema}, schema=schema)


def _names(names: list[str], owner: Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(owner.astype(np.int32)), pa.array(names, pa.string()))


def batch(first: int, number: int, seed: int, cover: float) -> Iterator[tuple[str, int, pa.Table]]:
    """Yield (table, wave, rows) of some requests, the captured path first."""
    rng = np.random.default_rng([seed, first])
    names = [f"synthetic/{index}" for index in range(first, first + number)]
    drawn = rows_of(rng, number * STEPS)
    wrong = (drawn["draft_id"] != drawn["argmax_id"]).reshape(-1, WIDTH)
    wrong[:, K] = True
    accepted = wrong.argmax(axis=1).astype(np.int32)
    start = np.cumsum((accepted + 1).reshape(number, STEPS), axis=1)
    limit = start[:, -1].astype(np.int32)
    begin = (start - (accepted + 1).reshape(number, STEPS)).ravel()
    prompts = rng.integers(0, VOCAB, number * PROMPT, dtype=np.int32)
    schema = table_schema("requests")
    requests = {
        "request_index": pa.array(np.arange(first, first + number, dtype=np.int32)), "request_id": pa.array(names),
        "task": pa.array([f"synthetic-{index % 3}" for index in range(number)]),
        "prompt_ids": _lists(prompts, PROMPT, number),
        "prompt_text": pa.array([f"prompt {name} " * 10 for name in names]), "reference": pa.nulls(number, pa.string()),
        "max_new_tokens": pa.array(limit), "eos_ids": _lists(np.zeros(0, np.int32), 0, number),
        "stop": pa.array(["fixed"] * number),
    }  # fmt: skip
    yield (
        "requests",
        0,
        pa.table({field.name: requests[field.name].cast(field.type) for field in schema}, schema=schema),
    )
    owner, step_id = np.repeat(np.arange(number), STEPS), np.tile(np.arange(STEPS), number)
    before = np.concatenate([[0], accepted[:-1]])
    root = step_id == 0
    yield "steps", 0, steps_of(
        names, owner, 0, rng, step_id=step_id, start_pos=begin, parent_step_id=np.where(root, -1, step_id - 1),
        parent_accepted=np.where(root, -1, before),
    )  # fmt: skip
    yield "positions", 0, positions_of(names, owner, step_id, drawn)
    if not cover:
        return
    later = wrong.copy()
    later[np.arange(len(later)), accepted] = False
    second = np.where(accepted < K, np.where(later.any(axis=1), later.argmax(axis=1), K), K)
    room = (accepted < K) & (begin + second + 1 < np.repeat(limit, STEPS)) & (rng.random(len(wrong)) < cover)
    parent = np.flatnonzero(room)
    mine = owner[parent]
    rank = np.arange(len(parent)) - np.searchsorted(mine, mine)
    yield "steps", 1, steps_of(
        names, mine, 1, rng, step_id=STEPS + rank, start_pos=begin[parent] + second[parent] + 1,
        parent_step_id=step_id[parent], parent_accepted=second[parent],
    )  # fmt: skip
    yield "positions", 1, positions_of(names, mine, STEPS + rank, rows_of(rng, len(parent)))


def _lists(values: Array, each: int, number: int) -> pa.Array:
    kind = table_schema("requests").field("prompt_ids").type
    offsets = pa.array(np.arange(number + 1, dtype=np.int32) * each)
    return pa.ListArray.from_arrays(offsets, pa.array(values, pa.int32()), type=kind)


def write(folder: Path, positions: int, seed: int, cover: float) -> None:
    """Write the trace: shards as they fill, the manifest last."""
    folder.mkdir(parents=True)
    shards: list[Shard] = []
    waiting: dict[tuple[str, int], list[pa.Table]] = {}

    def flush(key: tuple[str, int]) -> None:
        table, rows = key[0], pa.concat_tables(waiting.pop(key)).unify_dictionaries()
        sink = pa.BufferOutputStream()
        pq.write_table(pack(table, rows, TOP), sink, **{**parquet_options(table, TOP), "compression_level": 1})
        data = memoryview(sink.getvalue())
        name = f"{table}-{len(shards):05d}.parquet"
        write_atomically(folder / name, data)
        shards.append(Shard(name, table, rows.num_rows, len(data), hashlib.sha256(data).hexdigest()))

    number = -(-positions // (STEPS * WIDTH))
    for first in range(0, number, 500):
        for table, wave, rows in batch(first, min(500, number - first), seed, cover):
            held = waiting.setdefault((table, wave), [])
            held.append(rows)
            if sum(part.num_rows for part in held) + rows.num_rows > SHARD_ROWS:
                flush((table, wave))
    for key in list(waiting):
        flush(key)
    manifest = Manifest(
        target={"name": "synthetic"}, drafter={"name": "synthetic"}, vocab_size=VOCAB, num_draft_tokens=K, top_k=TOP,
        max_new_tokens=STEPS * WIDTH, stop="fixed", tasks=[f"synthetic-{n}" for n in range(3)], seed=seed,
        shards=shards,
    )  # fmt: skip
    write_atomically(folder / MANIFEST, dump(manifest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--positions", type=float, default=1e6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cover", type=float, default=0.0, help="share of steps with a covered step behind them")
    options = parser.parse_args()
    write(options.folder, int(options.positions), options.seed, options.cover)
