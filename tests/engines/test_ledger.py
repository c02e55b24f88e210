"""Ledgers by request id: equal to live decoding, whatever the engine does with its batch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from asdsim.capture.loop import Course
from asdsim.capture.record import Recorder, scan
from asdsim.engines.protocol import Proposal
from asdsim.errors import EngineError
from asdsim.records import NO_PARENT, RequestRecord
from asdsim.rules.settings import STRICT, Policy, layout_of
from tests.support.toymodels import ToyDrafter, ToyTarget

torch = pytest.importorskip("torch")
from asdsim.engines.accept import lay_blocks  # noqa: E402
from asdsim.engines.ledger import BAD_LOGITS, DISAGREES, TOO_MANY, Ledger, is_strict  # noqa: E402

EOS = 11


def engine_step(ledger, names, drafts, logits):  # type: ignore[no-untyped-def]
    """Verify as an engine does: greedy matching on the lifted rows, then the target's own token; no stop looked at."""
    widths = [len(ids) for ids in drafts]
    flat = torch.tensor([token for ids in drafts for token in ids], dtype=torch.int64)
    target = torch.tensor(np.concatenate([rows[:-1] for rows in logits]))
    step = ledger.verify(ledger.slots(names), lay_blocks(torch.tensor(widths), max(widths)), flat, target)
    best, committed, row = target.argmax(-1).tolist(), [], 0
    for ids, rows in zip(drafts, logits, strict=True):
        matched = 0
        while matched < len(ids) and best[row + matched] == ids[matched]:
            matched += 1
        own = best[row + matched] if matched < len(ids) else int(rows[-1].argmax())
        committed.append([*ids[:matched], own])
        row += len(ids)
    padded = torch.full((len(names), max(widths) + 1), -1)
    for n, tokens in enumerate(committed):
        padded[n, : len(tokens)] = torch.tensor(tokens)
    ledger.commit(step, padded)
    return committed


@dataclass
class Running:
    """One request in the toy engine, and the same one decoded alone."""

    course: Course
    target: ToyTarget
    drafter: ToyDrafter
    tokens: list[int] = field(default_factory=list)
    done: bool = False


def make_requests(number: int, seed: int, semantics: str = "paper") -> dict[str, Running]:
    rng = random.Random(seed)
    layout = layout_of(semantics)
    found = {}
    for n in range(number):
        target = ToyTarget(seed * 100 + n)
        policy = Policy(rng.choice([0.0, 0.5, 2.0, 8.0, math.inf]), rng.choice([0.1, 0.25, math.inf]),
                        rng.choice([1.0, 2.0, math.inf]), semantics, layout)  # fmt: skip
        record = RequestRecord(f"r{n}", "", (n, 1), "", None, rng.randint(1, 30), (EOS,))
        found[record.request_id] = Running(Course(record, policy), target, ToyDrafter(target, 0.6, widths=[0, 1, 3, 5]))
    return found


@pytest.mark.parametrize("semantics", ["paper", "core", "dspark", "lightllm"])
@pytest.mark.parametrize("seed", range(4))
def test_a_shuffled_batch_with_preemptions_spends_as_each_request_alone(semantics: str, seed: int) -> None:
    rng = random.Random(seed)
    layout = layout_of(semantics)
    ledger = Ledger(Policy(0, 0, 0, semantics, layout), capacity=2)
    running = make_requests(9, seed, semantics)
    for name, one in running.items():
        ledger.admit(name, one.course.policy, limit=one.course.request.max_new_tokens, stop_ids=(EOS,))
    steps = dict.fromkeys(running, 0)
    while names := [name for name, one in running.items() if not one.done]:
        for name in names:
            if rng.random() < 0.2:
                ledger.park(name)
                ledger.admit(name, running[name].course.policy, limit=1)  # what it had is kept
        names = rng.sample(names, rng.randint(1, len(names)))
        drafts, logits = [], []
        for name in names:
            one = running[name]
            prefix = [*one.course.request.prompt_ids, *one.tokens]
            drafts.append(one.drafter.session([]).propose(prefix, 5).ids)
            logits.append(one.target.session([]).score(prefix, drafts[-1]))
        for name, ids, rows, new in zip(names, drafts, logits, engine_step(ledger, names, drafts, logits), strict=True):
            one = running[name]
            seen = scan(rows, ids, name)
            place = {"step_id": 0, "parent_step_id": NO_PARENT, "parent_accepted": NO_PARENT, "start_pos": 0}
            outcome = one.course.take(ids, seen, Recorder().step(seen, Proposal(ids), where=name, **place))
            assert ledger.report(name).spent == one.course.spent
            steps[name] += bool(ids or one.tokens)  # a first step without a draft is the end of prefill
            for token in new:  # the engine cuts later
                one.tokens.append(token)
                one.done = len(one.tokens) >= one.course.request.max_new_tokens or token == EOS
                if one.done:
                    break
            assert one.tokens == one.course.tokens and one.done == one.course.done, (name, outcome)
    for name, one in running.items():
        report = ledger.release(name)
        assert report is not None and report.faults == 0
        assert (report.tokens, report.steps) == (len(one.tokens), steps[name])
        assert report.relaxed == sum(outcome.relaxed for outcome in one.course.outcomes)
        assert report.accepted == sum(outcome.accepted for outcome in one.course.outcomes)
        assert report.drafted == sum(outcome.num_draft_tokens for outcome in one.course.outcomes)
    assert len(ledger) == 0


