"""Checkpoints of draft heads: read them, and tell their format by tensors and configuration, never by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...engines.transformers.load import bars_on_terminals_only
from ...engines.transformers.model import tensors_sha256
from ...errors import CaptureError, UsageError

AUX_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
"""Keys of vLLM and speculators: id i is hidden state i."""

TARGET_KEY = "target_layer_ids"
"""Key of DeepSpec, DFlash and SpecForge: id i is hidden state i + 1, what layer i puts out."""

EAGLE_TABLE = "eagle_config"
"""Table of SpecForge and SGLang: a key of vLLM's in it counts as SpecForge counts."""

SPECULATORS = {"eagle3": "eagle3", "dspark": "dspark", "dflash": "dspark"}


@dataclass(frozen=True)
class Checkpoint:
    """A draft head as stored.

    Attributes
    ----------
    name : str
        File, directory or hub repository, as asked for.
    config : dict
        ``config.json``; empty where there is none.
    tensors : dict of str to tensor
        On the CPU, in the dtype of the file.
    revision : str or None
        Commit on the hub.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(repr=False)
    revision: str | None = None

    @cached_property
    def sha256(self) -> str:
        """Checksum of the tensors, see :func:`asdsim.engines.transformers.model.tensors_sha256`."""
        return tensors_sha256(self.tensors)

    @cached_property
    def kind(self) -> str:
        """``medusa``, ``eagle3`` (EAGLE-1 and 2 too) or ``dspark`` (DFlash too).

        Raises
        ------
        CaptureError
            If it is none of them.
        """
        return kind_of(self.config, self.tensors, self.name)

    @property
    def layer_config(self) -> dict[str, Any]:
        """The part of the configuration that describes the decoder layer."""
        return dict(self.config.get("transformer_layer_config") or self.config)

    def find(self, key: str, default: Any = None) -> Any:
        """Return a value of the configuration, of one of its tables where the top level has none."""
        tables = [table for table in self.config.values() if isinstance(table, dict)]
        return next((table[key] for table in (self.config, *tables) if table.get(key) is not None), default)

    def error(self, what: str, fix: str = "") -> CaptureError:
        """Return an error about this checkpoint."""
        return CaptureError(what, where=self.name, fix=fix)


def check_head_name(kind: str, name: str) -> None:
    """Refuse a head's name that cannot be meant, without loading anything.

    Raises
    ------
    UsageError
        On an empty name, or a path that does not exist.
    """
    if not name or name.isspace():
        raise UsageError(f"drafter {kind!r} names no head", fix=f"write {kind}:PATH or {kind}:OWNER/NAME")
    if Path(name).expanduser().exists():
        return
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UsageError(
            f"drafter {kind}: there is no file or directory {name!r}",
            fix="give a checkpoint's file or directory, or OWNER/NAME on the hub",
        )


def read_checkpoint(name: str, *, revision: str | None = None, offline: bool = False) -> Checkpoint:
    """Read a head from a file, a directory or the hub.

    Parameters
    ----------
    name : str
    revision : str, optional
        Branch, tag or commit on the hub.
    offline : bool
        Use only what is on this machine.

    Raises
    ------
    CaptureError
        If it cannot be had or read. Pickled files are read for tensors only.
    """
    path, commit = Path(name).expanduser(), None
    if not path.exists():
        path = _download(name, revision, offline)
        commit = path.name
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        raise CaptureError("no weights here", where=name, fix="a head is a .safetensors, .pt or .bin file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(_read_tensors(file))
    return Checkpoint(name, _read_config(folder / "config.json"), tensors, commit)


def _download(name: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    def get(patterns: Sequence[str]) -> Path:
        found = snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=offline)
        return Path(str(found))

    try:
        with bars_on_terminals_only():
            path = get(["config.json", "medusa_lm_head.*"])  # beside some Medusa heads lies the whole model
            return path if _weight_files(path) else get(["config.json", "*.safetensors", "pytorch_model*.bin", "*.pt"])
    except Exception as error:  # the library raises many kinds
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CaptureError(
            f"cannot load head {name!r}: there is no such file or directory here, and as a name on the hub: {first}",
            fix="give its path with --drafter KIND:PATH (a relative one counts from this directory), or check the name",
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    for pattern in ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "*.safetensors", "pytorch_model*.bin", "*.pt"):
        found = sorted(folder.glob(pattern))  # the first that there is: beside weights lie states of a training
        if found:
            return found
    return []


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files, and pickles with more than tensors in them
        raise CaptureError(
            f"cannot read it: {type(error).__name__}", where=str(file), fix="a head is a file of tensors by name"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise CaptureError("not a file of tensors by name", where=str(file))
    return found


def _read_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaptureError(f"cannot read it: {error}", where=str(file)) from None
    if not isinstance(found, dict):
        raise CaptureError("not a JSON object", where=str(file))
    return found


def kind_of(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str = "") -> str:
    """Tell a head's kind by ``speculators_model_type``, else by the names and shapes of its tensors."""
    said = config.get("speculators_model_type")
    if said is not None:
        if said not in SPECULATORS:
            raise CaptureError(
                f"speculators_model_type {said!r} is no head known here", where=where, fix=f"known: {list(SPECULATORS)}"
            )
        return SPECULATORS[said]
    names = [name.removeprefix("model.") for name in tensors]
    if any(name.startswith("markov_head.") for name in names):
        return "dspark"
    if any(re.match(r"(medusa_head\.)?\d+\.\d+\.|blocks\.\d+\.layers\.", name) for name in names):
        return "medusa"
    fc = tensors.get("fc.weight")
    wide = [t.shape[1] for name, t in tensors.items() if name.endswith("self_attn.q_proj.weight")]
    if fc is not None and wide:
        if any(name.startswith("midlayer.") for name in names) or wide[0] == 2 * fc.shape[0]:
            return "eagle3"
        if "hidden_norm.weight" in names:
            return "dspark"
        if fc.shape[1] == 2 * fc.shape[0]:
            return "eagle3"  # EAGLE-1 or 2
    raise CaptureError(
        f"no head known here has tensors named {', '.join(sorted(names)[:4])}, ..",
        where=where,
        fix="give a checkpoint of Medusa, EAGLE, DSpark or DFlash",
    )


