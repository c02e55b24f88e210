"""The V2 model runner of vLLM (``vllm.v1.worker.gpu.model_runner``).

Its verification kernels need a GPU with Triton. Held against the signatures of vLLM 0.32.0 and run with those kernels
replaced by a few lines of torch; not run on a GPU yet.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...errors import EngineError
from ..accept import Blocks, lay_blocks
from ..config import EngineConfig, check_model
from ..ledger import Ledger, Step
from . import log, request_setting, say, stop_ids_of

VERIFY = ("logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping")
"""First parameters of ``RejectionSampler._verify`` that this adapter counts on."""


class Adapter:
    """Decides for one V2 model runner; parameters as :class:`asdsim.engines.vllm.v1.Adapter`.

    vLLM gives a request another slot of its own after a preemption; ``_table`` leads from its slots to the ledger's.
    """

    def __init__(self, runner: Any, vllm_config: Any, config: EngineConfig, open_recorder: Any) -> None:
        if config.trace:
            raise EngineError(
                "the V2 model runner cannot record yet", where=config.trace, fix="set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self.runner, self.vllm_config, self.config = runner, vllm_config, config
        self.longest = int(vllm_config.model_config.max_model_len)
        self.width = int(vllm_config.speculative_config.num_speculative_tokens)
        vocab_size = int(vllm_config.model_config.get_vocab_size())
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        for note in check_model(config, vocab_size=vocab_size, num_draft_tokens=self.width, dtype=dtype):
            log.warning("asd: %s", note)
        self.ledger = Ledger(config.policy, runner.device)
        self._table = torch.zeros(runner.max_num_reqs, dtype=torch.int64, device=runner.device)
        self._now = self._table
        self._blocks: tuple[torch.Tensor, Blocks, torch.Tensor] | None = None
        self._step: Step | None = None
        self._verified = False
        self._sampler: Any = None
        self._finish, self._add, self._sample = runner.finish_requests, runner.add_requests, runner.sample
        runner.finish_requests, runner.add_requests, runner.sample = self.finish, self.add, self.sample
        log.info("asd: %s by default (%s)", config.policy, config.file)

    @staticmethod
    def knows(runner: Any) -> bool:
        """Return whether a runner has what this adapter holds on to."""
        names = ("finish_requests", "add_requests", "sample", "req_states", "max_num_reqs")
        return all(hasattr(runner, name) for name in names) and hasattr(runner, "rejection_sampler")

    def finish(self, scheduled: Any) -> Any:
        """Release requests that ended, and keep those that were preempted."""
        for request_id in scheduled.preempted_req_ids or ():
            self.ledger.park(request_id)
        for request_id in scheduled.finished_req_ids:
            report = self.ledger.release(request_id)
            if report is not None:
                say(report)
        return self._finish(scheduled)

    def add(self, scheduled: Any) -> Any:
        """Take in new requests, and take up preempted ones again."""
        result = self._add(scheduled)
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            if params is None:
                continue
            if new.req_id not in self.ledger or self.ledger.parked(new.req_id):
                policy = request_setting(self.vllm_config, params, f"request {new.req_id}")
                room = self.longest - int(new.prompt_len)
                limit = room if params.max_tokens is None else min(params.max_tokens, room)
                self.ledger.admit(new.req_id, policy, limit=limit, stop_ids=stop_ids_of(params))
            place = self.runner.req_states.req_id_to_index[new.req_id]
            self._table[place : place + 1] = self.ledger.slots([new.req_id])
        return result

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Sample as vLLM does, with the rule deciding about draft tokens on the way."""
        self._hook_sampler()
        places = input_batch.idx_mapping[: input_batch.num_reqs].long()
        unfinished = input_batch.seq_lens[: len(places)] < self.runner.req_states.prefill_len.gpu[places]
        self._now = self._table.clone()  # in the middle of prefill nothing is sampled
        self._now[places] = torch.where(unfinished, 0, self._table[places])
        self._verified = False
        output, number, rejected = self._sample(hidden_states, input_batch, grammar_output)
        if not self._verified:
            if input_batch.num_draft_tokens:
                raise EngineError("vLLM verified draft tokens without asking", fix="use a tested version of vLLM")
            slots = self._now[places]
            tokens = output.sampled_token_ids
            none = lay_blocks(torch.zeros_like(slots), 0)
            step = self.ledger.verify(slots, none, slots[:0], torch.zeros((0, 1), device=slots.device))
            self.ledger.commit(step, tokens)
        return output, number, rejected

    def _hook_sampler(self) -> None:
        sampler = self.runner.rejection_sampler
        if sampler is self._sampler:
            return
        names = (
            list(inspect.signature(sampler._verify).parameters)[: len(VERIFY)] if hasattr(sampler, "_verify") else []
        )
        if tuple(names) != VERIFY or not hasattr(sampler.sampler, "apply_sampling_params"):
            raise EngineError(
                f"the rejection sampler {type(sampler).__name__} is not known", fix="use a tested version of vLLM"
            )
        self._sampler = sampler
        self._verify, self._apply = sampler._verify, sampler.sampler.apply_sampling_params
        sampler._verify, sampler.sampler.apply_sampling_params = self.verify, self.apply

    def verify(
        self, logits: Any, draft_logits: Any, draft_sampled: Any, pos: Any, cu_num_logits: Any, *rest: Any
    ) -> Any:
        """Verify as vLLM does; ``rest`` begins with ``idx_mapping`` and ends with ``verify_draft_sampled``.

        Rows of a request are its draft rows and the bonus row; the draft token of a row is the token of the next one,
        and -1 ends a draft.
        """
        drafts = torch.cat([rest[-1][1:], rest[-1][:1]])
        widths = torch.diff(cu_num_logits).long() - 1
        blocks = lay_blocks(widths, self.width, gap=1)
        ends = (blocks.grid(drafts) < 0) & blocks.inside
        first = torch.nn.functional.pad(ends, (0, 1), value=True).int().argmax(1)
        inside = blocks.inside & (torch.arange(self.width, device=widths.device) < first[:, None])
        blocks = Blocks(torch.minimum(widths, first), inside, blocks.rows)
        self._blocks = self._now[rest[0].long()], blocks, drafts.clamp(min=0)
        processed, sampled, number = self._verify(logits, draft_logits, draft_sampled, pos, cu_num_logits, *rest)
        self._blocks = None
        if self._step is None:
            raise EngineError("vLLM verified draft tokens without asking", fix="use a tested version of vLLM")
        committed = torch.arange(sampled.shape[1], device=sampled.device) < number[:, None]
        self.ledger.commit(self._step, torch.where(committed, sampled, -1))
        self._step, self._verified = None, True
        return processed, sampled, number

    def apply(self, logits: Any, *rest: Any, **named: Any) -> Any:
        """Apply vLLM's sampling parameters, then decide and lift, where draft tokens are being verified."""
        processed = self._apply(logits, *rest, **named)
        if self._blocks is None:
            return processed
        if processed.data_ptr() == logits.data_ptr():
            processed = logits.clone()  # the raw logits may be asked for as log-probabilities
        slots, blocks, drafts = self._blocks
        self._step = self.ledger.verify(slots, blocks, drafts, processed)
        return processed
