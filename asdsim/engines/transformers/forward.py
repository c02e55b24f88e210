"""A causal model of Transformers with its KV cache: run tokens, keep what can be kept, draft greedily.

One request keeps one KV cache. For a new prefix the cache is cropped to the longest common prefix and only the rest is
run. Answers depend on the prefix alone, up to rounding: a cache built in other portions can differ in its last bits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ...errors import CaptureError
from ..protocol import Proposal
from .place import device_of, from_first, is_sharded


class RoomyLayer(DynamicLayer):
    """One layer's KV cache, written in place into a buffer with room to grow.

    The plain layer copies everything it holds at every call, which costs some percent of a step. ``keys`` and
    ``values`` stay what others expect, (batch, heads, tokens, width), as views of the buffers.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None
    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return all keys and values."""
        held = 0 if self.keys is None else self.keys.shape[-2]
        total = held + key_states.shape[-2]
        if not self._fits(total):
            self._buffers = (_grown(self.keys, key_states, total), _grown(self.values, value_states, total))
            self.device, self.dtype, self.is_initialized = key_states.device, key_states.dtype, True
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, held:total] = new
        keys, values = (buffer[:, :, :total] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def _fits(self, total: int) -> bool:
        """True when what is held lies in the buffers (others may have replaced it) and there is room."""
        if self._buffers is None or self.keys is None or self.values is None:
            return False
        return all(
            held.data_ptr() == buffer.data_ptr() and held.stride() == buffer.stride() and total <= buffer.shape[-2]
            for held, buffer in zip((self.keys, self.values), self._buffers, strict=True)
        )


def _grown(held: torch.Tensor | None, new: torch.Tensor, total: int) -> torch.Tensor:
    room = total + max(64, total // 2)
    buffer = new.new_empty((*new.shape[:2], room, new.shape[-1]))
    if held is not None and held.numel():
        buffer[:, :, : held.shape[-2]] = held
    return buffer


KNOWN = ("transformers.cache_utils", __name__)
"""Modules whose cache layers are known here."""


class LanguageModel:
    """A causal model of Transformers, reduced to "run these tokens on that cache".

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In eval mode, on its device.

    Attributes
    ----------
    device : torch.device
        Takes the tokens, and gets logits and hidden states, wherever the layers are.
    rewinds : bool
        Whether any number of tokens can be taken out of the KV cache again.
    plain : bool
        Whether all layers of the cache are of kinds known here. Others may keep more than keys and values: of those
        nothing is taken back but by a copy, and their requests are not padded into one batch.
    taps : tuple of int
        Hidden states to keep of each run, ascending, as Transformers counts them: 0 the embeddings, i what layer i - 1
        puts out, the last behind the final norm.
    states : tensor (batch, n, taps x d) or None
        Those of the last run.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.device: torch.device = device_of(model.get_input_embeddings())
        self._sharded = is_sharded(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps = "logits_to_keep" in names
        self._places = "position_ids" in names
        kinds = set(getattr(self.config, "layer_types", None) or ())
        # Other layers (sliding window, recurrent) forget: they can be taken back only by what the last call added.
        self.rewinds = kinds <= {"full_attention"} and getattr(self.config, "sliding_window", None) is None
        self.plain = all(type(layer).__module__ in KNOWN for layer in getattr(self.new_cache(), "layers", []))
        self.taps: tuple[int, ...] = ()
        self.states: torch.Tensor | None = None

    def tap(self, taps: Sequence[int]) -> None:
        """Keep these hidden states too from now on."""
        self.taps = tuple(sorted({*self.taps, *taps}))

    def pick(self, states: torch.Tensor, taps: Sequence[int] | None) -> torch.Tensor:
        """Return the columns (.., taps x d) of ``taps``, in their order, from states of all that are tapped."""
        if taps is None or tuple(taps) == self.taps:
            return states
        parts = states.unflatten(-1, (len(self.taps), -1))
        return parts[..., [self.taps.index(tap) for tap in taps], :].flatten(-2)

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that its layers compute on."""
        own = [module for module in self.model.modules() if any(True for _ in module.parameters(recurse=False))]
        return tuple(sorted({device_of(module) for module in own}, key=str))

    @cached_property
    def hidden_size(self) -> int:
        """Width d of a hidden state."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    def no_states(self) -> torch.Tensor:
        """Return the states (0, taps x d) of no tokens."""
        return torch.empty((0, len(self.taps) * self.hidden_size), dtype=self.model.dtype, device=self.device)

    @cached_property
    def vocab_size(self) -> int:
        """Width of a logit row."""
        return int(getattr(self.model.get_output_embeddings(), "out_features", None) or self.config.vocab_size)

    @cached_property
    def max_positions(self) -> int | None:
        """Longest sequence, where the configuration names one."""
        value = getattr(self.config, "max_position_embeddings", None)
        return int(value) if value else None

    def new_cache(self) -> Any:
        """Return an empty KV cache that can be cropped."""
        cache = DynamicCache(config=self.config)
        if not self.rewinds and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        layers = getattr(cache, "layers", [])
        for i, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[i] = RoomyLayer()
        return cache

    def run(
        self,
        tokens: torch.Tensor,
        cache: Any,
        keep: int,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run ``tokens`` (batch, n) behind what ``cache`` holds; return the last logit rows (batch, keep, V)."""
        extra: dict[str, Any] = {self._cache_name: cache, "use_cache": cache is not None}
        if self._keeps:
            extra["logits_to_keep"] = keep
        if mask is not None:
            extra["attention_mask"] = mask
        if positions is not None and self._places:
            extra["position_ids"] = positions
        if self.taps:
            extra["output_hidden_states"] = True
        result = self.model(input_ids=tokens, **extra)
        if self.taps:
            states = [result.hidden_states[tap].to(self.device) for tap in self.taps]
            if states[0].ndim != 3:
                raise CaptureError(
                    f"the target's hidden states have {states[0].ndim - 2} axes, which no head here was made for",
                    fix="use --drafter lookup, layer-skip or model:NAME",
                )
            self.states = torch.cat(states, dim=-1)
        logits = result.logits.to(self.device)
        if not self._keeps:
            logits = logits[:, -keep:]
        if self._sharded:  # sums may differ from process to process in their last bits, decisions must not
            logits = from_first(logits)
            self.states = self.states if self.states is None else from_first(self.states)
        return logits


class Thread:
    """One token sequence at a model, with its KV cache and the hidden states that are tapped.

    Parameters
    ----------
    lm : LanguageModel
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.cache = lm.new_cache()
        self.ids: list[int] = []
        self._added = 0  # tokens that the last call appended
        self._copy: tuple[Any, list[int]] | None = None  # an earlier state of a cache that cannot be cropped
        self._taps = lm.taps
        self._states: torch.Tensor | None = None  # (at least len(ids), taps x d)

    def rows(self, ids: list[int], keep: int) -> torch.Tensor:
        """Return the last ``keep`` logit rows (keep, V) for the sequence ``ids``; runs what the cache does not hold."""
        if self._taps != self.lm.taps:  # tapped since: what was run before was not kept
            self.cache, self.ids, self._added = self.lm.new_cache(), [], 0
            self._taps, self._states, self._copy = self.lm.taps, None, None
        common = min(common_prefix(self.ids, ids), len(ids) - keep)
        if not self.lm.plain:
            return self._rows_by_copies(ids, keep, common)
        surplus = len(self.ids) - common
        if surplus > self._added and not self.lm.rewinds:
            self.cache, self.ids, self._added = self.lm.new_cache(), [], 0
            common = surplus = 0
        if surplus or not self.lm.rewinds and self.ids:
            self.cache.crop(-surplus)
        tokens = torch.tensor([ids[common:]], dtype=torch.int64, device=self.lm.device)
        logits = self.lm.run(tokens, self.cache, keep)
        self._keep_states(common)
        self.ids = ids[:]
        self._added = len(ids) - common
        return logits[0]

    def _rows_by_copies(self, ids: list[int], keep: int, common: int) -> torch.Tensor:
        """Do what :meth:`rows` does from the last copy of the cache, made before the rows that may be taken back."""
        if common < len(self.ids):
            held = self._copy if self._copy is not None and len(self._copy[1]) <= common else (self.lm.new_cache(), [])
            self.cache, self.ids = copy.deepcopy(held[0]), held[1]
        begin, middle = len(self.ids), len(ids) - keep
        if begin < middle:
            self.lm.run(torch.tensor([ids[begin:middle]], device=self.lm.device), self.cache, 1)
            self._keep_states(begin)
        self._copy = copy.deepcopy(self.cache), ids[:middle]
        logits = self.lm.run(torch.tensor([ids[middle:]], device=self.lm.device), self.cache, keep)
        self._keep_states(middle)
        self.ids = ids[:]
        return logits[0]

    def states(self, ids: list[int]) -> torch.Tensor:
        """Return the tapped states (len(ids), taps x d); runs what the cache does not hold."""
        if not ids:
            return self.lm.no_states()
        if self._taps != self.lm.taps or self.ids[: len(ids)] != ids:
            self.rows(ids, 1)
        assert self._states is not None
        return self._states[: len(ids)]

    def _keep_states(self, common: int) -> None:
        """Write the states of the last run behind the first ``common``, in place while there is room."""
        if not self.lm.taps:
            return
        assert self.lm.states is not None
        new = self.lm.states[0]
        total = common + len(new)
        if self._states is None or total > len(self._states):
            room = new.new_empty((total + max(64, total // 2), new.shape[1]))
            if self._states is not None:
                room[:common] = self._states[:common]
            self._states = room
        self._states[common:total] = new

    def fork(self) -> Thread:
        """Return an independent thread with a copy of the KV cache."""
        twin = Thread(self.lm)
        twin.cache, twin.ids, twin._added = copy.deepcopy(self.cache), self.ids[:], self._added
        twin._taps, twin._states = self._taps, None if self._states is None else self._states.clone()
        twin._copy = self._copy  # never run on
        return twin

    def greedy(self, ids: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
        """Return ``steps`` greedy tokens after ``ids`` and their logit rows (steps, V).

        Tokens stay on the device until all are there: one wait instead of one per token. The last token is not run.
        """
        row = self.rows(ids, 1)
        rows = [row]
        picked = [row.argmax(dim=-1)]
        for _ in range(steps - 1):
            row = self.lm.run(picked[-1][None], self.cache, 1)[0]
            rows.append(row)
            picked.append(row.argmax(dim=-1))
        tokens: list[int] = torch.cat(picked).tolist()
        self.ids = ids + tokens[:-1]
        self._added += steps - 1
        return tokens, torch.cat(rows)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def left_pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, mask and positions (batch, longest), padded on the left; positions count real tokens from 0."""
    longest = max(len(row) for row in rows)
    tokens = torch.zeros((len(rows), longest), dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, longest - len(row) :] = torch.tensor(row, dtype=torch.int64)
        mask[i, longest - len(row) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return tokens.to(device), mask.to(device), positions.to(device)


def logprobs_of(rows: torch.Tensor, tokens: Sequence[int]) -> Any:
    """Return float32 log-probabilities (K,) of ``tokens`` under softmax(rows), in nats."""
    wide = rows.float()
    index = torch.tensor(list(tokens), dtype=torch.int64, device=rows.device)
    return (wide.gather(1, index[:, None])[:, 0] - wide.logsumexp(-1)).cpu().numpy()


@torch.inference_mode()
def draft_greedy(thread: Thread, prefix_ids: Sequence[int], num_draft_tokens: int, keep_logits: bool) -> Proposal:
    """Draft greedily on a thread."""
    tokens, rows = thread.greedy(list(prefix_ids), num_draft_tokens)
    return Proposal(tokens, logprobs_of(rows, tokens), rows if keep_logits else None)


@torch.inference_mode()
def draft_greedy_many(
    lm: LanguageModel, prefixes: Sequence[Sequence[int]], num_draft_tokens: int, keep_logits: bool
) -> list[Proposal]:
    """Draft greedily for unrelated prefixes in one batch."""
    if not prefixes:
        return []
    if not lm.plain:
        return [draft_greedy(Thread(lm), prefix, num_draft_tokens, keep_logits) for prefix in prefixes]
    tokens, mask, positions = left_pad(prefixes, lm.device)
    cache = lm.new_cache()
    rows, picked = [], []
    for _ in range(num_draft_tokens):
        row = lm.run(tokens, cache, 1, mask, positions)[:, -1]
        rows.append(row)
        picked.append(row.argmax(dim=-1))
        tokens, positions = picked[-1][:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones((len(prefixes), 1))], dim=1)
    ids = torch.stack(picked, 1).tolist()
    logits = torch.stack(rows, 1)
    return [
        Proposal(ids[n], logprobs_of(logits[n], ids[n]), logits[n] if keep_logits else None)
        for n in range(len(prefixes))
    ]
