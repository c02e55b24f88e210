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
from asdsim.evaluate.quality import Evaluator
from asdsim.rules.settings import Grid
from asdsim.studies.audit import audit
from asdsim.studies.calibrate import Limits, Quantile, calibrate, fastest, rejection_ratios
from asdsim.studies.frozen import policy_record, read_policy, write_policy
from asdsim.trace.graph import build_graph

TRACES = Path(__file__).resolve().parents[2] / "traces"
GRID = Grid.product("0,4,8", ".1,.25,.5", "1,2")


def choose(quality, limits: Limits) -> int:
    """Return the row that is chosen from one table."""
    return fastest([quality], limits)[1]


@pytest.fixture(scope="module")
def trace():
    return asdsim.load(TRACES / "smollm2-layerskip")


@pytest.fixture(scope="module")
def holdout():
    return asdsim.load(TRACES / "smollm2-layerskip-holdout")


def test_quantile_is_the_papers() -> None:
    class Graph:
        num_requests = 1

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
    with pytest.raises(UsageError, match="8 of 24 requests have a score, strict matching has 0 right: nothing"):
        choose(hopeless, Limits(accuracy_drop=0.1))
    with pytest.raises(UsageError, match="none of 24 requests has a score"):
        choose(Evaluator(trace, scorer=lambda request, tokens: None).evaluate(GRID), Limits(accuracy_drop=0.1))
    needed = ["mean_acceptance_length", "outputs_differ_share", "regret_per_token"]
    relaxed_only = Evaluator(trace).evaluate(Grid.product(8, 0.5, 2), figures=needed)
    with pytest.raises(UsageError, match="none of 1 settings keeps divergence <= 0"):
        choose(relaxed_only, Limits(divergence=0.0))


def test_frozen_judged_and_read_back(trace, holdout, tmp_path) -> None:
    cost = fit_trace(trace)
    made = calibrate(
        Evaluator(trace, cost=cost), GRID, holdout=Evaluator(holdout, cost=cost), limits=Limits(regret_per_token=0.05)
    )
    alone = Evaluator(holdout, cost=cost).evaluate(made.grid)
    name = "mean_acceptance_length"
    assert made.holdout.figures[name].value[0] == alone.figures[name].value[0]
    gap = made.calibration.figures[name].value[0] - alone.figures[name].value[0]
    assert made.optimism()[name] == pytest.approx(gap)
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
    with pytest.raises(UsageError, match="cannot part 24"):
        calibrate(Evaluator(trace), GRID, split=25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(kind="other"), "not a policy file"),
        (lambda record: record.update(schema_version=9), "schema version 9"),
        (lambda record: record.pop("g"), "no g"),
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
    assert "8 of 24 requests have a score by gsm8k, strict matching has 0" in found.quality.about_scores()
    assert len(set(calls)) == len(calls)
    assert set(found.by_task) == {"gsm8k", "humaneval", "mt-bench"}
    assert np.isnan(found.by_task["mt-bench"].figures["accuracy"].value).all()
    front = found.front()
    assert front["mean_acceptance_length"].is_sorted() and front["accuracy"].is_sorted(descending=True)


def test_audit_needs_a_natural_end(trace, tmp_path) -> None:
    fixed = replace(trace, manifest=trace.manifest.replace(stop="fixed"))
    with pytest.raises(UsageError, match="natural end"):
        audit(fixed, GRID, lambda ids: "")
