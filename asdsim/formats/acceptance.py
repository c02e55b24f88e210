"""Read what others write, and write what they read.

- ``acceptance``: records of AIPerf and of vLLM's detailed speculative-decoding metrics, one JSON object per request; in
  for comparison, out from any replay.
- ``asd-calibration``: the reference implementation's calibration rows, first rejections with a positive regret. A
  sample of regrets: nothing says what was accepted before or what follows, so no replay.
- ``specdecode-bench``: per generated token, the tokens that a verification started there would emit. Replays strict
  matching, and strict matching with fewer draft tokens; it holds no logits, so no other rule.

Every row is checked; the first that breaks an invariant is named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AsdsimError, UsageError, unknown_name
from ..rules.settings import Policy
from ..trace.graph import Graph, build_graph
from ..trace.stored import Trace
from ..walk.path import visits

FORMATS = ("acceptance", "asd-calibration", "specdecode-bench")

COUNTS = ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")
CALIBRATION = (
    "snapshot_index", "proposal_ordinal", "request_serial", "rid", "request_pool_slot", "forward_ct",
    "barrier_position", "regret", "value", "regret_per_value",
)  # fmt: skip
VALUE_TOLERANCE = 1e-6
RATIO_RELATIVE, RATIO_ABSOLUTE = 1e-6, 1e-7


class ImportRefused(AsdsimError):
    """A file of another tool that cannot be trusted: which row, and why."""


Row = dict[str, Any]


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (where, row) from a JSON Lines file, or from a JSON list of objects.

    Raises
    ------
    ImportRefused
        On a row that is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ImportRefused(f"cannot read it: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise ImportRefused("not text in UTF-8", where=str(path)) from None
    if text.lstrip().startswith("["):
        try:
            items = list(enumerate(json.loads(text), start=1))
        except json.JSONDecodeError as error:
            raise ImportRefused(f"not valid JSON: {error}", where=str(path)) from None
        kind = "item"
    else:
        kind, items = "line", []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    items.append((number, json.loads(line)))
                except json.JSONDecodeError as error:
                    raise ImportRefused(f"not valid JSON: {error.msg}", where=f"{path}, line {number}") from None
    for number, item in items:
        where = f"{path}, {kind} {number}"
        if not isinstance(item, dict):
            raise ImportRefused("not a JSON object", where=where)
        yield where, item


def detect(path: Path) -> str:
    """Return the format of a file by the keys of its first row.

    Raises
    ------
    ImportRefused
        If it is none of :data:`FORMATS`.
    """
    for where, row in read_rows(path):
        if {"regret", "value", "regret_per_value"} <= set(row):
            return "asd-calibration"
        if any(key.startswith("acc_") for key in row) and "generated_token_ids" in row:
            return "specdecode-bench"
        if set(COUNTS) <= set(record_of(row)):
            return "acceptance"
        raise ImportRefused(
            f"the keys {', '.join(map(str, row)) or '(none)'} belong to no format known here", where=where,
            fix=f"known: {', '.join(FORMATS)}",
        )  # fmt: skip
    raise ImportRefused("there is no row in it", where=str(path))


def number(row: Mapping[str, Any], key: str, where: str) -> float:
    """Return a finite number of a row."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ImportRefused(f"{key} is {value!r}, not a finite number", where=where)
    return float(value)


def count(row: Mapping[str, Any], key: str, where: str) -> int:
    """Return a whole number >= 0 of a row."""
    value = number(row, key, where)
    if value < 0 or value != int(value):
        raise ImportRefused(f"{key} is {value:g}, not a whole number >= 0", where=where)
    return int(value)


# --- acceptance records -------------------------------------------------------------------------------------------


def record_of(row: Row) -> Row:
    """Return the acceptance record of a row: the row itself, or what it holds under a key of the two tools."""
    for key in ("spec_decode", "spec_decode_metrics", "spec_decode_acceptance"):
        if isinstance(row.get(key), dict):
            return dict(row[key])
    return row


