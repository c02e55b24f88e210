"""Drafters by name: ``layer-skip[:LAYERS]``, ``lookup[:N]``, ``model:NAME``."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError, unknown_name

NAMES = ("layer-skip", "lookup", "model")
DEFAULT_LAYERS = (12,)


def check_spec(spec: str) -> tuple[str, str]:
    """Split ``NAME[:ARGUMENT]`` and refuse what cannot be meant, without loading anything.

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


def make_drafter(spec: str, target: Any, *, keep_logits: bool = False, **loading: Any) -> Any:
    """Return the drafter that ``spec`` names.

    Parameters
    ----------
    spec : str
    target : HFTarget
    keep_logits : bool
        Hand over logit rows, for divergences.
    **loading
        ``revision``, ``dtype``, ``device``, ``offline``, ``trust_remote_code`` for ``model:NAME``.
    """
    name, argument = check_spec(spec)
    if name == "lookup":
        from .lookup import Lookup, parse_ngram

        drafter: Any = Lookup(parse_ngram(argument))
    elif name == "layer-skip":
        from .layer_skip import LayerSkip

        drafter = LayerSkip(target.model, parse_layers(argument), keep_logits)
    else:
        from ..loop import check_vocabulary
        from ..models import load_model
        from .model import ModelDrafter, check_same_tokenizer

        loaded = load_model(argument, **loading)
        drafter = ModelDrafter(loaded.model, argument, loaded.revision, keep_logits)
        check_vocabulary(target, drafter)
        check_same_tokenizer(target.tokenizer, loaded.tokenizer)
    if keep_logits and not drafter.has_logits:
        raise UsageError(f"drafter {spec} has no distribution, so no divergences", fix="leave --divergences out")
    return drafter
