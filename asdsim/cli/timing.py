"""``asdsim timing``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import (
    PathOrUrl,
    TracePath,
    config_option,
    json_option,
    note,
    placing_options,
    print_json,
    print_rows,
    progress_bar,
    threads_option,
    with_interval,
)  # fmt: skip
from .quality_options import bootstrap_options, check_resamples, cost_of, cost_option, note_baselines

if TYPE_CHECKING:
    from ..live.timing import Timing


@click.command("timing")
@click.argument("trace", type=TracePath())
@click.option("--policy", type=PathOrUrl(), required=True, help="File that asdsim calibrate wrote.")
@click.option("--limit", default=8, show_default=True, help="Number of requests, from the start of the trace.")
@click.option("--tokens", type=int, help="Tokens to generate for each.  [default: the trace's limit]")
@click.option("--max-drift", default=3.0, show_default=True, help="Percent by which the two strict runs may differ.")
@click.option(
    "--interleave", is_flag=True, help="Alternate the four runs request by request, for a machine under other load."
)
@click.option("--target", help="Where the target is now, if not under its recorded name.")
@click.option("--drafter", help="The same for the drafter.")
@placing_options
@click.option("--offline", is_flag=True, help="Use only files on this machine.")
@cost_option
@bootstrap_options
@threads_option
@json_option
@config_option
def command(
    trace: Path, policy: Path, limit: int, tokens: int | None, max_drift: float, interleave: bool, target: str | None,
    drafter: str | None, offline: bool, cost: str, resamples: int, seed: int, as_json: bool,
    **layout: Any,
) -> int:  # fmt: skip
    """Time a frozen setting live on the models of TRACE: the target alone, strict, the setting, strict again.

    All runs go to a fixed length. Prints the measured speeds beside those that the cost model predicts, and stores
    both in TRACE, so that later predictions for it say how far this one was off. Exit status 1, and nothing stored, if
    token counts differ or the two strict runs drift apart by more than --max-drift.
    """
    check_resamples(resamples)
    if not max_drift >= 0:
        raise UsageError(f"--max-drift {max_drift} is not a percentage")
    if cost == "none":
        raise UsageError("timing needs step times for its prediction", fix="leave --cost out, or name step times")
    from .. import result as api
    from ..capture.reload import Placing
    from ..live.timing import RUNS, keep, time_policy
    from ..rules.frozen import read_policy
    from ..stats import few
    from ..studies.frozen import setting_name

    grid, record = read_policy(policy)
    model = cost_of(cost, api.load(trace))
    assert model is not None
    with progress_bar(4 * limit, "timing", "request") as bar:
        timed = time_policy(
            trace, grid, limit=limit, tokens=tokens, cost=model, max_drift=max_drift / 100, interleave=interleave,
            policy=record, target=target, drafter=drafter, offline=offline, placing=Placing(**layout),
            resamples=resamples, seed=seed, progress=bar.update,
        )  # fmt: skip
    measured, plain = (
        [float(ends[0]) for ends in (found.value, found.low, found.high)]
        for found in (timed.measured, timed.measured_plain)
    )
    stored = keep(trace, timed, setting_name(grid), model.source)
    replay = timed.predicted_replay
    predicted = None if replay is None else [float(ends[0]) for ends in (replay.value, replay.low, replay.high)]
    if as_json:
        payload: dict[str, Any] = {
            "trace": str(trace), "policy": str(policy), "requests": timed.requests,
            "runs": [
                {
                    "run": name, "completion_tokens": int(timed.tokens[n].sum()),
                    "num_spec_steps": int(timed.steps[n].sum()), "seconds": float(timed.seconds[n].sum()),
                    "tokens_per_second": float(timed.rates[n]),
                }
                for n, name in enumerate(RUNS)
            ],
            "over_target_alone": _named(plain), "predicted_over_target_alone": timed.predicted_plain,
            "strict_over_target_alone": timed.measured_strict_plain,
            "predicted_strict_over_target_alone": timed.predicted_strict_plain,
            "speed_up": _named(measured), "speed_up_over": "strict speculative decoding",
            "predicted_from_live_steps": timed.predicted_live,
            "predicted_from_replay": None if predicted is None else _named(predicted),
            "predicted_tokens_per_second": timed.predicted_rate, "drift": timed.drift, "problems": timed.problems,
            "stored": stored, "cost_notes": model.notes(),
        }  # fmt: skip
        print_json("timing", payload)
        return 1 if timed.problems else 0
    _print(timed, measured, plain, predicted)
    for problem in timed.problems:
        note(problem)
    note(f"stored in {trace}: predictions for it now say how far this one was off" if stored else
         f"not stored in {trace}, so predictions for it do not mention this run")  # fmt: skip
    note_baselines(model)
    if text := few(timed.requests):
        note(text)
    return 1 if timed.problems else 0


def _print(timed: Timing, measured: list[float], plain: list[float], predicted: list[float] | None) -> None:
    """Print the runs, and each measured speed-up beside what was predicted; ``predicted`` is from the replay."""
    from ..live.timing import RUNS

    runs = [
        [
            name, f"{timed.tokens[n].sum()}", f"{timed.steps[n].sum()}",
            f"{timed.tokens[n].sum() / timed.steps[n].sum():.3f}", f"{timed.seconds[n].sum():.2f}",
            f"{timed.rates[n]:.2f}",
        ]
        for n, name in enumerate(RUNS)
    ]  # fmt: skip
    print_rows(["run", "tokens", "steps", "tokens per step", "seconds", "tokens per second"], runs)
    click.echo(f"measured speed-up over the target alone {with_interval(plain)}; strict speculative decoding "
               f"{timed.measured_strict_plain:.3f}")  # fmt: skip
    strict_off = _off(timed.predicted_strict_plain, timed.measured_strict_plain)
    click.echo(f"predicted over the target alone, from these runs' steps {timed.predicted_plain:.3f} "
               f"({_off(timed.predicted_plain, plain[0])}); strict speculative decoding "
               f"{timed.predicted_strict_plain:.3f} ({strict_off})")  # fmt: skip
    click.echo(f"measured speed-up over strict {with_interval(measured)}, drift of the strict runs "
               f"{100 * timed.drift:+.1f} %")  # fmt: skip
    click.echo(f"predicted over strict, from these runs' steps {timed.predicted_live:.3f} "
               f"({_off(timed.predicted_live, measured[0])})")  # fmt: skip
    if predicted is not None:
        click.echo(f"predicted over strict, from the replay of the trace {with_interval(predicted)}, natural end "
                   f"({_off(predicted[0], measured[0])})")  # fmt: skip


def _off(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} % off"


def _named(values: list[float]) -> dict[str, float | None]:
    return {
        name: value if value == value else None for name, value in zip(("value", "low", "high"), values, strict=True)
    }
