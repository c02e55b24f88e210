"""Write ``policy.json``: a frozen setting, what it belongs to, and how it was chosen and judged.

:mod:`asdsim.rules.frozen` reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import dump_json, plain, write_atomically
from ..rules.frozen import read_policy
from ..rules.settings import SEMANTICS, Grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..trace.stored import Source


def identity(trace: Source) -> dict[str, Any]:
    """Return what a frozen setting belongs to: models, drafter and K."""
    manifest = trace.manifest
    return {
        "target": manifest.target, "drafter": manifest.drafter, "num_draft_tokens": manifest.num_draft_tokens,
        "logits_dtype": manifest.logits_dtype,
    }  # fmt: skip


def check_same_models(one: Mapping[str, Any], other: Mapping[str, Any], where: str) -> None:
    """Refuse a trace of other models, or of another K.

    Raises
    ------
    UsageError
        Naming the first difference. Names may differ where the checksum of the weights is the same.
    """
    for role in ("target", "drafter"):
        left, right = one[role], other[role]
        same_weights = left.get("weights_sha256") and left.get("weights_sha256") == right.get("weights_sha256")
        for key in ("weights_sha256", "config_sha256", "name", "revision", "layers", "ngram", "dtype"):
            if key == "config_sha256" and not (left.get(key) and right.get(key)):  # older traces do not say
                continue
            if key in ("name", "revision") and same_weights:
                continue
            if left.get(key) != right.get(key):
                raise UsageError(
                    f"{role} {key} is {right.get(key)!r} ({right.get('name')}), "
                    f"not {left.get(key)!r} ({left.get('name')})", where=where,
                    fix="calibrate and judge with one model and drafter",
                )  # fmt: skip
    if one["num_draft_tokens"] != other["num_draft_tokens"]:
        raise UsageError(
            f"K is {other['num_draft_tokens']}, not {one['num_draft_tokens']}", where=where, fix="capture with one K"
        )


def setting_record(grid: Grid) -> dict[str, Any]:
    """Return what names the one setting of a grid in JSON: a rule and its parameters; of ASD, B, g, M and the reading.

    Numbers follow :func:`asdsim.files.plain`: JSON has no infinity, so it stands there as ``"inf"``.
    """
    if grid.layout.rule != "asd":
        return {"rule": grid.layout.rule, "parameters": plain(dict(grid.params[0]) if grid.params else {})}
    return plain({
        "rule": "asd", "B": float(grid.budget[0]), "g": float(grid.gate[0]), "M": float(grid.cap[0]),
        "semantics": grid.semantics, "regret": grid.layout.regret, "value": grid.layout.value, "ledger": grid.ledger,
        **grid.layout.cuts,
    })  # fmt: skip


def setting_name(grid: Grid, setting: int = 0) -> str:
    """Return how people read a setting: ``B=8 g=0.25 M=2 (paper)``, or a rule with its parameters."""
    policy = grid.policy(setting)
    if grid.layout.rule != "asd":
        return str(policy) if policy.label else grid.layout.rule
    varied = grid.parameters(setting)
    return f"{policy} ({policy.semantics}{', ' if varied else ''}{varied})"


def how_to_cover(path: Path, grid: Grid) -> str:
    """Return the command that covers a trace for the settings of a grid."""
    if grid.layout.rule != "asd":
        names = grid.params[0] if grid.params else {}
        options = [("-p", name, dict.fromkeys(str(row[name]) for row in grid.params)) for name in names]
        words = [f"{flag} {name}={','.join(values)}" for flag, name, values in options]
        return " ".join([f"asdsim cover {path} --rule {grid.layout.rule}", *words])
    axes = (("B", grid.budget), ("g", grid.gate), ("M", grid.cap))
    words = []
    for name, axis in axes:
        values = [f"{value:g}" if name == "M" else repr(value) for value in dict.fromkeys(axis.tolist())]
        words.append(f"--{name} {','.join(values)}")
    usual: dict[str, Any] = {"semantics": "paper", "regret": "logit", "value": SEMANTICS[grid.semantics],
                             "ledger": "request"}  # fmt: skip
    layout = grid.layout
    given = {"semantics": grid.semantics, "regret": layout.regret, "value": layout.value, "ledger": grid.ledger}
    words += [f"--{name} {value}" for name, value in given.items() if value != usual[name]]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in layout.cuts.items()]
    return " ".join([f"asdsim cover {path}", *words])


def check_replaces(path: Path, judged: bool) -> None:
    """Refuse to replace a policy that was judged on other requests by one that will not be, or any other file.

    Parameters
    ----------
    path : Path
        Where the new policy will be written.
    judged : bool
        Whether the new one will be judged on requests it was not chosen on.

    Raises
    ------
    UsageError
        Saying what would be lost.
    """
    if not path.is_file():
        return
    fix = "give --force to replace it, or another file with -o"
    try:
        record = read_policy(path)[1]
    except UsageError:
        raise UsageError("the file exists, and is not a policy file", where=str(path), fix=fix) from None
    if record.get("holdout") and not judged:
        where = record["holdout"].get("trace", "parts held out in turn")
        raise UsageError(
            f"it holds a policy judged on {where}; the new one would not be judged", where=str(path),
            fix=f"give --holdout or --split; {fix}",
        )  # fmt: skip


def write_policy(record: dict[str, Any], path: Path) -> None:
    """Write ``policy.json``, whole or not at all.

    Raises
    ------
    UsageError
        If it cannot be written.
    """
    try:
        write_atomically(path, dump_json(record, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror or error}", where=str(path)) from None
