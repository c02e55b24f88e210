"""A second model as the drafter."""

from __future__ import annotations

from typing import Any

from ...engines.transformers.model import weights_sha256
from ...errors import CaptureError
from .layer_skip import GreedyDrafter


class ModelDrafter(GreedyDrafter):
    """A causal model with the target's vocabulary.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    name : str
        Without the ``model:`` in front.
    revision : str or None
    keep_logits : bool
    identity : dict, optional
        More for the manifest.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        revision: str | None = None,
        keep_logits: bool = False,
        identity: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(model.eval(), f"model:{name}", keep_logits)
        self._model_name = name
        self._revision = revision
        self._weights, self._identity = weights_sha256(model), identity or {}

    def describe(self) -> dict[str, Any]:
        """Return the model's name, revision, checksum and dtype."""
        return {
            "name": self.name,
            "kind": "model",
            "model": self._model_name,
            "revision": self._revision,
            **self._identity,
            "weights_sha256": self._weights,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "vocab_size": self.vocab_size,
        }


def check_same_tokenizer(target: Any, drafter: Any) -> None:
    """Refuse two tokenizers that give one id two meanings; None (unknown) passes.

    Raises
    ------
    CaptureError
        Naming the first id that differs.
    """
    if target is None or drafter is None:
        return
    mine, theirs = target.get_vocab(), drafter.get_vocab()
    if mine == theirs:
        return
    if len(mine) != len(theirs):
        what = f"the target's tokenizer has {len(mine)} entries, the drafter's {len(theirs)}"
    else:
        token = min((t for t in mine if theirs.get(t) != mine[t]), key=lambda t: mine[t])
        what = f"target and drafter tokenize differently: {token!r} is {mine[token]} here and {theirs.get(token)} there"
    raise CaptureError(what, fix="use a drafter of the target's own family")
