"""Our decoding loop against Transformers' assisted generation: same pair, same K, greedy, in one run, as JSON.

    python analysis/assisted_generation.py [--prompts 3] [--tokens 96] [--rounds 3] [--K 7]

The drafter is the target without layer 12, saved as a model of its own. Both sides decode every prompt in each round,
in alternating order; the ratio is the median over pairs of our tokens per second (recording included) over theirs.
Draft length is constant there too: no schedule, no confidence threshold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from asdsim.capture.drafters import make_drafter
from asdsim.capture.drafters.layer_skip import skip_layers
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.capture.run import Plan, make_requests
from asdsim.capture.tasks import load_prompts
from asdsim.engines.transformers.load import load_target
from asdsim.rules.settings import STRICT


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--K", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    target = load_target("smollm2-135m")
    with tempfile.TemporaryDirectory() as folder:
        thin = Path(folder) / "without-12"
        skip_layers(target.model, (12,)).save_pretrained(thin)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(thin)
        drafter = make_drafter(f"model:{thin}", target)
    plan = Plan(
        out=Path(tempfile.gettempdir()) / "asdsim-unused", target="smollm2-135m", drafter="lookup", task="gsm8k",
        limit=options.prompts, max_new_tokens=options.tokens, K=options.K,
    )  # fmt: skip
    requests = list(make_requests(target, load_prompts(plan.task, limit=plan.limit), plan))
    settings = drafter.model.generation_config
    settings.num_assistant_tokens = options.K
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0

    def ours(request, recorder=None):  # type: ignore[no-untyped-def]
        return decode(target, drafter, request, STRICT, options.K, recorder).tokens

    def theirs(request):  # type: ignore[no-untyped-def]
        ids = torch.tensor([request.prompt_ids])
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=drafter.model, do_sample=False,
            max_new_tokens=options.tokens,
        )  # fmt: skip
        return out[0, ids.shape[1] :].tolist()

    ways = {
        "ours": lambda request: ours(request, Recorder()),
        "ours_without_recording": ours,
        "assisted_generation": theirs,
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    equal = True
    for turn in range(-1, options.rounds):
        for number, request in enumerate(requests):
            names = list(ways) if (turn + number) % 2 else list(ways)[::-1]
            got = {}
            for name in names:
                begin = time.perf_counter()
                got[name] = ways[name](request)
                if turn >= 0:  # the first turn warms up
                    speeds[name].append(len(got[name]) / (time.perf_counter() - begin))
            equal = equal and got["ours"] == got["assisted_generation"]

    def ratio(name: str) -> float:
        pairs = zip(speeds[name], speeds["assisted_generation"], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    print(
        json.dumps(
            {
                "what": "tokens per second over Transformers' assisted generation",
                "K": options.K,
                "tokens": options.tokens,
                "pairs": len(speeds["ours"]),
                "threads": torch.get_num_threads(),
                "same_tokens": equal,
                "tokens_per_second": {name: round(statistics.median(values), 2) for name, values in speeds.items()},
                "ratio": ratio("ours"),
                "ratio_without_recording": ratio("ours_without_recording"),
                "at_least": 1.0,
                "within": ratio("ours") >= 1.0,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
