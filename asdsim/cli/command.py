"""What every command does alike: all wrong options in one error, --quiet and --verbose, and progress."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import click

from ..engines.processes import rank
from ..errors import AsdsimError

LINE_SECONDS = 30.0
"""Between two lines of progress where there is no terminal."""


def is_quiet() -> bool:
    """Return whether the current command was called with ``--quiet``."""
    return _level() < 0


def _level() -> int:
    if rank():  # of processes that run the same command, the first one speaks
        return -1
    context = click.get_current_context(silent=True)
    return 0 if context is None else int(context.find_root().meta.get("asdsim.level", 0))


def detail(text: str) -> None:
    """Print a remark on stderr under ``--verbose`` only."""
    if _level() > 0:
        click.echo(f"asdsim: {text}", err=True)


class Command(click.Command):
    """A command that reports all errors in its options together."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; raise one error for unknown, missing and invalid options together."""
        wrong: list[click.ClickException | AsdsimError] = []
        args = self._without_unknown(ctx, args, wrong)
        for param in self.params:
            _collect(param, wrong)
        try:
            rest = super().parse_args(ctx, args)
        except (click.UsageError, AsdsimError) as error:
            if not wrong:
                raise
            rest = []
            if not _is_stray(error):  # a value of an unknown option
                wrong.append(error)
        finally:
            for param in self.params:
                param.__dict__.pop("handle_parse_result", None)
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            texts = [
                error.format_message() if isinstance(error, click.ClickException) else str(error) for error in wrong
            ]
            raise click.UsageError("; ".join(text.rstrip(".") for text in dict.fromkeys(texts)), ctx)
        return rest

    def _without_unknown(self, ctx: click.Context, args: list[str], wrong: list[Any]) -> list[str]:
        """Return the arguments without options that nobody knows, each noted as wrong."""
        while not ctx.resilient_parsing:
            try:
                self.make_parser(ctx).parse_args(args=list(args))
            except click.NoSuchOption as error:
                wrong.append(error)
                place = next((n for n, text in enumerate(args) if text.partition("=")[0] == error.option_name), None)
                if place is None or not error.possibilities:  # nobody knows whether a value follows
                    raise error from None
                meant = next(p for p in self.params if error.possibilities[0] in (*p.opts, *p.secondary_opts))
                takes = isinstance(meant, click.Option) and not meant.is_flag and "=" not in args[place]
                args = args[:place] + args[place + 1 + takes :]
            except click.UsageError:
                break
            else:
                break
        return args

    def invoke(self, ctx: click.Context) -> Any:
        """Run; under ``--verbose`` an error shows where it was raised."""
        try:
            return super().invoke(ctx)
        except AsdsimError:
            if _level() > 0:
                traceback.print_exc()
            raise


def _is_stray(error: Exception) -> bool:
    return isinstance(error, click.UsageError) and error.message.startswith("Got unexpected extra argument")


def _collect(param: click.Parameter, wrong: list[Any]) -> None:
    """Let a parameter note its error instead of raising it; the command stops after the last one."""
    handle = param.handle_parse_result

    def noted(ctx: click.Context, opts: Any, args: list[str]) -> tuple[Any, list[str]]:
        try:
            return handle(ctx, opts, args)
        except (click.UsageError, AsdsimError) as error:
            wrong.append(error)
            return None, args

    param.handle_parse_result = noted  # type: ignore[method-assign]


def _set_level(step: int) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_root().meta["asdsim.level"] = step

    return callback


def equipped(command: click.Command) -> click.Command:
    """Return a command with what all commands share."""
    if type(command) is click.Command:
        command.__class__ = Command
        for flag, step, text in (("-q/--quiet", -1, "Print only errors on stderr: no progress, no notes."),
                                 ("-v/--verbose", 1, "Print more notes, and where an error was raised.")):  # fmt: skip
            command.params.append(
                click.Option(flag.split("/"), is_flag=True, expose_value=False, is_eager=True,
                             callback=_set_level(step), help=text)
            )  # fmt: skip
    return command


class Bar(Protocol):
    """What a bar of tqdm and lines of progress have in common."""

    total: float | None
    n: float

    def update(self, n: float = 1) -> Any:
        """Go on by so many units."""

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Set the text behind the numbers."""

    def refresh(self) -> Any:
        """Show what was set."""

    def close(self) -> None:
        """End."""

    def __enter__(self) -> Bar: ...

    def __exit__(self, *error: object) -> None: ...


class Lines:
    """Progress as plain lines, one every :data:`LINE_SECONDS`, for logs."""

    def __init__(self, total: float, what: str, unit: str, silent: bool = False) -> None:
        self.total: float | None = total
        self.n: float = 0
        self.what, self.unit, self.postfix, self.silent = what, unit, "", silent
        self.start = self.last = time.monotonic()

    def update(self, n: float = 1) -> None:
        """Go on by so many units."""
        self.n += n
        self.refresh()

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Set the text behind the numbers."""
        self.postfix = text
        if refresh:
            self.refresh()

    def refresh(self) -> None:
        """Print a line if the last one is old."""
        now = time.monotonic()
        if self.silent or now - self.last < LINE_SECONDS:
            return
        self.last = now
        of = f" of {self.total:.12g}" if self.total else ""
        more = f", {self.postfix}" if self.postfix else ""
        click.echo(
            f"asdsim: {self.what}: {self.n:.12g}{of} {self.unit}s{more} ({now - self.start:.0f} s)",
            err=True,
        )

    def close(self) -> None:
        """End."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def progress_bar(total: int, what: str, unit: str) -> Bar:
    """Return a bar on a terminal, plain lines every 30 s elsewhere, and nothing under ``--quiet``.

    A total of 0 means that the total is not known yet.
    """
    if is_quiet() or not sys.stderr.isatty():
        return Lines(total, what, unit, silent=is_quiet())
    from tqdm import tqdm

    bar: Bar = tqdm(total=total or None, desc=what, unit=unit, file=sys.stderr, leave=False)
    return bar


THREADS = "ASDSIM_THREADS"
"""Environment variable that says how many threads models may use."""


def threads_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--threads``, for commands that run models.

    Threads of OpenMP that wait for each other do not spin, unless the environment says so: on two cores shared with
    other programs, spinning made a pass of two threads 20 times slower.
    """

    def callback(ctx: click.Context, _param: click.Parameter, value: int | None) -> None:
        if "torch" not in sys.modules:  # read once, when OpenMP is loaded
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if value is not None:
            before = os.environ.get(THREADS)
            os.environ[THREADS] = str(value)
            ctx.call_on_close(
                lambda: os.environ.pop(THREADS, None) if before is None else os.environ.update({THREADS: before})
            )

    return click.option(
        "--threads", type=click.IntRange(1, 1024), expose_value=False, callback=callback,
        help="Threads for models on the CPU.  [OMP_NUM_THREADS, else the physical cores that are idle]",
    )(function)  # fmt: skip
