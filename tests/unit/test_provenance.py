"""What files say they were made with."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim import provenance

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_that_of_the_package_or_of_the_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asdsim.__version__ == provenance.version() == metadata.version("asdsim")

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    provenance.version.cache_clear()
    assert f'version = "{provenance.version()}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert provenance.software("numpy") == {"asdsim": provenance.version(), "python": platform.python_version()}
    monkeypatch.setattr(provenance, "__file__", "/nowhere/asdsim/provenance.py")
    provenance.version.cache_clear()
    assert provenance.version() == "0+unknown"
    provenance.version.cache_clear()


def test_one_dictionary() -> None:
    made = provenance.provenance("asdsim plot x", {"sweep": "x.parquet"}, "numpy", "no-such-package")
    assert made == {
        "command": "asdsim plot x",
        "software": {"asdsim": asdsim.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "source": {"sweep": "x.parquet"},
    }


def test_a_trace_is_named_by_its_checksum() -> None:
    trace = asdsim.load(ROOT / "traces" / "smollm2-lookup")
    assert provenance.trace_source(trace) == {
        "asdsim": asdsim.__version__, "trace": str(trace.path), "manifest_checksum": trace.manifest.checksum,
    }  # fmt: skip


def test_help_looks_no_version_up() -> None:
    code = (
        "import sys\nfrom asdsim.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\nprint('importlib.metadata' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False" and "--version" in out
    out = subprocess.run(
        [sys.executable, "-m", "asdsim", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert out == f"asdsim, version {asdsim.__version__}\n"
