"""One setting of ASD under another reading, and the configuration files of the reference implementation.

Numbers are carried over where the two readings decide alike for every block, up to what the notes say; where no setting
of the other reading means the same, the conversion is refused with the reason.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError, unknown_name
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
    """Read a JSON configuration of the reference implementation: its core's, or DSpark's.

    Returns
    -------
    policy : Policy
    block_size : int or None
        Of a DSpark configuration.

    Raises
    ------
    UsageError
        If it is neither: which key is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=str(path)) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid JSON: {error}", where=str(path)) from None
    if not isinstance(content, dict):
        raise UsageError("not a JSON object", where=str(path))
    if set(CORE_KEYS) <= set(content):
        B, g, M = (_number(content, key, path) for key in CORE_KEYS)
        return _checked(B, g, M, "core", path), None
    if {"B", "g", "m"} <= set(content):
        scheme = content.get("value_scheme", "normalized_suffix")
        if scheme != "normalized_suffix":
            raise UsageError(f"value_scheme {scheme!r} is not normalized_suffix", where=str(path))
        size = content.get("block_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(f"block_size {size!r} is no draft length", where=str(path))
        B, g, M = (_number(content, key, path) for key in ("B", "g", "m"))
        return _checked(B, g, M, "dspark", path), size
    raise UsageError(
        f"neither a configuration of the core ({', '.join(CORE_KEYS)}) nor of DSpark ({', '.join(DSPARK_KEYS)})",
        where=str(path),
        fix=f"found the keys {', '.join(map(str, content)) or 'none'}",
    )


def _number(content: dict[str, Any], key: str, path: Path) -> float:
    value = content[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{key} is {value!r}, not a finite number", where=str(path))
    return float(value)


def _checked(B: float, g: float, M: float, semantics: str, path: Path) -> Policy:
    try:
        return setting(B, g, M, semantics)
    except UsageError as error:
        raise UsageError(error.what, where=str(path), fix=error.fix) from None


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
