"""Checkpoints of draft heads: read them, and tell their format by tensors and configuration, never by name."""

from __future__ import annotations

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
from ...files import Fields, read_json, shown

SPECULATORS = {"eagle3": "eagle3", "dspark": "dspark", "dflash": "dspark"}
"""Kinds by the key that speculators writes."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    def from_speculators(self) -> bool:
        """Whether the configuration is in the dialect of speculators."""
        return "speculators_model_type" in self.config

    @property
    def where(self) -> str:
        """The configuration, for an error."""
        return f"{shown(self.name)}, config.json"

    def table(self, key: str) -> Fields:
        """Return the table under a key of the configuration; an empty one where there is none."""
        value = self.config.get(key)
        return Fields({} if value is None else value, f"{self.where}, {key}", CaptureError)

    @cached_property
    def layer(self) -> Fields:
        """The part of the configuration that describes the decoder layer, typed."""
        table = self.table("transformer_layer_config")
        return table if table.values else Fields(self.config, self.where, CaptureError)

    def fields(self, key: str) -> Fields:
        """Return the part of the configuration that names a key: the top level first, then its tables."""
        tables = [name for name, value in self.config.items() if isinstance(value, dict) and value.get(key) is not None]
        if self.config.get(key) is None and tables:
            return self.table(tables[0])
        return Fields(self.config, self.where, CaptureError)

    def error(self, what: str, fix: str = "") -> CaptureError:
        """Return an error about this checkpoint."""
        return CaptureError(what, where=shown(self.name), fix=fix)


def check_head_name(kind: str, name: str) -> None:
    """Refuse a head's name that names nothing, without loading anything.

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


# ---- files -----------------------------------------------------------------------------------------------------------


def read_checkpoint(name: str, *, revision: str | None = None, offline: bool = False) -> Checkpoint:
    """Read a head from a file, a directory or the hub.

    Where an index of shards lies beside the weights, only the files that it names count.

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
        If it cannot be had or read, a shard or a tensor is missing, or two files hold one tensor. Pickled files are
        read for tensors only.
    """
    path, commit = Path(name).expanduser(), None
    if not path.exists():
        path = _download(name, revision, offline)
        commit = path.name
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        raise CaptureError("no weights here", where=name, fix="a head is a .safetensors, .pt or .bin file")
    _refuse_unread(folder)
    if len(files) == 1 and files[0].name.endswith(".index.json"):
        tensors = _read_indexed(files[0])
    else:
        _check_shards(files)
        tensors = _read_all(files)
    config = folder / "config.json"
    return Checkpoint(name, _read_object(config) if config.exists() else {}, tensors, commit)


def _download(name: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    def get(patterns: Sequence[str]) -> Path:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=offline)
        return Path(str(folder))

    try:
        with bars_on_terminals_only():
            path = get(["config.json", "medusa_lm_head.*"])  # beside some Medusa heads lies the whole model
            if _weight_files(path):
                return path
            return get(["config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin", "*.pt"])
    except Exception as error:  # the library raises many kinds
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CaptureError(
            f"cannot load head {name!r}: there is no such file or directory here, and as a name on the hub: {first}",
            fix="give its path with --drafter KIND:PATH (a relative one counts from this directory), or check the name",
        ) from error


PATTERNS = (
    "medusa_lm_head.safetensors", "medusa_lm_head.pt", "*.safetensors.index.json", "*.safetensors",
    "pytorch_model*.bin.index.json", "pytorch_model*.bin", "*.pt",
)  # fmt: skip
"""Weights, the best first: beside weights lie states of a training, and beside shards weights of an earlier export."""


def _weight_files(folder: Path) -> list[Path]:
    for pattern in PATTERNS:
        files = sorted(folder.glob(pattern))
        if len(files) > 1 and pattern.endswith(".index.json"):
            raise CaptureError(
                f"two indexes of weights, {files[0].name} and {files[1].name}", where=str(folder), fix="remove one"
            )
        if files:
            return files
    return []


def _refuse_unread(folder: Path) -> None:
    """Refuse a file beside the weights that takes part in the computation and is not read."""
    if (folder / "mask_embedding.pt").exists():
        raise CaptureError(
            "mask_embedding.pt replaces the embedding of the mask token, which is not supported", where=str(folder)
        )