def test_a_request_without_a_setting_stays_strict_beside_others() -> None:
    layout = layout_of("lightllm")
    ledger = Ledger(Policy(8, 1, 2, "lightllm", layout))
    ledger.admit("ours", Policy(8, 1, 2, "lightllm", layout), limit=20)
    rows = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 0.0]], np.float32)  # a tie, drafted by its second id
    assert engine_step(ledger, ["ours", "theirs"], [[1], [1]], [rows, rows]) == [[1, 1], [0]]


def test_slots_are_used_again() -> None:
    ledger = Ledger(capacity=4)
    for turn in range(100):
        for n in range(3):
            ledger.admit(f"{turn}/{n}", STRICT, limit=5)
        for n in range(3):
            assert ledger.release(f"{turn}/{n}") is not None
    assert len(ledger._numbers) == 4 and ledger.release("0/0") is None


def test_an_id_in_use_and_a_setting_of_another_reading_are_refused() -> None:
    ledger = Ledger()
    ledger.admit("a", Policy(1, 1, 1), limit=5)
    with pytest.raises(EngineError, match="request a: this id is in use"):
        ledger.admit("a", Policy(1, 1, 1), limit=5)
    with pytest.raises(EngineError, match="request b: a setting of core"):
        ledger.admit("b", Policy(1, 1, 1, "core"), limit=5)


def test_what_is_cut_off_is_not_charged() -> None:
    """Two near-ties of .5 in a block, of which the token limit lets one through, or an EOS comes between."""
    rows = np.array([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0], [1.0, 0.0, 0.0]], np.float32)
    for limit, stops, spent in ((2, (), 1.0), (1, (), 0.5), (9, (1,), 0.5), (9, (2,), 1.0)):
        ledger = Ledger()
        ledger.admit("a", Policy(8, 1, 2), limit=limit, stop_ids=stops)
        engine_step(ledger, ["a"], [[1, 1]], [rows])
        assert ledger.report("a").spent == spent
        engine_step(ledger, ["a"], [[1, 1]], [rows])  # a step that was under way when the request ended
        assert ledger.report("a").spent == (spent if stops != (2,) else 2.0)


def test_an_engine_that_does_something_else_is_found_out() -> None:
    rows = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]])
    for tokens, fault in (([1, 1, 0], 0), ([0, -1, -1], DISAGREES), ([1, 0, -1], DISAGREES), ([1, 1, 1, 1], TOO_MANY)):
        ledger = Ledger()
        ledger.admit("a", Policy(8, 1, 2), limit=9)
        step = ledger.verify(ledger.slots(["a"]), lay_blocks(torch.tensor([2]), 2), torch.tensor([1, 1]), rows.clone())
        ledger.commit(step, torch.tensor([tokens]))
        assert ledger.report("a").faults == fault
    assert ledger.report("a").to_dict()["faults"] == ["the engine reports more accepted tokens than were drafted"]


def test_logits_that_are_no_numbers_are_said() -> None:
    ledger = Ledger()
    ledger.admit("a", Policy(math.inf, math.inf, math.inf), limit=9)
    ledger.admit("b", Policy(math.inf, math.inf, math.inf), limit=9)
    rows = torch.tensor([[1.0, math.nan, 0.0], [1.0, 0.5, 0.0]])
    step = ledger.verify(ledger.slots(["a", "b"]), lay_blocks(torch.tensor([1, 1]), 1), torch.tensor([2, 1]), rows)
    assert step.decision.accepted.tolist() == [0, 1]
    assert (ledger.report("a").faults, ledger.report("b").faults) == (BAD_LOGITS, 0)


def test_the_report_says_whether_outputs_are_the_engines_own() -> None:
    ledger = Ledger()
    ledger.admit("a", Policy(math.inf, 0.25, 2), limit=9)
    report = ledger.release("a").to_dict()  # type: ignore[union-attr]
    assert report["lossless"] is False and report["B"] == report["budget_left"] == "inf"
    assert is_strict(Policy(0, 1, 1)) and is_strict(Policy(1, 1, 0)) and is_strict(Policy(1, 0, 1, "core"))
    assert not is_strict(Policy(1, 0, 1)) and not is_strict(Policy(0, 0, 0, "lightllm"))
