"""Children to be killed: a process without threads imports a module once, then forks one child per call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SERVER = """
import importlib, json, os, sys, traceback
module = importlib.import_module(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            print(os.getpid(), flush=True)
            getattr(module, name)(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Runs functions of a module, one after another, each in a child of its own.

    Parameters
    ----------
    module : str
        Its functions take text, and may print lines.
    """

    def __init__(self, module: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, module], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.status: int | None = None
        assert self.line() == "ready"

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def start(self, function: str, *arguments: object) -> int:
        """Start a child; return its process id."""
        assert self.process.stdin is not None
        self.status = None
        self.process.stdin.write(json.dumps([function, *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        return int(self.line())

    def line(self) -> str:
        """Return the next line that the child prints; empty once it has ended."""
        assert self.process.stdout is not None
        if self.status is not None:
            return ""
        line = self.process.stdout.readline()
        assert line, "the process that forks has ended"
        if line.startswith("exit "):
            self.status = int(line.removeprefix("exit "))
            return ""
        return line.rstrip("\n")

    def wait(self) -> int:
        """Return the child's exit status, negative if a signal ended it."""
        while self.status is None:
            self.line()
        return self.status
