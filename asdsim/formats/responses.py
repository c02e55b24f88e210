"""Acceptance records inside what serving engines and their benchmarks write.

The field names, as the tools' sources of 2026 have them:

- vLLM puts a record under ``metrics.speculative_decoding`` of a response and the tokens under ``usage``; early versions
  put it into each choice as ``speculative_decoding_stats``. ``vllm bench serve`` writes one object of counters a run.
- AIPerf writes a record under ``spec_decode_acceptance`` of each line, and an ``error`` where a request failed.
- TensorRT-LLM puts ``speculative_decoding`` into each choice, with names of its own.
- SGLang writes counters into ``meta_info``, under names that changed between versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import AsdsimError
from ..files import Fields

Row = dict[str, Any]


class ImportRefused(AsdsimError):
    """A file of another tool that cannot be trusted: which row, and why."""


ALIASES = {
    "num_spec_steps": ("spec_verify_ct",),
    "num_accepted_draft_tokens": (
        "total_accepted_draft_tokens", "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num",
    ),
    "num_draft_tokens": (
        "total_draft_tokens", "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num",
    ),
    "acceptance_histogram": ("spec_correct_drafts_histogram", "spec_accept_histogram"),
    "draft_acceptance_rate": ("acceptance_rate", "spec_accept_rate"),
}  # fmt: skip
"""Names of TensorRT-LLM and SGLang for the fields of a record."""

WRAPPERS = ("data", "response", "body")
"""Where the logs of a proxy and the output of a batch hold a response."""

STATISTICS = (
    "spec_decode", "spec_decode_metrics", "spec_decode_acceptance", "speculative_decoding",
    "speculative_decoding_stats", "meta_info",
)  # fmt: skip
IDS = ("request_id", "custom_id", "rid", "id", "x_request_id")
RESPONSE = frozenset({"choices", "usage", "metrics", "meta_info", "metadata", "timings"})
"""Keys of a row that is a response, with statistics or without."""


def _layers(row: Row, depth: int = 4) -> Iterator[Row]:
    """Yield a row and what its wrappers hold."""
    yield row
    for key in WRAPPERS:
        if depth and isinstance(row.get(key), dict):
            yield from _layers(row[key], depth - 1)


def is_failed(row: Row) -> bool:
    """Return whether a tool wrote the row for a request that failed."""
    for layer in _layers(row):
        meta = layer.get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return True
        if layer.get("error") or layer.get("success") is False or layer.get("object") == "error":
            return True
    return False


def is_response(row: Row) -> bool:
    """Return whether a row is a response or a line of a benchmark, with or without statistics."""
    return any(RESPONSE & layer.keys() for layer in _layers(row))


def records_in(row: Row, where: str) -> list[Row]:
    """Return the acceptance records of a row under the names of vLLM and AIPerf, each with an id if there is one.

    None where the row holds no statistics, one for each choice that has some.

    Raises
    ------
    ImportRefused
        If only a mean is given, from which no counts follow.
    """
    if "spec_decode_num_drafts" in row:
        return [_bench_serve(Fields(row, where, ImportRefused))]
    found = list(_statistics(row))
    records = []
    for place, (stats, holder) in enumerate(found):
        record = _renamed(stats, holder, where)
        name = next((holder[key] for key in IDS if isinstance(holder.get(key), (str, int))), None)
        if name is not None:
            record["request_id"] = name if len(found) == 1 else f"{name}/{place}"
        if len(found) > 1:  # usage sums over the choices
            record["completion_tokens"] = stats.get("completion_tokens")
        records.append(record)
    if not records and any("avg_decoded_tokens_per_iter" in choice for choice in _objects(row.get("choices"))):
        raise ImportRefused(
            "avg_decoded_tokens_per_iter alone says neither how many steps nor how many drafts there were", where=where,
            fix="let TensorRT-LLM report speculative_decoding for each choice",
        )  # fmt: skip
    return records


def _objects(value: Any) -> list[Row]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _statistics(row: Row, outer: Row | None = None, depth: int = 6) -> Iterator[tuple[Row, Row]]:
    """Yield (statistics, everything around them in one mapping, the outermost first)."""
    around = {**row, **{key: value for key, value in (outer or {}).items() if value is not None}}
    if isinstance(row.get("metadata"), dict):
        around = {**row["metadata"], **around}
    if "num_spec_steps" in row or "spec_verify_ct" in row:
        yield row, around
        return
    for key in (*STATISTICS, "metrics", *WRAPPERS) if depth else ():
        inner = list(_statistics(row[key], around, depth - 1)) if isinstance(row.get(key), dict) else []
        if inner:
            yield from inner
            return
    for choice in _objects(row.get("choices")):
        yield from _statistics({**choice, "choices": None}, around, depth - 1)


def _renamed(stats: Row, around: Row, where: str) -> Row:
    record = dict(stats)
    for name, others in ALIASES.items():
        given = next((stats[key] for key in (name, *others) if stats.get(key) is not None), None)
        if given is not None:
            record[name] = given
    if record.get("completion_tokens") is None:
        usage = around.get("usage")
        record["completion_tokens"] = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if record["completion_tokens"] is None:
        record["completion_tokens"] = around.get("completion_tokens")
    length = stats.get("spec_accept_length")
    if length is not None:
        # SGLang divides the tokens by the steps, that of prefill included; later versions count accepted drafts.
        fields = Fields(record, where, ImportRefused)
        steps, tokens = fields.whole("num_spec_steps"), fields.whole("completion_tokens", None)
        if not (steps and tokens is not None and agrees(fields.number("spec_accept_length"), tokens / steps)):
            record["mean_acceptance_length"] = length
    return record


def _bench_serve(row: Fields) -> Row:
    """Return the counters of a run of ``vllm bench serve``: rates there are in per cent."""
    steps, drafted, accepted = (
        row.whole(f"spec_decode_{name}") for name in ("num_drafts", "draft_tokens", "accepted_tokens")
    )
    rate = row.number("spec_decode_acceptance_rate", None)
    if rate is not None and drafted and not agrees(rate, 100 * accepted / drafted):
        raise ImportRefused(
            f"spec_decode_acceptance_rate {rate:g} is not {100 * accepted / drafted:.6g} %", where=row.where
        )
    record: Row = {
        "num_spec_steps": steps, "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": row.get("spec_decode_acceptance_length", None),
        "requests": row.whole("completed", 1), "failed": row.whole("failed", 0),
    }  # fmt: skip
    shares = row.list_of("number", "spec_decode_per_position_acceptance_rates", None)
    if shares:  # the share of steps that accepted at least 1, 2, ... drafts
        at_least = [steps, *(round(share * steps) for share in shares), 0]
        histogram = [more - fewer for more, fewer in zip(at_least, at_least[1:], strict=False)]
        whole = all(abs(share * steps - n) < 1e-6 for share, n in zip(shares, at_least[1:], strict=False))
        if whole and min(histogram) >= 0 and sum(at_least[1:]) == accepted:  # not where the shares are rounded
            record["acceptance_histogram"] = histogram
        record["num_spec_tokens"] = len(shares)
    return record


def agrees(given: float, exact: float) -> bool:
    """Return whether ``given`` is ``exact``, or ``exact`` printed with two digits or more behind the point."""
    places = max(2, len(repr(given).partition(".")[2])) if "e" not in repr(given) else 17
    return abs(given - exact) <= max(0.5000001 * 10.0**-places, 1e-6 * max(1.0, abs(exact)))
