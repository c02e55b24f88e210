"""Prompt sets from the hub, over HTTP: a child process reads from a stand-in that serves the parquet branch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.hub import COMMIT, hub, parquet_bytes

LOAD = """
import json, sys
from asdsim.capture.tasks import load_prompts
from asdsim.capture.tasks.shots import parse_shots
from asdsim.errors import AsdsimError
spec, shots, offline = sys.argv[1], sys.argv[2] or None, sys.argv[3] == "offline"
try:
    found = load_prompts(spec, shots=parse_shots(shots), offline=offline)
except AsdsimError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps([[prompt.id, prompt.text, prompt.reference] for prompt in found]))
"""


def load(address: str, cache: Path, spec: str, shots: str = "", offline: str = "") -> Any:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE", "TRANSFORMERS_"))
    }
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, spec, shots, offline], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def row(question: str, answer: int) -> dict[str, str]:
    return {"question": question, "answer": f"So it is {answer}.\n#### {answer}"}


def test_splits_and_examples_come_from_the_parquet_branch(tmp_path: Path) -> None:
    gsm8k = {
        "main/test/0000.parquet": parquet_bytes([row("How many ducks?", 3)]),
        "main/test/0001.parquet": parquet_bytes([row("How many hens?", 4), row("How many eggs?", 5)]),
        "main/train/0000.parquet": parquet_bytes([row(f"How many of {n}?", n) for n in range(40)]),
        "socratic/test/0000.parquet": parquet_bytes([row("Not asked for", 9)]),
    }
    with hub({"openai/gsm8k": gsm8k}) as (address, asked):
        found = load(address, tmp_path, "gsm8k:test")
        assert [(name, reference) for name, _, reference in found] == [
            ("gsm8k/0", "3"), ("gsm8k/1", "4"), ("gsm8k/2", "5"),
        ]  # fmt: skip
        got = sorted(line for line in asked if line.startswith("GET /datasets"))
        prefix = f"GET /datasets/openai/gsm8k/resolve/{COMMIT}/main"
        assert got == [f"{prefix}/test/0000.parquet", f"{prefix}/test/0001.parquet"]
        asked.clear()
        shots = load(address, tmp_path, "gsm8k:test", "2")
        assert [line for line in asked if line.startswith("GET /datasets")] == [f"{prefix}/train/0000.parquet"]
        examples = [text.split("\n\n") for _, text, _ in shots]
        assert all(len(blocks) == 3 for blocks in examples) and examples[0][:2] == examples[1][:2]
        assert examples[1][2] == "Question: How many hens?\nAnswer:" and examples[0][0].startswith(
            "Question: How many of"
        )
        missing = load(address, tmp_path, "mmlu:test")
        assert missing.startswith("cannot load cais/mmlu from the hub") and "name a file: mmlu:PATH" in missing
        without = load(address, tmp_path, "gsm8k:test", "41")
        assert "40 examples for gsm8k/0, not 41" in without
    # The hub is gone; what was read once is in the cache.
    assert load(address, tmp_path, "gsm8k:test", "2", "offline") == shots