def read_acceptance(path: Path) -> list[Row]:
    """Read acceptance records and check their invariants.

    The histogram must sum to the steps and to the accepted tokens, accepted must not exceed drafted, and figures that
    follow from others must follow. A missing figure is filled in where it does; per-step lists may be absent.

    Raises
    ------
    ImportRefused
        Naming the first row that breaks one.
    """
    found: list[Row] = []
    for where, row in read_rows(path):
        found.append(check_acceptance(record_of(row), where) | {"request_id": row.get("request_id", len(found))})
    if not found:
        raise ImportRefused("there is no row in it", where=str(path))
    return found


def check_acceptance(row: Row, where: str) -> Row:
    """Return a record with every figure filled in; refuse one that contradicts itself."""
    steps, accepted, drafted = (count(row, key, where) for key in ("num_spec_steps", *COUNTS[:2]))
    if accepted > drafted:
        raise ImportRefused(f"{accepted} draft tokens accepted, but only {drafted} drafted", where=where)
    made: Row = {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted}
    per_accepted, per_drafted = (_list(row, key, where) for key in ("per_step_accepted", "per_step_drafted"))
    for name, values, total in (
        ("per_step_accepted", per_accepted, accepted),
        ("per_step_drafted", per_drafted, drafted),
    ):
        if values is not None and (len(values) != steps or sum(values) != total):
            raise ImportRefused(
                f"{name} has {len(values)} steps and sums to {sum(values)}, against {steps} and {total}", where=where
            )
    if per_accepted is not None and per_drafted is not None:
        for step, (a, d) in enumerate(zip(per_accepted, per_drafted, strict=True)):
            if a > d:
                raise ImportRefused(f"step {step} accepted {a} of {d} draft tokens", where=where)
    histogram = _histogram(row, where)
    if histogram is None and per_accepted is not None:
        histogram = np.bincount(per_accepted, minlength=1).tolist()
    if histogram is not None:
        weighed = sum(j * n for j, n in enumerate(histogram))
        if sum(histogram) != steps:
            raise ImportRefused(f"acceptance_histogram sums to {sum(histogram)}, not to {steps} steps", where=where)
        if weighed != accepted:
            raise ImportRefused(f"acceptance_histogram holds {weighed} accepted tokens, not {accepted}", where=where)
        if per_accepted is not None:
            counted = np.bincount(per_accepted, minlength=len(histogram)).tolist()
            if counted[: len(histogram)] != histogram or any(counted[len(histogram) :]):
                raise ImportRefused("acceptance_histogram does not count per_step_accepted", where=where)
    tokens = count(row, "completion_tokens", where) if row.get("completion_tokens") is not None else None
    lengths = [1.0 + accepted / steps] if steps else []
    if tokens is not None and steps:
        lengths.append(tokens / steps)  # cut at the end of the request
    if row.get("mean_acceptance_length") is not None and steps:
        given = number(row, "mean_acceptance_length", where)
        if not any(math.isclose(given, length, rel_tol=1e-6, abs_tol=1e-6) for length in lengths):
            raise ImportRefused(
                f"mean_acceptance_length {given:g} is not {lengths[0]:.6g}, the bonus token included", where=where
            )
    if row.get("draft_acceptance_rate") is not None and drafted:
        given = number(row, "draft_acceptance_rate", where)
        if not math.isclose(given, accepted / drafted, rel_tol=1e-6, abs_tol=1e-6):
            raise ImportRefused(f"draft_acceptance_rate {given:g} is not {accepted / drafted:.6g}", where=where)
    made["mean_acceptance_length"] = row.get("mean_acceptance_length", lengths[-1] if lengths else None)
    made["accepted_per_proposal"] = accepted / steps if steps else None
    made["draft_acceptance_rate"] = accepted / drafted if drafted else None
    made["completion_tokens"] = tokens
    made["num_spec_tokens"] = row.get("num_spec_tokens", max(per_drafted) if per_drafted else None)
    made["acceptance_histogram"] = histogram
    made["per_step_accepted"], made["per_step_drafted"] = per_accepted, per_drafted
    return made


def _list(row: Row, key: str, where: str) -> list[int] | None:
    values = row.get(key)
    if values is None:
        return None
    whole = isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
    if not whole:
        raise ImportRefused(f"{key} is not a list of whole numbers >= 0", where=where)
    return list(values)


