"""Memory that a capture or a cover takes, device by device, computed before any weight is read.

The model is built on ``meta``: shapes without numbers, whatever its size. From them follow

- weights: parameters and buffers in the dtype or quantisation they are loaded in; of a checkpoint that is stored
  quantised, the bytes of its files;
- KV cache: keys and values of one token, as a forward of two tokens leaves them, times the tokens that are held: one
  request at its limit, with the room its buffers grow by; in ``cover`` the pool of ``--kv-gb`` and one batch;
- activations: the widest moment of a layer for all tokens of one pass, the hidden states that a head reads, the mask
  of a padded batch, and the logit rows with their copies in float32;
- 1 GiB of each CUDA device for its context and workspaces.

Where the model has no fused attention, one layer's scores count too. The layers of ``--device-map auto`` are parted
here too, in order and so that the fullest device is as empty as can be, weights and KV cache alike.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engines.transformers.load import BUILT_IN, QUANTIZED, check_placing, ensure_smollm2, read_device_map
from ..errors import CaptureError, UsageError
from .drafters import HEADS, check_spec, parse_layers

GIB = 2**30
CONTEXT = GIB
"""Bytes of a CUDA device that a process takes before any tensor."""
SHARDED = ("colwise", "rowwise", "grouped_gemm", "local")
"""Parts of the names of those styles of Transformers' tensor parallel plans that divide a weight."""
MODES = ("check", "plan", "ignore")


@dataclass(frozen=True)
class Load:
    """What the models are asked to hold at once.

    Attributes
    ----------
    K : int
        Draft tokens per step.
    positions : int
        Tokens of the longest request: prompt, answer and draft block.
    batch : int
        Requests in one pass; 0 for a capture, which runs one by one with one KV cache.
    kv_bytes : int
        Bound of the pool of ``cover``, for each model.
    sessions : int
        KV caches held at once where ``batch`` is 0; ``cover --faithful`` keeps some.
    """

    K: int
    positions: int
    batch: int = 0
    kv_bytes: int = 0
    sessions: int = 1

    def tokens(self, slot: int) -> float:
        """Return the tokens whose keys and values are held, of ``slot`` bytes each."""
        one = 1.5 * self.positions  # buffers grow by half
        if not self.batch:
            return self.sessions * one
        if not self.kv_bytes:
            return self.batch * one
        return self.batch * one + self.kv_bytes / max(slot, 1) + self.batch * self.positions  # may pass the bound by


@dataclass
class Part:
    """What one device holds, in bytes.

    Attributes
    ----------
    device : str
    weights, kv, activations, context : int
    free : int or None
        What it has; None where nobody can tell.
    modules : list of str
        Placed there by a device map.
    """

    device: str
    weights: int = 0
    kv: int = 0
    activations: int = 0
    context: int = 0
    free: int | None = None
    modules: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.activations + self.context

    @property
    def fits(self) -> bool:
        """Whether it goes in."""
        return self.free is None or self.total <= self.free


@dataclass
class Memory:
    """A plan.

    Attributes
    ----------
    parts : list of Part
        By device.
    target_weights, drafter_weights : int
        Bytes in all.
    kv_per_token : int
        Bytes of the target's keys and values of one token, over all layers.
    places : dict
        Devices by module, for ``from_pretrained``; empty without a device map.
    notes : list of str
        What could not be computed exactly.
    hints : list of str
        What would fit; empty where it fits as it is.
    """

    parts: list[Part]
    target_weights: int
    drafter_weights: int
    kv_per_token: int
    places: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether every device holds its part."""
        return all(part.fits for part in self.parts)

    def refuse(self, name: str) -> None:
        """Refuse to load what does not fit.

        Raises
        ------
        CaptureError
            Naming the fullest device, and what would fit.
        """
        if self.fits:
            return
        worst = max(self.parts, key=lambda part: part.total - (part.free or part.total))
        raise CaptureError(
            f"{name} needs {gb(worst.total)} on {worst.device} ({gb(worst.weights)} of weights, {gb(worst.kv)} of KV "
            f"cache, {gb(worst.activations + worst.context)} for the rest), where {gb(worst.free or 0)} are free",
            fix="; ".join(self.hints) or "use a machine with more memory, or --fit ignore to try all the same",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, in bytes."""
        return {
            "fits": self.fits, "target_weights": self.target_weights, "drafter_weights": self.drafter_weights,
            "kv_per_token": self.kv_per_token, "notes": self.notes, "hints": self.hints,
            "devices": [{**asdict(part), "total": part.total, "fits": part.fits} for part in self.parts],
        }  # fmt: skip


