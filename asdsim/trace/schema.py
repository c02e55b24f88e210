"""Every column of a trace: its meaning, unit and type, in one registry from which the Arrow schemas are built.

A trace holds three tables. ``requests`` has one row per prompt, ``steps`` one per verification, and ``positions`` one
per draft position plus one for the bonus row of each step, so a step with K draft tokens has K + 1 rows.

The registry describes the tables as the reader hands them out. The Parquet shards hold the same rows, with what follows
from other columns left out (see :attr:`Column.in_file`): a trace is mostly incompressible mantissa bits, and storing a
logit twice would cost more than any encoding can win back.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 1
"""Version of the layout. A reader refuses any other."""

TABLES = ("requests", "steps", "positions")
MIN_TOP_K = 8
DIVERGENCES = ("kl", "reverse_kl", "js", "tv")

AS_IS = "as is"
SPREAD = "one column per rank"
BEYOND_TOP = "null where rank < k"
IMPLIED = "not stored"


@dataclass(frozen=True)
class Column:
    """One column of one table.

    Attributes
    ----------
    table, name : str
        Where it is found.
    dtype : str
        ``int16``, ``int32``, ``float32``, ``string``, ``list<int32>``, or ``int32[k]`` and ``float32[k]`` for k values
        a row.
    unit : str
        Unit of the values; empty where they have none.
    meaning : str
        What one value says.
    nullable : bool
        Whether a value may be missing.
    in_file : str
        How a shard holds it: ``AS_IS``; ``SPREAD`` over flat columns such as ``top1_id`` .. ``topk_id``;
        ``BEYOND_TOP``, where a value that equals the one of the draft token among the top k is null; ``IMPLIED`` by
        another column.
    """

    table: str
    name: str
    dtype: str
    unit: str
    meaning: str
    nullable: bool = False
    in_file: str = AS_IS


_R, _S, _P = TABLES

COLUMNS: tuple[Column, ...] = (
    Column(_R, "request_index", "int32", "", "place of the request in the order of capture, from 0"),
    Column(_R, "request_id", "string", "", "name of the request, unique in the trace"),
    Column(_R, "task", "string", "", "task that the prompt came from"),
    Column(
        _R, "prompt_ids", "list<int32>", "token id", "the whole prompt as the target read it, chat template applied"
    ),
    Column(_R, "prompt_text", "string", "", "the user's text before the chat template"),
    Column(_R, "reference", "string", "", "reference answer, where the task has one", nullable=True),
    Column(_R, "max_new_tokens", "int32", "tokens", "limit on generated tokens"),
    Column(_R, "eos_ids", "list<int32>", "token id", "ids that end the request under a natural stop"),
    Column(_R, "stop", "string", "", "natural: ends at an EOS or the limit; fixed: at the limit only"),
    Column(_S, "request_id", "string", "", "request that the step belongs to"),
    Column(_S, "step_id", "int32", "", "number of the step in its request; the captured path is 0 .. n-1"),
    Column(_S, "parent_step_id", "int32", "", "step that led to this prefix; null at the root", nullable=True),
    Column(_S, "parent_accepted", "int32", "tokens", "draft tokens accepted there, without the bonus", nullable=True),
    Column(_S, "start_pos", "int32", "tokens", "tokens generated before the step"),
    Column(_S, "num_draft_tokens", "int16", "tokens", "K, the draft tokens verified in the step"),
    Column(_S, "draft_us", "float32", "us", "time spent drafting"),
    Column(_S, "verify_us", "float32", "us", "time of the target's forward pass"),
    Column(_S, "select_us", "float32", "us", "time spent deciding what to accept"),
    Column(_S, "wave", "int16", "", "0: met by decoding; n: added by the n-th wave of its group in cover"),
    Column(_P, "request_id", "string", "", "request that the position belongs to"),
    Column(_P, "step_id", "int32", "", "step that the position belongs to"),
    Column(_P, "i", "int16", "", "position in the block, from 0; K is the bonus row"),
    Column(_P, "parent_position", "int16", "", "position that this one continues; null at the first", nullable=True),
    Column(
        _P, "draft_id", "int32", "token id", "draft token x_i; null at the bonus row", nullable=True, in_file=BEYOND_TOP
    ),
    Column(_P, "argmax_id", "int32", "token id", "the target's choice y_i, lowest id on a tie", in_file=IMPLIED),
    Column(_P, "draft_logit", "float32", "logits", "the target's logit of x_i", nullable=True, in_file=BEYOND_TOP),
    Column(_P, "rank", "int32", "", "rank of x_i among the logits by (-logit, id), from 0", nullable=True),
    Column(_P, "top_ids", "int32[k]", "token id", "ids of the k largest logits by (-logit, id)", in_file=SPREAD),
    Column(_P, "top_logits", "float32[k]", "logits", "the k largest logits", in_file=SPREAD),
    Column(_P, "logsumexp", "float32", "nats", "log of the sum of exp over the target's logits"),
    Column(_P, "entropy", "float32", "nats", "Shannon entropy of the target's softmax"),
    Column(_P, "draft_logprob", "float32", "nats", "the drafter's own log-probability of x_i", nullable=True),
    Column(_P, "kl", "float32", "nats", "KL(target || drafter), where asked for", nullable=True),
    Column(_P, "reverse_kl", "float32", "nats", "KL(drafter || target), where asked for", nullable=True),
    Column(_P, "js", "float32", "nats", "Jensen-Shannon divergence, where asked for", nullable=True),
    Column(_P, "tv", "float32", "", "total variation distance, where asked for", nullable=True),
)
"""The registry."""

BY_NAME: dict[tuple[str, str], Column] = {(column.table, column.name): column for column in COLUMNS}

KEYS = frozenset({"request_index", "step_id", "parent_step_id", "parent_accepted", "start_pos", "i", "parent_position"})
"""Integer columns that count up or repeat a pattern: deltas pack them to almost nothing."""


def columns_of(table: str) -> list[Column]:
    """Return the columns of one table, in order."""
    return [column for column in COLUMNS if column.table == table]


def _arrow(dtype: str, top_k: int) -> pa.DataType:
    if dtype.endswith("[k]"):
        return pa.list_(pa.field("element", _arrow(dtype[:-3], top_k), nullable=False), top_k)
    if dtype.startswith("list<"):
        return pa.list_(pa.field("element", _arrow(dtype[5:-1], top_k), nullable=False))
    return {"int16": pa.int16(), "int32": pa.int32(), "float32": pa.float32(), "string": pa.string()}[dtype]


def table_schema(table: str, top_k: int = MIN_TOP_K) -> pa.Schema:
    """Return the Arrow schema of a table as the reader hands it out.

    Strings that repeat over the rows of ``steps`` and ``positions`` are dictionary-encoded there.
    """
    fields = []
    for column in columns_of(table):
        kind = _arrow(column.dtype, top_k)
        if column.name == "request_id" and table != "requests":
            kind = pa.dictionary(pa.int32(), pa.string())
        fields.append(pa.field(column.name, kind, nullable=column.nullable))
    return pa.schema(fields)


def spread_names(name: str, top_k: int) -> list[str]:
    """Return the flat columns that hold ``top_ids`` or ``top_logits`` in a shard."""
    suffix = {"top_ids": "id", "top_logits": "logit"}[name]
    return [f"top{rank + 1}_{suffix}" for rank in range(top_k)]


def file_schema(table: str, top_k: int = MIN_TOP_K) -> pa.Schema:
    """Return the Arrow schema of a Parquet shard."""
    fields = []
    for column in columns_of(table):
        if column.in_file == IMPLIED:
            continue
        if column.in_file == SPREAD:
            kind = _arrow(column.dtype.removesuffix("[k]"), top_k)
            fields += [pa.field(name, kind, nullable=False) for name in spread_names(column.name, top_k)]
        else:
            fields.append(pa.field(column.name, _arrow(column.dtype, top_k), nullable=column.nullable))
    return pa.schema(fields)


def parquet_options(table: str, top_k: int = MIN_TOP_K) -> dict[str, object]:
    """Return keyword arguments of ``pyarrow.parquet.write_table`` for a shard, chosen by measurement.

    Floats and token ids go byte plane by byte plane (BYTE_STREAM_SPLIT): the sign and exponent planes compress, the
    mantissa does not. Counters go as deltas, repeated strings through a dictionary. Pages carry a CRC, so damage is
    seen even where the checksum of the shard is not verified.
    """
    dictionary, encoding = [], {}
    for field in file_schema(table, top_k):
        if pa.types.is_string(field.type):
            dictionary.append(field.name)
        elif pa.types.is_list(field.type):
            encoding[f"{field.name}.list.element"] = "BYTE_STREAM_SPLIT"
        elif field.name in KEYS or pa.types.is_int16(field.type):
            encoding[field.name] = "DELTA_BINARY_PACKED"
        else:
            encoding[field.name] = "BYTE_STREAM_SPLIT"
    return {
        "compression": "zstd",
        "compression_level": 9,
        "use_dictionary": dictionary,
        "column_encoding": encoding,
        "data_page_version": "2.0",
        "write_statistics": False,
        "write_page_checksum": True,
        "store_schema": False,
        "row_group_size": 3 << 16,  # about 10 MiB of positions: larger ones exhaust readers that stream
    }


def describe(top_k: int = MIN_TOP_K) -> str:
    """Return the registry as Markdown tables, for the documentation."""
    lines = []
    for table in TABLES:
        lines += [f"### `{table}`", "", "| column | type | unit | meaning | in the shard |", "|---|---|---|---|---|"]
        for column in columns_of(table):
            held = column.in_file
            if held == SPREAD:
                first, *_, last = spread_names(column.name, top_k)
                held = f"`{first}` .. `{last}`"
            elif held == IMPLIED:
                held = "is `top1_id`"
            elif held == BEYOND_TOP:
                held = f"null where rank < {top_k}: then it is that of the ranked column"
            null = ", nullable" if column.nullable else ""
            lines.append(f"| `{column.name}` | {column.dtype}{null} | {column.unit} | {column.meaning} | {held} |")
        lines.append("")
    return "\n".join(lines)
