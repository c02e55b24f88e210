"""Options that several commands share, and how they print."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError, unknown_name

SCHEMA_VERSION = 1
"""Of what ``--json`` prints."""


def _load_config(ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    try:
        table = tomllib.loads(value.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=str(value)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid TOML: {error}", where=str(value)) from None
    section = table.get(ctx.info_name or "", {})
    values = {**{key: item for key, item in table.items() if not isinstance(item, dict)}, **section}
    known = {
        option.lstrip("-").replace("-", "_"): parameter.name or ""
        for parameter in ctx.command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    defaults: dict[str, Any] = {}
    for key, item in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise UsageError(f"{value}: {unknown_name('key', key, list(known))}")
        defaults[known[name]] = ",".join(map(str, item)) if isinstance(item, list) else item
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return value


def config_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config FILE``: a TOML file whose keys are flags; flags given on the command line win."""
    return click.option(
        "--config", type=click.Path(path_type=Path), callback=_load_config, is_eager=True, expose_value=False,
        help="TOML file with defaults for these flags; a table named after the command may hold them.",
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


def print_json(command: str, payload: dict[str, Any]) -> None:
    """Print one machine-readable object; NaN has no place in JSON and becomes null."""
    text = json.dumps(
        {"schema_version": SCHEMA_VERSION, "command": command, **payload}, allow_nan=False, default=_plain
    )
    click.echo(text)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def note(text: str) -> None:
    """Print a remark for people on stderr."""
    click.echo(text, err=True)


def progress_bar(total: int, what: str, unit: str) -> Any:
    """Return a tqdm bar on stderr, silent where that is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, file=sys.stderr, disable=None, leave=False)
