"""The V2 runner's adapter on vLLM's own rejection sampler, its Triton kernels replaced; run where vLLM is installed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

from asdsim.engines.accept import lay_blocks
from asdsim.engines.config import EngineConfig
from asdsim.engines.ledger import Ledger
from asdsim.engines.vllm.v2 import VERIFY, Adapter
from asdsim.rules.settings import Policy

VOCAB, K, SLOTS = 20, 5, 8
POLICY = Policy(8, 0.3, 2)


def greedy(logits: Any, draft_logits: Any, drafts: Any, ends: Any, *rest: Any, **named: Any) -> Any:
    """Stand for ``rejection_sample``: accept while the next draft token is the argmax; -1 is never accepted."""
    number = len(ends) - 1
    sampled, count = torch.zeros((number, K + 1), dtype=torch.int64), torch.zeros(number, dtype=torch.int32)
    for n in range(number):
        begin, end = int(ends[n]), int(ends[n + 1])
        for row in range(begin, end):
            choice = int(logits[row].argmax())
            sampled[n, row - begin] = choice
            count[n] += 1
            if row + 1 < end and int(drafts[row + 1]) != choice:
                break
    return sampled, count


class Sampler:
    """What the rejection sampler asks of vLLM's sampler."""

    use_fp64_gumbel, compute_nans = False, False

    def __init__(self) -> None:
        self.sampling_states = SimpleNamespace(temperature=SimpleNamespace(gpu=None), seeds=SimpleNamespace(gpu=None))

    def apply_sampling_params(self, logits: Any, *rest: Any) -> Any:
        return logits  # nothing to apply: vLLM hands out the raw logits themselves


class Runner:
    """What the adapter asks of the model runner."""

    def __init__(self) -> None:
        self.device, self.max_num_reqs = torch.device("cpu"), SLOTS
        self.req_states = SimpleNamespace(req_id_to_index={}, prefill_len=SimpleNamespace(gpu=torch.zeros(SLOTS)))
        self.rejection_sampler = module.RejectionSampler.__new__(module.RejectionSampler)
        self.rejection_sampler.sampler = Sampler()
        self.rejection_sampler.watermark_key = None
        self.rejection_sampler.num_speculative_steps = K
        self.rejection_sampler.synthetic_conditional_rates = None
        self.rejection_sampler.use_block_verification = False
        self.step: Any = None

    def finish_requests(self, scheduled: Any) -> None:
        for name in [*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())]:
            self.req_states.req_id_to_index.pop(name, None)

    def add_requests(self, scheduled: Any) -> None:
        taken = set(self.req_states.req_id_to_index.values())
        for new in scheduled.scheduled_new_reqs:
            place = random.choice([n for n in range(SLOTS) if n not in taken])
            taken.add(place)
            self.req_states.req_id_to_index[new.req_id] = place

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        logits, drafts = self.step
        if not batch.num_draft_tokens:
            return SimpleNamespace(sampled_token_ids=logits.argmax(-1)[:, None]), None, None
        _, sampled, count = self.rejection_sampler._verify(
            logits, None, drafts, None, batch.cu_num_logits, batch.idx_mapping, None, None, None, None, drafts
        )
        return SimpleNamespace(sampled_token_ids=sampled), count, None


