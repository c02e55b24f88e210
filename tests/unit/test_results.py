"""What a row may be taken for: exact or not, beside which baseline, on which requests."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.capture.cover import BatchRunner, cover
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.errors import UsageError
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT, Grid, Policy, rule_grids
from asdsim.trace.graph import build_graph
from asdsim.trace.manifest import Manifest
from asdsim.trace.writer import TraceWriter
from asdsim.walk.demand import demand_of
from asdsim.walk.estimate import drawn_walks, mean_walks
from asdsim.walk.request import ACCEPTED, LEFT, STEPS, TOKENS
from asdsim.walk.sweep import sweep_graph, walk_grid
from tests.support.toymodels import ToyDrafter, ToyTarget

TRACES = Path(__file__).resolve().parents[2] / "traces"
K = 4
LOOSE = Policy(math.inf, 2.0, 2.0)
"""The setting that the trace is captured under; it relaxes something on every request."""


def write(path: Path, policy: Policy, requests: int = 10, limit: int = 24) -> tuple[ToyTarget, ToyDrafter]:
    """Capture toy requests under a setting."""
    target = ToyTarget(4, vocab=16)
    drafter = ToyDrafter(target, 0.5)
    manifest = Manifest(
        target=target.describe(), drafter=drafter.describe(), vocab_size=16, num_draft_tokens=K, max_new_tokens=limit,
        rule={"name": "strict"} if policy is STRICT else {"name": "asd", "B": "inf", "g": 2.0, "M": 2.0},
    )  # fmt: skip
    with TraceWriter.create(path, manifest) as writer:
        for record in records(requests, limit):
            writer.add_request(record, decode(target, drafter, record, policy, K, Recorder()).steps)
    return target, drafter


def records(requests: int = 10, limit: int = 24) -> list[RequestRecord]:
    return [RequestRecord(f"toy/{n}", "toy", (n, 1), "", None, limit, (), "fixed") for n in range(requests)]


def cover_some(path: Path, models: tuple[ToyTarget, ToyDrafter], grid: Grid, requests: int) -> None:
    """Cover a grid for the first requests only, as a cover that is interrupted leaves it."""
    trace = asdsim.load(path)
    held = [(record, trace.steps_of(record.request_id)) for record in trace.request_records()[:requests]]
    with TraceWriter.append(path) as writer:
        runner = BatchRunner(*models, K, Recorder())
        assert cover(held, lambda graph: demand_of(graph, [grid]), runner, writer.add_steps, settings=1).complete


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory):
    """A trace captured under a loose setting, its strict walks known for 2 of 10 requests; with the models."""
    path = tmp_path_factory.mktemp("loose") / "trace"
    models = write(path, LOOSE)
    cover_some(path, models, Grid.of([STRICT]), 2)
    return path, *models


def live(models: tuple[ToyTarget, ToyDrafter], policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and steps of each request, decoded live."""
    done = [decode(*models, record, policy, K, Recorder()) for record in records()]
    return np.array([len(one.tokens) for one in done]), np.array([len(one.steps) for one in done])


def test_a_row_is_never_compared_with_strict_on_other_requests(loose) -> None:
    path, *models = loose
    result = asdsim.replay(path, B=[math.inf, 0], g=2, M=2)
    row, strict = result.rows()
    tokens, steps = live(models, LOOSE)
    assert (row["requests"], row["exact"], row["paired_requests"]) == (10, True, 2)
    assert row["mean_acceptance_length"] == tokens.sum() / steps.sum()
    # Over the two pairs a gain could be computed, and strict beside it: on other requests than the row's own.
    pair = live(models, STRICT)
    assert pair[0][:2].sum() / pair[1][:2].sum() != tokens[:2].sum() / steps[:2].sum()
    for name in ("acceptance_length_gain", "strict_mean_acceptance_length", "strict_accepted_per_proposal"):
        assert row[name] is None
    assert (strict["requests"], strict["exact"], strict["exact_share"], strict["paired_requests"]) == (2, False, 0.2, 2)
    assert strict["acceptance_length_gain"] is None
    outputs = result.outputs()
    assert (outputs.strict == 0).tolist() == [True] * 2 + [False] * 8
    table = outputs.divergence().to_dicts()
    assert table[0]["requests"] == 2 and table[0]["outputs_differ"] == 2 and table[0]["outputs_differ_share"] is None


