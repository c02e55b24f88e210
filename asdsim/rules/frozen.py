"""Read ``policy.json``: the one setting that it names, and everything else that it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UsageError, unknown_name
from ..files import Fields, read_json
from . import NAMES
from .settings import SEMANTICS, Grid, rule_grids

POLICY_VERSION = 1
KIND = "asdsim policy"
FIX = "give a file that asdsim calibrate wrote"


def read_policy(path: Path) -> tuple[Grid, dict[str, Any]]:
    """Read ``policy.json``.

    Returns
    -------
    Grid
        The one setting.
    dict
        Everything that the file says.

    Raises
    ------
    UsageError
        If it is not such a file, or names a setting that does not exist.
    """
    record = read_json(path)
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise UsageError("not a policy file", where=str(path), fix=FIX)
    if record.get("schema_version") != POLICY_VERSION:
        raise UsageError(
            f"schema version {record.get('schema_version')!r} is not {POLICY_VERSION}", where=str(path), fix=FIX
        )
    fields = Fields(record, path)
    for role in ("target", "drafter"):
        fields.inner(role)
    fields.whole("num_draft_tokens")
    rule = fields.text("rule", "asd")
    return (asd_setting(fields) if rule == "asd" else _rule_setting(rule, fields)), record


def asd_setting(fields: Fields) -> Grid:
    """Return the setting of ASD that B, g, M, semantics, regret, value and ledger name.

    Raises
    ------
    UsageError
        Naming the key that is missing, of another type, or out of range.
    """
    semantics = fields.text("semantics", "paper")
    if semantics not in SEMANTICS:
        raise UsageError(str(unknown_name("semantics", semantics, list(SEMANTICS))), where=fields.where)
    B, g, M = (fields.number(name, infinite=True) for name in ("B", "g", "M"))
    usual = {"regret": "logit", "value": "", "ledger": "request"}
    reading: dict[str, Any] = {name: fields.text(name, default) for name, default in usual.items()}
    if "K" in fields.values:
        reading["K"] = fields.whole("K")
    if "draft_threshold" in fields.values:
        reading["draft_threshold"] = fields.number("draft_threshold")
        reading["draft_stop"] = fields.text("draft_stop", "after")
    try:
        return Grid.product(B, g, M, semantics, **reading)
    except UsageError as error:
        raise UsageError(error.what, where=fields.where, fix=error.fix) from None


def _rule_setting(rule: str, fields: Fields) -> Grid:
    if rule not in NAMES:
        raise UsageError(str(unknown_name("rule", rule, ["asd", *NAMES])), where=fields.where)
    given = Fields(fields.get("parameters"), f"{fields.where}, parameters")
    try:
        for name, value in given.values.items():  # an infinity is the text "inf", which rule_grids reads
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                given.refuse(name, "a number or a name")
        grids = rule_grids(rule, given.values)
    except UsageError as error:
        raise UsageError(error.what, where=str(given.where), fix=error.fix) from None
    if len(grids) != 1 or len(grids[0]) != 1:
        raise UsageError("the parameters name several settings", where=fields.where, fix=FIX)
    return grids[0]
