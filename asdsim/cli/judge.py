"""``asdsim judge``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import UsageError
from ..files import is_remote
from .common import (
    OutputPath,
    PathOrUrl,
    TracePath,
    config_option,
    counted,
    json_option,
    note,
    note_unfinished,
    print_json,
    progress_bar,
    with_interval,
)
from .quality_options import bootstrap_options, check_resamples

if TYPE_CHECKING:
    from ..studies.judge import Judged, Price


@click.command("judge")
@click.argument("trace", type=TracePath())
@click.option("--policy", type=PathOrUrl(), required=True, help="File that asdsim calibrate wrote.")
@click.option("--endpoint", required=True, metavar="URL", help="OpenAI-compatible endpoint, up to /v1.")
@click.option("--model", required=True, metavar="NAME", help="Judge, as the endpoint calls it.")
@click.option("--key-env", default="OPENAI_API_KEY", show_default=True, metavar="NAME",
              help="Environment variable with the endpoint's key, where it needs one.")  # fmt: skip
@click.option("--cache", type=OutputPath(), default=Path("judge.sqlite"), show_default=True,
              help="File that keeps what the judge says: no comparison is paid for twice.")  # fmt: skip
@click.option("--price", metavar="READ,WRITTEN", help="Prices per million tokens, to show the cost.")
@click.option("--yes", is_flag=True, help="Run; without it only the cost is shown.")
@click.option("--tokenizer", help="Name or directory of the target's tokenizer, if not under its own name.")
@click.option("--offline", is_flag=True, help="Take the tokenizer from this machine.")
@bootstrap_options
@json_option
@config_option
def command(
    trace: Path, policy: Path, endpoint: str, model: str, key_env: str, cache: Path, price: str | None, yes: bool,
    tokenizer: str | None, offline: bool, resamples: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Have a judge model compare the answers of a frozen setting with strict ones on the open questions of TRACE.

    MT-Bench and Alpaca. Each pair is judged in both orders, and a side wins only if it wins in both; equal answers are
    ties, and nobody is asked. What it will cost is shown first, and --yes runs it.
    """
    check_resamples(resamples)
    prices = _prices(price)
    from .. import result as api
    from ..engines.transformers.text import load_decoder
    from ..evaluate.judge import Answers, Endpoint
    from ..rules.frozen import read_policy
    from ..studies import judge as study
    from ..studies.frozen import check_same_models, identity, setting_name

    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"--endpoint {endpoint!r} is no address", fix="give http://.../v1 or https://.../v1")
    if is_remote(cache):
        raise UsageError("is a database, which no object store can hold", where=str(cache), fix="name a local --cache")
    grid, record = read_policy(policy)
    source = api.load(trace)
    note_unfinished(source)
    check_same_models(dict(record), identity(source), str(source.path))
    decode = load_decoder(source.manifest.target, tokenizer=tokenizer, offline=offline)
    pairs = study.pairs_of(source, grid, decode)
    server = Endpoint(endpoint, model, os.environ.get(key_env, ""))
    with Answers(cache) as answers:
        cost = study.price(pairs, answers, server)
        note(_about_cost(cost, prices))
        judged = None
        if yes or not cost.calls:
            with progress_bar(len(pairs), "judge", "pair") as bar:
                judged = study.judge(pairs, answers, server, resamples=resamples, seed=seed, progress=bar.update)
    if as_json:
        payload = {"trace": str(trace), "judge": model, "pairs": len(pairs), "cost": asdict(cost)}
        print_json("judge", {**payload, "judged": None if judged is None else asdict(judged)})
    elif judged is None:
        click.echo("nothing was asked; add --yes to run it")
    else:
        click.echo(f"{setting_name(grid)} against strict matching, {counted(len(pairs), 'answer')} judged by {model}")
        _print(judged)


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        read, written = (float(item) for item in text.split(","))
    except ValueError:
        raise UsageError(f"--price {text!r} is not READ,WRITTEN", fix="give two prices, such as 2.5,10") from None
    if not (0 <= read < float("inf") and 0 <= written < float("inf")):
        raise UsageError(f"--price {text!r}: a price is negative or no number")
    return read, written


def _about_cost(cost: Price, prices: tuple[float, float] | None) -> str:
    text = (
        f"{counted(cost.calls, 'comparison')} to ask for: some {cost.prompt_tokens} tokens to read, "
        f"at most {cost.answer_tokens} to write"
    )
    return text if prices is None else f"{text}, at most some {cost.money(prices):.2f} at these prices"


def _print(judged: Judged) -> None:
    click.echo(
        f"{judged.wins} wins, {judged.losses} losses, {judged.ties} ties ({judged.equal} of them equal answers)"
        + (f", {judged.no_verdict} without a verdict, not counted" if judged.no_verdict else "")
    )
    for name, rate in (("win rate", judged.win_rate), ("win rate at equal length", judged.length_controlled)):
        value = [None if one != one else one for one in rate]
        click.echo(f"{name} (50 %: no difference): {with_interval(value, '{:.1f}', 100.0)} %")
