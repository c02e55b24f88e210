"""The page of ``asdsim report`` in a real browser: `make browser`.

Needs Debian's Chromium (or $CHROMIUM), playwright, and axe-core from npm under .cache/browser. The network is off: any
request but that for the page itself fails the test.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import asdsim
from asdsim.cli import main
from asdsim.evaluate.strips import name_of
from asdsim.rules.settings import parse_setting
from asdsim.trace.vocabulary import Vocabulary
from asdsim.trace.writer import TraceWriter, store_vocabulary
from tests.support.toytrace import write_toy_trace

playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".cache/browser/node_modules/axe-core/axe.min.js"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TRACES = ("smollm2-layerskip", "smollm2-rules")
SETTING, REQUEST = "B=8 g=0.5 M=1", "gsm8k/13"
SHOTS = os.environ.get("SCREENSHOTS")
HOSTILE = (
    "</script><script>window.owned=1</script><img src=x onerror=window.owned=1> &lt;b&gt; \u2028\u2029 "
    "\u202eright-to-left\u202c \x7f\x00 \u200d\U0001f468\u200d\U0001f469 \U0001f600 <!-- ]]> " + "x" * 10_000
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


def report(trace: Path, folder: Path, *words: str) -> Path:
    """Write a report by the command line."""
    output = folder / f"{trace.name}.html"
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(trace), "-o", str(output), *words])
    assert stopped.value.code in (0, None)
    return output


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of two committed traces and of one whose prompts and tokens attack the page."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: report(ROOT / "traces" / name, folder) for name in TRACES}
    source = write_toy_trace(folder / "toy")
    manifest = asdsim.load(folder / "toy").manifest
    pieces = [f" {HOSTILE[:70]}{n}".encode() if n % 2 else b"\xe2\x80" for n in range(manifest.vocab_size)]
    with TraceWriter.create(folder / "hostile", manifest.replace(shards=[], grids=[])) as writer:
        for record, steps in source:
            writer.add_request(replace(record, prompt_text=HOSTILE.replace("\x00", "")), steps)
        number = len(pieces)
        store_vocabulary(writer, Vocabulary(np.arange(number, dtype=np.int32), pieces, np.zeros(number, bool)))
    found["hostile"] = report(folder / "hostile", folder, "--cost", "none")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Open a page with the network off; in the end, nothing may have complained and nothing been asked for."""
    complaints: list[str] = []
    contexts = []

    def opened(path: Path, place: str = "", **options: Any) -> Any:
        context = browser.new_context(offline=True, **{"viewport": {"width": 1280, "height": 1000}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url[:80]}"))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("file:", "data:", "blob:")) else complaints.append(request.url)
            ),
        )
        page.goto(path.as_uri() + place)
        if options.get("java_script_enabled", True):
            page.wait_for_selector("html[data-ready=yes]", timeout=30_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def place(*parts: str) -> str:
    return "#" + "/".join(quote(part, safe="") for part in parts)


def until(page: Any, expression: str) -> None:
    """Wait until something holds in the page, whose policy lets no waiting code of ours in."""
    limit = time.monotonic() + 10.0
    while not page.evaluate(expression):
        assert time.monotonic() < limit, expression
        page.wait_for_timeout(20)


@pytest.mark.parametrize("name", TRACES)
def test_numbers_are_those_of_replay(name: str, pages: dict[str, Path], open_page: Any) -> None:
    page = open_page(pages[name])
    trace = asdsim.load(ROOT / "traces" / name)
    names = page.eval_on_selector_all("#settings tbody button", "all => all.map(one => one.textContent)")
    assert names[0] == "strict" and len(names) == len(set(names)) > 10
    checked = 0
    for text in names[:: max(1, len(names) // 7)]:
        setting = parse_setting(text.split("  ")[0])
        result = asdsim.result.replay_grid(trace, setting)
        row = page.locator("#settings tbody tr", has=page.get_by_role("button", name=text, exact=True))
        frame = result.frame()
        shown = row.locator("td").all_inner_texts()
        heads = page.eval_on_selector_all("#settings th[data-name]", "all => all.map(one => one.dataset.name)")[1:]
        cell = dict(zip(heads, shown, strict=True))
        assert float(cell["exact"]) == frame["exact_share"][0] == 1
        assert cell["mean_acceptance_length"].split()[0] == f"{frame['mean_acceptance_length'][0]:.3f}"
        assert cell["accepted_per_proposal"].split()[0] == f"{frame['accepted_per_proposal'][0]:.3f}"
        assert cell["regret_spent_mean"].split()[0] == f"{frame['regret_spent_mean'][0]:.3f}"
        for r in range(0, result.graph.num_requests, 5):
            page.evaluate("place => { location.hash = place }", place(text, result.graph.request_ids[r])[1:])
            facts = json.dumps(f"{result.graph.request_ids[r]} · {text} ·")
            until(page, f"document.getElementById('walk-facts').textContent.includes({facts})")
            walk = result.walk(0, r)
            assert page.locator("#strips .step").count() == len(walk.strips)
            assert page.locator("#strips .t.relaxed").count() == len(walk.relaxed)
            for kind in ("exact", "rejected", "replacement", "bonus", "discarded", "past_end"):
                expected = sum(token.kind == kind for strip in walk.strips for token in strip.tokens)
                assert page.locator(f"#strips .t.{kind}").count() == expected, (text, r, kind)
            assert page.locator("#walk-facts").inner_text().endswith(f"spent {walk.spent:.2f}")
            ledgers = page.locator("#strips .ledger").all_text_contents()
            assert ledgers == [f"{strip.spent:.2f} → {strip.spent_after:.2f}" for strip in walk.strips]
            checked += len(walk.strips)
    assert checked > 100


def test_choosing_a_setting_drives_every_panel_and_the_address(pages: dict[str, Path], open_page: Any) -> None:
    page = open_page(pages[TRACES[0]])
    assert page.evaluate("performance.now()") < 5_000
    before = page.locator("#verdict").inner_text()
    page.get_by_role("button", name=SETTING, exact=True).click()
    until(page, "document.querySelector('#settings tr.chosen button').textContent === 'B=8 g=0.5 M=1'")
    assert page.evaluate("decodeURIComponent(location.hash)") == f"#{SETTING}/{REQUEST}"
    assert page.locator("#verdict").inner_text() != before
    assert SETTING in page.locator("#walk-facts").inner_text()
    assert page.locator(".dot.chosen title").text_content() == SETTING
    page.get_by_role("button", name="gsm8k/54", exact=True).click()
    until(page, "document.getElementById('walk-facts').textContent.startsWith('gsm8k/54')")
    page.locator("#strips .facts button").nth(2).click()
    page.wait_for_selector(".step.chosen")
    assert page.evaluate("location.hash").count("/") == 2
    page.go_back()
    until(page, "location.hash.split('/').length === 2")
    page.go_back()
    until(page, "document.getElementById('walk-facts').textContent.startsWith('gsm8k/13')")
    page.go_forward()
    until(page, "document.getElementById('walk-facts').textContent.startsWith('gsm8k/54')")


def test_deep_links(pages: dict[str, Path], open_page: Any) -> None:
    walk = asdsim.replay(ROOT / "traces" / TRACES[0], B=8, g=0.5, M=1).walk(0, REQUEST)
    step = walk.strips[4].step_id
    page = open_page(pages[TRACES[0]], place(SETTING, REQUEST, str(step)))
    assert page.locator("#strips .step.chosen button").first.inner_text() == f"step {step}"
    assert page.locator("#settings tr.chosen button").inner_text() == SETTING
    page = open_page(pages[TRACES[0]], "#nobody/%E0%A4%A/9")  # an address that cannot be read is the beginning
    assert page.locator("#settings tr.chosen").count() == 1


def test_a_token_tells_what_the_target_thought(pages: dict[str, Path], open_page: Any) -> None:
    result = asdsim.replay(ROOT / "traces" / TRACES[0], B=8, g=0.5, M=1)
    page = open_page(pages[TRACES[0]], place(SETTING, REQUEST))
    strip, token = result.walk(0, REQUEST).relaxed[1]
    page.locator("#strips .t.relaxed").nth(1).hover()
    text = page.locator("#detail").inner_text()
    assert f"{token.regret:.4f}" in text and f"{token.score:.4f} against 0.5" in text
    assert f"{token.spent_before:.4f} → {token.spent_after:.4f} of 8" in text
    shares = [float(part.split()[0]) for part in page.locator("#detail .candidates .number").all_inner_texts()]
    logits = result.trace.column("positions", "top_logits")[token.row].astype(float)
    lse = float(result.trace.column("positions", "logsumexp")[token.row])
    expected = 100 * np.exp(logits - lse)
    assert shares == pytest.approx(expected[expected >= 0.1].tolist(), abs=0.6) and len(shares) > 2
    assert shares == sorted(shares, reverse=True)
    refused = page.locator("#strips .t.rejected").first
    refused.hover()
    assert "refused by" in page.locator("#detail").inner_text()


def test_filters(pages: dict[str, Path], open_page: Any) -> None:
    page = open_page(pages[TRACES[0]], place(SETTING, REQUEST))
    page.locator("#setting-filter").fill("B=8 M=2")
    names = page.locator("#settings tbody button").all_inner_texts()
    assert names and all(name.startswith("B=8 ") and name.endswith(" M=2") for name in names)
    page.locator("#setting-filter").fill("")
    page.locator("#front-only").check()
    assert 2 < page.locator("#settings tbody tr").count() < 91
    page.locator("#front-only").uncheck()
    page.locator("#task").select_option("humaneval")
    assert page.locator("#requests tbody tr").count() == 8
    page.locator("#task").select_option("")
    page.locator("#request-filter").fill("vacuum cleaners")
    assert page.locator("#requests tbody button").all_inner_texts() == [REQUEST]
    page.locator("#request-filter").fill("")
    page.locator("#changed").check()
    assert set(page.locator("#requests tbody button").all_inner_texts()) < {f"gsm8k/{n}" for n in range(200)}
    page.locator("#changed").uncheck()
    page.locator("#by-regret").check()
    spent = [float(row.split("\t")[2]) for row in page.locator("#requests tbody tr").all_inner_texts()]
    assert spent == sorted(spent, reverse=True)
    everything = page.locator("#strips .step").count()
    page.locator("#relaxed-only").check()
    assert 0 < page.locator("#strips .step").count() < everything
    page.locator("#settings th[data-name=mean_acceptance_length] button").click()
    assert page.locator("#settings th[aria-sort=descending]").count() == 1
    lengths = [float(text.split()[0]) for text in page.locator("#settings tbody td:nth-child(4)").all_inner_texts()]
    assert lengths == sorted(lengths, reverse=True)


def test_keyboard_walk(pages: dict[str, Path], open_page: Any) -> None:
    page = open_page(pages[TRACES[0]], place(SETTING, REQUEST))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("#strips .t").first.focus()
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
        seen.append(page.evaluate("[document.activeElement.dataset.step, document.activeElement.dataset.token].join()"))
    assert seen == ["0,1", "0,2", "1,2", "1,1", "0,1"]
    assert page.locator("#strips .t[tabindex='0']").count() == 1
    assert page.locator("#detail h3").count() == 1
    page.keyboard.press("Enter")
    until(page, "location.hash.split('/').length === 3")
    page.keyboard.press("j")
    until(page, "document.getElementById('walk-facts').textContent.startsWith('gsm8k/51')")
    page.keyboard.press("]")
    until(page, "!document.getElementById('walk-facts').textContent.includes('B=8 g=0.5 M=1 ')")


def test_a_prompt_that_is_an_attack_is_text(pages: dict[str, Path], open_page: Any) -> None:
    page = open_page(pages["hostile"])
    page.locator("#prompt summary").click()
    text = page.locator("#prompt-text").inner_text()
    assert "</script><script>window.owned=1</script><img src=x onerror" in text
    assert "\\u2028\\u2029" in text and "\\u202eright-to-left\\u202c" in text and "\U0001f600" in text
    assert "x" * 10_000 in text
    assert page.evaluate("window.owned") is None
    assert page.locator("main img, main script, #app iframe").count() == 0
    escaped = 0
    for request in range(page.locator("#requests tbody tr").count()):  # some toy requests end at once
        page.locator("#requests tbody button").nth(request).click()
        escaped += (page.locator("#strips").text_content() or "").lower().count("\\xe2\\x80")
        if page.locator("#strips .t").count():
            page.locator("#strips .t").first.hover()
    assert page.evaluate("window.owned") is None and escaped > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_settings_that_are_not_exact_are_marked_and_never_first(tmp_path: Path, open_page: Any) -> None:
    page = open_page(report(ROOT / "traces" / TRACES[0], tmp_path, "--B", "3.3,8", "--g", ".33,.25", "--M", "1"))
    heads = page.eval_on_selector_all("#settings th[data-name]", "all => all.map(head => head.dataset.name)")[1:]
    claims = {"speed_up_plain", "speed_up", "acceptance_length_gain", "outputs_differ_share", "edit_distance_mean"}
    partial = page.locator("#settings tr.partial")
    assert partial.count() == 3
    for n in range(3):
        row = dict(zip(heads, partial.nth(n).locator("td").all_inner_texts(), strict=True))
        assert {name for name in heads if row[name] == "–"} == claims
        assert all(row[name].startswith("~") for name in heads if name not in claims | {"exact"})
        assert "not exact" in partial.nth(n).locator("td").nth(2).get_attribute("title")
        assert "★" not in partial.nth(n).inner_text()
    assert page.locator("#settings tr.chosen button").inner_text() == "B=8 g=0.25 M=1"
    page.locator("#settings th[data-name=mean_acceptance_length] button").click()
    names = page.locator("#settings tbody button").all_inner_texts()
    assert names[:2] == ["B=8 g=0.25 M=1", "strict"]  # others are longer, but no results
    page.locator("#front-only").check()
    assert page.locator("#settings tr.partial").count() == 0
    page.locator("#front-only").uncheck()
    page.get_by_role("button", name="B=3.3 g=0.33 M=1", exact=True).click()
    until(page, "document.getElementById('verdict').textContent.includes('no result')")
    page.locator("#changed").check()
    assert "not known: their walks leave the trace" in page.locator("#request-count").inner_text()


def test_without_scripts_there_is_a_summary(pages: dict[str, Path], open_page: Any) -> None:
    page = open_page(pages[TRACES[0]], java_script_enabled=False)
    assert "tokens per step" in page.locator("#verdict").inner_text()
    assert page.locator("noscript table tbody tr").count() == 40
    assert page.locator("#app").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_serious_fault_for_readers_of_all_kinds(
    width: int, scheme: str, pages: dict[str, Path], open_page: Any
) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 1000}, "bypass_csp": True}
    page = open_page(pages[TRACES[0]], place(SETTING, REQUEST), **options)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 26)"
    assert dark == (scheme == "dark")
    page.locator("#strips .t.relaxed").first.hover()
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/report-{width}-{scheme}.png", full_page=width > 1000)
    if not AXE.exists():
        pytest.skip("no axe-core: npm install --prefix .cache/browser axe-core")
    page.add_script_tag(path=str(AXE))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    serious = [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []


def test_print(pages: dict[str, Path], open_page: Any) -> None:
    page = open_page(pages[TRACES[0]])
    page.emulate_media(media="print")
    assert page.locator("#detail").is_hidden() and page.locator("#strips").is_visible()
    assert page.evaluate("getComputedStyle(document.getElementById('settings')).maxHeight") == "none"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(page.pdf()) > 10_000


def test_names_of_settings_can_be_read_back() -> None:
    for text in ("strict", "B=8 g=0.5 M=1", "B=8 g=0.5 M=inf"):
        assert name_of(parse_setting(text).policy(0)) == text
