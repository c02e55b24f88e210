"""One vLLM engine, run as asked on its standard input; run in an environment that has vLLM, by run_vllm.sh.

    python vllm_live.py < job.json > result.json

A job names the model, the arguments of ``LLM`` and rounds; a round is a list of requests that are decoded in one batch,
each ``{"prompt": ids, "max_tokens": n, "extra": {...}}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def watch() -> dict[str, float]:
    """Time what asdsim does in this process's engine; return where the seconds are added up."""
    from asdsim.engines.vllm import ADAPTERS

    spent: dict[str, float] = {}

    def timed(owner: Any, name: str, part: str) -> None:
        plain = getattr(owner, name)
        spent[part] = 0.0

        def call(*positional: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return plain(*positional, **named)
            finally:
                spent[part] += time.perf_counter() - begin

        setattr(owner, name, call)

    for adapter in ADAPTERS:
        for name in ("verify", "commit"):
            timed(adapter.ledger, name, f"ledger.{name}")
        if adapter.recorder is not None:
            for name in ("see", "commit"):
                timed(adapter.recorder, name, f"recorder.{name}")
    return spent


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, decode the rounds, and return tokens and reports."""
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    engine = LLM(**{"disable_log_stats": False, **job["engine"]})
    started = time.perf_counter() - begin
    spent = watch()
    rounds = []
    for requests in job["rounds"]:
        spent.update(dict.fromkeys(spent, 0.0))
        begin = time.perf_counter()
        parameters = [
            SamplingParams(
                temperature=one.get("temperature", 0.0), max_tokens=one["max_tokens"],
                extra_args=one.get("extra") or None, ignore_eos=one.get("ignore_eos", False),
            )
            for one in requests
        ]  # fmt: skip
        try:
            outputs = engine.generate([{"prompt_token_ids": one["prompt"]} for one in requests], parameters,
                                      use_tqdm=False)  # fmt: skip
        except ValueError as error:
            rounds.append({"error": str(error)})
            continue
        rounds.append({
            "seconds": time.perf_counter() - begin,
            "in_asdsim": dict(spent),
            "requests": [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "asd": (output.kv_transfer_params or {}).get("asd"),
                    "spec": None if output.outputs[0].spec_decode_metrics is None
                    else output.outputs[0].spec_decode_metrics.to_dict(),
                }
                for output in outputs
            ],
        })  # fmt: skip
    counts = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()
              if "preempt" in metric.name or "spec_decode" in metric.name}  # fmt: skip
    return {"started": started, "rounds": rounds, "metrics": counts}


if __name__ == "__main__":
    job = json.load(sys.stdin)
    os.environ.update(job.get("environment", {}))
    answer = sys.stdout
    sys.stdout = sys.stderr  # vLLM prints
    try:
        result = run(job)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), file=answer, flush=True)
