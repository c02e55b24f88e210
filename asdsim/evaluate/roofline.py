"""Passes of the target from first principles: a model's size on a device's data sheet.

A pass over v tokens of b requests that stand on C tokens together takes

    overhead + max(bytes / (bandwidth x MEMORY_SHARE), FLOPs / (peak x COMPUTE_SHARE)) + all-reduces

with bytes = weights read once + C x key-value bytes per token, FLOPs = 2 x active weights x v + attention. Of a mixture
of experts the weights read are those of the experts that v tokens meet, E (1 - (1 - k/E)^v) of E under even routing.
Under tensor parallelism bytes and FLOPs are shared by the devices, and each layer sums over them twice.

The shares, the overhead of a layer and the time of an all-reduce are assumptions. They were set from two published
times, Llama-2-7B in bfloat16 on one and two A100-80GB by gpt-fast (104.9 and 168.84 tokens per second), and the other
published times were left to check them: see docs/load.md and ``analysis/roofline.py``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError, unknown_name
from ..files import Fields, read_json
from .cost import Cost

if TYPE_CHECKING:
    from ..walk.batch import Times

MEMORY_SHARE, COMPUTE_SHARE = 0.80, 0.60
"""Of the data sheet's bandwidth and of its dense peak that a decoding pass is taken to reach."""
LAYER_US = 44.0
"""Launches and waits of one layer, in microseconds."""
ALL_REDUCE_US = 7.3
"""One sum over all devices of a small tensor, in microseconds."""
MISSED = (-0.36, 0.52)
"""Smallest and largest error against published times by batch and width; see ``analysis/roofline.py``."""


@dataclass(frozen=True)
class Device:
    """A data sheet.

    Attributes
    ----------
    tflops : float
        Dense peak in bfloat16, 1e12 operations per second.
    gbps : float
        Memory bandwidth, 1e9 bytes per second.
    sheet : str
        Where the figures stand.
    """

    tflops: float
    gbps: float
    sheet: str


DEVICES = {
    "a100": Device(312.0, 2039.0, "NVIDIA A100 80GB SXM data sheet"),
    "h100": Device(989.4, 3350.0, "NVIDIA H100 SXM data sheet, without sparsity"),
    "h200": Device(989.4, 4800.0, "NVIDIA H200 SXM data sheet, without sparsity"),
    "b200": Device(2250.0, 8000.0, "NVIDIA DGX B200 data sheet, per GPU, without sparsity"),
    "l40s": Device(362.0, 864.0, "NVIDIA L40S data sheet, without sparsity"),
    "mi300x": Device(1307.4, 5300.0, "AMD Instinct MI300X data sheet"),
    "mi250x-gcd": Device(191.5, 1638.4, "AMD Instinct MI250X data sheet, one of its two dies"),
}


@dataclass(frozen=True)
class Size:
    """Weights of a decoder, in numbers, not bytes.

    Attributes
    ----------
    layers : int
    dense : float
        Weights that every pass reads: attention, norms left out, dense and shared MLPs, routers, and the output head.
    expert : float
        Weights of one routed expert, over all layers that have experts; 0 in a dense model.
    experts, active : int
        Routed experts of a layer, and how many a token meets.
    kv : float
        Keys and values of one token, over all layers.
    attention : float
        Multiply-adds of one token with one token of context, over all layers.
    hidden : int
    vocab : int
    """

    layers: int
    dense: float
    expert: float
    experts: int
    active: int
    kv: float
    attention: float
    hidden: int
    vocab: int

    def read(self, tokens: Any) -> Any:
        """Return the weights that a pass over so many tokens reads."""
        if not self.experts:
            return self.dense + 0.0 * tokens
        met = self.experts * (1.0 - (1.0 - self.active / self.experts) ** np.asarray(tokens, np.float64))
        return self.dense + self.expert * met

    @property
    def used(self) -> float:
        """Weights that one token is multiplied with."""
        return self.dense + self.expert * self.active


