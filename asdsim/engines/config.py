"""What an engine is asked to do: a default setting, settings of single requests, a trace to record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import EngineError, UsageError
from ..files import Fields, to_path
from ..rules.frozen import asd_setting, read_policy
from ..rules.settings import STRICT, Policy
from .accept import needs_of
from .ledger import is_strict

POLICY_ENV = "ASDSIM_POLICY"
TRACE_ENV = "ASDSIM_TRACE"
KEYS = {"asd_B": "budget", "asd_g": "gate", "asd_M": "cap"}
"""Keys of a request's own setting: flat, since HTTP takes no nested ones."""


@dataclass(frozen=True)
class EngineConfig:
    """What was asked of one engine.

    Attributes
    ----------
    policy : Policy
        Default setting; B, g and M of a request may differ from it.
    file : str
        Where the setting came from, for messages.
    record : dict
        Content of ``policy.json``; empty where numbers were given.
    trace : str
        Directory to record to; empty records nothing.
    trace_options : dict
        ``queue`` (requests held in memory at most) and ``top_k``.
    """

    policy: Policy
    file: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    trace: str = ""
    trace_options: Mapping[str, Any] = field(default_factory=dict)


def read_policy_file(path: str | Path) -> tuple[Policy, dict[str, Any]]:
    """Read ``policy.json``: the setting, and everything that the file says.

    Raises
    ------
    EngineError
        If it is not such a file, or its rule cannot run in an engine.
    """
    try:
        grid, record = read_policy(to_path(path))
        needs_of(grid.layout)
    except UsageError as error:
        raise EngineError(error.what, where=error.where or str(path), fix=error.fix) from None
    return grid.policy(0), record


def engine_config(asked: Any, environment: Mapping[str, str], where: str) -> EngineConfig | None:
    """Return what an engine is asked to do; None where it is asked nothing.

    Parameters
    ----------
    asked : mapping or None
        ``{"policy": "policy.json"}``, or ``{"B": 8, "g": 0.25, "M": 2}``, with ``semantics`` where it is not the
        paper's; ``{"trace": DIR}`` beside it, or alone: decoding is then strict.
    environment : mapping
        ``ASDSIM_POLICY`` and ``ASDSIM_TRACE`` stand for ``policy`` and ``trace`` where these are not given.
    where : str
        What the engine calls ``asked``, for messages.

    Raises
    ------
    EngineError
        On unknown keys, values of another type, and files that cannot be read.
    """
    values = Fields({} if asked is None else asked, where, EngineError)
    known = {"policy", "trace", "queue", "top_k", "rule", "B", "g", "M", "semantics", "regret", "value", "ledger"}
    for key in values.values:
        if key not in known:
            raise EngineError(f"unknown key {key!r}", where=where, fix=f"known: {', '.join(sorted(known))}")
    trace = values.text("trace", environment.get(TRACE_ENV, ""))
    file = values.text("policy", environment.get(POLICY_ENV, "") if "B" not in values.values else "")
    if file and "B" in values.values:
        raise EngineError("both a policy file and numbers are given", where=where, fix="give one of them")
    options = {name: values.whole(name, least=1) for name in ("queue", "top_k") if name in values.values}
    if file:
        policy, record = read_policy_file(file)
        return EngineConfig(policy, file, record, trace, options)
    if any(name in values.values for name in ("B", "g", "M")):
        try:
            return EngineConfig(asd_setting(values).policy(0), where, {}, trace, options)
        except UsageError as error:
            raise EngineError(error.what, where=error.where, fix=error.fix) from None
    if asked or trace:
        return EngineConfig(STRICT, where, {}, trace, options)
    return None


def request_policy(extra: Mapping[str, Any] | None, default: Policy, where: str) -> Policy:
    """Return the setting of one request: the default one with the ``asd_`` keys that the request gives.

    Raises
    ------
    EngineError
        On a value that is not a number, negative or NaN, and on an unknown key that begins with ``asd_``.
    """
    given = {key: value for key, value in (extra or {}).items() if str(key).startswith("asd_")}
    if not given:
        return default
    for key in given:
        if key not in KEYS:
            raise EngineError(f"unknown key {key!r}", where=where, fix=f"known: {', '.join(KEYS)}")
    values = Fields(given, where, EngineError)
    try:
        numbers = [values.number(key, getattr(default, name), infinite=True) for key, name in KEYS.items()]
        return replace(default, budget=numbers[0], gate=numbers[1], cap=numbers[2], label="")
    except UsageError as error:
        raise EngineError(error.what, where=where, fix=error.fix) from None


def check_model(config: EngineConfig, *, vocab_size: int, num_draft_tokens: int | None, dtype: str = "") -> list[str]:
    """Refuse a policy that was frozen for another vocabulary or draft length; return what else differs, as text.

    Raises
    ------
    EngineError
        Naming what the policy says and what the engine has.
    """
    record = config.record
    notes: list[str] = []
    if not record:
        return notes
    target = Fields(record, config.file, EngineError).inner("target")
    theirs = target.whole("vocab_size", None)
    if theirs is not None and theirs != vocab_size:
        raise EngineError(
            f"the policy was frozen for {target.text('name', 'another model')} with a vocabulary of {theirs}, "
            f"this model has {vocab_size}", where=config.file, fix="calibrate on this model",
        )  # fmt: skip
    fields = Fields(record, config.file, EngineError)
    width = fields.whole("K", fields.whole("num_draft_tokens", None))
    if (
        width is not None
        and num_draft_tokens is not None
        and width != num_draft_tokens
        and not is_strict(config.policy)
    ):
        raise EngineError(
            f"the policy was frozen at {width} draft tokens per step, this engine drafts {num_draft_tokens}",
            where=config.file, fix=f"set num_speculative_tokens to {width}, or calibrate at {num_draft_tokens}",
        )  # fmt: skip
    if record.get("draft_threshold") and not is_strict(config.policy):
        notes.append(
            f"the policy was frozen with drafts cut at a drafter's probability of {record['draft_threshold']:g}; the "
            "engine has to cut them, or the policy's figures are those of other drafts"
        )
    if dtype and target.text("dtype", dtype) != dtype:
        notes.append(f"the policy was frozen on {target.text('dtype')} weights, this engine runs {dtype}")
    return notes
