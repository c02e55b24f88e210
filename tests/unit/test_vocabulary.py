"""The text of tokens beside a trace: stored whole, read back equal, refused where it is not what the manifest says."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asdsim.capture.vocabulary import stored_ids
from asdsim.errors import TraceError
from asdsim.trace import vocabulary as vocabularies
from asdsim.trace.reader import read_trace
from asdsim.trace.vocabulary import SCHEMA, Vocabulary
from asdsim.trace.writer import TraceWriter, store_vocabulary
from tests.support.toytrace import write_toy_trace
from tests.support.tracefiles import edit_manifest

TRACES = sorted((Path(__file__).parents[2] / "traces").iterdir())


def words(drop_leading: bool = False) -> Vocabulary:
    """Ids 0 .. 39: an EOS, the two halves of an e with an acute accent, an emoji, and words."""
    pieces = [b"<end>", b"\xc3", b"\xa9", "\U0001f600".encode(), *(f" w{n}".encode() for n in range(4, 40))]
    return Vocabulary(np.arange(40, dtype=np.int32), pieces, np.arange(40) == 0, drop_leading)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_toy_trace(tmp_path / "trace")
    with TraceWriter.append(tmp_path / "trace") as writer:
        store_vocabulary(writer, words())
    return tmp_path / "trace"


def test_characters_split_over_tokens_join_in_the_text_and_show_as_bytes_alone() -> None:
    vocabulary = words()
    assert vocabulary.text([5, 1, 2, 3, 0]) == " w5\xe9\U0001f600"
    assert vocabulary.text([5, 0], special=True) == " w5<end>"
    assert vocabulary.text([5, 1]) == " w5\N{REPLACEMENT CHARACTER}"
    assert [vocabulary.piece(token) for token in (5, 1, 2, 3, 99)] == [" w5", "\\xC3", "\\xA9", "\U0001f600", "[99]"]
    assert words(drop_leading=True).text([5, 6]) == "w5 w6"
    with pytest.raises(TraceError, match="no text for token 99"):
        vocabulary.text([5, 99])


def test_a_stored_vocabulary_reads_back_equal(trace: Path) -> None:
    found = read_trace(trace).vocabulary
    assert found is not None
    assert (found.ids.tolist(), found.pieces) == (words().ids.tolist(), words().pieces)
    assert found.special.tolist() == words().special.tolist()
    assert not found.drop_leading


def test_a_new_vocabulary_replaces_the_one_before(trace: Path) -> None:
    (before,) = trace.glob("vocabulary-*")
    with TraceWriter.append(trace) as writer:
        store_vocabulary(writer, words(drop_leading=True))
    (after,) = trace.glob("vocabulary-*")
    assert after != before
    assert read_trace(trace).vocabulary.drop_leading  # type: ignore[union-attr]


def test_a_trace_without_a_vocabulary_reads_as_before(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "trace")
    assert read_trace(tmp_path / "trace").vocabulary is None


def test_a_damaged_or_missing_vocabulary_is_refused(trace: Path) -> None:
    (file,) = trace.glob("vocabulary-*")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"?")
    with pytest.raises(TraceError, match=r"vocabulary-.*does not match the manifest"):
        read_trace(trace)
    file.unlink()
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(trace)


@pytest.mark.parametrize("name", ["../vocabulary-000000000000.parquet", 7, None, "positions-00000.parquet"])
def test_the_manifest_cannot_name_another_file(trace: Path, name: object) -> None:
    edit_manifest(trace, lambda content: content["notes"]["vocabulary"].update(file=name))
    with pytest.raises(TraceError, match="names no vocabulary"):
        read_trace(trace)


def test_two_vocabularies_join() -> None:
    left = Vocabulary(np.array([1, 5], np.int32), [b"a", b"b"], np.zeros(2, bool))
    right = Vocabulary(np.array([2, 5], np.int32), [b"c", b"other"], np.ones(2, bool))
    both = left.join(right)
    assert both.ids.tolist() == [1, 2, 5]
    assert both.pieces == [b"a", b"c", b"b"]
    assert both.special.tolist() == [False, True, False]


@pytest.mark.parametrize("folder", TRACES, ids=lambda folder: folder.name)
def test_committed_traces_hold_the_text_of_every_token(folder: Path) -> None:
    trace = read_trace(folder)
    assert trace.vocabulary is not None
    assert stored_ids(folder, trace.manifest).tolist() == trace.vocabulary.ids.tolist()
    for record in trace.request_records():
        assert record.prompt_text in trace.vocabulary.text(record.prompt_ids)


def forge(trace: Path, columns: dict[str, pa.Array], tokens: object, **options: Any) -> Path:
    """Put a vocabulary of other contents in place, signed."""
    (before,) = trace.glob("vocabulary-*")
    before.unlink()
    pq.write_table(pa.table(columns, schema=SCHEMA), before, compression="zstd", **options)
    data = before.read_bytes()
    checksum = hashlib.sha256(data).hexdigest()
    file = before.rename(trace / f"vocabulary-{checksum[:12]}.parquet")
    entry = {"file": file.name, "tokens": tokens, "bytes": len(data), "sha256": checksum}
    edit_manifest(trace, lambda manifest: manifest["notes"].update(vocabulary=entry))
    return file


def repeated(number: int, length: int) -> dict[str, pa.Array]:
    return {
        "id": pa.array(np.arange(number, dtype=np.int32)),
        "piece": pa.repeat(pa.scalar(b"a" * length, pa.binary()), number),
        "special": pa.repeat(pa.scalar(False), number),
    }


@pytest.mark.parametrize(
    ("number", "length", "dictionary"), [(40_000, 4_000, True), (2_500, 4_000, False), (400_000, 0, True)]
)
def test_pieces_that_a_file_of_its_size_cannot_hold_are_refused(
    trace: Path, monkeypatch: pytest.MonkeyPatch, number: int, length: int, dictionary: bool
) -> None:
    monkeypatch.setattr(vocabularies, "ROOM", 1 << 20)
    monkeypatch.setattr(vocabularies, "EXPANSION", 0)
    forge(trace, repeated(number, length), number, use_dictionary=dictionary)
    with pytest.raises(TraceError, match=r"vocabulary-\w+.parquet: the vocabulary expands to more than \d+ MiB"):
        read_trace(trace)


@pytest.mark.parametrize(("tokens", "says"), [(39, "has 40 rows, the manifest says 39"), ("40", "tokens is '40'"),
                                              (None, "tokens is missing"), (True, "tokens is True")])  # fmt: skip
def test_the_number_of_tokens_is_the_manifests(trace: Path, tokens: object, says: str) -> None:
    forge(trace, repeated(40, 3), tokens)
    with pytest.raises(TraceError, match=says):
        read_trace(trace)
    forge(trace, repeated(40, 3), 40)
    assert read_trace(trace).vocabulary.pieces == [b"aaa"] * 40  # type: ignore[union-attr]
