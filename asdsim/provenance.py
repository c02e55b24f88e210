"""What a result was made with: versions, the command, and its inputs; one dictionary for every kind of file."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any


@cache
def version() -> str:
    """Return the version of asdsim: of the installed package, or else of the source tree that it runs from."""
    try:
        return metadata.version("asdsim")
    except metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        text = project.read_text(encoding="utf-8") if project.is_file() else ""
        stated = re.search(r'^name = "asdsim"\nversion = "([^"]+)"$', text, re.MULTILINE)
        return stated[1] if stated else "0+unknown"


def own_cores() -> set[int]:
    """Return the numbers of the CPU cores that this process may use, or of all cores if the system does not say."""
    try:
        return set(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return set(range(os.cpu_count() or 1))


def software(*packages: str) -> dict[str, str]:
    """Return the versions of asdsim, of Python, and of the named packages as far as they are installed."""
    versions = {"asdsim": version(), "python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def provenance(command: str | None, source: Mapping[str, Any] | None = None, *packages: str) -> dict[str, Any]:
    """Return what a file came from.

    Parameters
    ----------
    command : str or None
        Command line, as typed.
    source : mapping, optional
        Inputs in the caller's words, such as :func:`trace_source`.
    *packages : str
        Whose versions matter beside asdsim's and Python's.
    """
    return {"command": command, "software": software(*packages), "source": dict(source or {})}


def trace_source(trace: Any) -> dict[str, Any]:
    """Return what names a trace as an input: its path, and the checksum that covers all of its files."""
    return {"asdsim": version(), "trace": str(trace.path), "manifest_checksum": trace.manifest.checksum}