def _histogram(row: Row, where: str) -> list[int] | None:
    values = row.get("acceptance_histogram")
    if isinstance(values, dict):  # {"0": 3, "2": 1}
        try:
            flat = [0] * (max((int(key) for key in values), default=0) + 1)
            for key, value in values.items():
                flat[int(key) if int(key) >= 0 else len(flat)] = value
        except (ValueError, IndexError):
            raise ImportRefused("acceptance_histogram has a key that is no number of tokens", where=where) from None
        return _list({"acceptance_histogram": flat}, "acceptance_histogram", where)
    return _list(row, "acceptance_histogram", where)


def acceptance_records(trace: Trace, policy: Policy, graph: Graph | None = None) -> tuple[list[Row], int]:
    """Return one acceptance record per request of a replay, checked, and how many requests left the trace.

    Raises
    ------
    UsageError
        If every request left the trace.
    """
    laid = graph or build_graph(trace, policy.layout)
    made: list[Row] = []
    left = 0
    for r, name in enumerate(laid.request_ids):
        steps, exact = visits(laid, policy, r)
        if not exact:
            left += 1
            continue
        accepted = [visit.accepted for visit in steps]
        drafted = [int(laid.drafted[visit.step]) for visit in steps]
        tokens = sum(visit.tokens for visit in steps)
        row: Row = {
            "request_id": name,
            "mean_acceptance_length": tokens / len(steps) if steps else None,
            "draft_acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else None,
            "acceptance_histogram": np.bincount(accepted, minlength=laid.max_draft + 1).tolist() if steps else [],
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(drafted),
            "num_spec_steps": len(steps),
            "num_spec_tokens": laid.max_draft,
            "completion_tokens": tokens,
            "per_step_accepted": accepted,
            "per_step_drafted": drafted,
        }
        check_acceptance(row, f"request {name}")
        made.append(row)
    if not made and left:
        raise UsageError(
            f"all {left} requests leave the trace under {policy}", where=str(trace.path),
            fix="run asdsim cover for this setting",
        )  # fmt: skip
    return made, left


# --- calibration rows of ASD --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegretSample:
    """Regrets at first rejections; not replayable.

    Attributes
    ----------
    regret, value, ratio : float64 (n,)
        r, q and r/q, in logits.
    rows : list of dict
    """

    regret: npt.NDArray[np.float64]
    value: npt.NDArray[np.float64]
    ratio: npt.NDArray[np.float64]
    rows: list[Row]

    def quartiles(self) -> list[float]:
        """Return the quartiles of r/q, linear between ranks: place (n - 1) q."""
        return [float(q) for q in np.quantile(self.ratio, [0.25, 0.5, 0.75])]


def read_calibration(path: Path) -> RegretSample:
    """Read the reference implementation's calibration rows.

    Raises
    ------
    ImportRefused
        On a regret that is not positive, a value that is not, or a ratio that is not regret / value (relative 1e-6,
        absolute 1e-7); naming the row.
    """
    rows, numbers = [], []
    for where, row in read_rows(path):
        missing = [key for key in ("regret", "value", "regret_per_value") if key not in row]
        if missing:
            raise ImportRefused(f"no {missing[0]}", where=where)
        regret, value, ratio = (number(row, key, where) for key in ("regret", "value", "regret_per_value"))
        if not regret > 0:
            raise ImportRefused(f"regret {regret:g} is not positive", where=where)
        if not value > 0:
            raise ImportRefused(f"value {value:g} is not positive", where=where)
        if not math.isclose(ratio, regret / value, rel_tol=RATIO_RELATIVE, abs_tol=RATIO_ABSOLUTE):
            raise ImportRefused(f"regret_per_value {ratio:g} is not {regret:g} / {value:g}", where=where)
        numbers.append((regret, value, ratio))
        rows.append(row)
    if not rows:
        raise ImportRefused("there is no row in it", where=str(path))
    columns = np.array(numbers, np.float64).T
    return RegretSample(columns[0], columns[1], columns[2], rows)


