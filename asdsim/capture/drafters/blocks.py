"""Parts of the draft layers: norm, rotary positions, attention, gated MLP, and a KV cache that can be cropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from ..lm import RoomyLayer


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) in float32, times a weight (width,)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed tensor, in the dtype of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GatedMLP(torch.nn.Module):
    """down(act(gate x) * up x), without biases."""

    def __init__(self, width: int, inner: int, act: str = "silu") -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.gate_proj = torch.nn.Linear(width, inner, bias=False)
        self.up_proj = torch.nn.Linear(width, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, width, bias=False)
        self.act = ACT2FN[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (.., width)."""
        result: torch.Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return result


class Rotary:
    """Rotary positions as Transformers computes them, scaled variants included.

    No module: its frequencies stay in float32 whatever the dtype of the head.

    Parameters
    ----------
    rope : dict
        ``rope_theta``, ``rope_type`` and what belongs to it, see :func:`.formats.rope_of`.
    head_dim : int
    config : mapping
        Of the layer: ``max_position_embeddings`` where the variant reads it.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, config: Mapping[str, Any] | None = None) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        given = config or {}
        self.inner = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_theta=rope["rope_theta"],
                rope_scaling=None if rope.get("rope_type", "default") == "default" else dict(rope),
                max_position_embeddings=given.get("max_position_embeddings") or 2048,
            )
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn ``x`` (batch, heads, n, width) to ``positions`` (batch or 1, n)."""
        if self.inner.inv_freq.device != x.device:
            self.inner.to(x.device)
        cos, sin = (part[:, None] for part in self.inner(x, positions))
        first, second = x.chunk(2, dim=-1)
        result: torch.Tensor = x * cos + torch.cat([-second, first], dim=-1) * sin
        return result


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return attention (batch, n, heads x width), scaled by 1 / sqrt(width).

    Parameters
    ----------
    queries : tensor (batch, heads, n, width)
    keys, values : tensor (batch, heads or fewer, m, width)
        Each serves an equal share of consecutive query heads.
    mask : bool tensor, broadcastable to (batch, heads, n, m), optional
        True where a query may look.
    """
    share = queries.shape[1] // keys.shape[1]
    if share > 1:
        keys, values = (part.repeat_interleave(share, dim=1) for part in (keys, values))
    out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def heads_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """Split (batch, n, heads x width) into (batch, heads, n, width)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


class Memory:
    """Keys and values of a head's layers for one sequence; entry i depends on the first i + 1 + ``lag`` tokens alone.

    Parameters
    ----------
    layers : int
    lag : int
    """

    def __init__(self, layers: int = 1, lag: int = 0) -> None:
        self.layers = [RoomyLayer() for _ in range(layers)]
        self.lag = lag

    def __len__(self) -> int:
        """Return the number of entries."""
        return int(self.layers[0].get_seq_length())

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append entries (1, heads, n, width) to a layer; return all of its keys and values."""
        return self.layers[layer].update(keys, values)

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer."""
        keys, values = self.layers[layer].keys, self.layers[layer].values
        assert keys is not None and values is not None
        return keys, values

    def cut(self, entries: int) -> None:
        """Keep the first ``entries`` at most."""
        surplus = len(self) - max(0, entries)
        if surplus > 0:
            for layer in self.layers:
                layer.crop(-surplus)

    def crop(self, tokens: int) -> None:
        """Keep what depends on the first ``tokens`` tokens alone."""
        self.cut(tokens - self.lag)
