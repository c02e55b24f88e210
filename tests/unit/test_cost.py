"""The cost model: fitted terms, robustness, tables that users give, and predicted seconds."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.errors import UsageError
from asdsim.evaluate.cost import CostModel, Linear, fit_trace, from_rows, robust
from asdsim.evaluate.cost_spec import read_cost
from asdsim.trace.covered import covered_settings
from asdsim.trace.graph import build_graph
from asdsim.walk import request as columns
from asdsim.walk.path import visits
from asdsim.walk.sweep import walk_grid

TRACES = Path(__file__).resolve().parents[2] / "traces"


def test_fit_finds_the_terms_under_noise_and_outliers() -> None:
    rng = np.random.default_rng(2)
    drafted, context = rng.integers(0, 9, 600).astype(float), rng.uniform(50, 900, 600)
    times = 20_000 + 700 * drafted + 12 * context + rng.normal(0, 200, 600)
    times[rng.random(600) < 0.08] *= 5  # now and then something else runs
    found, residual = robust(drafted, context, times)
    assert found.base == pytest.approx(20_000, rel=0.02)
    assert found.per_draft == pytest.approx(700, rel=0.05) and found.per_context == pytest.approx(12, rel=0.05)
    assert residual < 400
    only, _ = robust(np.full(600, 7.0), context, 5_000 + 3 * context)
    assert (only.per_draft, only.per_context) == (0.0, pytest.approx(3, rel=1e-3))
    falling, _ = robust(np.full(600, 7.0), context, 5_000 - 3 * context)
    assert falling.per_context == pytest.approx(0.0, abs=1e-3)  # no negative price


def test_seconds_of_a_request() -> None:
    model = CostModel(Linear(1000), Linear(2000, 100, 10), Linear(50), Linear(9000, 0, 20), "test")
    # First step 9000 + 20 * 30; three more at 1000 + 2000 + 500 + 50 + 10 * (30 + 8) microseconds.
    assert model.seconds(4, 20, 16, 30) == pytest.approx((9600 + 3 * 3930) * 1e-6)
    assert model.seconds(0, 0, 0, 30) == 0.0 and model.seconds(1, 5, 3, 30) == pytest.approx(9600e-6)


@pytest.mark.parametrize("name", ["smollm2-layerskip", "smollm2-lookup"])
def test_even_spread_of_steps_is_close_to_the_steps_themselves(name: str) -> None:
    trace = asdsim.load(TRACES / name)
    model, grid, graph = fit_trace(trace), covered_settings(trace), build_graph(trace)
    prompts = np.array([len(record.prompt_ids) for record in trace.request_records()])
    walks = walk_grid(graph, grid)
    counts = walks.counts
    quick = model.seconds(
        counts[:, :, columns.STEPS], counts[:, :, columns.DRAFTED], counts[:, :, columns.TOKENS], prompts
    )
    errors = []
    for n in range(0, len(grid), 5):
        total = 0.0
        for r in range(graph.num_requests):
            for visit in visits(graph, grid.policy(n), r)[0]:
                width, start = int(graph.drafted[visit.step]), int(graph.start[visit.step])
                part = model.step if start else model.first.at
                total += float(part(width, prompts[r] + start)) * 1e-6
        errors.append(abs(quick[n].sum() / total - 1))
    assert max(errors) < 0.01


def test_a_fit_of_a_trace_tells_what_it_stands_on() -> None:
    model = fit_trace(asdsim.load(TRACES / "smollm2-layerskip"))
    assert model.fit["steps"] == 494 and model.fit["first_steps"] == 24 and model.fit["per_draft_known"] is False
    assert model.draft.base > model.verify.base > model.select.base > 0
    assert fit_trace(asdsim.load(TRACES / "smollm2-lookup")).fit["per_draft_known"] is True


def test_timings_of_a_busy_machine_are_flagged() -> None:
    quiet, busy = (fit_trace(asdsim.load(TRACES / f"smollm2-{name}")) for name in ("layerskip", "eagle3"))
    assert quiet.fit["scatter"] < 0.03 and busy.fit["scatter"] > 0.2
    assert not any("busy" in note for note in quiet.notes())
    assert any("scatter by 28%" in note and "means little" in note for note in busy.notes())


@pytest.mark.parametrize("name", ["dspark", "layerskip", "layerskip-wide", "lookup", "medusa", "rules"])
def test_a_fit_gives_back_the_recorded_timings(name: str) -> None:
    """Median time of a step, drafting and verification, within 10 % on traces captured on a quiet machine."""
    trace = asdsim.load(TRACES / f"smollm2-{name}")
    model, path = fit_trace(trace), (trace.column("steps", "wave") == 0) & (trace.column("steps", "start_pos") > 0)
    prompts = np.array([len(record.prompt_ids) for record in trace.request_records()])
    drafted = trace.column("steps", "num_draft_tokens")[path].astype(float)
    context = (prompts[trace.step_request] + trace.column("steps", "start_pos"))[path].astype(float)
    recorded = sum(trace.column("steps", f"{part}_us")[path].astype(float) for part in ("draft", "verify", "select"))
    assert float(np.median(recorded / model.step(drafted, context))) == pytest.approx(1.0, abs=0.1)


def test_tables_of_step_times(tmp_path: Path) -> None:
    file = tmp_path / "cost.csv"
    file.write_text(
        "num_draft_tokens,context,draft_us,verify_us\n1,100,10,1100\n5,100,50,1500\n5,900,50,1900\n1,900,10,1500\n"
    )
    model = read_cost(str(file))
    assert model.verify.at(3, 500) == pytest.approx(1500, rel=1e-3) and model.draft.at(3, 0) == pytest.approx(
        30, rel=1e-3
    )
    one = tmp_path / "cost.json"
    one.write_text(json.dumps({"draft_us": 5, "verify_us": 20, "select_us": 1}))
    assert read_cost(str(one)).step(7, 1000) == 26 and read_cost(str(one)).first.at(7, 10) == 26
    assert read_cost("h20-deepseek-v4-flash").step(5, 0) == pytest.approx(146_358, rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "no rows"), ([{"draft_us": 4}], "row 1: no verify_us"), ([{"verify_us": "fast"}], "'fast' is not a number"),
     ([{"verify_us": -3}], "is no time"), ([{"verify_ms": 3}], "did you mean 'verify_us'")],
)  # fmt: skip
def test_tables_that_cannot_be_meant(rows, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_rows(rows, "table")
    with pytest.raises(UsageError, match="unknown cost"):
        read_cost("h21")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", b'{"verify_us": true}', "row 1: verify_us True is not a number"),
        ("a.json", b'{"verify_us": 1e999}', "is no time"),
        ("a.json", b'{"verify_us": NaN}', "is no time"),
        ("a.json", b'{"verify_us": 1' + b"0" * 400 + b"}", "is no time"),
        ("a.json", b'{"verify_us": 1' + b"0" * 5000 + b"}", "more than 4,300 digits"),
        ("a.json", b'{"verify_us": 0}', "verify_us is 0"),
        ("a.json", b'{"verify_us": [1]}', "is not a number"),
        ("a.json", b"[" * 20000, "line 1"),
        ("a.json", b"[1]", "not a JSON object"),
        ("a.json", b"\xff\xfe", "text in UTF-16"),
        ("a.csv", b"verify_us\n1,2\n", "row 1: more cells than columns"),
        ("a.csv", b"verify_us\n\x1b[31mred\n", "is not a number"),
        ("a.csv", b"", "no rows"),
        (
            "a.csv",
            b"verify_us\n1e308\n",
            "row 1: verify_us '1e308' is no time or length (give a number from 0 to 1e+12)",
        ),
        ("a.csv", b"verify_us,draft_us\n3,1e13\n", "draft_us '1e13' is no time or length"),
        ("a.csv", b"width,milliseconds\n1,1e308\n", "milliseconds '1e308' is no time or length"),
        ("a.csv", b"width,milliseconds\n1.5,3\n", "width '1.5' is no whole number"),
        ("a.csv", b"verify_us,draft_us,verify_us\n3,4,5\n", "column 'verify_us' appears twice"),
    ],
)
def test_a_hostile_table_is_one_clear_error(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        read_cost(str(tmp_path / name))
    assert "\x1b" not in str(refused.value)


def test_tables_as_spreadsheets_and_tools_write_them(tmp_path: Path) -> None:
    table = b"\xef\xbb\xbfverify_us,draft_us\r\n20,5\r\n"
    for name, data in (("a.csv", table), ("a.csv.gz", gzip.compress(table)), ("a.json", b'[\n {"verify_us": "20",\n'
                       b'  "draft_us": 5}\n]'), ("a.jsonl", b'{"verify_us": 20, "draft_us": 5}\n')):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        assert read_cost(str(tmp_path / name)).step(7, 1000) == 25


def test_a_long_cell_is_shown_in_part(tmp_path: Path) -> None:
    for cell in ("x" * 5000, "9" * 5000):
        (tmp_path / "a.csv").write_text(f"verify_us\n{cell}\n")
        with pytest.raises(UsageError, match="verify_us '") as refused:
            read_cost(str(tmp_path / "a.csv"))
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", ["cost.CSV", "cost", "cost.txt", "cost.csv.gz", "cost.json", "fd"])
def test_a_table_is_known_by_what_it_holds(tmp_path: Path, name: str) -> None:
    for text in (
        "draft_us,verify_us\n5,20\n",
        '\n{"draft_us": 5, "verify_us": 20}\n',
        '[{"draft_us": 5, "verify_us": 20}]',
    ):
        if name == "fd":  # as a shell's <(command) hands it over
            reader, writer = os.pipe()
            os.write(writer, text.encode())
            os.close(writer)
            assert read_cost(f"/dev/fd/{reader}").step(7, 0) == 25
            os.close(reader)
            continue
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        assert read_cost(str(tmp_path / name)).step(7, 0) == 25