def gb(count: float) -> str:
    """Return bytes as GB of 2**30 bytes, as ``--kv-gb`` counts them."""
    return f"{count / GIB:.1f} GB" if count >= GIB / 10 else f"{count / GIB:.3f} GB"


def check_memory(text: str) -> None:
    """Refuse a ``--memory`` that is neither ``check``, ``plan``, ``plan:NxGB`` nor ``ignore``."""
    pretended_devices(text)


def pretended_devices(text: str) -> dict[str, int] | None:
    """Return the devices of ``plan:8x80``, 8 of 80 GB; None where those of this machine count.

    Raises
    ------
    UsageError
        On anything but ``check``, ``plan``, ``plan:NxGB`` and ``ignore``.
    """
    match = re.fullmatch(r"plan:(\d{1,4})x(\d{1,6}(?:\.\d+)?)", text)
    if match is None or not int(match[1]):
        if text not in MODES:
            raise UsageError(f"--fit {text!r} is not known", fix="give check, plan, plan:8x80 (GB) or ignore")
        return None
    return {f"cuda:{number}": int(float(match[2]) * GIB) for number in range(int(match[1]))}


def free_memory() -> dict[str, int]:
    """Return the free bytes of every device here: CUDA devices where there are any, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return {f"cuda:{n}": int(torch.cuda.mem_get_info(n)[0]) for n in range(torch.cuda.device_count())}
    return {"cpu": free_host_memory()}


def free_host_memory() -> int:
    """Return the bytes of memory that this process can still get."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
        return min(free, limit - used + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return free


# ---- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A layer, or another module that is placed as a whole.

    Attributes
    ----------
    name : str
    weights, kv : int
        Bytes; of keys and values, of one token.
    """

    name: str
    weights: int
    kv: int = 0


@dataclass(frozen=True)
class Shape:
    """A model as its configuration describes it.

    Attributes
    ----------
    units : list of Unit
        In the order that tokens pass them.
    per_token : int
        Bytes of activations of one token at the widest moment.
    states : int
        Bytes of one token's hidden states of all layers.
    row : int
        Bytes of a logit row with its copies.
    keeps : bool
        Whether it computes only the logit rows that are asked for.
    tied : bool
        Whether embedding and projection are one.
    pair : int
        Bytes of one pair of tokens: the scores of a layer where attention is not fused.
    notes : tuple of str
    """

    units: tuple[Unit, ...]
    per_token: int
    states: int
    row: int
    keeps: bool
    tied: bool
    pair: int = 0
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(unit.weights for unit in self.units)

    @property
    def kv(self) -> int:
        """Bytes of keys and values of one token."""
        return sum(unit.kv for unit in self.units)


def shape_of(
    name: str,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    tp: int | None = None,
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> Shape:
    """Return the shape of a model, from its configuration alone; parameters as in ``load_model``.

    Under ``tp`` it is the shape of one process's share.

    Raises
    ------
    CaptureError
        If the configuration cannot be had, or no model can be built from it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = str(ensure_smollm2(offline=offline)) if name in BUILT_IN else name
    local = offline or Path(path).is_dir()
    where: dict[str, Any] = {"local_files_only": local, "trust_remote_code": trust_remote_code}
    if revision is not None and name not in BUILT_IN:
        where["revision"] = revision
    try:
        config = AutoConfig.from_pretrained(path, **where)
        stored = getattr(config, "quantization_config", None) is not None
        wanted = "float32" if dtype == "auto" and name in BUILT_IN else dtype
        if wanted == "auto":
            wanted = str(
                getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or "float32"
            )
        chosen = getattr(torch, wanted.removeprefix("torch."))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=chosen, trust_remote_code=trust_remote_code).eval()
    except Exception as error:  # the library raises many kinds
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CaptureError(
            f"cannot load model {name!r}: {first}",
            fix="check the directory, or leave --offline out" if local else "check the name and the connection",
        ) from error
    notes: list[str] = []
    text = config.get_text_config()
    units = list(_units(model, text, quantize, tp))
    if stored:
        files = _stored_bytes(path, where)
        whole = sum(unit.weights for unit in units)
        if files is None:
            notes.append("the checkpoint is quantised: its weights are counted as if it were not")
        else:
            units = [replace(unit, weights=round(unit.weights * files / (tp or 1) / whole)) for unit in units]
    kv, guessed = _kv_bytes(model, text, chosen, tp)
    if guessed:
        notes.append("the KV cache is computed from the configuration, not from a forward")
    layers = [n for n, unit in enumerate(units) if re.search(r"\.\d+$", unit.name)]
    if layers:
        for n, each in zip(layers, kv, strict=True):
            units[n] = replace(units[n], kv=each)
    else:
        units[0] = replace(units[0], kv=sum(kv))
    size = chosen.itemsize
    width = int(model.get_input_embeddings().weight.shape[1])
    return Shape(
        tuple(units), size * _widest(text, width), size * width * (len(kv) + 1),
        int(text.vocab_size) * (size + 8), "logits_to_keep" in inspect.signature(model.forward).parameters,
        bool(getattr(text, "tie_word_embeddings", False)),
        (2 * size + 4) * _attention(text, width)[0] if model.config._attn_implementation == "eager" else 0,
        tuple(notes),
    )  # fmt: skip