# --- SpecDecode-Bench ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AcceptanceLengths:
    """Per request and generated token, the tokens that a verification there would emit, bonus included.

    Attributes
    ----------
    drafter : str
        As in the file, without ``acc_``.
    request_ids : list of str
    generated : list of int
        Tokens of each output.
    lengths : list of int64 arrays
        One may end before its output, or go on behind it (both occur in the public files); a replay ends with whichever
        ends first.
    """

    drafter: str
    request_ids: list[str]
    generated: list[int]
    lengths: list[npt.NDArray[np.int64]]

    @property
    def uneven(self) -> tuple[int, int]:
        """Rows whose lengths end before the output, and rows whose lengths go on behind it."""
        more = [len(part) - total for total, part in zip(self.generated, self.lengths, strict=True)]
        return sum(n < 0 for n in more), sum(n > 0 for n in more)

    @property
    def longest(self) -> int:
        """Largest K that the file can tell of."""
        return max((int(part.max(initial=1)) for part in self.lengths), default=1) - 1

    def replay(self, K: int) -> Row:
        """Replay strict matching with at most K draft tokens per step."""
        steps = tokens = accepted = 0
        per_step: list[int] = []
        for total, part in zip(self.generated, self.lengths, strict=True):
            at = 0
            while at < min(total, len(part)):
                emitted = min(int(part[at]), K + 1)
                taken = min(emitted, total - at)
                per_step.append(min(emitted - 1, taken))
                accepted += per_step[-1]
                tokens += taken
                steps += 1
                at += emitted
        return {
            "drafter": self.drafter, "K": K, "requests": len(self.generated), "num_spec_steps": steps,
            "completion_tokens": tokens, "num_accepted_draft_tokens": accepted,
            "mean_acceptance_length": tokens / steps if steps else None,
            "accepted_per_proposal": accepted / steps if steps else None,
            "acceptance_histogram": np.bincount(per_step, minlength=K + 1).tolist() if per_step else [0] * (K + 1),
        }  # fmt: skip


def read_specdecode_bench(path: Path) -> list[AcceptanceLengths]:
    """Read SpecDecode-Bench rows, one result per drafter.

    Raises
    ------
    ImportRefused
        On a length that is no whole number >= 1; naming the row.
    """
    names: list[str] = []
    parts: dict[str, list[npt.NDArray[np.int64]]] = {}
    ids: list[str] = []
    generated: list[int] = []
    for where, row in read_rows(path):
        tokens = row.get("generated_token_ids")
        if not isinstance(tokens, list):
            raise ImportRefused("generated_token_ids is not a list", where=where)
        here = [key for key in row if key.startswith("acc_")]
        if not names:
            names = here
        if not names or here != names:
            raise ImportRefused(
                f"acceptance lengths of {', '.join(here) or 'no drafter'}, the rows before have {', '.join(names)}",
                where=where,
            )
        for name in names:
            lengths = row[name].get("acc_len") if isinstance(row[name], dict) else None
            if not isinstance(lengths, list):
                raise ImportRefused(f"{name} has no list acc_len", where=where)
            for place, length in enumerate(lengths):
                if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                    raise ImportRefused(f"{name}: acc_len {length!r} at token {place} is not >= 1", where=where)
            parts.setdefault(name, []).append(np.array(lengths, np.int64))
        ids.append(str(row.get("id", len(ids))))
        generated.append(len(tokens))
    if not ids:
        raise ImportRefused("there is no row in it", where=str(path))
    return [AcceptanceLengths(name.removeprefix("acc_"), ids, generated, parts[name]) for name in names]


READERS: dict[str, Callable[[Path], Any]] = {
    "acceptance": read_acceptance, "asd-calibration": read_calibration, "specdecode-bench": read_specdecode_bench,
}  # fmt: skip


def summary_of(records: Sequence[Row]) -> Row:
    """Return sums and ratios over acceptance records."""
    steps, accepted, drafted = (
        sum(row[key] for row in records) for key in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
    )
    tokens = [row["completion_tokens"] for row in records]
    known = all(value is not None for value in tokens)
    return {
        "requests": len(records), "num_spec_steps": steps, "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted, "completion_tokens": sum(tokens) if known else None,
        "mean_acceptance_length": (sum(tokens) if known else accepted + steps) / steps if steps else None,
        "accepted_per_proposal": accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
    }  # fmt: skip


def read(path: Path, kind: str = "auto") -> tuple[str, Any]:
    """Read a file of another tool; returns its format and content."""
    chosen = detect(path) if kind == "auto" else kind
    if chosen not in FORMATS:
        raise unknown_name("format", chosen, ["auto", *FORMATS])
    return chosen, READERS[chosen](path)
