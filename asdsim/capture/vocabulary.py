"""Keep the text of the tokens of a trace beside it, while the tokenizer is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..engines.transformers.text import token_pieces
from ..trace.vocabulary import Vocabulary, read_vocabulary, store_vocabulary, stored_ids

if TYPE_CHECKING:
    from ..trace.writer import TraceWriter


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
    if tokenizer is None:
        return
    writer.flush()
    ids = stored_ids(writer.path, writer.manifest)
    known = read_vocabulary(writer.path, writer.manifest)
    if known is not None:
        ids = np.setdiff1d(ids, known.ids)
    if len(ids) == 0 and known is not None:
        return
    fresh = make_vocabulary(tokenizer, ids)
    store_vocabulary(writer, fresh if known is None else known.join(fresh))
