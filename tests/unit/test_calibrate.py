"""Choosing, freezing and judging: the rule of choice, refusals, the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.errors import UsageError
from asdsim.evaluate.cost import fit_trace
from asdsim.evaluate.quality import Evaluator, Quality
from asdsim.oracle import walk as oracle
from asdsim.result import reference_blocks
from asdsim.rules import NAMES, get_rule
from asdsim.rules.frozen import read_policy
from asdsim.rules.settings import Grid, rule_grids
from asdsim.stats import Intervals
from asdsim.studies.audit import Audit, audit
from asdsim.studies.calibrate import (
    Limits,
    Quantile,
    calibrate,
    check_disjoint,
    fastest,
    policy_record,
    rejection_ratios,
)
from asdsim.studies.frozen import check_same_models, identity, write_policy
from asdsim.trace.graph import build_graph
from asdsim.trace.reader import read_trace
from tests.cli.test_rules import write as write_rules_trace
from tests.support.toytrace import write_relaxed_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"
GRID = Grid.product("0,4,8", ".1,.25,.5", "1,2")


def choose(quality, limits: Limits) -> int:
    """Return the row that is chosen from one table."""
    return fastest([quality], limits)[1]


def by_oracle(source, policy) -> tuple[list[int], list[int]]:
    """Return the tokens and the steps of every request under a setting, walked by the oracle."""
    walks = [
        oracle.walk(blocks, B=policy.budget, g=policy.gate, M=policy.cap, max_new_tokens=record.max_new_tokens,
                    eos=record.eos_ids)
        for record, blocks in zip(source.request_records(), reference_blocks(source), strict=True)
    ]  # fmt: skip
    return [len(walk.tokens) for walk in walks], [len(walk.accepted) for walk in walks]


def table(settings: Grid, exact: bool = True, **figures: list[tuple[float, float, float]]) -> Quality:
    """Return a table of figures, each (value, low, high) per setting."""
    number = len(settings)
    return Quality(
        settings, np.full(number, 24), np.ones(number), np.full(number, exact),
        {name: Intervals(*np.array(rows, float).T) for name, rows in figures.items()}, np.zeros(number),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trace():
    return asdsim.load(TRACES / "smollm2-layerskip")


@pytest.fixture(scope="module")
def holdout():
    return asdsim.load(TRACES / "smollm2-layerskip-holdout")


def test_quantile_is_the_papers() -> None:
    class Graph:
        num_requests = 1

        def parts(self):
            yield slice(0, 1), self

    def of(values):
        graph = Graph()
        count = len(values)
        graph.path_step, graph.path_ptr = np.arange(count), np.array([0, count])
        graph.mm_ptr, graph.mm_score = np.arange(count + 1), np.array(values, float)
        return Quantile(semantics="dspark").setting(graph)

    assert of([1, 2, 3, 4]).budget[0] == of([4, 1, 3, 2]).gate[0] == 1.75
    assert of(range(1, 33)).gate[0] == 8.75
    # Values of 0 are no positive ratios.
    assert of([0, 0, 1, 2, 3, 4]).gate[0] == 1.75
    with pytest.raises(UsageError, match="no block"):
        of([])


def test_first_rejections_are_counted_by_hand(trace) -> None:
    found = []
    for record in trace.request_records():
        for step in trace.steps_of(record.request_id):
            if step.wave:
                continue
            wrong = np.flatnonzero(step.draft_ids != step.argmax_ids[:-1])
            if not len(wrong) or step.start_pos + wrong[0] >= record.max_new_tokens:
                continue
            i = int(wrong[0])
            if any(int(token) in record.eos_ids for token in step.draft_ids[:i]):
                continue
            regret = float(step.top_logits[i, 0]) - float(step.draft_logits[i])
            if regret > 0:
                found.append(regret / (step.num_draft_tokens - i))
    assert np.allclose(sorted(rejection_ratios(build_graph(trace))), sorted(found)) and len(found) > 300


def test_the_fastest_within_limits_is_chosen(trace) -> None:
    quality = Evaluator(trace, cost=fit_trace(trace)).evaluate(GRID)
    speed, regret = quality.figures["speed_up"].value, quality.figures["regret_per_token"].value
    assert speed[choose(quality, Limits())] == speed.max()
    for most in (0.005, 0.02, 0.05):
        best = choose(quality, Limits(regret_per_token=most))
        fine = regret <= most
        assert fine[best] and speed[best] == speed[fine].max()
    strict = choose(quality, Limits(divergence=0.0))
    assert GRID.budget[strict] == 0 and (GRID.gate[strict], GRID.cap[strict]) == (0.1, 1)  # the first of equals
    careful = choose(quality, Limits(regret_per_token=0.05, bound=True))
    assert quality.figures["regret_per_token"].high[careful] <= 0.05
    order = np.random.default_rng(0).permutation(len(GRID))
    mixed = replace(GRID, budget=GRID.budget[order], gate=GRID.gate[order], cap=GRID.cap[order])
    again = Evaluator(trace, cost=fit_trace(trace)).evaluate(mixed)
    for limits in (Limits(), Limits(regret_per_token=0.02), Limits(divergence=0.0)):
        one, other = choose(quality, limits), choose(again, limits)
        assert GRID.policy(one) == mixed.policy(other)
    with pytest.raises(UsageError, match="needs accuracy_change"):
        choose(quality, Limits(accuracy_drop=0.1))
    hopeless = Evaluator(trace, scorer=lambda request, tokens: False if request < 8 else None).evaluate(GRID)
    with pytest.raises(UsageError, match="8 of 24 requests are scored, strict matching gets 0 right: there is nothing"):
        choose(hopeless, Limits(accuracy_drop=0.1))
    with pytest.raises(UsageError, match="none of 24 requests is scored"):
        choose(Evaluator(trace, scorer=lambda request, tokens: None).evaluate(GRID), Limits(accuracy_drop=0.1))
    needed = ["mean_acceptance_length", "outputs_differ_share", "regret_per_token"]
    relaxed_only = Evaluator(trace).evaluate(Grid.product(8, 0.5, 2), figures=needed)
    with pytest.raises(UsageError, match="none of 1 settings meets divergence <= 0"):
        choose(relaxed_only, Limits(divergence=0.0))


def test_frozen_judged_and_read_back(trace, holdout, tmp_path) -> None:
    cost = fit_trace(trace)
    made = calibrate(
        Evaluator(trace, cost=cost), GRID, holdout=Evaluator(holdout, cost=cost), limits=Limits(regret_per_token=0.05)
    )
    name, lengths = "mean_acceptance_length", []
    for source, side in ((trace, made.calibration), (holdout, made.holdout)):
        tokens, steps = by_oracle(source, made.grid.policy(0))
        assert side.figures[name].value[0] == sum(tokens) / sum(steps) and side.requests[0] == 24
        lengths.append(sum(tokens) / sum(steps))
    assert made.optimism()[name] == lengths[0] - lengths[1] != 0.0
    file = tmp_path / "policy.json"
    write_policy(policy_record(made, trace, holdout, cost), file)
    grid, record = read_policy(file)
    assert grid.policy(0) == made.grid.policy(0)
    assert record["calibration"]["checksum"] == trace.manifest.checksum
    assert record["holdout"]["checksum"] == holdout.manifest.checksum
    assert record["target"] == trace.manifest.target and record["value"] == "suffix"
    write_policy(policy_record(made, trace, holdout, cost), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()


def test_an_infinite_cap_survives_the_file(trace, tmp_path) -> None:
    made = calibrate(Evaluator(trace), Grid.product(16, 0.25, "inf"))
    write_policy(policy_record(made, trace, None, None), tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["M"] == "inf"
    assert read_policy(tmp_path / "p.json")[0].cap[0] == float("inf")


def test_a_holdout_that_shares_prompts_is_refused(trace) -> None:
    with pytest.raises(UsageError, match="24 of its 24 prompts are in the calibration set"):
        calibrate(Evaluator(trace), GRID, holdout=Evaluator(trace))


def test_prompts_are_shared_by_tokens_or_by_text(trace) -> None:
    records = trace.request_records()

    class Other:
        path = "other"
        num_requests = 1

        def __init__(self, **change) -> None:
            self.records = [replace(records[0], request_id="new", **change)]

        def request_records(self):
            return self.records

        def request_ids(self):
            return ["new"]

    words = records[0].prompt_text.split()
    for change in ({"prompt_text": "else"}, {"prompt_ids": (1, 2), "prompt_text": "  ".join(words)}):
        with pytest.raises(UsageError, match="1 of its 1 prompts are in the calibration set"):
            check_disjoint(trace, Other(**change))
    check_disjoint(trace, Other(prompt_ids=(1, 2), prompt_text="else"))


def test_another_block_length_is_refused(trace) -> None:
    here = identity(trace)
    with pytest.raises(UsageError, match="K is 4, not 7"):
        check_same_models(here, {**here, "num_draft_tokens": 4}, "there")
    check_same_models(here, here, "there")


def test_the_front_falls_in_accuracy_and_rises_in_speed() -> None:
    grid = Grid.product([1, 2, 3, 4], 1, 1)
    speeds, right = [1.0, 1.2, 1.5, 1.4], [0.9, 0.8, 0.5, 0.4]
    quality = table(grid, mean_acceptance_length=[(v, v, v) for v in speeds], accuracy=[(v, v, v) for v in right])
    assert Audit(quality, {}, 0, 0).front()["B"].to_list() == [1.0, 2.0, 3.0]  # the last is slower and less often right


def test_other_models_are_refused(trace) -> None:
    with pytest.raises(UsageError, match="drafter name"):
        calibrate(Evaluator(trace), GRID, holdout=Evaluator(asdsim.load(TRACES / "smollm2-lookup")))


def test_settings_that_are_not_exact_are_no_candidates(trace, holdout) -> None:
    mixed = Grid.product("4,5", ".25,.3", 2)
    assert (
        calibrate(Evaluator(trace), mixed).candidates
        == int((Evaluator(trace).evaluate(mixed).exact_share == 1).sum())
        < 4
    )
    assert calibrate(Evaluator(trace), mixed, estimated="aligned").candidates == 4
    with pytest.raises(UsageError, match="none of 1 settings is exact"):
        calibrate(Evaluator(trace), Grid.product(5, 0.3, 3))
    with pytest.raises(UsageError, match=r"asdsim cover .*holdout --B 16.0 --g 1.0 --M 2"):
        calibrate(Evaluator(trace), Grid.product(16, 1, 2), holdout=Evaluator(holdout))
    both = calibrate(Evaluator(trace), Grid.product("8,16", ".5,1", 2), holdout=Evaluator(holdout))
    assert (both.candidates, both.left_out, both.grid.budget[0]) == (1, 3, 8)
    with pytest.raises(UsageError, match="asdsim cover"):
        calibrate(Evaluator(trace), Quantile())
    rough = calibrate(Evaluator(trace), Quantile(), estimated="aligned")
    assert rough.grid.budget[0] == rough.grid.gate[0] > 0 and rough.ratios > 300


def test_split_holds_every_request_out_once(trace) -> None:
    made = calibrate(Evaluator(trace, cost=fit_trace(trace)), GRID, split=4, limits=Limits(regret_per_token=0.05))
    assert [fold["held_out"] for fold in made.folds] == [6, 6, 6, 6] and made.holdout.requests[0] == 24
    again = calibrate(Evaluator(trace, cost=fit_trace(trace)), GRID, split=4, limits=Limits(regret_per_token=0.05))
    assert again.folds == made.folds
    # Where every fold chooses alike, held out and in sample are one thing.
    alike = calibrate(Evaluator(trace), GRID[:1], split=3)
    assert set(alike.optimism().values()) == {0.0}
    with pytest.raises(UsageError, match="cannot split 24"):
        calibrate(Evaluator(trace), GRID, split=25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(kind="other"), "not a policy file"),
        (lambda record: record.update(schema_version=9), "schema version 9"),
        (lambda record: record.pop("g"), "g is missing"),
        (lambda record: record.update(B="much"), "not a number"),
        (lambda record: record.update(B=-1), "B=-1 is negative"),
        (lambda record: record.update(semantics="papers"), "did you mean 'paper'"),
    ],
)
def test_policy_files_that_cannot_be_meant(trace, tmp_path, change, message: str) -> None:
    record = policy_record(calibrate(Evaluator(trace), GRID[:1]), trace, None, None)
    change(record)
    (tmp_path / "p.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match=message):
        read_policy(tmp_path / "p.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        read_policy(tmp_path / "p.json")


def test_audit_scores_every_distinct_output_once(trace) -> None:
    calls = []

    def decode(ids: list[int]) -> str:
        calls.append(tuple(ids))
        return f"\\boxed{{{len(ids)}}}"

    found = audit(trace, GRID, decode, chosen={"gsm8k": "gsm8k"})
    assert found.outputs == len(calls) and found.scored == 8 and found.quality.scorer == "gsm8k"
    assert "8 of 24 requests are scored by gsm8k, strict matching gets 0" in found.quality.about_scores()
    assert len(set(calls)) == len(calls)
    assert set(found.by_task) == {"gsm8k", "humaneval", "mt-bench"}
    assert np.isnan(found.by_task["mt-bench"].figures["accuracy"].value).all()
    front = found.front()
    assert front["mean_acceptance_length"].is_sorted() and front["accuracy"].is_sorted(descending=True)


def test_audit_needs_a_natural_end(trace, tmp_path) -> None:
    fixed = replace(trace, manifest=trace.manifest.replace(stop="fixed"))
    with pytest.raises(UsageError, match="natural end"):
        audit(fixed, GRID, lambda ids: "")


@pytest.mark.parametrize(
    ("limits", "figure", "interval", "by_value", "by_bound"),
    [
        ({"accuracy_drop": 0.05}, "accuracy_change", (0.0, -0.2, 0.1), True, False),
        ({"accuracy_drop": 0.05}, "accuracy_change", (-0.04, -0.045, 0.1), True, True),
        ({"accuracy_drop": 0.05}, "accuracy_change", (-0.06, -0.1, 0.1), False, False),
        ({"accuracy_drop": 0.05}, "accuracy_change", (0.2, -0.04, 0.3), True, True),
        ({"length_change": 0.05}, "length_change", (0.04, 0.01, 0.1), True, False),
        ({"length_change": 0.2}, "length_change", (-0.1, -0.4, 0.1), True, False),
        ({"length_change": 0.2}, "length_change", (-0.3, -0.35, 0.1), False, False),
        ({"length_change": 0.2}, "length_change", (0.1, -0.1, 0.2), True, True),
        ({"length_growth": 0.05}, "length_change", (0.04, 0.01, 0.1), True, False),
        ({"length_growth": 0.05}, "length_change", (-0.3, -0.4, 0.05), True, True),
        ({"length_growth": 0.05}, "length_change", (0.06, 0.01, 0.1), False, False),
        ({"min_accuracy": 0.5}, "accuracy", (0.6, 0.4, 0.8), True, False),
        ({"min_accuracy": 0.5}, "accuracy", (0.6, 0.5, 0.8), True, True),
        ({"min_accuracy": 0.5}, "accuracy", (0.4, 0.3, 0.6), False, False),
        ({"divergence": 0.05}, "outputs_differ_share", (0.04, 0.01, 0.1), True, False),
        ({"divergence": 0.05}, "outputs_differ_share", (0.04, 0.01, 0.05), True, True),
        ({"regret_per_token": 0.05}, "regret_per_token", (0.04, 0.01, 0.1), True, False),
        ({"regret_per_token": 0.05}, "regret_per_token", (0.05, 0.01, 0.05), True, True),
        ({"regret_per_token": 0.05}, "regret_per_token", (0.04, np.nan, np.nan), True, False),
    ],
)
def test_a_bound_holds_the_far_end(limits, figure, interval, by_value: bool, by_bound: bool) -> None:
    quality = table(Grid.product(1, 1, 1), **{figure: [interval]})
    assert Limits(**limits).hold(quality).tolist() == [by_value]
    assert Limits(**limits, bound=True).hold(quality).tolist() == [by_bound]


def test_of_equally_fast_settings_the_one_with_the_least_regret_is_chosen() -> None:
    def chosen(speeds: list[float], regrets: list[float], **axes: list[float]) -> int:
        grid = replace(Grid.product([1, 2], 1, 1), **{name: np.array(values) for name, values in axes.items()})
        return choose(table(grid, mean_acceptance_length=[(v, v, v) for v in speeds],
                            regret_per_token=[(v, v, v) for v in regrets]), Limits())  # fmt: skip

    assert chosen([2.0, 2.0], [0.5, 0.1]) == 1 and chosen([2.0, 2.0], [0.1, 0.5]) == 0
    assert chosen([2.0, 2.0 - 1e-13], [0.5, 0.1]) == 1  # two orders of one sum
    assert chosen([2.0, 2.0 - 1e-10], [0.5, 0.1]) == 0
    assert chosen([1.0, 3.0], [0.1, 0.5]) == 1
    assert chosen([2.0, 2.0], [0.1, 0.1]) == 0 and chosen([2.0, 2.0], [0.1, 0.1], budget=[3.0, 2.0]) == 1
    assert chosen([2.0, 2.0], [0.1, 0.1], budget=[2.0, 2.0], gate=[0.5, 0.4]) == 1
    assert chosen([2.0, 2.0], [0.1, 0.1], budget=[2.0, 2.0], cap=[2.0, 1.0]) == 1
    speeds = table(Grid.product([1, 2], 1, 1), mean_acceptance_length=[(3, 3, 3), (2, 2, 2)],
                   speed_up=[(1.1, 1, 2), (1.2, 1, 2)], regret_per_token=[(0, 0, 0)] * 2)  # fmt: skip
    assert choose(speeds, Limits()) == 1  # longer steps are not faster where drafts cost
    one, two = (table(Grid.product(B, 1, 1), mean_acceptance_length=[(v, v, v)], regret_per_token=[(0, 0, 0)])
                for B, v in ((1, 2.0), (2, 2.5)))  # fmt: skip
    assert fastest([one, two], Limits()) == (1, 0) and fastest([two, one], Limits()) == (0, 0)


def test_a_seed_parts_requests_anew_and_repeats() -> None:
    trace = asdsim.load(TRACES / "smollm2-layerskip")
    made = [calibrate(Evaluator(trace, seed=seed), GRID, split=4) for seed in (0, 1, 1)]
    parts = [[fold["held_out"] for fold in one.folds] for one in made]
    assert parts == [[6, 6, 6, 6]] * 3
    rows = [one.holdout.row(0) for one in made]
    assert rows[1] == rows[2] and made[1].folds == made[2].folds
    assert rows[0]["mean_acceptance_length"][1:] != rows[1]["mean_acceptance_length"][1:]
    strict = [Evaluator(trace, seed=seed) for seed in (0, 1)]
    budgets = []
    for evaluator in strict:  # what was held out decides: the quantile of the others' ratios
        one = calibrate(evaluator, Quantile(cap=2), estimated="aligned")
        graph = evaluator.graph(one.grid.layout)
        part_of = np.random.default_rng(evaluator.seed).permutation(24) % 4
        budgets.append([Quantile(cap=2).setting(graph, np.flatnonzero(part_of != n).tolist()).budget[0]
                        for n in range(4)])  # fmt: skip
    assert budgets[0] != budgets[1]


def test_a_part_is_judged_under_what_the_others_choose(trace) -> None:
    """Against the oracle's walks of every setting; the choices differ from part to part, and from seed to seed."""
    requests = list(zip(trace.request_records(), reference_blocks(trace), strict=True))
    walks = np.array([
        [(len(walk.tokens), len(walk.accepted), walk.spent) for walk in (
            oracle.walk(blocks, B=policy.budget, g=policy.gate, M=policy.cap, max_new_tokens=record.max_new_tokens,
                        eos=record.eos_ids) for record, blocks in requests)]
        for policy in map(GRID.policy, range(len(GRID)))
    ])  # fmt: skip
    for seed, rows in ((0, [7, 9, 8, 8]), (1, [8, 9, 8, 7])):
        part_of = np.random.default_rng(seed).permutation(24) % 4
        tokens, steps = 0.0, 0.0
        for part in range(4):
            sums = walks[:, part_of != part].sum(axis=1)
            within = sums[:, 2] / sums[:, 0] <= 0.03
            assert np.argmax(np.where(within, sums[:, 0] / sums[:, 1], 0.0)) == rows[part]
            held = walks[rows[part], part_of == part].sum(axis=0)
            tokens, steps = tokens + held[0], steps + held[1]
        made = calibrate(Evaluator(trace, seed=seed, resamples=50), GRID, split=4, limits=Limits(regret_per_token=0.03))
        assert [(fold["B"], fold["g"], fold["M"]) for fold in made.folds] == [
            (GRID.budget[row], GRID.gate[row], GRID.cap[row]) for row in rows
        ]
        assert made.holdout.figures["mean_acceptance_length"].value[0] == tokens / steps


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_of_every_rule_is_chosen_frozen_and_read_back(tmp_path_factory, tmp_path, name: str) -> None:
    source = rules_trace(tmp_path_factory)
    rule = get_rule(name)
    given = {rule.knob: list(rule.ladder[:: max(1, len(rule.ladder) // 3)])} if rule.knob else {}
    grids = rule_grids(name, {"K": [1, 3, 5]} if name == "truncate" else given)
    made = calibrate(Evaluator(source, resamples=50), grids, estimated="aligned")
    lengths = [Evaluator(source, resamples=2).evaluate(grid, figures=["mean_acceptance_length"], off_trace="aligned")
               .figures["mean_acceptance_length"].value.max() for grid in grids]  # fmt: skip
    assert made.candidates == sum(map(len, grids))
    assert made.calibration.figures["mean_acceptance_length"].value[0] == max(lengths)
    write_policy(policy_record(made, source, None, None), tmp_path / "policy.json")
    grid, record = read_policy(tmp_path / "policy.json")
    assert record["rule"] == name and "B" not in record
    assert grid.layout == made.grid.layout and grid.params == made.grid.params
    assert (grid.budget, grid.gate, grid.cap) == (made.grid.budget, made.grid.gate, made.grid.cap)
    assert str(grid.policy(0)) == str(made.grid.policy(0))


_RULES_TRACE: list = []


def rules_trace(tmp_path_factory):
    """Return a toy trace with every column that a rule may need; written once."""
    if not _RULES_TRACE:
        _RULES_TRACE.append(read_trace(write_rules_trace(tmp_path_factory.mktemp("rules") / "trace")))
    return _RULES_TRACE[0]


def test_infinite_parameters_and_readings_survive_the_file(trace, tmp_path) -> None:
    for n, grid in enumerate((
        rule_grids("entropy", {"h": [float("inf")], "m": [3]})[0], Grid.product(4, "inf", "inf", "dspark"),
        Grid.product(0.25, 0.1, 2, regret="probability", value="unit", ledger="block"),
    )):  # fmt: skip
        made = calibrate(Evaluator(trace, resamples=2), grid, estimated="aligned")
        write_policy(policy_record(made, trace, None, None), tmp_path / f"{n}.json")
        back = read_policy(tmp_path / f"{n}.json")[0]
        assert back.policy(0) == grid.policy(0) and back.params == grid.params
    text = json.loads((tmp_path / "0.json").read_text())
    assert text["parameters"] == {"h": "inf", "m": 3.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(rule="marz"), "did you mean 'mars'"),
        (lambda record: record.update(rule=7), "rule is 7, not text"),
        (lambda record: record.pop("parameters"), "parameters is missing"),
        (lambda record: record.update(parameters=[1]), "not a JSON object"),
        (lambda record: record["parameters"].update(theta=2), "theta=2 is outside its range"),
        (lambda record: record["parameters"].update(theta=[0.5, 0.6]), "theta is .*not a number or a name"),
        (lambda record: record["parameters"].update(theta="0.5,0.6"), "several settings"),
        (lambda record: record["parameters"].update(tau=1), "unknown parameter of rule mars 'tau'"),
        (lambda record: record.update(target="m"), "target is 'm', not an object"),
        (lambda record: record.update(num_draft_tokens=True), "num_draft_tokens is True"),
    ],
)
def test_policy_files_of_a_rule_that_are_refused(tmp_path_factory, tmp_path, change, message: str) -> None:
    source = rules_trace(tmp_path_factory)
    made = calibrate(Evaluator(source, resamples=2), rule_grids("mars"), estimated="aligned")
    record = policy_record(made, source, None, None)
    change(record)
    (tmp_path / "p.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match=message):
        read_policy(tmp_path / "p.json")


def test_without_captured_strict_walks_nothing_is_exact(tmp_path) -> None:
    source = read_trace(write_relaxed_trace(tmp_path / "relaxed", strict_for=3))
    with pytest.raises(UsageError, match="none of 1 settings is exact: the strict walk of 7 requests is not captured"):
        calibrate(Evaluator(source), Grid.product("inf", "inf", "inf"))
