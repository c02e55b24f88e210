"""One setting of ASD under another reading, the reference implementation's configuration files, and policy.json.

Numbers are carried over where the two readings decide alike for every block, up to what the notes say; where no setting
of the other reading means the same, the conversion is refused with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError, unknown_name
from ..files import Fields, read_json, shown
from ..rules.frozen import KIND, asd_setting
from ..rules.settings import SEMANTICS, Policy, layout_of

CORE_KEYS = ("risk_budget", "max_regret_per_value", "max_relaxed_tokens_per_block")
DSPARK_KEYS = ("B", "g", "m", "value_scheme", "block_size")
FORMATS = ("core", "dspark")


@dataclass(frozen=True)
class Converted:
    """A setting under its new reading.

    Attributes
    ----------
    policy : Policy
    block_size : int or None
        K that it holds for, where the conversion depended on K.
    notes : list of str
        In what rare cases the two still decide differently.
    """

    policy: Policy
    block_size: int | None = None
    notes: list[str] = field(default_factory=list)


def setting(B: float, g: float, M: float, semantics: str) -> Policy:
    """Return a setting of one of the four readings."""
    if semantics not in SEMANTICS:
        raise unknown_name("semantics", semantics, list(SEMANTICS))
    return Policy(B, g, M, semantics, layout_of(semantics))


def convert_policy(policy: Policy, to: str, block_size: int | None = None) -> Converted:
    """Return the setting of another reading that decides alike.

    Parameters
    ----------
    policy : Policy
    to : str
        A key of :data:`asdsim.rules.settings.SEMANTICS`.
    block_size : int, optional
        K, the same in every step; needed to or from ``dspark``.

    Raises
    ------
    UsageError
        If there is none: why.
    """
    if to not in SEMANTICS:
        raise unknown_name("semantics", to, list(SEMANTICS))
    old = policy.semantics
    if policy.ledger != "request" or policy.layout != layout_of(old):
        raise UsageError(f"a setting of {old} with variations has no other reading", fix="leave the variations out")
    if old == to:
        return Converted(policy, block_size)
    B, g, M = policy.budget, policy.gate, policy.cap
    notes: list[str] = []
    strict = B == 0 or M == 0 or (old == "core" and g == 0)
    if "lightllm" in (old, to):
        if to == "lightllm" and strict:
            raise UsageError("lightllm accepts ties under every setting: none is strict by token id")
        if old == "lightllm" and (B == 0 or M == 0):
            zero = "B" if B == 0 else "M"
            raise UsageError(f"lightllm accepts ties at {zero} = 0 and {to} is strict there: no setting means the same")
        notes.append("ties: free and uncounted under lightllm, mismatches that count towards M elsewhere")
        notes.append("the ledger is float32 under lightllm and float64 elsewhere")
    if to == "core" and g == 0 and not strict:
        raise UsageError(f"g = 0 lets ties pass under {old}, and core is strict there: no setting means the same")
    if "core" in (old, to) and not strict:
        notes.append("core lets a block exceed what is left of the budget by 1e-9")
    if "dspark" in (old, to):
        if block_size is None:
            raise UsageError(
                f"the gate of dspark applies to (K-i)/K, that of {old if to == 'dspark' else to} to K-i: they differ "
                "by the factor K",
                fix="give the block size K; there is no conversion where K varies",
            )
        if block_size < 1:
            raise UsageError(f"block size {block_size} is no draft length", fix="give K >= 1")
        g = g * block_size if to == "dspark" else g / block_size
        if not strict:
            notes.append("once the budget is used up exactly, dspark refuses ties and the others accept them")
            notes.append("gates are equal in real numbers; a ratio within rounding of the gate may decide differently")
    if strict:
        if B != 0 and M != 0:
            B = 0.0  # core at g = 0
        notes = []
    return Converted(setting(B, g, M, to), block_size if "dspark" in (old, to) else None, notes)


def read_config(path: Path) -> tuple[Policy, int | None]:
    """Read a JSON configuration of the reference implementation (its core's, or DSpark's), or asdsim's ``policy.json``.

    Returns
    -------
    policy : Policy
    block_size : int or None
        Of a DSpark configuration.

    Raises
    ------
    UsageError
        If it is none of them: which key is wrong.
    """
    content = read_json(path)
    fields = Fields(content, path)
    if content.get("kind") == KIND:
        return _own(fields, path), None
    if set(CORE_KEYS) <= set(content):
        B, g, M = (fields.number(key) for key in CORE_KEYS)
        return _checked(B, g, M, "core", path), None
    if {"B", "g", "m"} <= set(content):
        scheme = fields.text("value_scheme", "normalized_suffix")
        if scheme != "normalized_suffix":
            fields.refuse("value_scheme", "normalized_suffix")
        size = fields.whole("block_size", least=1)
        B, g, M = (fields.number(key) for key in ("B", "g", "m"))
        return _checked(B, g, M, "dspark", path), size
    raise UsageError(
        f"neither a configuration of the core ({', '.join(CORE_KEYS)}), nor of DSpark ({', '.join(DSPARK_KEYS)}), "
        "nor a policy of asdsim",
        where=shown(path),
        fix=f"the keys are {shown(', '.join(list(map(str, content))[:20])) or 'none'}",
    )


def _own(fields: Fields, path: Path) -> Policy:
    """Return the setting of a ``policy.json`` that asdsim calibrate wrote."""
    rule = fields.text("rule", "asd")
    if rule != "asd":
        raise UsageError(f"a policy of rule {shown(rule)!r} has no reading of ASD", where=shown(path))
    return asd_setting(fields).policy(0)


def _checked(B: float, g: float, M: float, semantics: str, path: Path) -> Policy:
    try:
        return setting(B, g, M, semantics)
    except UsageError as error:
        raise UsageError(error.what, where=shown(path), fix=error.fix) from None


def config_of(converted: Converted, kind: str) -> dict[str, Any]:
    """Return the JSON object of a setting: ``core`` or ``dspark``.

    Raises
    ------
    UsageError
        If the file format cannot say it.
    """
    policy = converted.policy
    if kind not in FORMATS:
        raise unknown_name("configuration format", kind, list(FORMATS))
    if policy.semantics != kind:
        raise UsageError(f"a {kind} configuration holds a setting of {kind}, not of {policy.semantics}")
    for name, value in (("B", policy.budget), ("g", policy.gate), ("M", policy.cap)):
        if math.isinf(value):
            raise UsageError(f"{name} = inf cannot be written: the reference takes finite numbers", fix="give a bound")
    if kind == "core":
        return dict(zip(CORE_KEYS, (policy.budget, policy.gate, int(policy.cap)), strict=True))
    return {
        "B": policy.budget, "g": policy.gate, "m": int(policy.cap), "value_scheme": "normalized_suffix",
        "block_size": converted.block_size,
    }  # fmt: skip
