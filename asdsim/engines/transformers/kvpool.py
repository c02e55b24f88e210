"""KV of shared prefixes, kept token by token, for batches of unrelated sequences.

Every token that was run at a prefix has a slot: one row of keys and values in each layer. A prefix tree over token ids
finds the slots of the longest known prefix of a sequence; a batch gathers them, padded on the left, and runs only what
is new. Keys are stored as the model caches them, with their rotary position, so a slot is right at its own place only,
and that is where the tree finds it.

Where the bound is reached, everything is dropped and built anew: answers never depend on what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

from ..protocol import Logits, Proposal
from .forward import LanguageModel, logprobs_of

GROWTH = 2048
"""Slots by which the pool grows."""


class Cached(Protocol):
    """What a pool asks of a model; see :class:`.forward.LanguageModel`. A draft head taps nothing."""

    device: torch.device
    taps: tuple[int, ...]
    states: torch.Tensor | None

    def new_cache(self) -> Any:
        """Return an empty KV cache."""
        ...


class KVPool:
    """Keys and values by slot, and the tree that leads to them.

    Parameters
    ----------
    lm : LanguageModel or other Cached
        Must be able to crop its cache at will (no sliding windows, no recurrent layers).
    max_bytes : int
        Bound on the keys and values held, beside those of the batch at work; 0 keeps none.
    beside : KVPool, optional
        A pool of another model whose bound counts instead: the two fill it together, and are dropped together.
    """

    def __init__(self, lm: Cached, max_bytes: int, beside: KVPool | None = None) -> None:
        self.lm = lm
        self.max_bytes: int = max_bytes if beside is None else beside.max_bytes
        self._sharing: list[KVPool] = [] if beside is None else beside._sharing
        self._sharing.append(self)
        self._keys: list[torch.Tensor] = []  # per layer (slots, heads, width)
        self._values: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []  # one (slots, taps x d) where the model is tapped
        self._taps = lm.taps
        self._child: dict[tuple[int, int], int] = {}  # (slot of the token before or -1, token) -> slot

    def known(self, ids: Sequence[int], most: int) -> list[int]:
        """Return the slots of the longest prefix of ``ids`` that is held, at most ``most`` of them."""
        if self._taps != self.lm.taps:  # tapped since: what was run before was not kept
            self._drop()
            self._taps = self.lm.taps
        slots: list[int] = []
        last = -1
        for token in ids[:most]:
            slot = self._child.get((last, token))
            if slot is None:
                break
            slots.append(slot)
            last = slot
        return slots

    def start(
        self, rows: Sequence[Sequence[int]], held: Sequence[Sequence[int]]
    ) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lay out a batch: what is held goes into a cache, the rest into tokens, both padded on the left.

        Returns
        -------
        cache : DynamicCache
            Holds ``longest`` columns, ``longest`` the most slots of a row.
        tokens, mask, positions : int64 tensor
            (batch, most new tokens), (batch, longest + most new tokens), (batch, most new tokens).
        """
        longest = max(map(len, held))
        width = max(len(row) - len(slots) for row, slots in zip(rows, held, strict=True))
        index = torch.zeros((len(rows), longest), dtype=torch.int64)
        tokens = torch.zeros((len(rows), width), dtype=torch.int64)
        mask = torch.zeros((len(rows), longest + width), dtype=torch.int64)
        positions = torch.zeros((len(rows), width), dtype=torch.int64)
        for n, (row, slots) in enumerate(zip(rows, held, strict=True)):
            old, new = len(slots), len(row) - len(slots)
            if old:
                index[n, longest - old :] = torch.tensor(slots)
                mask[n, longest - old : longest] = 1
            tokens[n, width - new :] = torch.tensor(list(row[old:]))
            mask[n, longest + width - new :] = 1
            positions[n, width - new :] = torch.arange(old, old + new)
        device = self.lm.device
        cache = self.lm.new_cache()
        if longest:
            at = _on_each_device(index)
            for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
                place = at(keys.device)
                cache.update(keys[place].transpose(1, 2), values[place].transpose(1, 2), layer)
        return cache, tokens.to(device), mask.to(device), positions.to(device)

    def store(
        self, cache: Any, rows: Sequence[Sequence[int]], held: Sequence[Sequence[int]], first: Sequence[int]
    ) -> None:
        """Keep what a batch computed.

        Parameters
        ----------
        cache : DynamicCache
            After the batch ran.
        rows : sequence of sequence of int
            Token ids that were held or run.
        held : sequence of sequence of int
            Slots that were held.
        first : sequence of int
            Column of each row's first new token in the cache; the others follow.
        """
        used = sum(len(each._child) * each._slot_bytes() for each in self._sharing)
        if used >= self.max_bytes:
            for each in self._sharing:
                each._drop()
            return
        row_of: list[int] = []
        column_of: list[int] = []
        base = len(self._child)
        for n, (row, slots) in enumerate(zip(rows, held, strict=True)):
            last = slots[-1] if slots else -1
            for offset, token in enumerate(row[len(slots) :]):
                slot = self._child.get((last, token))
                if slot is None:
                    slot = self._child[last, token] = len(self._child)
                    row_of.append(n)
                    column_of.append(first[n] + offset)
                last = slot
        if not row_of:
            return
        most = self.max_bytes * base // used if used else 0  # slots of this pool once the bound is reached
        rows_at, columns_at = _on_each_device(torch.tensor(row_of)), _on_each_device(torch.tensor(column_of))
        for pool, name in ((self._keys, "keys"), (self._values, "values")):
            for layer, entry in enumerate(cache.layers):
                held_now = getattr(entry, name)
                device = held_now.device
                _put(pool, layer, base, held_now[rows_at(device), :, columns_at(device)], most)
        if self.lm.taps:
            assert self.lm.states is not None
            states, device = self.lm.states, self.lm.device
            older = cache.layers[0].keys.shape[-2] - states.shape[1]  # columns that were held, not run
            _put(self._states, 0, base, states[rows_at(device), columns_at(device) - older], most)

    def states(self, slots: Sequence[int]) -> torch.Tensor:
        """Return the tapped states (n, taps x d) of slots."""
        return self._states[0][torch.tensor(slots, device=self.lm.device)]

    def _drop(self) -> None:
        self._child.clear()
        self._keys, self._values, self._states = [], [], []

    def _slot_bytes(self) -> int:
        held = (*self._keys, *self._values, *self._states)
        return sum(tensor[0].numel() * tensor.element_size() for tensor in held)


