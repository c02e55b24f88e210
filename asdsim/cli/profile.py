"""``asdsim profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..files import has_folder
from .common import (
    OutputPath,
    TracePath,
    config_option,
    json_option,
    note,
    print_json,
    print_rows,
    progress_bar,
    threads_option,
)


def _sizes(name: str, text: str) -> list[int]:
    from ..rules.settings import unfold

    sizes = unfold(name, text)
    if any(not (size >= 1 and float(size).is_integer()) for size in sizes):
        raise UsageError(f"--{name} {text}: not all are whole numbers from 1 on", fix="write for example 1,2,4,8")
    return sorted(map(int, sizes))


@click.command("profile")
@click.argument("trace", type=TracePath())
@click.option("-o", "--output", type=OutputPath(), required=True, help="Table to write: .csv or .json.")
@click.option("--batch", default="1,2,4,8", show_default=True, metavar="LIST", help="Requests of a pass.")
@click.option("--width", metavar="LIST", show_default="1, 2, 4 and the trace's K + 1",
              help="Tokens of each request in a pass: 1 for the target alone, K + 1 for a verification.")  # fmt: skip
@click.option("--rounds", default=3, show_default=True, help="Rounds over the table.")
@click.option("--iterations", default=4, show_default=True, help="Iterations of a cell in a round, the first left out.")
@click.option("--target", help="Where the target is now, if no longer under its recorded name.")
@click.option("--drafter", help="The same for the drafter.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@threads_option
@json_option
@config_option
def command(
    trace: Path, output: Path, batch: str, width: str | None, rounds: int, iterations: int, target: str | None,
    drafter: str | None, offline: bool, as_json: bool,
) -> int:  # fmt: skip
    """Measure passes and drafts of the models of TRACE, on its own requests, and write a table for --cost.

    Exit status 1 if the machine was not still; the table is written all the same.
    """
    if output.suffix not in (".csv", ".json") or not has_folder(output):
        raise UsageError(
            f"cannot write {output}", fix="name a file that ends in .csv or .json, in a folder that exists"
        )
    from ..capture.reload import load_pair
    from ..live.profile import profile
    from ..result import load

    source = load(trace)
    K = source.manifest.num_draft_tokens
    batches, widths = _sizes("batch", batch), _sizes("width", width or ",".join(map(str, {1, 2, 4, K + 1})))
    if widths[-1] > K + 1:
        raise UsageError(f"--width {widths[-1]} is more than the trace's K + 1 = {K + 1}", fix="give smaller widths")
    models = load_pair(source.manifest, target=target, drafter=drafter, offline=offline)
    with progress_bar(rounds * len(batches) * len(widths), "profile", "cell") as bar:
        measured = profile(models, source.request_records(), batches, widths, rounds=rounds, iterations=iterations,
                           progress=bar.update)  # fmt: skip
    _write(measured.rows, output)
    note(f"wrote {output}")
    if as_json:
        payload: dict[str, Any] = {"rows": measured.rows, "spread": measured.spread, "problems": measured.problems}
        print_json("profile", {"trace": str(trace), "output": str(output), **payload})
    else:
        passes = [row for row in measured.rows if "width" in row]
        print_rows(
            ["batch", "width", "pass (ms)", "draft (ms)", "context"],
            [[f"{row['batch']}", f"{row['width']}", f"{row['milliseconds']:.2f}", f"{row['draft_milliseconds']:.2f}",
              f"{row['context']:.0f}"] for row in passes],
        )  # fmt: skip
        click.echo(f"half the quartiles' distance is at most {measured.spread:.0%} of the median of a cell")
    for problem in measured.problems:
        note(problem)
    return 1 if measured.problems else 0


def _write(rows: list[dict[str, Any]], output: Path) -> None:
    from ..files import dump_json, write_atomically

    if output.suffix == ".json":
        write_atomically(output, dump_json(rows, indent=1) + "\n")
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    write_atomically(output, "\n".join(lines) + "\n")