def _read_indexed(index: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of an index, each from the file that it names."""
    fields = Fields(_read_object(index), index, CaptureError).inner("weight_map")
    place = {name: fields.text(name) for name in fields.values}
    if not place:
        raise CaptureError("weight_map names no tensors", where=str(index))
    names = sorted(set(place.values()))
    for name in names:
        if Path(name).name != name or name in ("", ".", ".."):
            raise CaptureError(f"{shown(name)!r} is no file beside the index", where=str(index))
        if not (index.parent / name).is_file():
            first = next(tensor for tensor, file in place.items() if file == name)
            raise CaptureError(
                f"{shown(name)} is missing, which holds {shown(first)}", where=str(index), fix="fetch the whole head"
            )
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        shard = _read_tensors(index.parent / name)
        for tensor, file in place.items():
            if file == name and tensor not in shard:
                raise CaptureError(f"tensor {shown(tensor)} is not in {shown(name)}", where=str(index))
        _merge(tensors, shard, index.parent / name)
    return tensors


def _read_all(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        _merge(tensors, _read_tensors(file), file)
    return tensors


def _merge(tensors: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor], file: Path) -> None:
    twice = sorted(tensors.keys() & more.keys())
    if twice:
        raise CaptureError(
            f"tensor {shown(twice[0])} is in another file too", where=str(file),
            fix="remove the files that do not belong to the head, or add its index",
        )  # fmt: skip
    tensors.update(more)


def _check_shards(files: Sequence[Path]) -> None:
    """Refuse numbered shards, ``NAME-00001-of-00002``, of which one is missing."""
    names = {file.name for file in files}
    for file in files:
        match = re.fullmatch(r"(.*-)(\d+)-of-(\d+)(\.\w+)", file.name)
        if match is None or len(match[3]) > 6:
            continue
        for number in range(1, int(match[3]) + 1):
            name = f"{match[1]}{number:0{len(match[2])}d}-of-{match[3]}{match[4]}"
            if name not in names:
                raise CaptureError(f"{name} is missing", where=str(file.parent), fix="give the directory of all shards")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files, and pickles with more than tensors in them
        raise CaptureError(
            f"cannot read it: {type(error).__name__}", where=str(file), fix="a head is a file of tensors by name"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items()
    ):
        raise CaptureError("not a file of tensors by name", where=str(file))
    return content


def _read_object(file: Path) -> dict[str, Any]:
    value = read_json(file, error=CaptureError)
    if not isinstance(value, dict):
        raise CaptureError("not a JSON object", where=str(file))
    return value


# ---- tensors ---------------------------------------------------------------------------------------------------------


def kind_of(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str = "") -> str:
    """Tell a head's kind by ``speculators_model_type``, else by the names and shapes of its tensors."""
    named = config.get("speculators_model_type")
    if named is not None:
        if not isinstance(named, str) or named not in SPECULATORS:
            raise CaptureError(
                f"speculators_model_type {named!r} is no head known here",
                where=where,
                fix=f"known: {list(SPECULATORS)}",
            )
        return SPECULATORS[named]
    names = [name.removeprefix("model.") for name in tensors]
    if any(name.startswith("markov_head.") for name in names):
        return "dspark"
    if any(re.match(r"(medusa_head\.)?\d+\.\d+\.|blocks\.\d+\.layers\.", name) for name in names):
        return "medusa"
    fc = tensors.get("fc.weight")
    wide = [t.shape[1] for name, t in tensors.items() if name.endswith("self_attn.q_proj.weight") and t.ndim == 2]
    if fc is not None and fc.ndim == 2 and wide:
        if any(name.startswith("midlayer.") for name in names) or wide[0] == 2 * fc.shape[0]:
            return "eagle3"
        if "hidden_norm.weight" in names:
            return "dspark"
        if fc.shape[1] == 2 * fc.shape[0]:
            return "eagle3"  # EAGLE-1 or 2
    raise CaptureError(
        f"no head known here has tensors named {shown(', '.join(sorted(names)[:4]))}, ..",
        where=where,
        fix="give a checkpoint of Medusa, EAGLE, DSpark or DFlash",
    )


def need(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a matrix that must be there."""
    if name not in tensors:
        raise checkpoint.error(f"tensor {name} is missing")
    if tensors[name].ndim != 2 or not tensors[name].numel():
        raise checkpoint.error(f"tensor {name} is {tuple(tensors[name].shape)}, no matrix")
    return tensors[name]


def whole_map(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a map between vocabularies as int64; refuse one in floating point, which is rounded beyond 256 or 2048."""
    if tensor.is_floating_point() or tensor.is_complex():
        raise checkpoint.error(
            f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which rounds token ids",
            "store it as int64",
        )
    if tensor.ndim != 1 or not len(tensor):
        raise checkpoint.error(f"{name} is {tuple(tensor.shape)}, no list of tokens")
    return tensor.to(torch.int64)


def marked_tokens(checkpoint: Checkpoint, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tokens that ``t2d`` marks."""
    marks = whole_map(checkpoint, "t2d", tensor)
    if int(marks.min()) < 0 or int(marks.max()) > 1:
        raise checkpoint.error("t2d holds more than 0 and 1", "it marks the tokens that can be drafted")
    return marks.nonzero()[:, 0]


def check_dtypes(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are quantised, or no numbers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise checkpoint.error(
                f"tensor {shown(name)} is stored as {kind}", "quantised heads are not read: give float16 or wider"
            )