def _on_each_device(index: torch.Tensor) -> Callable[[torch.device], torch.Tensor]:
    """Return what gives an index on a device; each layer of a model may be on its own."""
    return lru_cache(maxsize=None)(index.to)


def _put(pool: list[torch.Tensor], layer: int, base: int, fresh: torch.Tensor, most: int) -> None:
    """Write ``fresh`` from slot ``base`` on, and let the pool grow where it must; it doubles up to ``most`` slots."""
    if layer == len(pool):
        pool.append(fresh.new_zeros((GROWTH, *fresh.shape[1:])))
    held, needed = len(pool[layer]), base + len(fresh)
    if needed > held:
        room = max(needed, min(2 * held, most) if most else 2 * held)
        pool[layer] = torch.cat([pool[layer], fresh.new_zeros((room - held, *fresh.shape[1:]))])
    pool[layer][base : base + len(fresh)] = fresh


class PooledTarget:
    """``score_many`` of a target, with the KV of shared prefixes reused."""

    def __init__(self, lm: LanguageModel, max_bytes: int) -> None:
        self.lm, self.pool = lm, KVPool(lm, max_bytes)

    @torch.inference_mode()
    def score_many(self, prefixes: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> list[Logits]:
        """Score unrelated blocks in one batch."""
        if not prefixes:
            return []
        pool = self.pool
        rows = [[*prefix, *draft] for prefix, draft in zip(prefixes, drafts, strict=True)]
        held = [pool.known(row, len(prefix) - 1) for row, prefix in zip(rows, prefixes, strict=True)]
        cache, tokens, mask, positions = pool.start(rows, held)
        keep = max(map(len, drafts)) + 1
        logits = self.lm.run(tokens, cache, keep, mask, positions)
        ends = mask.shape[1]
        pool.store(cache, rows, held, [ends - (len(row) - len(slots)) for row, slots in zip(rows, held, strict=True)])
        return [logits[n, keep - len(draft) - 1 :] for n, draft in enumerate(drafts)]

    @torch.inference_mode()
    def states_many(self, rows: Sequence[Sequence[int]], taps: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return hidden states (n, taps x d) at each token of unrelated sequences; only what is not held is run."""
        pool, lm = self.pool, self.lm
        held = [pool.known(row, len(row)) for row in rows]
        states = [pool.states(slots) if slots else lm.no_states() for slots in held]
        todo = [n for n, (row, slots) in enumerate(zip(rows, held, strict=True)) if len(slots) < len(row)]
        if todo:
            run, have = [rows[n] for n in todo], [held[n] for n in todo]
            cache, tokens, mask, positions = pool.start(run, have)
            lm.run(tokens, cache, 1, mask, positions)
            assert lm.states is not None
            missing = [len(row) - len(slots) for row, slots in zip(run, have, strict=True)]
            for n, count, new in zip(todo, missing, lm.states, strict=True):
                states[n] = torch.cat([states[n], new[-count:]])
            pool.store(cache, run, have, [mask.shape[1] - count for count in missing])
        return [lm.pick(row_states, taps) for row_states in states]


class PooledDrafter:
    """``propose_many`` of a causal model that drafts greedily, with the KV of shared prefixes reused."""

    def __init__(self, lm: LanguageModel, max_bytes: int, keep_logits: bool = False) -> None:
        self._lm, self._pool, self._keep_logits = lm, KVPool(lm, max_bytes), keep_logits

    @torch.inference_mode()
    def propose_many(self, prefixes: Sequence[Sequence[int]], num_draft_tokens: int) -> list[Proposal]:
        """Draft for unrelated prefixes in one batch."""
        if not prefixes:
            return []
        pool = self._pool
        held = [pool.known(prefix, len(prefix) - 1) for prefix in prefixes]
        cache, tokens, mask, positions = pool.start(prefixes, held)
        ends = mask.shape[1]
        rows, picked = [], []
        for _ in range(num_draft_tokens):
            row = self._lm.run(tokens, cache, 1, mask, positions)[:, -1]
            rows.append(row)
            picked.append(row.argmax(dim=-1))
            tokens, positions = picked[-1][:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones((len(prefixes), 1))], dim=1)
        ids = torch.stack(picked, 1).tolist()
        logits = torch.stack(rows, 1)
        run = [[*prefix, *drafted[:-1]] for prefix, drafted in zip(prefixes, ids, strict=True)]  # the last is not run
        first = [ends - (len(prefix) - len(slots)) for prefix, slots in zip(prefixes, held, strict=True)]
        pool.store(cache, run, held, first)
        return [
            Proposal(drafted, logprobs_of(logits[n], drafted), logits[n] if self._keep_logits else None)
            for n, drafted in enumerate(ids)
        ]
