"""Published figures follow from their counters to the last digit, and the page says what the script computes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page():
    return runpy.run_path(str(ROOT / "analysis" / "published.py"))


def test_derived_figures_equal_the_printed_ones(page) -> None:
    for run in (page["NATIVE"], page["ASD"]):
        assert repr(run.accepted / run.proposals) == run.printed_per_proposal
        assert repr(run.tokens / float(run.seconds)) == run.printed_rate
        assert sum(run.histogram) == run.proposals
        assert sum(j * n for j, n in enumerate(run.histogram)) == sum(run.by_position) == run.accepted
        for check in page["derived"](run)[:6]:
            assert check[2].endswith(("True", "yes")), check


def test_the_gain_that_reaches_throughput(page) -> None:
    found = page["shares"]()
    assert (round(found["accepted"], 2), round(found["length"], 2), round(found["rate"], 2)) == (7.64, 6.0, 5.44)
    alone, full = page["predicted"]()
    assert alone == pytest.approx(found["length"]) and full == pytest.approx(found["rate"])


def test_the_frozen_quantile(page) -> None:
    assert [value.split()[0] for _, value in page["quantile_checks"]()] == ["1.75", "8.75", "120.75", "2.0625"]


def test_the_page_is_current(page) -> None:
    assert (ROOT / "docs" / "published.md").read_text(encoding="utf-8") == page["document"]()


def test_the_tables_average_to_what_is_printed_of_them(page) -> None:
    main, drawn = page["PAPER"]["table_1"], page["PAPER"]["figure_3b"]["qwen3-14b-dspark"]
    ten = [cell for row in page["PAPER"]["table_2"].values() for cell in row.values()]
    assert len(main) == 7 and len(ten) == 10 and len(page["cells"]()) == 15
    assert round(page["mean"](cell["gain"] for cell in main.values()), 2) == 7.78
    assert round(page["mean"](cell["gain"] for cell in ten), 2) == 7.52
    assert (min(cell["gain"] for cell in ten), max(cell["gain"] for cell in ten)) == (3.05, 15.26)
    lengths = [page["mean"](cell[name] for cell in main.values()) for name in ("strict_length", "asd_length")]
    assert [round(length, 2) for length in lengths] == [3.85, 4.20]
    # The README of the reference repository follows figure 3(b), not table 1.
    assert round(page["mean"](drawn.values()), 2) == page["README_MEAN"]
    assert (min(drawn.values()), max(drawn.values())) == page["README_ENDS"]


def test_lightllms_figures_are_whole_answers(page) -> None:
    report = page["LIGHTLLM"]
    assert round(page["change"](*report["rate"]), 2) == 13.34
    for right, share in zip((1051, 1048), report["accuracy"], strict=True):
        assert round(100 * right / report["requests"], 3) == pytest.approx(share, abs=1.1e-3)
    text = dict(page["disagreements"]())["GSM8K on Qwen3-14B with DSpark, +10.08 % and +.15 points at B=8"]
    assert "+13.34 %" in text and "-0.227 points" in text
