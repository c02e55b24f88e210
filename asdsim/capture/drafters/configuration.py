"""What ``config.json`` says of a head's computation: layers it reads, rotary positions, windows, shapes.

A key that changes the computation is read here or refused, never ignored. Read, at the top level or in one of the
tables ``transformer_layer_config`` (speculators), ``dflash_config`` and ``eagle_config`` (SpecForge, SGLang, z-lab):

- all: ``vocab_size``, ``draft_vocab_size``, ``target_hidden_size``, ``num_hidden_layers``, ``num_attention_heads``,
  ``num_key_value_heads``, ``head_dim``, ``hidden_act``, ``rms_norm_eps``, ``max_position_embeddings``,
  ``tie_word_embeddings``, ``rope_theta``, ``rope_parameters``, ``rope_scaling``, ``layer_types``, ``sliding_window``,
  ``use_sliding_window``, ``max_window_layers``, and the keys of layers to read;
- EAGLE: ``norm_before_residual``, ``norm_output``, ``fc_norm``, ``norm_before_fc``;
- DSpark and DFlash: ``block_size``, ``mask_token_id``, ``sample_from_anchor``, ``dspark_bonus_anchor``,
  ``markov_rank``, ``projector_type``, ``is_causal``, ``causal``, ``use_swa``, ``swa_window_size``,
  ``sliding_window_non_causal``;
- Medusa: ``medusa_num_heads``, ``num_heads``, ``medusa_num_layers``, ``truncated_vocab_size``.

Refused by name: :data:`REFUSED`. Biases, norms of queries and keys and the Markov variant follow from the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CaptureError
from ...files import Fields, shown
from .formats import Checkpoint

AUX_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
"""Keys of vLLM and speculators: id i is hidden state i."""

TARGET_KEY = "target_layer_ids"
"""Key of DeepSpec, DFlash and SpecForge: id i is hidden state i + 1, the output of layer i."""

EAGLE_TABLE = "eagle_config"
"""Table of SpecForge and SGLang: a key of vLLM's in it is numbered as in SpecForge."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": ({},),
    "compression_config": ({},),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "is_neox_style": (True,),
    "rope_interleave": (False,),
    "partial_rotary_factor": (1,),
    "rope_local_base_freq": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "attn_temperature_tuning": (False,),
    "attention_chunk_size": (),
    "clip_qkv": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "attention_multiplier": (),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "use_qk_norm": (False,),
    "use_aux_hidden_state": (True,),
    "shift_label": (False,),
}
"""Keys of computations that are not implemented, and the values besides null under which they change nothing."""

PROJECTORS = ("dflash", "dspark")
"""What ``projector_type`` may say; ``domino``, for one, is another head."""

FULL, SLIDING = "full_attention", "sliding_attention"

ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "truncate"),
    ),
}  # fmt: skip
"""Rotary variants of Transformers whose angles depend on the position alone: keys each needs, and may have.

``dynamic`` and ``longrope`` change all angles with the length of the sequence, so no key could be kept.
"""


