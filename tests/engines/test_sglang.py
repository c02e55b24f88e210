"""The SGLang adapter: signatures of SGLang 0.5.23 as its source has them, and tensors made here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asdsim.errors import EngineError

torch = pytest.importorskip("torch")
from asdsim.engines.ledger import BYPASSED, Ledger  # noqa: E402
from asdsim.engines.sglang import Adapter, told  # noqa: E402
from asdsim.rules.settings import Policy  # noqa: E402

VOCAB, K = 12, 4


def verify_tree_greedy_func(
    predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any, retrieve_index: Any,
    retrieve_next_token: Any, retrieve_next_sibling: Any, target_predict: Any, topk: int = -1,
) -> Any:  # fmt: skip
    """Walk each chain as SGLang's kernel does."""
    for n, row in enumerate(candidates.tolist()):
        at, accept_index[n, 0] = 0, int(retrieve_index[n, 0])
        while (after := int(retrieve_next_token[n, at])) >= 0 and row[after] == int(target_predict[n, at]):
            predicts[int(retrieve_index[n, at])] = int(target_predict[n, at])
            accept_index[n, after] = int(retrieve_index[n, after])
            at = after
        predicts[int(retrieve_index[n, at])] = int(target_predict[n, at])
        accept_token_num[n] = at
    return predicts, accept_index, accept_token_num


def eagle_sample(match: Any) -> Any:
    """Return SGLang's function around a matching function."""

    def sample(
        verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, uno_target_max_top_k: Any = None
    ) -> Any:
        number, rows = len(batch.reqs), verify_input.draft_token_num
        predict = torch.zeros(number * rows, dtype=torch.int32)
        index, correct = torch.full((number, rows), -1, dtype=torch.int32), torch.empty(number, dtype=torch.int32)
        if batch.sampling_info.is_all_greedy:
            choice = logits_output.next_token_logits.argmax(-1).reshape(number, rows)
            place = torch.arange(number * rows).reshape(number, rows)
            after = torch.arange(1, rows + 1).repeat(number, 1)
            after[:, -1] = -1
            predict, index, correct = match(
                predicts=predict, accept_index=index, accept_token_num=correct,
                candidates=verify_input.draft_token.reshape(number, rows), retrieve_index=place,
                retrieve_next_token=after, retrieve_next_sibling=torch.full_like(after, -1), target_predict=choice,
                topk=verify_input.tree_topk,
            )  # fmt: skip
        return predict, correct, index

    return sample


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({
        "schema_version": 1, "kind": "asdsim policy", "rule": "asd", "B": 8.0, "g": 0.3, "M": 2.0, "semantics": "paper",
        "target": {"name": "toy"}, "drafter": {"name": "toy"}, "num_draft_tokens": K,
    }))  # fmt: skip
    return Adapter({"ASDSIM_POLICY": str(path)})


def request(name: str, limit: int = 40, **custom: Any) -> Any:
    params = SimpleNamespace(custom_params=custom or None, max_new_tokens=limit, ignore_eos=False, stop_token_ids=None)
    return SimpleNamespace(rid=name, sampling_params=params, eos_token_ids={99}, tokenizer=None, output_ids=[1],
                           finished=lambda: True)  # fmt: skip


def step(adapter: Adapter, requests: list[Any], drafts: Any, logits: Any, greedy: bool = True, topk: int = 1) -> Any:
    """Run one step through the hooks; return what SGLang would commit."""
    batch = SimpleNamespace(
        reqs=requests, device="cpu", forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=SimpleNamespace(is_all_greedy=greedy),
    )  # fmt: skip
    verify_input = SimpleNamespace(draft_token=drafts.flatten(), draft_token_num=drafts.shape[1], tree_topk=topk)
    plain = eagle_sample(lambda **named: adapter.match(verify_tree_greedy_func, **named))
    output = SimpleNamespace(next_token_logits=logits)
    predict, correct, index = adapter.sample(plain, verify_input, batch, output)
    return [predict[index[n][index[n] >= 0].long()].tolist() for n in range(len(requests))], correct.tolist()


