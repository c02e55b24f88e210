"""Later turns: each is a request whose prompt holds the strict answers before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asdsim.trace import read_trace
from tests.capture.conftest import EOS, generate, tiny_llama, word_tokenizer
from tests.capture.test_cli import Capsys, run, usual
from tests.support.tracefiles import difference

TURNS = [["w1 w2 w3", "w4 w5", "w6"], ["w8 w9"], ["w10", "w11 w12"]]
NAMES = ["talk/0", "talk/0/turn-2", "talk/0/turn-3", "talk/1", "talk/2", "talk/2/turn-2"]


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps({"turns": turns, "reference": "r"}) + "\n" for turns in TURNS))
    return path


def said(model: Any, turns: list[str]) -> list[tuple[int, ...]]:
    """Return the prompts of a conversation, with what Transformers itself answers greedily."""
    words, prompts, texts = word_tokenizer(), [], []
    for turn in turns:
        texts.append(turn)
        prompts.append(tuple(words("\n\n".join(texts))["input_ids"]))
        answer = generate(model, prompts[-1], 20)
        texts.append(" ".join(f"w{token}" for token in answer if token != EOS))
    return prompts


@pytest.mark.parametrize("rule", [[], ["--rule", "asd", "--B", 40, "--g", "inf"]])
def test_prompts_hold_the_strict_answers_under_any_rule(
    saved: Path, talk: Path, tmp_path: Path, capsys: Capsys, rule: list[Any]
) -> None:
    args = [*usual(saved, tmp_path / "t"), "--task", f"jsonl:{talk}", "--turns", "all", *rule]
    status, out, err = run(capsys, *args)
    assert status == 0 and "6 requests captured" in out
    assert "2 prompts have more than one turn: 3 later turns are asked, each after the strict answers" in err
    trace = read_trace(tmp_path / "t")
    assert trace.request_ids() == NAMES and trace.manifest.settings["turns"] == "all"
    model = tiny_llama()
    expected = [prompt for turns in TURNS for prompt in said(model, turns)]
    records = trace.request_records()
    assert [record.prompt_ids for record in records] == expected
    assert [record.reference for record in records] == ["r", None, None, "r", "r", None]
    assert records[1].prompt_text.startswith("w1 w2 w3\n\n") and records[1].prompt_text.endswith("\n\nw4 w5")


def test_a_capture_that_was_cut_between_turns_goes_on(
    saved: Path, talk: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asdsim.capture import loop

    args = ["--task", f"jsonl:{talk}", "--turns", "all"]
    assert run(capsys, *usual(saved, tmp_path / "whole"), *args)[0] == 0
    decode, calls = loop.decode, []

    def stop(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(*given)

    monkeypatch.setattr(loop, "decode", stop)
    assert run(capsys, *usual(saved, tmp_path / "t"), *args)[0] == 130
    monkeypatch.undo()
    assert read_trace(tmp_path / "t").request_ids() == NAMES[:1]
    assert run(capsys, *usual(saved, tmp_path / "t"), *args, "--resume")[0] == 0
    assert difference(read_trace(tmp_path / "whole"), read_trace(tmp_path / "t"), times=False) is None
    status, _, err = run(capsys, *usual(saved, tmp_path / "t"), "--task", f"jsonl:{talk}", "--resume")
    assert status == 2 and "settings" in err


def test_without_asking_for_them_later_turns_are_counted(
    saved: Path, talk: Path, tmp_path: Path, capsys: Capsys
) -> None:
    status, out, err = run(capsys, *usual(saved, tmp_path / "t"), "--task", f"jsonl:{talk}")
    assert status == 0 and "3 requests captured" in out and "3 later turns are left out" in err
    assert "turns" not in read_trace(tmp_path / "t").manifest.settings


def test_what_is_refused(saved: Path, talk: Path, tmp_path: Path, capsys: Capsys) -> None:
    for flags, message in ((["--turns", "two"], "unknown turns 'two'"),
                           (["--turns", "all", "--shard", "1/2"], "turns of one prompt cannot be parted")):  # fmt: skip
        status, out, err = run(capsys, *usual(saved, tmp_path / "t"), "--task", f"jsonl:{talk}", *flags)
        assert status == 2 and message in err and not out and err.count("\n") == 1
