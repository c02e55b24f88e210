"""Every command that reads a trace or writes a file takes a URL, and gives what it gives on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asdsim.cli import main
from asdsim.files import names_in, read_octets, to_path, write_atomically
from tests.conftest import KEY, S3, SECRET

pytest.importorskip("upath")
TRACES = Path(__file__).parents[2] / "traces"
NAME = "smollm2-lookup-k4"
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def trace(s3: S3) -> str:
    """A committed trace in a bucket."""
    folder = to_path(s3.url) / NAME
    for file in (TRACES / NAME).iterdir():
        write_atomically(folder / file.name, read_octets(file))
    s3.requests.clear()
    return str(folder)


def run(capsys: Capsys, *words: object) -> tuple[int, str, str]:
    try:
        main(list(map(str, words)))
        status = 0
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


GRID = ("--B", "0,8", "--g", ".25", "--M", "2")


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "TRACE"), ("replay", "TRACE", *GRID), ("replay", "TRACE/manifest.json", *GRID),
        ("compare", "TRACE", "--rules", "strict,asd,mars"), ("show", "TRACE", "--B", "8", "--g", ".25", "--M", "2"),
        ("audit", "TRACE", "--sweep"), ("convert", "TRACE"), ("advise", "TRACE", "--batch", "1"),
    ],
)  # fmt: skip
def test_a_trace_in_a_store_is_read_as_one_on_disk(trace: str, s3: S3, capsys: Capsys, words: tuple[str, ...]) -> None:
    remote = run(capsys, *(word.replace("TRACE", trace) for word in words), "--json")
    objects = {key: n for (method, key), n in s3.requests.items() if method == "GET" and key.endswith(".parquet")}
    local = run(capsys, *(word.replace("TRACE", str(TRACES / NAME)) for word in words), "--json")
    assert remote[0] == local[0]
    assert remote[1].replace(trace, "T") == local[1].replace(str(TRACES / NAME), "T")
    assert objects and set(objects.values()) == {1}, "each object is fetched once"


def test_files_are_written_to_a_store(trace: str, s3: S3, capsys: Capsys, tmp_path: Path) -> None:
    url = s3.url
    printed = [
        run(capsys, "replay", trace, *GRID, "-o", f"{url}/out/sweep.parquet"),
        run(capsys, "plot", f"{url}/out/sweep.parquet", "-o", f"{url}/out/figures"),
        run(capsys, "report", trace, *GRID, "-o", f"{url}/out/page.html"),
        run(capsys, "calibrate", trace, "-o", f"{url}/out/policy.json", "--resamples", "200"),
        run(capsys, "policy", f"{url}/out/policy.json"),
        run(capsys, "policy", f"{url}/out"),
        run(capsys, "audit", trace, "--policy", f"{url}/out/policy.json", "-o", f"{url}/out/audit.csv"),
        run(capsys, "convert", trace, "-o", f"{url}/out/acceptance.jsonl"),
        run(capsys, "convert", f"{url}/out/acceptance.jsonl"),
    ]
    assert [status for status, _, _ in printed] == [0] * len(printed), printed
    names = set(names_in(to_path(f"{url}/out")))
    assert names >= {"sweep.parquet", "page.html", "policy.json", "audit.csv", "acceptance.jsonl", "figures"}
    policy = json.loads(read_octets(to_path(f"{url}/out/policy.json")))
    assert policy["calibration"]["trace"] == trace
    run(capsys, "convert", TRACES / NAME, "-o", tmp_path / "acceptance.jsonl")
    assert read_octets(to_path(f"{url}/out/acceptance.jsonl")) == (tmp_path / "acceptance.jsonl").read_bytes()
    text = "".join(out + err for _, out, err in printed)
    for word in (KEY, SECRET):  # neither in what was printed nor in what was stored
        assert word not in text
        assert not [name for name, data in s3.read().items() if word.encode() in data]


def test_wrong_places_are_told_in_one_line(trace: str, s3: S3, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, what in (
        (("replay", f"{s3.url}/absent"), f"{s3.url}/absent: no such trace"),
        (("replay", f"{s3.url}x/absent"), "no such trace"),
        (("replay", "s3://me:hidden-word@bucket/t"), "must hold no user"),
        (("replay", trace, "-o", f"{trace}/steps-00000.parquet"), "is part of a trace"),
        (("judge", trace, "--policy", "p", "--endpoint", "http://h/v1", "--model", "m", "--cache", f"{s3.url}/c"),
         "cannot read it|is a database"),
        (("calibrate", trace, "-o", f"{s3.url}/policy.json", "--config", f"{s3.url}/none.toml"), "none.toml: cannot"),
    ):  # fmt: skip
        status, out, err = run(capsys, *words)
        assert (status, out) == (2, "") and re.search(what, err), err
        assert len(err.splitlines()) == 1 and "hidden-word" not in err
    import s3fs

    with monkeypatch.context() as patch:
        s3fs.S3FileSystem.clear_instance_cache()
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        patch.setenv("AWS_CONFIG_FILE", "/nowhere")
        status, _, err = run(capsys, "inspect", trace)
        assert status == 2 and "the store cannot be reached: Unable to locate credentials" in err
    s3fs.S3FileSystem.clear_instance_cache()


def test_options_come_from_a_file_in_a_store(trace: str, s3: S3, capsys: Capsys) -> None:
    write_atomically(to_path(f"{s3.url}/flags.toml"), 'B = "0,8"\ng = "0.25"\nM = "2"\n')
    by_file = run(capsys, "replay", trace, "--config", f"{s3.url}/flags.toml", "--json")
    assert by_file[0] == 0 and by_file[1] == run(capsys, "replay", trace, *GRID, "--json")[1]