def random_step(seed: int, number: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(np.round(rng.normal(size=(number * (K + 1), VOCAB)) * 4) / 4, dtype=torch.float32)
    near = logits.topk(2, dim=-1).indices.reshape(number, K + 1, 2)
    pick = torch.tensor(rng.integers(0, 2, (number, K + 1, 1)))
    drafts = torch.cat([torch.zeros((number, 1), dtype=torch.int64), near.gather(2, pick)[:, :-1, 0]], 1)
    return drafts, logits


def test_chains_are_accepted_as_the_ledger_says_and_logits_stay(adapter: Adapter) -> None:
    reference = Ledger(Policy(8, 0.3, 2))
    requests = [request("a"), request("b", asd_B=0), request("c", asd_g=1.0, asd_M=1)]
    for name, policy in (("a", Policy(8, 0.3, 2)), ("b", Policy(0, 0.3, 2)), ("c", Policy(8, 1.0, 1))):
        reference.admit(name, policy, limit=40, stop_ids=[99], generated=1)
    relaxed = 0
    for seed in range(8):
        drafts, logits = random_step(seed, 3)
        before = logits.clone()
        tokens, correct = step(adapter, requests, drafts, logits)
        assert torch.equal(before, logits)
        from asdsim.engines.accept import lay_blocks

        flat = drafts[:, 1:].flatten()
        rows = logits.reshape(3, K + 1, VOCAB)[:, :-1].reshape(-1, VOCAB).clone()
        want = reference.verify(reference.slots(["a", "b", "c"]), lay_blocks(torch.full((3,), K), K), flat, rows)
        for n, name in enumerate("abc"):
            report = adapter.ledger("cpu").report(name)
            assert report.spent == reference.report(name).spent and report.faults == 0
            accepted = int(want.decision.accepted[n])
            assert tokens[n][:accepted] == drafts[n, 1 : 1 + accepted].tolist()
            assert correct[n] >= accepted and len(tokens[n]) == correct[n] + 1
        relaxed += int(want.decision.relaxed.sum())
    assert relaxed > 5
    assert adapter.ledger("cpu").report("b").relaxed == 0


def test_the_dspark_form_equals_plain_matching_at_zero_budget_and_caps(adapter: Adapter) -> None:
    ledger = adapter.ledger("cpu")
    ledger.admit("strict", Policy(0, 0.3, 2), limit=1000, generated=1)
    ledger.admit("asd", Policy(8, 0.3, 2), limit=1000, generated=1)
    for seed in range(12):
        drafts, logits = random_step(seed, 2)
        lens = torch.tensor([3, 2]) if seed % 2 else None
        choice = logits.argmax(-1).view(2, K + 1)
        plain = (drafts[:, 1:] == choice[:, :-1]).long().cumprod(1).sum(1)
        correct, bonus, trim = adapter.accept_policy(ledger.slots(["strict", "asd"]), drafts, logits, lens)
        assert (correct.dtype, bonus.dtype, trim.dtype) == (torch.int32, torch.int64, torch.int32)
        most = int(plain[0]) if lens is None else min(int(plain[0]), 2)
        assert int(correct[0]) == most and int(trim[0]) == int(plain[0]) - most
        assert int(bonus[0]) == int(choice[0, most])
        if lens is not None:
            assert int(correct[1]) <= 1
    assert ledger.report("strict").relaxed == 0 and ledger.report("asd").relaxed > 0
    assert ledger.report("strict").faults == ledger.report("asd").faults == 0


def test_a_batch_that_is_sampled_is_said_to_bypass_the_rule(adapter: Adapter) -> None:
    drafts, logits = random_step(1, 2)
    step(adapter, [request("a"), request("b", asd_B=0)], drafts, logits, greedy=False)
    assert adapter.ledger("cpu").report("a").faults == BYPASSED
    assert adapter.ledger("cpu").report("b").faults == 0


def test_a_tree_another_signature_and_a_bad_request_are_refused(adapter: Adapter) -> None:
    drafts, logits = random_step(1, 1)
    with pytest.raises(EngineError, match="drafts are a tree .topk 4."):
        step(adapter, [request("a")], drafts, logits, topk=4)
    with pytest.raises(EngineError, match="eagle_sample takes batch"):
        Adapter(adapter.environment).sample(lambda batch, verify_input, logits_output: None, None, None, None)

    def plain(self: Any, obj: Any, input_ids: Any) -> str:
        return "as it was"

    def asked(**params: Any) -> Any:
        return adapter.check(plain, None, SimpleNamespace(sampling_params=params), [1])

    assert asked(temperature=0) == asked(temperature=0.7, custom_params={"asd_B": 0}) == "as it was"
    with pytest.raises(ValueError, match="greedy decoding only"):
        asked(temperature=0.7)
    with pytest.raises(ValueError, match="asd_B is '8', not a number"):
        asked(temperature=0, custom_params={"asd_B": "8"})


def test_a_request_that_ends_gives_its_slot_back(adapter: Adapter) -> None:
    drafts, logits = random_step(2, 1)
    one = request("a")
    step(adapter, [one], drafts, logits)
    assert len(adapter.ledger("cpu")) == 1

    def update_finish_state(self: Any, new_accepted_len: int = 1) -> None:
        return None

    adapter.finish(update_finish_state, one)
    assert len(adapter.ledger("cpu")) == 0


def test_a_bad_policy_ends_the_process_and_not_only_the_plug_in(tmp_path: Path) -> None:
    drafts, logits = random_step(1, 1)
    with pytest.raises(EngineError, match="missing.json"):
        step(Adapter({"ASDSIM_POLICY": str(tmp_path / "missing.json")}), [request("a")], drafts, logits)


def test_told_replaces_accepted_tokens_only() -> None:
    decision = SimpleNamespace(accepted=torch.tensor([1, 0]))
    choice = told(torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[0, 1, 2], [0, 1, 2]]),
                  SimpleNamespace(decision=decision))  # type: ignore[arg-type]  # fmt: skip
    assert choice.tolist() == [[1, 6, 7], [5, 6, 7]]
