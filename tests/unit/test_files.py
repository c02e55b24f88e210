"""Files: whole or not at all, numbers in JSON, and what others wrote."""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from asdsim import files
from asdsim.errors import CaptureError, UsageError
from asdsim.files import Fields, dump_json, plain, read_json, read_rows, read_text, shown, write_atomically, write_made


def rows_of(path: Path, content: bytes | str) -> list[tuple[str, dict]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [(where.removeprefix(str(path)), row) for where, row in read_rows(path)]


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_and_a_failure_leaves_the_earlier_one(tmp_path):
    file = tmp_path / "policy.json"
    write_atomically(file, b"old")

    def fail(handle):
        handle.write(b"half of it")
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError):
        write_made(file, fail)
    assert file.read_bytes() == b"old"
    write_atomically(file, "n\u00e9w \ud800")
    assert file.read_bytes() == "n\u00e9w ".encode() + b"\xed\xa0\x80"
    assert os.listdir(tmp_path) == ["policy.json"]


def test_data_are_on_disk_before_the_rename_and_the_name_after(tmp_path, monkeypatch):
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b)))
    write_atomically(tmp_path / "x", b"1")
    assert order == ["file", "rename", "folder"]


def test_mode_follows_umask_and_symlinks_are_replaced_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("keep")
    link = tmp_path / "out.json"
    link.symlink_to(victim)
    before = os.umask(0o027)
    try:
        write_atomically(link, b"{}")
    finally:
        os.umask(before)
    assert victim.read_text() == "keep" and not link.is_symlink()
    assert stat.S_IMODE(link.stat().st_mode) == 0o640


def test_a_temporary_name_that_exists_is_never_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "guessed")
    (tmp_path / "victim").write_text("keep")
    (tmp_path / ".tmp-guessed").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "x", b"1")
    assert (tmp_path / "victim").read_text() == "keep" and (tmp_path / ".tmp-guessed").is_symlink()


def test_two_writers_never_tear_a_file(tmp_path):
    file = tmp_path / "x"
    contents = [bytes([65 + n]) * 200_000 for n in range(2)]
    write_atomically(file, contents[0])
    threads = [
        threading.Thread(target=lambda c=content: [write_atomically(file, c) for _ in range(30)])
        for content in contents
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert file.read_bytes() in contents
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_files_in_shared_memory_are_whole_or_not_at_all_too() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder) / "a"
        file.write_bytes(b"before")
        seen: list[bytes] = []
        write_made(file, lambda handle: (handle.write(b"after"), handle.flush(), seen.append(file.read_bytes())))
        assert seen == [b"before"] and file.read_bytes() == b"after" and os.listdir(folder) == ["a"]


