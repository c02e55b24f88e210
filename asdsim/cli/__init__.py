"""The command line: parse, call, print. Each command lives in a module of its name, imported when it is called."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from ..engines.processes import rank
from ..errors import AsdsimError, unknown_name

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "capture": "Record real draft/target steps to a trace.",
    "join": "Join the shards that capture --shard i/n wrote.",
    "cover": "Complete a trace for a grid, so that its replay is exact.",
    "verify": "Compare walks with live decoding, token for token.",
    "replay": "Walk a trace under a grid of settings.",
    "fidelity": "Measure how far off estimates are, on a covered trace.",
    "calibrate": "Choose B, g and M on one trace, freeze them, judge them on another.",
    "advise": "Choose rule and K for each batch size: what speculation is worth under load.",
    "profile": "Measure passes by batch and width on this machine: a table for --cost.",
    "audit": "Judge a frozen setting: accuracy, length, outputs that differ, ledger.",
    "judge": "Have a judge model compare its answers to open questions with strict ones.",
    "policy": "Show a frozen setting, and how to serve it.",
    "timing": "Time a frozen setting live, between two strict runs, and compare with the prediction.",
    "inspect": "Validate a trace and summarise it.",
    "plan": "Estimate how large a capture would be: steps, bytes, hours, memory.",
    "compare": "Compare acceptance rules, at published settings or matched risk.",
    "rules": "List the acceptance rules, their parameters, defaults and sources.",
    "convert": "Read and write other tools' files: acceptance records, calibration rows.",
    "convert-policy": "Convert a setting from one reading of ASD to another.",
    "show": "Print what a setting changed: prompt, outputs, every token and the ledger.",
    "report": "Write one HTML page of settings, outputs and tokens; it opens offline.",
    "plot": "Draw figures from a sweep or a trace.",
    "bench": "Time the walk against plain Python, torch and NumPy.",
    "demo": "Capture three prompts, replay a grid, draw figures.",
    "completion": "Print a shell's completion script.",
}


class ReaderGone(Exception):
    """The reader of our output has gone, for example `head`. Not an OSError: click ends on that with status 1."""


class LazyGroup(click.Group):
    """A group that imports a command only when it is called."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ReaderGone from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return a command."""
        if name not in COMMANDS:
            return None
        from .command import equipped

        return equipped(import_module(f"asdsim.cli.{name.replace('-', '_')}").command)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command without importing any."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with the closest known one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise unknown_name("command", args[0], list(COMMANDS))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from ..provenance import version

        click.echo(f"asdsim, version {version()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Show the version and exit.")  # fmt: skip
def cli() -> None:
    """Replay speculative decoding under other acceptance rules.

    Capture real draft/target steps once; then ask what any budget B, gate g and cap M would have done to acceptance
    length and regret, without the model.
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line. Exit status: 0 success, 1 a check failed, 2 wrong usage or unreadable input."""
    if rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        status = cli.main(args=args, prog_name="asdsim", standalone_mode=False)
    except AsdsimError as error:
        _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except MemoryError as error:
        _fail(f"out of memory ({str(error) or 'no memory left'}); ask for fewer settings or requests")
    except RecursionError:
        _fail("the input is nested too deeply")
    except click.ClickException as error:
        _fail(error.format_message())
    except click.exceptions.Abort:
        click.echo("asdsim: interrupted", err=True)
        sys.exit(130)
    except ReaderGone:
        # What is still in the buffer goes nowhere, or Python would complain about it while it shuts down.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.filename or 'file system'}: {error.strerror or error}")
    except Exception as error:
        from ..files import reason_of

        if not reason_of(error):
            raise
        _fail(f"object store: {reason_of(error)}")  # from the library of the store
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> None:
    from ..files import shown

    click.echo(f"asdsim: error: {shown(' '.join(message.split()))}", err=True)  # names may hold anything
    sys.exit(2)
