"""Run the commands of docs/guide.md again and write their outputs into the page.

    python analysis/guide.py [--models]

Commands that need a model (capture, cover, verify, timing) are left as they are; audit, which needs the tokenizer, is
run with ``--models``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/guide.md")
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
LIVE = ("capture", "cover", "verify", "timing")


def run(line: str, policy: Path) -> str:
    """Return what a command prints, results first and remarks after."""
    words = [str(policy) if word == "policy.json" else word for word in shlex.split(line)[1:]]
    done = subprocess.run([sys.executable, "-m", "asdsim", *words], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).replace(str(policy), "policy.json")


def refreshed(block: str, policy: Path, models: bool) -> str:
    """Return a block with its commands' outputs regenerated."""
    parts = re.split(r"^(?=\$ )", block, flags=re.MULTILINE)
    made = []
    for part in filter(None, parts):
        line = part.partition("\n")[0]
        command = shlex.split(line)[2]
        skip = command in LIVE or (command == "audit" and not models)
        made.append(part if skip else f"{line}\n{run(line[2:], policy)}")
    return "".join(made)


def page(text: str, models: bool) -> str:
    """Return the page with outputs regenerated."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.json"
        return BLOCK.sub(lambda found: f"```console\n{refreshed(found[1], policy, models)}```", text)


def main() -> None:
    """Rewrite the page."""
    os.chdir(ROOT)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), "--models" in sys.argv[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