def test_a_pipe_or_device_is_written_to_not_replaced(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    write_atomically(fifo, b"through")
    reader.join(10)
    assert got == [b"through"] and stat.S_ISFIFO(fifo.stat().st_mode)
    write_atomically(Path("/dev/null"), b"gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


# --- numbers in JSON ----------------------------------------------------------------------------------------------


def test_numbers_have_one_form_in_json():
    value = {
        1: np.float32(0.5), "inf": math.inf, "low": -np.inf, "nan": float("nan"), "n": np.int64(3),
        "yes": np.bool_(True), "rows": np.array([[1.0, np.inf], [np.nan, 2.0]]), "pair": (1, None), "path": Path("a/b"),
    }  # fmt: skip
    assert plain(value) == {
        "1": 0.5, "inf": "inf", "low": "-inf", "nan": None, "n": 3, "yes": True, "rows": [[1.0, "inf"], [None, 2.0]],
        "pair": [1, None], "path": "a/b",
    }  # fmt: skip
    assert json.loads(dump_json(value)) == plain(value)
    with pytest.raises(ValueError, match="NaN"):
        plain({"x": [np.float64("nan")]}, nan=False)
    with pytest.raises(TypeError, match="a set"):
        plain({"x": {1}})


# --- reading ------------------------------------------------------------------------------------------------------

ROW = {"text": "a\u2028b\u0085c\x1cd\u00e9\U0001f600", "n": 1}
RAW = json.dumps(ROW, ensure_ascii=False).replace("\x1c", "\\u001c")


@pytest.mark.parametrize(
    ("content", "places"),
    [
        (f"{RAW}\n{RAW}\n", ["line 1", "line 2"]),
        (f"\ufeff{RAW}\r\n\r\n{RAW}", ["line 1", "line 3"]),
        (json.dumps(ROW, indent=2), ["line 1"]),
        (json.dumps(ROW, indent=2) + "\n" + json.dumps(ROW, indent=2), ["line 1", "line 5"]),
        (f"[{RAW},\n {RAW}]", ["item 1", "item 2"]),
        (json.dumps([ROW, ROW], indent=4), ["item 1", "item 2"]),
        (" [ ] ", []),
        ("", []),
        ("\n \r\n", []),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_every_form_gives_the_same_rows(tmp_path, monkeypatch, content, places, packed, chunk):
    monkeypatch.setattr(files, "CHUNK", chunk)
    data = content.encode()
    expected = [(f", {place}", ROW) for place in places]
    assert rows_of(tmp_path / "rows.jsonl", gzip.compress(data) if packed else data) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": }\n', "line 2: not valid JSON: Expecting value"),
        ('{"a": 1}\n[1', "line 2, item 1: not a JSON object"),
        ('[{"a": 1}, {"b": 2}', "line 1: not valid JSON: the array does not end"),
        ('[{"a": 1} {"b": 2}]', "line 1: not valid JSON: expecting ',' or ']'"),
        ('[{"a": 1},]', "line 1: not valid JSON: Expecting value"),
        ('{"a": 1,\n"b" 2}', "line 2: not valid JSON: Expecting ':' delimiter"),
        ('{"a": 1', "line 1: not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "line 1: not valid JSON: a number of more than 4,300 digits"),
        ("[" * 20_000 + "]" * 20_000, "nested too deeply"),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, "line 1: not valid JSON: nested too deeply"),
        ('"text"', "line 1: not a JSON object"),
        (b'{"a": 1}\n{"b": "\xff"}', "line 2: not text in UTF-8"),
        (b'{"a": 1}\n\n\xc3', "line 3: not text in UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "text in UTF-16"),
        (gzip.compress(b'{"a": 1}', mtime=0)[:-9], "damaged or cut gzip file"),
        (b"\x1f\x8b\x00\x00", "cannot read it|damaged"),
    ],
)
def test_what_is_no_json_is_refused_with_file_and_line(tmp_path, content, message):
    with pytest.raises(UsageError, match=f"^{tmp_path}/rows.jsonl.*{message}"):
        rows_of(tmp_path / "rows.jsonl", content)


def test_words_for_what_json_lacks_are_read_and_refused_by_type(tmp_path):
    ((_, row),) = rows_of(tmp_path / "x", '{"a": NaN, "b": Infinity, "c": -Infinity, "d": 1e999}')
    assert math.isnan(row["a"]) and (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, math.inf)
    for key in row:
        with pytest.raises(UsageError, match=f"^x: {key} is .*, not a finite number"):
            Fields(row, "x").number(key)


def test_rows_are_read_without_the_whole_file_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 1 << 12)
    path = tmp_path / "long.jsonl"
    path.write_text('{"n": 1}\n' * 50_000)
    values = files._Values(path, UsageError)
    assert max(len(values.window) for _ in values.rows()) < 1 << 14
    monkeypatch.setattr(files, "MAX_VALUE", 1 << 13)
    with pytest.raises(UsageError, match="line 1: not valid JSON: Unterminated string"):
        rows_of(path, '{"a": "' + "x" * 100_000)
    monkeypatch.setattr(files, "MAX_FILE", 1 << 16)
    with pytest.raises(UsageError, match="of text"):
        rows_of(path, gzip.compress(b'{"n": 1}\n' * 50_000))


def test_stdin_and_pipes_are_read_once():
    program = (
        "import sys; from pathlib import Path; from asdsim.files import *\n"
        "print(list(read_rows(Path(sys.argv[1]))))"
    )  # fmt: skip
    content = gzip.compress(b'{"a": 1}\n{"a": 2}')
    done = subprocess.run(
        [sys.executable, "-c", program, "/dev/stdin"], input=content, capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b"[('/dev/stdin, line 1', {'a': 1}), ('/dev/stdin, line 2', {'a': 2})]\n"


def test_one_value_and_text(tmp_path):
    path = tmp_path / "one.json"
    path.write_text('\ufeff[1,\r\n {"b": "\\ud800"}]\n', encoding="utf-8")
    assert read_json(path) == [1, {"b": "\ud800"}]
    assert read_text(path).startswith("[1,\r\n")
    path.write_text("1 2")
    with pytest.raises(CaptureError, match="line 1: not valid JSON: more than one value"):
        read_json(path, error=CaptureError)
    path.write_text(" ")
    with pytest.raises(UsageError, match="one.json: the file is empty"):
        read_json(path)
    with pytest.raises(UsageError, match=f"^{tmp_path}: cannot read it: Is a directory"):
        read_text(tmp_path)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_a_number_does_not_end_where_a_piece_of_the_file_does(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(files, "CHUNK", chunk)
    (tmp_path / "n").write_text("123456789")
    assert read_json(tmp_path / "n") == 123456789


def test_text_from_outside_is_shown_without_its_controls():
    assert shown("a b\u00e9\u4e2d") == "a b\u00e9\u4e2d"
    assert shown("x\x1b[31m\n\u202e\u2066\u200b\u2028\x7f\ud800") == (
        "x\\x1b[31m\\n\\u202e\\u2066\\u200b\\u2028\\x7f\\ud800"
    )


# --- values by key ------------------------------------------------------------------------------------------------


def test_values_by_key_and_type():
    fields = Fields(
        {"a": 1, "b": 2.5, "c": "inf", "t": "x", "n": None, "w": 3.0, "l": [1, 2], "o": {"k": 7}, "f": False}, "c.json"
    )
    assert fields.number("a") == 1.0 and fields.number("b") == 2.5 and fields.number("n", None) is None
    assert Fields({"c": "-inf"}, "c.json").number("c", infinite=True) == -math.inf
    assert fields.number("c", infinite=True) == math.inf and fields.whole("w") == 3 and fields.text("t") == "x"
    assert fields.list_of("whole", "l") == [1, 2] and fields.inner("o").whole("k") == 7 and fields.flag("f") is False
    assert fields.number("absent", 4.0) == 4.0 and fields.flag("absent", True) is True


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("number", True), ("number", "10k"), ("number", "1.5"), ("number", [1]), ("number", math.inf),
        ("number", "inf"), ("number", math.nan),
        ("number", 10**400), ("number", {}), ("whole", True), ("whole", 1.5), ("whole", -1),
        ("whole", "1"), ("whole", math.inf), ("whole", 2**63), ("text", 1), ("text", "\ud800"), ("flag", 1),
        ("flag", "true"), ("number", None), ("whole", None), ("text", None), ("flag", None),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_file_and_key(kind, value):
    message = "no key\x1b" if value is None else r"key\\x1b is .*, not "
    with pytest.raises(CaptureError, match=r"^config.json: (no )?key\\x1b") as caught:
        getattr(Fields({"key\x1b": value}, "config.json", CaptureError), kind)("key\x1b")
    assert ("not " in str(caught.value)) == (value is not None), message


def test_lists_and_objects_of_another_type_are_refused():
    fields = Fields({"l": [1, 2.5], "o": [], "s": "1,2,3"}, Path("c.json"))
    with pytest.raises(UsageError, match=r"^c.json: l\[1\] is 2.5, not a whole number >= 0"):
        fields.list_of("whole", "l")
    with pytest.raises(UsageError, match="^c.json: s is '1,2,3', not a list"):
        fields.list_of("whole", "s")
    with pytest.raises(UsageError, match=r"^c.json: o is \[\], not an object"):
        fields.inner("o")
    with pytest.raises(UsageError, match="^c.json: not a JSON object"):
        Fields([], "c.json")


def test_a_value_that_equals_the_default_is_checked_like_any_other() -> None:
    fields = Fields({"a": 0, "b": None, "c": "\ud800"}, "x.json")
    for name in ("b", "absent"):
        assert fields.whole(name, 0, least=1) == 0 and fields.text(name, "\ud800") == "\ud800"
    with pytest.raises(UsageError, match="a is 0, not a whole number >= 1"):
        fields.whole("a", 0, least=1)
    for read in (fields.flag, fields.text):
        with pytest.raises(UsageError, match="a is 0"):
            read("a", 0)
    with pytest.raises(UsageError, match="not text"):
        fields.text("c", fields.values["c"])
