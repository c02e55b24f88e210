"""Options that several commands share, and how they print."""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError, unknown_name
from ..files import dump_json

SCHEMA_VERSION = 1
"""Of what ``--json`` prints."""


class TracePath(click.Path):
    """A trace directory that is there, looked for while the command line is read: no other error may hide a wrong path.

    Parameters
    ----------
    files : bool
        Whether a file may stand in its place.
    """

    def __init__(self, files: bool = False) -> None:
        super().__init__(path_type=Path)
        self.files = files

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; refuse one that leads nowhere."""
        path = Path(str(super().convert(value, param, ctx)))
        if self.files and not path.exists():
            fix = "give a file or a trace directory"
            raise UsageError("cannot read it: no such file or directory", where=str(path), fix=fix)
        if not self.files and not (path / "manifest.json").exists():
            from ..trace.reader import load_manifest

            load_manifest(path)  # says what is missing
        return path


def _load_config(ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    try:
        table = tomllib.loads(value.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=str(value)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid TOML: {error}", where=str(value)) from None
    from . import COMMANDS

    for key, item in table.items():
        if isinstance(item, dict) and key not in COMMANDS:
            raise UsageError(f"{value}: {unknown_name('table', key, list(COMMANDS))}")
    section = table.get(ctx.info_name or "", {})
    if not isinstance(section, dict):
        raise UsageError(f"{ctx.info_name!r} is not a table", where=str(value), fix=f"write [{ctx.info_name}]")
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
            raise UsageError(f"{value}: {unknown_name('key', key, list(known))}")
        if isinstance(item, dict):
            raise UsageError(f"key {key!r} is a table", where=str(value), fix=f"write {key} = VALUE")
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
        "--config", type=click.Path(path_type=Path), callback=_load_config, is_eager=True, expose_value=False,
        help="TOML file with defaults for these flags; a table named after the command may hold them, one of another "
        "command is passed over.",
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


def rule_options(required: bool = True, *, exact: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that name settings of a rule; the command gets them as ``grids``, a list of Grid.

    ``grids`` is None where nothing was given and nothing is ``required``. With ``exact`` the command also gets
    ``upper``: None, or under ``--B exact[:UPPER]`` the largest budget; the B of the grids is then 0.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            chosen = {name: given.pop(name) for name in RULE_FLAGS}
            if exact:
                given["upper"] = upper = _upper(chosen["B"])
                if upper is not None and chosen["rule"] == "asd":
                    if chosen["ledger"] == "none":
                        raise UsageError("--B exact with --ledger none: no budget is looked at")
                    chosen["B"] = "0"
            return function(grids=grids_of(required, **chosen), **given)

        return rule_flags(exact)(command)

    return add


RULE_FLAGS = ("B", "g", "M", "rule", "param", "semantics", "regret", "value", "ledger", "no_gate")


def rule_flags(exact: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of :data:`RULE_FLAGS` as they are; :func:`grids_of` reads them."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        axis = "Comma list and inclusive ranges start:stop:step; inf allowed."
        every = " exact, or exact:UPPER: every B at which something changes." if exact else ""
        options = (
            click.option("--B", "B", metavar="LIST", help=f"Regret budget per request, in logits. {axis}{every}"),
            click.option("--g", "g", metavar="LIST", help="Gate on regret / suffix value, in logits."),
            click.option("--M", "M", metavar="LIST", help="Cap on relaxed tokens per block."),
            click.option("--rule", default="asd", show_default=True, help="Acceptance rule; see asdsim rules."),
            click.option("-p", "--param", multiple=True, metavar="NAME=LIST",
                         help="Parameter of another rule than asd; may be given several times."),
            click.option("--semantics", default="paper", show_default=True, help="asd: which reading of it, "
                         "paper|core|dspark|lightllm."),
            click.option("--regret", default="logit", show_default=True, help="asd: logit, z(y) - z(x), or "
                         "probability, p(y) - p(x) from 0 to 1. B, ledger, figures of regret and the closeness to "
                         "another decision are in its unit, g in that per suffix value."),
            click.option("--value", default="", metavar="SCHEME",
                         help="asd: suffix|normalised|reciprocal|unit|reuse, if not that of the semantics."),
            click.option("--ledger", default="request", show_default=True, help="asd: request|block|none."),
            click.option("--no-gate", is_flag=True, help="asd: without the gate."),
        )  # fmt: skip
        command_with: Callable[..., Any] = command
        for option in reversed(options):
            command_with = option(command_with)
        return command_with

    return add


def _upper(B: str | None) -> float | None:
    """Return the end of ``exact[:UPPER]``, None for a B that is a list."""
    from ..rules.settings import parse_axis

    word, colon, end = (B or "").strip().partition(":")
    if word != "exact":
        return None
    if not colon:
        return math.inf
    values = parse_axis("B", end)
    if len(values) != 1:
        raise UsageError(f"B={B!r} names {len(values)} ends", fix="write exact or exact:UPPER")
    return values[0]


def grids_of(
    required: bool, B: str | None, g: str | None, M: str | None, rule: str, param: tuple[str, ...], semantics: str,
    regret: str, value: str, ledger: str, no_gate: bool,
) -> Any:  # fmt: skip
    """Return the settings that the rule options name, a list of Grid; None where none was given nor is required.

    Raises
    ------
    UsageError
        On options that do not belong together, or settings that do not exist.
    """
    from ..rules import get_rule
    from ..rules.settings import Grid, rule_grids

    if rule != "asd":
        get_rule(rule)
        given: dict[str, Any] = {}
        for item in param:
            name, equals, text = item.partition("=")
            if not equals or not text:
                raise UsageError(f"--param {item!r} is not NAME=LIST", fix="write for example --param theta=.8,.9")
            given[name.strip()] = text.strip()
        for name, axis in (("B", B), ("g", g), ("M", M)):
            if axis is not None:
                raise UsageError(f"--{name} belongs to rule asd", fix=f"rule {rule} takes -p NAME=LIST")
        return rule_grids(rule, given)
    if param:
        raise UsageError("--param belongs to another rule than asd", fix="name one with --rule")
    if ledger == "none":
        B = B or "inf"
    if no_gate:
        g = g or "inf"
    missing = [f"'--{name}'" for name, axis in (("B", B), ("g", g), ("M", M)) if axis is None]
    if len(missing) == 3 and not required:
        return None
    if B is None or g is None or M is None:
        raise UsageError(f"Missing option {missing[0]}", fix="--B, --g and --M belong together")
    return [Grid.product(B, g, M, semantics, regret=regret, value=value, ledger=ledger, gate=not no_gate)]


def check_table(path: Path | None) -> None:
    """Refuse a name of a table to write that tells no format.

    Raises
    ------
    UsageError
        If its ending is neither .parquet nor .csv.
    """
    if path is not None and path.suffix not in (".parquet", ".csv"):
        raise UsageError(f"cannot tell the format of {path}", fix="name a file that ends in .parquet or .csv")


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


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    click.echo(f"| {' | '.join(header)} |")
    click.echo("|---" * len(header) + "|")
    for row in rows:
        click.echo(f"| {' | '.join(row)} |")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular where it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def note(text: str) -> None:
    """Print a remark for people on stderr."""
    click.echo(text, err=True)


def note_unfinished(trace: Any) -> None:
    """Say so where a capture was not finished: figures then stand on the requests that are there."""
    from ..trace.manifest import PLANNED

    there, planned = len(trace.request_ids()), trace.manifest.notes.get(PLANNED, 0)
    if planned > there:
        note(f"{trace.path}: {there} of {planned} requests; the capture was not finished, --resume goes on")


def progress_bar(total: int, what: str, unit: str) -> Any:
    """Return a tqdm bar on stderr, silent where that is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, file=sys.stderr, disable=None, leave=False)
