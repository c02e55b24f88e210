"""DSpark: a block of mask tokens drafted at once from the target's states, corrected token by token; DFlash without.

With C = RMS_hidden(fc [taps]) at positions 0..n-1 and a block of B embeddings [x_n, mask, .., mask] at n..n+B-1, each
layer takes keys and values from [C; RMS_in(block)] and queries from the block, which sees all of itself. Then
h = RMS(block), U = lm_head(h), and from left to right, with x the token before and e = W1[x],

    logits = U_k + W2 e                            vanilla
    logits = U_k + W2 (sigmoid(G [h_k; e] + b) e)  gated
    logits = U_k + W2 tanh(o)                      rnn, with g, c, o = J [s; e; h_k] + b and a state
                                                   s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c), zero at first

In the layout ``first`` slot k predicts x_{n+1+k}, B drafts; in ``bonus`` slot k >= 1 predicts x_{n+k}, B - 1 drafts.
The whole block is run whatever K is, because a shorter one has other logits; so proposals nest in K. DFlash has no
Markov term. A layer may look at a window of the context only, and then mostly backwards within the block, see
:class:`.configuration.Window`. Formula and layouts: the public code of DeepSpec, SpecForge and speculators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .blocks import Memory, RMSNorm, Rotary, attend, gated_mlp, heads_of
from .configuration import (
    FULL,
    SLIDING,
    Window,
    activation_of,
    attention_shape,
    check_layers,
    count_of,
    epsilon_of,
    positions_of,
    refuse_unread,
    rope_of,
    taps_of,
    windows_of,
)
from .formats import Checkpoint, need
from .heads import Borrowed, Head, check_size, fill, target_shape, tied, vocabulary_of

LAYER = re.compile(r"layers\.(\d{1,4})\.")


class Attention(torch.nn.Module):
    """Attention of a block to the context and to itself; queries and keys are normed."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = torch.nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.v_proj = torch.nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.o_proj = torch.nn.Linear(heads * head_dim, width, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)
        self.head_dim = head_dim

    def entries(self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (batch, heads, n, width) of context or block ``x`` (batch, n, d)."""
        # Keys are normed before they are turned, so that they can be kept with their positions.
        keys = self.k_norm(heads_of(self.k_proj(x), self.head_dim))
        return rotary(keys, positions), heads_of(self.v_proj(x), self.head_dim)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rotary: Rotary,
        mask: torch.Tensor | None,
        context: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return (batch, m, d) for the block ``x``, behind the keys and values of the context."""
        queries = rotary(self.q_norm(heads_of(self.q_proj(x), self.head_dim)), positions)
        own = self.entries(x, positions, rotary)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
        result: torch.Tensor = self.o_proj(attend(queries, keys, values, mask))
        return result


class Layer(torch.nn.Module):
    """A decoder layer over a block."""

    def __init__(self, width: int, inner: int, act: str, eps: float, **attention: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width, eps=eps, **attention)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = gated_mlp(width, inner, act)


class Markov(torch.nn.Module):
    """Correction of a slot's logits by the token before it.

    Parameters
    ----------
    vocab_size, rows : int
        Tokens that may come before; logits of a row.
    rank, width : int
    kind : {"vanilla", "gated", "rnn"}
    """

    def __init__(self, vocab_size: int, rows: int, rank: int, width: int, kind: str = "vanilla") -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = torch.nn.Embedding(vocab_size, rank)
        self.markov_w2 = torch.nn.Linear(rank, rows, bias=False)
        if kind == "gated":
            self.gate_proj = torch.nn.Linear(width + rank, rank)
        elif kind == "rnn":
            self.joint_proj = torch.nn.Linear(2 * rank + width, 3 * rank)

    def step(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the correction (.., rows) and the next state, from tokens (..,) and slots' h (.., d)."""
        e = self.markov_w1(previous)
        if self.kind == "gated":
            e = torch.sigmoid(self.gate_proj(torch.cat([hidden, e], dim=-1))) * e
        elif self.kind == "rnn":
            state = torch.zeros_like(e) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, e, hidden], dim=-1)).chunk(3, dim=-1)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            e = torch.tanh(out)
        return self.markov_w2(e), state