def test_the_pair_comes_back_once_strict_is_covered(loose, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    shutil.copytree(loose[0], path)
    cover_some(path, loose[1:], Grid.of([STRICT]), 10)
    row = asdsim.replay(path, B=math.inf, g=2, M=2).rows()[0]
    tokens, steps = live(loose[1:], LOOSE)
    base_tokens, base_steps = live(loose[1:], STRICT)
    base = base_tokens.sum() / base_steps.sum()
    assert (row["requests"], row["paired_requests"]) == (10, 10)
    assert row["strict_mean_acceptance_length"] == base
    assert row["acceptance_length_gain"] == (tokens.sum() / steps.sum()) / base - 1.0


@pytest.mark.parametrize("by", ["pairs", "boxes"])
def test_pairs_are_counted_alike_however_a_grid_is_walked(loose, by: str) -> None:
    graph = build_graph(asdsim.load(loose[0]))
    grid = Grid.product([0, 0.5, 2, math.inf], [0.25, 2], [1, 2])
    exact, strict = walk_grid(graph, grid).exact, walk_grid(graph, Grid.of([STRICT])).exact[0]
    assert 0 < strict.sum() < 10 and len(set(exact.sum(axis=1).tolist())) > 2
    assert np.array_equal(sweep_graph(graph, grid, by=by)["paired_requests"], (exact & strict).sum(axis=1))
    assert (sweep_graph(graph, grid, by=by, off_trace="aligned")["paired_requests"] == strict.sum()).all()


def test_survivors_have_no_gain_and_estimates_are_marked(tmp_path: Path) -> None:
    write(tmp_path / "trace", STRICT)
    rows = {
        mode: asdsim.replay(tmp_path / "trace", B=[0, 1], g=2, M=2, off_trace=mode).rows()
        for mode in ("stop", "aligned", "recorded", "pooled")
    }
    for mode, (strict, row) in rows.items():
        assert strict["exact"] and strict["acceptance_length_gain"] == 0.0
        assert not row["exact"] and row["exact_share"] < 1 and row["paired_requests"] == row["requests"]
        assert row["requests"] == (10 if mode != "stop" else round(10 * row["exact_share"]))
        assert (row["acceptance_length_gain"] is None) == (mode == "stop")


def test_a_baseline_that_accepts_ties_says_so(loose) -> None:
    rows = {name: asdsim.replay(loose[0], B=1, g=2, M=2, semantics=name).rows()[0] for name in ("paper", "lightllm")}
    assert rows["paper"]["baseline"] == "strict (token ids)"
    assert rows["lightllm"]["baseline"] == "B=0 of lightllm (accepts ties)"


def test_a_row_is_exact_where_no_request_is_missing_at_all() -> None:
    grid = Grid.product([8, 12, 16], [0.25, 1], [2, math.inf])
    graph = build_graph(asdsim.load(TRACES / "smollm2-layerskip"))
    share = walk_grid(graph, grid).exact.mean(axis=1)
    assert ((share > 0.5) & (share < 1)).any() and (share == 1).any()
    for off_trace in ("stop", "recorded"):
        rows = sweep_graph(graph, grid, off_trace=off_trace)
        assert np.array_equal(rows["exact"], share == 1) and np.array_equal(rows["exact_share"], share)


def test_draws_are_averaged_as_everywhere_and_exact_walks_are_themselves(loose) -> None:
    graph = build_graph(asdsim.load(loose[0]))
    grid = Grid.product([0, 0.5, 2, math.inf], [0.25, 2], [1, 2])
    true = walk_grid(graph, grid)
    drawn = drawn_walks(graph, grid, true, device="cpu", threads=1)
    counts, spent = mean_walks(graph, grid, true)
    assert 0 < true.exact.sum() < true.exact.size
    assert np.array_equal(counts[true.exact], true.counts[true.exact])
    assert np.array_equal(spent[true.exact], true.spent[true.exact])
    by_draw = drawn.counts.reshape(len(grid), -1, *true.counts.shape[1:])
    assert np.array_equal(counts[..., :LEFT], by_draw.mean(axis=1)[..., :LEFT]) and by_draw.shape[1] == 32
    # Each draw's steps are in the histogram once, whether it went on or was exact.
    assert np.array_equal(drawn.histogram.sum(axis=1), drawn.counts[..., STEPS].sum(axis=1))
    accepted = drawn.histogram @ np.arange(drawn.histogram.shape[1])
    assert np.array_equal(accepted, drawn.counts[..., ACCEPTED].sum(axis=1))
    frame = asdsim.replay(loose[0], B=[0, 0.5, 2, math.inf], g=[0.25, 2], M=[1, 2], off_trace="pooled").frame()
    length = counts[..., TOKENS].sum(axis=1) / counts[..., STEPS].sum(axis=1)
    assert np.allclose(frame["mean_acceptance_length"], length, rtol=1e-12)


def test_without_settings_a_covered_trace_shows_what_is_covered() -> None:
    result = asdsim.replay(TRACES / "smollm2-dspark")
    asked = asdsim.replay(TRACES / "smollm2-dspark", B="0,4,8", g=".1,.25,.5", M="1,2")
    assert result.off_trace == "stop" and result.columns["exact"].all()
    assert result.frame().equals(asked.frame())
    assert asdsim.replay(TRACES / "smollm2-dspark", off_trace="aligned").off_trace == "aligned"  # said, so it is so


def test_without_settings_and_nothing_covered_a_default_grid_is_estimated(loose) -> None:
    result = asdsim.replay(loose[0])
    assert result.off_trace == "pooled" and len(result) == 6 * 4 * 3 and not result.columns["exact"].all()
    assert asdsim.replay(loose[0], off_trace="stop").off_trace == "stop"
    # What is covered is covered for the paper's reading: another one is estimated too.
    assert asdsim.replay(TRACES / "smollm2-dspark-k4", semantics="core").off_trace == "pooled"
    with pytest.raises(UsageError, match="no value for g, M"):
        asdsim.replay(loose[0], B=1)


def test_a_setting_or_request_that_is_not_there_is_named_with_the_range(loose) -> None:
    result = asdsim.replay(loose[0], B=math.inf, g=2, M=2)
    assert result.tokens(0, 9) and result.margin(0, 9) >= 0
    for ask in (result.tokens, result.margin):
        with pytest.raises(UsageError, match="no setting 999 .settings are numbered 0 to 0"):
            ask(999, 0)
        with pytest.raises(UsageError, match="no request 10 .requests are numbered 0 to 9"):
            ask(0, 10)
        with pytest.raises(UsageError, match="no request -1"):
            ask(0, -1)


def test_survivors_do_not_compete(tmp_path: Path) -> None:
    write(tmp_path / "trace", STRICT)
    partly = asdsim.replay(tmp_path / "trace", B=[0, 1, 2], g=2, M=2)
    assert partly.pareto()["B"].to_list() == [0.0]  # the exact row, whatever the others say
    with pytest.raises(UsageError, match="no setting is exact.*asdsim cover.*pooled"):
        asdsim.replay(tmp_path / "trace", B=[1, 2], g=2, M=2).pareto()
    assert len(asdsim.replay(tmp_path / "trace", B=[1, 2], g=2, M=2, off_trace="pooled").pareto())


def test_the_package_shows_its_public_names() -> None:
    assert dir(asdsim) == sorted(asdsim.__all__) and {"load", "replay", "Result"} <= set(dir(asdsim))
    assert all(hasattr(asdsim, name) for name in dir(asdsim))


@pytest.mark.parametrize("off_trace", ["stop", "aligned", "pooled"])
def test_truncated_blocks_are_compared_with_strict_on_whole_ones(loose, tmp_path: Path, off_trace: str) -> None:
    path = tmp_path / "trace"
    write(path, STRICT)
    cover_rule = rule_grids("truncate", {"K": [2]})[0]
    trace = asdsim.load(path)
    held = [(record, trace.steps_of(record.request_id)) for record in trace.request_records()]
    with TraceWriter.append(path) as writer:
        cover(
            held, lambda graph: demand_of(graph, [cover_rule]), BatchRunner(*loose[1:], K, Recorder()),
            writer.add_steps, settings=1, build=lambda rows: build_graph(rows, cover_rule.layout),
        )  # fmt: skip
    row = asdsim.replay(path, rule="truncate", K=2, off_trace=off_trace).rows()[0]
    strict = asdsim.replay(path, B=0, g=1, M=1).rows()[0]
    assert row["exact"] and row["strict_mean_acceptance_length"] == strict["mean_acceptance_length"]
    assert row["mean_acceptance_length"] < strict["mean_acceptance_length"] and row["acceptance_length_gain"] < 0
    assert row["completion_tokens"] == strict["completion_tokens"]
    oracle = asdsim.replay(path, rule="truncate", K=2, device="reference").rows()[0]
    assert oracle["acceptance_length_gain"] == row["acceptance_length_gain"]
