"""What a fresh clone relies on: metadata, pins, make targets, and the entry of continuous integration."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import asdsim

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKE = shutil.which("make")

needs_make = pytest.mark.skipif(MAKE is None, reason="make is not installed")


def pins() -> dict[str, SpecifierSet]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {item.name: item.specifier for item in map(Requirement, (line for line in lines if line and line[0] != "#"))}


def test_one_version_everywhere() -> None:
    assert PROJECT["version"] == asdsim.__version__
    assert f"version: {asdsim.__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()


def test_core_is_free_of_models_and_of_cuda() -> None:
    core = {Requirement(item).name for item in PROJECT["dependencies"]}
    assert {"numba", "numpy", "pyarrow", "polars", "matplotlib", "click"} <= core
    assert not core & {"torch", "transformers", "accelerate", "numba-cuda", "cuda-toolkit"}
    assert set(PROJECT["optional-dependencies"]) == {
        "browser", "capture", "cuda12", "cuda13", "dev", "gs", "quality", "quantize", "ray", "s3",
    }  # fmt: skip


def test_every_core_range_has_a_lower_bound_that_the_pin_respects() -> None:
    pinned = pins()
    for item in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["capture"]):
        assert any(part.operator in (">=", "==") for part in item.specifier), item
        (pin,) = pinned[item.name]
        assert item.specifier.contains(pin.version), f"{item} and the pin {pin}"


def test_command_and_typing_marker() -> None:
    assert PROJECT["scripts"] == {"asdsim": "asdsim.cli:main"}
    assert (ROOT / "asdsim" / "py.typed").is_file()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with the make file, a stand-in for Python, and an installer that fails while `broken` exists."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    installer = tmp_path / "installer"
    installer.write_text('#!/bin/sh\necho "$@" >> "$LOG"\nif [ -e "$BROKEN" ]; then exit 1; fi\n')
    python = tmp_path / "python-stand-in"
    python.write_text('#!/bin/sh\nif [ "$1" = -m ]; then mkdir -p "$3/bin"; cp -p "$INSTALLER" "$3/bin/python"; fi\n')
    for path in (installer, python):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def make(folder: Path, *words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST"))},
        "LOG": str(folder / "log"),
        "BROKEN": str(folder / "broken"),
        "INSTALLER": str(folder / "installer"),
    }
    if path is not None:
        environment["PATH"] = path
    assert MAKE is not None
    return subprocess.run([MAKE, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def installs(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


@needs_make
def test_an_install_that_failed_is_tried_again_and_a_finished_one_is_kept(clone: Path) -> None:
    ready, python = ".venv/.ready-dev", f"PYTHON={clone / 'python-stand-in'}"
    (clone / "broken").touch()
    assert make(clone, ready, python).returncode != 0
    assert not (clone / ready).exists()
    (clone / "broken").unlink()
    assert make(clone, ready, python).returncode == 0
    assert len(installs(clone)) == 2
    assert "-c constraints.txt -e .[capture,cuda13,dev]" in installs(clone)[-1]
    assert make(clone, ready, ".venv/.ready-run", python).returncode == 0  # what tests need is enough for the demo
    assert len(installs(clone)) == 2
    newer = (clone / ready).stat().st_mtime + 5
    os.utime(clone / "constraints.txt", (newer, newer))
    assert make(clone, ready, python).returncode == 0
    assert len(installs(clone)) == 3


@needs_make
def test_half_an_environment_is_thrown_away(clone: Path) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "left-over").touch()
    assert make(clone, ".venv/.ready-run", f"PYTHON={clone / 'python-stand-in'}").returncode == 0
    assert not (clone / ".venv" / "left-over").exists()
    assert installs(clone)[-1].endswith("-e .[capture]")


@needs_make
def test_no_python_is_one_clear_line(clone: Path) -> None:
    tools = clone / "tools"
    tools.mkdir()
    for name in ("rm", "touch", "mkdir"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    done = make(clone, ".venv/.ready-run", path=str(tools))
    assert done.returncode == 2
    assert "no Python >= 3.11" in done.stderr
    assert not (clone / ".venv").exists()


@needs_make
def test_what_the_targets_run(clone: Path) -> None:
    text = make(clone, "-n", "test").stdout
    order = [text.index(word) for word in ("ruff check", "ruff format --check", "mypy", "lint-imports", "pytest")]
    assert order == sorted(order)
    assert "asdsim demo -o demo-out" in make(clone, "-n", "demo").stdout
    for target in ("figures", "gpu", "bench", "lint", "clean", "help"):
        assert make(clone, "-n", target).returncode == 0, target


def test_continuous_integration_runs_what_it_should_from_anywhere(tmp_path: Path) -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    stand_in = tmp_path / "make"
    stand_in.write_text('#!/bin/sh\necho "$PWD $CI $*"\nif read line; then echo input; fi\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, input="a line", timeout=60
    )
    assert done.stdout.split() == [str(ROOT), "true", "test", "slow"]


def test_committed_figures_are_whole_and_of_the_committed_traces() -> None:
    for told in sorted((ROOT / "figures").rglob("*.json")):
        record = json.loads(told.read_text(encoding="utf-8"))
        assert told.with_suffix(".svg").is_file() and told.with_suffix(".png").is_file(), told
        trace = record["source"].get("trace")
        if trace is not None:
            manifest = json.loads((ROOT / trace / "manifest.json").read_text(encoding="utf-8"))
            assert record["source"]["manifest_checksum"] == manifest["checksum"], f"{told}: run `make figures`"
