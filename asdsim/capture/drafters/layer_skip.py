"""The target without some of its layers, as its own drafter: same weights, own KV cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import torch

from ...engines.protocol import Drafter, DrafterSession, ManyProposer, Proposal
from ...engines.transformers.forward import LanguageModel, Thread, draft_greedy, draft_greedy_many
from ...engines.transformers.kvpool import PooledDrafter
from ...errors import CaptureError


def skip_layers(model: Any, layers: Sequence[int]) -> Any:
    """Return a model without ``layers`` that shares all weights with ``model``.

    Raises
    ------
    CaptureError
        If a layer does not exist, none would be left, or the model's layers cannot be told.
    """
    total = model.config.get_text_config().num_hidden_layers
    beyond = [layer for layer in layers if layer >= total]
    if beyond:
        raise CaptureError(
            f"layer-skip: layer {beyond[0]} does not exist, the target has {total} layers",
            fix=f"name layers from 0 to {total - 1}, for example layer-skip:{total // 2}",
        )
    kept = [i for i in range(total) if i not in set(layers)]
    if not kept:
        raise CaptureError("layer-skip: no layer would be left", fix="drop fewer layers")
    thin = _share(model)
    owner, name = _layer_list(thin, total)
    if getattr(thin.config.get_text_config(), "num_kv_shared_layers", 0):
        raise CaptureError("layer-skip: the target's layers share their KV cache", fix="use --drafter model:NAME")
    old = getattr(owner, name)
    setattr(owner, name, torch.nn.ModuleList(old[i] for i in kept))
    for new, old_index in enumerate(kept):
        for module in old[old_index].modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = new  # the place in the KV cache
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(text, key, [value[i] for i in kept])  # layer_types and the like
    text.num_hidden_layers = len(kept)
    for module in thin.modules():
        if getattr(module, "config", None) is model.config:
            module.config = config
        elif getattr(module, "config", None) is model.config.get_text_config():
            module.config = text
    return thin


def _share(module: Any) -> Any:
    """Copy the tree of modules, not the parameters in it.

    A ``forward`` that was set on a module, as accelerate does to move inputs between devices, runs that module and not
    its copy: it is bound anew.
    """
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {
        name: None if child is None else _share(child) for name, child in module._modules.items()
    }
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            twin.__dict__[name] = MethodType(value.__func__, twin)
        elif isinstance(value, partial) and value.args[:1] == (module,):
            twin.__dict__[name] = update_wrapper(partial(value.func, twin, *value.args[1:], **value.keywords), value)
    return twin


def _layer_list(model: Any, total: int) -> tuple[Any, str]:
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == total:
                return owner, name
    raise CaptureError("layer-skip: cannot tell this model's layers", fix="use --drafter lookup or model:NAME")


class GreedySession(DrafterSession):
    """One request at a model that drafts greedily."""

    def __init__(self, thread: Thread, keep_logits: bool) -> None:
        self._thread = thread
        self._keep_logits = keep_logits

    def fork(self) -> GreedySession:
        """Return an independent session with a copy of the KV cache."""
        return GreedySession(self._thread.fork(), self._keep_logits)

    def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        """Return ``num_draft_tokens`` greedy tokens."""
        return draft_greedy(self._thread, prefix_ids, num_draft_tokens, self._keep_logits)


class GreedyDrafter(Drafter):
    """A causal model that drafts greedily with a KV cache of its own.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    name : str
    keep_logits : bool
        Hand the logit rows over with each proposal, for divergences.
    """

    has_logits = True

    def __init__(self, model: Any, name: str, keep_logits: bool = False) -> None:
        self.model = model
        self.name = name
        self.lm = LanguageModel(model)
        self.keep_logits = keep_logits
        self.vocab_size = self.lm.vocab_size
        self.max_positions = self.lm.max_positions

    def session(self, prompt_ids: Sequence[int]) -> GreedySession:
        """Return a session with an empty KV cache."""
        return GreedySession(Thread(self.lm), self.keep_logits)

    def pooled(self, max_bytes: int) -> ManyProposer:
        """Return a ``propose_many`` that reuses the KV of shared prefixes, where the cache can be taken apart."""
        return PooledDrafter(self.lm, max_bytes, self.keep_logits) if self.lm.rewinds and max_bytes > 0 else self

    def propose_many(self, prefixes: Sequence[Sequence[int]], num_draft_tokens: int) -> list[Proposal]:
        """Draft for unrelated prefixes in one batch, padded on the left."""
        return draft_greedy_many(self.lm, prefixes, num_draft_tokens, self.keep_logits)


class LayerSkip(GreedyDrafter):
    """The target without ``layers`` (numbered from 0)."""

    def __init__(self, target_model: Any, layers: Sequence[int], keep_logits: bool = False) -> None:
        self.layers = tuple(layers)
        super().__init__(
            skip_layers(target_model, layers), f"layer-skip:{','.join(map(str, self.layers))}", keep_logits
        )

    def describe(self) -> dict[str, Any]:
        """Return the kind and the layers left out; the weights are the target's."""
        return {"name": self.name, "kind": "layer-skip", "layers": list(self.layers)}
