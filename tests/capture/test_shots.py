"""Few-shot prompts: the words of lm-eval's formats, which examples are taken, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asdsim.capture.prompts import Encoder
from asdsim.capture.tasks import Message, Prompt, load_prompts, prompt_formats
from asdsim.capture.tasks.shots import parse_shots
from asdsim.errors import UsageError
from asdsim.evaluate.scorers import scorer_name
from asdsim.trace import read_trace
from tests.capture.conftest import word_tokenizer
from tests.capture.test_cli import Capsys, run, usual

GSM8K = [{"question": f"Of {n}?", "answer": f"<<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"} for n in range(9)]
MMLU = [
    {"subject": subject, "question": f" {subject} {n}? ", "choices": ["w", "x", "y", "z"], "answer": n % 4}
    for n in range(4) for subject in ("college_physics", "virology")
]  # fmt: skip
MBPP = [
    {"task_id": n, "text": f"Task {n}.", "code": f"def f{n}():\r\n  return {n}",
     "test_list": [f"assert f{n}() == {n}"] * 4}
    for n in range(1, 6)
]  # fmt: skip


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(folder: Path, name: str, asked: list[Any], pool: list[Any], count: int, seed: int = 0) -> list[Prompt]:
    task, shots = written(folder / "asked.jsonl", asked), written(folder / "pool.jsonl", pool)
    return load_prompts(f"{name}:{task}", shots=parse_shots(f"{count}:{shots}", seed))


def test_gsm8k_is_asked_as_lm_eval_does(tmp_path: Path) -> None:
    (prompt,) = load(tmp_path, "gsm8k", [{"question": "How many?", "answer": "#### 1,800"}], GSM8K[:1], 1)
    assert prompt.text == "Question: Of 0?\nAnswer: <<0+1=1>>1.\n#### 1\n\nQuestion: How many?\nAnswer:"
    assert prompt.messages == (
        Message("user", "Question: Of 0?\nAnswer:"), Message("assistant", "<<0+1=1>>1.\n#### 1"),
        Message("user", "Question: How many?\nAnswer:"),
    )  # fmt: skip
    assert (prompt.id, prompt.reference) == ("gsm8k/0", "1800")


def test_examples_are_drawn_by_seed_the_same_for_all_and_never_the_question_itself(tmp_path: Path) -> None:
    found = load(tmp_path, "gsm8k", GSM8K, GSM8K, 3)
    taken = [[message.content for message in prompt.messages[:-1:2]] for prompt in found]
    for prompt, examples in zip(found, taken, strict=True):
        assert prompt.messages[-1].content not in examples and len(set(examples)) == 3
    others = [examples for prompt, examples in zip(found, taken, strict=True) if prompt.messages[-1].content not in
              {text for shots in taken for text in shots}]  # fmt: skip
    assert len(others) == 5 and all(examples == others[0] for examples in others)
    again = load(tmp_path, "gsm8k", GSM8K, GSM8K[::-1], 3)
    assert [prompt.text for prompt in again] == [prompt.text for prompt in found]  # whatever the order of the pool
    assert load(tmp_path, "gsm8k", GSM8K, GSM8K, 3, seed=1)[0].text != found[0].text
    with pytest.raises(UsageError, match="8 examples for gsm8k/0, not 9"):
        load(tmp_path, "gsm8k", GSM8K, GSM8K, 9)


def test_mmlu_takes_the_first_of_the_subject_and_asks_for_the_letter(tmp_path: Path) -> None:
    asked = [{"subject": "college_physics", "question": "Why?", "choices": list("abcd"), "answer": "C"}]
    (prompt,) = load(tmp_path, "mmlu", asked, MMLU, 2)
    about = "The following are multiple choice questions (with answers) about college physics."
    choices = "A. w\nB. x\nC. y\nD. z\nAnswer:"
    assert prompt.text == (
        f"{about}\n\ncollege_physics 0?\n{choices} A\n\ncollege_physics 1?\n{choices} B\n\n"
        "Why?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    )
    assert [message.role for message in prompt.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert (prompt.messages[0].content, prompt.messages[2].content, prompt.reference) == (about, "A", "C")


def test_mbpp_takes_tasks_from_the_second_on(tmp_path: Path) -> None:
    asked = [{"task_id": 11, "text": "Double it.", "test_list": ["assert f(1) == 2"]}]
    (prompt,) = load(tmp_path, "mbpp", asked, MBPP, 3)
    answers = [message.content for message in prompt.messages if message.role == "assistant"]
    assert answers == [f"```python\ndef f{n}():\r\n  return {n}\n```" for n in (2, 3, 4)]
    tests = "\n".join(["assert f2() == 2"] * 3)
    head = "You are an expert Python programmer, and here is your task:\n"
    assert prompt.text.startswith(f"{head}Task 2.\nYour code should pass these tests:\n{tests}\n```python\ndef f2")
    assert prompt.text.endswith(f"```\n\n{head}Double it.\nYour code should pass these tests:\nassert f(1) == 2")


def test_with_a_chat_template_examples_are_turns_and_without_one_text(tmp_path: Path) -> None:
    (prompt,) = load(tmp_path, "gsm8k", [{"question": "w3", "answer": "#### 4"}], GSM8K[:1], 1)
    words = word_tokenizer()
    words.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    seen: list[str] = []
    words_of = type(words).__call__

    class Listening(type(words)):  # type: ignore[misc]
        def __call__(self, text: str, **more: Any) -> Any:
            seen.append(text)
            return words_of(self, text, **more)

    words.__class__ = Listening
    Encoder(words).ids(prompt)
    Encoder(words, template=False).ids(prompt)
    turns = "[user] Question: Of 0?\nAnswer: [assistant] <<0+1=1>>1.\n#### 1 [user] Question: w3\nAnswer: "
    assert seen == [turns, prompt.text]


def test_a_capture_names_format_and_number_of_examples(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    task = written(tmp_path / "q.jsonl", [{"question": "w1 w2", "answer": "#### 3"}])
    pool = written(tmp_path / "pool.jsonl", [{"question": f"w{n}", "answer": f"w{n} #### {n}"} for n in range(20, 26)])
    args = ["--task", f"gsm8k:{task}", "--shots", f"2:{pool}", "--seed", 4]
    assert run(capsys, *usual(saved, tmp_path / "t"), *args)[0] == 0
    trace = read_trace(tmp_path / "t")
    assert trace.manifest.settings["shots"] == 2
    assert trace.manifest.notes["prompt_formats"] == {
        "gsm8k": "gsm8k of lm-eval, 2 examples from pool.jsonl, drawn by seed 4, the same for all prompts"
    }
    assert trace.request_records()[0].prompt_text.count("Question:") == 3
    status, _, err = run(capsys, *usual(saved, tmp_path / "t"), "--task", f"gsm8k:{task}", "--resume")
    assert status == 2 and "settings" in err


def test_names_of_formats() -> None:
    assert prompt_formats("gsm8k:test,mmlu", parse_shots("5", 7)) == {
        "gsm8k": "gsm8k of lm-eval, 5 examples from openai/gsm8k train, drawn by seed 7, the same for all prompts",
        "mmlu": "mmlu_generative of lm-eval, 5 examples from cais/mmlu dev, the first of the same subject",
    }


def test_the_letter_alone_is_scored_where_it_is_asked_for(tmp_path: Path) -> None:
    (shown,) = load(tmp_path, "mmlu", [MMLU[0]], MMLU, 2)
    (plain,) = load_prompts(f"mmlu:{tmp_path / 'asked.jsonl'}")
    from asdsim.records import RequestRecord

    records = [
        RequestRecord(prompt.id, prompt.task, (1,), prompt.text, prompt.reference, 4, (7,), "natural")
        for prompt in (shown, plain)
    ]
    assert [scorer_name(record, {}, False) for record in records] == ["mmlu-letter", "mmlu"]
    assert scorer_name(records[0], {"mmlu": "exact"}, False) == "exact"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shots", "0"], "--shots '0' is not a number of examples"),
        (["--shots", "five"], "is not a number of examples"),
        (["--shots", "5:"], "is not a number of examples"),
        (["--shots", "5:no-such"], "there is no file 'no-such'"),
        (["--shots", "5"], "task jsonl has no few-shot format (leave --shots out; gsm8k, mbpp, mmlu have)"),
    ],
)
def test_what_is_refused(saved: Path, tmp_path: Path, capsys: Capsys, flags: list[str], message: str) -> None:
    status, out, err = run(capsys, *usual(saved, tmp_path / "t"), *flags)
    assert status == 2 and message in err and not out and err.count("\n") == 1 and not (tmp_path / "t").exists()


def test_a_file_of_examples_is_for_one_task(tmp_path: Path) -> None:
    pool = written(tmp_path / "pool.jsonl", GSM8K)
    with pytest.raises(UsageError, match="names the examples of one task"):
        load_prompts("gsm8k:test,mmlu:test", shots=parse_shots(f"2:{pool}"))
    with pytest.raises(UsageError, match="line 1: code is missing"):
        load(tmp_path, "mbpp", [MBPP[0]], [{"task_id": 2, "text": "t", "test_list": []}], 1)
