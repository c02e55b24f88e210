"""What a program that a model wrote may do, and that nothing it does makes asdsim wait for it or believe it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from asdsim.evaluate.scorers import sandbox_child
from asdsim.evaluate.scorers.sandbox import run_program

TESTS = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"
linux = pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")

EQUAL_TO_ALL = """
class Any:
    def __eq__(self, other): return True
def add(a, b): return Any()
"""
WRITES_TO_THE_JUDGE = """
import os
opened = 0
for name in os.listdir(f"/proc/{os.getppid()}/fd"):
    try:
        os.write(os.open(f"/proc/{os.getppid()}/fd/{name}", os.O_WRONLY), b"passed")
        opened += 1
    except OSError:
        pass
def add(a, b): return a + b + opened
"""
NAMES_A_BUILTIN = """
class NAME(Exception): pass
def add(a, b):
    raise NAME("__import__('os').write(3, b'passed') or [__import__('os').write(i, b'passed') for i in range(4, 12)]")
"""
FLOODS = """
import os
for descriptor in range(3, 64):
    try:
        while True: os.write(descriptor, b"x" * 65536)
    except OSError:
        pass
def add(a, b): return a + b
"""


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        ("return a + b", True),
        ("return a - b", False),
        ("return (", False),
        ("while True: pass", False),
        ("return len('x' * (1 << 33)) and a + b", False),
        ("open('file', 'w').write('text' * 9999); return a + b", False),
        ("import os; os._exit(0)", False),
        ("print('passed'); raise SystemExit(0)", False),
        ("import os; return a + b if 'HOME' not in os.environ and 'PATH' not in os.environ else 0", True),
        ("import threading; t = threading.Thread(target=len, args='x'); t.start(); t.join(); return a + b", True),
        ("open('file', 'w').write('text'); return a + b", True),
    ],
)
def test_within_limits(body: str, passes: bool) -> None:
    start = time.monotonic()
    assert run_program(f"def add(a, b):\n    {body}\n", TESTS, "add", timeout=1.0, memory=1 << 29)[0] is passes
    assert time.monotonic() - start < 20


@linux
@pytest.mark.parametrize(
    "line",
    [
        "import posix; posix.fork() or __import__('time').sleep(9)",
        "import os; os.fork(); os.setsid()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socketpair()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
        "import os; os.chmod('/tmp', 0o1777)",
        "import os; os.truncate('/etc/hostname', 0)",
        "import os; os.utime('.')",
        "import os; os.sched_setaffinity(os.getppid(), {0})",
        "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (9, 9))",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 9)",
        "import fcntl, os; fcntl.fcntl(os.open('/dev/null', 0), 8, os.getppid())",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); c.shmget(0, 4096, 0o1600) < 0 or 1 / 0; "
        "raise PermissionError(ctypes.get_errno())",
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); "
        "c.syscall(129, os.getppid(), 9, ctypes.create_string_buffer(128)) < 0 or 1 / 0; "
        "raise PermissionError(ctypes.get_errno())",
        "import ctypes; ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0) < 0 or 1 / 0; raise PermissionError(1)",
    ],
)
def test_refused_by_the_kernel(line: str) -> None:
    passed, why = run_program(f"{line}\ndef add(a, b):\n    return a + b\n", TESTS, "add", timeout=5.0)
    assert not passed and "PermissionError" in why


@linux
def test_a_program_cannot_forge_the_verdict() -> None:
    assert run_program(EQUAL_TO_ALL, TESTS, "add") == (False, "failed: AssertionError: ")
    assert run_program(WRITES_TO_THE_JUDGE, TESTS, "add") == (True, "passed")  # honest, and could open nothing
    for name in ("exec", "eval", "exit", "__import__", "SystemExit", "KeyboardInterrupt", "print"):
        run_by_name = NAMES_A_BUILTIN.replace("NAME", name)
        assert run_program(run_by_name, TESTS, "add")[1].startswith("failed: "), name


@linux
def test_a_flood_is_not_collected() -> None:
    start = time.monotonic()
    passed, why = run_program(FLOODS, TESTS, "add", timeout=2.0)
    assert not passed and why in ("failed: an answer of more than 8 MB", "timed out")
    passed, _ = run_program("while True: print('x' * 65536)\ndef add(a, b): ...", TESTS, "add", timeout=1.0)
    assert not passed and time.monotonic() - start < 25


@linux
def test_a_child_that_leaves_its_session_is_not_waited_for(tmp_path, monkeypatch) -> None:
    """Without the filter, as under a launcher of the user's: a child holds the pipe in a session of its own."""
    escape = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n"
        "sys.stdin.buffer.read()\nsys.stdout.write('x' * 10**7)\n"
    )
    launcher = tmp_path / "launcher.py"
    launcher.write_text(escape, encoding="utf-8")
    monkeypatch.setenv("ASDSIM_SANDBOX", f"{sys.executable} {launcher}")
    monkeypatch.setattr("asdsim.evaluate.scorers.sandbox.START_SECONDS", 0.5)
    start = time.monotonic()
    assert run_program("", TESTS, "add", timeout=0.5)[0] is False
    assert time.monotonic() - start < 10
    subprocess.run(["pkill", "-f", str(launcher)], check=False)


def test_a_launcher_of_the_users(monkeypatch) -> None:
    monkeypatch.setenv("ASDSIM_SANDBOX", "env -u HOME")
    assert run_program("def add(a, b): return a + b", TESTS, "add", timeout=5.0) == (True, "passed")


VALUES = [
    None, True, 0, -7, 10**5000, 0.1, float("inf"), "a\u2028b", b"\x00\xff", 1 + 2j, [1, [2]], (1, "x"), {1, 2},
    frozenset({3}), {"k": (1, None), 2: []},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_cross_the_pipe_whole(value: object) -> None:
    sent = json.loads(json.dumps(sandbox_child.encode(value, None)))
    back = sandbox_child.decode(sent, None)
    assert back == value and type(back) is type(value)


def test_tests_without_an_entry_point_use_the_programs_names() -> None:
    program = (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def total(pairs): return sum(p.a + p.b for p in pairs)\nLIMIT = 5\n"
        "def bad(x):\n    raise ValueError('no')\n"
    )
    tests = (
        "assert total([Pair(1, 2), Pair(3, 4)]) == 10\nassert Pair(1, 2).b == 2 and LIMIT == 5\n"
        "try:\n    bad(1)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False\n"
    )
    assert run_program(program, tests) == (True, "passed")
    assert run_program(program, "assert missing(1) == 2")[1] == "failed: NameError: name 'missing' is not defined"
