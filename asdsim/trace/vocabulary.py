"""Text of the token ids that a trace holds, so that it can be read without a tokenizer.

An optional side table of a trace, ``vocabulary-<start of its SHA-256>.parquet``: for each id that occurs, the bytes
that the token stands for (a token can hold part of a character), and whether it is a special token. The manifest names
the file, its size and its checksum under ``notes.vocabulary``; traces without one read as before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from ..files import Fields, read_octets, reason_of
from .manifest import MANIFEST, VOCABULARY, Manifest
from .sizes import EXPANSION, RESTORE, ROOM, check_size, text_bytes, unpacked_bytes
from .tables import open_parquet, read_columns, to_numpy

NAME = re.compile(r"vocabulary-[0-9a-f]{12}\.parquet")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int32(), nullable=False),
        pa.field("piece", pa.binary(), nullable=False),
        pa.field("special", pa.bool_(), nullable=False),
    ]
)
LEADING = b"asdsim.leading_space"
"""Key of the file's metadata: whether the first token of a text loses its leading space."""


@dataclass(frozen=True)
class Vocabulary:
    """Text of some token ids.

    Attributes
    ----------
    ids : int32 (n,)
        Rising.
    pieces : list (n,) of bytes
        What each token adds to a text, in UTF-8; not always whole characters.
    special : bool (n,)
        Tokens such as EOS that do not belong to the text.
    drop_leading : bool
        Whether a text loses a space that it begins with, as words of SentencePiece do.
    """

    ids: npt.NDArray[np.int32]
    pieces: list[bytes]
    special: npt.NDArray[np.bool_]
    drop_leading: bool = False

    def __len__(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} tokens)"

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {int(token): row for row, token in enumerate(self.ids)}

    def __contains__(self, token: object) -> bool:
        return token in self._rows

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of some tokens, special ones left out unless asked for.

        Bytes that are not UTF-8 give U+FFFD, as in tokenizers.

        Raises
        ------
        TraceError
            If a token is not in the vocabulary.
        """
        rows = [self._row(int(token)) for token in ids]
        text = b"".join(self.pieces[row] for row in rows if special or not self.special[row]).decode("utf-8", "replace")
        return text[1:] if self.drop_leading and text.startswith(" ") else text

    def _row(self, token: int) -> int:
        if token not in self._rows:
            raise TraceError(
                f"no text for token {token}: the vocabulary of the trace lacks it", fix="name a tokenizer: --tokenizer"
            )
        return self._rows[token]

    def piece(self, token: int) -> str:
        """Return what one token stands for: its text, or ``\\xE2\\x80`` where its bytes are not whole characters.

        An id that is not in the vocabulary gives ``[id]``.
        """
        row = self._rows.get(int(token))
        if row is None:
            return f"[{int(token)}]"
        octets = self.pieces[row]
        try:
            return octets.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"\\x{octet:02X}" for octet in octets)

    def join(self, other: Vocabulary) -> Vocabulary:
        """Return both together; of an id in both, this one's piece."""
        extra = [row for row, token in enumerate(other.ids) if int(token) not in self]
        ids = np.concatenate([self.ids, other.ids[extra]]).astype(np.int32)
        pieces = [*self.pieces, *(other.pieces[row] for row in extra)]
        special = np.concatenate([self.special, other.special[extra]])
        order = np.argsort(ids, kind="stable")
        return Vocabulary(ids[order], [pieces[row] for row in order], special[order], self.drop_leading)


def occurring_ids(columns: Sequence[npt.NDArray[np.integer]]) -> npt.NDArray[np.int32]:
    """Return every id in some arrays once, ascending; negative ones are ignored."""
    unique = [np.unique(column) for column in columns if column.size]
    ids = np.unique(np.concatenate(unique)) if unique else np.zeros(0, np.int32)
    return ids[ids >= 0].astype(np.int32)


def read_vocabulary(folder: Path, manifest: Manifest) -> Vocabulary | None:
    """Read the vocabulary that a manifest names; None where it names none.

    Raises
    ------
    TraceError
        If the file is missing, is not what the manifest says, or cannot be trusted.
    """
    entry = manifest.notes.get(VOCABULARY)
    if entry is None:
        return None
    name = entry.get("file") if isinstance(entry, dict) else None
    if not isinstance(name, str) or NAME.fullmatch(name) is None:  # also keeps paths such as ../x out
        raise TraceError(f"notes.{VOCABULARY} names no vocabulary file", where=str(folder), fix="capture again")
    file, fix = folder / name, "restore the file from a copy"
    try:
        data = read_octets(file)
    except OSError as error:
        raise TraceError(f"the vocabulary cannot be read: {reason_of(error)}", where=str(file), fix=fix) from None
    if len(data) != entry.get("bytes") or hashlib.sha256(data).hexdigest() != entry.get("sha256"):
        raise TraceError("the vocabulary does not match the manifest", where=str(file), fix=fix)
    tokens = Fields(entry, f"{folder / MANIFEST}, notes, {VOCABULARY}", TraceError).whole("tokens")
    try:
        table = _read_table(data, tokens, file)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TraceError(f"not a Parquet file: {reason}", where=str(file), fix=fix) from None
    metadata = table.schema.metadata or {}
    ids = to_numpy(table["id"])
    if len(ids) and (ids[0] < 0 or (np.diff(ids) <= 0).any()):
        raise TraceError("the ids of the vocabulary are not in ascending order", where=str(file), fix=fix)
    pieces = table["piece"].to_pylist()
    return Vocabulary(ids, pieces, np.array(table["special"].to_pylist(), bool), metadata.get(LEADING) == b"dropped")


def _read_table(data: bytes, tokens: int, file: Path) -> pa.Table:
    """Read the table, once its metadata say that it is of the schema, has ``tokens`` rows and fits into memory."""
    with open_parquet(data, ["piece"]) as parquet:
        schema = parquet.metadata.schema.to_arrow_schema()
        if not schema.remove_metadata().equals(SCHEMA):
            raise TraceError("the vocabulary has other columns than id, piece, special", where=str(file), fix=RESTORE)
        rows = parquet.metadata.num_rows
        if rows != tokens:
            raise TraceError(
                f"the vocabulary has {rows} rows, the manifest says {tokens}", where=str(file), fix=RESTORE
            )
        room = ROOM + EXPANSION * len(data)
        check_size(unpacked_bytes(parquet.metadata, SCHEMA), room, file, "vocabulary")
        groups, taken = [], 0
        for group in range(parquet.num_row_groups):
            raw = read_columns(parquet, group)
            taken += text_bytes(raw)
            check_size(taken, room, file, "vocabulary")
            groups.append(raw)
        return pa.concat_tables(groups) if groups else read_columns(parquet)
