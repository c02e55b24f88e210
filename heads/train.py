"""Trains draft heads for a target: Medusa, EAGLE3 and DSpark, from the target's own greedy answers.

    python -m heads.train generate --work WORK --given mbpp.jsonl --given gsm8k.jsonl:700
    python -m heads.train train eagle3 --work WORK -o heads/smollm2-eagle3
    python -m heads.train score eagle3 heads/smollm2-eagle3 --work WORK
    python -m heads.train evaluate eagle3:heads/smollm2-eagle3 -K 7

``generate`` writes shards (:mod:`heads.data`), ``train`` one head in a public format, ``score`` and ``evaluate`` tell
what is accepted of one on held-out prompts: on stored answers, as while training, or live. The first two go on where a
killed run ended. What trained the heads of
a directory is told by its prompts.jsonl.gz, and of each by training.json.

The heads share their draft vocabulary, the tokens that occur most in the answers, and use the target's own embedding
and rows of its projection, so that these need not be stored; ``--full`` stores the projection too, for tools that want
it. Loss: cross-entropy on answer tokens against the target's distribution and its choice, half and half by default.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from asdsim.capture.drafters import make_drafter
from asdsim.capture.drafters.dspark import DSpark
from asdsim.capture.drafters.eagle3 import Eagle3
from asdsim.capture.drafters.formats import read_checkpoint
from asdsim.capture.drafters.heads import Head, head_class, output_head
from asdsim.capture.drafters.medusa import Medusa
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.capture.run import Plan, make_requests
from asdsim.capture.tasks import load_prompts
from asdsim.engines.transformers.load import load_model, load_target
from asdsim.rules.settings import STRICT
from heads import data as heads_data
from heads.export import vocabulary_maps

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MEDUSA_HEADS = 5
DRAFT_VOCABULARY = 12288
BLOCK = 7  # DSpark's draft tokens
MASK_WORD = "<reponame>"  # a token that no text has
KINDS = ("medusa", "eagle3", "dspark")


@dataclass
class Batch:
    """Sequences padded on the right.

    Attributes
    ----------
    ids : int64 (b, T)
    begin, end : int64 (b,)
        The answer is ``ids[begin:end]``.
    states : float (b, T - 1, taps, d)
        Of all taps of the data set.
    """

    ids: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    states: torch.Tensor


class Answers:
    """A data set, with what all heads learn from: labels and the target's distribution over the draft vocabulary.

    Parameters
    ----------
    paths : sequence of Path
        Shards.
    taps : sequence of int
        Hidden states in them; the last is the one behind the final norm.
    model : transformers.PreTrainedModel
    token_ids : int64 (V_d,), optional
        Draft vocabulary; the ``size`` tokens that occur most where None; answers count four times.
    size : int
    soft : float
        Weight of the target's distribution in what is learnt; its choice has the rest.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        taps: Sequence[int],
        model: Any,
        token_ids: Any = None,
        size: int = 0,
        soft: float = 0.5,
    ) -> None:
        self.data = heads_data.read_sequences(paths)
        self.taps, self.model, self.soft = list(taps), model, soft
        vocab = output_head(model).weight.shape[0]
        if token_ids is None:
            counts = np.zeros(vocab, dtype=np.int64)
            for ids, begin in zip(self.data.ids, self.data.begins, strict=True):
                counts += 4 * np.bincount(ids[begin:], minlength=vocab) + np.bincount(ids[:begin], minlength=vocab)
            token_ids = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]).copy())
        self.token_ids = token_ids
        self.row_of = torch.full((vocab,), -1).index_put((token_ids,), torch.arange(len(token_ids)))
        self.rows = output_head(model).weight.detach()[token_ids].to(torch.bfloat16)

    def covered(self) -> float:
        """Return the part of the answers' tokens that the draft vocabulary has."""
        pairs = zip(self.data.ids, self.data.begins, strict=True)
        hits = [self.row_of[torch.from_numpy(ids[begin:]).long()] >= 0 for ids, begin in pairs]
        return float(torch.cat(hits).float().mean())

    def batches(self, tokens: int, rng: random.Random | None) -> Iterator[Batch]:
        """Yield all sequences once, of like length together, at most ``tokens`` with padding in a batch."""
        order = sorted(range(len(self.data)), key=lambda n: (self.data.begins[n], len(self.data.ids[n])))
        groups: list[list[int]] = [[]]
        longest = 0
        for n in order:
            longest = max(longest, len(self.data.ids[n]))
            if groups[-1] and longest * (len(groups[-1]) + 1) > tokens:
                groups.append([])
                longest = len(self.data.ids[n])
            groups[-1].append(n)
        if rng is not None:
            rng.shuffle(groups)
        for group in groups:
            yield self.batch(group)

    def batch(self, group: Sequence[int]) -> Batch:
        """Return these sequences."""
        longest = max(len(self.data.ids[n]) for n in group)
        ids = torch.zeros((len(group), longest), dtype=torch.int64)
        states = torch.zeros((len(group), longest - 1, self.data.states[0].shape[-1]))
        for row, n in enumerate(group):
            ids[row, : len(self.data.ids[n])] = torch.from_numpy(self.data.ids[n])
            states[row, : len(self.data.ids[n]) - 1] = self.data.states[n]
        begin = torch.tensor([self.data.begins[n] for n in group])
        end = torch.tensor([len(self.data.ids[n]) for n in group])
        return Batch(ids, begin, end, states.unflatten(-1, (len(self.taps), -1)))

    def read_by(self, head: Head, batch: Batch) -> torch.Tensor:
        """Return the states (b, T - 1, taps x d) that a head reads."""
        return batch.states[:, :, [self.taps.index(tap) for tap in head.taps]].flatten(2)

    def learnt(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the logits of each position are to be.

        Returns
        -------
        int64 (b, T)
            Row of ``goal`` for the token at a position; -1 outside the answer and the draft vocabulary.
        bfloat16 (rows, V_d)
            The target's distribution and its choice, weighted.
        """
        at = torch.arange(batch.ids.shape[1])
        wanted = (at >= batch.begin[:, None]) & (at < batch.end[:, None]) & (self.row_of[batch.ids] >= 0)
        where = torch.full(batch.ids.shape, -1)
        where[wanted] = torch.arange(int(wanted.sum()))
        last = batch.states[:, :, -1][wanted[:, 1:]].to(torch.bfloat16)
        goal = functional.linear(last, self.rows).softmax(-1).mul_(self.soft)
        goal[torch.arange(len(goal)), self.row_of[batch.ids[wanted]]] += 1 - self.soft
        return where, goal

    def loss(self, hidden: torch.Tensor, goal: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
        """Return cross-entropies (n,) of normed states (n, d) projected, plus ``change``, against goals (n, V_d)."""
        logits = functional.linear(hidden.to(torch.bfloat16), self.rows)
        if change is not None:
            logits = logits + change
        return CrossEntropy.apply(logits, goal)


class CrossEntropy(torch.autograd.Function):
    """-sum goal log softmax(logits) per row; keeps one table for the way back."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        """Return (n,), float32."""
        chances = logits.softmax(-1)
        most, where = logits.max(-1)
        norm = most.float() - chances.gather(-1, where[:, None])[:, 0].float().log()
        loss = norm - (goal * logits).sum(-1, dtype=torch.float32)
        ctx.save_for_backward(chances.sub_(goal))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        """Softmax minus goal."""
        (slope,) = ctx.saved_tensors
        return slope * grads[0][:, None].to(slope.dtype), None


class Tape:
    """A head's memory that gradients pass through."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; return all."""
        if layer in self.entries:
            before = self.entries[layer]
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        self.entries[layer] = keys, values
        return keys, values

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all."""
        return self.entries[layer]


class MedusaTrainer:
    """Medusa: head i from the last state at p predicts the token at p + 2 + i."""

    decay = 0.9
    part = 0.6

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.head = Medusa(answers.model, MEDUSA_HEADS, token_ids=answers.token_ids)
        for blocks in self.head.blocks:
            torch.nn.init.zeros_(blocks[0].weight)
            torch.nn.init.zeros_(blocks[0].bias)

    def hidden(self, batch: Batch, i: int) -> torch.Tensor:
        """Return what head i projects (b, T - 1, d)."""
        h = batch.states[:, :, -1]
        return h + functional.silu(self.head.blocks[i][0](h))

    def loss(self, batch: Batch, rng: random.Random, done: float) -> torch.Tensor:
        """Return the weighted sum over heads of mean cross-entropies, each on a random part of the answers."""
        where, goal = self.answers.learnt(batch)
        draw = torch.Generator().manual_seed(rng.getrandbits(32))
        total = torch.zeros(())
        for i in range(MEDUSA_HEADS):
            target = where[:, 2 + i :]
            chosen = (target >= 0) & (torch.rand(target.shape, generator=draw) < self.part)
            hidden = self.hidden(batch, i)[:, : target.shape[1]][chosen]
            total = total + self.decay**i * self.answers.loss(hidden, goal[target[chosen]]).mean()
        return total

    def drafts(self, batch: Batch) -> torch.Tensor:
        """Return draft tokens (b, T, K) behind each anchor; column n, -1 where there is none."""
        found = torch.full((*batch.ids.shape, MEDUSA_HEADS), -1)
        for i in range(MEDUSA_HEADS):
            rows = functional.linear(self.hidden(batch, i), self.answers.rows.float())
            found[:, 1:, i] = self.answers.token_ids[rows.argmax(-1)]
        return found

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        return {
            "medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1, "version": "2",
            "hidden_size": self.head.hidden_size,
            "vocab_size": self.head.vocab_size, "truncated_vocab_size": len(self.answers.token_ids),
        }  # fmt: skip

    def tensors(self, full: bool) -> dict[str, torch.Tensor]:
        """Return the tensors in the layout of the public code; ``full`` in vLLM's, with the projection."""
        parts = {f"{i}.{name}": t for i, b in enumerate(self.head.blocks) for name, t in b[0].state_dict().items()}
        form = "blocks.{}.layers.0.{}" if full else "{}.0.linear.{}"
        found = {form.format(*name.split(".")): t for name, t in parts.items()}
        found["token_map"] = self.answers.token_ids
        if full:
            found["lm_head.weight"] = self.answers.rows
        return found

    file = "medusa_lm_head.safetensors"


class EagleTrainer:
    """EAGLE3: entry i holds token i + 1 and the feature of i; step s predicts the token at i + 2 + s."""

    decay = 0.85
    file = "model.safetensors"

    def __init__(self, answers: Answers, draft_tokens: int = 7, inner: int = 1536) -> None:
        self.answers, self.draft_tokens = answers, draft_tokens
        model, width = answers.model, output_head(answers.model).weight.shape[1]
        total = model.config.num_hidden_layers
        self.shape = {"width": width, "inner": inner, "heads": width // 64, "kv_heads": width // 192, "head_dim": 64}
        self.head = Eagle3(
            model, (2, total // 2, total - 3), ROPE, **self.shape, token_ids=answers.token_ids, own_output=False,
            eps=1e-5,
        )  # fmt: skip
        with torch.no_grad():
            weight, share = self.linear()
            self.head.fc.weight.copy_(weight)
            self.head.layer.self_attn.o_proj.weight.zero_()
            self.head.layer.mlp.down_proj.weight.zero_()
            self.head.norm.weight.copy_(model.model.norm.weight * share)

    def linear(self, ridge: float = 0.01, most: int = 60_000) -> tuple[torch.Tensor, float]:
        """Return fc (d, 3d) that guesses the next last state best by itself, and the part of its length it finds.

        By least squares over the answers, ``ridge`` relative to the mean square of the inputs.
        """
        scale = self.answers.model.model.norm.weight
        inputs, goals, count = [], [], 0
        for batch in self.answers.batches(8192, random.Random(0)):
            at = torch.arange(batch.states.shape[1] - 1)
            chosen = (at >= batch.begin[:, None] - 2) & (at + 1 < batch.end[:, None] - 1)
            inputs.append(self.answers.read_by(self.head, batch)[:, :-1][chosen])
            goals.append(batch.states[:, 1:, -1][chosen] / scale)
            count += len(goals[-1])
            if count >= most:
                break
        x, y = torch.cat(inputs), torch.cat(goals)
        square = x.T @ x
        square.diagonal().add_(ridge * square.diagonal().mean())
        weight = torch.linalg.solve(square, x.T @ y)
        return weight.T, float((x @ weight).norm() / y.norm())

    def steps_of(self, batch: Batch, steps: int, own: bool, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield x (b, n, width) of each step, for entries from ``first`` on, and the tokens that it was fed.

        Every entry drafts on from the true ones up to it; with ``own`` it is fed its own drafts, else the answer.
        """
        head, tape = self.head, Tape()
        count = batch.ids.shape[1] - 1
        entries = torch.arange(count)
        causal = entries[None, :] <= entries[:, None]
        itself = torch.eye(count, dtype=torch.bool)[first:, first:]
        tokens = batch.ids[:, 1:]
        x = head(tokens, head.features(self.answers.read_by(head, batch)), entries[None], causal[None, None], tape)
        x, mask = x[:, first:], causal[first:]
        yield x, tokens[:, first:]
        for step in range(1, steps):
            if own:
                tokens = self.answers.token_ids[self.rows(x).argmax(-1)]
            else:
                tokens = functional.pad(batch.ids[:, 1 + step + first :], (0, step))
            mask = torch.cat([mask, itself], 1)
            x = head(tokens, x, entries[None, first:] + step, mask[None, None], tape)
            yield x, tokens

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return logit rows (.., V_d)."""
        return functional.linear(self.head.norm(x), self.answers.rows.float())

    def loss(self, batch: Batch, rng: random.Random, done: float) -> torch.Tensor:
        """Return the weighted sum over steps of mean cross-entropies; two steps at first, four at last."""
        steps = 2 + (done > 0.4) + (done > 0.75)
        where, goal = self.answers.learnt(batch)
        first = max(0, int(batch.begin.min()) - 2)
        total = torch.zeros(())
        for step, (x, _) in enumerate(self.steps_of(batch, steps, False, first)):
            target = functional.pad(where[:, first + 2 + step :], (0, 1 + step), value=-1)[:, : x.shape[1]]
            chosen = target >= 0
            hidden = self.head.norm(x[chosen])
            total = total + self.decay**step * self.answers.loss(hidden, goal[target[chosen]]).mean()
        return total

    def drafts(self, batch: Batch) -> torch.Tensor:
        """Return draft tokens (b, T, K) behind each anchor; column n, -1 where there is none."""
        found = torch.full((*batch.ids.shape, self.draft_tokens), -1)
        first = max(0, int(batch.begin.min()) - 2)
        for step, (x, _) in enumerate(self.steps_of(batch, self.draft_tokens, True, first)):
            found[:, first + 1 :, step] = self.answers.token_ids[self.rows(x).argmax(-1)]
        return found

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layer_config(self.head, self.shape),
            "num_hidden_layers": 1, "draft_vocab_size": len(self.answers.token_ids),
        }  # fmt: skip

    def tensors(self, full: bool) -> dict[str, torch.Tensor]:
        """Return the tensors in SafeAILab's layout."""
        found = {name.replace("layer.", "midlayer.", 1): t for name, t in self.head.state_dict().items()}
        found.update(vocabulary_maps(self.answers.token_ids, self.head.vocab_size))
        if full:
            found["lm_head.weight"] = self.answers.rows
        return found


class DSparkTrainer:
    """DSpark: blocks at random anchors of each answer; slot k predicts the token at n + 1 + k."""

    decay = math.exp(-1 / 4)
    file = "model.safetensors"

    def __init__(self, answers: Answers, mask_id: int, anchors: int = 20, layers: int = 2, inner: int = 384) -> None:
        self.answers, self.anchors = answers, anchors
        model, width = answers.model, output_head(answers.model).weight.shape[1]
        total = model.config.num_hidden_layers
        self.shape = {"width": width, "inner": inner, "heads": width // 64, "kv_heads": width // 192, "head_dim": 64}
        self.head = DSpark(
            model, (2, total // 2, total - 3), ROPE, block=BLOCK, mask_id=mask_id, anchor="first", layers=layers,
            token_ids=answers.token_ids, rank=16, **self.shape, eps=1e-5,
        )  # fmt: skip
        with torch.no_grad():
            self.head.fc.weight.zero_()
            self.head.fc.weight[:, -width:] = torch.eye(width)
            for layer in self.head.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            self.head.norm.weight.copy_(0.3 * model.model.norm.weight)
            torch.nn.init.normal_(self.head.markov_head.markov_w1.weight, std=0.2)
            torch.nn.init.zeros_(self.head.markov_head.markov_w2.weight)

    def hidden(self, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        """Return h (b, A, B, width) of the blocks at ``anchors`` (b, A)."""
        head, tape = self.head, Tape()
        states = self.answers.read_by(head, batch)
        context = torch.arange(states.shape[1])
        head.extend(states, context[None], tape)
        tokens = torch.full((*anchors.shape, BLOCK), head.mask_id)
        tokens[..., 0] = batch.ids.gather(1, anchors)
        positions = (anchors[..., None] + torch.arange(BLOCK)).flatten(1)
        block = torch.arange(anchors.shape[1]).repeat_interleave(BLOCK)
        seen = (context < anchors[..., None]).repeat_interleave(BLOCK, 1)
        same = (block[:, None] == block).expand(len(anchors), -1, -1)
        mask = torch.cat([seen, same], -1)[:, None]
        return head(tokens.flatten(1), positions, [mask] * len(head.layers), tape).unflatten(1, (-1, BLOCK))

    def loss(self, batch: Batch, rng: random.Random, done: float) -> torch.Tensor:
        """Return the mean cross-entropy of all slots, later ones weighing less."""
        where, goal = self.answers.learnt(batch)
        draw = torch.Generator().manual_seed(rng.getrandbits(32))
        room = (batch.end - batch.begin)[:, None]
        picks = (torch.rand((len(room), self.anchors), generator=draw) * room).long()
        anchors = batch.begin[:, None] - 1 + picks
        hidden = self.hidden(batch, anchors)
        at = anchors[..., None] + 1 + torch.arange(BLOCK)
        target = functional.pad(where, (0, BLOCK + 1), value=-1).gather(1, at.flatten(1)).view(at.shape)
        before = functional.pad(batch.ids, (0, BLOCK + 1)).gather(1, at.flatten(1) - 1).view(at.shape)
        chosen = target >= 0
        h = hidden[chosen]
        change, _ = self.head.markov_head.step(before[chosen], h, None)
        weight = (self.decay ** torch.arange(BLOCK)).expand(at.shape)[chosen]
        loss = self.answers.loss(h, goal[target[chosen]], change)
        return (loss * weight).sum() / weight.sum()

    def drafts(self, batch: Batch) -> torch.Tensor:
        """Return draft tokens (b, T, K) behind each anchor; column n, -1 where there is none."""
        found = torch.full((*batch.ids.shape, BLOCK), -1)
        rows = self.answers.rows.float()
        first = max(1, int(batch.begin.min()) - 1)
        for start in range(first, batch.ids.shape[1], 32):  # so many blocks at once
            anchors = torch.arange(start, min(start + 32, batch.ids.shape[1])).expand(len(batch.ids), -1)
            hidden, state, before = self.hidden(batch, anchors), None, batch.ids.gather(1, anchors)
            for k in range(BLOCK):
                change, state = self.head.markov_head.step(before, hidden[:, :, k], state)
                before = self.answers.token_ids[(functional.linear(hidden[:, :, k], rows) + change).argmax(-1)]
                found[:, start : start + 32, k] = before
        return found

    def config(self) -> dict[str, Any]:
        """Return config.json, as speculators writes it."""
        size = len(self.answers.token_ids)
        return {
            "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "block_size": BLOCK,
            "draft_vocab_size": size, "mask_token_id": self.head.mask_id, "sample_from_anchor": True,
            "aux_hidden_state_layer_ids": list(self.head.taps), "markov_rank": 16, "markov_head_type": "vanilla",
            "enable_confidence_head": False, "confidence_head_with_markov": False, "tie_word_embeddings": False,
            "transformer_layer_config": {
                "model_type": "qwen3", **layer_config(self.head, self.shape),
                "num_hidden_layers": len(self.head.layers),
                "layer_types": ["full_attention"] * len(self.head.layers),
            },
        }  # fmt: skip

    def tensors(self, full: bool) -> dict[str, torch.Tensor]:
        """Return the tensors in the layout of speculators."""
        found = {**self.head.state_dict(), **vocabulary_maps(self.answers.token_ids, self.head.vocab_size)}
        if full:
            found["lm_head.weight"] = self.answers.rows
        return found


def layer_config(head: Head, shape: dict[str, int]) -> dict[str, Any]:
    """Return what config.json says of a decoder layer."""
    return {
        "hidden_size": shape["width"], "intermediate_size": shape["inner"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "head_dim": shape["head_dim"], "vocab_size": head.vocab_size,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": ROPE["rope_theta"], "max_position_embeddings": 8192,
        "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float16",
    }  # fmt: skip


@torch.inference_mode()
def accepted(trainer: Any, answers: Answers, tokens: int = 4096) -> dict[str, tuple[int, int]]:
    """Decode the answers with a head's proposals.

    Returns
    -------
    dict of str to (int, int)
        Proposals and accepted tokens of each task, without the target's own token.
    """
    found: dict[str, tuple[int, int]] = {}
    order = sorted(range(len(answers.data)), key=lambda n: answers.data.begins[n])
    for start in range(0, len(order), 8):
        group = order[start : start + 8]
        batch = answers.batch(group)
        drafts = trainer.drafts(batch).numpy()
        for row, n in enumerate(group):
            ids, at = answers.data.ids[n], answers.data.begins[n] - 1  # at: the anchor
            proposals = hits = 0
            while at + 1 < len(ids):
                draft = drafts[row, at]
                left = ids[at + 1 :][: len(draft)]
                same = draft[: len(left)] == left
                run = len(same) if same.all() else int(same.argmin())
                proposals, hits, at = proposals + 1, hits + run, at + run + 1
            task = answers.data.sources[n].name.split("/")[0]
            before = found.get(task, (0, 0))
            found[task] = before[0] + proposals, before[1] + hits
    return found


def told(found: dict[str, tuple[int, int]]) -> str:
    """Return accepted tokens per proposal by task and together."""
    parts = {**found, "all": tuple(map(sum, zip(*found.values(), strict=True)))}
    return ", ".join(f"{task} {hits / proposals:.3f}" for task, (proposals, hits) in parts.items())


def make_trainer(kind: str, answers: Answers, tokenizer: Any) -> Any:
    """Return the trainer of a kind of heads."""
    if kind == "medusa":
        return MedusaTrainer(answers)
    if kind == "eagle3":
        return EagleTrainer(answers)
    return DSparkTrainer(answers, tokenizer.convert_tokens_to_ids(MASK_WORD))


def save_head(trainer: Any, folder: Path, full: bool, source: str) -> None:
    """Write a head in float16 and its configuration."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.detach().to(torch.float16) if t.is_floating_point() else t).contiguous().clone()
        for name, t in trainer.tensors(full).items()
    }
    save_file(tensors, str(folder / trainer.file), metadata={"format": "pt"})
    config = {**trainer.config(), "base_model_name_or_path": source}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def save_prompts(answers: Answers, path: Path) -> str:
    """Record which prompts trained a head; return the sha256 of the lines."""
    lines = [json.dumps({"source": s.name, "prompt": s.text}) for s in answers.data.sources]
    text = ("\n".join(lines) + "\n").encode()
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.write(text)
    return hashlib.sha256(text).hexdigest()


def make_optimizers(head: Head, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices, at a rate that fits AdamW, and AdamW for token tables, norms and biases."""
    tables = {id(m.weight) for m in head.modules() if isinstance(m, torch.nn.Embedding)}
    tables |= {id(m.markov_w2.weight) for m in head.modules() if hasattr(m, "markov_w2")}
    matrices = [p for p in head.parameters() if p.ndim == 2 and id(p) not in tables]
    others = [p for p in head.parameters() if p.ndim != 2 or id(p) in tables]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def earlier(folder: Path) -> Any:
    """Return the note of the head that training started from."""
    return json.loads((folder / "training.json").read_text())


def fit(trainer: Any, answers: Answers, dev: Answers, options: argparse.Namespace, size: int, source: str) -> None:
    """Run all epochs, from the last one that a killed run stored on; ``size`` answer tokens, ``source`` the target."""
    head = trainer.head
    optimizers = make_optimizers(head, options.rate, options.decay)
    per_epoch = sum(1 for _ in answers.batches(options.tokens, None))
    total, warm = per_epoch * options.epochs, max(1, round(0.04 * per_epoch * options.epochs))
    state_file = options.work / f"train-{options.kind}.pt"
    settings = [
        total, size, options.rate, options.seed, options.vocabulary, str(options.start), options.soft, options.decay,
        options.tokens,
    ]  # fmt: skip
    begin = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if state["settings"] == settings:
            head.load_state_dict(state["head"])
            for optimizer, held in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(held)
            begin = state["epoch"]
            print(f"goes on after epoch {begin}", flush=True)
    step, start = begin * per_epoch, time.monotonic()
    for epoch in range(begin, options.epochs):
        rng = random.Random(f"{options.seed}/{epoch}")
        losses = []
        for batch in answers.batches(options.tokens, rng):
            scale = min(1.0, (step + 1) / warm) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / total)))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = options.rate * scale
            head.train()
            with torch.autocast("cpu", torch.bfloat16):
                loss = trainer.loss(batch, rng, step / total)
            head.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(float(loss.detach()))
            step += 1
            if step % 20 == 0:
                left = (time.monotonic() - start) / (step - begin * per_epoch) * (total - step) / 60
                print(f"step {step}/{total}, loss {np.mean(losses[-20:]):.3f}, {left:.1f} min left", flush=True)
        print(f"epoch {epoch + 1}: held-out accepted {told(accepted(trainer, dev))}", flush=True)
        partial = state_file.with_suffix(".part")
        held = [optimizer.state_dict() for optimizer in optimizers]
        torch.save({"settings": settings, "epoch": epoch + 1, "head": head.state_dict(), "optimizers": held}, partial)
        os.replace(partial, state_file)
        save_head(trainer, options.output, options.full, source)


def train(options: argparse.Namespace) -> None:
    """Train one head on the shards that there are."""
    making = json.loads((options.work / "making.json").read_text())
    loaded = load_model(making["target"], device="cpu", offline=options.offline)
    model = loaded.model.requires_grad_(False)
    paths = sorted(options.work.glob("shard-*.safetensors"))
    began = None
    if options.start is not None:
        began = head_class(options.kind).from_checkpoint(read_checkpoint(str(options.start)), model)
    kept = None if began is None or options.vocabulary else began.token_ids
    if began is not None and kept is None and options.kind == "dspark":
        raise SystemExit("--vocabulary: a DSpark head keeps the draft vocabulary that it started with")
    answers = Answers(
        paths, making["taps"], model, kept, size=options.vocabulary or DRAFT_VOCABULARY, soft=options.soft
    )
    dev = Answers([options.work / "dev.safetensors"], making["taps"], model, answers.token_ids)
    torch.manual_seed(options.seed)
    trainer = make_trainer(options.kind, answers, loaded.tokenizer)
    head = trainer.head
    if began is not None:
        head.load_state_dict(began.state_dict())
    count = sum(p.numel() for p in head.parameters())
    size = sum(len(ids) - begin for ids, begin in zip(answers.data.ids, answers.data.begins, strict=True))
    print(
        f"{len(answers.data)} answers, {size} tokens, {answers.covered():.3f} of them in the draft vocabulary "
        f"(held-out {dev.covered():.3f}); {count / 1e6:.2f}M parameters",
        flush=True,
    )
    fit(trainer, answers, dev, options, size, making["target"])
    prompts = save_prompts(answers, options.output.parent / "prompts.jsonl.gz")
    note = {
        "target": making["target"], "answers": len(answers.data), "answer_tokens": size, "parameters": count,
        "epochs": options.epochs, "rate": options.rate, "weight_decay": options.decay, "batch_tokens": options.tokens,
        "draft_vocabulary": len(answers.token_ids), "soft": options.soft,
        "started_from": None if options.start is None else earlier(options.start),
        "seed": options.seed, "prompts_sha256": prompts,
        "held_out": {task: round(hits / proposals, 4) for task, (proposals, hits) in accepted(trainer, dev).items()},
        "torch": torch.__version__,
    }  # fmt: skip
    (options.output / "training.json").write_text(json.dumps(note, indent=1) + "\n")


def score(options: argparse.Namespace) -> None:
    """Print what is accepted of a head on the held-out answers of a directory."""
    making = json.loads((options.work / "making.json").read_text())
    loaded = load_model(making["target"], device="cpu", offline=options.offline)
    model = loaded.model.requires_grad_(False)
    stored = head_class(options.kind).from_checkpoint(read_checkpoint(str(options.head)), model)
    answers = Answers([options.work / "dev.safetensors"], making["taps"], model, stored.token_ids)
    trainer = make_trainer(options.kind, answers, loaded.tokenizer)
    trainer.head.load_state_dict(stored.state_dict())
    print(f"{len(answers.data)} answers: accepted {told(accepted(trainer, answers))}")


def evaluate(options: argparse.Namespace) -> None:
    """Decode held-out prompts live, and time one proposal against one token of the target."""
    target = load_target(options.target, device="cpu", offline=options.offline)
    drafter = make_drafter(options.drafter, target)
    prompts = load_prompts(
        ",".join(heads_data.HELD_OUT), offset=options.offset, limit=options.limit, offline=options.offline
    )
    plan = Plan(out=Path("unused-by-analysis"), target=options.target, drafter=options.drafter, task="gsm8k",
                max_new_tokens=options.max_new_tokens)  # fmt: skip
    found: dict[str, tuple[int, int]] = {}
    drafting, single = [], []
    for request in make_requests(target, prompts, plan):
        made = decode(target, drafter, request, STRICT, options.K, Recorder())
        before = found.get(request.task, (0, 0))
        hits = sum(outcome.accepted for outcome in made.outcomes)
        found[request.task] = before[0] + len(made.outcomes), before[1] + hits
        drafting += [step.draft_us for step in made.steps[1:]]
        session = target.session(request.prompt_ids)
        for n in range(1, min(8, len(made.tokens))):  # interleaved with the proposals, so that both see the same load
            start = time.perf_counter()
            session.score([*request.prompt_ids, *made.tokens[:n]], [])
            single.append((time.perf_counter() - start) * 1e6 if n > 1 else math.inf)
    one, token = float(np.median(drafting)), float(np.median([t for t in single if t < math.inf]))
    print(f"K={options.K}: accepted {told(found)}; a proposal {one / 1e3:.2f} ms, a target token {token / 1e3:.2f} ms, "
          f"{one / token:.3f} of it")  # fmt: skip


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("generate", help="answers and hidden states of the target")
    data.add_argument("--target", default="smollm2-135m")
    data.add_argument("--dtype", default="bfloat16")
    data.add_argument("--device", default="auto")
    data.add_argument(
        "--given", action="append", default=[], metavar="PATH[:FROM]", help="JSONL prompts from a line on"
    )
    data.add_argument("--tokens", type=int, default=390_000, help="answer tokens to make")
    data.add_argument("--batch", type=int, default=96)
    data.add_argument("--limit", type=int, default=128, help="tokens of an answer")
    data.add_argument("--share", type=float, default=0.4, help="part of each shard that is given prompts")
    data.add_argument("--taps", default="2,15,27,30", help="the last must be the one behind the final norm")
    data.add_argument("--dev", default="40:24", help="OFFSET:COUNT of each held-out task, to watch progress on")
    fit = commands.add_parser("train", help="one head")
    fit.add_argument("kind", choices=KINDS)
    fit.add_argument("-o", "--output", type=Path, required=True)
    fit.add_argument("--start", type=Path, metavar="FOLDER", help="go on from a head that was trained before")
    fit.add_argument("--epochs", type=int, default=4)
    fit.add_argument("--rate", type=float, default=2e-3)
    fit.add_argument(
        "--soft", type=float, default=0.5, help="weight of the target's distribution, not its choice alone"
    )
    fit.add_argument("--decay", type=float, default=0.05)
    fit.add_argument("--tokens", type=int, default=3072, help="of a batch, padding included")
    fit.add_argument(
        "--vocabulary", type=int,
        help=f"tokens that can be drafted; by default those of --start, {DRAFT_VOCABULARY} without it",
    )  # fmt: skip
    fit.add_argument("--full", action="store_true", help="store the projection's rows too")
    offline = commands.add_parser("score", help="a head on the held-out answers that generate --dev wrote")
    offline.add_argument("kind", choices=KINDS)
    offline.add_argument("head", type=Path)
    live = commands.add_parser("evaluate", help="a head on held-out prompts, live")
    live.add_argument("drafter", help="as for asdsim capture, such as eagle3:PATH")
    live.add_argument("--target", default="smollm2-135m")
    live.add_argument("-K", type=int, default=7)
    live.add_argument("--offset", type=int, default=0)
    live.add_argument("--limit", type=int, default=16, help="prompts of each task")
    live.add_argument("--max-new-tokens", type=int, default=96)
    for command in (data, fit, offline, live):
        command.add_argument("--offline", action="store_true")
    for command in (data, fit, offline):
        command.add_argument("--work", type=Path, required=True, help="directory for shards")
    for command in (data, fit):
        command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.command != "generate":
        {"train": train, "score": score, "evaluate": evaluate}[options.command](options)
        return
    making = heads_data.Making(
        options.target, options.dtype, [int(t) for t in options.taps.split(",")], options.given, options.seed,
        options.batch, options.limit, options.share,
    )  # fmt: skip
    offset, count = map(int, options.dev.split(":"))
    heads_data.generate(options.work, making, options.tokens, (offset, count), options.device, options.offline)


if __name__ == "__main__":
    main()
