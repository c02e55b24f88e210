"""Drafters by name: ``layer-skip[:LAYERS]``, ``lookup[:N]``, ``model:NAME``; heads: ``medusa:PATH`` and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UsageError, unknown_name

HEADS = ("medusa", "eagle3", "dspark")
NAMES = ("layer-skip", "lookup", "model", *HEADS)
DEFAULT_LAYERS = (12,)
FLAGS = {"layer_ids": "--draft-layer-ids", "rope_theta": "--draft-rope-theta", "anchor": "--draft-anchor"}
"""What may be said of a head where its checkpoint does not say it, or says it wrong; and the flag."""
READERS = {"layer_ids": ("eagle3", "dspark"), "rope_theta": ("eagle3", "dspark"), "anchor": ("dspark",)}
"""Heads that such a statement means something to."""
ANCHORS = ("first", "bonus")
"""Of a DSpark block: ``first``: slot 0, the anchor's, predicts the next token; ``bonus``: slot 1 does."""


def check_spec(spec: str) -> tuple[str, str]:
    """Split ``NAME[:ARGUMENT]`` and refuse an unknown name or argument, without loading anything.

    Raises
    ------
    UsageError
        On an unknown name or an argument that the drafter cannot take.
    """
    name, colon, argument = spec.partition(":")
    if name not in NAMES:
        raise unknown_name("drafter", name, list(NAMES))
    if colon and not argument:
        raise UsageError(f"drafter {spec!r} ends with a colon", fix="leave it out, or say what follows")
    if name == "lookup":
        from .lookup import parse_ngram

        parse_ngram(argument)
    elif name == "layer-skip":
        parse_layers(argument)
    elif name in HEADS:
        from .formats import check_head_name

        check_head_name(name, argument)
    elif not argument:
        raise UsageError("drafter 'model' names no model", fix="write model:NAME")
    return name, argument


def parse_layers(text: str) -> tuple[int, ...]:
    """Read ``"12,14"``; an empty text means layer 12."""
    if not text:
        return DEFAULT_LAYERS
    items = [item.strip() for item in text.split(",")]
    if not all(item.isascii() and item.isdigit() for item in items):
        raise UsageError(f"layer-skip: {text!r} is no list of layers", fix="write layer-skip:12 or layer-skip:12,14")
    return tuple(sorted({int(item) for item in items}))


def check_head(
    spec: str, *, num_draft_tokens: int | None = None, overrides: Mapping[str, Any] | None = None, **loading: Any
) -> Any:
    """Refuse, before a target is loaded, what a head's files alone can tell; nothing to do for other drafters.

    Parameters are those of :func:`make_drafter`, and K.

    Returns
    -------
    Checkpoint or None
        What was read, for :func:`make_drafter`; None for a drafter that is no head.

    Raises
    ------
    CaptureError, UsageError
        See :func:`.heads.load_head`.
    """
    name, argument = check_spec(spec)
    check_overrides(name, overrides or {})
    if name not in HEADS:
        return None
    from .heads import check_files

    return check_files(
        name, argument, num_draft_tokens=num_draft_tokens, overrides=overrides, revision=loading.get("revision"),
        offline=bool(loading.get("offline")),
    )  # fmt: skip


def make_drafter(
    spec: str,
    target: Any,
    *,
    keep_logits: bool = False,
    overrides: Mapping[str, Any] | None = None,
    checkpoint: Any = None,
    **loading: Any,
) -> Any:
    """Return the drafter that ``spec`` names.

    Parameters
    ----------
    spec : str
    target : HFTarget
    keep_logits : bool
        Hand over logit rows, for divergences.
    overrides : mapping, optional
        For heads, see :data:`FLAGS`: what the checkpoint does not say, or says wrong.
    checkpoint : Checkpoint, optional
        What :func:`check_head` read of a head.
    **loading
        ``revision``, ``dtype``, ``device``, ``offline``, ``trust_remote_code`` for ``model:NAME``; a head takes the
        target's dtype and device.
    """
    name, argument = check_spec(spec)
    check_overrides(name, overrides or {})
    if name == "lookup":
        from .lookup import Lookup, parse_ngram

        drafter: Any = Lookup(parse_ngram(argument))
    elif name == "layer-skip":
        from .layer_skip import LayerSkip

        drafter = LayerSkip(target.model, parse_layers(argument), keep_logits)
    elif name in HEADS:
        from .heads import load_head

        drafter = load_head(
            name, argument, target, keep_logits=keep_logits, overrides=overrides, checkpoint=checkpoint,
            revision=loading.get("revision"), offline=bool(loading.get("offline")),
        )  # fmt: skip
    else:
        from ...engines.transformers.load import load_model
        from ..loop import check_vocabulary
        from .model import ModelDrafter, check_same_tokenizer

        loaded = load_model(argument, **loading)
        drafter = ModelDrafter(loaded.model, argument, loaded.revision, keep_logits, loaded.identity)
        check_vocabulary(target, drafter)
        check_same_tokenizer(target.tokenizer, loaded.tokenizer)
    if keep_logits and not drafter.has_logits:
        raise UsageError(f"drafter {spec} has no distribution, so no divergences", fix="leave --divergences out")
    return drafter


def check_overrides(name: str, overrides: Mapping[str, Any]) -> None:
    """Refuse what is meant for a head where the drafter is none, or is one that does not read it.

    Raises
    ------
    UsageError
        Naming the flag.
    """
    for key, value in overrides.items():
        if value is not None and name not in READERS[key]:
            raise UsageError(f"{FLAGS[key]} has no meaning for drafter {name}", fix="leave it out")
    if overrides.get("anchor") not in (None, *ANCHORS):
        raise unknown_name("draft anchor", str(overrides["anchor"]), list(ANCHORS))


def parse_layer_ids(text: str) -> tuple[int, ...]:
    """Read ``"2,15,27"``: hidden states of the target, 0 the embeddings, i what layer i - 1 puts out."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isascii() and item.isdigit() for item in items):
        raise UsageError(f"--draft-layer-ids {text!r} is no list of hidden states", fix="write for example 2,15,27")
    return tuple(map(int, items))
