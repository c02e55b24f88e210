"""The numbers that describe a trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..records import FORBIDDEN_LOGIT
from ..stats import ratio_interval
from ..trace.check import reachable_drafts, strict_accepted
from ..trace.groups import StreamedTrace
from ..trace.manifest import Manifest
from ..trace.reader import Trace
from ..trace.schema import SCHEMA_VERSION, TABLES
from ..trace.spread import spread

STEPS, TOKENS, ACCEPTED, DRAFTED = range(4)
TIMES = ("draft", "verify", "select")
QUANTILES = (0.25, 0.5, 0.75, 0.9)


def summarise(trace: Trace | StreamedTrace) -> dict[str, Any]:
    """Return what ``asdsim inspect`` prints, as plain JSON values; what is not known is None.

    Acceptance is that of strict matching on the captured path: of what the target would have accepted at the prefixes
    that decoding met. On a path captured under another rule it is not what strict decoding would have given.

    Regrets are taken at the first mismatch of each block of that path, in logits (float64 differences of float32
    logits); quantiles are linear. A tie is a draft token that is not the target's choice and has its logit.
    """
    manifest = trace.manifest
    groups = [_look(0, trace)] if isinstance(trace, Trace) else _looks(trace)
    rows = {table: sum(group.rows[table] for group in groups) for table in TABLES}
    size = {table: sum(shard.bytes for shard in manifest.shards_of(table)) for table in TABLES}
    task = np.concatenate([np.empty(0, object), *(group.task for group in groups)])
    # Of each request, on the captured path: int64 (4, R).
    each = np.concatenate([np.empty((4, 0), np.int64), *(group.each for group in groups)], axis=1)
    lengths: Counter[int] = Counter()
    histogram = np.zeros(manifest.num_draft_tokens + 1, np.int64)
    for group in groups:
        lengths.update(group.lengths)
        histogram += group.histogram
    steps = int(each[STEPS].sum())
    draft_rows = rows["positions"] - rows["steps"]
    tasks = {
        name: {"requests": int((task == name).sum()), **_acceptance(each[:, task == name])}
        for name in dict.fromkeys(task.tolist())
    }
    regret = np.concatenate([np.empty(0), *(group.regret for group in groups)])
    times = {
        name: np.concatenate([np.empty(0, np.float32), *(group.times[name] for group in groups)]) for name in TIMES
    }
    return {
        **_captured(manifest),
        "steps_by_K": {str(k): lengths[k] for k in sorted(lengths)},
        "requests": rows["requests"],
        "planned_requests": manifest.planned or rows["requests"],
        "steps": rows["steps"],
        "steps_on_captured_path": steps,
        "steps_added_by_cover": rows["steps"] - steps,
        "waves": max((group.waves for group in groups), default=0),
        "positions": rows["positions"],
        "draft_positions": draft_rows,
        "tasks": tasks,
        "strict_acceptance": {**_acceptance(each), "acceptance_histogram": histogram.tolist()},
        "first_mismatch": {
            "count": sum(group.mismatches for group in groups),
            "regret_quantiles": {str(q): _or_none(np.quantile(regret, q) if regret.size else None) for q in QUANTILES},
            "regret_max": _or_none(regret.max() if regret.size else None),
            "ties": int((regret == 0.0).sum()),
            "forbidden": sum(group.forbidden for group in groups),
        },
        "ties": {
            "mismatches": sum(group.ties for group in groups),
            "rows_with_two_largest_logits": sum(group.two_largest for group in groups),
        },
        "median_us": {name: _or_none(np.median(values) if values.size else None) for name, values in times.items()},
        "bytes": {
            **size,
            "total": sum(size.values()),
            "positions_per_draft_position": _or_none(size["positions"] / draft_rows if draft_rows else None),
            "total_per_draft_position": _or_none(sum(size.values()) / draft_rows if draft_rows else None),
        },
        "grids": manifest.grids,
        "shards": [
            {"name": shard.name, "rows": shard.rows, "bytes": shard.bytes, "sha256": shard.sha256}
            for shard in manifest.shards
        ],
    }


@dataclass(frozen=True)
class _Group:
    """What is kept of a group of requests.

    Attributes
    ----------
    rows : dict of str to int
        By table.
    task : object (R,)
    each : int64 (4, R)
        Steps, tokens, accepted and drafted tokens of each request, on the captured path.
    lengths : dict of int to int
        Steps by K.
    histogram : int64 (K + 1,)
        Steps of the captured path by accepted draft tokens.
    waves, mismatches, forbidden, ties, two_largest : int
    regret : float64
        At the first mismatch of each block of the captured path, finite ones.
    times : dict of str to float32
        Of each step of the captured path, in microseconds.
    """

    rows: dict[str, int]
    task: npt.NDArray[Any]
    each: npt.NDArray[np.int64]
    lengths: dict[int, int]
    histogram: npt.NDArray[np.int64]
    waves: int
    mismatches: int
    forbidden: int
    ties: int
    two_largest: int
    regret: npt.NDArray[np.float64]
    times: dict[str, npt.NDArray[np.float32]]


def _looks(trace: StreamedTrace) -> list[_Group]:
    numbers = range(len(trace.bounds) - 1)
    found = spread(trace, _look, numbers)
    left = [n for n in numbers if n not in found]
    if left:
        found |= {n: _look(n, group) for n, group in zip(left, trace.groups(set(left)), strict=True)}
    return [found[n] for n in numbers]


def _look(number: int, trace: Trace) -> _Group:
    """Return what is kept of a group."""
    wave = trace.column("steps", "wave")
    path = wave == 0
    reach = reachable_drafts(trace)
    accepted = strict_accepted(trace, reach)
    tokens = accepted + ((accepted < reach.drafts) | reach.open_end)
    drafted = np.diff(trace.pos_ptr) - 1
    owner, requests = trace.step_request[path], trace.num_requests
    each = np.stack([
        np.bincount(owner, minlength=requests),
        *(np.bincount(owner, values[path], requests).astype(np.int64) for values in (tokens, accepted, drafted)),
    ])  # fmt: skip
    first = np.flatnonzero(path & (accepted < reach.drafts))
    at_first = trace.pos_ptr[first] + accepted[first]
    regret, forbidden = _regrets(trace, at_first)
    draft, argmax = trace.column("positions", "draft_id"), trace.column("positions", "argmax_id")
    top = trace.column("positions", "top_logits")
    mismatch = (draft >= 0) & (draft != argmax)
    lengths = np.unique(drafted, return_counts=True)
    return _Group(
        rows={table: getattr(trace, table).num_rows for table in TABLES},
        task=trace.column("requests", "task"),
        each=each,
        lengths={int(k): int(n) for k, n in zip(*lengths, strict=True)},
        histogram=np.bincount(accepted[path], minlength=trace.manifest.num_draft_tokens + 1),
        waves=int(wave.max(initial=0)),
        mismatches=int(first.size),
        forbidden=forbidden,
        ties=int((mismatch & (trace.column("positions", "draft_logit") == top[:, 0])).sum()),
        two_largest=int((top[:, 0] == top[:, 1]).sum()) if top.shape[1] > 1 else 0,
        regret=regret,
        times={name: trace.column("steps", f"{name}_us")[path] for name in TIMES},
    )


def _captured(manifest: Manifest) -> dict[str, Any]:
    """Return what the manifest says of the capture."""
    return {
        "format": SCHEMA_VERSION,
        "checksum": manifest.checksum,
        "target": manifest.target,
        "drafter": manifest.drafter,
        "vocab_size": manifest.vocab_size,
        "logits_dtype": manifest.logits_dtype,
        "device": manifest.device,
        "rule": manifest.rule,
        "seed": manifest.seed,
        "stop": manifest.stop,
        "max_new_tokens": manifest.max_new_tokens,
        "top_k": manifest.top_k,
        "settings": manifest.settings,
        "software": manifest.software,
        "notes": manifest.notes,
        "K": manifest.num_draft_tokens,
    }


def _acceptance(each: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return counts and ratios of some requests; intervals are 95 %, over requests, None for fewer than five."""
    steps, committed, took, drafted = (int(of.sum()) for of in each)
    held = each[:, each[STEPS] > 0]
    tokens, accepted = held[TOKENS].astype(np.float64), held[ACCEPTED].astype(np.float64)
    return {
        "num_spec_steps": steps,
        "completion_tokens": committed,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": took,
        "mean_acceptance_length": committed / steps if steps else None,
        "accepted_per_proposal": took / steps if steps else None,
        "mean_acceptance_length_interval": ratio_interval(tokens, held[STEPS]),
        "accepted_per_proposal_interval": ratio_interval(accepted, held[STEPS]),
        "draft_acceptance_rate": took / drafted if drafted else None,
    }


def _regrets(trace: Trace, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], int]:
    """Return the finite regrets of some rows, and how many draft tokens the target forbids."""
    logit = trace.column("positions", "draft_logit")[rows]
    allowed = logit != FORBIDDEN_LOGIT
    best = trace.column("positions", "top_logits")[rows, 0].astype(np.float64)
    return (best - logit.astype(np.float64))[allowed], int((~allowed).sum())


def _or_none(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
