"""Options that several commands share, and how they print."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import Problems, UsageError, unknown_name
from ..files import dump_json, has_folder, is_remote, reaching, read_text, shown, to_path
from .command import is_quiet, progress_bar, threads_option

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = [
    "SCHEMA_VERSION", "OutputPath", "PathOrUrl", "TracePath", "check_table", "config_option", "counted", "grid_options",
    "json_option", "note", "note_unfinished", "placing_options", "print_json", "print_memory", "progress_bar",
    "rule_options", "threads_option",
]  # fmt: skip

SCHEMA_VERSION = 1
"""Of what ``--json`` prints."""


class PathOrUrl(click.ParamType[Path]):
    """A path of this machine, or a URL of an object store; see :func:`asdsim.files.to_path`."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path."""
        return to_path(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a file."""
        return click.Path().shell_complete(ctx, param, incomplete)


class TracePath(PathOrUrl):
    """A trace directory that is there, looked for while the command line is read: no other error may hide a wrong path.

    Parameters
    ----------
    files : bool
        Whether a file may stand in its place.
    """

    def __init__(self, files: bool = False) -> None:
        self.files = files

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; refuse one that leads nowhere."""
        path = super().convert(value, param, ctx)
        with reaching(path):
            if path.name == "manifest.json" and path.is_file():
                path = path.parent  # the trace that it belongs to
            if self.files and not path.exists():
                fix = "give a file or a trace directory"
                raise UsageError("cannot read it: no such file or directory", where=str(path), fix=fix)
            if not self.files and not (path / "manifest.json").exists():
                from ..trace.reader import load_manifest

                load_manifest(path)  # says what is missing
        return path


TRACE_FILE = re.compile(r"manifest\.json|(requests|steps|positions|vocabulary)-.*\.parquet")


class OutputPath(PathOrUrl):
    """A file to write, which must not be one of the files of a trace."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; refuse one that would overwrite a trace's manifest or tables."""
        path = super().convert(value, param, ctx)
        with reaching(path):
            for file in (path, *([] if is_remote(path) else [Path(os.path.realpath(path))])):
                if TRACE_FILE.fullmatch(file.name) and (file.parent / "manifest.json").exists():
                    fix = "name a file outside the trace directory"
                    raise UsageError("is part of a trace, and will not be overwritten", where=shown(path), fix=fix)
        return path


def _toml_fix(text: str, error: Exception) -> str:
    """Return what to write where a number lacks a digit on one side of its point, which TOML wants and flags do not."""
    place = re.search(r"line (\d+)", str(error))
    lines = text.split("\n")
    line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else lines[-1]
    number = re.search(r"(?<![\w.\"'])([-+]?)(?:\.(\d+)|(\d+)\.)(?![\w.])", line.partition("#")[0])
    return f"write {number[1]}{number[3] or 0}.{number[2] or 0}" if number else ""


def _load_config(ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    text = read_text(value)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of more digits than Python reads
        raise UsageError(
            f"not valid TOML: {str(error)[:200]}", where=shown(value), fix=_toml_fix(text, error)
        ) from None
    from . import COMMANDS

    for key, item in table.items():
        if isinstance(item, dict) and key not in COMMANDS:
            raise UsageError(str(unknown_name("table", shown(key), list(COMMANDS))), where=shown(value))
    section = table.get(ctx.info_name or "", {})
    if not isinstance(section, dict):
        raise UsageError(f"{ctx.info_name!r} is not a table", where=shown(value), fix=f"write [{ctx.info_name}]")
    values = {**{key: item for key, item in table.items() if not isinstance(item, dict)}, **section}
    known = {
        option.lstrip("-").replace("-", "_"): parameter
        for parameter in ctx.command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    defaults: dict[str, Any] = {}
    for key, item in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise UsageError(str(unknown_name("key", shown(key), list(known))), where=shown(value))
        if isinstance(item, dict):
            raise UsageError(f"key {key!r} is a table", where=shown(value), fix=f"write {key} = VALUE")
        parameter = known[name]
        if getattr(parameter, "multiple", False):
            item = item if isinstance(item, list) else [item]
        elif isinstance(item, list):
            item = ",".join(map(str, item))
        defaults[parameter.name or ""] = item
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return value


def config_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config FILE``: a TOML file whose keys are flags; flags given on the command line win."""
    return click.option(
        "--config", type=PathOrUrl(), callback=_load_config, is_eager=True, expose_value=False,
        help="TOML file with defaults for these flags, at the top level or in a table named after the command. "
             "Tables of other commands are ignored.",
    )(function)  # fmt: skip


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(function)


def grid_options(
    budget: str | None = None, gate: str | None = None, cap: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--B``, ``--g`` and ``--M``; an axis without a default is required."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for flag, default, text in (
            ("M", cap, "Cap on relaxed tokens per block."),
            ("g", gate, "Gate on regret / suffix value, in logits."),
            ("B", budget, "Regret budget per request, in logits."),
        ):
            given: dict[str, Any] = (
                {"required": True} if default is None else {"default": default, "show_default": True}
            )
            function = click.option(
                f"--{flag}", flag, metavar="LIST", **given,
                help=f"{text} Comma list and inclusive ranges start:stop:step; inf allowed.",
            )(function)  # fmt: skip
        return function

    return add


def rule_options(
    required: bool = True, *, exact: bool = False, checks: Mapping[str, Callable[[Any], Any]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that name settings of a rule; the command gets them as ``grids``, a list of Grid.

    ``grids`` is None where nothing was given and nothing is ``required``. With ``exact`` the command also gets
    ``upper``: None, or under ``--B exact[:UPPER]`` the largest budget (the B of the grids is then 0); and ``varied``:
    how ASD is varied, since B, g and M may then all be left out. ``checks`` are made of other options by name, and what
    they refuse is reported with what is wrong about the settings.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            chosen = {name: given.pop(name) for name in RULE_FLAGS}
            varied = {name: chosen[name] for name in ("semantics", "regret", "value", "ledger")}
            varied["gate"] = not chosen["no_gate"]
            problems = Problems()
            if exact:
                given["varied"] = varied
                given["upper"] = upper = problems.check(_upper, chosen["B"], chosen["ledger"])
                if upper is not None and chosen["rule"] == "asd":
                    chosen["B"] = "0"
            axes = any(chosen[name] is not None for name in ("B", "g", "M", "K", "draft_threshold"))
            axes |= chosen["draft_stop"] != "after"
            if exact and chosen["rule"] == "asd" and not axes and not chosen["param"]:
                grids = problems.check(_vary, varied)
            else:
                grids = problems.check(grids_of, required, **chosen)
            for name, test in (checks or {}).items():
                problems.check(test, given[name])
            problems.end()
            return function(grids=grids, **given)

        return rule_flags(exact)(command)

    return add


def _vary(varied: dict[str, Any]) -> None:
    """Refuse variations of ASD that do not exist."""
    from ..rules.settings import Grid

    Grid.product(0, 0, 0, **varied)


RULE_FLAGS = (
    "B",
    "g",
    "M",
    "K",
    "draft_threshold",
    "draft_stop",
    "rule",
    "param",
    "semantics",
    "regret",
    "value",
    "ledger",
    "no_gate",
)


def rule_flags(exact: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of :data:`RULE_FLAGS` as they are; :func:`grids_of` reads them."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        axis = "Comma list and inclusive ranges start:stop:step; inf allowed."
        every = " Or exact, or exact:UPPER, for every B at which something changes." if exact else ""
        options = (
            click.option("--B", "B", metavar="LIST", help=f"Regret budget per request, in logits. {axis}{every}"),
            click.option("--g", "g", metavar="LIST", help="Gate on regret / suffix value, in logits."),
            click.option("--M", "M", metavar="LIST", help="Cap on relaxed tokens per block."),
            click.option("--K", "K", metavar="LIST", help="Draft lengths to cut the recorded blocks to, such as 3 or "
                         "1:7; rule truncate takes -p K=LIST.  [default: whole blocks]"),
            click.option("--draft-threshold", metavar="LIST", help="asd: cut a block where the drafter's probability "
                         "of a token falls below this; 0 never.  [default: 0]"),
            click.option("--draft-stop", default="after", show_default=True, help="after: that token is the last one "
                         "verified; before: it is dropped; product: as before, with the product over the block."),
            click.option("--rule", default="asd", show_default=True, help="Acceptance rule; see asdsim rules."),
            click.option("-p", "--param", multiple=True, metavar="NAME=LIST",
                         help="Parameter of a rule other than asd; may be given several times."),
            click.option("--semantics", default="paper", show_default=True, help="asd: reading of the rule, "
                "paper|core|dspark|lightllm."),
            click.option("--regret", default="logit", show_default=True, help="asd: regret as logit, z(y) - z(x), or "
                "probability, p(y) - p(x) from 0 to 1. B, the ledger, figures of regret and decision margins are in "
                "its unit, g in that unit per suffix value."),
            click.option("--value", default="", metavar="SCHEME",
                         help="asd: suffix|normalised|reciprocal|unit|reuse. The default follows --semantics."),
            click.option("--ledger", default="request", show_default=True, help="asd: request|block|none."),
            click.option("--no-gate", is_flag=True, help="asd: drop the gate."),
        )  # fmt: skip
        command_with: Callable[..., Any] = command
        for option in reversed(options):
            command_with = option(command_with)
        return command_with

    return add


def _upper(B: str | None, ledger: str) -> float | None:
    """Return the end of ``exact[:UPPER]``, None for a B that is a list."""
    from ..rules.settings import parse_axis

    word, colon, end = (B or "").strip().partition(":")
    if word != "exact":
        return None
    if ledger == "none":
        raise UsageError("--B exact needs a budget, and --ledger none has none")
    if not colon:
        return math.inf
    values = parse_axis("B", end)
    if len(values) != 1:
        raise UsageError(f"B={B!r} names {len(values)} upper bounds", fix="write exact or exact:UPPER")
    return values[0]


def grids_of(
    required: bool, B: str | None, g: str | None, M: str | None, K: str | None, draft_threshold: str | None,
    draft_stop: str, rule: str, param: tuple[str, ...], semantics: str, regret: str, value: str, ledger: str,
    no_gate: bool,
) -> Any:  # fmt: skip
    """Return the settings that the rule options name, a list of Grid; None where none was given nor is required.

    Raises
    ------
    UsageError
        On options that do not belong together, or settings that do not exist.
    """
    from ..rules import get_rule
    from ..rules.settings import Grid, axis_values, parse_lengths, parse_thresholds, rule_grids

    if rule != "asd":
        get_rule(rule)
        given: dict[str, Any] = {}
        for item in param:
            name, equals, text = item.partition("=")
            if not equals or not text:
                raise UsageError(f"--param {item!r} is not NAME=LIST", fix="write for example --param theta=.8,.9")
            given[name.strip()] = text.strip()
        for name, axis in (("B", B), ("g", g), ("M", M), ("K", K), ("draft-threshold", draft_threshold)):
            if axis is not None:
                raise UsageError(f"--{name} belongs to rule asd", fix=f"rule {rule} takes -p NAME=LIST")
        return rule_grids(rule, given)
    if param:
        raise UsageError("--param is for rules other than asd", fix="name one with --rule")
    varied: dict[str, Any] = {"regret": regret, "value": value, "ledger": ledger}
    if draft_stop != "after" and draft_threshold is None:
        raise UsageError("--draft-stop has no effect without a threshold", fix="give --draft-threshold as well")
    if B is None and g is None and M is None and not required:
        usual = {"semantics": "paper", "regret": "logit", "value": "", "ledger": "request", "K": None,
                 "draft_threshold": None, "no_gate": False}  # fmt: skip
        for name, flag in (("semantics", semantics), *varied.items(), ("K", K), ("draft_threshold", draft_threshold),
                           ("no_gate", no_gate)):  # fmt: skip
            if flag != usual[name]:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} has no effect without settings", fix="give --B, --g and --M as well")
        return None
    axes: dict[str, Any] = {"B": B or "inf" if ledger == "none" else B, "g": g or "inf" if no_gate else g, "M": M}
    missing = [f"'--{name}'" for name, axis in axes.items() if axis is None]
    problems = Problems()
    if missing:
        text = f"Missing option{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        problems.errors.append(UsageError(text, fix="give --B, --g and --M together"))
    for name, axis in axes.items():
        if axis is not None:
            problems.check(axis_values, name, axis)
    problems.check(_vary, {"semantics": semantics, **varied})
    lengths = [0] if K is None else problems.check(parse_lengths, K)
    taus = [0.0] if draft_threshold is None else problems.check(parse_thresholds, draft_threshold, draft_stop)
    problems.end()
    return [
        Grid.product(**axes, semantics=semantics, gate=not no_gate, K=length, draft_threshold=tau,
                     draft_stop=draft_stop, **varied)
        for length in lengths for tau in taus
    ]  # fmt: skip


def placing_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device-map``, ``--tp``, ``--quantize`` and ``--fit``: how a target that is large is loaded."""
    options = (
        click.option("--device-map", metavar="auto|FILE", help="Spread the target's layers over all GPUs, or as a JSON "
                     "file says: devices by module."),
        click.option("--tp", type=int, metavar="N", help="Share each layer of the target among N processes, started by "
                     "torchrun --nproc-per-node N -m asdsim .. (tensor parallelism)."),
        click.option("--quantize", metavar="4bit|8bit", help="Round the target's weights while loading (bitsandbytes): "
                     "NF4 or LLM.int8()."),
        click.option("--fit", "memory", default="check", show_default=True, metavar="MODE",
                     help="check: refuse to load what does not fit; plan: print what it takes and load nothing, "
                     "plan:8x80 for 8 GPUs of 80 GB; ignore: load without a look."),
    )  # fmt: skip
    command: Callable[..., Any] = function
    for option in reversed(options):
        command = option(command)
    return command


def print_memory(command: str, memory: Any, as_json: bool) -> int:
    """Print a memory plan; return the exit status, 1 where it does not fit."""
    from ..capture.memory import gb

    if as_json:
        print_json(command, {"memory": memory.to_dict()})
        return 0 if memory.fits else 1
    rows = [
        [part.device, *map(gb, (part.weights, part.kv, part.activations, part.context, part.total)),
         "-" if part.free is None else gb(part.free), "yes" if part.fits else "no"]
        for part in memory.parts
    ]  # fmt: skip
    print_rows(["device", "weights", "KV cache", "activations", "context", "in all", "free", "fits"], rows, align=True)
    click.echo(f"computed, not measured; weights {gb(memory.target_weights)}"
               + (f", drafter {gb(memory.drafter_weights)}" if memory.drafter_weights else "")
               + f", KV cache {memory.kv_per_token / 1024:.1f} KB a token")  # fmt: skip
    for text in (*memory.notes, *memory.hints):
        note(f"asdsim: {text}")
    return 0 if memory.fits else 1


def check_threads(threads: int) -> None:
    """Refuse a negative number of threads."""
    if threads < 0:
        raise UsageError(f"--threads {threads} is negative")


def check_table(path: Path | None) -> None:
    """Refuse a name of a table to write that tells no format, or whose folder is not there.

    Raises
    ------
    UsageError
        If its ending is neither .parquet nor .csv.
    """
    if path is not None and path.suffix not in (".parquet", ".csv"):
        raise UsageError(f"cannot tell the format of {path}", fix="name a file that ends in .parquet or .csv")
    if path is not None and not has_folder(path):
        raise UsageError("no such directory", where=str(path.parent))


def print_json(command: str, payload: dict[str, Any]) -> None:
    """Print one machine-readable object; NaN has no place in JSON and becomes null, an infinity ``"inf"``."""
    click.echo(dump_json({"schema_version": SCHEMA_VERSION, "command": command, **payload}))


def with_interval(values: Sequence[float | None] | None, form: str = "{:.3f}", scale: float = 1.0) -> str:
    """Return a figure as text: ``1.23 [1.10, 1.30]`` with its 95 % interval, the value alone without one, or a dash.

    Parameters
    ----------
    values : (value, low, high) or None
        None or NaN where there is none.
    form : str
        Format of one number.
    scale : float
        Factor on all three, such as 100 for per cent.
    """
    known = [value for value in values or () if value is not None and not math.isnan(value)]
    if not known or values is None or values[0] is None:
        return "-"
    text = [form.format(scale * value) for value in known]
    return f"{text[0]} [{text[1]}, {text[2]}]" if len(text) == 3 else text[0]


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]], *, align: bool = False) -> None:
    """Print a Markdown table; ``align`` pads its cells, for tables of many narrow columns."""
    held = [header, *rows]
    width = [max(len(row[n]) for row in held) if align else 0 for n in range(len(header))]
    for nth, row in enumerate(held):
        click.echo(f"| {' | '.join(cell.ljust(wide) for cell, wide in zip(row, width, strict=True))} |")
        if nth == 0:
            click.echo("".join(f"|{'-' * max(3, wide + 2)}" for wide in width) + "|")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular where it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def note(text: str) -> None:
    """Print a remark for people on stderr, unless ``--quiet``."""
    if not is_quiet():
        click.echo("\n".join(map(shown, text.split("\n"))), err=True)


def note_unfinished(trace: Any) -> None:
    """Note that a capture is not finished: figures then cover only the requests that are there."""
    note_planned(trace.path, trace.manifest)


def note_planned(path: Path, manifest: Any) -> None:
    """Do what :func:`note_unfinished` does, before the trace is read."""
    there = sum(shard.rows for shard in manifest.shards_of("requests"))
    if manifest.planned > there:
        note(f"{path}: {there} of {manifest.planned} requests; the capture is not finished, --resume continues it")
