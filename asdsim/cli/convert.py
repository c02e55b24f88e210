"""``asdsim convert``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import OutputPath, TracePath, counted, json_option, note, print_json, rule_options
from .streaming import Streaming, stream_options

if TYPE_CHECKING:
    from ..rules.settings import Grid

RANGES = "vllm-ranges"
NOT_REPLAYABLE = "a regret sample, not replayable: the file holds only first rejections with a positive regret"


@click.command("convert")
@click.argument("source", type=TracePath(files=True))
@click.option("--from", "kind", default="auto", show_default=True,
              metavar="auto|acceptance|asd-calibration|specdecode-bench", help="Format of a SOURCE file.")  # fmt: skip
@click.option("-o", "--output", type=OutputPath(), help="File to write: .jsonl, or .parquet for regrets.")
@click.option("--to", "engine", metavar="vllm-synthetic|sglang-sim|trtllm|aiconfigurator|dynamo|inference-sim|"
              "vllm-ranges", help="Print, from a trace, the input of a simulator or of an engine's simulator mode; "
              "from the file of asdsim advise --json, vLLM's draft lengths by batch.")  # fmt: skip
@rule_options(required=False)
@stream_options
@json_option
def command(
    source: Path, grids: list[Grid] | None, kind: str, output: Path | None, engine: str | None, streaming: Streaming,
    as_json: bool,
) -> None:  # fmt: skip
    """Read SOURCE, another tool's file, or write the acceptance records of a trace.

    A trace directory is replayed under one setting (strict without one) and comes out as one acceptance record per
    request, as AIPerf and vLLM write them. Every invariant of acceptance records is checked. ASD's calibration rows are
    a sample of regrets and cannot be replayed. SpecDecode-Bench rows are replayed with strict matching at every draft
    length.

    With --to, print the acceptance rates that make a stock engine run as fast as under that setting, without a patch.
    vllm-ranges takes what asdsim advise --json wrote.
    """
    if engine == RANGES:
        payload, lines = _ranges(source, grids, output)
    elif source.is_dir():
        payload, lines = _trace(source, grids, output, engine, as_json, streaming)
    elif engine is not None:
        raise UsageError("rates for an engine come from a trace", fix="name a trace directory")
    else:
        if grids is not None:
            raise UsageError("a setting applies only to a trace", fix="name a trace directory")
        payload, lines = _file(source, kind, output)
    if as_json:
        print_json("convert", {"source": source, **payload})
        return
    for line in lines:
        click.echo(line)


def _trace(
    source: Path, grids: list[Grid] | None, output: Path | None, engine: str | None, as_json: bool, streaming: Streaming
) -> tuple[dict[str, Any], list[str]]:
    from ..formats.acceptance import all_left, each_acceptance, sum_into, summary_of
    from ..rules.settings import STRICT
    from ..trace.store import graph_of

    if grids is not None and (len(grids) != 1 or len(grids[0]) != 1):
        raise UsageError(f"{sum(map(len, grids))} settings given", fix="give one value of each parameter")
    policy = grids[0].policy(0) if grids else STRICT
    left = 0
    total: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []

    def records() -> Iterator[dict[str, Any]]:
        nonlocal left
        trace = streaming.open(source)
        for row in each_acceptance(graph_of(trace, policy.layout), policy):
            if row is None:
                left += 1
                continue
            sum_into(total, row)
            if as_json:  # one object holds them all
                rows.append(row)
            yield row
        if left and not total:
            raise all_left(trace, policy, left)

    if engine is None and output is not None:
        _write(output, records())
    else:
        deque(records(), maxlen=0)
    totals = [total] if total else []
    if engine is not None:
        if left:
            raise UsageError(
                f"{counted(left, 'request')} left the trace under {policy}: the others are a biased sample",
                where=str(source), fix="run asdsim cover for this setting",
            )  # fmt: skip
        return _rates(engine, totals, policy, output)
    if left:
        note(f"left out: {counted(left, 'request')} that left the trace under {policy}")
    payload = {"format": "acceptance", "setting": str(policy), "left_out": left, "rows": rows}
    return payload, [_totals(summary_of(totals))]


def _rates(
    engine: str, records: list[dict[str, Any]], policy: Any, output: Path | None
) -> tuple[dict[str, Any], list[str]]:
    from ..formats.engines import rates_of, settings_for

    rates = rates_of(records)
    settings = settings_for(engine, rates)
    if policy.layout.threshold:
        settings["notes"].append(
            "this setting cuts drafts by a threshold; the engine verifies whole ones, and is slower"
        )
    payload = {
        "format": engine, "setting": str(policy), "num_spec_steps": rates.steps,
        "mean_acceptance_length": 1 + rates.accepted, "unconditional": rates.unconditional,
        "conditional": rates.conditional, **settings,
    }  # fmt: skip
    _write(output, [payload])
    lines = [
        f"{policy}: {1 + rates.accepted:.3f} tokens/step over {counted(rates.steps, 'step')}",
        "accepted up to position, of all steps:     " + " ".join(f"{rate:.3f}" for rate in rates.unconditional),
        "accepted at position, where it is reached: " + " ".join(f"{rate:.3f}" for rate in rates.conditional),
        *_shown(settings),
    ]
    return payload, lines


def _ranges(source: Path, grids: list[Grid] | None, output: Path | None) -> tuple[dict[str, Any], list[str]]:
    from ..files import read_json
    from ..formats.engines import ranges_for_vllm

    if source.is_dir() or grids is not None:
        raise UsageError(
            "draft lengths by batch come from advice, which needs a cost",
            fix=f"run asdsim advise TRACE --cost .. --json > advice.json, and name that file with --to {RANGES}",
        )
    settings = ranges_for_vllm(read_json(source), str(source))
    payload = {"format": RANGES, **settings}
    _write(output, [payload])
    return payload, _shown(settings)


def _shown(settings: dict[str, Any]) -> list[str]:
    from ..files import dump_json

    return [
        *(f"{name}={value}" for name, value in settings["environment"].items()),
        *(f"{name}: {value if isinstance(value, str) else dump_json(value)}"
          for name, value in settings["options"].items()),
        *(f"note: {text}" for text in settings["notes"]),
    ]  # fmt: skip


def _file(source: Path, kind: str, output: Path | None) -> tuple[dict[str, Any], list[str]]:
    from ..formats.acceptance import read, summary_of

    chosen, found = read(source, kind)
    if chosen == "acceptance":
        if found.failed or found.without:
            note(
                f"left out: {counted(found.failed, 'request')} that failed, {found.without} without statistics of "
                "speculative decoding"
            )
        _write(output, found.rows)
        total = summary_of(found.rows)
        payload = {"format": chosen, "replayable": False, "failed": found.failed, "without_statistics": found.without,
                   "summary": total, "rows": found.rows}  # fmt: skip
        return payload, [_totals(total)]
    if chosen == "asd-calibration":
        quartiles = found.quartiles()
        if output is not None and output.suffix == ".parquet":
            import pyarrow as pa

            from ..trace.writer import write_table

            table = pa.table({"regret": found.regret, "value": found.value, "regret_per_value": found.ratio})
            write_table(table, output, {"asdsim": {"replayable": False, "source": source.name, "note": NOT_REPLAYABLE}})
            note(f"wrote {output}")
        else:
            _write(output, [{**row, "replayable": False} for row in found.rows])
        note(NOT_REPLAYABLE)
        payload = {"format": chosen, "replayable": False, "note": NOT_REPLAYABLE, "rejections": len(found.rows),
                   "regret_per_value_quartiles": quartiles}  # fmt: skip
        return payload, [
            f"{len(found.rows)} first rejections; regret / value at 25, 50 and 75 %: "
            + ", ".join(f"{q:.6g}" for q in quartiles)
        ]
    for part in found:
        short, surplus = part.uneven
        if short or surplus:
            note(
                f"{part.drafter}: of {len(part.generated)} rows {short} have fewer acceptance lengths than tokens, and "
                f"end there; {surplus} have more, which are left out"
            )
    rows = [part.replay(K) for part in found for K in range(1, part.longest + 1)]
    _write(output, rows)
    note("replayable for strict matching and draft length only: the file holds no logits")
    lines = ["| drafter | K | tokens/step | accepted/step | steps |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['drafter']} | {row['K']} | {row['mean_acceptance_length'] or float('nan'):.3f} "
        f"| {row['accepted_per_proposal'] or 0.0:.3f} | {row['num_spec_steps']} |"
        for row in rows
    ]
    return {"format": chosen, "replayable": "strict, draft length", "rows": rows}, lines


def _write(output: Path | None, rows: Iterable[dict[str, Any]]) -> None:
    if output is None:
        return
    if output.suffix != ".jsonl":
        raise UsageError(f"cannot tell the format of {output}", fix="name a file that ends in .jsonl")
    from ..files import dump_json, write_made

    number = 0

    def lines() -> Iterator[bytes]:
        nonlocal number
        for row in rows:
            number += 1
            yield (dump_json(row) + "\n").encode()

    write_made(output, lambda file: file.writelines(lines()))
    note(f"wrote {counted(number, 'row')} to {output}")


def _totals(total: dict[str, Any]) -> str:
    length, accepted = total["mean_acceptance_length"], total["accepted_per_proposal"]
    return f"{counted(total['requests'], 'request')}, {counted(total['num_spec_steps'], 'step')}: " + (
        f"{length:.3f} tokens/step, {accepted:.3f} accepted/step" if length is not None else "no step"
    )
