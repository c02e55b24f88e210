"""Read what others write, and write what they read.

- ``acceptance``: records of AIPerf and of vLLM's speculative-decoding metrics, one JSON object per request, alone or
  inside the responses of vLLM, SGLang and TensorRT-LLM (see :mod:`asdsim.formats.responses`); in for comparison, out
  from any replay.
- ``asd-calibration``: the reference implementation's calibration rows, first rejections with a positive regret. A
  sample of regrets: nothing says what was accepted before or what follows, so no replay.
- ``specdecode-bench``: per generated token, the tokens that a verification started there would emit. Replays strict
  matching, and strict matching with fewer draft tokens; it holds no logits, so no other rule.

Every row is checked; the first that breaks an invariant is named.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, unknown_name
from ..files import Fields, read_rows, shown
from ..rules.settings import Policy
from ..trace.graph import Graphs
from ..trace.stored import Source
from ..walk.path import visits
from .responses import ImportRefused, Row, agrees, is_failed, is_response, records_in

FORMATS = ("acceptance", "asd-calibration", "specdecode-bench")

COUNTS = ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")
RATIO_RELATIVE, RATIO_ABSOLUTE = 1e-6, 1e-7
MAX_DRAFT = 2**15 - 2
"""Most draft tokens of a step, as in a trace: no histogram is built for more."""
LONGEST_STEP = 1025
"""Most tokens of a step in SpecDecode-Bench: each draft length up to it is replayed."""

Rows = Iterable[tuple[str, Row]]


# --- acceptance records -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceptance:
    """Acceptance records of a file.

    Attributes
    ----------
    rows : list of dict
        Checked, with every figure filled in.
    failed, without : int
        Requests left out: those that failed, and responses without statistics.
    """

    rows: list[Row]
    failed: int = 0
    without: int = 0


def read_acceptance(path: Path, rows: Rows | None = None) -> Acceptance:
    """Read acceptance records and check their invariants.

    The histogram must sum to the steps and to the accepted tokens, accepted must not exceed drafted, and figures that
    follow from others must follow. A missing figure is filled in where it does; per-step lists may be absent.

    Raises
    ------
    ImportRefused
        Naming the first row that breaks one.
    """
    records: list[Row] = []
    failed = without = 0
    for where, row in rows or read_rows(path, error=ImportRefused):
        if is_failed(row):
            failed += 1
            continue
        inner = records_in(row, where)
        if not inner and not is_response(row):
            raise _unknown(row, where)
        without += not inner
        for record in inner:
            failed += Fields(record, where, ImportRefused).whole("failed", 0)
            records.append({"request_id": record.get("request_id", len(records)), **check_acceptance(record, where)})
    if not records:
        left = f": {failed} failed, {without} without statistics of speculative decoding" if failed + without else ""
        raise ImportRefused(f"the file has no rows{left}", where=shown(path))
    return Acceptance(records, failed, without)


def check_acceptance(row: Row, where: str) -> Row:
    """Return a record with every figure filled in; refuse one that contradicts itself.

    In serving engines the first token of a request comes from prefill, so that ``completion_tokens`` is at most
    1 + accepted + steps, and the steps emitted accepted + steps. In asdsim a draft stands at the prompt, and the steps
    emitted ``completion_tokens``. Each figure of length is over what the steps emitted.
    """
    fields = Fields(row, where, ImportRefused)
    steps, accepted, drafted = (fields.whole(key) for key in ("num_spec_steps", *COUNTS[:2]))
    requests = fields.whole("requests", 1)
    if accepted > drafted:
        raise ImportRefused(f"{accepted} draft tokens accepted, but only {drafted} drafted", where=where)
    if drafted and not steps:
        raise ImportRefused(f"{drafted} draft tokens, but no step", where=where)
    record: Row = {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted}
    per_accepted, per_drafted, histogram = _per_step(fields, steps, accepted, drafted)
    tokens = fields.whole("completion_tokens", None)
    given = fields.number("mean_acceptance_length", None)
    length = 1.0 + accepted / steps if steps else None
    # Files of asdsim before it named itself: cut at the end of a request, and divided by the steps.
    unnamed = length is not None and given is not None and tokens is not None and not agrees(given, length)
    own = row.get("engine") == "asdsim" or bool(unnamed and tokens < accepted + steps)
    most = accepted + steps + (0 if own else requests)
    if tokens is not None and tokens > most:
        raise ImportRefused(
            f"completion_tokens {tokens} is more than {accepted} accepted + {steps} steps"
            + ("" if own else f" + {requests} from prefill"), where=where,
            fix="steps without a draft are missing from num_spec_steps: it does not give tokens per step",
        )  # fmt: skip
    if own and tokens is not None and steps:
        length = tokens / steps
    if given is not None and length is not None and not agrees(given, length):
        raise ImportRefused(
            f"mean_acceptance_length {given:g} is not {length:.6g}, the bonus token included", where=where
        )
    rate = fields.number("draft_acceptance_rate", None)
    if rate is not None and drafted and not agrees(rate, accepted / drafted):
        raise ImportRefused(f"draft_acceptance_rate {rate:g} is not {accepted / drafted:.6g}", where=where)
    if own or row.get("engine") is not None:
        record["engine"] = "asdsim" if own else fields.text("engine")
    if requests != 1:
        record["requests"] = requests
    record["mean_acceptance_length"] = length
    record["accepted_per_proposal"] = accepted / steps if steps else None
    record["draft_acceptance_rate"] = accepted / drafted if drafted else None
    record["completion_tokens"] = tokens
    record["num_spec_tokens"] = _most_drafted(fields, steps, accepted, per_drafted, histogram)
    record["acceptance_histogram"] = histogram
    record["per_step_accepted"], record["per_step_drafted"] = per_accepted, per_drafted
    return record


def _per_step(
    fields: Fields, steps: int, accepted: int, drafted: int
) -> tuple[list[int] | None, list[int] | None, list[int] | None]:
    """Return accepted and drafted tokens of each step and the histogram, as far as they are there."""
    where = fields.where
    per_accepted, per_drafted = (
        fields.list_of("whole", key, None, most=MAX_DRAFT) for key in ("per_step_accepted", "per_step_drafted")
    )
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
    histogram = _histogram(fields)
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
    return per_accepted, per_drafted, histogram


def _most_drafted(
    fields: Fields, steps: int, accepted: int, per_drafted: list[int] | None, histogram: list[int] | None
) -> int | None:
    """Return ``num_spec_tokens``; refuse one that is below what a step drafted or accepted."""
    most = fields.whole("num_spec_tokens", None, most=MAX_DRAFT)
    if most is None:
        return max(per_drafted) if per_drafted else None
    largest = max((j for j, n in enumerate(histogram or []) if n), default=-(-accepted // steps) if steps else 0)
    if largest > most:
        raise ImportRefused(f"num_spec_tokens is {most}, but a step accepted {largest}", where=fields.where)
    if per_drafted and max(per_drafted) > most:
        raise ImportRefused(f"num_spec_tokens is {most}, but a step drafted {max(per_drafted)}", where=fields.where)
    return most


def _histogram(fields: Fields) -> list[int] | None:
    values = fields.get("acceptance_histogram", None)
    if isinstance(values, dict):  # {"0": 3, "2": 1}
        for key in values:
            if not (key.isascii() and key.isdigit() and len(key) <= 5 and str(int(key)) == key):
                raise ImportRefused(
                    f"acceptance_histogram has a key that is not a number of tokens: {shown(key[:20])}",
                    where=fields.where,
                )
        most = max(map(int, values), default=-1)
        if most > MAX_DRAFT:
            raise ImportRefused(f"acceptance_histogram has a step of {most} accepted tokens", where=fields.where)
        values = [values.get(str(count), 0) for count in range(most + 1)]
    flat: list[int] | None = Fields(
        {"acceptance_histogram": values}, fields.where, ImportRefused
    ).list_of("whole", "acceptance_histogram", None)  # fmt: skip
    if flat is not None and len(flat) > MAX_DRAFT + 1:
        raise ImportRefused(f"acceptance_histogram has {len(flat)} entries", where=fields.where)
    return flat


def all_left(trace: Source, policy: Policy, number: int) -> UsageError:
    """Return the error of a replay that no request stayed in."""
    return UsageError(
        f"all {number} requests leave the trace under {policy}", where=str(trace.path),
        fix="run asdsim cover for this setting",
    )  # fmt: skip


def each_acceptance(graph: Graphs, policy: Policy) -> Iterator[Row | None]:
    """Yield the acceptance record of each request, checked; None for one that left the trace."""
    largest = graph.max_draft
    for _, part in graph.parts():
        for r, name in enumerate(part.request_ids):
            steps, exact = visits(part, policy, r)
            if not exact:
                yield None
                continue
            accepted = [visit.accepted for visit in steps]
            drafted = [int(part.drafted[visit.step]) for visit in steps]
            tokens = sum(visit.tokens for visit in steps)
            row: Row = {
                "request_id": name,
                "engine": "asdsim",
                "mean_acceptance_length": tokens / len(steps) if steps else None,
                "draft_acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else None,
                "acceptance_histogram": np.bincount(accepted, minlength=largest + 1).tolist() if steps else [],
                "num_accepted_draft_tokens": sum(accepted),
                "num_draft_tokens": sum(drafted),
                "num_spec_steps": len(steps),
                "num_spec_tokens": largest,
                "completion_tokens": tokens,
                "per_step_accepted": accepted,
                "per_step_drafted": drafted,
            }
            check_acceptance(row, f"request {name}")
            yield row


def sum_into(total: Row, row: Row) -> None:
    """Add an acceptance record of a replay to sums that :func:`summary_of` takes as one record."""
    total.setdefault("engine", "asdsim")
    total["requests"] = total.get("requests", 0) + 1
    for name in (*COUNTS, "completion_tokens"):
        total[name] = total.get(name, 0) + row[name]
    held, added = total.get("acceptance_histogram", []), row["acceptance_histogram"]
    total["acceptance_histogram"] = [a + b for a, b in zip_longest(held, added, fillvalue=0)]


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


def read_calibration(path: Path, source: Rows | None = None) -> RegretSample:
    """Read the reference implementation's calibration rows.

    Raises
    ------
    ImportRefused
        On a regret that is not positive, a value that is not, or a ratio that is not regret / value (relative 1e-6,
        absolute 1e-7); naming the row.
    """
    rows, numbers = [], []
    for where, row in source or read_rows(path, error=ImportRefused):
        fields = Fields(row, where, ImportRefused)
        regret, value, ratio = (fields.number(key) for key in ("regret", "value", "regret_per_value"))
        if not regret > 0:
            raise ImportRefused(f"regret {regret:g} is not positive", where=where)
        if not value > 0:
            raise ImportRefused(f"value {value:g} is not positive", where=where)
        if not math.isclose(ratio, regret / value, rel_tol=RATIO_RELATIVE, abs_tol=RATIO_ABSOLUTE):
            raise ImportRefused(f"regret_per_value {ratio:g} is not {regret:g} / {value:g}", where=where)
        numbers.append((regret, value, ratio))
        rows.append(row)
    if not rows:
        raise ImportRefused("the file has no rows", where=shown(path))
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
        One may end before its output, or continue past it (the public files have both); a replay ends with whichever
        ends first.
    """

    drafter: str
    request_ids: list[str]
    generated: list[int]
    lengths: list[npt.NDArray[np.int64]]

    @property
    def uneven(self) -> tuple[int, int]:
        """Rows whose lengths end before the output, and rows whose lengths continue past it."""
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


