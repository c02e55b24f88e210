"""Whether a trace, or how much of it, fits into memory: told from its manifest before anything is read."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ..errors import TraceError, UsageError
from .manifest import Manifest

BASE = 300 << 20
"""Bytes of the interpreter and its libraries, and of one row group while it is read."""
STEP, POSITION = 120, 140
"""Bytes of a row of ``steps``, and of ``positions``, its graph included but not its columns. Measured on 20,000
requests of 60 steps, K = 7: 3.5 GB at the peak."""
LEAST_ROWS = 1 << 15
"""Positions of a group, at least."""
TOLERANCE = 0.8
"""Refuse only what would not fit if it took this share of the estimate."""


def available_memory() -> int | None:
    """Return the bytes that this process can still take, swap included; None where the system does not say."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
        limits.append(1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0)))
    except (OSError, ValueError, KeyError):
        if hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),  # control groups, version 2 and 1
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            group = Path("/sys/fs/cgroup")
            free = int((group / limit).read_text()) - int((group / used).read_text())
            stat = (group / limit).with_name("memory.stat").read_text().split()
            limits.append(free + int(dict(zip(stat[::2], stat[1::2], strict=True)).get(cache, 0)))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(limits, default=None)


def estimated_bytes(manifest: Manifest) -> int:
    """Estimate the peak bytes of reading a trace whole and laying it out."""
    rows = {table: sum(shard.rows for shard in manifest.shards_of(table)) for table in ("steps", "positions")}
    texts = 4 * sum(shard.bytes for shard in manifest.shards_of("requests"))
    return BASE + texts + STEP * rows["steps"] + position_bytes(manifest.top_k) * rows["positions"]


def position_bytes(top_k: int) -> int:
    """Return the bytes of a row of ``positions`` while it is read and laid out."""
    return POSITION + 2 * (8 * top_k + 52)  # columns as shards and as one table


MEMORY = 2e9
"""Bytes that a command which reads a trace group by group may take, unless told otherwise."""


def group_rows(memory: float, top_k: int, most: int) -> int:
    """Return the positions of a group for so many bytes: ``most``, or less by powers of two.

    Half of what the interpreter leaves goes to the group, the other to what is known per request.

    Raises
    ------
    UsageError
        If that is too few to work with.
    """
    room = (memory - BASE) / 2 / (position_bytes(top_k) + STEP)
    if not room >= LEAST_ROWS:
        least = BASE + 2 * LEAST_ROWS * (position_bytes(top_k) + STEP)
        raise UsageError(
            f"a memory of {memory / 1e9:g} GB is too little to read a trace in",
            fix=f"give at least {math.ceil(least / 1e8) / 10:g}",
        )
    while most > room:
        most //= 2
    return most


def check_fits(folder: Path, manifest: Manifest) -> None:
    """Refuse to read a trace that memory cannot hold.

    Raises
    ------
    TraceError
        With the bytes needed and the bytes free.
    """
    _check(folder, estimated_bytes(manifest))


def check_group_fits(folder: Path, manifest: Manifest, rows: int) -> None:
    """Refuse to read a group of requests of so many positions that memory cannot hold; see :func:`check_fits`."""
    _check(folder, BASE + rows * (position_bytes(manifest.top_k) + STEP))


def _check(folder: Path, needed: int) -> None:
    free = available_memory()
    if free is not None and TOLERANCE * needed > free:
        raise TraceError(
            f"reading it takes about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free",
            where=str(folder),
            fix="free some memory, or use a command that reads a trace group by group: inspect, replay, compare, "
            "calibrate, convert",
        )
