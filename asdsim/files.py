"""Files: local or in an object store, written whole or not at all; numbers in JSON, and JSON and text of others."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import io
import json
import math
import os
import re
import reprlib
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .errors import AsdsimError, UsageError, unknown_name

CHUNK = 1 << 20
MAX_VALUE = 1 << 28
"""Characters of one JSON value or text file: anything longer is not a row, configuration or table."""
MAX_FILE = 1 << 34
"""Characters of a file of rows, unpacked: what a small compressed file may grow to."""

# --- paths --------------------------------------------------------------------------------------------------------

STORES = {"s3": "s3", "gs": "gs", "memory": "s3"}
"""Schemes of object stores, and the extra of the package that each needs. All of them publish an object whole, which is
what writing relies on; a store in memory lives as long as its process."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_STORE_PACKAGES = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google")


def to_path(place: str | os.PathLike[str]) -> Path:
    """Return the path that a text means: of a local file, or ``s3://BUCKET/KEY`` and the like of an object.

    A path in a store is a ``upath.UPath``. It has the methods of a ``Path`` that read and list; write with the
    functions here. Credentials come from the environment of the store's library.

    Raises
    ------
    UsageError
        If the URL holds credentials, its store is not known, or what it needs is not installed.
    """
    text = str(place)
    match = _SCHEME.fullmatch(text)
    if match is None:
        return Path(place)
    scheme, rest = match[1].lower(), match[2]
    bucket = rest.partition("/")[0]
    if "@" in bucket or "?" in rest:  # neither is shown: it may end up in a log
        raise UsageError(
            "a URL must hold no user, password or signature", where=f"{scheme}://...",
            fix="set them in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )  # fmt: skip
    if scheme == "file" and rest.startswith("/"):
        return Path(rest)
    if scheme not in STORES:
        raise unknown_name("storage", f"{shown(scheme)}://", [f"{name}://" for name in STORES])
    if not bucket:
        raise UsageError("names no bucket", where=shown(text), fix=f"write {scheme}://BUCKET/NAME")
    try:
        from upath import UPath

        # Another process may be writing: what was listed a moment ago says nothing.
        options = {**getattr(place, "storage_options", {}), "use_listings_cache": False}
        path: Any = UPath(f"{scheme}://{rest.rstrip('/')}", **options)
        _ = path.fs  # imports the library of the store
    except ImportError:
        extra = STORES[scheme]
        raise UsageError(
            "needs a package that is not installed", where=shown(text),
            fix=f"pip install 'asdsim[{extra}]'",
        ) from None  # fmt: skip
    return path  # type: ignore[no-any-return]


def is_remote(path: Any) -> bool:
    """Return whether a path lies in an object store."""
    return hasattr(path, "storage_options")


def reason_of(error: BaseException) -> str:
    """Return in one line why a file or object could not be read or written; empty for an error of another kind."""
    if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _STORE_PACKAGES:
        return ""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shown(str(text).strip().splitlines()[0])


@contextlib.contextmanager
def reaching(path: Path, error: type[AsdsimError] = UsageError) -> Iterator[None]:
    """Turn what a store says to a first request into one error; those of local files pass.

    Raises
    ------
    AsdsimError
        Of the type ``error``.
    """
    try:
        yield
    except Exception as failure:
        reason = reason_of(failure)
        if not is_remote(path) or not reason:
            raise
        fix = "check the address, and the credentials and endpoint in the environment"
        raise error(f"the store cannot be reached: {reason}", where=shown(path), fix=fix) from None


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none where there is no folder."""
    try:
        return sorted(name for entry in folder.iterdir() if (name := entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def has_folder(file: Path) -> bool:
    """Return whether a file can be written as far as its folder is concerned; stores have none."""
    return is_remote(file) or file.parent.is_dir()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; stores have none."""
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def read_octets(file: Path, most: int | None = None) -> bytes:
    """Return a whole file or object, or its first ``most`` bytes; from a store in one request where ``most`` is given.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    if is_remote(file):
        remote: Any = file
        try:
            return bytes(remote.fs.cat_file(remote.path, **({} if most is None else {"start": 0, "end": most})))
        except OSError:
            raise
        except Exception as error:
            if not reason_of(error):
                raise
            raise OSError(errno.EIO, reason_of(error)) from error
    with open(file, "rb") as handle:
        return handle.read(-1 if most is None else most)


# --- writing ------------------------------------------------------------------------------------------------------


STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
"""Names that may lead to a regular file, but not to one of this directory. Not /dev/shm, which holds ordinary files."""


def write_atomically(file: Path, data: bytes | memoryview | str) -> None:
    """Write a file so that its name stands for all of ``data`` (text as UTF-8) or for what it was before.

    Raises
    ------
    OSError
        If it cannot be written; the temporary file is removed.
    """
    content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    write_made(file, lambda handle: handle.write(content))


def write_made(file: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Write a file by a function that gets an open binary file; see :func:`write_atomically`.

    The temporary file has a random name in the same directory and is created exclusively, so that two writers never
    share one and no symbolic link is followed. A device or a pipe is written to as it is. An object is put into its
    store whole, in parts where it is large; until the last one has arrived, nothing is there.
    """
    if is_remote(file):
        held = io.BytesIO()
        fill(held)
        _put(file, held.getvalue())
        return
    file = Path(file)
    if str(file).startswith(STREAMS) or _is_stream(file):
        with open(file, "wb") as handle:
            fill(handle)
        return
    temporary = file.with_name(f".tmp-{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(temporary, flags | getattr(os, "O_BINARY", 0), 0o666)  # less what umask takes away
    try:
        with open(descriptor, "w+b") as handle:
            fill(handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(file.parent)


def _put(file: Any, data: bytes, **how: Any) -> None:
    try:
        file.fs.pipe_file(file.path, data, **how)
    except OSError:
        raise
    except Exception as error:
        if not reason_of(error):
            raise
        raise OSError(errno.EIO, reason_of(error)) from error


def write_new(file: Path, data: bytes | memoryview) -> bool:
    """Put an object where there is none; return whether there was none.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    try:
        _put(file, bytes(data), mode="create")
    except FileExistsError:
        return False
    return True


def write_over(file: Path, data: bytes, before: bytes | None) -> bool:
    """Put an object in the place of ``before``; None is no object. Return False, and put nothing, if another is there.

    S3 compares and writes in one step. In other stores a writer may slip in between.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    remote: Any = file
    try:
        if before is None:
            return write_new(file, data) or read_octets(file) == data  # a request that was repeated
        held = remote.fs.info(remote.path)
        if read_octets(file, len(before) + 1) != before:
            return False
        _put(file, data, **({"IfMatch": held["ETag"]} if remote.protocol == "s3" else {}))
    except FileNotFoundError:
        return False
    except OSError:
        now = read_octets(file)
        if now == before:
            raise
        return now == data
    return True


def _is_stream(file: Path) -> bool:
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def sync_directory(folder: Path) -> None:
    """Make renames inside a directory last through a loss of power, where the platform can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems know no such call
            raise
    finally:
        os.close(descriptor)


# --- numbers in JSON ----------------------------------------------------------------------------------------------


def plain(value: Any, *, nan: bool = True) -> Any:
    """Return ``value`` as JSON can say it: an infinity as ``"inf"`` or ``"-inf"``, NaN as null, numpy as Python.

    Raises
    ------
    ValueError
        On a NaN where ``nan`` is False.
    TypeError
        On a type that JSON has no word for.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        if math.isnan(value):
            if not nan:
                raise ValueError("NaN cannot be stored")
            return None
        return "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): plain(item, nan=nan) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, nan=nan) for item in value]
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return plain(value.tolist(), nan=nan)
    if is_remote(value):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fsencode(value).decode("utf-8", "surrogateescape")  # also under a locale of ASCII
    raise TypeError(f"a {type(value).__name__} cannot be stored")


def dump_json(value: Any, *, indent: int | None = None, ascii_only: bool = True) -> str:
    """Return ``value`` as JSON text by the rule of :func:`plain`, without a line end."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=ascii_only, allow_nan=False)


# --- reading ------------------------------------------------------------------------------------------------------


def shown(text: object) -> str:
    """Return text from outside as a terminal may show it: control, bidirectional and invisible characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def _pieces(path: Path, error: type[AsdsimError]) -> Iterator[str]:
    """Yield the text of a file, plain or gzip, UTF-8 with or without a mark; read once from front to back."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines = size = 0
    try:
        with io.BufferedReader(path.open("rb")) if is_remote(path) else open(path, "rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            data = b" "
            while data:
                data = stream.read(CHUNK)
                if size == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise error("text in UTF-16", where=shown(path), fix="save it as UTF-8")
                size += len(data)
                if size > MAX_FILE:
                    raise error(f"more than {MAX_FILE >> 30} GiB of text", where=shown(path), fix="split it")
                text = decoder.decode(data, final=not data)
                lines += text.count("\n")
                yield text
    except (EOFError, zlib.error):
        raise error("damaged or cut gzip file", where=shown(path)) from None
    except UnicodeDecodeError as failure:
        line = lines + 1 + bytes(failure.object[: failure.start]).count(b"\n")
        raise error("not text in UTF-8", where=f"{shown(path)}, line {line}") from None
    except AsdsimError:
        raise
    except Exception as failure:
        reason = reason_of(failure)
        if not reason:
            raise
        raise error(f"cannot read it: {reason}", where=shown(path)) from None


def read_text(path: Path, *, error: type[AsdsimError] = UsageError) -> str:
    """Return a text file of at most ``MAX_VALUE`` characters: UTF-8, plain or gzip, also from a pipe.

    Raises
    ------
    AsdsimError
        Of the type ``error``, with file and line.
    """
    text, size = [], 0
    for piece in _pieces(path, error):
        text.append(piece)
        size += len(piece)
        if size > MAX_VALUE:
            raise error(f"more than {MAX_VALUE >> 20} million characters", where=shown(path))
    return "".join(text)


_SPACE = re.compile(r"[ \t\n\r]*")


class _Values:
    """JSON values one after another: lines, pretty-printed objects, or the items of an array.

    Holds a window of the file. A value that does not end inside the window is tried again with twice as much.
    """

    def __init__(self, path: Path, error: type[AsdsimError], text: str | None = None) -> None:
        self.where, self.error = shown(path), error
        self.pieces = _pieces(path, error) if text is None else iter([text])
        self.window, self.place, self.line, self.ended = "", 0, 1, False
        self.decode = json.JSONDecoder().raw_decode

    def more(self, least: int = 1) -> None:
        """Drop what was read and add at least ``least`` characters."""
        parts, added = [self.window[self.place :]], 0
        while added < least and not self.ended:
            piece = next(self.pieces, None)
            self.ended = piece is None
            parts.append(piece or "")
            added += len(piece or "")
        self.window, self.place = "".join(parts), 0

    def move(self, place: int) -> None:
        self.line += self.window.count("\n", self.place, place)
        self.place = place

    def next_character(self) -> str:
        """Skip white space; return the character that follows, or nothing at the end."""
        while True:
            space = _SPACE.match(self.window, self.place)
            self.move(space.end() if space else self.place)
            if self.place < len(self.window):
                return self.window[self.place]
            if self.ended:
                return ""
            self.more()

    def refuse(self, what: str, place: int | None = None) -> NoReturn:
        line = self.line + (0 if place is None else self.window.count("\n", self.place, place))
        raise self.error(f"not valid JSON: {what}", where=f"{self.where}, line {line}") from None

    def value(self) -> Any:
        while True:
            try:
                value, end = self.decode(self.window, self.place)
            except RecursionError:
                self.refuse("nested too deeply")
            except json.JSONDecodeError as error:
                if self.ended or len(self.window) - self.place > MAX_VALUE:
                    self.refuse(error.msg, error.pos)
            except ValueError:  # Python converts no integer of more digits
                self.refuse("a number of more than 4,300 digits")
            else:
                if end < len(self.window) or self.ended:
                    self.move(end)
                    return value
            self.more(max(CHUNK, len(self.window) - self.place))

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield each value with its place; the items of a top-level array count as values."""
        while first := self.next_character():
            if first != "[":
                line = self.line
                yield f"{self.where}, line {line}", self.value()
                continue
            number, closed = 0, False
            start = f"{self.where}, " if self.line == 1 else f"{self.where}, line {self.line}, "
            while not closed:
                self.move(self.place + 1)  # over the bracket or the comma
                if self.next_character() == "]" and not number:
                    break
                number += 1
                yield f"{start}item {number}", self.value()
                after = self.next_character()
                closed = after == "]"
                if not closed and after != ",":
                    self.refuse("expecting ',' or ']'" if after else "the array does not end")
            self.move(self.place + 1)


def read_rows(
    path: Path, *, error: type[AsdsimError] = UsageError, text: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, object) from JSON lines, pretty-printed objects or an array of objects, plain or gzip.

    ``text`` is that of the file, where it was read before.

    Raises
    ------
    AsdsimError
        Of the type ``error``, with file and line or item: on anything that is not a JSON object.
    """
    for where, value in _Values(path, error, text).rows():
        if not isinstance(value, dict):
            raise error("not a JSON object", where=where)
        yield where, value


def read_json(path: Path, *, error: type[AsdsimError] = UsageError) -> Any:
    """Return the one JSON value of a file.

    Raises
    ------
    AsdsimError
        Of the type ``error``, with file and line.
    """
    values = _Values(path, error)
    if not values.next_character():
        raise error("the file is empty", where=shown(path))
    value = values.value()
    if values.next_character():
        values.refuse("more than one value")
    return value


# --- values by key ------------------------------------------------------------------------------------------------

_NEEDED: Any = object()


class Fields:
    """Values of a JSON object by key and type; an error names file and key. A boolean is not a number.

    A key that is absent or null gives ``default``, and is refused without one.
    """

    def __init__(self, values: Any, where: str | Path, error: type[AsdsimError] = UsageError) -> None:
        self.where, self.error = shown(where), error
        if not isinstance(values, Mapping):
            raise error("not a JSON object", where=self.where)
        self.values: Mapping[str, Any] = values

    def refuse(self, key: str, what: str) -> NoReturn:
        """Raise an error about the value of a key."""
        value = shown(reprlib.repr(self.values.get(key)))
        raise self.error(f"{shown(key)} is {value}, not {what}", where=self.where) from None

    def get(self, key: str, default: Any = _NEEDED) -> Any:
        """Return the value of any type."""
        value = self.values.get(key)
        if value is None:
            if default is _NEEDED:
                raise self.error(f"{shown(key)} is missing", where=self.where)
            return default
        return value

    def number(self, key: str, default: Any = _NEEDED, *, infinite: bool = False) -> float:
        """Return a finite number; with ``infinite`` also an infinity, or ``"inf"``."""
        value = self.get(key, default)
        if self.values.get(key) is None:
            return value
        if infinite and value in ("inf", "-inf"):
            return float(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(key, "a number" if infinite else "a finite number")
        try:
            result = float(value)
        except OverflowError:
            self.refuse(key, "a number of double precision")
        if math.isnan(result) or (math.isinf(result) and not infinite):
            self.refuse(key, "a finite number")
        return result

    def whole(self, key: str, default: Any = _NEEDED, *, least: int = 0, most: int = 2**63 - 1) -> int:
        """Return a whole number from ``least`` to ``most``; 3.0 is 3."""
        value = self.get(key, default)
        if self.values.get(key) is None:
            return value
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not least <= value <= most:
            self.refuse(key, f"a whole number >= {least}" + ("" if most == 2**63 - 1 else f" and <= {most}"))
        return int(value)

    def text(self, key: str, default: Any = _NEEDED) -> str:
        """Return text that UTF-8 can hold (no lone surrogates)."""
        value = self.get(key, default)
        if self.values.get(key) is None:
            return value
        if not isinstance(value, str):
            self.refuse(key, "text")
        if any("\ud800" <= c <= "\udfff" for c in value):
            self.refuse(key, "text: it holds half of a surrogate pair")
        return value

    def flag(self, key: str, default: Any = _NEEDED) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if self.values.get(key) is not None and not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def list_of(self, kind: str, key: str, default: Any = _NEEDED, **bounds: Any) -> list[Any]:
        """Return a list of ``"number"``, ``"whole"``, ``"text"`` or ``"flag"``; an error names the place."""
        value = self.get(key, default)
        if self.values.get(key) is None:
            return value
        if not isinstance(value, (list, tuple)):
            self.refuse(key, "a list")
        items = Fields({f"{key}[{n}]": item for n, item in enumerate(value)}, self.where, self.error)
        return [getattr(items, kind)(name, **bounds) for name in items.values]

    def inner(self, key: str) -> Fields:
        """Return the object under a key."""
        value = self.get(key)
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return Fields(value, f"{self.where}, {shown(key)}", self.error)