class Confidence(torch.nn.Module):
    """Logit of a slot's chance to be accepted."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(inputs, 1)


class DSpark(Head):
    """A DSpark head, or one of DFlash.

    Parameters
    ----------
    target_model : transformers.PreTrainedModel
    taps : sequence of int
        Hidden states that it reads.
    rope : dict
        See :func:`.configuration.rope_of`.
    block, mask_id : int
        B and the token that fills a block.
    anchor : {"first", "bonus"}
    width, layers, inner, heads, kv_heads, head_dim : int
        Hidden size, layers, and of each: MLP, attention.
    token_ids : int64 tensor (V_d,), optional
        The draft vocabulary; the target's where None.
    own_embedding, own_output : bool
        Whether the head has its own token embedding and projection, or uses the target's.
    rank, markov : int, str
        Of the Markov term; rank 0 leaves it out.
    warm : bool
        In the layout ``bonus``: whether the Markov state passes slot 0 too.
    confidence : {None, "hidden", "markov"}
        What the confidence head reads: nothing (there is none), h, or h and W1[token before].
    bias : bool
        Biases of the attention's projections.
    windows : sequence of Window, optional
        Of each layer; none where left out.
    sliding_rope : dict, optional
        Of layers with a window, where theirs is another.
    """

    kind = "dspark"
    max_draft_tokens: int

    def __init__(
        self,
        target_model: Any,
        taps: Sequence[int],
        rope: Mapping[str, Any],
        *,
        block: int,
        mask_id: int,
        anchor: str,
        width: int,
        layers: int,
        inner: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        token_ids: torch.Tensor | None = None,
        own_embedding: bool = False,
        own_output: bool = False,
        rank: int = 0,
        markov: str = "vanilla",
        warm: bool = False,
        confidence: str | None = None,
        bias: bool = False,
        act: str = "silu",
        eps: float = 1e-6,
        windows: Sequence[Window] | None = None,
        sliding_rope: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, _ = target_shape(target_model)
        self.taps, self.block, self.mask_id = tuple(taps), block, mask_id
        self.first = 0 if anchor == "first" else 1
        self.max_draft_tokens = block - self.first
        self.warm = warm
        self.fc = torch.nn.Linear(len(self.taps) * self.hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = torch.nn.ModuleList(
            Layer(width, inner, act, eps, heads=heads, kv_heads=kv_heads, head_dim=head_dim, bias=bias)
            for _ in range(layers)
        )
        self.norm = RMSNorm(width, eps)
        rows = self.vocab_size if token_ids is None else len(token_ids)
        if own_embedding:
            self.embed_tokens = torch.nn.Embedding(self.vocab_size, width)
        if own_output:
            self.lm_head = torch.nn.Linear(width, rows, bias=False)
        self.markov_head = Markov(self.vocab_size, rows, rank, width, markov) if rank else None
        self.confidence_head = Confidence(width + (rank if confidence == "markov" else 0)) if confidence else None
        self.borrowed = Borrowed(target_model, None if own_output else token_ids)
        self.windows = tuple(windows or [Window()] * layers)
        turns = {FULL: Rotary(rope, head_dim), SLIDING: Rotary(sliding_rope or rope, head_dim)}
        self.rotaries = [turns[window.layer_type] for window in self.windows]
        self.register_buffer("token_ids", token_ids, persistent=False)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target_model: Any, **overrides: Any) -> DSpark:
        """Build from any public layout, see the module; ``layer_ids``, ``rope_theta``, ``anchor`` may be overridden."""
        refuse_unread(checkpoint)
        tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors.items()}
        maps: dict[str, torch.Tensor] = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
        tensors = tied(checkpoint, tensors)
        target_width, vocab_size, total = target_shape(target_model)
        fc, q_proj, k_proj, up_proj = (
            need(checkpoint, tensors, name)
            for name in (
                "fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
                "layers.0.mlp.up_proj.weight",
            )
        )  # fmt: skip
        width = fc.shape[0]
        made_for = checkpoint.fields("target_hidden_size").whole("target_hidden_size", width)
        check_size(checkpoint, "hidden size", made_for, target_width)
        token_ids = vocabulary_of(checkpoint, tensors, maps, EMBEDDINGS, width, target_model)
        taps = taps_of(checkpoint, fc.shape[1] // target_width, total, overrides.get("layer_ids"))
        block, mask_id = (_whole(checkpoint, key) for key in ("block_size", "mask_token_id"))
        if not 0 <= mask_id < vocab_size:
            raise checkpoint.error(f"the mask is token {mask_id}, the target has {vocab_size}")
        layers = count_of(checkpoint, "layer", {int(match[1]) for match in map(LAYER.match, tensors) if match})
        check_layers(checkpoint, layers)
        windows = windows_of(checkpoint, layers)
        ropes = {
            kind: rope_of(checkpoint, overrides.get("rope_theta"), kind)
            for kind in (FULL, SLIDING) if any(window.layer_type == kind for window in windows)
        }  # fmt: skip
        with torch.device("meta"):
            head = cls(
                target_model, taps, ropes.get(FULL) or ropes[SLIDING], block=block, mask_id=mask_id,
                anchor=overrides.get("anchor") or _anchor(checkpoint), width=width, inner=up_proj.shape[0],
                **attention_shape(checkpoint, q_proj, k_proj), layers=layers, token_ids=token_ids,
                own_embedding="embed_tokens.weight" in tensors, own_output="lm_head.weight" in tensors,
                rank=_rank(checkpoint, tensors), markov=_markov(tensors), warm=checkpoint.from_speculators,
                confidence=_confidence(checkpoint, tensors, width), bias="layers.0.self_attn.q_proj.bias" in tensors,
                act=activation_of(checkpoint), eps=epsilon_of(checkpoint), windows=windows,
                sliding_rope=ropes.get(SLIDING),
            )  # fmt: skip
        head.trained_positions = positions_of(checkpoint)
        return fill(head, checkpoint, tensors, target_model)

    def memory(self) -> Memory:
        """Return an empty memory; entry i depends on tokens up to x_i."""
        return Memory(len(self.layers))

    def extend(self, states: torch.Tensor, positions: torch.Tensor, memory: Memory) -> None:
        """Append the context of true states (batch, n, taps x d) at ``positions`` (batch or 1, n) to the memory."""
        context = self.hidden_norm(self.fc(states))
        for i, layer in enumerate(self.layers):
            keys, values = layer.self_attn.entries(context, positions, self.rotaries[i])
            memory.update(keys, values, i)

    def masks(self, places: torch.Tensor, padded: bool = False) -> list[torch.Tensor | None]:
        """Return, for each layer, what the slots of a block may look at.

        Parameters
        ----------
        places : int64 (batch or 1, n + B)
            Positions of the context and of the block behind it; negative ones are padding.
        padded : bool
            Whether there is any.

        Returns
        -------
        list of (bool tensor, broadcastable to (batch, heads, B, n + B)) or None
            None where a slot looks everywhere.
        """
        context, slots = places[:, None, : -self.block], places[:, -self.block :, None]

        def mask(window: Window) -> torch.Tensor | None:
            if window.size is None and not window.causal:
                return (places >= 0)[:, None, None] if padded else None
            seen = (context >= 0).expand(-1, self.block, -1)
            if window.size is not None:  # it cuts the context only: a block is shorter than any trained window
                seen = seen & (context >= (slots[:, :1] if window.anchored else slots + 1) - window.size)
            own = slots.mT <= slots if window.causal else torch.ones_like(slots.mT <= slots)
            return torch.cat([seen, own], -1)[:, None]

        masks = {window: mask(window) for window in set(self.windows)}
        return [masks[window] for window in self.windows]

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, masks: Sequence[torch.Tensor | None], memory: Memory
    ) -> torch.Tensor:
        """Run blocks behind a context.

        Parameters
        ----------
        tokens : int64 (batch, m)
            Of one block or several, anchors and masks.
        positions : int64 (batch or 1, m)
        masks : sequence of (bool, broadcastable to (batch, heads, m, entries in memory + m)) or None
            For each layer, True where a slot may look; everywhere where None.
        memory : Memory
            The context; nothing is added to it.

        Returns
        -------
        tensor (batch, m, width)
            h, behind the last norm.
        """
        x = (self.embed_tokens if hasattr(self, "embed_tokens") else self.borrowed.embed)(tokens)
        for i, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            x = x + layer.self_attn(normed, positions, self.rotaries[i], masks[i], memory.held(i))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        result: torch.Tensor = self.norm(x)
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logit rows (.., V_d) over the draft vocabulary, without the Markov term."""
        rows: torch.Tensor = (self.lm_head if hasattr(self, "lm_head") else self.borrowed.project)(hidden)
        return rows

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """Return confidence logits (..,) of slots h (.., d) behind tokens (..,); None without such a head."""
        if self.confidence_head is None:
            return None
        inputs = hidden
        if self.markov_head is not None and self.confidence_head.proj.in_features > hidden.shape[-1]:
            inputs = torch.cat([hidden, self.markov_head.markov_w1(previous)], dim=-1)
        result: torch.Tensor = self.confidence_head.proj(inputs)[..., 0]
        return result

    def read(
        self, hidden: torch.Tensor, anchors: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Draft from a block's h.

        Parameters
        ----------
        hidden : tensor (batch, B, width)
        anchors : int64 (batch,)
        count : int
            At most ``max_draft_tokens``.

        Returns
        -------
        int64 (batch, count), tensor (batch, count, V_d), tensor (batch, count) or None
            Tokens, logit rows and confidence logits.
        """
        slots = hidden[:, self.first : self.first + count]
        rows = self.logits(slots)
        previous, state = [anchors], None
        if self.markov_head is not None and self.first and self.warm:
            _, state = self.markov_head.step(anchors, hidden[:, 0], None)
        corrected = []
        for k in range(count):
            row = rows[:, k]
            if self.markov_head is not None:
                change, state = self.markov_head.step(previous[-1], slots[:, k], state)
                row = row + change
            previous.append(self.tokens_of(row.argmax(-1)))
            corrected.append(row)
        tokens = torch.stack(previous, 1)
        return tokens[:, 1:], torch.stack(corrected, 1), self.confidence(slots, tokens[:, :-1])

    def blocks(self, anchors: torch.Tensor) -> torch.Tensor:
        """Return block tokens (batch, B) for anchors (batch,)."""
        tokens = anchors.new_full((len(anchors), self.block), self.mask_id)
        tokens[:, 0] = anchors
        return tokens

    def draft(
        self, ids: list[int], states: torch.Tensor, memory: Memory, num_draft_tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """Draft a block behind the true context, and keep its first tokens."""
        n, device = len(states), states.device
        memory.cut(n)
        held = len(memory)
        if held < n:
            self.extend(states[None, held:], torch.arange(held, n, device=device)[None], memory)
        anchors = torch.tensor(ids[-1:], device=device)
        places = torch.arange(n + self.block, device=device)[None]
        hidden = self(self.blocks(anchors), places[:, n:], self.masks(places), memory)
        tokens, rows, _ = self.read(hidden, anchors, min(num_draft_tokens, self.max_draft_tokens))
        return tokens[0].tolist(), rows[0]

    def draft_behind(
        self, tokens: torch.Tensor, states: torch.Tensor, places: torch.Tensor, memory: Memory,
        anchors: torch.Tensor, num_draft_tokens: int,
    ) -> list[tuple[list[int], torch.Tensor]]:  # fmt: skip
        """Draft blocks behind the contexts of a batch."""
        self.extend(states, places[:, -states.shape[1] :].clamp(min=0), memory)
        slots = places[:, -1:] + 1 + torch.arange(self.block, device=places.device)
        masks = self.masks(torch.cat([places, slots], 1), padded=True)
        hidden = self(self.blocks(anchors), slots, masks, memory)
        drafts, rows, _ = self.read(hidden, anchors, min(num_draft_tokens, self.max_draft_tokens))
        return list(zip(drafts.tolist(), rows, strict=True))


EMBEDDINGS = ("embed_tokens.weight", "markov_head.markov_w1.weight")
"""Tensors with a row for each token of the target."""


def _whole(checkpoint: Checkpoint, key: str) -> int:
    bounds = {"least": 1, "most": 1 << 12} if key == "block_size" else {}
    value: int | None = checkpoint.fields(key).whole(key, None, **bounds)
    if value is None:
        raise checkpoint.error(f"config.json does not say {key}")
    return value


def _anchor(checkpoint: Checkpoint) -> str:
    """Return the block layout; SpecForge and DFlash's own code use ``bonus``, DeepSpec ``first``."""
    first = checkpoint.fields("sample_from_anchor").flag("sample_from_anchor", None)
    bonus = checkpoint.fields("dspark_bonus_anchor").flag("dspark_bonus_anchor", None)
    if first is None and bonus is not None:
        first = not bonus
    if first is None and "dflash_config" in checkpoint.config:
        first = False
    architectures = checkpoint.fields("architectures").list_of("text", "architectures", [])
    if first is None and any("DSparkModel" in name for name in architectures):
        first = True
    if first is None:
        raise checkpoint.error(
            "config.json does not say which slot of a block predicts the first token",
            "give --draft-anchor first (B drafts, as DeepSpec) or bonus (B - 1, as DFlash)",
        )
    return "first" if first else "bonus"


def _rank(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the rank of the Markov term, 0 without one."""
    name = "markov_head.markov_w1.weight"
    rank = need(checkpoint, tensors, name).shape[1] if name in tensors else 0
    named = checkpoint.fields("markov_rank").whole("markov_rank", rank)
    if named != rank:
        raise checkpoint.error(f"config.json says Markov rank {named}, tensors {rank}")
    return rank


def _markov(tensors: Mapping[str, torch.Tensor]) -> str:
    for name, kind in (("gate_proj", "gated"), ("joint_proj", "rnn")):
        if f"markov_head.{name}.weight" in tensors:
            return kind
    return "vanilla"


def _confidence(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], width: int) -> str | None:
    name = "confidence_head.proj.weight"
    if name not in tensors:
        return None
    return "hidden" if need(checkpoint, tensors, name).shape[1] == width else "markov"