def refuse_unread(checkpoint: Checkpoint) -> None:
    """Refuse a configuration with a key that changes the computation and is not read.

    Raises
    ------
    CaptureError
        Naming the key.
    """
    tables = [checkpoint.config, *(table for table in checkpoint.config.values() if isinstance(table, dict))]
    for table in tables:
        for key, harmless in REFUSED.items():
            value = table.get(key)
            if value is None or any(type(value) in (type(h), float) and value == h for h in harmless):
                continue
            if key == "use_qk_norm" and any("q_norm" in name for name in checkpoint.tensors):
                continue  # a norm with weights; without, it is Llama 4's
            raise CaptureError(
                f"{key} {shown(repr(value))[:80]} changes what the head computes and is not supported",
                where=checkpoint.where,
            )
    projector = checkpoint.fields("projector_type").text("projector_type", None)
    if projector not in (None, *PROJECTORS):
        raise CaptureError(
            f"projector_type {shown(projector)} is not supported", where=checkpoint.where, fix=f"known: {PROJECTORS}"
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
    named = {"--draft-layer-ids": tuple(given)} if given is not None else _named_taps(checkpoint, total, fix)
    if len(set(named.values())) > 1:
        meanings = "; ".join(f"{key} means hidden states {list(taps)}" for key, taps in named.items())
        raise checkpoint.error(f"config.json contradicts itself: {meanings}", fix)
    taps = next(iter(named.values()), None if default is None or len(default) != count else tuple(default))
    if taps is None:
        raise checkpoint.error(f"config.json does not say which {count} layers of the target the head reads", fix)
    if len(taps) != count:
        raise checkpoint.error(
            f"fc takes {count} hidden states, {next(iter(named), 'the default')} names {len(taps)}", fix
        )
    if not all(0 <= tap <= total for tap in taps):
        raise checkpoint.error(f"the head reads hidden states {list(taps)}, the target has 0 to {total}", fix)
    return taps


def _named_taps(checkpoint: Checkpoint, total: int, fix: str) -> dict[str, tuple[int, ...]]:
    """Return the hidden states by the key that names them."""
    named: dict[str, tuple[int, ...]] = {}
    table = checkpoint.table(EAGLE_TABLE)
    for key in AUX_KEYS:
        inner = table.list_of("whole", key, None)
        if inner:
            named[f"{EAGLE_TABLE}.{key}"] = tuple(i + 1 for i in inner)
        fields = checkpoint.fields(key)
        ids = None if fields.where == table.where else fields.list_of("whole", key, None)
        if ids:  # some write an empty list for the default
            if total in ids:  # there it lies before the final norm, which is not tapped
                raise checkpoint.error(f"{key} {ids} names the last layer before the target's final norm", fix)
            named[key] = tuple(ids)
    ids = checkpoint.fields(TARGET_KEY).list_of("whole", TARGET_KEY, None, least=-1)
    if ids is not None:
        named[TARGET_KEY] = tuple(i + 1 for i in ids)
    return named


# ---- rotary positions ------------------------------------------------------------------------------------------------


def rope_of(checkpoint: Checkpoint, given: float | None = None, layer_type: str = FULL) -> dict[str, Any]:
    """Return RoPE parameters of a kind of layers: ``rope_theta``, ``rope_type`` and what belongs to it.

    Multimodal positions (mrope) are plain ones for text: its three axes are equal there. ``deepseek_yarn`` is ``yarn``
    with another default scale of queries and keys, ``attention_factor`` here: m(mscale) / m(mscale_all_dim), where
    m(x) = .1 x ln(factor) + 1 (DeepSeek's public code).

    Raises
    ------
    CaptureError
        If no theta is named, or two that differ, or the variant or a key of it is not known.
    """
    table = _rope_table(checkpoint, layer_type)
    kinds = {kind for key in ("rope_type", "type") if (kind := table.text(key, None)) is not None} - {"mrope"}
    kind = kinds.pop() if kinds else "default"
    if kinds:
        raise CaptureError(f"rope_type and type differ: {kind}, {kinds.pop()}", where=table.where)
    deepseek = kind == "deepseek_yarn"
    kind = "yarn" if deepseek else kind
    if kind not in ROPE_KEYS:
        raise CaptureError(f"RoPE of type {shown(kind)} is not supported", where=table.where, fix=f"known: {known()}")
    needed, optional = ROPE_KEYS[kind]
    usual = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}  # the last is looked at in refuse_unread
    for key, value in table.values.items():
        plain = key in (*needed, *optional) or key in usual or key.startswith("mrope_")
        if not plain and value is not None and not (key == "factor" and value == 1):
            raise CaptureError(
                f"{shown(key)} is not known for RoPE of type {shown(kind)}, and may change it", where=table.where
            )
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": _theta(checkpoint, table, given)}
    for key in needed:
        rope[key] = table.number(key)
    for key in optional:
        value = table.flag(key, None) if key == "truncate" else table.number(key, None)
        if value is not None:
            rope[key] = value
    for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "low_freq_factor"):
        if key in rope and not 0 < rope[key] <= 1e9:
            raise CaptureError(f"{key} is {rope[key]:g}, not above 0 and at most 1e9", where=table.where)
    if rope.get("high_freq_factor", math.inf) <= rope.get("low_freq_factor", 0):
        raise CaptureError("high_freq_factor is not above low_freq_factor", where=table.where)
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    elif kind == "yarn":  # as Transformers takes it
        rope["original_max_position_embeddings"] = checkpoint.layer.whole("max_position_embeddings", least=1)
    if deepseek:
        scale, scale_all = rope.pop("mscale", 1.0), rope.pop("mscale_all_dim", 0.0)
        log = math.log(max(1.0, rope["factor"]))
        rope.setdefault("attention_factor", (0.1 * scale * log + 1) / (0.1 * scale_all * log + 1))
    return rope


