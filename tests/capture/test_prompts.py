"""Prompt files in every form, and chat templates: their arguments, their clock, and one BOS."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from asdsim.capture.prompts import Encoder, encode, parse_date, parse_template_args
from asdsim.capture.tasks import Message, Prompt, check_tasks, load_prompts
from asdsim.errors import AsdsimError, CaptureError, UsageError
from asdsim.trace import read_trace
from tests.capture.conftest import word_tokenizer
from tests.capture.test_cli import Capsys, run, usual

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]


def prompts_of(file: Path, *rows: Any) -> list[Prompt]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_prompts(f"jsonl:{file}"))


@pytest.mark.parametrize(
    ("row", "asked", "left_out"),
    [
        ({"prompt": "a"}, [("user", "a")], 0),
        ({"question": "a", "answer": "b"}, [("user", "a")], 0),
        ({"turns": ["a", "b", "c"]}, [("user", "a")], 2),
        ({"instruction": "a", "input": "b", "output": "c"}, [("user", "a\n\nb")], 0),
        ({"instruction": "a", "input": ""}, [("user", "a")], 0),
        ({"messages": CHAT}, [("system", "s"), ("user", "a")], 0),
        ({"messages": [*CHAT, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]},
         [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")], 0),  # as a server would get it
        ({"messages": [*CHAT, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
                       {"role": "assistant", "content": "d"}]}, [("system", "s"), ("user", "a")], 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
         [("user", "ab")], 0),
        ({"prompt": CHAT}, [("system", "s"), ("user", "a")], 0),
        ({"conversations": [*SHAREGPT, {"from": "gpt", "value": "d"}]}, [("user", "a")], 1),
        ({"conversations": SHAREGPT}, [("user", "a"), ("assistant", "b"), ("user", "c")], 0),
        ({"prompt": "a", "turns": ["b"]}, [("user", "a")], 0),
        ({"prompt": None, "question": "a\u2028b\u0085"}, [("user", "a\u2028b\u0085")], 0),
    ],
)  # fmt: skip
def test_every_form_of_a_row(tmp_path: Path, row: Any, asked: Any, left_out: int) -> None:
    [prompt] = prompts_of(tmp_path / "p.jsonl", row)
    assert [(message.role, message.content) for message in prompt.asked] == asked and len(prompt.later) == left_out
    assert prompt.id == "p/0" and prompt.task == "p" and prompt.reference is None
    assert prompt.text == "\n\n".join(content for _, content in asked)


def test_ids_and_references(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": 7}, {"prompt": "b", "id": "x"}, {"prompt": "c", "reference": 1.5}, {"prompt": "d"}]
    found = prompts_of(tmp_path / "p.v2.jsonl", *rows)
    assert [prompt.id for prompt in found] == ["7", "x", "p/2", "p/3"]
    assert [prompt.reference for prompt in found] == [None, None, "1.5", None]
    for bad in ([1], {}, True, "", "\ud800", 1.5):
        with pytest.raises(UsageError, match="line 1: id is"):
            prompts_of(tmp_path / "p.jsonl", {"prompt": "a", "id": bad})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "line 1: no prompt in this row"),
        ({"prompt": " \n"}, "line 1: the prompt is empty"),
        ({"prompt": "\ud800"}, "line 1: prompt is .*, not text"),
        ({"turns": [1]}, r"turns\[0\] is 1, not text"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "no user speaks in messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\]: text is missing"),
        ({"messages": ["a"]}, r"messages\[0\]: not a JSON object"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: from is missing"),
        ({"instruction": 3}, "instruction is 3, not text"),
        ({"prompt": "a", "reference": "\ud800"}, "line 1: reference is .*, not text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
         r"line 1, messages\[1\]: content is null, and tool_calls are not supported"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\]: content is missing"),
        ({"messages": [{"from": "human"}]}, r"messages\[0\]: value is missing"),
        ({"prompt": "a", "reference": {"b": float("nan")}}, None),
    ],
)  # fmt: skip
def test_a_row_that_asks_nothing_is_one_error(tmp_path: Path, row: Any, message: str | None) -> None:
    if message is None:
        assert prompts_of(tmp_path / "p.jsonl", row)[0].reference == '{"b": null}'
        return
    with pytest.raises(UsageError, match=message) as error:
        prompts_of(tmp_path / "p.jsonl", row)
    assert str(tmp_path / "p.jsonl") in str(error.value)


def test_a_reference_of_any_depth_is_read_or_refused_by_line(tmp_path: Path) -> None:
    file, read = tmp_path / "p.jsonl", 0
    for depth in (10, 100, *range(200, 1200, 25), 20_000):
        file.write_text('{"prompt": "a"}\n{"prompt": "b", "reference": ' + "[" * depth + "]" * depth + "}\n")
        try:
            assert load_prompts(f"jsonl:{file}")[1].reference == "[" * depth + "]" * depth
            read += 1
        except UsageError as error:
            assert "nested too deeply" in str(error) and f"{file}, line 2" in str(error)
    assert 1 < read < 43


def test_arrays_gzip_pipes_and_names(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"question": "b"}]
    forms = {
        "a,b.json": json.dumps(rows), "c.json": json.dumps(rows, indent=2),
        "gr\u00fcn.jsonl": "\ufeff" + "\r\n".join(map(json.dumps, rows)),
    }  # fmt: skip
    for name, data in forms.items():
        (tmp_path / name).write_text(data, encoding="utf-8")
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data.encode()))
        for suffix in ("", ".gz"):
            found = load_prompts(f"jsonl:{tmp_path / (name + suffix)}")
            assert [(prompt.id, prompt.text) for prompt in found] == [
                (f"{name.split('.')[0]}/0", "a"), (f"{name.split('.')[0]}/1", "b"),
            ]  # fmt: skip
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=lambda: (tmp_path / "pipe").write_text(json.dumps(rows))).start()
    assert [prompt.id for prompt in load_prompts(f"jsonl:{tmp_path / 'pipe'}")] == ["pipe/0", "pipe/1"]
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    odd.write_text(json.dumps(rows[0]))
    assert load_prompts(f"jsonl:{odd}")[0].task == "\ufffd"


def test_commas_in_paths(tmp_path: Path) -> None:
    (tmp_path / "a,b,c.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}')
    names = [f"jsonl:{tmp_path / 'a,b,c.jsonl'}", "gsm8k", f"jsonl:{tmp_path / 'd.jsonl'}"]
    assert check_tasks(", ".join(names)) == names
    with pytest.raises(UsageError, match=r"there is no file '.*/a,b'"):
        check_tasks(f"jsonl:{tmp_path / 'a,b'},gsm8k")
    with pytest.raises(UsageError, match="unknown task 'gsm9k'"):
        check_tasks(f"{names[2]},gsm9k")


def test_two_prompts_of_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"prompt 3 of jsonl:.*p\.jsonl: two prompts are called 'a'"):
        prompts_of(tmp_path / "p.jsonl", {"prompt": "x", "id": "a"}, {"prompt": "y"}, {"prompt": "z", "id": "a"})


def test_many_ids_are_checked_in_linear_time(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' * 100_000)
    start = time.process_time()
    assert len(load_prompts(f"jsonl:{tmp_path / 'p.jsonl'}")) == 100_000
    assert time.process_time() - start < 30


@pytest.mark.parametrize("kept", [0, 64 << 20])
def test_prompts_are_read_when_they_are_asked_for(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asdsim.capture.tasks.prompt.IN_MEMORY", kept or 1)
    rows = [{"prompt": "ab" * n, "id": f"p{n}"} for n in range(1, 40)]
    rows += [{"turns": ["a", "b" * 999], "reference": "r" * 999}]
    counted: list[int] = []
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_prompts(f"jsonl:{tmp_path / 'p.jsonl'}", progress=counted.append)
    (tmp_path / "p.jsonl").unlink()  # what was read stays
    expected = [Prompt(f"p{n}", "p", "ab" * n) for n in range(1, 40)] + [
        Prompt("p/39", "p", "a", "r" * 999, later=("b" * 999,))
    ]
    assert list(found) == expected and counted == list(range(1, 41))
    assert found[-1] == expected[-1] and list(found[5:30:3][::-1]) == expected[5:30:3][::-1]
    assert [prompt.id for prompt in found[:20].longest(2)] == ["p20", "p19"]
    assert [prompt.id for prompt in found.longest(2)] == ["p39", "p38"]  # whatever goes with the last one
    with pytest.raises(IndexError):
        found[40]


def test_nothing_behind_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\nnot a row\n')
    task = f"jsonl:{tmp_path / 'p.jsonl'}"
    assert [prompt.text for prompt in load_prompts(task, offset=1, limit=2)] == ["b", "c"]
    for more in ({"limit": 4}, {"limit": 2, "shuffle": 0}):
        with pytest.raises(UsageError, match="line 4"):
            load_prompts(task, **more)


def test_no_room_for_a_copy_of_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asdsim.capture.tasks.prompt.IN_MEMORY", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(CaptureError, match=r"prompt 1: no room .* No such file or directory \(set TMPDIR"):
        prompts_of(tmp_path / "p.jsonl", {"prompt": "x"})


# --- templates ----------------------------------------------------------------------------------------------------

PLAIN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"
CLOCKED = "w1 {{ strftime_now('%d') }} {% for m in messages %}{{ m.content }} {% endfor %}"


class Words:
    """A tokenizer whose tokens are words, and whose BOS is ``<s>``."""

    bos_token, bos_token_id = "<s>", 1
    added_tokens_decoder: dict[int, Any] = {}

    def __init__(self, template: Any = PLAIN) -> None:
        self.chat_template = template
        self.ids: dict[str, int] = {"<s>": 1}

    def apply_chat_template(self, messages: Any, chat_template: str, **variables: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        del variables["tokenize"]
        return render_jinja_template([messages], chat_template=chat_template, bos_token="<s>", **variables)[0][0]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        words = ([self.bos_token] if add_special_tokens else []) + text.replace("<s>", " <s> ").split()
        return {"input_ids": [self.ids.setdefault(word, len(self.ids) + 1) for word in words]}

    def words(self, ids: list[int]) -> str:
        names = {i: word for word, i in self.ids.items()}
        return " ".join(names[i] for i in ids)


def test_a_prompt_gets_one_bos_and_one_template() -> None:
    words = Words()
    encoder = Encoder(words)

    def text(prompt: str, *messages: Message) -> str:
        return words.words(encoder.ids(Prompt("p", "p", prompt, messages=messages)))

    assert text("Hello there") == "<s> [user] Hello there [assistant]"
    assert text("", Message("system", "S"), Message("user", "U")) == "<s> [system] S [user] U [assistant]"
    assert not encoder.noticed
    assert text("<s>[user] Hello [assistant]") == "<s> [user] Hello [assistant]"
    assert text("<s>Hello") == "<s> Hello"
    assert text(" [user] Hello [assistant]") == "<s> [user] Hello [assistant]"
    assert (
        text("[user] S\n\nU", Message("system", "[user] S"), Message("user", "U"))
        == "<s> [system] [user] S [user] U [assistant]"
    )
    assert sum(encoder.noticed.values()) == 5  # three taken as they are, two of them with a BOS of their own
    assert words.words(encode(words, "<s> Hello", False)) == "<s> Hello"
    assert words.words(encode(words, "Hello <s>", True)) == "<s> [user] Hello <s> [assistant]"
    doubled = Words("{{ bos_token }}{{ bos_token }}{{ bos_token }}{{ messages[0].content }}")
    assert doubled.words(encode(doubled, "Hello", True)) == "<s> Hello"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "request p: the chat template fails: no system role"),
        ("{% for %}", "the chat template fails"),
        ("{{ 1 / 0 }}", "the chat template fails: division by zero"),
        ([{"name": "a", "template": "x"}], "the chat template is not text: a list"),
        ({"a": "x", "tool_use": "y"}, "the chat template is not text: a, tool_use"),
        (7, "the chat template is not text: a int"),
    ],
)
def test_a_template_that_fails_is_one_error(template: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        Encoder(Words(template)).ids(Prompt("p", "p", "Hello"))
    words = Words(template)
    assert words.words(encode(words, "Hello", False)) == "<s> Hello"


def test_the_default_of_several_templates_is_taken() -> None:
    words = Words({"default": PLAIN, "tool_use": "x"})
    assert words.words(encode(words, "Hello", True)) == "<s> [user] Hello [assistant]"


def test_arguments_of_a_template_are_typed_and_known() -> None:
    assert parse_template_args(["enable_thinking=false", "n=3", 't="3"', "s=high", "e=", "l=[1]"]) == {
        "enable_thinking": False, "n": 3, "t": "3", "s": "high", "e": "", "l": [1],
    }  # fmt: skip
    for bad in (["x"], ["=1"], ["a b=1"], ["messages=1"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="--chat-template-arg"):
            parse_template_args(bad)
    words = Words("{% if think %}T{% else %}F{% endif %} {{ messages[0].content }}")
    for text, expected in (("think=false", "F Hello"), ("think=true", "T Hello")):
        assert (
            words.words(Encoder(words, arguments=parse_template_args([text])).ids(Prompt("p", "p", "Hello")))
            == expected
        )
    with pytest.raises(UsageError, match="unknown variable 'thin'.*did you mean 'think'"):
        Encoder(words, arguments={"thin": False})
    with pytest.raises(UsageError, match="no chat template is applied"):
        Encoder(words, template=False, arguments={"think": False})


def test_dates() -> None:
    assert parse_date("2024-02-29") == date(2024, 2, 29) and parse_date(None) is None
    for bad in ("2023-02-29", "20240229", "yesterday", ""):
        with pytest.raises(UsageError, match="--template-date"):
            parse_date(bad)
    words = Words(CLOCKED)
    assert words.words(Encoder(words, day=date(2024, 2, 29)).ids(Prompt("p", "p", "Hello"))) == "w1 29 Hello"
    llama = Words(
        "{% if strftime_now is defined %}{% set d = strftime_now( \"%d %b %Y\" ) %}{% else %}{% set d = 'no' %}"
        "{% endif %}{{ d }}"
    )
    assert llama.words(Encoder(llama, day=date(2024, 2, 29)).ids(Prompt("p", "p", "Hello"))) == "29 Feb 2024"
    with pytest.raises(CaptureError, match="reads the clock in a format that it computes"):
        encode(Words("{{ strftime_now(f) }}"), "Hello", True)
    assert Encoder(words).settings() == {"chat_template": True, "template_date": date.today().isoformat()}
    with pytest.raises(UsageError, match="the chat template has no date"):
        Encoder(Words(), day=date(2024, 2, 29))


@pytest.fixture
def clocked(saved: Path, tmp_path: Path) -> list[object]:
    """Arguments of a capture whose chat template reads the clock."""
    for file in (saved / "model").iterdir():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CLOCKED.replace("{{ strftime_now('%d') }}", "w{{ strftime_now('%d') | int }}")
    tokenizer.save_pretrained(tmp_path / "model")
    return [*usual(saved, tmp_path / "t", "--limit", 3), "--target", tmp_path / "model", "--max-new-tokens", 4]


def on(monkeypatch: pytest.MonkeyPatch, day: date) -> None:
    class Day(date):
        @classmethod
        def today(cls) -> date:  # type: ignore[override]
            return day

    monkeypatch.setattr("asdsim.capture.prompts.date", Day)


def test_a_capture_goes_on_the_next_day(
    clocked: list[object], tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, date(2026, 3, 1))
    assert run(capsys, *clocked)[0] == 0
    first = read_trace(tmp_path / "t")
    assert first.manifest.settings["template_date"] == "2026-03-01"
    assert first.request_records()[0].prompt_ids[:2] == (1, 1)
    on(monkeypatch, date(2026, 3, 2))
    assert run(capsys, *clocked, "--resume")[0] == 0
    status, _, err = run(capsys, *clocked, "--resume", "--template-date", "2026-03-02")
    assert status == 2 and "from another run: settings.prompts_sha256" in err
    assert run(capsys, *clocked, "-o", tmp_path / "u", "--template-date", "2026-03-01")[0] == 0
    assert read_trace(tmp_path / "u").request_records() == first.request_records()


def test_shards_of_two_days_are_of_one_run(
    clocked: list[object], tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asdsim.trace.join import join

    for day, shard in ((1, "1/2"), (2, "2/2")):
        on(monkeypatch, date(2026, 3, day))
        assert run(capsys, *clocked, "--shard", shard)[0] == 0
    assert join(tmp_path / "t").manifest.settings["template_date"] == "2026-03-01"


def test_what_is_not_taken_as_it_stands_is_said(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["w1", "w2", "w3"]}\n{"turns": ["w1", "w2"]}\n{"prompt": "w4"}\n')
    status, _, err = run(capsys, *usual(saved, tmp_path / "t"), "--task", f"jsonl:{file}", "--max-new-tokens", 2)
    assert status == 0 and err == "asdsim: 2 prompts have more than one turn: 3 later turns are left out\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat-template-arg", "enable_thinking=false"], "no chat template is applied"),
        (["--chat-template-arg", "x"], "is not NAME=VALUE"),
        (["--template-date", "1.2.2026"], "is not a date"),
        (["--template-date", "2026-02-01"], "the chat template has no date"),
    ],
)
def test_bad_template_flags_are_one_line(
    flags: list[str], message: str, saved: Path, tmp_path: Path, capsys: Capsys
) -> None:
    status, out, err = run(capsys, *usual(saved, tmp_path / "t"), *flags)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_errors_are_of_one_family() -> None:
    assert issubclass(CaptureError, AsdsimError)
