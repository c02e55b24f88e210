"""``manifest.json``: what a trace was made from, and which shards belong to it.

The file carries a checksum of its own content: SHA-256 over the canonical JSON (sorted keys, no spaces, ASCII) of every
other field. A shard that is not named here does not belong to the trace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
from dataclasses import dataclass, field
from typing import Any

from ..errors import TraceError
from ..files import Fields, plain, shown
from .schema import MIN_TOP_K, SCHEMA_VERSION, TABLES

MANIFEST = "manifest.json"
SHARD_NAME = re.compile(r"(requests|steps|positions)-(\d{5,9})\.parquet")


@dataclass(frozen=True)
class Shard:
    """One Parquet file of a trace.

    Attributes
    ----------
    name, table : str
        File name, and the table that it holds a part of.
    rows, bytes : int
        Number of rows, and size of the file.
    sha256 : str
        Checksum of the file.
    """

    name: str
    table: str
    rows: int
    bytes: int
    sha256: str

    @property
    def number(self) -> int:
        """Number in the file name; the writer counts up."""
        return int(self.name.removesuffix(".parquet").rpartition("-")[2])


@dataclass(frozen=True)
class Manifest:
    """What identifies a trace, what was covered since, and its shards.

    Plain JSON values only; tuples become lists, and an infinite number the string ``"inf"``.

    Attributes
    ----------
    target, drafter : dict
        Name, revision, weight checksum, settings.
    vocab_size : int
        Number of logits in a row of the target.
    num_draft_tokens : int
        K that the drafter was asked for; a step may have fewer.
    top_k : int
        Largest logits kept per row.
    max_new_tokens : int
        Limit on generated tokens.
    stop : str
        ``natural`` or ``fixed``.
    rule : dict
        Rule that decided while capturing: ``{"name": "strict"}``, or ``{"name": "asd", "B": .., "g": .., "M": ..}``.
    tasks : list of str
    seed : int
    logits_dtype : str
        Type that the target computed its logits in.
    device : str
    settings : dict
        Whatever else makes this run another one.
    software : dict
        Versions. Not part of the identity.
    grids : list of dict
        Settings for which every edge has been captured (``cover``).
    notes : dict
        Anything else worth keeping, such as the date. Not part of the identity.
    shards : list of Shard
        Kept by the writer.
    """

    target: dict[str, Any]
    drafter: dict[str, Any]
    vocab_size: int
    num_draft_tokens: int
    top_k: int = MIN_TOP_K
    max_new_tokens: int = 0
    stop: str = "natural"
    rule: dict[str, Any] = field(default_factory=lambda: {"name": "strict"})
    tasks: list[str] = field(default_factory=list)
    seed: int = 0
    logits_dtype: str = "float32"
    device: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)
    software: dict[str, Any] = field(default_factory=dict)
    grids: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, kind in FIELD_TYPES.items():
            value = _plain(getattr(self, name), name) if name != "shards" else list(self.shards)
            if type(value) is not kind:
                raise TraceError(
                    f"{name} is {type(value).__name__}, not {kind.__name__}", where=f"{MANIFEST}: field {name!r}"
                )
            object.__setattr__(self, name, value)
        if self.stop not in ("natural", "fixed"):
            raise TraceError(f"stop {self.stop!r} is neither natural nor fixed", where=MANIFEST)
        if not 1 <= self.vocab_size <= 2**31 - 1:
            raise TraceError(f"vocab_size {self.vocab_size} is out of range", where=MANIFEST)
        if not min(MIN_TOP_K, self.vocab_size) <= self.top_k <= min(self.vocab_size, 1024):
            raise TraceError(
                f"top_k {self.top_k} is out of range", where=MANIFEST, fix=f"keep at least {MIN_TOP_K} logits per row"
            )
        if not 0 <= self.num_draft_tokens <= 2**15 - 2 or not 0 <= self.max_new_tokens <= 2**31 - 1:
            raise TraceError("num_draft_tokens or max_new_tokens is out of range", where=MANIFEST)

    @property
    def K(self) -> int:
        """``num_draft_tokens``."""
        return self.num_draft_tokens

    @property
    def planned(self) -> int:
        """Requests that the finished capture holds; 0 where the manifest does not say."""
        return int(self.notes.get(PLANNED) or 0)

    @property
    def checksum(self) -> str:
        """Checksum of the manifest file, and through its shards of the whole trace."""
        return _checksum(_content(self))

    def shards_of(self, table: str) -> list[Shard]:
        """Return the shards of one table."""
        return [shard for shard in self.shards if shard.table == table]

    def replace(self, **fields: Any) -> Manifest:
        """Return a copy with some fields changed.

        Raises
        ------
        TraceError
            If a field does not exist or cannot hold the value.
        """
        unknown = set(fields) - set(FIELD_TYPES)
        if unknown:
            raise TraceError(f"unknown field {sorted(unknown)[0]!r}", where=MANIFEST)
        return dataclasses.replace(self, **fields)


FIELD_TYPES: dict[str, type] = {
    name: typing.get_origin(hint) or hint for name, hint in typing.get_type_hints(Manifest).items()
}
PLANNED = "requests"
"""Entry of the notes: requests that a finished capture holds."""
NEXT_SHARD = "next_shard"
"""Entry of the notes: lowest number for a shard that no process of an earlier run can still be writing."""
VOCABULARY = "vocabulary"
"""Entry of the notes: the file with the text of tokens, see :mod:`asdsim.trace.vocabulary`."""
TIMING = "timing"
"""Entry of the notes: passes of the target by width, timed beside the capture, see :mod:`asdsim.capture.passes`."""
SPEEDS = "speeds"
"""Entry of the notes: what ``asdsim timing`` measured on this trace, and what had been predicted."""
NOT_IDENTITY = frozenset({"software", "grids", "notes", "shards"})


def _plain(value: Any, name: str) -> Any:
    """Return the value of a field as plain JSON values."""
    try:
        return plain(value, nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(str(error), where=f"{MANIFEST}: field {name!r}") from None


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _content(manifest: Manifest) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(manifest)}


def seal(content: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest file: ``content`` (without a checksum) and its checksum."""
    sealed = {**content, "checksum": _checksum(content)}
    return (json.dumps(sealed, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest file."""
    return seal(_content(manifest))


def parse(data: bytes, where: str) -> Manifest:
    """Read a manifest file.

    Parameters
    ----------
    data : bytes
        Content of the file.
    where : str
        Its path, for messages.

    Raises
    ------
    TraceError
        If it is not a JSON object, has another schema version, is damaged, or has invalid fields.
    """
    damaged = "restore the file from a copy, or capture again"
    try:
        content = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise TraceError(f"not valid JSON: {error}", where=where, fix=damaged) from None
    if not isinstance(content, dict) or "schema_version" not in content:
        raise TraceError("not the manifest of a trace: no schema_version", where=where, fix=damaged)
    version = content["schema_version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        raise TraceError(
            f"schema version {version!r} is not known; this release reads version {SCHEMA_VERSION}",
            where=where,
            fix="use the release of asdsim that wrote the trace, or capture again",
        )
    checksum = content.pop("checksum", None)
    try:
        actual = _checksum(content)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"cannot be checked: {error}", where=where, fix=damaged) from None
    if checksum != actual:
        raise TraceError("its checksum does not match its content: edited or damaged", where=where, fix=damaged)
    del content["schema_version"]
    missing = sorted(set(FIELD_TYPES) - set(content))
    unknown = sorted(set(content) - set(FIELD_TYPES))
    if missing or unknown:
        what = f"field {missing[0]!r} is missing" if missing else f"field {unknown[0]!r} is unknown"
        raise TraceError(what, where=where, fix=damaged)
    shards = content.pop("shards")
    if not isinstance(shards, list):
        raise TraceError("shards is not a list", where=where, fix=damaged)
    try:
        manifest = Manifest(**content, shards=[_parse_shard(shard, where) for shard in shards])
        _check_inside(manifest, where)
    except TraceError as error:
        raise TraceError(
            error.what,
            where=error.where
            if error.where.startswith(where)
            else where
            if error.where in ("", MANIFEST)
            else f"{where}: {error.where}",
            fix=error.fix or damaged,
        ) from None
    names = [shard.name for shard in manifest.shards]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"names the shard {twice} twice", where=where, fix=damaged)
    return manifest


INSIDE: dict[str, dict[str, str]] = {
    "target": {"revision": "text", "dtype": "text", "logits_dtype": "text", "device": "text", "weights_sha256": "text"},
    "drafter": {"revision": "text", "weights_sha256": "text"},
    "settings": {"template_date": "text"},
    "notes": {PLANNED: "whole", NEXT_SHARD: "whole", "created": "text", "faithful_only": "flag"},
}
"""Entries of fields that are read by name, and how; see :class:`asdsim.files.Fields`. Any of them may be absent."""


def _check_inside(manifest: Manifest, where: str) -> None:
    """Refuse entries of a type that nothing downstream could use."""
    for name in ("target", "drafter", "rule"):
        Fields(getattr(manifest, name), f"{where}, {name}", TraceError).text("name")
    for name, entries in INSIDE.items():
        fields = Fields(getattr(manifest, name), f"{where}, {name}", TraceError)
        for key, kind in entries.items():
            getattr(fields, kind)(key, None)
    everything = Fields(
        {"tasks": manifest.tasks, "overrides": manifest.drafter.get("overrides") or {}, **manifest.settings},
        where, TraceError,
    )  # fmt: skip
    everything.list_of("text", "tasks")
    everything.list_of("text", "divergences", None)
    everything.inner("overrides")
    for number, entry in enumerate(manifest.grids):
        grid = Fields(entry, f"{where}, grids[{number}]", TraceError)
        grid.flag("faithful", None)
        if grid.text("rule") != "asd":
            params = grid.inner("params")
            for key, values in params.values.items():
                if not isinstance(values, list):
                    params.refuse(key, "a list")
                numbers = [value for value in values if not isinstance(value, str)]
                Fields({key: numbers}, params.where, TraceError).list_of("number", key)
            continue
        for key in ("B", "g", "M"):
            grid.list_of("number", key, infinite=True)
        grid.text("semantics")
        for key in ("regret", "value", "ledger"):
            grid.text(key, None)
        grid.whole("K", None)
        grid.number("draft_threshold", None)
        grid.text("draft_stop", None)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_shard(entry: Any, where: str) -> Shard:
    kinds = {"name": str, "table": str, "rows": int, "bytes": int, "sha256": str}
    if (
        not isinstance(entry, dict)
        or set(entry) != set(kinds)
        or any(type(entry[k]) is not t for k, t in kinds.items())
    ):
        raise TraceError(f"an entry of shards is not understood: {shown(str(entry)[:120])}", where=where)
    shard = Shard(**entry)
    match = SHARD_NAME.fullmatch(shard.name)  # also keeps paths such as ../x out
    sized = 0 <= shard.rows < 1 << 62 and 0 <= shard.bytes < 1 << 62
    if shard.table not in TABLES or match is None or match[1] != shard.table or not sized:
        raise TraceError(f"the shard {shard.name!r} does not fit its table {shard.table!r}", where=where)
    return shard


def first_difference(mine: Manifest, theirs: Manifest) -> tuple[str, Any, Any] | None:
    """Return the first field that makes two manifests different runs, with both values, or None.

    Nested fields are named with dots, such as ``target.revision``.
    """
    for name in FIELD_TYPES:
        if name not in NOT_IDENTITY:
            difference = _differ(name, getattr(mine, name), getattr(theirs, name))
            if difference is not None:
                return difference
    return None


def _differ(name: str, a: Any, b: Any) -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(set(a) | set(b)):
            difference = _differ(f"{name}.{key}", a.get(key), b.get(key))
            if difference is not None:
                return difference
        return None
    return None if a == b and type(a) is type(b) else (name, a, b)
