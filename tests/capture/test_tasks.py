"""Prompt sets: what each makes of a row, from where, and in which order."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from asdsim.capture.tasks import check_tasks, load_prompts, prompt_formats, without_folder
from asdsim.capture.tasks.sets import BOXED, CONVERTED, SETS
from asdsim.errors import CaptureError, UsageError

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "How many?", "answer": "2 * 900 = <<2*900=1800>>1,800.\n#### 1,800"}],
    "svamp": [
        {"id": "chal-1", "question": "How many?", "answer": 145.0},
        {"ID": "chal-2", "Body": "Ann has 3.5 apples", "Question": "How many?", "Answer": "3.5"},
    ],
    "math500": [{"problem": "Half of $x$?", "answer": "\\frac{x}{2}", "subject": "Algebra"}],
    "humaneval": [{"task_id": "HumanEval/7", "prompt": "def f():\n", "entry_point": "f", "test": "def check(c): pass"}],
    "mbpp": [
        {"task_id": 11, "text": "Double it.", "test_list": ["assert f(1) == 2", "assert f(2) == 4"],
         "test_setup_code": "import math"},
        {"task_id": 12, "prompt": "Halve it.", "test_imports": ["import math"], "test_list": ["assert f(2) == 1"],
         "test": "assert f(4) == 2"},
    ],
    "mmlu": [
        {"subject": "anatomy", "question": "Which? ", "choices": ["a", "b", "c", "d"], "answer": "C"},
        {"subject": "anatomy", "question": "Which?", "choices": ["a", "b", "c", "d"], "answer": 3},
    ],
    "ifeval": [{"key": 1000, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{"num_words": None, "relation": None}]}],
    "mt-bench": [{"question_id": 81, "turns": ["Write.", "Again."]}, {"prompt_id": 5, "prompt": ["1 + 1?", "And 2?"],
                                                                     "reference": ["2", "3"]}],
    "alpaca": [{"instruction": "Sort.", "input": "b, a", "output": "a, b"}, {"instruction": "Go.", "input": ""}],
}  # fmt: skip


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    return path


def test_every_set_has_rows_here() -> None:
    assert set(ROWS) == set(SETS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gsm8k", [("gsm8k/0", "How many?" + BOXED, "1800")]),
        ("svamp", [("svamp/chal-1", "How many?" + BOXED, "145"),
                   ("svamp/chal-2", "Ann has 3.5 apples. How many?" + BOXED, "3.5")]),
        ("math500", [("math500/0", "Half of $x$?" + BOXED, "\\frac{x}{2}")]),
        ("mt-bench", [("mt-bench/81", "Write.", None), ("mt-bench/5", "1 + 1?", "2")]),
        ("alpaca", [("alpaca/0", "Sort.\n\nb, a", None), ("alpaca/1", "Go.", None)]),
    ],
)  # fmt: skip
def test_what_is_asked(tmp_path: Path, name: str, expected: list[tuple[str, str, str | None]]) -> None:
    found = load_prompts(f"{name}:{written(tmp_path, name)}")
    assert [(prompt.id, prompt.text, prompt.reference) for prompt in found] == expected
    assert {prompt.task for prompt in found} == {name}


def test_references_that_are_json(tmp_path: Path) -> None:
    def references(name: str) -> list[Any]:
        return [json.loads(p.reference or "") for p in load_prompts(f"{name}:{written(tmp_path, name)}")]

    assert references("humaneval") == [{"task_id": "HumanEval/7", "entry_point": "f", "test": "def check(c): pass"}]
    assert references("mbpp") == [
        {"task_id": 11, "test": "import math\nassert f(1) == 2\nassert f(2) == 4"},
        {"task_id": 12, "test": "assert f(4) == 2"},
    ]
    assert references("ifeval") == [{"instructions": ["punctuation:no_comma"], "arguments": [{}]}]


def test_mmlu_and_mbpp_prompts(tmp_path: Path) -> None:
    first, second = load_prompts(f"mmlu:{written(tmp_path, 'mmlu')}")
    assert (first.id, first.reference) == ("mmlu/anatomy/0", "C")
    assert (second.id, second.reference) == ("mmlu/anatomy/1", "D")
    assert first.text.endswith("\n\nWhich?\n\nA) a\nB) b\nC) c\nD) d") and "'Answer: $LETTER'" in first.text
    program = load_prompts(f"mbpp:{written(tmp_path, 'mbpp')}")[0]
    assert program.text.endswith("Double it.\nYour code should pass these tests:\nassert f(1) == 2\nassert f(2) == 4")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "a", "answer": "18"}, "line 1: answer is '18', not a worked answer"),
        ("mmlu", {"subject": "s", "question": "q", "choices": ["a"], "answer": 0}, "choices is .*, not four choices"),
        ("mmlu", {"subject": "s", "question": "q", "choices": list("abcd"), "answer": 4}, "answer is 4, not a letter"),
        ("mmlu", {"subject": "s", "question": "q", "choices": list("abcd"), "answer": True}, "answer is True, not a"),
        ("svamp", {"id": "1", "question": "q", "answer": "many"}, "answer is 'many', not a number"),
        ("ifeval", {"key": 1, "prompt": "p", "instruction_id_list": ["a"], "kwargs": []}, "kwargs is"),
        ("mt-bench", {"turns": []}, "turns is"),
        ("math500", {"problem": "p"}, "line 1: answer is missing"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, name: str, row: dict[str, Any], message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UsageError, match=message):
        load_prompts(f"{name}:{tmp_path / 'rows.jsonl'}")


def test_a_split_comes_from_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CaptureError, match=re.escape("cannot load openai/gsm8k from the hub")):
        load_prompts("gsm8k:test", offline=True)
    repository, commit = tmp_path / "datasets--openai--gsm8k", "0" * 40
    (repository / "refs" / CONVERTED).parent.mkdir(parents=True)
    (repository / "refs" / CONVERTED).write_text(commit)
    folder = repository / "snapshots" / commit / "main" / "test"
    folder.mkdir(parents=True)
    for n, answer in enumerate(("a #### 1", "b #### 2")):
        parquet.write_table(pa.table({"question": ["How many?"], "answer": [answer]}), folder / f"000{n}.parquet")
    found = load_prompts("gsm8k:test", offline=True)
    assert [(prompt.id, prompt.reference) for prompt in found] == [("gsm8k/0", "1"), ("gsm8k/1", "2")]
    with pytest.raises(CaptureError, match="has no main/train"):
        load_prompts("gsm8k:train", offline=True)


def test_shuffled_then_cut(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{n}?", "answer": str(n)}) + "\n" for n in range(50)))
    task = f"math500:{path}"
    everything = [prompt.id for prompt in load_prompts(task, shuffle=3)]
    assert sorted(everything) == sorted(prompt.id for prompt in load_prompts(task))
    assert everything == sorted(everything, key=lambda name: hashlib.sha256(f"3/{name}".encode()).hexdigest())
    part = [prompt.id for prompt in load_prompts(task, shuffle=3, offset=10, limit=5)]
    assert part == everything[10:15]
    assert everything != [prompt.id for prompt in load_prompts(task, shuffle=4)]


def test_names_of_tasks(tmp_path: Path) -> None:
    path = tmp_path / "a,b.jsonl"
    path.write_text(json.dumps(ROWS["math500"][0]))
    names = [f"math500:{path}", "gsm8k:test", "mbpp:plus", f"jsonl:{path}"]
    assert check_tasks(",".join(names)) == names
    assert [without_folder(name) for name in names] == [
        "math500:a,b.jsonl",
        "gsm8k:test",
        "mbpp:plus",
        "jsonl:a,b.jsonl",
    ]
    assert prompt_formats(",".join(names))["mbpp"].startswith("mbpp_instruct of lm-eval")
    for bad in ("gsm8k:full", "humaneval:x", f"ifeval:{tmp_path}"):
        with pytest.raises(UsageError, match="no such split or file"):
            check_tasks(bad)
