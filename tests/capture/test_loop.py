"""The decoding loop on scripted models: where a block ends, what is counted, what is charged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asdsim.capture.loop import Decoded, decode
from asdsim.capture.record import Recorder
from asdsim.engines.protocol import Drafter, Proposal, Target
from asdsim.errors import CaptureError
from asdsim.records import RequestRecord
from asdsim.rules.asd import ACCEPT, BUDGET, CAP, GATE
from asdsim.rules.settings import STRICT, Policy

VOCAB, EOS, WRONG = 16, 15, 14
ALL = Policy(np.inf, np.inf, np.inf)


class Script(Target):
    """Wants token ``text[n]`` at place n of the answer; every other token lies ``regret`` below."""

    name, vocab_size, eos_ids = "script", VOCAB, (EOS,)

    def __init__(self, text: Sequence[int], regret: float = 1.0, prompt: int = 2) -> None:
        self.text, self.regret, self.prompt = list(text), regret, prompt

    def session(self, prompt_ids: Sequence[int]) -> Any:
        return self

    def score(self, prefix_ids: Sequence[int], draft_ids: Sequence[int]) -> np.ndarray:
        rows = np.full((len(draft_ids) + 1, VOCAB), 2.0 - self.regret, np.float32)
        first = len(prefix_ids) - self.prompt
        for i, row in enumerate(rows):
            row[self.text[first + i] if first + i < len(self.text) else 0] = 2.0
        return rows


class Blocks(Drafter):
    """Proposes the given blocks one after the other."""

    name, vocab_size = "blocks", VOCAB

    def __init__(self, *blocks: Sequence[int]) -> None:
        self.blocks = [list(block) for block in blocks]

    def session(self, prompt_ids: Sequence[int]) -> Any:
        self.turn = -1
        return self

    def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        self.turn += 1
        return Proposal(self.blocks[self.turn] if self.turn < len(self.blocks) else [0] * num_draft_tokens)


def run(
    text: Sequence[int], *blocks: Sequence[int], limit: int = 100, policy: Policy = STRICT, stop: str = "natural",
    regret: float = 1.0, K: int = 8,
) -> Decoded:  # fmt: skip
    request = RequestRecord("r", "t", (1, 2), "", None, limit, (EOS,), stop)
    return decode(Script(text, regret), Blocks(*blocks), request, policy, K, Recorder())


@pytest.mark.parametrize("policy", [STRICT, ALL])
def test_nothing_counts_behind_an_eos(policy: Policy) -> None:  # fault 1
    result = run([1, 2, EOS, 4, 5, 6], [1, 2, EOS, 4, 5], policy=policy)
    assert result.tokens == [1, 2, EOS]
    assert [outcome.accepted for outcome in result.outcomes] == [3]


def test_an_accepted_eos_ends_even_where_the_target_goes_on() -> None:  # fault 1, relaxed
    result = run([1, 2, 3, 4, 5, 6], [1, 2, EOS, 4, 5], policy=ALL)
    assert result.tokens == [1, 2, EOS]
    assert (result.outcomes[0].accepted, result.outcomes[0].relaxed, result.ledger) == (3, 1, 1.0)


def test_no_bonus_after_an_eos_at_the_end_of_a_block() -> None:
    assert run([1, 2, EOS, 9], [1, 2, EOS]).tokens == [1, 2, EOS]


@pytest.mark.parametrize("block", [[1, 2], [1, WRONG, 3]])
def test_an_eos_of_the_target_itself_ends(block: list[int]) -> None:
    text = [1, 2, EOS] if block == [1, 2] else [1, EOS]
    result = run(text, block)
    assert result.tokens == text
    assert len(result.outcomes) == 1


def test_fixed_length_ignores_eos() -> None:
    result = run([1, EOS, 3, EOS, 5, 6, 7], [1, EOS, 3], [5, 6, 7], limit=7, stop="fixed")
    assert result.tokens == [1, EOS, 3, EOS, 5, 6, 7]
    assert [outcome.accepted for outcome in result.outcomes] == [3, 3]


def test_the_bonus_is_in_the_length_and_not_in_accepted() -> None:  # fault 2
    outcome = run([1, 2, 3, 4], [1, 2, 3]).outcomes[0]
    assert (len(outcome.tokens), outcome.accepted, outcome.verdict) == (4, 3, ACCEPT)


def test_only_a_prefix_counts() -> None:  # fault 3
    outcome = run([1, 2, 3, 4], [1, WRONG, 3, 4]).outcomes[0]
    assert (outcome.accepted, outcome.tokens, outcome.verdict) == (1, [1, 2], GATE)  # g = 0 under strict


def test_ragged_blocks() -> None:  # faults 4 and 10
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    result = run(text, [1], [3, WRONG, 5], [5, 6, 7, 8, 9], limit=10)
    assert result.tokens == text
    assert [(o.num_draft_tokens, o.accepted) for o in result.outcomes] == [(1, 1), (3, 1), (5, 5)]
    assert [step.num_draft_tokens for step in result.steps] == [1, 3, 5]
    assert sum(o.accepted for o in result.outcomes) / sum(o.num_draft_tokens for o in result.outcomes) == 7 / 9
    two = run([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5], [7, 8], limit=9)
    assert sum(outcome.num_draft_tokens for outcome in two.outcomes) == 7


def test_the_limit_cuts_before_counting() -> None:  # fault 5
    result = run([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3], [5, 6, 7], limit=6)
    assert result.tokens == [1, 2, 3, 4, 5, 6]
    assert [outcome.accepted for outcome in result.outcomes] == [3, 2]
    assert result.steps[1].num_draft_tokens == 3


def test_a_mismatch_behind_the_limit_is_neither_charged_nor_counted() -> None:
    result = run([1, 2, 3, 4], [1, 2, WRONG], limit=2, policy=ALL)
    assert (result.tokens, result.ledger, result.outcomes[0].relaxed) == ([1, 2], 0.0, 0)


def test_no_room_for_the_bonus() -> None:
    assert run([1, 2, 3, 4], [1, 2, 3], limit=3).tokens == [1, 2, 3]


def test_a_block_of_nothing_commits_the_targets_own_token() -> None:
    result = run([1, 2, 3], [], [2, 3], limit=3)
    assert result.tokens == [1, 2, 3]
    assert [(o.num_draft_tokens, o.accepted) for o in result.outcomes] == [(0, 0), (2, 2)]
    assert result.steps[0].top_ids.shape[0] == 1


def test_no_tokens_asked_no_steps() -> None:
    result = run([1], [1], limit=0)
    assert (result.tokens, result.outcomes) == ([], [])


def test_ledger_gate_cap_and_budget_live() -> None:
    # r = 1 at positions 1 and 2 of K = 4: r/q = 1/3 and 1/2; charges add up over blocks until B is spent.
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    block = [1, WRONG, WRONG, 4]
    assert run(text, block, policy=Policy(9, 0.5, 2), limit=4).outcomes[0].relaxed == 2
    gate = run(text, block, policy=Policy(9, 0.4, 2), limit=4).outcomes[0]
    assert (gate.accepted, gate.charge, gate.verdict, gate.tokens) == (2, 1.0, GATE, [1, WRONG, 3])
    cap = run(text, block, policy=Policy(9, 9, 1), limit=4).outcomes[0]
    assert (cap.accepted, cap.verdict) == (2, CAP)
    spent = run(text, [1, WRONG, 3, 4], [6, WRONG, 8, 9], policy=Policy(1, 9, 9), limit=7)
    assert [o.verdict for o in spent.outcomes][:2] == [ACCEPT, BUDGET]
    assert (spent.ledger, spent.tokens) == (1.0, [1, WRONG, 3, 4, 5, 6, 7])


def test_zero_budget_is_strict_on_ties_too() -> None:
    result = run([1, 2, 3, 4], [1, WRONG, 3], policy=Policy(0, 9, 9), regret=0.0, limit=4)
    assert result.outcomes[0].accepted == 0  # all logits tie: y is id 0, and x = 1 differs by id
    assert result.ledger == 0.0


def test_steps_name_their_parents() -> None:
    result = run([1, 2, 3, 4, 5, 6, 7], [1, WRONG], [3, 4], [6, 7], limit=7)
    assert [(s.step_id, s.parent_step_id, s.parent_accepted, s.start_pos) for s in result.steps] == [
        (0, -1, -1, 0),
        (1, 0, 1, 2),
        (2, 1, 2, 5),
    ]
    assert all(step.wave == 0 and step.verify_us > 0 and step.select_us > 0 for step in result.steps)


def test_bad_proposals_are_refused() -> None:
    with pytest.raises(CaptureError, match="request r, step 0: the drafter gave 3 tokens, not 2"):
        run([1, 2], [1, 2, 3], K=2)
    with pytest.raises(CaptureError, match="request r, step 0, position 1: draft token 16 is outside"):  # fault 9
        run([1, 2], [1, VOCAB])
    with pytest.raises(CaptureError, match="position 0: draft token -1"):
        run([1, 2], [-1])


def test_a_sick_drafter_is_refused() -> None:
    class Sick(Blocks):
        def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
            return Proposal([1, 2], np.array([-0.5, np.nan], np.float32))

    with pytest.raises(CaptureError, match="request r, step 0, position 1: the drafter's log-probability is nan"):
        decode(Script([1, 2]), Sick(), RequestRecord("r", "t", (1, 2), "", None, 5, ()), STRICT, 4)


def test_bad_requests_are_refused_before_decoding() -> None:
    target, drafter = Script([1, 2]), Blocks([1])

    def attempt(prompt: tuple[int, ...] = (1, 2), K: int = 4, limit: int = 5, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(target if name == "max_positions" else drafter, name, value)
        decode(target, drafter, RequestRecord("r", "t", prompt, "", None, limit, ()), STRICT, K)

    with pytest.raises(CaptureError, match="request r: the prompt has no tokens"):
        attempt(prompt=())
    with pytest.raises(CaptureError, match="prompt token 99 is outside the target's vocabulary of 16"):
        attempt(prompt=(1, 99))
    with pytest.raises(CaptureError, match="K=0 drafts nothing"):
        attempt(K=0)
    with pytest.raises(CaptureError, match=r"K=4 is more than drafter blocks can draft \(give K <= 3\)"):
        attempt(max_draft_tokens=3)
    with pytest.raises(CaptureError, match="vocabulary has 17 tokens, the target's 16"):
        attempt(max_draft_tokens=None, vocab_size=17)
    with pytest.raises(CaptureError, match="need 10 positions, but the target has 9"):
        attempt(vocab_size=16, max_positions=9)
    attempt(max_positions=10)
