"""``asdsim capture``: record real draft/target steps to a trace."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from ..errors import Problems, UsageError, unknown_name
from ..rules.settings import Policy, parse_axis
from .command import detail
from .common import (
    PathOrUrl,
    config_option,
    counted,
    json_option,
    note,
    placing_options,
    print_json,
    print_memory,
    progress_bar,
    threads_option,
)
from .ray_options import ray_options


@click.command("capture")
@click.option("-o", "--output", "--out", "out", type=PathOrUrl(), required=True, help="Trace directory to write.")
@click.option("--target", default="smollm2-135m", show_default=True,
              help="Built-in smollm2-135m, a Hugging Face name, or a directory.")  # fmt: skip
@click.option("--drafter", default="layer-skip", show_default=True,
              help="layer-skip[:LAYERS], lookup[:N], model:NAME, or a head: medusa:HEAD, eagle3:HEAD or dspark:HEAD, "
              "a file, directory or OWNER/NAME on the hub.")  # fmt: skip
@click.option("--draft-layer-ids", metavar="LIST",
              help="Hidden states that an eagle3 or dspark head reads, if its checkpoint does not say or is wrong: 0 "
                   "is the embeddings, i the output of layer i - 1.")  # fmt: skip
@click.option(
    "--draft-rope-theta", type=float, help="RoPE base of such a head, if its checkpoint does not say or is wrong."
)
@click.option(
    "--draft-anchor", help="Block layout of a dspark head, if its checkpoint does not say or is wrong: first or bonus."
)
@click.option("--task", required=True,
              help="Comma list of gsm8k, math500, svamp, humaneval, mbpp, mmlu, ifeval, mt-bench, alpaca, each also "
              "as NAME:SPLIT (from the hub) or NAME:PATH (docs/quality.md), and jsonl:PATH.")  # fmt: skip
@click.option("--limit", type=int, help="Use at most this many prompts of each task.")
@click.option("--offset", type=int, default=0, show_default=True, help="Skip this many prompts of each task.")
@click.option("--shuffle", type=int, metavar="SEED",
              help="Shuffle the prompts of each task before --offset and --limit.")  # fmt: skip
@click.option("--turns", default="first", show_default=True, metavar="first|all",
              help="Ask later turns too, each with the strict answers before it in its prompt.")  # fmt: skip
@click.option("--shots", metavar="N[:PATH]",
              help="Put N worked examples before each question, from the hub or a file with the same fields; for "
                   "gsm8k, mbpp and mmlu.")  # fmt: skip
@click.option("--K", "K", type=int, default=7, show_default=True, help="Draft tokens per step.")
@click.option("--max-new-tokens", type=int, default=96, show_default=True, help="Token limit of each request.")
@click.option("--rule", default="strict", show_default=True, help="Acceptance rule during the capture: strict or asd.")
@click.option("--B", "B", metavar="NUMBER", help="With --rule asd: regret budget per request, in logits.")
@click.option("--g", "g", metavar="NUMBER", help="With --rule asd: gate on regret / suffix value, in logits.  [inf]")
@click.option("--M", "M", metavar="NUMBER", help="With --rule asd: cap on relaxed tokens per block.  [inf]")
@click.option("--stop", default="natural", show_default=True, help="natural (EOS or limit) or fixed (limit only).")
@click.option("--top-k", type=int, default=8, show_default=True, help="How many of the largest logits to keep per row.")
@click.option("--divergences", default="", metavar="LIST", help="Record kl, reverse_kl, js, tv at each draft position.")
@click.option("--logits-dtype", default="model", show_default=True,
              help="model, or float32 for a final projection in float32.")  # fmt: skip
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@placing_options
@click.option("--revision", help="Branch, tag or commit of the target on the hub.")
@click.option("--seed", type=int, default=0, show_default=True, help="Recorded with the trace; draws --shots.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Must be 0: decoding is greedy.")
@click.option("--chat-template/--no-chat-template", default=True, show_default=True,
              help="Apply the target's chat template to the prompts.")  # fmt: skip
@click.option(
    "--chat-template-arg",
    "chat_template_args",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable of the chat template, such as enable_thinking=false; may be given several times.",
)
@click.option(
    "--template-date",
    metavar="YYYY-MM-DD",
    help="Date to give a chat template that asks for today's.  [today; with --resume, that of the trace]",
)
@click.option("--shard", metavar="i/n", help="Capture only every n-th request from the i-th on, into "
                                             "OUT.shard-i-of-n; asdsim join OUT joins all n.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue a capture that was cut short.")
@click.option("--flush-every", type=int, help="Write to disk after this many requests.  [every few seconds]")
@click.option("--offline", is_flag=True, help="Use only files on this machine.")
@click.option("--trust-remote-code", is_flag=True, help="Allow a model to run the code that comes with it.")
@ray_options()
@config_option
@threads_option
@json_option
def command(
    rule: str, B: str | None, g: str | None, M: str | None, divergences: str, temperature: float, as_json: bool,
    cluster: Any, **plan_fields: Any,
) -> int:  # fmt: skip
    """Record real draft/target steps to a trace.

    Decodes each prompt greedily with a target and a drafter, and records how the target scored every draft token.

    \b
    asdsim capture -o traces/mine --target smollm2-135m --drafter layer-skip --task gsm8k --limit 8
    """
    from ..capture.run import Plan, capture, memory_of
    from ..trace.reader import load_manifest

    problems = Problems()
    if temperature != 0:
        text = f"temperature {temperature:g}: only greedy decoding can be captured"
        problems.errors.append(UsageError(text, fix="leave it at 0"))
    policy = None
    with problems.noted():
        policy = policy_of(rule, B, g, M)
    names = tuple(item.strip() for item in divergences.split(",")) if divergences else ()
    with problems.noted():
        plan_fields["resume"] |= cluster is not None
        plan = Plan(policy=policy, divergences=names, **plan_fields)
    problems.end()
    if plan.memory.startswith("plan"):
        return print_memory("capture", memory_of(plan), as_json)
    with contextlib.ExitStack() as open_bars:
        bars: dict[str, Any] = {}

        def progress(what: str, done: int, total: int, tokens: int) -> None:
            if what not in bars:
                open_bars.close()
                unit = "request" if what == "capture" else "prompt"
                bars[what] = open_bars.enter_context(progress_bar(total, what, unit))
            if tokens:
                bars[what].set_postfix_str(f"{tokens} tokens", refresh=False)
            bars[what].update(done - bars[what].n)

        if cluster is None:
            summary = capture(plan, progress, lambda text: note(f"asdsim: {text}"))
        else:
            from ..cluster.capture import capture_on

            summary = capture_on(plan, cluster, progress, lambda text: note(f"asdsim: {text}"))
    row = summary.row()
    detail(
        f"{plan.folder}: {load_manifest(plan.folder)[0].notes.get('threads')} threads, {row['seconds']} s of decoding"
    )
    if as_json:
        print_json("capture", {"trace": str(plan.folder), "rows": [row]})
    else:
        _print(plan.folder, row)
    if summary.problems:
        why = "; ".join(summary.problems)
        note(f"asdsim: speeds predicted from the step times of this trace mean little: {why}")
    if summary.uncovered:
        note("asdsim: requests were added, so the trace no longer covers its grids; run asdsim cover again")
    if summary.interrupted:
        how = "--resume" if cluster is None else "the same command"
        note(f"asdsim: interrupted; kept: {counted(row['requests'] + row['skipped'], 'request')}, {how} continues")
        raise click.exceptions.Exit(130)
    return 0


def policy_of(rule: str, B: str | None, g: str | None, M: str | None) -> Policy | None:
    """Return the setting that ``--rule --B --g --M`` name; None is strict."""
    if rule not in ("strict", "asd"):
        raise unknown_name("rule", rule, ["strict", "asd"])
    given = [name for name, value in (("B", B), ("g", g), ("M", M)) if value is not None]
    if rule == "strict":
        if given:
            raise UsageError(f"--{given[0]} has no effect under --rule strict", fix="add --rule asd")
        return None
    if B is None:
        raise UsageError("--rule asd needs a budget", fix="add --B NUMBER")
    return Policy(_one("B", B), _one("g", g or "inf"), _one("M", M or "inf"))


def _one(name: str, text: str) -> float:
    values = parse_axis(name, text)
    if len(values) != 1:
        raise UsageError(
            f"--{name} {text} names {len(values)} values", fix="give one: a capture runs under one setting"
        )
    return values[0]


def _print(out: Path, row: dict[str, Any]) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def span(ends: list[float] | None) -> str:
        return "" if ends is None else f" [{ends[0]:.3f}, {ends[1]:.3f}]"

    click.echo(
        f"{out}: {counted(row['requests'], 'request')} captured"
        + (f", {row['skipped']} there before" if row["skipped"] else "")
        + f"; {counted(row['num_spec_steps'], 'step')}, {counted(row['completion_tokens'], 'token')} "
        f"in {row['seconds']:.1f} s\n"
        f"mean_acceptance_length {number(row['mean_acceptance_length'])}{span(row['mean_acceptance_length_interval'])} "
        f"(bonus token included), accepted_per_proposal {number(row['accepted_per_proposal'])}"
        f"{span(row['accepted_per_proposal_interval'])} (not included)"
    )
