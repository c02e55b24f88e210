"""Medusa: one small network per draft position, all fed with the target's last hidden state.

With h the state behind the final norm at position n-1, head i (from 0) predicts x_{n+1+i} as the argmax of
W_i r_i(h), r_i residual blocks h + SiLU(A h + b). It never sees the anchor x_n. Formula and layout: Cai et al.,
"Medusa" (arXiv 2401.10774), and its public code.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.nn import functional

from .configuration import count_of, refuse_unread
from .formats import Checkpoint, need, whole_map
from .heads import Borrowed, Head, check_size, check_token_ids, fill, target_shape

NAMES = (
    (re.compile(r"(?:medusa_head\.)?(\d{1,4})\.(\d{1,4})\.linear\.(weight|bias)"), "blocks.{}.{}.{}"),
    (re.compile(r"(?:medusa_head\.)?(\d{1,4})\.\d{1,4}\.weight"), "outputs.{}.weight"),
    (re.compile(r"(?:model\.)?blocks\.(\d{1,4})\.layers\.(\d{1,4})\.(weight|bias)"), "blocks.{}.{}.{}"),  # vLLM
    (re.compile(r"(?:model\.)?lm_heads\.(\d{1,4})\.weight"), "outputs.{}.weight"),
    (re.compile(r"(?:model\.)?lm_head\.weight"), "outputs.0.weight"),  # one for all heads
)
"""Tensor names of the public layouts, and ours."""


class Medusa(Head):
    """Medusa heads.

    Parameters
    ----------
    target_model : transformers.PreTrainedModel
    heads : int
        Draft positions.
    layers : int
        Residual blocks of each.
    outputs : int
        Projections of their own: one per head, one for all, or none: the target's serves all (version 2).
    bias : bool
        Whether the blocks have a bias.
    token_ids : int64 tensor (V_d,), optional
        Tokens that the rows of the projections stand for, and all that the target's is used for; None for all.
    """

    kind = "medusa"

    def __init__(
        self,
        target_model: Any,
        heads: int,
        layers: int = 1,
        *,
        outputs: int = 0,
        bias: bool = True,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, last = target_shape(target_model)
        self.taps, self.max_draft_tokens = (last,), heads
        width, rows = self.hidden_size, self.vocab_size if token_ids is None else len(token_ids)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(width, width, bias=bias) for _ in range(layers)) for _ in range(heads)
        )
        self.outputs = torch.nn.ModuleList(torch.nn.Linear(width, rows, bias=False) for _ in range(outputs))
        self.borrowed = Borrowed(target_model, None if outputs else token_ids)
        self.register_buffer("token_ids", token_ids, persistent=False)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target_model: Any, **overrides: Any) -> Medusa:
        """Build from the layout of the public code (version 2 without projections) or of vLLM."""
        refuse_unread(checkpoint)
        tensors, other = _renamed(checkpoint)
        mapped = other.pop("token_map", None)
        if other:
            raise checkpoint.error(f"tensor {next(iter(other))} does not belong in a medusa head")
        width, vocab_size, _ = target_shape(target_model)
        if "blocks.0.0.weight" not in tensors:
            raise checkpoint.error("the first Medusa head has no residual block")
        check_size(checkpoint, "hidden size", need(checkpoint, tensors, "blocks.0.0.weight").shape[0], width)
        named = checkpoint.layer.whole("vocab_size", vocab_size)
        check_size(checkpoint, "vocabulary", named, vocab_size)
        token_ids = None if mapped is None else whole_map(checkpoint, "token_map", mapped)
        if token_ids is not None:
            check_token_ids(checkpoint, token_ids, vocab_size)
        rows = vocab_size if token_ids is None else len(token_ids)
        if checkpoint.layer.whole("truncated_vocab_size", rows) != rows:
            raise checkpoint.error(
                f"truncated_vocab_size is {checkpoint.layer.whole('truncated_vocab_size')}, "
                + ("and token_map, which names these tokens, is missing" if mapped is None else f"token_map has {rows}")
            )
        outputs = [need(checkpoint, tensors, name) for name in tensors if name.startswith("outputs.")]
        if outputs:
            check_size(checkpoint, "vocabulary", outputs[0].shape[0], rows)
        places = [tuple(map(int, name.split(".")[1:3])) for name in tensors if name.startswith("blocks.")]
        heads, layers = (
            count_of(checkpoint, what, {place[axis] for place in places}) for axis, what in enumerate(("head", "block"))
        )
        _check_counts(checkpoint, heads, layers)
        if len(outputs) not in (0, 1, heads):
            raise checkpoint.error(f"{heads} heads, but {len(outputs)} projections")
        with torch.device("meta"):
            head = cls(
                target_model, heads, layers, outputs=len(outputs), bias="blocks.0.0.bias" in tensors,
                token_ids=token_ids,
            )  # fmt: skip
        return fill(head, checkpoint, tensors, target_model)

    def logits(self, last: torch.Tensor, count: int) -> torch.Tensor:
        """Return logit rows (batch, count, V_d) of the first ``count`` heads from last states (batch, d)."""
        hidden = []
        for blocks in self.blocks[:count]:
            h = last
            for block in blocks:
                h = h + functional.silu(block(h))
            hidden.append(h)
        if len(self.outputs) > 1:
            return torch.stack([self.outputs[i](h) for i, h in enumerate(hidden)], 1)
        output = self.outputs[0] if len(self.outputs) else self.borrowed.project
        rows: torch.Tensor = output(torch.stack(hidden, 1))
        return rows

    def draft(
        self, ids: list[int], states: torch.Tensor, memory: Any, num_draft_tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """Draft from the last state."""
        return self.draft_many([ids], [states], num_draft_tokens)[0]

    def draft_many(
        self, ids: list[list[int]], states: list[torch.Tensor], num_draft_tokens: int, pool: Any = None
    ) -> list[tuple[list[int], torch.Tensor]]:
        """Draft from the last states."""
        rows = self.logits(
            torch.stack([prefix_states[-1] for prefix_states in states]), min(num_draft_tokens, len(self.blocks))
        )
        return list(zip(self.tokens_of(rows.argmax(-1)).tolist(), rows, strict=True))


def _check_counts(checkpoint: Checkpoint, heads: int, layers: int) -> None:
    """Refuse a head of which parts are missing; published configurations name fewer heads than there are, not more."""
    counts = {"medusa_num_heads": (heads, "heads"), "medusa_num_layers": (layers, "blocks a head")}
    if checkpoint.config.get("model_type") == "medusa":  # vLLM's keys; elsewhere they are the target's
        counts |= {"num_heads": (heads, "heads"), "num_hidden_layers": (layers, "blocks a head")}
    for key, (count, what) in counts.items():
        named = checkpoint.layer.whole(key, count)
        if named > count:
            raise checkpoint.error(f"{key} is {named}, but the tensors hold {count} {what}")


def _renamed(checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors under our names, and those that have none."""
    tensors: dict[str, torch.Tensor] = {}
    other: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        for pattern, ours in NAMES:
            match = pattern.fullmatch(name)
            if match:
                tensors[ours.format(*match.groups())] = tensor
                break
        else:
            other[name.removeprefix("model.")] = tensor
    return tensors, other