def size_of(config: dict[str, Any], where: str) -> Size:
    """Return the size of a decoder from its ``config.json`` as Transformers writes it.

    Raises
    ------
    UsageError
        If a dimension is missing, or the attention is of a kind that is not known here (MLA, state spaces).
    """
    fields = Fields(config.get("text_config") or config, where)
    for key in ("kv_lora_rank", "ssm_state_size", "linear_num_key_heads", "mamba_num_heads"):
        if fields.values.get(key):
            fix = "give a table of measured passes"
            raise UsageError(f"{key}: this kind of attention is not in the roofline", where=where, fix=fix)
    layers, hidden, heads = (
        fields.whole(k, least=1) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    head = fields.whole("head_dim", 0, least=1) or hidden // heads
    groups = fields.whole("num_key_value_heads", heads, least=1)
    vocab = fields.whole("vocab_size", least=1)
    inner = fields.whole("intermediate_size", 0)
    experts = next(
        (fields.whole(k) for k in ("num_experts", "num_local_experts", "n_routed_experts") if fields.get(k, None)), 0
    )
    attention = hidden * head * (2 * heads + 2 * groups)
    dense_layers, routed, shared = layers, 0, 0.0
    if experts:
        dense_layers = fields.whole("first_k_dense_replace", 0)
        routed = layers - dense_layers
        expert = 3 * hidden * (fields.whole("moe_intermediate_size", 0) or inner)
        shared = hidden * experts + expert * fields.whole("n_shared_experts", 0)
        shared += 3 * hidden * fields.whole("shared_expert_intermediate_size", 0)
    dense = layers * attention + dense_layers * 3 * hidden * inner + routed * shared + hidden * vocab
    return Size(
        layers, float(dense), float(routed * expert) if experts else 0.0, experts,
        fields.whole("num_experts_per_tok", least=1) if experts else 0, 2.0 * layers * groups * head,
        2.0 * layers * heads * head, hidden, vocab,
    )  # fmt: skip


DRAFTS = ("lookup", "head", "block")


@dataclass(frozen=True)
class Roofline(Cost):
    """A decoder on a device, and what drafts for it.

    Attributes
    ----------
    device, size
    tp : int
        Devices that share each layer.
    bits, kv_bits : float
        Of a weight, and of a key or value.
    draft : str or Size
        ``lookup``: no model, no time. ``head``: one layer and the output head of the target, run once per draft token
        (EAGLE). ``block``: the same, run once for the whole draft (Medusa, DSpark). A size: a model of its own, run
        once per draft token.
    source : str
    remarks : list of str
        More to say of every figure.
    """

    device: Device
    size: Size
    tp: int
    bits: float
    kv_bits: float
    draft: str | Size
    source: str
    remarks: list[str] = field(default_factory=list)

    def pass_us(self, tokens: Any, context: Any = 0.0, batch: int = 1) -> Any:
        """Return microseconds of one pass; see :meth:`asdsim.evaluate.cost.Cost.pass_us`."""
        return self._pass(self.size, tokens, context, batch)

    def _pass(self, size: Size, tokens: Any, context: Any, batch: int) -> Any:
        memory, compute, fixed = self._parts(size, np.asarray(tokens, np.float64))
        per_memory, per_compute = self._per_context(size)
        each = np.asarray(tokens, np.float64) / batch
        return fixed + np.maximum(memory + per_memory * context, compute + per_compute * each * context)

    def _parts(self, size: Size, tokens: Any) -> tuple[Any, Any, Any]:
        """Return microseconds of memory, arithmetic and the rest for a pass without context."""
        memory = size.read(tokens) * self.bits / 8 / (self.tp * self.device.gbps * MEMORY_SHARE) * 1e-3
        compute = 2.0 * size.used * tokens / (self.tp * self.device.tflops * COMPUTE_SHARE) * 1e-6
        fixed = size.layers * LAYER_US
        if self.tp > 1:
            fixed += 2 * size.layers * ALL_REDUCE_US
        return memory, compute, fixed

    def _per_context(self, size: Size) -> tuple[float, float]:
        """Return microseconds that one token of context adds: to memory, and to arithmetic for one token of a pass."""
        memory = size.kv * self.kv_bits / 8 / (self.tp * self.device.gbps * MEMORY_SHARE) * 1e-3
        return memory, 2.0 * size.attention / (self.tp * self.device.tflops * COMPUTE_SHARE) * 1e-6

    def draft_us(self, drafted: Any, context: Any = 0.0, batch: int = 1) -> Any:
        """Return microseconds of drafting at most K tokens for each request."""
        K = np.asarray(drafted, np.float64)
        if self.draft == "lookup":
            return np.zeros_like(K)
        size = self.draft if isinstance(self.draft, Size) else _one_layer(self.size)
        if self.draft == "block":
            return np.where(K > 0, self._pass(size, batch * np.maximum(K, 1.0), context, batch), 0.0)
        return K * self._pass(size, np.float64(batch), context, batch)

    def times(self, batch: int, K: int, longest: int, chunk: int = 0) -> Times:
        """Return seconds of the parts of an iteration; the arithmetic of attention is that of K + 1 tokens each."""
        plain = super().times(batch, K, longest, chunk)
        memory, compute, fixed = self._parts(self.size, np.arange(plain.memory.shape[1], dtype=np.float64))
        per_memory, per_compute = self._per_context(self.size)
        shape = plain.memory.shape
        return plain._replace(
            memory=1e-6 * np.broadcast_to(memory + fixed, shape).copy(), memory_per_context=1e-6 * per_memory,
            compute=1e-6 * np.broadcast_to(compute + fixed, shape).copy(),
            compute_per_context=1e-6 * per_compute * (K + 1),
        )  # fmt: skip

    def notes(self) -> list[str]:
        """Return what the figures assume."""
        lines = [
            f"a roofline, not a measurement: {self.device.sheet}; {MEMORY_SHARE:.0%} of its bandwidth and "
            f"{COMPUTE_SHARE:.0%} of its peak taken to be reached, {LAYER_US:g} us of overhead per layer",
            f"published step times by batch and width were missed by {MISSED[0]:+.0%} to {MISSED[1]:+.0%}, most where "
            "batches are large or models small: a measured table is worth more",
        ]
        if self.size.experts:
            lines.append("of a mixture of experts published passes took 17 to 46 % longer than this roofline")
        return [*lines, *self.remarks]

    def to_dict(self) -> dict[str, Any]:
        """Return what the figures are made of."""
        return {
            "source": self.source, "device": asdict(self.device), "size": asdict(self.size), "tp": self.tp,
            "bits": self.bits, "kv_bits": self.kv_bits,
            "draft": self.draft if isinstance(self.draft, str) else asdict(self.draft), "notes": self.notes(),
        }  # fmt: skip


def _one_layer(size: Size) -> Size:
    """Return one layer of a model and its output head, with the first layer's share of an even model."""
    head = size.hidden * size.vocab
    share = (size.used - head) / size.layers
    return Size(
        1, share + head, 0.0, 0, 0, size.kv / size.layers, size.attention / size.layers, size.hidden, size.vocab
    )


def read_roofline(spec: str) -> Roofline:
    """Read ``roofline:DEVICE,model=CONFIG.json,draft=lookup|head|block|CONFIG.json[,tp=1][,bits=16][,kv_bits=16]``.

    Raises
    ------
    UsageError
        On an unknown device or key, or a config that does not say a model's size.
    """
    device, *items = spec.removeprefix("roofline:").split(",")
    if device not in DEVICES:
        raise unknown_name("device", device, list(DEVICES))
    given = dict(item.partition("=")[::2] for item in items)
    known = ("model", "draft", "tp", "bits", "kv_bits")
    for key in given:
        if key not in known:
            raise unknown_name("part of a roofline", key, list(known))
    for key, fix in (("model", "model=CONFIG.json"), ("draft", "draft=lookup, head, block or CONFIG.json")):
        if not given.get(key):
            raise UsageError(f"the roofline lacks {key}", where=spec, fix=f"add {fix}")
    numbers = {key: _number(given.get(key, default), key, spec) for key, default in
               (("tp", "1"), ("bits", "16"), ("kv_bits", "16"))}  # fmt: skip
    draft = given["draft"] if given["draft"] in DRAFTS else _size(given["draft"])
    return Roofline(
        DEVICES[device], _size(given["model"]), int(numbers["tp"]), numbers["bits"], numbers["kv_bits"], draft, spec
    )


def _size(name: str) -> Size:
    path = Path(name)
    config = read_json(path / "config.json" if path.is_dir() else path)
    if not isinstance(config, dict):
        raise UsageError("not a model's config.json", where=name)
    return size_of(config, name)


def _number(text: str, key: str, spec: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6 or (key == "tp" and not value.is_integer()):
        raise UsageError(f"{key}={text} is no {'whole ' if key == 'tp' else ''}number above 0", where=spec)
    return value