def read_specdecode_bench(path: Path, rows: Rows | None = None) -> list[AcceptanceLengths]:
    """Read SpecDecode-Bench rows, one result per drafter.

    Raises
    ------
    ImportRefused
        On a length that is not a whole number >= 1; names the row.
    """
    names: list[str] = []
    parts: dict[str, list[npt.NDArray[np.int64]]] = {}
    ids: list[str] = []
    generated: list[int] = []
    for where, row in rows or read_rows(path, error=ImportRefused):
        tokens = row.get("generated_token_ids")
        if not isinstance(tokens, list):
            raise ImportRefused("generated_token_ids is not a list", where=where)
        here = [key for key in row if key.startswith("acc_")]
        if not names:
            names = here
        if not names or here != names:
            raise ImportRefused(
                shown(
                    f"acceptance lengths of {', '.join(here) or 'no drafter'}, the rows before have {', '.join(names)}"
                ),
                where=where,
            )
        for name in names:
            lengths = row[name].get("acc_len") if isinstance(row[name], dict) else None
            if not isinstance(lengths, list):
                raise ImportRefused(f"{shown(name)} has no list acc_len", where=where)
            for place, length in enumerate(lengths):
                if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= LONGEST_STEP:
                    raise ImportRefused(
                        f"{shown(name)}: acc_len {shown(reprlib.repr(length))} at token {place} is not >= 1 and <= "
                        f"{LONGEST_STEP:,}", where=where,
                    )  # fmt: skip
            parts.setdefault(name, []).append(np.array(lengths, np.int64))
        ids.append(str(row.get("id", len(ids))))
        generated.append(len(tokens))
    if not ids:
        raise ImportRefused("the file has no rows", where=shown(path))
    return [AcceptanceLengths(name.removeprefix("acc_"), ids, generated, parts[name]) for name in names]


