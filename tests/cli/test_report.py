"""``asdsim report``: what the page holds, read back without a browser (in one: tests/browser)."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asdsim
from asdsim.cli import main
from asdsim.evaluate.cost_spec import cost_of_trace
from asdsim.report.page import island, write_report
from asdsim.rules.settings import Policy
from asdsim.trace.vocabulary import Vocabulary
from asdsim.trace.writer import TraceWriter, store_vocabulary
from tests.support.toytrace import write_toy_trace

ROOT = Path(__file__).parents[2]
HOLDOUT = ROOT / "traces/smollm2-layerskip-holdout"
HOSTILE = "</script><img src=x onerror=alert(1)> <!-- &amp; \u2028\u2029 \u202e \U0001f600 ]]> ' \" `"


class Parts(HTMLParser):
    """Collects tags, attributes and the content of scripts, as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and self.cdata_elem:
            self.scripts[-1] += data


def content(page: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the data of a page and its columns."""
    text = page.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    blob = gzip.decompress(base64.b64decode(re.search(r'id="blob">(.*?)</script>', text)[1]))
    columns = {name: np.frombuffer(blob, kind, count, at) for name, (kind, at, count) in data["columns"].items()}
    return data, columns


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(HOLDOUT), "-o", str(output)])
    assert stopped.value.code in (0, None)
    return output


def test_the_page_holds_every_walk_as_replay_has_it(page: Path) -> None:
    data, columns = content(page)
    trace = asdsim.load(HOLDOUT)
    assert [entry["id"] for entry in data["requests"]] == trace.request_ids()
    table = columns["walk"].reshape(len(data["settings"]), -1)
    start = np.concatenate([[0], np.cumsum(columns["s_k"].astype(int) + 1)])
    for n, entry in enumerate(data["settings"]):
        result = asdsim.replay(trace, B=entry["B"], g=entry["g"], M=entry["M"])
        frame = result.frame()
        for name in ("mean_acceptance_length", "accepted_per_proposal", "regret_spent_mean"):
            assert entry["figures"][name][0] == pytest.approx(frame[name][0], rel=1e-12)
        assert (entry["exact"], entry["spent_max"]) == (1.0, frame["regret_spent_max"][0])
        spent = result.walks().spent[0]
        for r, walk in enumerate(table[n]):
            first, behind = columns["w_ptr"][walk : walk + 2]
            assert columns["w_spent"][behind - 1] == spent[r]
            words: list[int] = []
            for row in range(first, behind):
                at, accepted, committed = start[columns["w_step"][row]], columns["w_acc"][row], columns["w_com"][row]
                words += columns["p_draft"][at : at + accepted].tolist()
                words += columns["p_choice"][at + accepted : at + committed].tolist()
            codes = columns["w_end"][first:behind]
            told = [(data["ended"][code & 7], data["final"][code >> 3]) for code in codes]
            assert told == [(strip.ended, strip.final) for strip in result.walk(0, r).strips]
            text = "".join(data["vocabulary"][word] for word in words if word not in data["special"])
            assert text == result.text(0, r)


def test_candidates_are_those_of_the_trace(page: Path) -> None:
    data, columns = content(page)
    trace = asdsim.load(HOLDOUT)
    number = len(columns["p_draft"])
    gaps, words = columns["t_gap"].reshape(-1, number), columns["t_id"].reshape(-1, number)
    share = columns["p_top"] / 65535 * np.exp(-np.cumsum(gaps.astype(float), axis=0) / data["gapUnit"])
    ids = {text if isinstance(text, str) else None: n for n, text in enumerate(data["vocabulary"])}
    record, steps = trace.request_records()[0], trace.steps_of(trace.request_ids()[0])
    row = 0  # the first step of the page is the root of the first request
    expected = np.exp(steps[0].top_logits[row].astype(float) - float(steps[0].logsumexp[row]))
    for rank in range(1, 8):
        if expected[rank] >= 0.001:
            assert ids[trace.vocabulary.piece(int(steps[0].top_ids[row, rank]))] == words[rank - 1, row]
            assert share[rank - 1, row] == pytest.approx(expected[rank], rel=0.05)
        else:
            assert words[rank - 1, row] == gaps[rank - 1, row] == 0
    assert record.request_id == data["requests"][0]["id"]


def test_the_page_loads_and_runs_nothing_but_its_own(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parts = Parts(text)
    (policy,) = [attrs["content"] for tag, attrs in parts.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy
    digests = {base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in parts.scripts}
    assert set(re.findall(r"'sha256-([^']*)'", policy)) <= digests
    for tag, attrs in parts.tags:
        assert not [name for name in attrs if name.startswith("on") or name == "style"], tag
        for name in ("src", "href", "xlink:href"):
            value = attrs.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, value)
    assert "innerHTML" not in text and "document.write" not in text and "eval(" not in text


def test_two_runs_give_the_same_bytes(page: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(HOLDOUT), "-o", str(page.with_name("again.html"))])
    again = page.with_name("again.html").read_text(encoding="utf-8").replace("again.html", "report.html")
    assert again == page.read_text(encoding="utf-8")


def test_json_in_a_page_is_no_markup() -> None:
    value = {"text": HOSTILE, "inf": float("inf"), "nan": float("nan")}
    text = island(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"text": HOSTILE, "inf": "inf", "nan": None}


def hostile_trace(folder: Path) -> asdsim.Trace:
    source = write_toy_trace(folder / "toy")
    manifest = asdsim.load(folder / "toy").manifest
    target = {**manifest.target, "name": "<b>model</b>"}
    pieces = [HOSTILE.encode()] * manifest.vocab_size
    with TraceWriter.create(folder / "bad", manifest.replace(shards=[], grids=[], target=target)) as writer:
        for record, steps in source:
            writer.add_request(replace(record, prompt_text=HOSTILE, task="<i>"), steps)
        number = len(pieces)
        store_vocabulary(writer, Vocabulary(np.arange(number, dtype=np.int32), pieces, np.zeros(number, bool)))
    return asdsim.load(folder / "bad")


def test_hostile_names_prompts_and_tokens_make_no_element(tmp_path: Path) -> None:
    trace = hostile_trace(tmp_path)
    result = asdsim.replay(trace, B="0,8", g=".25,1", M=2)
    write_report(tmp_path / "bad.html", [result], trace.vocabulary, command=f"asdsim report {HOSTILE}")
    parts = Parts((tmp_path / "bad.html").read_text(encoding="utf-8"))
    tags = [tag for tag, _ in parts.tags]
    assert "img" not in tags and "i" not in tags and "b" not in tags
    assert tags.count("script") == 3
    data, _ = content(tmp_path / "bad.html")
    assert data["requests"][0]["prompt"] == HOSTILE


def test_a_page_that_would_be_too_large_says_what_it_keeps(tmp_path: Path) -> None:
    trace = asdsim.load(HOLDOUT)
    result = asdsim.replay(trace, B="0,8", g=0.25, M=2)
    said: list[str] = []
    whole = write_report(tmp_path / "a.html", [result], trace.vocabulary)
    limit = whole.bytes * 3 // 4
    made = write_report(tmp_path / "b.html", [result], trace.vocabulary, limit_bytes=limit, note=said.append)
    assert made.bytes <= limit and made.requests < made.all_requests == 24
    assert any("keeps the tokens of" in line for line in said)
    text = html.unescape((tmp_path / "b.html").read_text(encoding="utf-8"))
    assert f"tokens of {made.requests} of 24 requests, evenly drawn; all figures are those of all requests" in text
    data, _ = content(tmp_path / "b.html")
    assert data["settings"][0]["figures"] == content(tmp_path / "a.html")[0]["settings"][0]["figures"]


def test_a_setting_that_is_not_exact_is_never_told_as_a_result(tmp_path: Path) -> None:
    trace = asdsim.load(ROOT / "traces/smollm2-layerskip-k4")
    result = asdsim.replay(trace, B="0,50", g=9, M=4)
    page = write_report(tmp_path / "a.html", [result], trace.vocabulary, policy=Policy(50, 9, 4))
    assert "is not exact here" in page.verdict and "no result" in page.verdict
    data, columns = content(tmp_path / "a.html")
    walks = columns["walk"].reshape(2, -1)[1]
    final = {data["final"][columns["w_end"][columns["w_ptr"][walk + 1] - 1] >> 3] for walk in walks}
    assert "missing" in final


COST = "h20-deepseek-v4-flash"
"""Step times that do not tell one token from a verification, and say so."""


def test_settings_that_are_not_exact_claim_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four settings one is covered: it leads the page, and the others say nothing against strict matching."""
    output = tmp_path / "a.html"
    grid = ["--B", "3.3,8", "--g", ".33,.25", "--M", "1"]
    with pytest.raises(SystemExit):
        main(["report", str(ROOT / "traces/smollm2-layerskip"), *grid, "-o", str(output), "--json", "--cost", COST])
    done = capsys.readouterr()
    assert json.loads(done.out)["exact_settings"] == 2 and "3 of 5 settings are not exact" in done.err
    data, _ = content(output)
    claims = ("speed_up_plain", "speed_up", "acceptance_length_gain", "outputs_differ_share", "edit_distance_mean")
    text = html.unescape(output.read_text(encoding="utf-8"))
    summary = text[text.index("<noscript>") : text.index("</noscript>")]
    for entry in data["settings"]:
        row = re.search(rf'<tr[^>]*><th scope="row">{re.escape(entry["name"])}</th>(.*?)</tr>', summary)[1]
        cells = re.findall(r"<td(?: title=\"([^\"]*)\")?>(.*?)</td>", row)[1:]
        figures = [entry["figures"][figure["name"]] for figure in data["figures"]]
        if entry["exact"] == 1:
            assert entry["caveat"] == "" and all(entry["figures"][name] is not None for name in claims)
            assert not any(title or "~" in shown or shown == "–" for title, shown in cells)
        else:
            assert "biased sample" in entry["caveat"] and [entry["figures"][name] for name in claims] == [None] * 5
            for (title, shown), values in zip(cells, figures, strict=True):
                assert shown == "–" if values is None else (shown[0], title) == ("~", entry["caveat"])
            assert "no result" in entry["verdict"] and "%, " not in entry["verdict"]
    chosen = data["settings"][data["start"]]
    assert (chosen["name"], chosen["exact"]) == ("B=8 g=0.25 M=1", 1.0)
    assert 'id="uncovered"' not in text and "+35 % against strict matching" in text
    # Every speed on the page stands beside what it assumes, and over the target alone comes first.
    assert [figure["head"] for figure in data["figures"]][:2] == [
        "speed-up over the target alone, predicted", "speed-up over strict, predicted"
    ]  # fmt: skip
    cost = cost_of_trace(asdsim.load(ROOT / "traces/smollm2-layerskip"), COST)
    head = text[text.index("<header>") : text.index("</header>")]
    assert f'<p class="line" id="speeds">Speeds are predicted from {cost.source}' in head
    assert "as long as a verification" in cost.notes()[0] and all(note in head for note in cost.notes())


def test_a_page_of_nothing_exact_says_so_first(tmp_path: Path) -> None:
    trace = asdsim.load(ROOT / "traces/smollm2-layerskip")
    for mode in ("stop", "aligned"):
        result = asdsim.replay(trace, B=3.3, g=".33,.2", M=1, off_trace=mode)
        page = write_report(tmp_path / "a.html", [result], trace.vocabulary)
        text = html.unescape((tmp_path / "a.html").read_text(encoding="utf-8"))
        head = text[text.index("<header>") : text.index("</header>")]
        assert "No setting but strict matching is exact here" in head and f"asdsim cover {trace.path}" in head
        data, _ = content(tmp_path / "a.html")
        assert data["settings"][data["start"]]["strict"] and page.verdict.startswith("Strict matching commits 4.30")
        assert page.exact == 1
        inexact = [entry for entry in data["settings"] if not entry["strict"]]
        assert len(inexact) == 2 and all(entry["caveat"].startswith("not exact") for entry in inexact)
        assert all((entry["figures"]["acceptance_length_gain"] is None) == (mode == "stop") for entry in inexact)


def test_wrong_usage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    write_toy_trace(tmp_path / "toy")
    for words, message in (
        ([HOLDOUT, "-o", tmp_path / "folder"], "is a folder"),
        ([HOLDOUT, "--policy", tmp_path / "none.json"], "cannot read it"),
        ([tmp_path / "toy"], "lacks the text of its tokens"),
        ([HOLDOUT, "--B", "0:3000", "--g", "1", "--M", "1"], "is not a range"),
        ([HOLDOUT, "--B", "0:3000:1", "--g", "1", "--M", "1"], "too many for a page"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["report", *map(str, words)])
        done = capsys.readouterr()
        assert stopped.value.code == 2 and done.out == "", words
        assert message in done.err.splitlines()[-1]


def test_a_reading_without_strict_matching_names_its_baseline(tmp_path: Path) -> None:
    trace = asdsim.load(ROOT / "traces/smollm2-lookup")
    for grid in ({"B": "0,8"}, {"B": "8"}):
        result = asdsim.replay(trace, **grid, g=0.5, M=2, semantics="lightllm")
        write_report(tmp_path / "a.html", [result], trace.vocabulary)
        names = [entry["name"] for entry in content(tmp_path / "a.html")[0]["settings"]]
        assert names == ["B=0 lightllm (accepts ties)", "B=8 g=0.5 M=2 lightllm"]
