"""``asdsim show``: on every committed trace, without torch, safe to print, and equal to what replay says."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.cli import main
from asdsim.report.visible import escaped, shown_token, width, wrapped
from asdsim.trace.manifest import Manifest
from asdsim.trace.vocabulary import Vocabulary
from asdsim.trace.writer import TraceWriter, store_vocabulary
from tests.support.toytrace import write_toy_trace

ROOT = Path(__file__).parents[2]
TRACES = sorted((ROOT / "traces").iterdir())
LAYERSKIP = ROOT / "traces/smollm2-layerskip"
SETTING = ("--B", "8", "--g", ".5", "--M", "1")

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07 </script><img src=x onerror=alert(1)> \u2028\u2029 \u202eright-to-left\u202c \x00 "
    "\u200d\U0001f468\u200d\U0001f469 \U0001f600 a\u0301 " + "x" * 10_000
)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    done = capsys.readouterr()
    return int(stopped.value.code or 0), done.out, done.err


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A toy trace whose prompt and tokens try to break what shows them."""
    source = write_toy_trace(tmp_path / "toy")
    toy = asdsim.load(tmp_path / "toy")
    pieces = [f" {HOSTILE[:60]}{n}".encode() if n % 2 else b"\x1b[31m\xff" for n in range(toy.manifest.vocab_size)]
    number = len(pieces)
    manifest: Manifest = toy.manifest.replace(shards=[], grids=[])
    with TraceWriter.create(tmp_path / "hostile", manifest) as writer:
        for record, steps in source:
            writer.add_request(replace(record, prompt_text=HOSTILE.replace("\x00", "\x7f")), steps)
        store_vocabulary(writer, Vocabulary(np.arange(number, dtype=np.int32), pieces, np.zeros(number, bool)))
    return tmp_path / "hostile"


