"""The kernels under other circumstances: bounds checked, not compiled, read-only install, a caller's process pools."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from asdsim.rules.asd import Reading
from asdsim.trace.graph import build_graph
from asdsim.walk.breakpoints import breakpoints_of
from asdsim.walk.off_trace import off_trace_code
from asdsim.walk.recorded import path_arrays
from asdsim.walk.sweep import sweep_graph, walk_grid
from tests.twins.cases import MODES, cases, small_grid

ROOT = Path(__file__).parents[2]

CHECK = """
import sys
from tests.twins.test_modes import digest
print(digest(sys.argv[1:] or None))
"""


def digest(names: list[str] | None = None, pairs_only: bool = False) -> str:
    """Return a hash of what every way to walk says of every case (all ways must agree on the way)."""
    import hashlib

    sum_of_all = hashlib.sha256()
    for name in names or list(cases()):
        graph = build_graph(cases()[name])
        for mode in MODES:
            walks = walk_grid(graph, small_grid(), off_trace=mode, device="cpu", threads=2)
            for values in (walks.counts, walks.spent, walks.edge, walks.histogram):
                sum_of_all.update(np.ascontiguousarray(values).tobytes())
            if pairs_only:
                continue
            ways = ["pairs", "boxes"] + (["recorded"] if mode == "recorded" and path_arrays(graph) else [])
            found = [sweep_graph(graph, small_grid(), off_trace=mode, device="cpu", by=by, threads=2) for by in ways]
            for figure, values in found[0].items():
                for other in found[1:]:
                    assert np.array_equal(values, other[figure], equal_nan=values.dtype.kind == "f"), (name, mode)
                sum_of_all.update(np.ascontiguousarray(values).tobytes())
            for points in breakpoints_of(
                graph, [(0.4, 2.0), (np.inf, np.inf)], off_trace_code(mode), Reading(), threads=2
            ):
                sum_of_all.update(points.tobytes())
    return sum_of_all.hexdigest()


def in_process(cwd: Path = ROOT, names: tuple[str, ...] = (), **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *names], cwd=cwd, env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_no_index_is_out_of_bounds(tmp_path: Path) -> None:
    """numba checks every index; the cache is another one, since it does not tell such code from other code."""
    assert in_process(NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path)) == digest()


def test_a_bounds_check_would_have_noticed(tmp_path: Path) -> None:
    script = "import numba, numpy as np\n@numba.njit\ndef f(x):\n    return x[3]\nf(np.zeros(3))\n"
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode and "out of bounds" in done.stderr


FEW = ("ragged K with 0", "tie", "eos inside a block", "limit inside a block", "limit of one", "K of 0", "no request")


def test_sources_run_without_a_compiler() -> None:
    assert in_process(names=FEW, NUMBA_DISABLE_JIT="1") == digest(list(FEW))


@pytest.mark.parametrize("name", ["strict path only", "one empty request"])
def test_recorded_order_runs_without_a_compiler(name: str) -> None:
    assert in_process(names=(name,), NUMBA_DISABLE_JIT="1") == digest([name])


def test_a_read_only_install_without_a_home_works(tmp_path: Path) -> None:
    """Nowhere to keep compiled code: it is compiled in memory."""
    install = tmp_path / "install"
    for part in ("asdsim", "tests"):
        shutil.copytree(ROOT / part, install / part, ignore=shutil.ignore_patterns("__pycache__", "*.nb?"))
    script = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "import asdsim; assert asdsim.__file__.startswith(os.getcwd()), asdsim.__file__\n"
        "from asdsim.rules.asd import Reading; from asdsim.walk import "
        "batch, boxes, breakpoints, cpu, ledgers, prepared, recorded, sums\n"
        "reading = Reading()\n"  # numba looks for a place when a function is made ready, before it is compiled
        "for module in (batch, boxes, breakpoints, cpu, recorded): module.kernel(reading)\n"
        "batch.kernel(), batch.follow_kernel(reading), prepared._rank_kernel(reading)\n"
        "ledgers.kernel(), sums.store_kernel()\n"
        "from tests.twins.test_modes import digest; print(digest(['tie', 'strict path only'], pairs_only=True))\n"
    )
    folders = [folder for folder in (install, *install.rglob("*")) if folder.is_dir()]
    environment = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    environment |= {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", "IPYTHONDIR": "/nonexistent"}
    command = [sys.executable, "-c", script]
    if os.geteuid() == 0:  # root writes through permissions: leave the rights of root behind
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv to give up root")
        for folder in (tmp_path, *tmp_path.parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
        python = Path(sys.executable).resolve()
        if any(not parent.stat().st_mode & stat.S_IXOTH for parent in python.parents):
            command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *command]
        else:
            command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = subprocess.run(
            command, cwd=install, env=environment, capture_output=True, text=True, check=False, timeout=280
        )
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == digest(["tie", "strict path only"], pairs_only=True)
    assert not list(install.rglob("*.nbi")), "nothing was written"


def test_no_cache_directory_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback itself: numba says that it has no place for a cache, and the function is compiled without one."""
    import numba

    from asdsim.walk.compiled import compile_cached

    def jit(**options: object):  # type: ignore[no-untyped-def]
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available for file")
        return numba.njit(**options)

    assert compile_cached(jit, lambda x: x + 1)(2) == 3


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_caller_may_use_processes(method: str) -> None:
    """Threads of ours have ended before a call returns, so a fork after it is sound; spawn starts anew."""
    names = ["tie", "strict path only"]
    expected = digest(names)  # two threads, in this process, before the fork
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        assert list(pool.map(digest, [names, names], timeout=200)) == [expected, expected]
    assert digest(names) == expected
