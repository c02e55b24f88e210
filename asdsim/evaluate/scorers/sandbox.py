"""Run a program that a model wrote, with its tests, and wait no longer than it was given.

The program runs in one process and the tests in another (see :mod:`asdsim.evaluate.scorers.sandbox_child`), both in a
session, an empty directory and an environment of their own, with limits on memory, CPU time, file size and open files.
On Linux (x86-64, arm64) a seccomp filter refuses, root or not, new processes, ``exec``, sockets of every kind, signals
to others, shared memory that would stay, and changes of a file's mode, owner or times; Landlock, where the kernel has
it, keeps writes inside the directory; root loses its capabilities. What is *not* held: reading files that the user can
read, and, outside Linux, sockets. Elsewhere new processes are refused by a limit that root escapes, so there nothing is
run as root.

``ASDSIM_SANDBOX`` names a command that the processes are started with, such as ``docker run --rm -i --network none
python:3.12-slim`` or ``bwrap --ro-bind / / --dev /dev --unshare-all --die-with-parent``; the command must pass standard
input and output through and accept ``python3 -I -B -c ..`` at its end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_SECONDS = 20.0
"""For two interpreters to start on a busy machine; not part of the program's own time."""

MAX_VERDICT = 1 << 16


def run_program(
    program: str, tests: str, entry_point: str = "", *, timeout: float = 5.0, memory: int = 1 << 30
) -> tuple[bool, str]:
    """Run a program and its tests; return whether they pass, and what happened.

    Parameters
    ----------
    program : str
        Defines functions.
    tests : str
        Calls them: plain ``assert`` lines, or ``check(candidate)`` where there is an entry point. Arguments and results
        cross a pipe as plain values, so a change that a function makes to its argument is not seen.
    entry_point : str
        Function handed to ``check``.
    timeout : float
        Seconds for the program and all its tests.
    memory : int
        Bytes of address space.
    """
    source = (Path(__file__).parent / "sandbox_child.py").read_text(encoding="utf-8")
    prefix = shlex.split(os.environ.get("ASDSIM_SANDBOX", ""))
    python = "python3" if prefix else sys.executable
    folder = tempfile.mkdtemp(prefix="asdsim-")
    job = {
        "program": program, "tests": tests, "entry_point": entry_point, "timeout": timeout, "memory": memory,
        "seconds": math.ceil(timeout) + 1, "folder": "/tmp" if prefix else folder, "source": source,
    }  # fmt: skip
    process = subprocess.Popen(
        [*prefix, python, "-I", "-B", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, cwd=folder, start_new_session=True,
        env=dict(os.environ) if prefix else {"OMP_NUM_THREADS": "1", "TMPDIR": folder},
    )  # fmt: skip
    try:
        verdict = _exchange(process, json.dumps(job).encode(), time.monotonic() + timeout + START_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        shutil.rmtree(folder, ignore_errors=True)
    return verdict == "passed", verdict or "no verdict"


def _exchange(process: subprocess.Popen[bytes], job: bytes, until: float) -> str:
    """Send the job and return what is said, at most ``MAX_VERDICT`` bytes of it and not past ``until``."""
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout, selectors.DefaultSelector() as selector:
        left, said = memoryview(job), bytearray()
        for pipe, event in ((process.stdin, selectors.EVENT_WRITE), (process.stdout, selectors.EVENT_READ)):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, event)
        while len(said) < MAX_VERDICT and (seconds := until - time.monotonic()) > 0:
            for key, _ in selector.select(seconds):
                if key.fileobj is process.stdout:
                    piece = os.read(key.fd, MAX_VERDICT)
                    if not piece:
                        return said.decode("utf-8", "replace")
                    said += piece
                    continue
                try:
                    left = left[os.write(key.fd, left) :]
                except BrokenPipeError:
                    left = left[:0]
                if not left:
                    selector.unregister(process.stdin)
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.close()
    return ""
