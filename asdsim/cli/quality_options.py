"""Options that calibrate, audit and timing share, and how they print figures with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError

if TYPE_CHECKING:
    from ..evaluate.cost import CostModel
    from ..evaluate.quality import Quality
    from ..trace.reader import Trace

FORMATS = {
    "mean_acceptance_length": ("tokens per step", "{:.3f}"),
    "accepted_per_proposal": ("accepted drafts per step", "{:.3f}"),
    "acceptance_length_gain": ("gain in tokens per step (%)", "{:+.1f}"),
    "tokens_per_second": ("tokens per second, predicted", "{:.1f}"),
    "speed_up": ("speed-up over strict, predicted", "{:.3f}"),
    "relaxed_per_token": ("relaxed tokens per token", "{:.4f}"),
    "regret_spent_mean": ("regret per request (logits)", "{:.3f}"),
    "regret_per_token": ("regret per token (logits)", "{:.4f}"),
    "bound_by_gate": ("blocks ended by the gate (%)", "{:.1f}"),
    "bound_by_budget": ("blocks ended by the budget (%)", "{:.1f}"),
    "bound_by_cap": ("blocks ended by the cap (%)", "{:.1f}"),
    "length_change": ("change of length (%)", "{:+.1f}"),
    "outputs_differ_share": ("outputs that differ (%)", "{:.1f}"),
    "first_difference_mean": ("tokens before they part", "{:.1f}"),
    "edit_distance_mean": ("edit distance (0 to 1)", "{:.3f}"),
    "logprob_per_token": ("log-probability per token (nats)", "{:.4f}"),
    "logprob_change_mean": ("change of log-probability per request (nats)", "{:+.2f}"),
    "accuracy": ("accuracy (%)", "{:.1f}"),
    "accuracy_change": ("change of accuracy (points)", "{:+.1f}"),
}
"""How a figure is called and written."""


def bootstrap_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--resamples`` and ``--seed``."""
    function = click.option(
        "--seed", default=0, show_default=True, help="Of the bootstrap, and of --split where there is one."
    )(function)
    return click.option("--resamples", default=2000, show_default=True, help="Of the bootstrap.")(function)


def cost_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--cost``."""
    return click.option(
        "--cost", metavar="NAME|FILE", default="trace", show_default=True,
        help="Step times: those of the trace, a published name, or a table (CSV, JSON); 'none' leaves speed out.",
    )(function)  # fmt: skip


def scoring_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of scoring."""
    options = (
        click.option("--scorer", "scorers", multiple=True, metavar="TASK=NAME",
                     help="gsm8k, humaneval or exact for a task; by default by the task's name."),
        click.option("--allow-code-execution", "allow_code", is_flag=True,
                     help="Run the programs that the model wrote (humaneval), in a limited process."),
        click.option("--timeout", default=5.0, show_default=True, help="Seconds that one program may take."),
        click.option("--memory", default=1024, show_default=True, help="Megabytes that one program may take."),
        click.option("--tokenizer", help="Name or directory of the target's tokenizer, if not under its own name."),
        click.option("--offline", is_flag=True, help="Use only what is on this machine."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def cost_of(spec: str, trace: Trace) -> CostModel | None:
    """Return the cost model that ``--cost`` names."""
    from ..evaluate.cost import fit_trace, read_cost

    if spec == "none":
        return None
    return fit_trace(trace) if spec == "trace" else read_cost(spec)


def shown(name: str, values: Any) -> str:
    """Return a figure with its interval, or a dash."""
    if values is None or values[0] is None:
        return "-"
    text, factor = FORMATS[name][1], 100.0 if FORMATS[name][0].endswith(("(%)", "(points)")) else 1.0
    value = text.format(factor * values[0])
    if values[1] is None:
        return value
    return f"{value} [{text.format(factor * values[1])}, {text.format(factor * values[2])}]"


def print_columns(columns: dict[str, dict[str, Any]], names: Iterable[str]) -> None:
    """Print figures as a Markdown table, one row per figure, one column per row of a Quality (or ready text)."""
    rows = [name for name in names if any(name in column for column in columns.values())]
    click.echo(f"| figure, 95 % interval | {' | '.join(columns)} |")
    click.echo("|---" * (len(columns) + 1) + "|")
    for name in rows:
        cells = []
        for column in columns.values():
            value = column.get(name)
            text = value if isinstance(value, str) else shown(name, value)
            if name == "accuracy_change" and text != "-" and column.get("strict_right") == 0:
                text += ", strict has none right"
            cells.append(text)
        click.echo(f"| {FORMATS[name][0]} | {' | '.join(cells)} |")


def plain_row(quality: Quality, setting: int = 0) -> dict[str, Any]:
    """Return a row for ``--json``: figures as {value, low, high}."""
    row = quality.row(setting)
    return {
        name: dict(zip(("value", "low", "high"), value, strict=True)) if isinstance(value, list) else value
        for name, value in row.items()
    }


def check_resamples(resamples: int) -> None:
    """Refuse a bootstrap that gives no interval."""
    if resamples < 2:
        raise UsageError(f"--resamples {resamples} give no interval", fix="give at least 2, better 2000")
