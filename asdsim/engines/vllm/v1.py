"""The V1 model runner of vLLM (``vllm.v1.worker.gpu_model_runner``), also on CPU."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import EngineError
from ..accept import lay_blocks
from ..config import EngineConfig, check_model
from ..ledger import Ledger, Step
from . import log, request_setting, say, stop_ids_of
from .record import open_for, refusal


class Adapter:
    """Decides for one V1 model runner.

    Parameters
    ----------
    runner : GPUModelRunner
    vllm_config : VllmConfig
    config : EngineConfig
    open_recorder : callable or None
    """

    def __init__(self, runner: Any, vllm_config: Any, config: EngineConfig, open_recorder: Any) -> None:
        self.runner, self.vllm_config, self.config = runner, vllm_config, config
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        self.longest = int(vllm_config.model_config.max_model_len)
        width = int(vllm_config.speculative_config.num_speculative_tokens)
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        for note in check_model(config, vocab_size=self.vocab_size, num_draft_tokens=width, dtype=dtype):
            log.warning("asd: %s", note)
        self.ledger = Ledger(config.policy, runner.device)
        self.step: Step | None = None
        self.recorder = open_for(vllm_config, config, open_recorder, runner.device) if config.trace else None
        self._slots: torch.Tensor | None = None
        self._hook()
        log.info("asd: %s by default (%s), trace: %s", config.policy, config.file, config.trace or "none")

    @staticmethod
    def knows(runner: Any) -> bool:
        """Return whether a runner has what this adapter holds on to."""
        sampler = getattr(runner, "rejection_sampler", None)
        names = ("_sample", "_update_states", "input_batch", "requests", "discard_request_mask")
        return hasattr(sampler, "apply_logits_processors") and all(hasattr(runner, name) for name in names)

    def _hook(self) -> None:
        runner = self.runner
        self._update_states, self._sample = runner._update_states, runner._sample
        self._processors = runner.rejection_sampler.apply_logits_processors
        runner._update_states = self.update_states
        runner._sample = self.sample
        runner.rejection_sampler.apply_logits_processors = self.process

    def update_states(self, scheduled: Any) -> Any:
        """Follow the requests that end and begin."""
        for request_id in scheduled.finished_req_ids:
            report = self.ledger.release(request_id)
            if report is not None:
                say(report)
            if self.recorder is not None:
                self.recorder.finish(request_id)
        known = set(self.runner.requests) - set(scheduled.finished_req_ids)
        result = self._update_states(scheduled)
        for new in scheduled.scheduled_new_reqs:
            if new.req_id not in known and new.sampling_params is not None:
                self.admit(new)
        return result

    def admit(self, new: Any) -> None:
        """Take in a request with its own setting."""
        params = new.sampling_params
        policy = request_setting(self.vllm_config, params, f"request {new.req_id}")
        prompt = new.prompt_token_ids
        if prompt is None:
            raise EngineError("a prompt of embeddings has no token ids", where=f"request {new.req_id}")
        room = self.longest - len(prompt)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self.ledger.admit(new.req_id, policy, limit=limit, stop_ids=stop_ids_of(params))
        if self.recorder is not None:
            self.recorder.admit(new.req_id, prompt, limit, stop_ids_of(params), refusal(params))

    def sample(self, logits: Any, metadata: Any) -> Any:
        """Sample as vLLM does, with the rule deciding about draft tokens on the way."""
        batch = self.runner.input_batch
        names = list(batch.req_ids)
        discard = self.runner.discard_request_mask.np[: len(names)]
        for n in discard.nonzero()[0]:  # in the middle of prefill: what is sampled is thrown away
            names[n] = ""
        self._slots = self.ledger.slots(names)
        self.step = None
        seen = None
        if self.recorder is not None:  # before processors and the lift change the logits
            widths = [0] * len(names) if metadata is None else metadata.num_draft_tokens
            drafts = None if metadata is None else metadata.draft_token_ids
            seen = self.recorder.see(names, widths, drafts, logits)
        output = self._sample(logits, metadata)
        if self.step is None:
            if metadata is not None and sum(metadata.num_draft_tokens):
                raise EngineError("vLLM verified draft tokens without asking", fix="use a tested version of vLLM")
            none = lay_blocks(torch.zeros_like(self._slots), 0)
            self.step = self.ledger.verify(self._slots, none, self._slots[:0], logits[:0])
        self._slots = None
        self.ledger.commit(self.step, output.sampled_token_ids)
        if seen is not None and self.recorder is not None:
            self.recorder.commit(seen, self.step.decision.accepted, output.sampled_token_ids)
        return output

    def process(self, logits: Any, sampling_metadata: Any, metadata: Any) -> Any:
        """Apply vLLM's processors to the draft rows, then decide and lift."""
        logits = self._processors(logits, sampling_metadata, metadata)
        if self._slots is None:  # vLLM warms up
            return logits
        ends = metadata.cu_num_draft_tokens
        widths = torch.diff(ends, prepend=ends.new_zeros(1))
        blocks = lay_blocks(widths, metadata.max_spec_len)
        self.step = self.ledger.verify(self._slots, blocks, metadata.draft_token_ids, logits)
        return logits