READERS: dict[str, Callable[..., Any]] = {
    "acceptance": read_acceptance, "asd-calibration": read_calibration, "specdecode-bench": read_specdecode_bench,
}  # fmt: skip


def summary_of(records: Sequence[Row]) -> Row:
    """Return sums and ratios over acceptance records; see :func:`check_acceptance` for what the steps emitted."""
    steps, accepted, drafted = (
        sum(row[key] for row in records) for key in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
    )
    tokens = [row["completion_tokens"] for row in records]
    emitted = sum(
        row["completion_tokens"]
        if row.get("engine") == "asdsim" and row["completion_tokens"] is not None
        else row["num_accepted_draft_tokens"] + row["num_spec_steps"]
        for row in records
    )
    return {
        "requests": sum(row.get("requests", 1) for row in records), "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted,
        "completion_tokens": None if None in tokens else sum(tokens),
        "mean_acceptance_length": emitted / steps if steps else None,
        "accepted_per_proposal": accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
    }  # fmt: skip


def _format_of(row: Row, where: str) -> str | None:
    """Return the format of a row by its keys; None for a response without a key that tells it."""
    if {"regret", "value", "regret_per_value"} <= row.keys():
        return "asd-calibration"
    if any(key.startswith("acc_") for key in row) and "generated_token_ids" in row:
        return "specdecode-bench"
    if is_failed(row) or (not records_in(row, where) and is_response(row)):
        return None
    if records_in(row, where):
        return "acceptance"
    raise _unknown(row, where)


def _unknown(row: Row, where: str) -> ImportRefused:
    keys = shown(", ".join(list(map(str, row))[:20]))
    return ImportRefused(
        f"the keys {keys or '(none)'} belong to no known format", where=where, fix=f"known: {', '.join(FORMATS)}"
    )


def read(path: Path, kind: str = "auto") -> tuple[str, Any]:
    """Read a file of another tool once, from front to back; returns its format and content.

    Raises
    ------
    UsageError
        On an unknown ``kind``.
    ImportRefused
        On what is not of that format, or under ``auto`` of none.
    """
    if kind not in ("auto", *FORMATS):
        raise unknown_name("format", kind, ["auto", *FORMATS])
    rows: Rows = read_rows(path, error=ImportRefused)
    if kind == "auto":
        ahead: list[tuple[str, Row]] = []
        for where, row in rows:
            ahead.append((where, row))
            known = _format_of(row, where)
            if known is not None:
                kind = known
                break
        rows = chain(ahead, rows)
    chosen = "acceptance" if kind == "auto" else kind  # which says that nothing is there
    return chosen, READERS[chosen](path, rows)
