"""Join what several processes captured: a run split by ``--shard i/n`` leaves n traces beside its output.

Each shard is a trace of its own, of every n-th request, so each process writes, resumes and covers without the others.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from functools import reduce
from pathlib import Path

from ..errors import AsdsimError, TraceError, UsageError
from ..files import (
    Fields,
    is_remote,
    names_in,
    read_octets,
    reason_of,
    sync_directory,
    to_path,
    write_atomically,
    write_over,
)
from . import manifest as manifests
from .reader import Trace, read_trace
from .vocabulary import Vocabulary
from .writer import TEMPORARY, TraceWriter, lock_directory, os_errors, store_vocabulary, unlock, without_mark

NOTE = "shard"
"""Entry of the manifest's notes: ``{"index": i, "of": n, "requests": requests of all shards}``."""
PARQUET = re.compile(r"[a-z]+-[0-9a-f]+\.parquet")


def parse_shard(text: str) -> tuple[int, int]:
    """Read ``"2/4"``: the second of four, counted from 1.

    Raises
    ------
    UsageError
        If it is anything else.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text!r} is not i/n with i from 1 to n", fix="write 1/4, 2/4, 3/4 and 4/4")
    return int(match[1]), int(match[2])


def shard_path(path: Path, index: int, of: int) -> Path:
    """Return the directory of a shard: ``PATH.shard-i-of-n``."""
    whole = path if path.name else path.resolve()
    return whole.with_name(f"{whole.name}.shard-{index}-of-{of}")


def find_shards(path: Path) -> list[Path]:
    """Return the directories of all n shards of ``path``, in order.

    Raises
    ------
    TraceError
        If there are none, some are missing, or shards of two splits lie there.
    """
    pattern = re.compile(re.escape(path.name) + r"\.shard-(\d+)-of-(\d+)")
    parent = path.parent
    matches = [pattern.fullmatch(name) for name in names_in(parent)]
    pairs = sorted((int(match[2]), int(match[1])) for match in matches if match)
    if not pairs:
        raise TraceError("no shards lie beside it", where=str(path), fix="capture them with -o and --shard i/n")
    splits = sorted({of for of, _ in pairs})
    if len(splits) > 1:
        raise TraceError(
            f"shards of two splits, {splits[0]} and {splits[1]}, lie beside it",
            where=str(path),
            fix="remove those of one split",
        )
    there = {index for _, index in pairs}
    missing = [index for index in range(1, splits[0] + 1) if index not in there]
    if missing:
        raise TraceError(
            f"shard {missing[0]} of {splits[0]} is missing",
            where=str(path),
            fix=f"capture --shard {missing[0]}/{splits[0]}",
        )
    return [shard_path(path, index, splits[0]) for index in range(1, splits[0] + 1)]


def join(path: str | os.PathLike[str]) -> Trace:
    """Write the trace ``path`` from the shards beside it, requests in the order of one undivided run.

    The shards stay. What ``cover`` added to them is kept; a grid counts as covered where every shard has it.

    Raises
    ------
    TraceError
        If ``path`` holds something, a shard is missing, not finished, of another run or being written.
    """
    target = to_path(path)
    target = target if target.name else target.resolve()
    held = names_in(target) if target.is_dir() else []
    left = [name for name in held if is_remote(target) and PARQUET.fullmatch(name)]  # of a join that was killed
    if target.exists() and (not target.is_dir() or left != held):
        raise TraceError("already exists", where=str(target), fix="remove it, or move the shards")
    folders = find_shards(target)
    lock = lock_directory(folders[0])  # one process joins at a time
    try:
        if lock is not None:
            _remove_stale(target)
        shards = [read_trace(folder) for folder in folders]
        total = _check_shards(target, shards)
        with os_errors(target):
            for name in left:
                (target / name).unlink(missing_ok=True)
        _write(target, shards, total)
    finally:
        unlock(lock)
    return read_trace(target)


def _check_shards(target: Path, shards: list[Trace]) -> int:
    """Refuse shards that are not those of one run, each whole; return the number of requests of all."""
    total = 0
    for number, shard in enumerate(shards):
        note = _note(shard)
        difference = manifests.first_difference(shards[0].manifest, shard.manifest)
        if difference is not None:
            raise TraceError(
                f"is from another run than shard 1: {difference[0]} differs", where=str(shard.path),
                fix="capture all shards with the same flags and the same models",
            )  # fmt: skip
        if note["index"] != number + 1 or note["of"] != len(shards):
            raise TraceError(
                f"is shard {note['index']} of {note['of']} under the name of another", where=str(shard.path),
                fix=f"call it {shard_path(target, note['index'], note['of']).name}",
            )  # fmt: skip
        total = note["requests"]
        expected = len(range(number, total, len(shards)))
        if len(shard.request_ids()) != expected:
            raise TraceError(
                f"holds {len(shard.request_ids())} of {expected} requests", where=str(shard.path),
                fix=f"finish it: --shard {number + 1}/{len(shards)} --resume",
            )  # fmt: skip
    return total


def _note(shard: Trace) -> dict[str, int]:
    where = f"{shard.path}: {manifests.MANIFEST}, notes.{NOTE}"
    fields = Fields(shard.manifest.notes.get(NOTE, {}), where, TraceError)
    return {name: fields.whole(name, 0) for name in ("index", "of", "requests")}


def _write(target: Path, shards: list[Trace], total: int) -> None:
    first = shards[0].manifest
    grids = [grid for grid in first.grids if all(grid in shard.manifest.grids for shard in shards)]
    notes = {key: value for key, value in without_mark(first).notes.items() if key != NOTE}
    manifest = first.replace(grids=[], notes={**notes, "shards": len(shards), manifests.PLANNED: total})
    vocabularies = [shard.vocabulary for shard in shards if shard.vocabulary is not None]
    records = [shard.request_records() for shard in shards]
    staging = target.with_name(f".tmp-{target.name}-{secrets.token_hex(8)}")
    if is_remote(target):
        staging = Path(tempfile.mkdtemp(prefix="asdsim-join-"))
    try:
        with TraceWriter.create(staging, manifest) as writer:
            for index in range(total):
                number = index % len(shards)
                record = records[number][index // len(shards)]
                writer.add_request(record, shards[number].steps_of(record.request_id))
            writer.update_manifest(grids=grids)
            if vocabularies:
                store_vocabulary(writer, reduce(Vocabulary.join, vocabularies))
        _publish(staging, target)
    except AsdsimError:
        raise
    except Exception as error:
        if not reason_of(error):
            raise
        raise TraceError(f"cannot be written: {reason_of(error)}", where=str(target)) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, target: Path) -> None:
    """Give a finished trace its name, whole or not at all: in a store, its manifest is put last."""
    if not is_remote(target):
        os.rename(staging, target)
        sync_directory(target.parent)
        return
    for name in names_in(staging):
        if name != manifests.MANIFEST:
            write_atomically(target / name, read_octets(staging / name))
    if not write_over(target / manifests.MANIFEST, read_octets(staging / manifests.MANIFEST), None):
        raise TraceError("another process joined it", where=str(target), fix="check it with asdsim inspect")


def _remove_stale(target: Path) -> None:
    """Remove what a killed join of this trace left: with the lock held, no other join is running.

    A directory of such a name that holds anything but files of a trace is not ours and stays.
    """
    pattern = re.compile(rf"\.tmp-{re.escape(target.name)}-([0-9a-f]{{16}}|[0-9]+)")
    for folder in target.parent.iterdir():
        if pattern.fullmatch(folder.name) and folder.is_dir():
            names = set(os.listdir(folder)) - {manifests.MANIFEST}
            if all(TEMPORARY.fullmatch(name) or PARQUET.fullmatch(name) for name in names):
                shutil.rmtree(folder, ignore_errors=True)  # leaves a symbolic link alone
