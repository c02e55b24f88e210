"""Random draft heads in public layouts, and plain forwards of them that keep no cache and make no batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

HEADS, KV_HEADS = 4, 2


def save(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], file: str = "model.safetensors"
) -> str:
    """Write a checkpoint; return its directory."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def medusa_tensors(
    width: int, vocab: int, heads: int, layers: int = 1, own: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return Medusa heads in the layout of the public code."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn((width, width), generator=random) * 0.3
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(width, generator=random) * 0.1
        if own:
            tensors[f"{i}.{layers}.weight"] = torch.randn((vocab, width), generator=random) * 0.3
    return tensors


def eagle3_tensors(
    width: int, vocab: int, taps: int = 3, draft_vocab: int | None = None, seed: int = 0, norms: bool = False
) -> dict[str, torch.Tensor]:
    """Return an EAGLE-3 head in the layout of SafeAILab; with a draft vocabulary ``d2t`` and ``t2d`` too."""
    random = torch.Generator().manual_seed(seed)
    inner, head_dim = 2 * width, width // HEADS

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.2

    tensors = {
        "fc.weight": matrix(width, taps * width),
        "midlayer.self_attn.q_proj.weight": matrix(width, 2 * width),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, 2 * width),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, 2 * width),
        "midlayer.self_attn.o_proj.weight": matrix(width, width),
        "midlayer.mlp.gate_proj.weight": matrix(inner, width),
        "midlayer.mlp.up_proj.weight": matrix(inner, width),
        "midlayer.mlp.down_proj.weight": matrix(width, inner),
        "lm_head.weight": matrix(draft_vocab or vocab, width),
    }
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + matrix(width)
    if norms:
        for name in ("q", "k"):
            tensors[f"midlayer.self_attn.{name}_norm.weight"] = 1 + matrix(head_dim)
    if draft_vocab is not None:
        chosen = torch.randperm(vocab, generator=random)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def eagle3_config(width: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Return what its ``config.json`` says."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": width, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 500.0, **more,
    }  # fmt: skip


def dspark_tensors(width: int, vocab: int, taps: int, rank: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a DSpark head of one layer in the layout of DeepSpec, without the copies of the target's matrices."""
    random = torch.Generator().manual_seed(seed)
    head_dim = width // HEADS
    shapes = {
        "fc": (width, taps * width),
        "layers.0.self_attn.q_proj": (width, width), "layers.0.self_attn.o_proj": (width, width),
        "layers.0.self_attn.k_proj": (KV_HEADS * head_dim, width),
        "layers.0.self_attn.v_proj": (KV_HEADS * head_dim, width),
        "layers.0.mlp.gate_proj": (2 * width, width), "layers.0.mlp.up_proj": (2 * width, width),
        "layers.0.mlp.down_proj": (width, 2 * width),
        "markov_head.markov_w1": (vocab, rank), "markov_head.markov_w2": (vocab, rank),
    }  # fmt: skip
    norms = {
        "hidden_norm": width, "norm": width, "layers.0.input_layernorm": width,
        "layers.0.post_attention_layernorm": width, "layers.0.self_attn.q_norm": head_dim,
        "layers.0.self_attn.k_norm": head_dim,
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape, generator=random) * 0.2 for name, shape in shapes.items()}
    return tensors | {f"{name}.weight": 1 + torch.randn(size, generator=random) * 0.2 for name, size in norms.items()}


def dspark_config(width: int, vocab: int, block: int, taps: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return what its ``config.json`` says."""
    return {
        **eagle3_config(width, vocab), "architectures": ["Qwen3DSparkModel"], "block_size": block,
        "target_layer_ids": list(taps), "mask_token_id": 3, "markov_rank": 6, "markov_head_type": "vanilla",
        "num_hidden_layers": 1, "intermediate_size": 2 * width, "head_dim": width // HEADS, **more,
    }  # fmt: skip


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the normed rows."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Apply rotary positions 0, 1, .. to x (n, heads, width)."""
    n, _, width = x.shape
    angles = torch.arange(n)[:, None] / theta ** (torch.arange(0, width, 2) / width)
    angles = torch.cat([angles, angles], -1)[:, None]
    half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * angles.cos() + half * angles.sin()


def eagle3_plain(
    tensors: dict[str, torch.Tensor],
    embedding: torch.Tensor,
    ids: Sequence[int],
    states: torch.Tensor,
    steps: int,
    *,
    theta: float = 500.0,
    before_residual: bool = False,
    norm_output: bool = False,
) -> tuple[list[int], torch.Tensor]:
    """Draft with an EAGLE-3 head by running the whole sequence anew at each step."""
    w = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
    features = states @ w["fc.weight"].T
    tokens, rows, drafted = list(ids[1:]), [], []
    for _ in range(steps):
        normed = rms(features, w["hidden_norm.weight"])
        z = torch.cat([rms(embedding[tokens], w["input_layernorm.weight"]), normed], -1)
        n, width = normed.shape
        dim = width // HEADS
        q, k, v = ((z @ w[f"self_attn.{x}_proj.weight"].T).view(n, -1, dim) for x in "qkv")
        if "self_attn.q_norm.weight" in w:
            q, k = rms(q, w["self_attn.q_norm.weight"]), rms(k, w["self_attn.k_norm.weight"])
        q, k = turn(q, theta), turn(k, theta)
        mixed = torch.empty(n, HEADS, dim)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            score = (q[:, head] @ k[:, group].T / dim**0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            mixed[:, head] = score.softmax(-1) @ v[:, group]
        x = (normed if before_residual else features) + mixed.flatten(1) @ w["self_attn.o_proj.weight"].T
        h = rms(x, w["post_attention_layernorm.weight"])
        x = x + (functional.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)) @ (
            w["mlp.down_proj.weight"].T
        )
        out = rms(x[-1], w["norm.weight"])
        rows.append(out @ w["lm_head.weight"].T)
        best = int(rows[-1].argmax())
        drafted.append(best + int(w["d2t"][best]) if "d2t" in w else best)
        tokens.append(drafted[-1])
        features = torch.cat([features, (out if norm_output else x[-1])[None]])
    return drafted, torch.stack(rows)