def taps_of(
    checkpoint: Checkpoint,
    count: int,
    total: int,
    given: Sequence[int] | None = None,
    default: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return which hidden states of the target a head reads.

    Parameters
    ----------
    checkpoint : Checkpoint
    count : int
        As many as the width of ``fc`` says.
    total : int
        Layers of the target, L.
    given : sequence of int, optional
        Hidden states named by the user: 0 the embeddings, i what layer i - 1 puts out, L behind the final norm.
    default : sequence of int, optional
        Hidden states where the configuration names none.

    Raises
    ------
    CaptureError
        If none are named, two keys disagree, there are more or fewer than ``count``, or the target has no such layer.
    """
    fix = "name the hidden states with --draft-layer-ids: 0 embeddings, i output of layer i - 1"
    read: dict[str, tuple[int, ...]] = {}
    if given is not None:
        read["--draft-layer-ids"] = tuple(given)
    else:
        table = checkpoint.config.get(EAGLE_TABLE) or {}
        for key in AUX_KEYS:
            ids, inner = checkpoint.find(key), table.get(key)
            if inner:
                read[f"{EAGLE_TABLE}.{key}"] = tuple(int(i) + 1 for i in inner)
            if ids and ids is not inner:  # some write an empty list for the default
                if total in ids:  # there it lies before the final norm, which is not tapped
                    raise checkpoint.error(f"{key} {ids} names the last layer before the target's final norm", fix)
                read[key] = tuple(int(i) for i in ids)
        ids = checkpoint.find(TARGET_KEY)
        if ids is not None:
            read[TARGET_KEY] = tuple(int(i) + 1 for i in ids)
    if len(set(read.values())) > 1:
        said = "; ".join(f"{key} means hidden states {list(taps)}" for key, taps in read.items())
        raise checkpoint.error(f"config.json disagrees with itself: {said}", fix)
    taps = next(iter(read.values()), None if default is None or len(default) != count else tuple(default))
    if taps is None:
        raise checkpoint.error(f"config.json does not say which {count} layers of the target the head reads", fix)
    if len(taps) != count:
        raise checkpoint.error(
            f"fc takes {count} hidden states, {next(iter(read), 'the default')} names {len(taps)}", fix
        )
    if not all(0 <= tap <= total for tap in taps):
        raise checkpoint.error(f"the head reads hidden states {list(taps)}, the target has 0 to {total}", fix)
    return taps


def rope_of(checkpoint: Checkpoint, given: float | None = None) -> dict[str, Any]:
    """Return the head's RoPE parameters: ``rope_theta``, ``rope_type`` and what belongs to it.

    Raises
    ------
    CaptureError
        If no theta is named, or two that differ.
    """
    config = checkpoint.layer_config
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = {"rope_type": nested.get("rope_type", nested.get("type", "default")), **nested}
    found = {float(table["rope_theta"]) for table in (config, nested) if table.get("rope_theta") is not None}
    if given is not None:
        found = {float(given)}
    if not found:
        raise checkpoint.error(
            "config.json names no RoPE theta", "give it with --draft-rope-theta; most code then takes 10000"
        )
    if len(found) > 1:
        raise checkpoint.error(f"two RoPE thetas, {sorted(found)}", "choose one with --draft-rope-theta")
    return {**scaling, "rope_theta": found.pop()}