def _units(model: Any, text: Any, quantize: str | None, tp: int | None) -> list[Unit]:
    """Return the modules that are placed as a whole, with the bytes of their weights."""
    import torch

    total = int(text.num_hidden_layers)
    lists = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)
        and len(module) == total
    ]  # fmt: skip
    if not lists:  # placed as a whole
        tensors = [*model.parameters(), *model.buffers()]
        return [Unit("", sum(tensor.numel() * tensor.element_size() for tensor in tensors))]
    layers = lists[0]
    above = {layers.rsplit(".", n)[0] for n in range(1, layers.count(".") + 1)} | {"", layers}
    kept = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    plan = _tp_plan(model) if tp else {}
    bytes_of: dict[str, int] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        names = path.split(".") if path else []
        unit = next((".".join(names[:n]) for n in range(1, len(names) + 1) if ".".join(names[:n]) not in above), path)
        if unit in above:
            continue
        linear = isinstance(module, torch.nn.Linear) and id(module) not in kept
        bytes_of.setdefault(unit, 0)
        for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if id(tensor) in seen:
                continue  # tied
            seen.add(id(tensor))
            size = tensor.numel() * tensor.element_size()
            if quantize is not None and linear and leaf == "weight":
                size = quantized_bytes(quantize, *tensor.shape)
            elif tp and _divided(f"{path}.{leaf}", plan):
                size = -(-size // tp)
            bytes_of[unit] += size
    if getattr(text, "tie_word_embeddings", False) and len(kept) == 2:  # not tied yet, on meta
        head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
        bytes_of[head] = 0
    order = sorted(bytes_of, key=lambda name: _order(name, layers))
    return [Unit(name, bytes_of[name]) for name in order]


def _order(name: str, layers: str) -> tuple[int, int]:
    """Return the place of a module: embeddings and the like, the layers, the last norm and the projection."""
    number = re.fullmatch(rf"{re.escape(layers)}\.(\d+)", name)
    if number:
        return 1, int(number[1])
    last = name.rsplit(".", 1)[-1]
    return (2 if re.search(r"head|^norm|final|ln_f|out", last) else 0), 0


def quantized_bytes(quantize: str, rows: int, columns: int) -> int:
    """Return the bytes of a quantised matrix, scales included.

    Source: bitsandbytes. NF4 packs two weights into a byte, with a float32 scale for each 64, a table of 16 float32 and
    some 80 bytes of description; LLM.int8() has a float32 scale for each row.
    """
    count = rows * columns
    if QUANTIZED[quantize]["bits"] == 4:
        return -(-count // 2) + 4 * -(-count // 64) + 4 * 16
    return count + 4 * rows


def _tp_plan(model: Any) -> dict[str, str]:
    plan = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise CaptureError(
            f"{type(model).__name__} has no plan for tensor parallelism", fix="use --device-map auto instead of --tp"
        )
    return plan


def _divided(name: str, plan: Mapping[str, str]) -> bool:
    """Return whether a plan shares a weight out to the processes."""
    generic = re.sub(r"\.\d+\.", ".*.", name)
    module, _, leaf = generic.rpartition(".")
    style = plan.get(generic) or plan.get(module) or ""
    return any(part in style for part in SHARDED) and not ("rowwise" in style and leaf == "bias")


def _stored_bytes(path: str, where: Mapping[str, Any]) -> int | None:
    """Return the bytes of a checkpoint's safetensors files, None where they cannot be told."""
    import json

    folder = Path(path)
    if folder.is_dir():
        return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
    from transformers.utils import cached_file

    more = {key: where[key] for key in ("local_files_only", "revision") if key in where}
    try:
        index = cached_file(path, "model.safetensors.index.json", **more)
        return int(json.loads(Path(str(index)).read_text())["metadata"]["total_size"])
    except Exception:  # one file without an index, or no connection
        return None


def _kv_bytes(model: Any, text: Any, dtype: Any, tp: int | None) -> tuple[list[int], bool]:
    """Return the bytes of keys and values of one token in each layer, and whether they are only computed."""
    import torch
    from transformers import DynamicCache

    layers = int(text.num_hidden_layers)
    width = int(model.get_input_embeddings().weight.shape[1])
    _, groups, head_dim = _attention(text, width)
    share = tp if tp and groups % tp == 0 and any(_divided(n, _tp_plan(model)) for n in _keys(model)) else 1
    try:
        cache = DynamicCache(config=text)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device="meta"), **{name: cache})
        found = [
            sum(tensor.numel() * tensor.element_size() for tensor in (layer.keys, layer.values)) // 2
            for layer in cache.layers
        ]
        if len(found) == layers and all(found):
            return [each // share for each in found], False
    except Exception:  # models that look at numbers while they run, layers of other kinds
        pass
    return [2 * groups * head_dim * dtype.itemsize // share] * layers, True


def _keys(model: Any) -> list[str]:
    return [name for name, _ in model.named_parameters() if re.search(r"(k_proj|qkv_proj|query_key_value)\.", name)]


def _attention(text: Any, width: int) -> tuple[int, int, int]:
    """Return heads of queries, heads of keys and their width; one head where there is no attention."""
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    return heads, groups, int(getattr(text, "head_dim", None) or width // heads)


def _widest(text: Any, width: int) -> int:
    """Return the numbers that one token takes at the widest moment of a layer: attention or MLP."""
    heads, groups, head_dim = _attention(text, width)
    inner = int(getattr(text, "intermediate_size", None) or 4 * width)
    expert = getattr(text, "moe_intermediate_size", None)
    if expert:
        active = int(getattr(text, "num_experts_per_tok", 1)) + int(getattr(text, "n_shared_experts", 0) or 0)
        inner = max(inner, int(expert) * active)
    streams = int(getattr(text, "hc_mult", 1) or 1)
    return (3 + streams) * width + max(3 * inner, 2 * (heads + 2 * groups) * head_dim)


# ---- plans -----------------------------------------------------------------------------------------------------------


def plan_memory(
    target: str,
    drafter: str,
    load: Load,
    *,
    device: str = "auto",
    device_map: str | None = None,
    places: Mapping[str, Any] | None = None,
    tp: int | None = None,
    quantize: str | None = None,
    checkpoint: Any = None,
    devices: Mapping[str, int] | None = None,
    revision: str | None = None,
    **loading: Any,
) -> Memory:
    """Return the memory that target and drafter take, before either is loaded.

    Parameters
    ----------
    target, drafter : str
        As on the command line.
    load : Load
    device, device_map, places, tp, quantize
        See :func:`asdsim.engines.transformers.load.load_model`.
    checkpoint : Checkpoint, optional
        Of a head, see :func:`asdsim.capture.drafters.check_head`.
    devices : mapping of str to int, optional
        Free bytes by device, instead of this machine's.
    revision : str, optional
        Of the target.
    **loading
        ``dtype``, ``offline``, ``trust_remote_code``.

    Raises
    ------
    CaptureError, UsageError
        If a configuration cannot be had, or there is no such device.
    """
    check_placing(device, device_map if places is None else None, tp, quantize)
    free = dict(devices or free_memory())
    shape = shape_of(target, quantize=quantize, tp=tp, revision=revision, **loading)
    own, drafter_weights, states = _drafter(drafter, shape, load, checkpoint, loading)
    if places is None and device_map not in (None, "auto"):
        places = read_device_map(str(device_map))
    memory = _lay_out(shape, load, free, device, device_map, places, tp, own, states)
    memory.drafter_weights = drafter_weights
    if not memory.fits:
        memory.hints = _hints(
            target, drafter, load, free,
            {"device": device, "device_map": device_map, "tp": tp, "quantize": quantize},
            {"revision": revision, **loading}, checkpoint, memory,
        )  # fmt: skip
    return memory


def _drafter(spec: str, shape: Shape, load: Load, checkpoint: Any, loading: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Return the bytes a drafter takes, those of its weights, and whether the target keeps its hidden states for it."""
    name, argument = check_spec(spec)
    if name == "layer-skip":
        skipped = len(parse_layers(argument))
        layers = max(1, sum(bool(unit.kv) for unit in shape.units))
        kv = shape.kv * (layers - skipped) // layers
        return round(load.tokens(max(kv, 1)) * kv) + max(1, load.batch) * load.K * shape.row, 0, False
    if name == "model":
        other = shape_of(argument, **loading)
        rows = max(1, load.batch) * load.K * other.row
        return other.weights + round(load.tokens(other.kv) * other.kv) + rows, other.weights, False
    if name in HEADS and checkpoint is not None:
        size = shape.row // max(1, _vocabulary(shape)) - 8
        weights = sum(tensor.numel() * size for tensor in checkpoint.tensors.values())
        return weights + max(1, load.batch) * load.K * shape.row, weights, True
    return 0, 0, name in HEADS


def _vocabulary(shape: Shape) -> int:
    """Return the vocabulary of a shape whose logits have 2 or 4 bytes."""
    return next((shape.row // (size + 8) for size in (2, 4) if shape.row % (size + 8) == 0), 1)


def _lay_out(
    shape: Shape, load: Load, free: Mapping[str, int], device: str, device_map: str | None,
    given: Mapping[str, Any] | None, tp: int | None, own: int, states: bool,
) -> Memory:  # fmt: skip
    """Return who holds what."""
    passes = max(1, load.batch)
    tokens = passes * load.positions
    work = tokens * shape.per_token + (tokens * shape.states if states else 0)
    work += passes * load.positions**2 * (shape.pair + (3 if load.batch else 0))  # scores, and the mask of a batch
    rows = (passes * (load.K + 1) if shape.keeps else tokens) * shape.row
    held = load.tokens(shape.kv)
    accelerators = [name for name in free if name != "cpu"]
    places: dict[str, Any] = {}
    if tp is not None:
        names = accelerators[:tp] or ["cpu"] * tp
        if len(names) < tp:
            raise UsageError(f"--tp {tp} needs {tp} devices, here are {len(names)}", fix=f"give --tp {len(names)}")
        groups = {name: list(shape.units) for name in dict.fromkeys(names)}
        if not accelerators:  # all processes on one CPU
            shared = Part("cpu", tp * shape.weights, round(tp * held * shape.kv), tp * (work + rows + own))
            shared.free = free["cpu"]
            return Memory([shared], tp * shape.weights, 0, shape.kv, {}, list(shape.notes))
    elif given is not None:
        groups = _given(shape, given)
    elif device_map == "auto":
        groups = parted(shape, accelerators or ["cpu"], held, rows + work + own)
    else:
        name = device if ":" in device or device == "cpu" else (accelerators or ["cpu"])[0]
        if name not in free and name != "cpu":
            raise UsageError(f"there is no device {name}", fix=f"here are {', '.join(free)}")
        groups = {name: list(shape.units)}
    parts = []
    first = next(iter(groups))
    for name, units in groups.items():
        places |= {unit.name: int(name[5:]) if name.startswith("cuda:") else name for unit in units}
        room = free.get(name, free_host_memory() if name == "cpu" else None)
        if name == "disk":
            room = None
        ends = name == first or tp is not None  # logits come back to where the tokens are, and the drafter is there
        parts.append(Part(
            name, sum(unit.weights for unit in units), round(held * sum(unit.kv for unit in units)),
            work + (rows + own if ends else rows), CONTEXT if name.startswith("cuda") else 0, room,
            [unit.name for unit in units],
        ))  # fmt: skip
    used: Mapping[str, Any] = {} if device_map is None else places if given is None else given
    return Memory(parts, shape.weights * (tp or 1), 0, shape.kv, dict(used), list(shape.notes))


def _given(shape: Shape, given: Mapping[str, Any]) -> dict[str, list[Unit]]:
    """Return the units by device, as a device map says; the longest name that begins a unit's counts."""
    groups: dict[str, list[Unit]] = {}
    for unit in shape.units:
        keys = [key for key in given if key == "" or unit.name == key or unit.name.startswith(f"{key}.")]
        inner = [key for key in given if key.startswith(f"{unit.name}.")]
        if not keys and not inner:
            raise UsageError(f"the device map has no place for {unit.name}", fix='add it, or "" for all the rest')
        place = given[max(keys, key=len) if keys else inner[0]]
        name = f"cuda:{place}" if isinstance(place, int) else "cuda:0" if place == "cuda" else str(place)
        groups.setdefault(name, []).append(unit)
    return groups


def parted(shape: Shape, names: Sequence[str], held: float, first: int = 0) -> dict[str, list[Unit]]:
    """Part units over devices, in order, so that the fullest holds as little as can be.

    Parameters
    ----------
    shape : Shape
    names : sequence of str
        Devices.
    held : float
        Tokens of KV cache.
    first : int
        Bytes that the first device holds besides.
    """
    units = list(shape.units)
    if shape.tied:  # one tensor is on one device
        units.sort(key=lambda unit: unit.weights == 0 and not unit.kv, reverse=True)
    costs = [unit.weights + held * unit.kv for unit in units]

    def fill(most: float) -> list[list[Unit]]:
        groups: list[list[Unit]] = [[]]
        load = float(first)
        for unit, cost in zip(units, costs, strict=True):
            if load + cost > most and (groups[-1] or len(groups) == 1 and first):
                groups.append([])
                load = 0.0
            groups[-1].append(unit)
            load += cost
        return groups

    low, high = max([*costs, 0.0]), first + sum(costs)
    for _ in range(60):
        middle = (low + high) / 2
        if len(fill(middle)) <= len(names):
            high = middle
        else:
            low = middle
    return {name: group for name, group in zip(names, fill(high), strict=False) if group}


def _hints(
    target: str, drafter: str, load: Load, free: Mapping[str, int], placing: dict[str, Any], loading: dict[str, Any],
    checkpoint: Any, memory: Memory,
) -> list[str]:  # fmt: skip
    """Return what would fit, each change by itself."""

    def fits(load: Load = load, devices: Mapping[str, int] = free, **changes: Any) -> bool:
        new = {**placing, **{key: changes.pop(key) for key in tuple(changes) if key in placing}}
        more = {**loading, **changes}
        try:
            shape = shape_of(target, quantize=new["quantize"], tp=new["tp"], **more)
            more.pop("revision")
            own, _, states = _drafter(drafter, shape, load, checkpoint, more)
            layout = _lay_out(shape, load, devices, new["device"], new["device_map"], None, new["tp"], own, states)
        except (CaptureError, UsageError):
            return False
        return layout.fits

    hints = []
    if load.kv_bytes:
        smaller = next((g for g in (8, 4, 2, 1, 0.5, 0) if g * GIB < load.kv_bytes and
                        fits(replace(load, kv_bytes=int(g * GIB)))), None)  # fmt: skip
        if smaller is not None:
            hints.append(f"--kv-gb {smaller:g}")
    if load.batch > 1:
        smaller_batch = next((n for n in (16, 8, 4, 2, 1) if n < load.batch and fits(replace(load, batch=n))), None)
        if smaller_batch:
            hints.append(f"--batch {smaller_batch}")
    wide = loading.get("dtype") in ("auto", "float32")
    if not load.batch and wide and placing["quantize"] is None and fits(dtype="bfloat16"):
        hints.append("--dtype bfloat16")
    if not load.batch and placing["quantize"] is None and placing["tp"] is None:
        fit = [each for each in ("8bit", "4bit") if fits(quantize=each, dtype="bfloat16" if wide else loading["dtype"])]
        if fit:
            hints.append(f"--quantize {fit[0]}" + (" with --dtype bfloat16" if wide else ""))
    spread = placing["device_map"] is None and placing["tp"] is None
    if spread and len(free) > 1 and fits(device="auto", device_map="auto"):
        hints.append("--device-map auto")
    each = min(free.values())
    if "cpu" not in free and placing["tp"] is None:
        for number in (2, 4, 8, 16, 32):
            if number > len(free) and fits(
                devices={f"cuda:{n}": each for n in range(number)}, device="auto", device_map="auto"
            ):
                hints.append(f"{number} such devices with --device-map auto")
                break
    if not load.batch and load.positions > 512 and fits(replace(load, positions=512)):
        hints.append("prompts and --max-new-tokens of 512 tokens together")
    return [f"would fit: {hint}" for hint in hints] or [
        f"nothing that was tried fits; it takes {gb(sum(part.total for part in memory.parts))} in all"
    ]
