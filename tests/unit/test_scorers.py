"""What counts as a right answer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from asdsim.errors import UsageError
from asdsim.evaluate.scorers import custom, exact, gsm8k, humaneval, make_scorer, parse_chosen, scorer_name
from asdsim.records import RequestRecord

TEST = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (r"so the answer is \boxed{18}.", "18", True),
        (r"first \boxed{7}, no: \boxed{\$1{,}800.00}", "1800", True),
        (r"\boxed{\frac{1}{2}\text{ of } 36}", "36", True),
        (r"we get 42 apples, \boxed{\text{many}}", "42", False),
        (r"it was cut at \boxed{12", "12", True),
        ("She has 5 + 7 = 12 eggs, so 12 * 2 = $24.", "24", True),
        ("She has 5 + 7 = 12 eggs.", "5", False),
        ("-3.50", "-3.5", True),
        ("no number at all", "0", False),
        ("1,234,567 stars", "1234567", True),
        ("18.0", "18", True),
    ],
)
def test_gsm8k(text: str, reference: str, right: bool) -> None:
    assert gsm8k.score(text, reference) is right


def test_exact() -> None:
    assert exact.score("  Paris,\n France ", "Paris, France") and not exact.score("paris, France", "Paris, France")


def test_where_a_program_comes_from() -> None:
    prompt = "Write:\n```python\nfrom typing import List\n\ndef add(a, b):\n    '''Add.'''\n\n```"
    own = "Here:\n```python\nx = 1\n```\nand\n```python\ndef add(a, b):\n    return a + b\n```"
    assert humaneval.program_of(own, "add", prompt) == "from typing import List\n\ndef add(a, b):\n    return a + b\n"
    rest = humaneval.program_of("    return a + b", "add", prompt)
    assert rest.startswith("from typing") and rest.endswith("'''Add.'''\n\n\n    return a + b")
    cut = humaneval.program_of("```python\ndef add(a, b):\n    return a", "add", prompt)
    assert cut.endswith("def add(a, b):\n    return a")


def test_each_request_by_its_task_and_code_only_where_allowed() -> None:
    reference = json.dumps({"task_id": "HumanEval/0", "entry_point": "add", "test": TEST})
    records = [
        RequestRecord("gsm8k/0", "gsm8k", (1,), "how many?", "3", 9, (0,)),
        RequestRecord("humaneval/0", "humaneval", (1,), "```python\ndef add(a, b):\n```", reference, 9, (0,)),
        RequestRecord("mt/0", "mt-bench", (1,), "tell me", "a sample", 9, (0,)),
        RequestRecord("mine/0", "jsonl", (1,), "capital?", "Paris", 9, (0,)),
    ]
    texts = {1: "it is 3", 2: "def add(a, b):\n    return a + b\n", 3: "Paris", 4: "Paris 3"}

    def decode(ids: list[int]) -> str:
        return texts[ids[0]]

    def token(n: int) -> bytes:
        return np.array([n], "<i4").tobytes()

    safe = make_scorer(records, decode)
    assert [safe(0, token(1)), safe(1, token(2)), safe(2, token(3)), safe(3, token(3))] == [True, None, None, True]
    assert safe(0, token(2)) is False and safe(3, token(4)) is False
    assert make_scorer(records, decode, allow_code=True)(1, token(2)) is True
    assert make_scorer(records, decode, chosen=parse_chosen(("gsm8k=exact",)))(0, token(1)) is False


def test_scorers_are_named_right() -> None:
    with pytest.raises(UsageError, match="did you mean 'gsm8k'"):
        parse_chosen(("jsonl=gsm8",))
    with pytest.raises(UsageError, match="not TASK=SCORER"):
        parse_chosen(("exact",))


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [("it is Paris.", " Paris\n", True), ("it is paris.", "Paris", False), ("anything", "", False), ("x", None, False)],
)
def test_contains(text: str, reference: str | None, right: bool) -> None:
    assert custom.contains(text, reference) is right


@pytest.mark.parametrize(
    ("pattern", "text", "reference", "right"),
    [
        (r"^def ", "def f(): pass", None, True),
        (r"^def ", "undef f", "def", False),
        (r"answer: (\d+)", "answer: 7, no, answer: 12", "12 ", True),
        (r"answer: (\d+)", "answer: 12, no, answer: 7", "12", False),
        (r"answer: (\d+)", "none", "12", False),
        (r"answer: (\d+)", "answer: 12", None, False),
        (r"(a)?b", "b", "a", False),
    ],
)
def test_patterns(pattern: str, text: str, reference: str | None, right: bool) -> None:
    assert custom.by_pattern(pattern)(text, reference) is right


def test_functions_of_a_user(tmp_path, monkeypatch) -> None:
    (tmp_path / "scorers_of_mine.py").write_text(
        "import numpy as np\ndef same(text, reference): return np.bool_(text == reference)\n"
        "def bad(text, reference): return 'yes'\ndef fails(text, reference): return text / 2\nvalue = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert custom.by_function("scorers_of_mine:same")("a", "a") is True
    with pytest.raises(UsageError, match="returned 'yes', not True or False"):
        custom.by_function("scorers_of_mine:bad")("a", "a")
    with pytest.raises(UsageError, match="scorers_of_mine:fails failed: TypeError"):
        custom.by_function("scorers_of_mine:fails")("a", "a")
    for name, message in (("scorers_of_mine:none", "AttributeError"), ("scorers_of_mine:value", "is no function"),
                          ("nowhere.at_all:f", "ModuleNotFoundError")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            custom.by_function(name)


def test_a_task_gets_the_scorer_that_was_named() -> None:
    assert parse_chosen(("a=regex:x=(1)", "b=contains", "c=my.module:score")) == {
        "a": "regex:x=(1)", "b": "contains", "c": "my.module:score",
    }  # fmt: skip
    for item in ("a=contain", "a=module:", "a=:f", "a=b-c:f", "a=b:f:g", "=exact"):
        with pytest.raises(UsageError):
            parse_chosen((item,))
    open_question = RequestRecord("1", "mt-bench", (1,), "p", None, 5, (), "natural")
    assert scorer_name(open_question, {"mt-bench": "regex:x"}, False) == "regex:x"
    assert scorer_name(open_question, {"mt-bench": "contains"}, False) is None  # no reference to look for
    assert scorer_name(open_question, {}, False) is None
    program = RequestRecord("2", "humaneval", (1,), "p", "ref", 5, (), "natural")
    assert scorer_name(program, {}, False) is None and scorer_name(program, {}, True) == "humaneval"
    assert make_scorer([program], str, chosen={"humaneval": "contains"})(0, b"") is False


@pytest.mark.parametrize(
    ("task", "reference", "says"),
    [
        ("humaneval", "Paris", "reference: not JSON"),
        ("humaneval", "[1]", "reference: not a JSON object"),
        ("humaneval", "[" * 100_000, "reference: not JSON"),
        ("humaneval", "9" * 5000, "reference: not JSON"),
        ("humaneval", '{"test": "assert True"}', "reference: entry_point is missing"),
        ("humaneval", '{"test": 3, "entry_point": "f"}', "reference: test is 3, not text"),
        ("mbpp", "Paris", "reference: not JSON"),
        ("mbpp", "{}", "reference: test is missing"),
        ("mbpp", '{"test": ["assert True"]}', "reference: test is ["),
        ("ifeval", "Paris", "reference: not JSON"),
        ("ifeval", "{}", "reference: instructions is missing"),
        ("ifeval", '{"instructions": ["punctuation:no_comma"], "arguments": []}', "reference: arguments is []"),
        (
            "ifeval",
            '{"instructions": ["length_constraints:number_words"], "arguments": [{}]}',
            "reference: arguments is",
        ),
        (
            "ifeval",
            '{"instructions": ["length_constraints:number_words"], "arguments": [3]}',
            "reference: arguments is",
        ),
        ("ifeval", '{"instructions": ["x"], "arguments": [{}]}', "no instruction 'x'"),
    ],
)
def test_a_reference_that_a_scorer_cannot_read_names_the_request(task: str, reference: str, says: str) -> None:
    record = RequestRecord("mine/7", "mine", (1,), "prompt", reference, 9, (0,))
    scorer = make_scorer([record], lambda ids: "some words", chosen={"mine": task}, allow_code=True)
    with pytest.raises(UsageError) as refused:
        scorer(0, np.array([1], "<i4").tobytes())
    assert str(refused.value).startswith("request mine/7") and says in str(refused.value) and refused.value.fix
