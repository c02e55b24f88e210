"""``asdsim policy``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .common import PathOrUrl, json_option, print_json

if TYPE_CHECKING:
    from ..rules.settings import Policy


@click.command("policy")
@click.argument("source", type=PathOrUrl())
@click.option("--model", type=PathOrUrl(), metavar="DIR",
              help="Check that the policy fits this model, a directory with config.json.")  # fmt: skip
@json_option
def command(source: Path, model: Path | None, as_json: bool) -> None:
    """Show a frozen policy, and how to serve it.

    SOURCE is policy.json, or a directory that holds one. Prints the setting, what it was frozen for, and what to pass
    to vLLM, Transformers and SGLang.
    """
    from ..rules.frozen import read_policy

    path = source / "policy.json" if source.is_dir() else source
    grid, record = read_policy(path)
    policy = grid.policy(0)
    fits = None if model is None else check_fit(record, model, path)
    how = how_to_serve(policy, record, path)
    if as_json:
        print_json("policy", {"policy": str(path), "setting": str(policy), "target": record["target"],
                              "drafter": record["drafter"], "num_draft_tokens": record["num_draft_tokens"],
                              "fits": fits, "serve": how})  # fmt: skip
        return
    for line in lines(policy, record, fits, how):
        click.echo(line)


def check_fit(record: dict[str, Any], model: Path, path: Path) -> list[str]:
    """Return what was compared and is equal; refuse a model of another vocabulary or architecture.

    Raises
    ------
    UsageError
        Naming what differs.
    """
    from ..files import Fields, read_json

    file = model / "config.json" if model.is_dir() else model
    config = read_json(file)
    inner = config.get("text_config", config) if isinstance(config, dict) else config
    fields, target = Fields(inner, file), Fields(record["target"], path)
    same = []
    names = fields.get("architectures", None) or [None]
    for what, theirs, mine in (
        ("vocabulary", target.whole("vocab_size", None), fields.whole("vocab_size", None)),
        ("architecture", target.text("architecture", None), names[0]),
    ):
        if theirs is None or mine is None:
            continue
        if theirs != mine:
            raise UsageError(
                f"the policy was frozen for {what} {theirs}, this model has {mine}", where=str(path),
                fix="calibrate on this model",
            )  # fmt: skip
        same.append(what)
    if not same:
        raise UsageError("nothing of this model can be compared with the policy", where=str(file))
    return same


METHODS = {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa", "model": "draft_model", "lookup": "ngram"}
"""Drafters of ``asdsim capture``, and vLLM's methods that draft the same."""


def how_to_serve(policy: Policy, record: dict[str, Any], path: Path) -> dict[str, str]:
    """Return commands and code by engine."""
    K, name = record.get("K", record["num_draft_tokens"]), record["target"].get("name", "MODEL")
    kind, _, where = str(record["drafter"].get("name", "")).partition(":")
    method = METHODS.get(kind)
    speculative: dict[str, Any] = {"method": method or "METHOD", "num_speculative_tokens": K}
    if kind != "lookup":
        speculative["model"] = where if method else "DRAFTER"
    asked = {"asd": {"policy": str(path)}}
    in_json = f"--speculative-config '{json.dumps(speculative)}' --additional-config '{json.dumps(asked)}'"
    more = f"Assisted({str(path)!r}), prompt_lookup_num_tokens={K}"
    assisted = more if kind == "lookup" else f"Assisted({str(path)!r}, assistant_model=drafter)"
    chain = f"--speculative-eagle-topk 1 --speculative-num-steps {K} --speculative-num-draft-tokens {K + 1}"
    stops = {}
    if record.get("draft_threshold"):
        tau, stop = record["draft_threshold"], record.get("draft_stop", "after")
        own = {"after": f"Transformers: drafter.generation_config.assistant_confidence_threshold = {tau:g}",
               "before": f"llama.cpp: --draft-p-min {tau:g}, of its ten best tokens"}  # fmt: skip
        text = f"frozen with drafts cut {stop} a probability of {tau:g}: no plug-in cuts them, the engine has to"
        stops["draft threshold"] = f"{text}{f' ({own[stop]})' if stop in own else ''}"
    return {
        **stops,
        "vllm serve": f"vllm serve {name} {in_json}",
        "vllm": f"LLM({name!r}, speculative_config={speculative!r}, additional_config={asked!r})",
        "vllm, one strict": "SamplingParams(temperature=0, extra_args={'asd_B': 0})  # over HTTP: vllm_xargs",
        "transformers": f"model.generate(ids, custom_generate={assisted})",
        "sglang": f"ASDSIM_POLICY={path} python -m sglang.launch_server --model-path {name} {chain} ...",
        "speed, no plug-in": "asdsim convert TRACE --to ENGINE --B .. --g .. --M ..",
    }


def lines(policy: Policy, record: dict[str, Any], fits: list[str] | None, how: dict[str, str]) -> list[str]:
    """Return what is printed."""
    target, drafter = record["target"], record["drafter"]
    shown = [
        f"{policy} ({policy.semantics}), frozen for {target.get('name')} ({target.get('dtype', '?')}) "
        f"with {drafter.get('name')}, K={record.get('K', record['num_draft_tokens'])}",
        _judged(record),
    ]
    if fits is not None:
        shown.append(f"fits: {', '.join(fits)} as in the model")
    return [*shown, "", *(f"{name + ':':<19}{text}" for name, text in how.items())]


def _judged(record: dict[str, Any]) -> str:
    """Return on which requests the frozen setting was judged."""
    if not record.get("holdout"):
        return "judged only on the requests it was chosen on"
    if record.get("folds"):
        return "chosen on all requests; parts held out in turn judged how it was chosen, not this very setting"
    return "judged on requests it was not chosen on"
