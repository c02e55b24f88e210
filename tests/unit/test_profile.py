"""The batched loop decodes what the loop of one request decodes; a profile of it is a table that --cost reads."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from asdsim.capture.loop import decode
from asdsim.errors import UsageError
from asdsim.evaluate.step_table import from_pass_rows
from asdsim.live.batched import Batched
from asdsim.live.profile import profile
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT, Grid, Policy
from tests.support.toymodels import ToyDrafter, ToyTarget


def records(number: int, tokens: int = 24) -> list[RequestRecord]:
    return [
        RequestRecord(f"toy/{n}", "toy", tuple(range(1, 3 + n % 4)), "", None, tokens - n % 3, (11,), "natural")
        for n in range(number)
    ]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("policy", [STRICT, Policy(4.0, 1.0, 2.0)])
def test_requests_decoded_together_are_those_decoded_alone(batch: int, policy: Policy) -> None:
    target = ToyTarget(3)
    drafter = ToyDrafter(target, 0.7, widths=[0, 2, 4])
    engine = Batched(target, drafter, policy, 4)
    queue = records(7)
    courses = engine.serve(queue, batch)
    for request, course in zip(queue, courses, strict=True):
        alone = decode(target, drafter, request, policy, 4)
        assert (course.tokens, course.spent) == (alone.tokens, alone.ledger)
    assert max(one.batch for one in engine.iterations) == min(batch, 7) and len(engine.prompts) == 7


def test_the_target_alone_commits_a_token_a_step() -> None:
    target = ToyTarget(5)
    engine = Batched(target, ToyDrafter(target, 0.5), STRICT, 0)
    (course,) = engine.serve(records(1), 1)
    assert len(engine.iterations) == len(course.tokens) and all(one.width == 1 for one in engine.iterations)
    assert course.tokens == decode(target, ToyDrafter(target, 0.5), records(1)[0], STRICT, 3).tokens


def test_a_profile_is_a_table() -> None:
    ticks = count()
    target = ToyTarget(3)
    models = target, ToyDrafter(target, 0.9)
    found = profile(models, records(5), [1, 2], [1, 3], rounds=2, iterations=3, clock=lambda: 1e-3 * next(ticks))
    passes = [row for row in found.rows if "width" in row]
    assert [(row["batch"], row["width"]) for row in passes] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    # Every reading of this clock is a millisecond later: one for the pass and one for deciding.
    assert all(row["milliseconds"] == pytest.approx(2.0) for row in passes) and found.spread < 1e-6
    assert passes[1]["draft_milliseconds"] == pytest.approx(1.0)
    table = from_pass_rows(found.rows, "profile")
    assert float(table.pass_us(3, 10)) == pytest.approx(2000) and table.prompts is not None
    assert float(table.first_us(0, 4) - table.step(0, 4)) == pytest.approx(1000, rel=1e-6)


def test_refusals() -> None:
    target = ToyTarget(3)
    models: Any = target, ToyDrafter(target, 0.9, widths=[1])
    with pytest.raises(UsageError, match="nothing to measure"):
        profile(models, [], [1], [1])
    with pytest.raises(UsageError, match="no iteration of batch 1 had 3 tokens"):
        profile(models, records(2), [1], [3])
    with pytest.raises(UsageError, match="whole blocks"):
        Batched(*models, Grid.product(8, 1, 2, K=2).policy(0), 4)
