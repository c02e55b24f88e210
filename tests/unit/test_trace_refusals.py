"""Everything that a trace may not hold is refused: by the writer before it stores it, by the reader where it is."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asdsim.errors import TraceError
from asdsim.records import RequestRecord, StepRecord
from asdsim.trace import TraceWriter, read_trace
from tests.support.toytrace import RAGGED, ToyModel, toy_manifest, toy_requests, write_toy_trace
from tests.support.tracefiles import edit_manifest, edit_shard, set_cell, sign_shard

MODEL = ToyModel(seed=5, widths=(4,), divergences=("kl", "js"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "t"
    write_toy_trace(path, MODEL, empty=False, cover=3)
    return path


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "t"))


def drop_row(row: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: pa.concat_tables([table.slice(0, row), table.slice(row + 1)])


def double_row(row: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: pa.concat_tables([table, table.slice(row, 1)])


NAN, INF = float("nan"), float("inf")
FORBIDDEN = float(np.finfo(np.float32).min)


def rows_where(table: pa.Table, fits: Callable[[dict[str, Any]], bool]) -> int:
    """Return the first row that fits."""
    return next(number for number, row in enumerate(table.to_pylist()) if fits(row))


def twice_while_logits_fall(table: pa.Table) -> pa.Table:
    """Put the id of rank 0 at rank 2 too, in a row whose logits fall there: the order alone says nothing."""
    row = rows_where(table, lambda r: r["top1_logit"] > r["top2_logit"] > r["top3_logit"] > r["top4_logit"])
    return set_cell("top3_id", row, table["top1_id"][row].as_py())(table)


def last_twice(table: pa.Table) -> pa.Table:
    """Put the id of rank 6 at rank 7 too."""
    row = rows_where(table, lambda r: r["top6_logit"] > r["top7_logit"] > r["top8_logit"])
    return set_cell("top8_id", row, table["top7_id"][row].as_py())(table)


def unlisted_tie(table: pa.Table, above: bool = False) -> pa.Table:
    """Let a draft token beyond the top k tie the last logit, with an id below (or above) the one listed there."""
    listed = [f"top{rank}_id" for rank in range(1, 9)]

    def free(r: dict[str, Any]) -> list[int]:
        ids = range(r["top8_id"] + 1, 40) if above else range(r["top8_id"])
        return [token for token in ids if token not in [r[name] for name in listed]]

    row = rows_where(table, lambda r: r["rank"] is not None and r["rank"] >= 8 and free(r))
    cells = table.slice(row, 1).to_pylist()[0]
    return set_cell("draft_id", row, free(cells)[0])(set_cell("draft_logit", row, cells["top8_logit"])(table))


def listed_though_far(table: pa.Table) -> pa.Table:
    """Let a draft token beyond the top k be one of the listed ids."""
    row = rows_where(table, lambda r: r["rank"] is not None and r["rank"] >= 8)
    return set_cell("draft_id", row, table["top2_id"][row].as_py())(table)


def far_above_the_last(table: pa.Table) -> pa.Table:
    row = rows_where(table, lambda r: r["rank"] is not None and r["rank"] >= 8)
    return set_cell("draft_logit", row, table["top8_logit"][row].as_py() + 0.25)(table)


def rank_of_the_vocabulary(table: pa.Table) -> pa.Table:
    row = rows_where(table, lambda r: r["rank"] is not None and r["rank"] >= 8)
    return set_cell("rank", row, 40)(table)


def tie_in_falling_ids(table: pa.Table) -> pa.Table:
    """Swap the ids of two ranks of one logit."""
    row = rows_where(table, lambda r: r["top2_logit"] == r["top3_logit"])
    second, third = (table[name][row].as_py() for name in ("top2_id", "top3_id"))
    return set_cell("top2_id", row, third)(set_cell("top3_id", row, second)(table))


def parent_in_the_next_request(table: pa.Table) -> pa.Table:
    """Let a step of the second request name a parent just beyond the steps of that request."""
    ids = table["request_id"].to_pylist()
    last = max(row for row, name in enumerate(ids) if name == "toy/1" and table["wave"][row].as_py() == 0)
    return set_cell("parent_step_id", last, ids.count("toy/1"))(table)


def added_step_on_the_path(table: pa.Table) -> pa.Table:
    """Call a step that cover added one of the captured path."""
    row = rows_where(table, lambda r: r["wave"] > 0 and r["parent_step_id"] != r["step_id"] - 1)
    return set_cell("wave", row, 0)(table)


def all_forbidden(table: pa.Table) -> pa.Table:
    for rank in range(1, 9):
        table = set_cell(f"top{rank}_logit", 4, FORBIDDEN)(set_cell(f"top{rank}_id", 4, rank)(table))
    return table


def raised(column: str, row: int, by: float) -> Callable[[pa.Table], pa.Table]:
    return lambda table: set_cell(column, row, table[column][row].as_py() + by)(table)


EDITS: list[tuple[str, str, Callable[[pa.Table], pa.Table], str]] = [
    ("nan logit", "positions", set_cell("top3_logit", 7, NAN), "not finite"),
    ("-inf logit", "positions", set_cell("top8_logit", 7, -INF), "not finite"),
    ("+inf logit", "positions", set_cell("top1_logit", 7, INF), "not finite"),
    ("nan draft logit", "positions", set_cell("draft_logit", 2, NAN), "draft_logit nan is not finite"),
    ("id beyond the vocabulary", "positions", set_cell("top2_id", 3, 40), "outside the vocabulary of 40"),
    ("padding id", "positions", set_cell("top2_id", 3, -1), "outside the vocabulary of 40"),
    ("draft id beyond the vocabulary", "positions", set_cell("draft_id", 1, 151936), "draft_id 151936 is outside"),
    ("order of logits", "positions", set_cell("top1_logit", 3, -50.0), "not ordered"),
    (
        "an id twice",
        "positions",
        lambda t: t.set_column(t.column_names.index("top2_id"), t.field("top2_id"), t["top1_id"]),
        "twice|not ordered",
    ),
    ("rank", "positions", set_cell("rank", 0, 12), "rank 12 does not fit|draft_id is missing"),
    ("negative rank", "positions", set_cell("rank", 0, -3), "rank -3|draft_id is missing"),
    ("no rank", "positions", set_cell("rank", 0, None), "missing"),
    ("a draft in the bonus row", "positions", set_cell("draft_id", 4, 1), "bonus row"),
    ("a divergence in the bonus row", "positions", set_cell("kl", 4, 0.5), "kl 0.5 stands in the bonus row"),
    ("divergence", "positions", set_cell("js", 0, 1.5), "js 1.5 is out of range"),
    ("negative divergence", "positions", set_cell("kl", 0, -1.0), "kl -1.0 is out of range"),
    ("log-probability", "positions", set_cell("draft_logprob", 0, 0.5), "draft_logprob 0.5 is out of range"),
    ("logsumexp", "positions", set_cell("logsumexp", 0, -90.0), "logsumexp -90.0 does not fit"),
    ("nan entropy", "positions", set_cell("entropy", 0, NAN), "entropy nan"),
    ("entropy", "positions", set_cell("entropy", 0, 9.0), "entropy 9.0 is not in"),
    ("parent position", "positions", set_cell("parent_position", 2, 2), "parent_position 2"),
    ("no parent position", "positions", set_cell("parent_position", 2, None), "parent_position -1"),
    ("an id twice, logits falling", "positions", twice_while_logits_fall, "a top id is there twice"),
    ("the last id twice", "positions", last_twice, "a top id is there twice"),
    ("a tie in falling ids", "positions", tie_in_falling_ids, "not ordered by"),
    ("an unlisted draft ties the last logit", "positions", unlisted_tie, "rank .* does not fit draft token"),
    ("a listed draft of a far rank", "positions", listed_though_far, "rank .* does not fit draft token"),
    ("a far draft above the last logit", "positions", far_above_the_last, "rank .* does not fit draft token"),
    ("no finite logit", "positions", all_forbidden, "no token of the row has a finite logit"),
    ("rank beyond the vocabulary", "positions", rank_of_the_vocabulary, "rank 40 is not in 0 .. 39"),
    ("id at the end of the vocabulary", "positions", set_cell("top8_id", 3, 40), "outside the vocabulary of 40"),
    ("logsumexp far too high", "positions", raised("logsumexp", 0, 90.0), "logsumexp .* does not fit the largest"),
    ("logsumexp too high", "positions", raised("logsumexp", 0, 4.0), "logsumexp .* does not fit the largest"),
    ("logsumexp too low", "positions", raised("logsumexp", 0, -4.0), "logsumexp .* does not fit the largest"),
    ("infinite logsumexp", "positions", set_cell("logsumexp", 0, INF), "logsumexp inf does not fit"),
    ("negative entropy", "positions", set_cell("entropy", 0, -0.1), "entropy -0.1.* is not in"),
    ("infinite log-probability", "positions", set_cell("draft_logprob", 0, -INF), "draft_logprob -inf is out of range"),
    ("negative distance", "positions", set_cell("js", 0, -0.5), "js -0.5 is out of range"),
    ("divergence that is no number", "positions", set_cell("kl", 0, NAN), "kl nan is out of range"),
    ("negative parent position", "positions", set_cell("parent_position", 2, -1), "parent_position -1"),
    ("a parent of the first position", "positions", set_cell("parent_position", 0, 0), "parent_position 0"),
    ("negative position", "positions", set_cell("i", 0, -1), "fits no step"),
    ("position one beyond the block", "positions", set_cell("i", 4, 5), "fits no step"),
    ("a position twice, one missing", "positions", set_cell("i", 2, 1), "fits no step"),
    ("position of a step before the first", "positions", set_cell("step_id", 2, -1), "fits no step"),
    ("a row missing", "positions", drop_row(11), "fits no step|missing"),
    ("last row missing", "positions", lambda t: t.slice(0, t.num_rows - 1), "is missing"),
    ("a row twice", "positions", double_row(11), "fits no step"),
    ("position number", "positions", set_cell("i", 2, 9), "fits no step"),
    ("position of no step", "positions", set_cell("step_id", 2, 900), "fits no step"),
    ("position of no request", "positions", set_cell("request_id", 2, "who"), "'who', which the trace does not hold"),
    ("step of no request", "steps", set_cell("request_id", 2, "who"), "'who', which the trace does not hold"),
    ("step missing", "steps", drop_row(1), "a step is missing"),
    ("last step missing", "steps", lambda t: t.slice(0, t.num_rows - 1), "fits no step"),
    ("step twice", "steps", double_row(3), "step 3 is there twice"),
    ("K", "steps", set_cell("num_draft_tokens", 2, 3), "fits no step"),
    ("K beyond what was asked for", "steps", set_cell("num_draft_tokens", 2, 5), "not in 0 .. 4"),
    ("negative K", "steps", set_cell("num_draft_tokens", 2, -2), "not in 0 .. 4"),
    ("time", "steps", set_cell("verify_us", 2, NAN), "verify_us nan is not a time"),
    ("negative time", "steps", set_cell("draft_us", 2, -1.0), "draft_us -1.0"),
    (
        "no parent",
        "steps",
        lambda t: set_cell("parent_step_id", 2, None)(set_cell("parent_accepted", 2, None)(t)),
        "no parent: an edge leads nowhere",
    ),
    ("half a parent", "steps", set_cell("parent_accepted", 2, None), "given together"),
    (
        "parent of a root",
        "steps",
        lambda t: set_cell("parent_step_id", 0, 1)(set_cell("parent_accepted", 0, 0)(t)),
        "step 0 has the parent 1",
    ),
    (
        "parent that is not there",
        "steps",
        set_cell("parent_step_id", 2, 900),
        "step 900, is not in the trace: an edge leads nowhere",
    ),
    (
        "accepted count that no rule gives",
        "steps",
        set_cell("parent_accepted", 2, 9),
        "no rule can go on from step 1 with 9",
    ),
    ("start", "steps", set_cell("start_pos", 2, 1), "start_pos 1 is not where step 1 leads"),
    ("start too late", "steps", raised("start_pos", 2, 1), "is not where step 1 leads"),
    ("start of the root", "steps", set_cell("start_pos", 0, 1), "not at the prompt"),
    ("start beyond the limit", "steps", set_cell("start_pos", 2, 500), "not below the token limit"),
    ("wave", "steps", set_cell("wave", 1, -1), "wave -1"),
    ("a root added by cover", "steps", set_cell("wave", 0, 1), "step 0 is of wave 1"),
    ("a parent of the next request", "steps", parent_in_the_next_request, "is not in the trace: an edge leads nowhere"),
    ("an added step on the path", "steps", added_step_on_the_path, "of the captured path does not follow step"),
    ("negative start", "steps", set_cell("start_pos", 2, -1), "start_pos -1 is not below"),
    ("negative parent", "steps", set_cell("parent_step_id", 2, -7), "step -7, is not in the trace"),
    ("infinite time", "steps", set_cell("select_us", 2, INF), "select_us inf is not a time"),
    ("a request out of order", "requests", set_cell("request_index", 1, 9), "request_index 2 is not the next"),
    ("id at the end of the vocabulary in a prompt", "requests", set_cell("prompt_ids", 1, [40]), "prompt_ids holds 40"),
    ("captured path interrupted", "steps", set_cell("wave", 1, 1), "interrupted"),
    ("request missing", "requests", drop_row(1), "a request is missing|does not hold"),
    ("request twice", "requests", double_row(1), "'toy/1' is there twice"),
    ("stop", "requests", set_cell("stop", 1, "never"), "'never' is neither natural nor fixed"),
    ("prompt id", "requests", set_cell("prompt_ids", 1, [4, 99]), "prompt_ids holds 99"),
    ("eos id", "requests", set_cell("eos_ids", 1, [-1]), "eos_ids holds -1"),
    ("limit", "requests", set_cell("max_new_tokens", 1, -5), "max_new_tokens -5"),
    ("limit below what was decoded", "requests", set_cell("max_new_tokens", 1, 2), "token limit|no rule can go on"),
    ("limit above what was decoded", "requests", set_cell("max_new_tokens", 3, 400), "breaks off"),
    ("column missing", "steps", lambda t: t.drop_columns(["wave"]), "column 'wave' is missing"),
    (
        "column of another type",
        "steps",
        lambda t: t.set_column(1, "step_id", t["step_id"].cast(pa.int64())),
        "column 'step_id' is int64",
    ),
    (
        "unknown column",
        "steps",
        lambda t: t.append_column("extra", pa.array([0] * t.num_rows)),
        "unknown column 'extra'",
    ),
    (
        "nullable column",
        "steps",
        lambda t: t.cast(pa.schema([field.with_nullable(True) for field in t.schema])),
        "expected",
    ),
]


@pytest.mark.parametrize(("table", "edit", "message"), [case[1:] for case in EDITS], ids=[case[0] for case in EDITS])
def test_reader_refuses(folder: Path, table: str, edit: Callable[[pa.Table], pa.Table], message: str) -> None:
    edit_shard(folder, table, edit)
    with pytest.raises(TraceError, match=message) as refused:
        read_trace(folder)
    assert str(folder) in str(refused.value)
    assert refused.value.fix


HARMLESS: list[tuple[str, str, Callable[[pa.Table], pa.Table]]] = [
    ("an unlisted draft ties the last logit", "positions", lambda table: unlisted_tie(table, above=True)),
    ("the largest id", "requests", set_cell("prompt_ids", 1, [39, 0])),
    ("logsumexp just above", "positions", lambda table: raised("logsumexp", 0, 0.004)(table)),
    ("an infinite divergence", "positions", set_cell("kl", 0, INF)),
    ("rounded below 0", "positions", set_cell("js", 0, -0.001)),
    ("a certain draft token", "positions", set_cell("draft_logprob", 0, 0.0)),
    ("no time", "steps", set_cell("draft_us", 1, 0.0)),
    ("an entropy of 0", "positions", set_cell("entropy", 0, 0.0)),
]


@pytest.mark.parametrize(("table", "edit"), [case[1:] for case in HARMLESS], ids=[case[0] for case in HARMLESS])
def test_reader_takes_what_can_be(folder: Path, table: str, edit: Callable[[pa.Table], pa.Table]) -> None:
    edit_shard(folder, table, edit)
    assert read_trace(folder).request_ids()


def test_positions_may_come_in_any_order(folder: Path, base: Path) -> None:
    from tests.support.tracefiles import difference

    edit_shard(folder, "positions", lambda table: table.take(np.random.default_rng(1).permutation(table.num_rows)))
    edit_shard(folder, "steps", lambda table: table.take(np.random.default_rng(2).permutation(table.num_rows)))
    assert difference(read_trace(folder), read_trace(base)) is None


def test_an_edit_that_changes_nothing_is_read(folder: Path, base: Path) -> None:
    from tests.support.tracefiles import difference

    edit_shard(folder, "positions", lambda table: table)
    assert difference(read_trace(folder), read_trace(base)) is None


def test_a_message_says_where(folder: Path) -> None:
    edit_shard(folder, "positions", set_cell("top1_logit", 12, NAN))
    with pytest.raises(TraceError) as refused:
        read_trace(folder)
    shard = next(folder.glob("positions-*")).name
    assert f"{shard} row 12, request 'toy/0', step 2, position 2: logits that are not finite" in str(refused.value)


MANIFEST_EDITS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    (
        "version to come",
        lambda m: m.update(schema_version=2),
        "schema version 2 is not known; this release reads version 1",
    ),
    ("version as text", lambda m: m.update(schema_version="1"), "schema version '1'"),
    ("version as truth", lambda m: m.update(schema_version=True), "schema version True"),
    ("no version", lambda m: m.pop("schema_version"), "no schema_version"),
    ("field missing", lambda m: m.pop("drafter"), "field 'drafter' is missing"),
    ("field unknown", lambda m: m.update(extra=1), "field 'extra' is unknown"),
    ("type of a field", lambda m: m.update(seed="0"), "seed is str, not int"),
    ("truth for a number", lambda m: m.update(seed=True), "seed is bool, not int"),
    ("vocabulary", lambda m: m.update(vocab_size=0), "vocab_size 0"),
    ("smaller vocabulary", lambda m: m.update(vocab_size=20), "outside the vocabulary of 20"),
    ("top k", lambda m: m.update(top_k=3), "top_k 3"),
    ("larger top k", lambda m: m.update(top_k=9), "column 'top9_id' is missing"),
    ("smaller K", lambda m: m.update(num_draft_tokens=3), "not in 0 .. 3"),
    ("stop", lambda m: m.update(stop="x"), "stop 'x'"),
    ("shards no list", lambda m: m.update(shards={}), "shards is not a list"),
    ("shard entry", lambda m: m["shards"].append(7), "an entry of shards is not understood"),
    ("shard without rows", lambda m: m["shards"][0].pop("rows"), "not understood"),
    ("shard elsewhere", lambda m: m["shards"][0].update(name="../x/requests-00000.parquet"), "does not fit its table"),
    ("shard of another table", lambda m: m["shards"][0].update(table="steps"), "does not fit its table"),
    ("shard twice", lambda m: m["shards"].append(dict(m["shards"][0])), "twice"),
    ("rows", lambda m: m["shards"][0].update(rows=3), "rows, the manifest says 3"),
    ("bytes", lambda m: m["shards"][0].update(bytes=3), "bytes, the manifest says 3"),
    ("sha256", lambda m: m["shards"][0].update(sha256="0" * 64), "SHA-256"),
    ("shard dropped", lambda m: m["shards"].pop(), "position 0 of the step is missing"),
    ("steps dropped", lambda m: m["shards"].pop(1), "no step, though"),
    ("requests dropped", lambda m: m["shards"].pop(0), "which the trace does not hold"),
]


@pytest.mark.parametrize(("edit", "message"), [case[1:] for case in MANIFEST_EDITS], ids=[c[0] for c in MANIFEST_EDITS])
def test_reader_refuses_a_signed_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    edit_manifest(folder, edit)
    with pytest.raises(TraceError, match=message) as refused:
        read_trace(folder)
    assert refused.value.fix


def test_an_edited_manifest_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda content: content.update(seed=6), sign=False)
    with pytest.raises(TraceError, match="checksum does not match its content"):
        read_trace(folder)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b'{"schema_version": NaN}', b"1" * 5000, b'{"a": 1}'],
    ids=["empty", "cut", "no text", "list", "null", "deep", "nan", "long number", "other JSON"],
)
def test_a_file_that_is_no_manifest(folder: Path, data: bytes) -> None:
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(TraceError, match="not valid JSON|not the manifest of a trace"):
        read_trace(folder)


def test_what_is_not_a_trace(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(TraceError, match="no such directory"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"no manifest\.json: not a trace"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="no such directory"):
        read_trace(folder / "manifest.json")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(folder)


def test_shards_that_are_not_there_or_not_themselves(folder: Path) -> None:
    steps = next(folder.glob("steps-*"))
    data = steps.read_bytes()
    steps.unlink()
    with pytest.raises(TraceError, match="the shard is missing"):
        read_trace(folder)
    steps.mkdir()
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(folder)
    steps.rmdir()
    steps.write_bytes(data[:-9])
    with pytest.raises(TraceError, match="bytes, the manifest says"):
        read_trace(folder)
    steps.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    with pytest.raises(TraceError, match="SHA-256"):
        read_trace(folder)
    steps.write_bytes(data[: len(data) // 2])
    sign_shard(folder, steps.name)
    with pytest.raises(TraceError, match="not a readable Parquet shard"):
        read_trace(folder)


def test_pages_carry_their_own_checksum(folder: Path) -> None:
    """So damage shows where SHA-256 is skipped too."""
    positions = next(folder.glob("positions-*"))
    page = pq.ParquetFile(positions).metadata.row_group(0).column(20)
    data = bytearray(positions.read_bytes())
    data[page.data_page_offset + page.total_compressed_size - 8] ^= 4
    positions.write_bytes(data)
    with pytest.raises(TraceError, match="not a readable Parquet shard"):
        read_trace(folder, verify=False)


def test_verify_false_skips_the_sha256_only(folder: Path, base: Path) -> None:
    from tests.support.tracefiles import difference

    edit_manifest(folder, lambda content: content["shards"][0].update(sha256="0" * 64))
    assert difference(read_trace(folder, verify=False), read_trace(base)) is None
    next(folder.glob("steps-*")).unlink()
    with pytest.raises(TraceError, match="missing"):
        read_trace(folder, verify=False)


# The writer


def wrong(step: StepRecord, **fields: Any) -> StepRecord:
    return dataclasses.replace(step, **fields)


def put(array: np.ndarray, at: Any, value: Any) -> np.ndarray:
    changed = array.copy()
    changed[at] = value
    return changed


BAD_STEPS: list[tuple[str, Callable[[StepRecord], StepRecord], str]] = [
    ("logit row of NaN", lambda s: wrong(s, top_logits=put(s.top_logits, 1, NAN)), "step 0, position 1: .*not finite"),
    (
        "logit row of -inf",
        lambda s: wrong(s, top_logits=put(s.top_logits, 1, -INF)),
        "step 0, position 1: .*not finite",
    ),
    ("+inf", lambda s: wrong(s, top_logits=put(s.top_logits, (1, 0), INF)), "step 0, position 1: .*not finite"),
    (
        "draft id 151936",
        lambda s: wrong(s, draft_ids=put(s.draft_ids, 1, 151936)),
        "step 0, position 1: .*draft_id 151936",
    ),
    (
        "padding id",
        lambda s: wrong(s, draft_ids=put(s.draft_ids, 1, -1)),
        "step 0, position 1: .*draft_id -1 is outside",
    ),
    ("argmax", lambda s: wrong(s, argmax_ids=put(s.argmax_ids, 2, s.top_ids[2, 1])), "argmax_id .* is not the first"),
    ("rank", lambda s: wrong(s, ranks=put(s.ranks, 0, s.ranks[0] + 1)), "rank .* does not fit"),
    ("draft logit", lambda s: wrong(s, draft_logits=s.draft_logits + np.float32(0.5)), "does not fit draft token"),
    ("shape", lambda s: wrong(s, logsumexp=s.logsumexp[:-1]), r"logsumexp has shape \(4,\), not \(5,\)"),
    ("one column of top logits less", lambda s: wrong(s, top_ids=s.top_ids[:, :7]), "top_ids has shape"),
    ("kind", lambda s: wrong(s, draft_ids=s.draft_ids.astype(np.float64)), "draft_ids holds float64, not integers"),
    ("id too large for int32", lambda s: wrong(s, draft_ids=s.draft_ids.astype(np.int64) + 2**40), "out of the range"),
    ("divergence", lambda s: wrong(s, divergences={"jsd": s.draft_logits}), "unknown divergence 'jsd'"),
    ("time", lambda s: wrong(s, verify_us=NAN), "verify_us nan"),
    ("time as text", lambda s: wrong(s, verify_us="soon"), "cannot be stored"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD_STEPS], ids=[case[0] for case in BAD_STEPS])
def test_writer_refuses_and_stays_usable(
    tmp_path: Path, change: Callable[[StepRecord], StepRecord], message: str
) -> None:
    request, other = toy_requests(MODEL, 2, empty=False)
    steps = MODEL.decode(request)
    with TraceWriter.create(tmp_path / "t", toy_manifest(MODEL)) as writer:
        with pytest.raises(TraceError, match=message) as refused:
            writer.add_request(request, [change(steps[0]), *steps[1:]])
        assert "toy/0" in str(refused.value)
        assert writer.completed == set()
        writer.add_request(other, MODEL.decode(other))
        with pytest.raises(TraceError, match="'toy/1' is in the trace already"):
            writer.add_request(other, MODEL.decode(other))
    assert read_trace(tmp_path / "t").request_ids() == ["toy/1"]


def test_writer_refuses_paths_that_do_not_hold_together(tmp_path: Path) -> None:
    request = toy_requests(MODEL, 1, limit=40, empty=False)[0]
    steps = MODEL.decode(request)
    more = MODEL.cover(request, steps, 2)
    assert len(steps) > 2
    with TraceWriter.create(tmp_path / "t", toy_manifest(MODEL)) as writer:
        for bad, message in (
            ([], "no step, though"),
            (steps[:-1], "breaks off"),
            ([steps[0], *steps[2:]], "a step is missing"),
            ([*steps, steps[-1]], "is there twice"),
            ([*steps, wrong(more[0], parent_accepted=99)], "no rule can go on"),
            ([*steps, more[0], wrong(more[0], step_id=len(steps) + 1)], "another child"),
        ):
            with pytest.raises(TraceError, match=message):
                writer.add_request(request, bad)
        writer.add_request(request, steps)
        with pytest.raises(TraceError, match="no request 'who' to add steps to"):
            writer.add_steps("who", more)
        with pytest.raises(TraceError, match="no rule can go on"):
            writer.add_steps(request.request_id, [wrong(more[0], parent_accepted=99)])
        writer.add_steps(request.request_id, more)
        with pytest.raises(TraceError, match="is there twice"):
            writer.add_steps(request.request_id, more)
    assert len(read_trace(tmp_path / "t").steps_of(request.request_id)) == len(steps) + 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 2**40}, "cannot be stored"),
        ({"prompt_ids": (4, 40)}, "prompt_ids holds 40, outside the vocabulary"),
        ({"stop": "eos"}, "neither natural nor fixed"),
        ({"task": 3}, "cannot be stored"),
        ({"prompt_text": "\ud800"}, "cannot be stored"),
    ],
    ids=["limit", "prompt id", "stop", "task", "text that is no Unicode"],
)
def test_writer_refuses_requests(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    request = toy_requests(RAGGED, 1)[0]
    bad: RequestRecord = dataclasses.replace(request, **fields)
    with (
        TraceWriter.create(tmp_path / "t", toy_manifest()) as writer,
        pytest.raises(TraceError, match=message),
    ):
        writer.add_request(bad, RAGGED.decode(request))
    assert read_trace(tmp_path / "t").request_ids() == []
