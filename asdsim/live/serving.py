"""What serves inside an engine: the plug-in that vLLM finds, and the trace that a running engine writes."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import EngineError
from ..files import to_path

if TYPE_CHECKING:
    from ..engines.config import EngineConfig
    from ..records import RequestRecord, StepRecord

BATCHES = "engine-steps.jsonl"
"""Beside the shards: for each request the number of requests that shared each of its steps."""


def register() -> None:
    """Put the hooks into vLLM; nothing else is imported until an engine asks for a trace."""
    from ..engines.vllm import install

    install(TraceSink.open)


class TraceSink:
    """Writes requests of a running engine to a trace, crash-safe as a capture is."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    @classmethod
    def open(cls, config: EngineConfig, about: Mapping[str, Any]) -> TraceSink:
        """Open the trace that was asked for, or continue one of the same engine.

        Parameters
        ----------
        config : EngineConfig
        about : mapping
            ``engine``, ``target``, ``drafter``, ``vocab_size``, ``num_draft_tokens``, ``top_k``, ``device``, ``part``
            (which of several engines that share the work; empty where there is one).

        Raises
        ------
        EngineError
            If pyarrow is missing, or the directory holds something else.
        """
        try:
            from ..trace.manifest import Manifest
            from ..trace.writer import TraceWriter
        except ImportError as error:
            raise EngineError(
                f"recording needs {error.name}", where=config.trace, fix="install asdsim with its dependencies there"
            ) from None
        policy = config.policy
        manifest = Manifest(
            target=dict(about["target"]), drafter=dict(about["drafter"]), vocab_size=about["vocab_size"],
            num_draft_tokens=about["num_draft_tokens"], top_k=about["top_k"],
            rule={"name": "asd", "B": policy.budget, "g": policy.gate, "M": policy.cap}, tasks=["engine"],
            logits_dtype=about["target"]["logits_dtype"], device=about["device"],
            settings={"engine": about["engine"], "top_k": about["top_k"], "first_token": "prefill"},
            software={"python": platform.python_version(), **about["engine"]},
        )  # fmt: skip
        return cls(TraceWriter.resume(to_path(config.trace) / about["part"], manifest))

    def add(self, request: RequestRecord, steps: Sequence[StepRecord], batch_sizes: Sequence[int]) -> None:
        """Store one request."""
        self.writer.add_request(request, steps)
        line = json.dumps({"request_id": request.request_id, "batch_size": list(batch_sizes)})
        with (self.writer.path / BATCHES).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def flush(self) -> None:
        """Store what is buffered."""
        self.writer.flush()

    def close(self) -> None:
        """Store what is buffered and let go of the directory."""
        self.writer.close()
