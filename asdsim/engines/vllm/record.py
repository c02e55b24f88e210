"""Open a recorder for one vLLM engine, and say which requests it can take."""

from __future__ import annotations

import logging
from typing import Any

from ...errors import EngineError
from ..config import EngineConfig
from ..record import Recorder

DRAFTERS = {"eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa", "draft_model": "model"}
"""vLLM's methods, and the drafters of ``asdsim capture`` that draft the same."""


def open_for(vllm_config: Any, config: EngineConfig, open_recorder: Any, device: Any) -> Recorder | None:
    """Open the trace that an engine was asked for; None on ranks that see what another one records.

    Raises
    ------
    EngineError
        If there is nothing to write it with.
    """
    import vllm

    if open_recorder is None:
        raise EngineError("nothing writes traces here", where=config.trace, fix="load asdsim by its vLLM entry point")
    if vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size:
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    dtype = str(model.dtype).removeprefix("torch.")
    vocab = int(model.get_vocab_size())
    kind, where = DRAFTERS.get(speculative.method), speculative.model
    name = f"{kind}:{where}" if kind else f"vllm-{speculative.method}"
    top_k = min(int(config.trace_options.get("top_k", 8)), vocab)
    about = {
        "engine": {"name": "vllm", "version": vllm.__version__},
        "target": {"name": str(model.model), "dtype": dtype, "logits_dtype": dtype, "vocab_size": vocab},
        "drafter": {"name": name},
        "vocab_size": vocab, "num_draft_tokens": int(speculative.num_speculative_tokens), "top_k": top_k,
        "device": str(getattr(device, "type", device)),
        "part": f"engine-{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else "",
    }  # fmt: skip
    sink = open_recorder(config, about)
    return Recorder(sink, top_k, int(config.trace_options.get("queue", 1024)), logging.getLogger("vllm.asdsim"))


def refusal(params: Any) -> str:
    """Return why a request cannot be recorded; empty where it can."""
    if params.temperature:
        return "sampled"
    changed = (
        params.presence_penalty, params.frequency_penalty, params.repetition_penalty != 1.0, params.min_tokens,
        params.logit_bias, params.allowed_token_ids, params.bad_words, params.structured_outputs,
    )  # fmt: skip
    return "under logits processors" if any(changed) else ""