def known() -> str:
    """Return the RoPE types that are read."""
    return ", ".join([*ROPE_KEYS, "deepseek_yarn", "mrope"])


def _rope_table(checkpoint: Checkpoint, layer_type: str) -> Fields:
    """Return the table of RoPE parameters, that of ``layer_type`` where each kind of layers has its own."""
    layer = checkpoint.layer
    tables = {key: layer.get(key) for key in ("rope_parameters", "rope_scaling") if layer.get(key, None)}
    if len(tables) == 2 and tables["rope_parameters"] != tables["rope_scaling"]:
        raise CaptureError("rope_parameters and rope_scaling differ", where=layer.where, fix="leave one out")
    if not tables:
        return Fields({}, layer.where, CaptureError)
    table = layer.inner(next(iter(tables)))
    nested = [key for key, value in table.values.items() if isinstance(value, Mapping)]
    if not nested:
        return table
    # The classes of speculators have one rotary embedding, and take the sliding layers' where there are several.
    chosen = SLIDING if checkpoint.from_speculators and SLIDING in nested else layer_type
    return table.inner(chosen)


def _theta(checkpoint: Checkpoint, table: Fields, given: float | None) -> float:
    named = {fields.number("rope_theta", None) for fields in (checkpoint.layer, table)} - {None}
    thetas = named if given is None else {float(given)}
    if not thetas:
        raise checkpoint.error(
            "config.json names no RoPE theta",
            "give --draft-rope-theta 10000, the default of most code",
        )
    if len(thetas) > 1:
        raise checkpoint.error(f"two RoPE thetas, {sorted(thetas)}", "choose one with --draft-rope-theta")
    theta = float(thetas.pop())
    if theta <= 1:
        raise checkpoint.error(f"rope_theta is {theta:g}, not above 1", "give --draft-rope-theta")
    return theta


