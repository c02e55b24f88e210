"""``asdsim show``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import TracePath, config_option, counted, json_option, note, note_unfinished, print_json, rule_options

if TYPE_CHECKING:
    from ..evaluate.strips import Walk
    from ..report.terminal import Reader
    from ..rules.settings import Grid
    from ..trace.reader import Trace
    from ..trace.vocabulary import Vocabulary


@click.command("show")
@click.argument("trace", type=TracePath())
@rule_options(required=False)
@click.option("--request", "requests", multiple=True, metavar="ID|ROW", help="Request to show; may be given several "
              "times.")  # fmt: skip
@click.option("--against", default="strict", show_default=True, metavar="SETTING",
              help="What to compare with: strict, 'B=4 g=.25 M=2', 'mars theta=.9'.")  # fmt: skip
@click.option("--largest-regret", type=int, metavar="N", help="Show the N requests that spend the most regret.")
@click.option("--changed-answers", is_flag=True, help="Show the requests whose answers differ, as the scorer of the "
              "task reads them.")  # fmt: skip
@click.option(
    "--first-differences", is_flag=True, help="List the requests whose outputs differ, each with its first difference."
)
@click.option("--off-trace", default="stop", show_default=True, metavar="stop|aligned|recorded",
              help="At a prefix that was not captured: stop, or continue with a marked estimate.")  # fmt: skip
@click.option("--prompt", "whole_prompt", is_flag=True, help="Show whole prompts.")
@click.option("--tokenizer", metavar="NAME|DIR", help="Tokenizer of the target, for a trace without the text of its "
                                                      "tokens.")  # fmt: skip
@click.option("--offline", is_flag=True, help="Use only files on this machine.")
@json_option
@config_option
def command(
    trace: Path, grids: list[Grid] | None, requests: tuple[str, ...], against: str, largest_regret: int | None,
    changed_answers: bool, first_differences: bool, off_trace: str, whole_prompt: bool, tokenizer: str | None,
    offline: bool, as_json: bool,
) -> None:  # fmt: skip
    """Print what one setting did to the outputs of TRACE, token by token.

    A sign and a colour mark each token: = exact, ~ relaxed [and what the target would have chosen], x rejected, > what
    replaced it, + bonus, - verified but discarded, . after the end. Each step shows the ledger before and after it,
    what ended its block, and by how much.

    Without --B, --g and --M the setting is the paper's B = 8, g = .25, M = 2. Without --request, --largest-regret or
    --changed-answers, it lists the requests whose outputs differ.
    """
    from ..evaluate.strips import request_row, walk_of
    from ..report.terminal import Reader
    from ..result import load
    from ..rules.settings import parse_setting
    from ..trace.graph import build_graph

    grid = _one(grids)
    other = parse_setting(against, grid)
    if largest_regret is not None and largest_regret < 1:
        raise UsageError(f"--largest-regret {largest_regret} is below 1", fix="give at least 1")
    source = load(trace)
    note_unfinished(source)
    vocabulary = vocabulary_of(source, tokenizer, offline)
    reader = Reader(vocabulary.text, vocabulary.piece)
    names = source.request_ids()
    chosen = [request_row(names, name) for name in requests]
    sides = []
    for setting in (grid, other):
        graph, policy = build_graph(source, setting.layout), setting.policy(0)
        sides.append([walk_of(source, graph, policy, r, off_trace) for r in chosen or range(len(names))])
    pairs = list(zip(*sides, strict=True))
    picked, unknown = _pick(pairs, source, reader, largest_regret, changed_answers)
    listing = first_differences or not (requests or largest_regret or changed_answers)
    if as_json:
        rows = [_record(pair, source, reader) for pair in picked]
        print_json("show", {"trace": str(trace), "rows": rows, "not_known": [walk.request_id for walk, _ in unknown]})
        return
    if unknown:
        if largest_regret and not changed_answers:
            what = "their regret is known only in part"
        else:
            what = f"whether their {'answers' if changed_answers else 'outputs'} differ is not known"
        note(f"{len(unknown)} of {counted(len(pairs), 'request')} left the captured steps: {what}; run asdsim cover "
             f"{trace} for both settings")  # fmt: skip
    if not picked:
        note("no request to show: " + ("no answer is known to differ" if unknown else
                                       "both settings give the same answers"))  # fmt: skip
    elif listing:
        _list(picked, reader)
    else:
        _print(picked, source, reader, whole_prompt)


def _one(grids: list[Grid] | None) -> Grid:
    """Return the one setting that was asked for; the paper's where none was."""
    from ..rules.settings import Grid

    if grids is None:
        return Grid.product(8.0, 0.25, 2.0)
    number = sum(map(len, grids))
    if number != 1:
        raise UsageError(f"{number} settings given", fix="show takes one: give --B, --g and --M one value each")
    return grids[0]


def vocabulary_of(trace: Trace, tokenizer: str | None = None, offline: bool = False) -> Vocabulary:
    """Return the text of the tokens of a trace: its own, or by a tokenizer that was named.

    Raises
    ------
    UsageError
        If it has no vocabulary and no tokenizer is named.
    CaptureError
        If the tokenizer cannot be had.
    """
    vocabulary = trace.vocabulary
    if tokenizer is not None:
        from ..capture.vocabulary import make_vocabulary, stored_ids
        from ..engines.transformers.text import load_tokenizer

        loaded = load_tokenizer(trace.manifest.target, tokenizer=tokenizer, offline=offline)
        vocabulary = make_vocabulary(loaded, stored_ids(trace.path, trace.manifest))
    if vocabulary is None:
        raise UsageError(
            "the trace lacks the text of its tokens: an older release wrote it", where=str(trace.path),
            fix=f"add --tokenizer {trace.manifest.target.get('name', 'NAME')}",
        )  # fmt: skip
    return vocabulary


