"""Hugging Face causal language models as targets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import CaptureError
from ..protocol import Logits, ManyScorer, Target
from .forward import LanguageModel, Thread, left_pad
from .kvpool import PooledTarget
from .place import WholeState, whole


class HFSession:
    """One request at a :class:`HFTarget`."""

    def __init__(self, thread: Thread) -> None:
        self._thread = thread

    def fork(self) -> HFSession:
        """Return an independent session with a copy of the KV cache."""
        return HFSession(self._thread.fork())

    @torch.inference_mode()
    def score(self, prefix_ids: Sequence[int], draft_ids: Sequence[int]) -> Logits:
        """Return logits (K + 1, V): row i after ``prefix_ids`` and ``draft_ids[:i]``."""
        return self._thread.rows([*prefix_ids, *draft_ids], len(draft_ids) + 1)

    @torch.inference_mode()
    def states(self, ids: Sequence[int], taps: Sequence[int] | None = None) -> torch.Tensor:
        """Return hidden states (n, taps x d) at each of ``ids``; only what was not run before is run."""
        return self._thread.lm.pick(self._thread.states(list(ids)), taps)


class HFTarget(Target):
    """A Hugging Face causal model as the target.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    name : str
        As asked for.
    tokenizer : transformers.PreTrainedTokenizerBase or None
    revision : str or None
    identity : dict, optional
        More that identifies the model, for the manifest.
    logits_dtype : {"model", "float32"}
        ``float32`` computes the final projection in float32 whatever the model's dtype.

    Attributes
    ----------
    placement : dict
        How the model was laid out over devices and processes, for the manifest; empty for one device.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        tokenizer: Any = None,
        revision: str | None = None,
        identity: dict[str, Any] | None = None,
        logits_dtype: str = "model",
    ) -> None:
        self.name = name
        self.placement: dict[str, Any] = {}
        self.tokenizer = tokenizer
        self.model = model.eval()
        self._revision = revision
        self._identity = identity or {}
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.weights_sha256 = weights_sha256(model)
        self.logits_dtype = self.dtype
        if logits_dtype == "float32" and self.dtype != "float32":
            model.set_output_embeddings(WideHead(model.get_output_embeddings()))
            self.logits_dtype = "float32"
        self.lm = LanguageModel(model)
        self.vocab_size = self.lm.vocab_size
        self.max_positions = self.lm.max_positions
        self.eos_ids = eos_ids_of(model, tokenizer)

    def session(self, prompt_ids: Sequence[int]) -> HFSession:
        """Return a session with an empty KV cache."""
        return HFSession(Thread(self.lm))

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the hidden states of ``layers`` of whatever is run from now on, for a drafter that reads them.

        Raises
        ------
        CaptureError
            If the model has no such layer.
        """
        total = int(self.lm.config.num_hidden_layers)
        for layer in layers:
            if not 0 <= layer <= total:
                raise CaptureError(
                    f"the drafter reads hidden state {layer}, the target has {total} layers (states 0 to {total})",
                    fix="use the head made for this target, or name the states with --draft-layer-ids",
                )
        self.lm.tap(layers)

    def pooled(self, max_bytes: int) -> ManyScorer:
        """Return a ``score_many`` that reuses the KV of shared prefixes, where the model's cache can be taken apart."""
        return PooledTarget(self.lm, max_bytes) if self.lm.rewinds and max_bytes > 0 else self

    @torch.inference_mode()
    def score_many(self, prefixes: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> list[Logits]:
        """Score unrelated blocks in one batch, padded on the left."""
        if not prefixes:
            return []
        if not self.lm.plain:
            return [self.session(()).score(*block) for block in zip(prefixes, drafts, strict=True)]
        rows = [[*prefix, *draft] for prefix, draft in zip(prefixes, drafts, strict=True)]
        tokens, mask, positions = left_pad(rows, self.lm.device)
        keep = max(len(draft) for draft in drafts) + 1
        logits = self.lm.run(tokens, None, keep, mask, positions)
        return [logits[n, keep - len(draft) - 1 :] for n, draft in enumerate(drafts)]

    @torch.inference_mode()
    def states_many(self, rows: Sequence[Sequence[int]], taps: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return hidden states (n, taps x d) at each token of unrelated sequences."""
        if not self.lm.plain:
            return [self.session(()).states(row, taps) for row in rows]
        run = [row for row in rows if row]
        if run:
            tokens, mask, positions = left_pad(run, self.lm.device)
            self.lm.run(tokens, None, 1, mask, positions)
        computed = iter(() if self.lm.states is None else self.lm.states)
        states = [next(computed)[-len(row) :] if row else self.lm.no_states() for row in rows]
        return [self.lm.pick(row_states, taps) for row_states in states]

    def describe(self) -> dict[str, Any]:
        """Return name, revision, weight checksum, dtypes, device and vocabulary."""
        return {
            "name": self.name,
            "revision": self._revision,
            **self._identity,
            "architecture": type(self.model).__name__,
            "weights_sha256": self.weights_sha256,
            "dtype": self.dtype,
            "logits_dtype": self.logits_dtype,
            "logits_processors": [],
            "device": self.lm.device.type,
            "attention": getattr(self.lm.config, "_attn_implementation", None),
            "vocab_size": self.vocab_size,
            "eos_ids": list(self.eos_ids),
        }

    def synchronize(self) -> None:
        """Wait for the GPUs, where there are any."""
        for device in self.lm.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


class WideHead(torch.nn.Module):
    """A model's last projection, computed in float32."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        weight, bias = whole(head, "weight"), whole(head, "bias")
        self.out_features = int(weight.shape[0])
        self.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias.float(), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits."""
        return torch.nn.functional.linear(hidden.to(self.weight), self.weight, self.bias)


def eos_ids_of(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the ids that end a generation: of the generation config, else the model's config, else the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return tuple(sorted({int(v) for v in (value if isinstance(value, (list, tuple)) else [value])}))
    return ()


def weights_sha256(model: Any) -> str:
    """Return a checksum of all weights as loaded: sha256 over name, dtype, shape and bytes, by name.

    Independent of how files are split or ordered; tied weights count under each of their names.
    """
    return tensors_sha256(WholeState(model))


NO_MATTER = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "base_model_name_or_path", "_commit_hash")
"""Keys of config.json that do not change what a model computes, or that are recorded beside it."""


def config_sha256(config: Mapping[str, Any]) -> str:
    """Return a checksum of config.json: weights do not tell everything, RoPE theta for one."""
    kept = {key: value for key, value in config.items() if key not in NO_MATTER}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum of named tensors: sha256 over name, dtype, shape and bytes, by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(memoryview(data.view(torch.uint8).numpy()))
    return digest.hexdigest()
