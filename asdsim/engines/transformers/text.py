"""Text of tokens: the tokenizer of a trace's target, without the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CaptureError


def load_decoder(
    target: Mapping[str, Any], *, tokenizer: str | None = None, offline: bool = False
) -> Callable[[list[int]], str]:
    """Return a function that turns token ids into text, special tokens left out.

    Parameters
    ----------
    target : mapping
        The target as a manifest records it: ``manifest.target``.
    tokenizer : str, optional
        Name or directory of its tokenizer, if it is no longer under the target's recorded name.
    offline : bool
        Use only what is on this machine.

    Raises
    ------
    CaptureError
        If the tokenizer cannot be had.
    """
    loaded = load_tokenizer(target, tokenizer=tokenizer, offline=offline)

    def decode(ids: list[int]) -> str:
        return str(loaded.decode(ids, skip_special_tokens=True))

    return decode


def load_tokenizer(target: Mapping[str, Any], *, tokenizer: str | None = None, offline: bool = False) -> Any:
    """Return the tokenizer of a trace's target; parameters and errors as :func:`load_decoder`."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CaptureError(
            f"reading outputs needs {error.name or 'more packages'}", fix="pip install 'asdsim[capture]'"
        ) from error
    from .load import BUILT_IN, ensure_smollm2

    name = tokenizer or str(target["name"])
    path = str(ensure_smollm2(offline=offline)) if name in BUILT_IN else name
    where: dict[str, Any] = {"local_files_only": offline or Path(path).is_dir()}
    revision = target.get("revision")
    if revision and tokenizer is None and "source" not in target:
        where["revision"] = revision
    try:
        loaded = AutoTokenizer.from_pretrained(path, **where)
    except Exception as error:  # the library raises many kinds
        raise CaptureError(
            f"cannot load the tokenizer of {name!r}: {type(error).__name__}", fix="name it with --tokenizer"
        ) from error
    return loaded


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> tuple[list[bytes], list[bool], bool]:
    """Return what tokens add to a text, byte by byte.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    ids : sequence of int

    Returns
    -------
    pieces : list of bytes
        UTF-8, joined in order they give the text; a token may hold part of a character.
    special : list of bool
        Whether the tokenizer leaves the token out of a text.
    drop_leading : bool
        Whether it takes a space away from the beginning of a text.
    """
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(list(ids))]
    special_ids = set(tokenizer.all_special_ids)
    added = {int(token): str(entry) for token, entry in tokenizer.added_tokens_decoder.items()}
    kinds = _decoder_kinds(tokenizer)
    byte_of = _byte_alphabet() if "ByteLevel" in kinds else {}
    pieces: list[bytes] = []
    for token, name in zip(ids, names, strict=True):
        if token in added:
            pieces.append(added[token].encode())
        elif byte_of and all(sign in byte_of for sign in name):
            pieces.append(bytes(byte_of[sign] for sign in name))
        elif "ByteFallback" in kinds and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            pieces.append(bytes([int(name[3:5], 16)]))
        else:
            pieces.append(_after(tokenizer, token).encode())
    plain = next((token for token, piece in zip(ids, pieces, strict=True) if piece[:1] == b" "), None)
    drop_leading = plain is not None and not str(tokenizer.decode([plain])).startswith(" ")
    return pieces, [token in special_ids for token in ids], drop_leading


def _after(tokenizer: Any, token: int) -> str:
    """Return what a token adds to a text that it does not begin: its own text twice, less once."""
    once = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    twice = str(tokenizer.decode([token, token], clean_up_tokenization_spaces=False))
    return twice[len(once) :] if twice.startswith(once) else once


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """Return the kinds of the steps by which a fast tokenizer turns tokens into text; empty for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return set()
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return {str(step.get("type")) for step in (decoder, *decoder.get("decoders", []))}


def _byte_alphabet() -> dict[str, int]:
    """Return which byte each sign of a byte-level token stands for.

    Source: GPT-2's ``bytes_to_unicode``. Bytes that print in Latin-1 stand for themselves, the others follow from
    U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [octet for octet in range(256) if octet not in printing]
    return {chr(octet): octet for octet in printing} | {chr(0x100 + n): octet for n, octet in enumerate(others)}