def _pick(
    pairs: list[tuple[Walk, Walk]], trace: Trace, reader: Reader, largest_regret: int | None, changed: bool
) -> tuple[list[tuple[Walk, Walk]], list[tuple[Walk, Walk]]]:
    """Return the pairs that the pickers leave, and those of which walks off the trace leave open whether they belong.

    Such a pair is among the former, too, where the known part of its walks puts it there; never for changed answers.
    """
    if changed:
        from ..evaluate.scorers import given_answer, scorer_name

        scorers = [scorer_name(record, {}, False) for record in trace.request_records()]
        if not any(scorers):
            raise UsageError("no task of this trace has answers to compare", fix="use --first-differences")
        unknown = [pair for pair in pairs if scorers[pair[0].request] and not _known(pair)]
        pairs = [
            pair
            for pair in pairs
            if _known(pair)
            and len({given_answer(scorers[walk.request], reader.text(walk.tokens)) for walk in pair}) == 2
        ]
    elif largest_regret is not None:
        unknown = [pair for pair in pairs if not pair[0].exact]
    else:
        unknown = [pair for pair in pairs if not _settled(pair)]
    if largest_regret is not None:
        pairs = sorted(pairs, key=lambda pair: -pair[0].spent)[:largest_regret]
    return pairs, unknown


def _known(pair: tuple[Walk, Walk]) -> bool:
    """Tell whether both outputs are known to their end."""
    return all(walk.exact for walk in pair)


def _settled(pair: tuple[Walk, Walk]) -> bool:
    """Tell whether it is known that two outputs differ, or that they do not: no guess decides."""
    from ..evaluate.strips import parted_at

    sure = min(next((strip.start for strip in walk.strips if strip.estimated), len(walk.tokens)) for walk in pair)
    return _known(pair) or 0 <= parted_at(*pair) < sure


def _record(pair: tuple[Walk, Walk], trace: Trace, reader: Reader) -> dict[str, Any]:
    from ..evaluate.strips import parted_at
    from ..report.terminal import walk_record

    walk, base = pair
    place = parted_at(walk, base)
    record = trace.request_records()[walk.request]
    return {
        "request_id": walk.request_id, "task": record.task, "prompt": record.prompt_text,
        "reference": record.reference, "first_difference": place if place >= 0 else None,
        "walk": walk_record(walk, reader), "against": walk_record(base, reader),
    }  # fmt: skip


def _list(pairs: list[tuple[Walk, Walk]], reader: Reader) -> None:
    """Print one line for each request whose outputs differ, and how many do."""
    from ..evaluate.strips import name_of, parted_at
    from ..report.visible import escaped, shown_token

    walk, base = pairs[0]
    click.echo(f"{name_of(walk.policy)} against {name_of(base.policy)}")
    blank = _blank()
    differ = 0
    for walk, base in pairs:
        place = parted_at(walk, base)
        if place < 0:
            continue
        differ += 1
        ends = [
            shown_token(reader.piece(side.tokens[place]), blank) if place < len(side.tokens) else "(end)"
            for side in (base, walk)
        ]
        strip = next(strip for strip in walk.strips if strip.start + strip.committed > place) if place < len(
            walk.tokens) else walk.strips[-1]  # fmt: skip
        click.echo(
            f"{escaped(walk.request_id):<16} token {place:<4} step {strip.step_id:<4} {ends[0]} -> {ends[1]}"
            f"  relaxed {len(walk.relaxed)}, spent {walk.spent:.2f}"
        )
    unknown = sum(not _settled(pair) for pair in pairs)
    tail = f"; not known for {unknown}: run asdsim cover" if unknown else ""
    click.echo(f"{differ} of {counted(len(pairs), 'output')} differ{tail}")


def _print(pairs: list[tuple[Walk, Walk]], trace: Trace, reader: Reader, whole: bool) -> None:
    from ..evaluate.strips import name_of
    from ..report.terminal import SHARED, legend, show_walk
    from ..report.visible import escaped, wrapped

    columns = max(40, shutil.get_terminal_size((80, 24)).columns)
    manifest = trace.manifest
    click.echo(
        f"target {escaped(str(manifest.target.get('name')))}, drafter {escaped(str(manifest.drafter.get('name')))}, "
        f"K = {manifest.K}"
    )
    click.echo(legend())
    records = trace.request_records()
    for walk, base in pairs:
        record = records[walk.request]
        exact = "exact" if walk.exact else "not exact"
        click.echo()
        title = f"{escaped(walk.request_id)}: {name_of(walk.policy)} against {name_of(base.policy)}, {exact}"
        click.echo(click.style(title, bold=True))
        prompt = record.prompt_text
        cut = "" if whole or len(prompt) <= SHARED else f" ... [{len(prompt) - SHARED} more characters: --prompt]"
        shown = prompt if whole else prompt[:SHARED]
        for line in wrapped("prompt: " + escaped(shown, keep="\n") + cut, columns):
            click.echo(line)
        click.echo()
        for line in show_walk(walk, base, reader, columns=columns, blank=_blank()):
            click.echo(line)


def _blank() -> str:
    """Return a sign for a blank that the output can hold."""
    try:
        "·".encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return "_"
    return "·"
