"""Keep the text of the tokens of a trace beside it, while the tokenizer is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..engines.transformers.text import token_pieces
from ..trace.manifest import Manifest
from ..trace.reader import read_shard
from ..trace.tables import to_numpy
from ..trace.vocabulary import Vocabulary, occurring_ids, read_vocabulary
from ..trace.writer import store_vocabulary

if TYPE_CHECKING:
    from ..trace.writer import TraceWriter


def stored_ids(folder: Path, manifest: Manifest) -> npt.NDArray[np.int32]:
    """Return every token id that the shards of a trace hold, a part of one shard in memory at a time."""
    arrays: list[npt.NDArray[np.integer]] = []
    for shard in manifest.shards_of("positions"):
        for rows in read_shard(folder, shard, manifest.top_k, verify=False):
            arrays.append(occurring_ids([to_numpy(rows.table[name]) for name in ("draft_id", "argmax_id", "top_ids")]))
    for shard in manifest.shards_of("requests"):
        for rows in read_shard(folder, shard, manifest.top_k, verify=False):
            arrays.append(occurring_ids([np.concatenate([*to_numpy(rows.table["prompt_ids"]), [-1]])]))
    return occurring_ids(arrays)


def make_vocabulary(tokenizer: Any, ids: Any) -> Vocabulary:
    """Return the text of some token ids (rising, each once)."""
    ids = np.asarray(ids, np.int32)
    pieces, special, drop_leading = token_pieces(tokenizer, ids.tolist())
    return Vocabulary(ids, pieces, np.array(special, bool), drop_leading)


def keep_vocabulary(writer: TraceWriter, tokenizer: Any) -> None:
    """Store the text of every token id that a trace holds; nothing happens without a tokenizer.

    Raises
    ------
    TraceError
        If storing fails.
    """
    writer.flush()
    vocabulary = grown_vocabulary(writer.path, writer.manifest, tokenizer)
    if vocabulary is not None:
        store_vocabulary(writer, vocabulary)


def grown_vocabulary(folder: Path, manifest: Manifest, tokenizer: Any) -> Vocabulary | None:
    """Return the text of every token id that a trace holds; None without a tokenizer, or where nothing is new."""
    if tokenizer is None:
        return None
    ids = stored_ids(folder, manifest)
    known = read_vocabulary(folder, manifest)
    if known is not None:
        ids = np.setdiff1d(ids, known.ids)
    if len(ids) == 0 and known is not None:
        return None
    fresh = make_vocabulary(tokenizer, ids)
    return fresh if known is None else known.join(fresh)
