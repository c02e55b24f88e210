"""Parts of the draft layers: norm, gated MLP and rotary positions of Transformers, attention, a KV cache to crop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm as RMSNorm

from ...engines.transformers.forward import RoomyLayer


def gated_mlp(width: int, inner: int, act: str = "silu") -> LlamaMLP:
    """Return down(act(gate x) * up x), without biases."""
    return LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=inner, hidden_act=act))


class Rotary:
    """Rotary positions as Transformers computes them, scaled variants included.

    Not a module: its frequencies stay in float32 whatever the dtype of the head.

    Parameters
    ----------
    rope : dict
        ``rope_theta``, ``rope_type`` and what belongs to it, see :func:`.configuration.rope_of`.
    head_dim : int
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int) -> None:
        with torch.device("cpu"):  # heads are built without memory, on "meta"
            self.inner = LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_theta=rope["rope_theta"],
                    rope_scaling=None if rope.get("rope_type", "default") == "default" else dict(rope),
                    max_position_embeddings=_extended(rope),
                )
            )  # fmt: skip

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn ``x`` (batch, heads, n, width) to ``positions`` (batch or 1, n)."""
        if self.inner.inv_freq.device != x.device:
            self.inner.to(x.device)
        cos, sin = (table[:, None] for table in self.inner(x, positions))
        first, second = x.chunk(2, dim=-1)
        result: torch.Tensor = x * cos + torch.cat([-second, first], dim=-1) * sin
        return result


def _extended(rope: Mapping[str, Any]) -> int:
    """Return the positions that a variant reaches; Transformers compares them with ``factor``, and uses no other."""
    return round(rope.get("original_max_position_embeddings", 2048) * rope.get("factor", 1.0))


def looking_back(queries: torch.Tensor, keys: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Return which keys a query of causal attention may look at.

    Parameters
    ----------
    queries, keys : int64 (.., n), (.., m)
        Positions; negative ones are padding, which nothing looks at.
    window : int, optional
        The last so many keys only, that of the query among them.

    Returns
    -------
    bool tensor (.., n, m)
    """
    query, key = queries[..., :, None], keys[..., None, :]
    seen = (key <= query) & (key >= 0)
    return seen if window is None else seen & (key > query - window)


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
        keys, values = (held.repeat_interleave(share, dim=1) for held in (keys, values))
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

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append entries (batch, heads, n, width) to a layer; return all of its keys and values."""
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


__all__ = ["Memory", "RMSNorm", "Rotary", "attend", "gated_mlp", "heads_of", "looking_back"]
