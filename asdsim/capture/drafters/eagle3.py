"""EAGLE-3: one decoder layer that reads three layers of the target, then its own states; EAGLE-1 and 2 as a variant.

With g = fc [three taps], entry i of the prefix stands at position i, for i = 0..n-1: token x_{i+1} with feature g_i, so
the token is one ahead of the feature. Then

    z = [RMS_input(embedding); RMS_hidden(feature)]     queries, keys and values take 2d
    x = residual + attention(z)                          residual: the feature, or the normed one (norm_before_residual)
    x = x + MLP(RMS_post(x))
    logits = lm_head(RMS(x))                             row j stands for token j + d2t[j]

and the next entry is the drafted token with feature x (normed with ``norm_output``) at the next position. EAGLE-1 and 2
read the state behind the final norm, take fc [embedding; feature] into a layer without input norms, and put x straight
into the target's projection. Some heads norm what fc takes: each tap (``fc_norm``) or all at once (``norm_before_fc``).

With a window W, entry i looks at the true entries i - W + 1 .. i; a draft looks at those that the last true entry looks
at, and at all drafts before it. So speculators trains such heads; an engine that counts W from each draft drops up to
K - 1 entries more at the far end.

Formula and layouts: Li et al., "EAGLE-3" (arXiv 2503.01840) and the public code of SafeAILab, SpecForge, speculators
and DeepSpec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import CaptureError
from .blocks import Memory, RMSNorm, Rotary, attend, gated_mlp, heads_of, looking_back
from .configuration import (
    activation_of,
    attention_shape,
    check_layers,
    epsilon_of,
    positions_of,
    refuse_unread,
    rope_of,
    taps_of,
    windows_of,
)
from .formats import Checkpoint, need
from .heads import Borrowed, Head, check_size, fill, target_shape, tied, vocabulary_of


class Attention(torch.nn.Module):
    """Self-attention with rotary positions, over inputs of another width than the outputs."""

    def __init__(
        self, inputs: int, width: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool, norms: bool, eps: float
    ) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(inputs, heads * head_dim, bias=bias)
        self.k_proj = torch.nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.v_proj = torch.nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.o_proj = torch.nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, eps) if norms else torch.nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps) if norms else torch.nn.Identity()
        self.head_dim = head_dim

    def forward(
        self, z: torch.Tensor, positions: torch.Tensor, rotary: Rotary, mask: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """Append keys and values of ``z`` (batch, n, inputs) to the memory; return (batch, n, width)."""
        q, k, v = (heads_of(project(z), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotary(self.q_norm(q), positions), rotary(self.k_norm(k), positions)
        keys, values = memory.update(k, v, 0)
        result: torch.Tensor = self.o_proj(attend(q, keys, values, mask))
        return result


class Layer(torch.nn.Module):
    """The decoder layer; ``early`` is that of EAGLE-1 and 2."""

    def __init__(self, width: int, inner: int, act: str, eps: float, early: bool, **attention: Any) -> None:
        super().__init__()
        self.self_attn = Attention(width if early else 2 * width, width, eps=eps, **attention)
        self.mlp = gated_mlp(width, inner, act)
        self.post_attention_layernorm = RMSNorm(width, eps)
        if not early:
            self.hidden_norm = RMSNorm(width, eps)
            self.input_layernorm = RMSNorm(width, eps)


class Eagle3(Head):
    """An EAGLE-3 head, or one of EAGLE-1 and 2.

    Parameters
    ----------
    target_model : transformers.PreTrainedModel
    taps : sequence of int
        Hidden states that it reads.
    rope : dict
        See :func:`.configuration.rope_of`.
    width, inner, heads, kv_heads, head_dim : int
        Of the layer: hidden size, MLP, attention.
    token_ids : int64 tensor (V_d,), optional
        The draft vocabulary; the target's where None.
    own_embedding, own_output : bool
        Whether the head has its own token embedding and projection, or uses the target's.
    norm_before_residual, norm_output : bool
    fc_norm, input_norm : bool
        Norms of each tap and of all taps together, before fc.
    bias, norms, fc_bias : bool
        Biases of queries, keys and values; norms of queries and keys; bias of fc.
    early : bool
        EAGLE-1 and 2.
    window : int, optional
        W, true entries that an entry looks at; all before it where None.
    """

    kind = "eagle3"

    def __init__(
        self,
        target_model: Any,
        taps: Sequence[int],
        rope: Mapping[str, Any],
        *,
        width: int,
        inner: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        token_ids: torch.Tensor | None = None,
        own_embedding: bool = False,
        own_output: bool = True,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        fc_norm: bool = False,
        input_norm: bool = False,
        bias: bool = False,
        norms: bool = False,
        fc_bias: bool = False,
        early: bool = False,
        act: str = "silu",
        eps: float = 1e-6,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, _ = target_shape(target_model)
        self.taps, self.early, self.window = tuple(taps), early, window
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.fc = torch.nn.Linear(2 * width if early else len(self.taps) * self.hidden_size, width, bias=fc_bias)
        self.layer = Layer(
            width, inner, act, eps, early, heads=heads, kv_heads=kv_heads, head_dim=head_dim, bias=bias, norms=norms
        )
        if not early:
            self.norm = RMSNorm(width, eps)
        if fc_norm:
            self.fc_norm = torch.nn.ModuleList(RMSNorm(self.hidden_size, eps) for _ in self.taps)
        if input_norm:
            self.input_norm = RMSNorm(len(self.taps) * self.hidden_size, eps)
        if own_embedding:
            self.embed_tokens = torch.nn.Embedding(self.vocab_size, width)
        if own_output:
            rows = self.vocab_size if token_ids is None else len(token_ids)
            self.lm_head = torch.nn.Linear(width, rows, bias=False)
        self.borrowed = Borrowed(target_model, None if own_output else token_ids)
        self.rotary = Rotary(rope, head_dim)
        self.register_buffer("token_ids", token_ids, persistent=False)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target_model: Any, **overrides: Any) -> Eagle3:
        """Build from any public layout, see the module; ``layer_ids`` and ``rope_theta`` may be overridden."""
        refuse_unread(checkpoint)
        tensors, maps = _renamed(checkpoint)
        fc, q_proj, k_proj, up_proj = (
            need(checkpoint, tensors, name)
            for name in (
                "fc.weight", "layer.self_attn.q_proj.weight", "layer.self_attn.k_proj.weight",
                "layer.mlp.up_proj.weight",
            )
        )  # fmt: skip
        width = fc.shape[0]
        early = q_proj.shape[1] == width
        if not early:
            tensors = tied(checkpoint, tensors)
        taps = _taps(checkpoint, fc, early, target_model, overrides.get("layer_ids"))
        token_ids = vocabulary_of(checkpoint, tensors, maps, ("embed_tokens.weight",), width, target_model)
        check_layers(checkpoint, 1)
        (window,) = windows_of(checkpoint, 1)
        if checkpoint.fields("is_causal").flag("is_causal", True) is False:
            raise CaptureError("is_causal is false: no EAGLE head looks ahead", where=checkpoint.where)
        flags = {key: checkpoint.fields(key).flag(key, False) for key in FLAGS}
        for key, name in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
            if flags[key] and name not in tensors:
                raise checkpoint.error(f"{key} is true, but tensor {name} is missing")
        if not checkpoint.from_speculators and not checkpoint.fields("norm_output").flag("norm_output", True):
            raise CaptureError(  # SpecForge's key; in speculators it is about the feature that a draft leaves
                "norm_output is false: a head without a last norm is not supported", where=checkpoint.where
            )
        rope = rope_of(checkpoint, overrides.get("rope_theta"), window.layer_type)
        with torch.device("meta"):
            head = cls(
                target_model, taps, rope, width=width, inner=up_proj.shape[0],
                **attention_shape(checkpoint, q_proj, k_proj), token_ids=token_ids,
                own_embedding="embed_tokens.weight" in tensors, own_output="lm_head.weight" in tensors,
                norm_before_residual=flags["norm_before_residual"],
                # SpecForge's key of this name is the norm before the projection.
                norm_output=checkpoint.from_speculators and flags["norm_output"],
                fc_norm="fc_norm.0.weight" in tensors, input_norm="input_norm.weight" in tensors,
                bias="layer.self_attn.q_proj.bias" in tensors, norms="layer.self_attn.q_norm.weight" in tensors,
                fc_bias="fc.bias" in tensors, early=early, act=activation_of(checkpoint), eps=epsilon_of(checkpoint),
                window=window.size,
            )  # fmt: skip
        head.trained_positions = positions_of(checkpoint)
        return fill(head, checkpoint, tensors, target_model)

    def memory(self) -> Memory:
        """Return an empty memory; entry i depends on tokens up to x_{i+1}."""
        return Memory(1, lag=1)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Return the features (.., width) of true states (.., taps x d)."""
        if self.early:
            return states
        if hasattr(self, "input_norm"):
            states = self.input_norm(states)
        if hasattr(self, "fc_norm"):
            taps = states.split(self.hidden_size, dim=-1)
            states = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        result: torch.Tensor = self.fc(states)
        return result

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        memory: Memory,
    ) -> torch.Tensor:
        """Run entries behind those in memory.

        Parameters
        ----------
        tokens : int64 (batch, n)
        features : tensor (batch, n, width)
        positions : int64 (batch or 1, n)
        mask : bool, broadcastable to (batch, heads, n, entries in memory + n)
        memory : Memory
            Extended by the entries.

        Returns
        -------
        tensor (batch, n, width)
            x, before the last norm.
        """
        embedding = (self.embed_tokens if hasattr(self, "embed_tokens") else self.borrowed.embed)(tokens)
        layer = self.layer
        if self.early:
            z = residual = self.fc(torch.cat([embedding, features], dim=-1))
        else:
            normed = layer.hidden_norm(features)
            z = torch.cat([layer.input_layernorm(embedding), normed], dim=-1)  # in the order of the public weights
            residual = normed if self.norm_before_residual else features
        x = residual + layer.self_attn(z, positions, self.rotary, mask, memory)
        result: torch.Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return result

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logit rows (.., V_d) over the draft vocabulary."""
        output = self.lm_head if hasattr(self, "lm_head") else self.borrowed.project
        rows: torch.Tensor = output(x if self.early else self.norm(x))
        return rows

    def draft(
        self, ids: list[int], states: torch.Tensor, memory: Memory, num_draft_tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """Draft greedily behind the true entries."""
        n = len(states)
        memory.cut(n - 1)  # the draft starts from what the last true entry puts out
        held = len(memory)
        device = states.device
        tokens = torch.tensor([ids[held + 1 :]], dtype=torch.int64, device=device)
        entries = torch.arange(n, device=device)
        mask = looking_back(entries[held:], entries, self.window)
        x = self(tokens, self.features(states[held:])[None], entries[None, held:], mask, memory)
        drafts = self._steps(
            x[:, -1:], torch.tensor([n], device=device), mask[None, None, -1:], memory, num_draft_tokens
        )
        memory.cut(n)
        return drafts[0]

    def draft_behind(
        self, tokens: torch.Tensor, states: torch.Tensor, places: torch.Tensor, memory: Memory,
        anchors: torch.Tensor, num_draft_tokens: int,
    ) -> list[tuple[list[int], torch.Tensor]]:  # fmt: skip
        """Draft behind the entries of a batch."""
        fresh = places[:, -tokens.shape[1] :]
        mask = looking_back(fresh, places, self.window)
        # Padding looks at itself, or it would be NaN.
        mask[..., -tokens.shape[1] :] |= torch.eye(tokens.shape[1], dtype=torch.bool, device=mask.device)
        mask = mask[:, None]
        x = self(tokens, self.features(states), fresh.clamp(min=0), mask, memory)
        return self._steps(x[:, -1:], places[:, -1] + 1, mask[:, :, -1:], memory, num_draft_tokens)

    def _steps(
        self, x: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, memory: Memory, steps: int
    ) -> list[tuple[list[int], torch.Tensor]]:
        """Draft on own states: from x (batch, 1, width) of the last true entry, the next at ``position`` (batch,).

        ``mask`` (batch or 1, 1, 1, entries) is that of the last true entry; drafts see the same, and each other.
        """
        rows, picked = [], []
        for step in range(steps):
            rows.append(self.logits(x))
            picked.append(self.tokens_of(rows[-1].argmax(-1)))
            if step + 1 < steps:
                # All drafts before it are seen, and of the true entries no others: so such heads are trained.
                mask = torch.cat([mask, mask.new_ones((*mask.shape[:-1], 1))], dim=-1)
                feature = self.norm(x) if self.norm_output else x
                x = self(picked[-1], feature, (position + step)[:, None], mask, memory)
        return list(zip(torch.cat(picked, 1).tolist(), torch.cat(rows, 1), strict=True))


FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
"""Keys of the configuration that are true or false."""


def _taps(
    checkpoint: Checkpoint, fc: torch.Tensor, early: bool, target_model: Any, given: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the hidden states that a head reads, after a look at the hidden size that it was made for."""
    target_width, _, total = target_shape(target_model)
    made_for = checkpoint.fields("target_hidden_size").whole("target_hidden_size", 0, least=1)
    if not made_for:
        made_for = target_width if not early and fc.shape[1] == 3 * target_width else fc.shape[0]
    check_size(checkpoint, "hidden size", made_for, target_width)
    if early:
        return taps_of(checkpoint, 1, total, given, default=(total,))
    if fc.shape[1] % target_width:
        raise checkpoint.error(f"fc takes {fc.shape[1]} numbers, not a multiple of the target's {target_width}")
    return taps_of(checkpoint, fc.shape[1] // target_width, total, given, default=(2, total // 2, total - 3))


def _renamed(checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors under our names, and the maps between the vocabularies."""
    tensors: dict[str, torch.Tensor] = {}
    maps: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        ours = re.sub(r"^(midlayer|layers\.0)\.", "layer.", name.removeprefix("model."))
        if ours in ("d2t", "t2d"):
            maps[ours] = tensor
        elif not ours.endswith("rotary_emb.inv_freq"):  # old files carry it; it follows from theta
            tensors[ours] = tensor
    return tensors, maps
