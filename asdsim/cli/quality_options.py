"""Options that calibrate, audit and timing share, and how they print figures with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import note, print_rows, with_interval

if TYPE_CHECKING:
    from ..evaluate.cost import Cost
    from ..evaluate.quality import Quality
    from ..evaluate.scorers import Decode, TaskScorer
    from ..trace.groups import StreamedTrace
    from ..trace.stored import Source, Trace

FORMATS = {
    "speed_up_plain": ("speed-up over the target alone, predicted", "{:.3f}"),
    "speed_up": ("speed-up over strict, predicted", "{:.3f}"),
    "mean_acceptance_length": ("tokens per step", "{:.3f}"),
    "accepted_per_proposal": ("accepted drafts per step", "{:.3f}"),
    "acceptance_length_gain": ("gain in tokens per step (%)", "{:+.1f}"),
    "tokens_per_second": ("tokens per second, predicted", "{:.1f}"),
    "answer_speed_up": ("speed-up per answer over strict, predicted", "{:.3f}"),
    "tokens_per_answer": ("tokens per answer", "{:.1f}"),
    "seconds_per_answer": ("seconds per answer, predicted", "{:.3f}"),
    "seconds_per_finished_answer": ("seconds per finished answer, predicted", "{:.3f}"),
    "ended_share": ("answers that end by themselves (%)", "{:.1f}"),
    "relaxed_per_token": ("relaxed tokens per token", "{:.4f}"),
    "regret_spent_mean": ("regret per request (logits)", "{:.3f}"),
    "regret_per_token": ("regret per token (logits)", "{:.4f}"),
    "bound_by_gate": ("blocks ended by the gate (%)", "{:.1f}"),
    "bound_by_budget": ("blocks ended by the budget (%)", "{:.1f}"),
    "bound_by_cap": ("blocks ended by the cap (%)", "{:.1f}"),
    "length_change": ("change of length (%)", "{:+.1f}"),
    "outputs_differ_share": ("outputs that differ (%)", "{:.1f}"),
    "first_difference_mean": ("tokens before the first difference", "{:.1f}"),
    "edit_distance_mean": ("edit distance (0 to 1)", "{:.3f}"),
    "logprob_per_token": ("log-probability per token (nats)", "{:.4f}"),
    "logprob_change_mean": ("change of log-probability per request (nats)", "{:+.2f}"),
    "accuracy": ("accuracy (%)", "{:.1f}"),
    "accuracy_change": ("change of accuracy (points)", "{:+.1f}"),
}
"""How a figure is called and written."""


def _whole_number(_context: click.Context, parameter: click.Parameter, value: int) -> int:
    if value < 0:
        raise UsageError(f"--{parameter.name} {value} is negative")
    return value


def seed_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--seed`` of a bootstrap."""
    return click.option(
        "--seed", default=0, show_default=True, metavar="N", callback=_whole_number,
        help="Seed of the bootstrap resamples (in calibrate, also of the parts of --split): the same seed gives the "
        "same intervals.",
    )(function)  # fmt: skip


def bootstrap_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--resamples`` and ``--seed``."""
    return click.option(
        "--resamples", default=2000, show_default=True, metavar="N",
        help="Bootstrap resamples of the requests behind each interval.",
    )(seed_option(function))  # fmt: skip


def cost_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--cost``."""
    return click.option(
        "--cost", metavar="NAME|FILE", default="trace", show_default=True,
        help="Step times: trace (passes timed beside its capture, else a fit to its steps), a published name, a table "
        "(CSV, JSON) of steps or of measured passes, or "
        "roofline:DEVICE,model=CONFIG.json,draft=KIND; none leaves speeds out.",
    )(function)  # fmt: skip


@dataclass(frozen=True)
class Scoring:
    """How outputs are read and scored, as the options say.

    Attributes
    ----------
    chosen : mapping of str to str
        Scorer by task, where one was named.
    allow_code : bool
        Whether programs that the model wrote may be run, each for ``timeout`` seconds with ``code_memory`` megabytes.
    tokenizer : str or None
        Name or directory of the target's tokenizer, if not that of the target's name.
    offline : bool
        Use only files on this machine.
    """

    chosen: Mapping[str, str]
    allow_code: bool
    timeout: float
    code_memory: int
    tokenizer: str | None
    offline: bool

    @property
    def asked(self) -> bool:
        """Whether an option asks for scores."""
        return bool(self.chosen) or self.allow_code

    def decoder(self, trace: Source) -> Decode:
        """Return what turns token ids of a trace into text."""
        from ..engines.transformers.text import load_decoder

        return load_decoder(trace.manifest.target, tokenizer=self.tokenizer, offline=self.offline)

    def scorer(self, trace: Trace | StreamedTrace) -> TaskScorer:
        """Return what scores the outputs of a trace."""
        from ..evaluate.scorers import make_scorer

        return make_scorer(
            trace.request_records(), self.decoder(trace), chosen=self.chosen, allow_code=self.allow_code,
            timeout=self.timeout, memory=self.code_memory << 20,
        )  # fmt: skip


