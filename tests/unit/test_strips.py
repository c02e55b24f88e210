"""What became of each token, held against the kernels' counts and against blocks worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.errors import UsageError
from asdsim.evaluate.strips import html_of, name_of, parted_at, relaxed_frame, request_row, walk_of
from asdsim.rules.settings import STRICT, Policy, parse_setting, rule_grids
from asdsim.trace.graph import build_graph
from tests.support.toytrace import write_toy_trace

TRACES = Path(__file__).parents[2] / "traces"


@pytest.mark.parametrize("semantics", ["paper", "core", "dspark", "lightllm"])
@pytest.mark.parametrize("off_trace", ["stop", "aligned", "recorded"])
def test_strips_add_up_to_the_figures_of_replay(tmp_path: Path, semantics: str, off_trace: str) -> None:
    write_toy_trace(tmp_path / "trace")
    options = {"B": [0.0, 1.5, 6.0], "g": [0.2, 0.7], "M": [1.0, np.inf], "semantics": semantics}
    result = asdsim.replay(tmp_path / "trace", **options, off_trace=off_trace)
    graph, requests = result.graph, range(result.graph.num_requests)
    policies = [result.grid.policy(n) for n in range(len(result))]
    walks = [[walk_of(result.trace, graph, policy, r, off_trace) for r in requests] for policy in policies]
    frame = result.frame()
    for row, of_setting in zip(frame.to_dicts(), walks, strict=True):
        counted = of_setting if off_trace != "stop" else [walk for walk in of_setting if walk.exact]
        strips = [strip for walk in counted for strip in walk.strips]
        assert row["num_spec_steps"] == len(strips)
        assert row["completion_tokens"] == sum(len(walk.tokens) for walk in counted)
        assert row["relaxed_tokens"] == sum(len(walk.relaxed) for walk in counted)
        for reason in ("gate", "budget", "cap"):
            names = {reason} if row["B"] > 0 or semantics == "lightllm" else set()
            assert not names or row[f"rejected_by_{reason}"] == sum(strip.ended in names for strip in strips)
        assert row["exact_share"] == np.mean([walk.exact for walk in of_setting])
        if counted:
            assert row["regret_spent_max"] == max(walk.spent for walk in counted)
        for strip in strips:
            ledger = [strip.spent, *(token.spent_after for token in strip.tokens if token.kind == "relaxed")]
            assert ledger[-1] == strip.spent_after or semantics == "lightllm"  # whose ledger is float32


def test_outputs_are_those_of_the_kernels() -> None:
    result = asdsim.replay(TRACES / "smollm2-layerskip-holdout", B="0,8", g=".25,.5", M="1,2")
    for n in range(len(result)):
        for r in range(result.graph.num_requests):
            assert walk_of(result.trace, result.graph, result.grid.policy(n), r).tokens == result.tokens(n, r)


def test_why_a_block_ended_and_by_how_much() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip")
    graph = build_graph(trace)
    policy = Policy(8.0, 0.5, 1.0)
    seen = set()
    for r in range(graph.num_requests):
        for strip in walk_of(trace, graph, policy, r).strips:
            seen.add(strip.ended)
            refused = [token for token in strip.tokens if token.kind == "rejected"]
            assert len(refused) == (strip.ended in ("gate", "budget", "cap"))
            kinds = [token.kind for token in strip.tokens]
            assert len([kind for kind in kinds if kind not in ("replacement", "bonus")]) == 7
            assert ("bonus" in kinds) == (strip.ended == "block")
            relaxed = [token for token in strip.tokens if token.kind == "relaxed"]
            before = [strip.spent, *(token.spent_after for token in relaxed)][:-1] if relaxed else []
            assert [token.spent_before for token in relaxed] == before
            if refused:
                behind = kinds[kinds.index("rejected") + 1 :]
                assert set(behind[1:]) <= {"discarded"} and behind[0] == "replacement"
            for token in refused:
                width = 7 - token.position
                assert token.score == token.regret / width
                if strip.ended == "gate":
                    assert strip.over == token.score - 0.5 > 0
                elif strip.ended == "budget":
                    paid = sum(other.charge for other in strip.tokens if other.kind == "relaxed")
                    assert strip.over == strip.spent + paid + token.charge - 8.0 > 0
                else:
                    assert strip.over == 1
    assert seen == {"gate", "budget", "cap", "block", "end"}


def test_strict_names_a_mismatch_and_its_regret() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip-k4")
    walk = walk_of(trace, build_graph(trace), STRICT, 0)
    ended = [strip for strip in walk.strips if strip.ended == "mismatch"]
    assert ended
    for strip in ended:
        (token,) = [token for token in strip.tokens if token.kind == "rejected"]
        assert strip.over == token.regret
    assert walk.strips[-1].final in ("eos", "limit")


def test_a_walk_that_leaves_the_trace_says_where(tmp_path: Path) -> None:
    write_toy_trace(tmp_path / "trace")
    trace = asdsim.load(tmp_path / "trace")
    graph = build_graph(trace)
    walks = [walk_of(trace, graph, Policy(50.0, 5.0, 9.0), r) for r in range(graph.num_requests)]
    left = [walk for walk in walks if not walk.exact]
    assert left
    for walk in left:
        assert [strip.final for strip in walk.strips][-1] == "missing"
        going_on = walk_of(trace, graph, Policy(50.0, 5.0, 9.0), walk.request, "aligned")
        assert [strip.estimated for strip in going_on.strips[: len(walk.strips)]] == [False] * len(walk.strips)
        assert all(strip.estimated for strip in going_on.strips[len(walk.strips) :])


def test_another_rule_is_named_where_it_refuses() -> None:
    trace = asdsim.load(TRACES / "smollm2-rules")
    (grid,) = rule_grids("mars", {"theta": 0.9})
    walk = walk_of(trace, build_graph(trace, grid.layout), grid.policy(0), 0)
    assert "mars" in {strip.ended for strip in walk.strips}
    assert walk.exact


def test_relaxed_tokens_as_a_frame() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip")
    graph = build_graph(trace)
    policy = Policy(8.0, 0.25, 2.0)
    walks = [walk_of(trace, graph, policy, r) for r in range(graph.num_requests)]
    frame = relaxed_frame(walks, trace.vocabulary.piece)
    assert len(frame) == sum(len(walk.relaxed) for walk in walks) > 0
    assert (frame["gate_share"] <= 1).all() and (frame["token"] != frame["choice"]).all()
    last = frame.group_by("request_id", maintain_order=True).last()
    assert dict(zip(last["request_id"], last["spent_after"], strict=True)) == {
        walk.request_id: walk.spent for walk in walks if walk.relaxed
    }


def test_walks_part_where_their_outputs_do() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip-k4")
    graph = build_graph(trace)
    for r in range(graph.num_requests):
        strict, other = walk_of(trace, graph, STRICT, r), walk_of(trace, graph, Policy(8, 0.5, 1), r)
        place = parted_at(strict, other)
        assert (place == -1) == (strict.tokens == other.tokens)
        if place >= 0:
            assert strict.tokens[:place] == other.tokens[:place]
            assert strict.tokens[place : place + 1] != other.tokens[place : place + 1]


def test_requests_by_row_or_name() -> None:
    assert request_row(["a/0", "b/1"], "b/1") == request_row(["a/0", "b/1"], 1) == request_row(["a/0", "b/1"], "1") == 1
    with pytest.raises(UsageError, match="rows go from 0 to 1"):
        request_row(["a/0", "b/1"], 2)
    with pytest.raises(UsageError, match="did you mean 'b/1'"):
        request_row(["a/0", "b/1"], "b/2")


def test_settings_as_people_write_them() -> None:
    assert parse_setting("strict").policy(0) == STRICT
    assert parse_setting("B=4 g=.25 M=2").policy(0) == Policy(4.0, 0.25, 2.0)
    assert parse_setting("B=4, g=inf, M=2").policy(0) == Policy(4.0, float("inf"), 2.0)
    assert str(parse_setting("mars theta=.9").policy(0)) == "mars theta=0.9"
    like = parse_setting("B=1 g=1 M=1", asdsim.Grid.product(1, 1, 1, "core"))
    assert like.semantics == "core"
    for text in ("", "B=4", "B=4 g=1 M=1 x", "B=4 g=1 M=1 T=2", "B=1,2 g=1 M=1", "nobody", "mars theta=.8:.9:.1"):
        with pytest.raises(UsageError):
            parse_setting(text)


def test_a_result_reads_its_outputs() -> None:
    result = asdsim.replay(TRACES / "smollm2-layerskip", B="0,8", g=0.25, M=2)
    frame = result.outputs().frame()
    for row in frame.to_dicts():
        for setting in row["setting_rows"]:
            assert result.text(setting, row["request_id"]) == row["text"]
        assert len(row["setting_rows"]) == row["settings"]
    assert frame["settings"].sum() == 2 * result.graph.num_requests
    assert len(result.relaxed(1)) == result.frame()["relaxed_tokens"][1]
    assert len(result.relaxed(0)) == 0
    assert result.walk(1, "gsm8k/13").tokens == result.tokens(1, 0)
    with pytest.raises(UsageError, match="no setting 2"):
        result.walk(2, 0)
    with pytest.raises(UsageError, match="no request 24"):
        result.text(0, 24)


def test_a_notebook_shows_the_table_and_a_strip() -> None:
    result = asdsim.replay(TRACES / "smollm2-layerskip", B="0,8", g=0.25, M=2)
    text = result._repr_html_()
    assert "gsm8k/13, B=8 g=0.25 M=2: first 6 of" in text
    walk = result.walk(1, 0)
    assert text.count('title="relaxed"') == sum(t.kind == "relaxed" for s in walk.strips[:6] for t in s.tokens)
    hostile = html_of(walk, lambda token: "<img src=x>\x1b")
    assert "<img" not in hostile and "&lt;img src=x&gt;\\x1b" in hostile


def test_two_relaxed_tokens_of_a_block_pay_one_after_the_other() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip")
    graph = build_graph(trace)
    blocks = 0
    for r in range(graph.num_requests):
        for strip in walk_of(trace, graph, Policy(16.0, 1.0, 2.0), r).strips:
            relaxed = [token for token in strip.tokens if token.kind == "relaxed"]
            if len(relaxed) == 2:
                blocks += 1
                first, second = relaxed
                assert first.spent_before == strip.spent and second.spent_before == first.spent_after
                assert second.spent_after == strip.spent_after == strip.spent + (first.charge + second.charge)
    assert blocks > 20


def test_a_ledger_of_its_own_for_each_block() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip")
    grid = asdsim.Grid.product(1.0, 2.0, 3.0, ledger="block")
    graph = build_graph(trace, grid.layout)
    overs = 0
    for r in range(graph.num_requests):
        for strip in walk_of(trace, graph, grid.policy(0), r, "recorded").strips:
            if strip.ended == "budget":
                paid = sum(token.charge for token in strip.tokens if token.kind == "relaxed")
                (token,) = [token for token in strip.tokens if token.kind == "rejected"]
                assert strip.over == paid + token.charge - 1.0 > 0
                overs += strip.spent > 1.0
    assert overs > 10


def test_drafts_that_a_shorter_block_does_not_look_at_are_discarded() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip")
    (grid,) = rule_grids("truncate", {"K": 4})
    graph = build_graph(trace, grid.layout)
    strips = [strip for r in range(8) for strip in walk_of(trace, graph, grid.policy(0), r, "recorded").strips]
    whole = [strip for strip in strips if strip.ended == "block"]
    assert whole
    for strip in whole:
        kinds = [token.kind for token in strip.tokens]
        assert kinds == ["exact"] * 4 + ["bonus"] + ["discarded"] * 3


def test_outputs_that_are_not_known_to_their_end_do_not_part_there() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip-k4")
    walk = walk_of(trace, build_graph(trace), STRICT, 0)
    cut = dataclasses.replace(walk, exact=False, strips=walk.strips[:3])
    assert parted_at(cut, walk) == parted_at(walk, cut) == -1
    assert parted_at(dataclasses.replace(cut, exact=True), walk) == len(cut.tokens)


def test_no_relaxed_token_for_each_block_is_strict() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip-k4")
    walk = walk_of(trace, build_graph(trace), Policy(8.0, 0.5, 0.0), 0)
    assert name_of(walk.policy) == "strict"
    assert {strip.ended for strip in walk.strips} <= {"mismatch", "block", "end"}