def main() -> None:
    """Serve random requests with preemptions, and compare each ledger with one kept beside it."""
    import inspect

    for name in ("finish_requests", "add_requests", "sample"):
        assert hasattr(GPUModelRunner, name), name
    assert tuple(inspect.signature(GPUModelRunner.sample).parameters)[1:] == (
        "hidden_states", "input_batch", "grammar_output",
    )  # fmt: skip
    verify = tuple(inspect.signature(module.RejectionSampler._verify).parameters)
    assert verify[1 : 1 + len(VERIFY)] == VERIFY and verify[-1] == "verify_draft_sampled", verify
    assert tuple(inspect.signature(module.rejection_sample).parameters)[:4] == (
        "target_logits", "draft_logits", "draft_sampled", "cu_num_logits",
    )  # fmt: skip
    module.rejection_sample = greedy
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=200, dtype=torch.float32, get_vocab_size=lambda: VOCAB),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        additional_config={"asd": {"B": 8, "g": 0.3, "M": 2}},
    )  # fmt: skip
    runner = Runner()
    adapter = Adapter(runner, vllm_config, EngineConfig(POLICY), None)
    beside = Ledger(POLICY)
    random.seed(1)
    rng = np.random.default_rng(1)

    def scheduled(new: list[str], finished: list[str], preempted: list[str]) -> Any:
        params = SimpleNamespace(
            extra_args=None, temperature=0.0, max_tokens=60, stop_token_ids=None, eos_token_id=None
        )
        return SimpleNamespace(
            finished_req_ids=set(finished), preempted_req_ids=set(preempted),
            scheduled_new_reqs=[SimpleNamespace(req_id=name, sampling_params=params, prompt_len=3) for name in new],
        )  # fmt: skip

    names = ["a", "b", "c", "d"]
    for name in names:
        beside.admit(name, POLICY, limit=60)
    runner.add_requests(scheduled(names, [], []))
    away: list[str] = []
    for turn in range(40):
        back, away = away, [name for name in names if random.random() < 0.15] if turn else []
        runner.finish_requests(scheduled([], [], away))
        runner.add_requests(scheduled(back if turn else [], [], []))
        here = [name for name in names if name in runner.req_states.req_id_to_index]
        random.shuffle(here)
        if not here:
            continue
        widths = [0 if turn == 0 else random.randint(0, K) for _ in here]
        rows = np.round(rng.normal(size=(sum(widths) + len(here), VOCAB)) * 4) / 4
        logits = torch.tensor(rows, dtype=torch.float32)
        near = logits.topk(2, dim=-1).indices
        drafts = torch.zeros(len(logits), dtype=torch.int64)
        ends = torch.tensor([0, *np.cumsum([width + 1 for width in widths])])
        for n, width in enumerate(widths):
            for i in range(width):
                row = int(ends[n]) + i
                drafts[row + 1] = near[row, random.randint(0, 1)]
            if width and random.random() < 0.2:  # a grammar forbids the rest
                drafts[int(ends[n]) + random.randint(1, width)] = -1
        cut = [
            next((i for i in range(width) if drafts[int(ends[n]) + 1 + i] < 0), width) for n, width in enumerate(widths)
        ]
        runner.step = logits, drafts
        places = torch.tensor([runner.req_states.req_id_to_index[name] for name in here])
        before = logits.clone()
        output, _, _ = runner.sample(None, SimpleNamespace(
            num_reqs=len(here), idx_mapping=places, seq_lens=torch.full((len(here),), 9), num_draft_tokens=sum(widths),
            cu_num_logits=ends,
        ), None)  # fmt: skip
        assert torch.equal(before, logits), "raw logits were changed"
        index = [int(ends[n]) + i for n, width in enumerate(cut) for i in range(width)]
        step = beside.verify(
            beside.slots(here), lay_blocks(torch.tensor(cut), max(cut)), drafts[[row + 1 for row in index]],
            logits[index].clone(),
        )  # fmt: skip
        for n, name in enumerate(here):
            mine, other = adapter.ledger.report(name), beside.report(name)
            assert (mine.spent, mine.tokens, mine.steps, mine.relaxed) == (
                other.spent, other.tokens, other.steps, other.relaxed,
            ), (turn, name, mine, other)  # fmt: skip
            assert mine.faults == 0, mine
            accepted = int(step.decision.accepted[n])
            taken = output.sampled_token_ids[n, :accepted].tolist()
            assert taken == drafts[int(ends[n]) + 1 : int(ends[n]) + 1 + accepted].tolist()
    relaxed = sum(adapter.ledger.report(name).relaxed for name in names)
    assert relaxed > 10, relaxed
    runner.finish_requests(scheduled([], names, []))
    assert len(adapter.ledger) == 0
    print(f"V2 adapter: 40 steps with preemptions, {relaxed} relaxed tokens, ledgers equal")


if __name__ == "__main__":
    main()