def scoring_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of scoring; the command gets them as ``scoring``."""

    @wraps(function)
    def command(**given: Any) -> Any:
        from ..evaluate.scorers import parse_chosen

        names = ("allow_code", "timeout", "code_memory", "tokenizer", "offline")
        values = {name: given.pop(name) for name in names}
        if not values["timeout"] > 0 or values["code_memory"] < 64:
            raise UsageError("a program needs some time and at least 64 MB", fix="raise --timeout or --code-memory")
        return function(scoring=Scoring(parse_chosen(given.pop("scorers")), **values), **given)

    options = (
        click.option("--scorer", "scorers", multiple=True, metavar="TASK=SCORER",
                     help="Scorer of a task, if not the one of its name: gsm8k, gsm8k-strict, gsm8k-flexible (as "
                          "lm-eval), math500, mmlu, mmlu-letter (the first line is the letter), ifeval, humaneval, "
                          "mbpp, exact, contains (the reference is in the output), regex:PATTERN (found in the "
                          "output; a group must equal the reference), or MODULE:FUNCTION, your own function of output "
                          "and reference."),
        click.option("--allow-code-execution", "allow_code", is_flag=True,
                     help="Run the programs that the model wrote (humaneval, mbpp), in a limited process."),
        click.option("--timeout", default=5.0, show_default=True, help="Seconds that each program may take."),
        click.option("--code-memory", default=1024, show_default=True, help="Megabytes that each program may use."),
        click.option("--tokenizer", help="Name or directory of the target's tokenizer, if not that of the target's "
                                         "name."),
        click.option("--offline", is_flag=True, help="Use only files on this machine."),
    )  # fmt: skip
    with_options: Callable[..., Any] = command
    for option in reversed(options):
        with_options = option(with_options)
    return with_options


def cost_of(spec: str, trace: Source) -> Cost | None:
    """Return the cost model that ``--cost`` names; None for ``none``."""
    from ..evaluate.cost_spec import cost_of_trace

    return None if spec == "none" else cost_of_trace(trace, spec)


def scorer_of(trace: Source) -> TaskScorer | None:
    """Return what scores answers from the text that a trace holds, running no program; None where nothing can.

    Says so where only a missing package or a reference stands in the way.
    """
    from ..evaluate.scorers import make_scorer, scorer_name

    records, vocabulary = trace.request_records(), trace.vocabulary
    if vocabulary is None or not any(scorer_name(record, {}, False) for record in records):
        return None
    try:
        return make_scorer(records, vocabulary.text)
    except UsageError as error:
        note(f"accuracy is left out: {error}")
        return None


def shown(name: str, values: Any) -> str:
    """Return a figure with its interval, or a dash; see :func:`asdsim.cli.common.with_interval`."""
    label, form = FORMATS[name]
    return with_interval(values, form, 100.0 if label.endswith(("(%)", "(points)")) else 1.0)


def print_columns(columns: dict[str, dict[str, Any]], names: Iterable[str]) -> None:
    """Print figures as a table, one row per figure, one column per row of a Quality (or ready text).

    A column that is not exact says so: in its head, and by ``~`` before each of its figures.
    """
    inexact = [column.get("exact") is False for column in columns.values()]
    heads = [f"{head}, NOT EXACT" if marked else head for head, marked in zip(columns, inexact, strict=True)]
    rows = []
    for name in (name for name in names if any(name in column for column in columns.values())):
        cells = []
        for column, marked in zip(columns.values(), inexact, strict=True):
            value = column.get(name)
            text = value if isinstance(value, str) else shown(name, value)
            if name == "accuracy_change" and text != "-" and column.get("strict_right") == 0:
                text += ", strict gets none right"
            cells.append(f"~{text}" if marked and text != "-" else text)
        rows.append([FORMATS[name][0], *cells])
    print_rows(["figure, 95 % interval", *heads], rows)
    if any(inexact):
        note("~: not exact, so without an interval; asdsim cover makes it exact")


def note_baselines(cost: Cost | None) -> None:
    """Say what the predicted speed-ups are over, and what they assume."""
    if cost is not None:
        note(f"speed-ups are predicted from {cost.source}: over the target alone, one token per forward pass, and over "
             "strict speculative decoding with the same drafter")  # fmt: skip
        for text in cost.notes():
            note(text)


def with_finished(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the seconds of all requests per output that ends by itself, without an interval."""
    seconds, share = (row.get(name, [None])[0] for name in ("seconds_per_answer", "ended_share"))
    return {**row, "seconds_per_finished_answer": [seconds / share, None, None]} if seconds and share else row


def plain_row(quality: Quality, setting: int = 0) -> dict[str, Any]:
    """Return a row for ``--json``: figures as {value, low, high}."""
    row = with_finished(quality.row(setting))
    return {
        name: dict(zip(("value", "low", "high"), value, strict=True)) if isinstance(value, list) else value
        for name, value in row.items()
    }


def check_resamples(resamples: int) -> None:
    """Refuse a bootstrap that gives no interval."""
    if resamples < 2:
        raise UsageError(
            f"--resamples {resamples} is too small for an interval", fix="give at least 2, preferably 2000"
        )