# ---- windows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """What the slots of a layer may look at.

    Attributes
    ----------
    size : int or None
        W, entries of the prefix; all where None.
    causal : bool
        Within a block, whether a slot sees the slots before it only (DSpark and DFlash).
    anchored : bool
        Whether W counts from the anchor, the same entries for all slots (speculators), or from each slot, which is the
        last of its W (SpecForge, z-lab).
    """

    size: int | None = None
    causal: bool = False
    anchored: bool = False

    @property
    def layer_type(self) -> str:
        """The name of Transformers."""
        return FULL if self.size is None else SLIDING


def windows_of(checkpoint: Checkpoint, layers: int) -> tuple[Window, ...]:
    """Return the window of each layer.

    ``layer_types`` decides; without it ``use_sliding_window`` (from ``max_window_layers`` on), or ``use_swa`` of
    ``dflash_config``; without these a ``sliding_window`` stands for all layers.

    Raises
    ------
    CaptureError
        If keys contradict each other, a kind of layers is not known, or a window has no size.
    """
    layer, block = checkpoint.layer, checkpoint.table("dflash_config")
    swa = block.flag("use_swa", None)
    used = layer.flag("use_sliding_window", swa)
    size = block.whole("swa_window_size", layer.whole("sliding_window", None, least=1), least=1)
    types = layer.list_of("text", "layer_types", None)
    if types is not None:
        types = _types_of(checkpoint, types, layers)
        if used is False and SLIDING in types:
            raise checkpoint.error(f"layer_types has sliding windows ({SLIDING}), use_sliding_window is false")
        if used and SLIDING not in types:
            types = [SLIDING] * layers if swa else types
    elif used is None:
        types = [FULL if size is None else SLIDING] * layers
    else:
        first = layer.whole("max_window_layers", 0)
        types = [SLIDING if used and (swa or n >= first) else FULL for n in range(layers)]
    if SLIDING in types and size is None:
        raise checkpoint.error("config.json does not say sliding_window, the size of the windows")
    causal = checkpoint.fields("is_causal").flag("is_causal", block.flag("causal", None))
    anchored = checkpoint.from_speculators
    if anchored:
        causal_windows = not Fields(checkpoint.config, checkpoint.where, CaptureError).flag(
            "sliding_window_non_causal", False
        )
    else:
        causal_windows = not swa
    return tuple(
        Window(size, causal_windows if causal is None else causal, anchored)
        if kind == SLIDING
        else Window(None, bool(causal))
        for kind in types
    )


def _types_of(checkpoint: Checkpoint, types: list[str], layers: int) -> list[str]:
    """Check ``layer_types``; a list copied from the target is used if all its entries agree."""
    other = sorted(set(types) - {FULL, SLIDING})
    if other:
        raise checkpoint.error(f"layers of type {shown(other[0])} are not supported", f"known: {FULL}, {SLIDING}")
    if len(types) != layers and len(set(types)) != 1:
        raise checkpoint.error(f"layer_types names {len(types)} layers, the head has {layers}")
    return types if len(types) == layers else types[:1] * layers


# ---- shapes ----------------------------------------------------------------------------------------------------------


def count_of(checkpoint: Checkpoint, what: str, numbers: set[int]) -> int:
    """Return how many layers or heads there are, from the numbers in the names of tensors; refuse a gap."""
    missing = set(range(len(numbers))) - numbers
    if missing:
        raise checkpoint.error(f"the tensors of {what} {min(missing)} are missing")
    return len(numbers)


def check_layers(checkpoint: Checkpoint, layers: int) -> None:
    """Refuse a head with more or fewer layers than its configuration says: some weights are missing, or not its own."""
    named = checkpoint.layer.whole("num_hidden_layers", layers, least=1)
    if named != layers:
        raise checkpoint.error(f"config.json says {named} layers, but the tensors hold {layers}")


def attention_shape(checkpoint: Checkpoint, q_proj: torch.Tensor, k_proj: torch.Tensor) -> dict[str, int]:
    """Return ``heads``, ``kv_heads`` and ``head_dim`` of a layer, from the configuration and the projections."""
    layer = checkpoint.layer
    heads = layer.whole("num_attention_heads", 0, least=1)
    head_dim = layer.whole("head_dim", 0, least=1) or (q_proj.shape[0] // heads if heads else 0)
    if not head_dim or q_proj.shape[0] % head_dim or k_proj.shape[0] % head_dim:
        raise checkpoint.error("config.json does not say how many attention heads there are")
    shape = {"heads": q_proj.shape[0] // head_dim, "kv_heads": k_proj.shape[0] // head_dim, "head_dim": head_dim}
    for key, name in (("num_attention_heads", "heads"), ("num_key_value_heads", "kv_heads")):
        if layer.whole(key, shape[name], least=1) != shape[name]:
            raise checkpoint.error(f"{key} is {layer.whole(key)}, but the tensors are of {shape[name]} x {head_dim}")
    if head_dim % 2 or shape["heads"] % shape["kv_heads"]:
        raise checkpoint.error(f"no attention has {shape['heads']} heads of {head_dim} on {shape['kv_heads']} keys")
    return shape


def activation_of(checkpoint: Checkpoint) -> str:
    """Return the activation of the MLP, one that Transformers knows."""
    from transformers.activations import ACT2FN

    name = checkpoint.layer.text("hidden_act", checkpoint.layer.text("hidden_activation", "silu"))
    if name not in ACT2FN:
        checkpoint.layer.refuse("hidden_act", "an activation of Transformers, such as silu or gelu")
    return name


def epsilon_of(checkpoint: Checkpoint) -> float:
    """Return the epsilon of the norms; 1e-6 where none is named."""
    value = checkpoint.layer.number("rms_norm_eps", 1e-6)
    if value < 0:
        checkpoint.layer.refuse("rms_norm_eps", "a number above 0")
    return value


def positions_of(checkpoint: Checkpoint) -> int | None:
    """Return the longest sequence that the head was made for, None where it does not say."""
    return checkpoint.layer.whole("max_position_embeddings", None, least=1)
