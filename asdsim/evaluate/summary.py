"""The numbers that describe a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..records import FORBIDDEN_LOGIT
from ..stats import ratio_interval
from ..trace.check import reachable_drafts, strict_accepted
from ..trace.manifest import Manifest
from ..trace.reader import Trace
from ..trace.schema import SCHEMA_VERSION, TABLES

QUANTILES = (0.25, 0.5, 0.75, 0.9)


def summarise(trace: Trace) -> dict[str, Any]:
    """Return what ``asdsim inspect`` prints, as plain JSON values; what is not known is None.

    Acceptance is that of strict matching on the captured path: of what the target would have accepted at the prefixes
    that decoding met. On a path captured under another rule it is not what strict decoding would have given.

    Regrets are taken at the first mismatch of each block of that path, in logits (float64 differences of float32
    logits); quantiles are linear. A tie is a draft token that is not the target's choice and has its logit.
    """
    manifest = trace.manifest
    path = trace.column("steps", "wave") == 0
    reach = reachable_drafts(trace)
    accepted = strict_accepted(trace, reach)
    tokens = accepted + ((accepted < reach.drafts) | reach.open_end)
    drafted = np.diff(trace.pos_ptr) - 1
    rows = {table: getattr(trace, table).num_rows for table in TABLES}
    size = {table: sum(shard.bytes for shard in manifest.shards_of(table)) for table in TABLES}
    draft_rows = int(drafted.sum())

    task = trace.column("requests", "task")
    tasks = {
        name: {
            "requests": int((task == name).sum()),
            **_acceptance(accepted, tokens, drafted, path & (task == name)[trace.step_request], trace.step_request),
        }
        for name in dict.fromkeys(task.tolist())
    }

    first = np.flatnonzero(path & (accepted < reach.drafts))
    lengths = np.unique(drafted, return_counts=True)
    return {
        **_captured(manifest),
        "steps_by_K": {str(k): int(n) for k, n in zip(*lengths, strict=True)},
        "requests": rows["requests"],
        "planned_requests": manifest.planned or rows["requests"],
        "steps": rows["steps"],
        "steps_on_captured_path": int(path.sum()),
        "steps_added_by_cover": int((~path).sum()),
        "waves": int(trace.column("steps", "wave").max(initial=0)),
        "positions": rows["positions"],
        "draft_positions": draft_rows,
        "tasks": tasks,
        "strict_acceptance": {
            **_acceptance(accepted, tokens, drafted, path, trace.step_request),
            "acceptance_histogram": np.bincount(accepted[path], minlength=manifest.num_draft_tokens + 1).tolist(),
        },
        **_mismatches(trace, trace.pos_ptr[first] + accepted[first]),
        "median_us": {
            name: _or_none(np.median(trace.column("steps", f"{name}_us")[path]) if path.any() else None)
            for name in ("draft", "verify", "select")
        },
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


def _mismatches(trace: Trace, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return regrets at the first mismatches, in ``rows`` of positions, and ties anywhere."""
    regret, forbidden = _regrets(trace, rows)
    draft, argmax = trace.column("positions", "draft_id"), trace.column("positions", "argmax_id")
    top = trace.column("positions", "top_logits")
    mismatch = (draft >= 0) & (draft != argmax)
    return {
        "first_mismatch": {
            "count": int(rows.size),
            "regret_quantiles": {str(q): _or_none(np.quantile(regret, q) if regret.size else None) for q in QUANTILES},
            "regret_max": _or_none(regret.max() if regret.size else None),
            "ties": int((regret == 0.0).sum()),
            "forbidden": int(forbidden),
        },
        "ties": {
            "mismatches": int((mismatch & (trace.column("positions", "draft_logit") == top[:, 0])).sum()),
            "rows_with_two_largest_logits": int((top[:, 0] == top[:, 1]).sum()) if top.shape[1] > 1 else 0,
        },
    }


def _acceptance(
    accepted: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    drafted: npt.NDArray[np.int64],
    keep: npt.NDArray[np.bool_],
    request: npt.NDArray[np.int32],
) -> dict[str, Any]:
    """Return counts and ratios of some steps; intervals are 95 %, over requests, None for fewer than three."""
    steps, committed, took = int(keep.sum()), int(tokens[keep].sum()), int(accepted[keep].sum())
    each = np.bincount(request[keep])  # steps of each request
    some = each > 0

    def by_request(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.bincount(request[keep], weights=values[keep])[some].astype(np.float64)

    return {
        "num_spec_steps": steps,
        "completion_tokens": committed,
        "num_draft_tokens": int(drafted[keep].sum()),
        "num_accepted_draft_tokens": took,
        "mean_acceptance_length": committed / steps if steps else None,
        "accepted_per_proposal": took / steps if steps else None,
        "mean_acceptance_length_interval": ratio_interval(by_request(tokens), each[some]),
        "accepted_per_proposal_interval": ratio_interval(by_request(accepted), each[some]),
        "draft_acceptance_rate": took / int(drafted[keep].sum()) if drafted[keep].sum() else None,
    }


def _regrets(trace: Trace, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], int]:
    """Return the finite regrets of some rows, and how many draft tokens the target forbids."""
    logit = trace.column("positions", "draft_logit")[rows]
    allowed = logit != FORBIDDEN_LOGIT
    best = trace.column("positions", "top_logits")[rows, 0].astype(np.float64)
    return (best - logit.astype(np.float64))[allowed], int((~allowed).sum())


def _or_none(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
