"""Rules other than ASD: what each accepts at its edges, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asdsim.errors import UsageError
from asdsim.records import FORBIDDEN_LOGIT, NO_PARENT, MemoryTrace, RequestRecord
from asdsim.rules import NAMES, get_rule
from asdsim.rules.fly import top3_entropy
from asdsim.rules.scoring import Layout, Rows, lay_out, regrets_of, run_lengths, suffix_values, uniform
from asdsim.rules.settings import rule_grids
from asdsim.rules.spec import Seen
from asdsim.trace.graph import build_graph
from asdsim.walk.request import ACCEPTED
from asdsim.walk.sweep import walk_grid
from tests.support.toygraph import record_step


def accepts(name: str, seen: Seen, **params: float | str) -> bool:
    """Ask a rule about one mismatch."""
    rule = get_rule(name)
    values = {**rule.defaults, **params}
    return rule.score(seen, values) <= rule.limit(values)


def seen(z1: float = 4.0, z: float = 3.0, **more: object) -> Seen:
    """Return a mismatch with best logit z1 and draft logit z under logsumexp 4.5."""
    return Seen(1, 5, z1 - z, z, [z1, z, z - 1.0], 4.5, **{"rank": 1, **more})  # type: ignore[arg-type]


def test_mars_needs_more_than_theta_and_the_runner_up() -> None:
    assert accepts("mars", seen(4.0, 3.7), theta=0.9)
    assert not accepts("mars", seen(4.0, 3.0), theta=0.75)  # .75 is not above .75
    assert accepts("mars", seen(4.0, 3.0), theta=np.nextafter(0.75, 0))
    assert not accepts("mars", seen(4.0, 3.9, rank=2))
    with pytest.raises(ValueError, match="z\\(1\\) <= 0"):
        accepts("mars", seen(0.0, -1.0))


def test_thresholds_that_include_their_edge_and_those_that_do_not() -> None:
    assert accepts("fuzzy", seen(divergence={"js": 0.4}))
    assert not accepts("fuzzy", seen(divergence={"js": 0.4000001}))
    ratio = math.exp(-1.0)
    assert accepts("multiplicative", seen(), ratio=ratio) and not accepts("vllm", seen(), ratio=ratio)
    fall = seen().p1 - seen().p
    assert accepts("additive", seen(), delta=fall) and not accepts("trtllm", seen(), delta=fall)
    assert accepts("topm", seen(rank=1)) and not accepts("topm", seen(rank=2))
    assert accepts("entropy", seen(entropy=2.0)) and not accepts("entropy", seen(entropy=2.0, rank=2))
    assert not accepts("entropy", seen(entropy=1.9999))


def test_ranks_bound_relaxed_thinking() -> None:
    assert accepts("vllm", seen(4.0, 3.9, rank=2)) and not accepts("vllm", seen(4.0, 3.9, rank=3))
    assert accepts("trtllm", seen(4.0, 3.9, rank=9)) and not accepts("trtllm", seen(4.0, 3.9, rank=10))
    assert not accepts("vllm", seen(4.0, 3.9, thinking=False))


def test_medusa_takes_the_smaller_threshold() -> None:
    p = math.exp(3.0 - 4.5)
    assert accepts("medusa", seen(entropy=0.0), eps=p - 0.01)  # p(x) > eps is enough
    assert not accepts("medusa", seen(entropy=0.0), eps=0.5, alpha=0.5)
    assert accepts("medusa", seen(entropy=3.0), eps=0.5, alpha=0.5)  # .5 exp(-3) < p(x)
    assert not accepts("medusa", seen(entropy=0.0), eps=0.5, alpha=p)  # p(x) = alpha exp(-0) is not above it
    assert accepts("medusa", seen(entropy=0.0), eps=0.5, alpha=float(np.nextafter(p, 0.0)))
    assert accepts("medusa", seen(z=2.0, entropy=1.5))  # exp(-2.5) = .0821 > .3 exp(-1.5) = .0669
    assert not accepts("medusa", seen(z=1.5, entropy=1.5))  # exp(-3) = .0498
    assert not accepts("medusa", seen(z=2.0, entropy=1.2))  # .0821 < .3 exp(-1.2) = .0904, and < eps = .09


def test_fly_waits_for_the_window() -> None:
    flat = Seen(0, 7, 0.0, 4.0, [4.0, 4.0, 4.0], 5.2, run=6)
    assert top3_entropy([4.0, 4.0, 4.0]) == pytest.approx(math.log(3))
    assert accepts("fly", flat)
    flat.run = 5
    assert not accepts("fly", flat)
    short = Seen(0, 3, 0.0, 4.0, [4.0, 4.0, 4.0], 5.2, run=2)  # W = K - 1 = 2
    assert accepts("fly", short)
    assert not accepts("fly", Seen(0, 3, 9.0, 4.0, [13.0, 4.0, 3.0], 13.0, run=2))  # sure of its choice


@pytest.mark.parametrize("name", ["sglang", "lenience"])
def test_zero_probability_is_never_accepted_not_even_at_u_zero(name: str) -> None:
    never = Seen(0, 3, 2000.0, -1990.0, [10.0, -1990.0, -1991.0], 10.0, rank=1, draft_logprob=-0.1, u=0.0)
    assert never.p == 0.0 and not accepts(name, never)
    barely = Seen(0, 3, 700.0, -690.0, [10.0, -690.0, -691.0], 10.0, rank=1, draft_logprob=-0.1, u=0.0)
    assert barely.p > 0.0 and accepts(name, barely)


def test_sampled_rules_follow_their_inequalities() -> None:
    p = math.exp(3.0 - 4.5)
    assert accepts("sglang", seen(u=p)) and not accepts("sglang", seen(u=p * 1.0001))
    assert accepts("sglang", seen(u=p * 1.9), acc=0.5) and accepts("sglang", seen(u=0.999), single=p)
    q = math.log(0.5)
    assert accepts("lenience", seen(u=0.99 * p / 0.5, draft_logprob=q))
    assert not accepts("lenience", seen(u=1.01 * p / 0.5, draft_logprob=q))
    assert accepts("lenience", seen(u=1.9 * p / 0.5, draft_logprob=q), l=0.5)


def test_uniform_numbers_depend_on_seed_request_and_position() -> None:
    values = np.array([uniform(seed, name, i) for seed in (0, 1) for name in ("a", "b") for i in range(5000)])
    assert len(np.unique(values)) == len(values) and values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01 and abs((values < 0.1).mean() - 0.1) < 0.01
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert uniform(0, "a", 3) == 0.7667059841692372  # fixed for good: sampled rules must replay as they ran


def test_a_forbidden_token_has_infinite_regret() -> None:
    best = np.array([2.0, 2.0, 0.1], np.float32)
    assert regrets_of(best, np.array([1.5, FORBIDDEN_LOGIT, 0.1], np.float32)).tolist() == [0.5, math.inf, 0.0]
    # In float64, from the float32 that were recorded: .1 - .3 of float32 is another number.
    exact = float(np.float32(0.3)) - float(np.float32(0.1))
    assert regrets_of(np.array([0.3], np.float32), np.array([0.1], np.float32)).tolist() == [exact]


def test_run_lengths_stop_at_mismatches_and_block_ends() -> None:
    matches = np.array([0, 1, 1, 0, 1, 0, 1, 1, 0], bool)  # blocks of 4, 2 and 3 rows
    step = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2])
    assert run_lengths(matches, step, np.array([0, 3, 5, 8])).tolist() == [2, 0, 0, 0]
    assert run_lengths(np.array([0, 1, 1], bool), np.array([0, 0, 1]), np.array([0])).tolist() == [1]


def test_value_schemes() -> None:
    at = np.array([0, 2, 4])
    assert suffix_values("suffix", 5, at).tolist() == [5, 3, 1]
    assert suffix_values("normalised", 5, at).tolist() == [1.0, 0.6, 0.2]
    assert suffix_values("unit", 5, at).tolist() == [1, 1, 1]
    assert suffix_values("reuse", 5, at, np.array([3, 0, 0])).tolist() == [4, 1, 1]


def thinking_trace() -> MemoryTrace:
    """Return one block after a prompt that ends in the marker 7; the block itself holds the end marker 8."""
    logits = np.full((5, 12), -20.0, np.float32)
    logits[:, 1] = 2.0
    logits[:, 5] = 1.9
    logits[1, 8] = 3.0
    draft = np.array([5, 8, 5, 1], np.int32)
    record = RequestRecord("think/0", "made", (3, 7), "", None, 40, (), "fixed")
    return MemoryTrace([(record, [record_step(0, NO_PARENT, NO_PARENT, 0, draft, logits)])])


@pytest.mark.parametrize(("begin", "end", "accepted"), [(-1, -1, 4), (7, 8, 2), (9, 8, 0), (3, 9, 4)])
def test_relaxed_in_the_thinking_phase_only(begin: int, end: int, accepted: int) -> None:
    [grid] = rule_grids("vllm", {"begin": begin, "end": end})
    walks = walk_grid(build_graph(thinking_trace(), grid.layout), grid, device="cpu")
    assert walks.counts[0, 0, ACCEPTED] == accepted


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_is_described(name: str) -> None:
    rule = get_rule(name)
    assert rule.name == name and rule.source and rule.accepts and rule.title
    assert all(parameter.check(name, parameter.default) == parameter.default for parameter in rule.parameters)
    if rule.knob:
        [knob] = [parameter for parameter in rule.parameters if parameter.name == rule.knob]
        assert all(knob.check(name, value) == value for value in rule.ladder) and len(rule.ladder) > 8


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("mars", {"theta": -0.1}, "outside its range"),
        ("lenience", {"l": 0}, "outside its range"),
        ("medusa", {"eps": "x"}, "not a number"),
        ("truncate", {"K": 0}, "outside its range"),
        ("fuzzy", {"kind": "l2"}, "not one of js"),
        ("mars", {"theta": []}, "is empty"),
        ("mras", {}, "did you mean 'mars'"),
        ("MARS", {}, "did you mean 'mars'"),
    ],
)
def test_parameters_outside_their_range(name: str, given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rule_grids(name, given)


def test_a_forbidden_token_passes_under_no_rule() -> None:
    rows = Rows(
        thinking_trace(), np.array([0]), np.array([0]), np.array([0]), np.array([4]), np.array([0]),
        np.array([np.inf]), lambda _: [],
    )  # fmt: skip
    for name in ("topm", "additive", "multiplicative", "vllm"):
        [grid] = rule_grids(name, {})
        assert np.isnan(lay_out(grid.layout, rows)[0]).all()
    assert np.isnan(lay_out(Layout(), rows)[0]).all()