@pytest.mark.parametrize("folder", TRACES, ids=lambda folder: folder.name)
def test_every_committed_trace_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", folder, "--B", 8, "--g", ".25", "--M", 2, "--request", 0)
    assert code == 0
    assert "against strict, exact" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_the_walk_of_replay(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", LAYERSKIP, *SETTING, "--against", "B=4 g=.25 M=2", "--json")
    rows = json.loads(out)["rows"]
    result = asdsim.replay(LAYERSKIP, B="4,8", g=".25,.5", M="1,2")
    frame = result.frame()
    names = {(row["B"], row["g"], row["M"]): n for n, row in enumerate(frame.to_dicts())}
    for side, key in (("walk", (8.0, 0.5, 1.0)), ("against", (4.0, 0.25, 2.0))):
        n = names[key]
        assert [row[side]["tokens"] for row in rows] == [result.tokens(n, r) for r in range(len(rows))]
        assert sum(row[side]["relaxed_tokens"] for row in rows) == frame["relaxed_tokens"][n]
        assert max(row[side]["regret_spent"] for row in rows) == frame["regret_spent_max"][n]
        assert sum(len(row[side]["steps"]) for row in rows) == frame["num_spec_steps"][n]
    assert code == 0


def test_pickers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", LAYERSKIP, *SETTING, "--largest-regret", 2, "--json")
    spent = [row["walk"]["regret_spent"] for row in json.loads(out)["rows"]]
    assert code == 0 and len(spent) == 2 and spent[0] >= spent[1]
    *_, last = run(capsys, "show", LAYERSKIP, *SETTING)[1].splitlines()
    assert last == "24 of 24 outputs differ"
    _, out, _ = run(capsys, "show", LAYERSKIP, *SETTING, "--changed-answers", "--json")
    tasks = {row["task"] for row in json.loads(out)["rows"]}
    assert tasks == {"gsm8k"}  # the only task here whose answers are compared without running programs


def test_what_is_not_known_is_never_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests whose walks leave the trace are counted and named by every picker, whatever it shows."""
    uncovered = ("--B", "3.3", "--g", ".33", "--M", "1")
    result = asdsim.replay(LAYERSKIP, B=3.3, g=0.33, M=1)
    names, exact = result.graph.request_ids, result.walks().exact[0]
    left = [name for name, known in zip(names, exact, strict=True) if not known]
    expected = {
        ("--changed-answers",): [name for name in left if name.startswith("gsm8k/")],
        ("--largest-regret", "2"): left,
        ("--first-differences",): [],  # each is known to differ before its walk leaves the trace
    }
    assert len(left) == 15 and expected["--changed-answers",]
    for words, unknown in expected.items():
        code, out, _ = run(capsys, "show", LAYERSKIP, *uncovered, *words, "--json")
        assert code == 0 and json.loads(out)["not_known"] == unknown, words
        _, _, err = run(capsys, "show", LAYERSKIP, *uncovered, *words)
        assert (f"{len(unknown)} of 24 requests left the captured steps" in err) == bool(unknown), words
    k4 = ROOT / "traces/smollm2-layerskip-k4"
    code, out, err = run(capsys, "show", k4, "--B", 50, "--g", 9, "--M", 4, "--changed-answers")
    assert (code, out) == (0, "")
    assert "4 of 12 requests left the captured steps: whether their answers differ is not known" in err
    assert "no request to show: no answer is known to differ" in err and "same answers" not in err
    assert f"asdsim cover {k4}" in err


def test_a_difference_in_a_guess_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("show", LAYERSKIP, "--B", 3.3, "--g", 0.33, "--M", 1, "--against", "B=3.6 g=.3 M=1", "--json")
    for mode in ("stop", "aligned"):
        answer = json.loads(run(capsys, *words, "--off-trace", mode)[1])
        for row in answer["rows"]:
            walks = (row["walk"], row["against"])
            starts = [[step["start"] for step in walk["steps"] if step["estimated"]] for walk in walks]
            sure = min(min(first, default=len(walk["tokens"])) for first, walk in zip(starts, walks, strict=True))
            place = row["first_difference"]
            settled = all(walk["exact"] for walk in walks) or (place is not None and place < sure)
            assert (row["request_id"] in answer["not_known"]) == (not settled)
        assert answer["not_known"], mode


def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "toy")
    cases = [
        ([LAYERSKIP, "--B", "1,2", "--g", 1, "--M", 1], "2 settings given"),
        ([LAYERSKIP, *SETTING, "--request", "gsm8k/99"], "unknown request"),
        ([LAYERSKIP, *SETTING, "--request", "77"], "rows go from 0 to 23"),
        ([LAYERSKIP, *SETTING, "--against", "B=4"], "M is missing"),
        ([LAYERSKIP, *SETTING, "--largest-regret", "0"], "is below 1"),
        ([tmp_path / "toy", *SETTING], "lacks the text of its tokens"),
    ]
    for words, message in cases:
        code, out, err = run(capsys, "show", *words)
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1), words
        assert message in err


def test_a_hostile_prompt_is_only_text(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", hostile, *SETTING, "--request", 0, "--prompt", "--off-trace", "aligned")
    assert code == 0
    bad = {sign for sign in out if unicodedata.category(sign) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    assert not bad
    assert "\\x1b[2J" in out and "\\u202e" in out and "\\u2028" in out
    assert max(map(width, out.splitlines())) <= 80 + 70  # a single token may be longer than a line
    assert run(capsys, "show", hostile, *SETTING, "--request", 0, "--json")[0] == 0


def test_escapes_and_widths() -> None:
    assert escaped("a\x1b[1m\n\u2028\u200d") == "a\\x1b[1m\\n\\u2028\\u200d"
    assert escaped("a\nb", keep="\n") == "a\nb"
    assert shown_token("  a b ") == "··a b·"
    assert shown_token("  ", "_") == "__"
    assert width("日本e\u0301") == 5
    assert wrapped("ab  cd efgh", 5) == ["ab", "cd", "efgh"]
    assert wrapped("abcdefgh", 3) == ["abc", "def", "gh"]
    assert "".join(wrapped("日本語", 4)) == "日本語"


def test_show_needs_no_torch_and_works_in_a_pipe_without_unicode() -> None:
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = sys.modules['numba'] = None\n"
        "from asdsim.cli import main\nmain(['show', 'traces/smollm2-layerskip', '--request', '0'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        cwd=ROOT,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert b"=_the" in done.stdout
