"""Do two commits print the same figures? Runs the commands on every committed trace and compares field by field.

    python analysis/same_figures.py BEFORE [AFTER]        # commits; AFTER defaults to the working tree
    python analysis/same_figures.py BEFORE --only replay,compare --traces smollm2-eagle3

Each commit is checked out in a temporary worktree and run with the interpreter that runs this script, on the traces of
the working tree. Numbers must be equal to the last bit. A field or row that only one side has is listed, not compared;
so is a number on one side that is null on the other. Exit status 1 if anything differs. Takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDE = ["--B", "0:8:1", "--g", ".05:.5:.15", "--M", "1,2,inf"]
CHOICE = ["--B", "0,4,8", "--g", ".1,.25,.5", "--M", "1,2"]
COMMANDS: dict[str, list[str]] = {
    "replay": ["replay", "TRACE", "--B", "0,2,4,8", "--g", ".1,.25,.5", "--M", "1,2", "--off-trace", "stop"],
    **{f"replay-{mode}": ["replay", "TRACE", *WIDE, "--off-trace", mode] for mode in ("pooled", "recorded", "aligned")},
    "compare": ["compare", "TRACE"],
    "compare-level": ["compare", "TRACE", "--level", "8"],
    "calibrate": ["calibrate", "TRACE", *CHOICE, "-o", "POLICY"],
    "audit": ["audit", "TRACE", "--policy", "POLICY"],
    "fidelity": ["fidelity", "TRACE"],
}
IGNORED = {"trace", "device", "seconds", "policy", "calibration", "asdsim"}
"""Fields that name a place or a version rather than a figure."""


@contextlib.contextmanager
def tree(commit: str | None) -> Iterator[Path]:
    """Check a commit out; None is the working tree."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(path), commit], cwd=ROOT, check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, check=True)


def run(source: Path, trace: Path, names: list[str]) -> dict[str, Any]:
    """Return what each command prints as JSON; a refusal is its exit status and message."""
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    printed: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            words = {"TRACE": str(trace), "POLICY": f"{folder}/policy.json"}
            arguments = [words.get(item, item) for item in COMMANDS[name]]
            done = subprocess.run(
                [sys.executable, "-m", "asdsim", *arguments, "--json"],
                cwd=source,
                env=env,
                capture_output=True,
                text=True,
            )
            printed[name] = json.loads(done.stdout) if done.stdout.strip() else {"exit status": done.returncode}
    return printed


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every number, text and null of a JSON value with the keys that lead to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in IGNORED:
                yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from leaves(item, (*path, str(number)))
    else:
        yield path, value


def main() -> int:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--only", default=",".join(COMMANDS))
    parser.add_argument("--traces", default="")
    options = parser.parse_args()
    names = options.only.split(",")
    traces = [path.parent for path in sorted((ROOT / "traces").glob("*/manifest.json"))]
    traces = [path for path in traces if not options.traces or path.name in options.traces.split(",")]
    equal, differ, alone, nulled = 0, 0, Counter[str](), Counter[str]()
    with tree(options.before) as old, tree(options.after) as new:
        for trace in traces:
            before, after = run(old, trace, names), run(new, trace, names)
            for name in names:
                one, other = dict(leaves(before[name])), dict(leaves(after[name]))
                for path in one.keys() ^ other.keys():
                    alone[f"{name}: {path[-1]} ({'before' if path in one else 'after'} only)"] += 1
                for path in one.keys() & other.keys():
                    if one[path] == other[path]:
                        equal += 1
                    elif one[path] is None or other[path] is None:
                        nulled[f"{name}: {path[-1]} ({'before' if one[path] is None else 'after'} null)"] += 1
                    else:
                        differ += 1
                        print(f"{trace.name} {name} {'/'.join(path)}: {one[path]!r} before, {other[path]!r} after")
            print(f"{trace.name}: done", file=sys.stderr)
    for title, counts in (("fields of one side only", alone), ("null on one side", nulled)):
        print(f"{title}: {sum(counts.values())}")
        for name, count in sorted(counts.items()):
            print(f"    {count:6} {name}")
    print(f"{equal} values equal, {differ} differ, on {len(traces)} traces under {len(names)} commands")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
