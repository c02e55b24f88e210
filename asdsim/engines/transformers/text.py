"""Output text: the tokenizer of a trace's target, without the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def decode(ids: list[int]) -> str:
        return str(loaded.decode(ids, skip_special_tokens=True))

    return decode
