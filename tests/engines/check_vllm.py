"""Hold asdsim inside vLLM against plain decoding and live decoding; see run_vllm.sh, which runs this.

Each engine is a process of its own (vllm_live.py); what it returns is compared here, with the same model. A request
begins in vLLM with a token from prefill, so live decoding is given the prompt and that token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from asdsim.capture.drafters import make_drafter
from asdsim.capture.loop import decode
from asdsim.engines.protocol import Drafter, DrafterSession, Proposal
from asdsim.engines.transformers.load import load_target
from asdsim.records import RequestRecord
from asdsim.rules.asd import accept
from asdsim.rules.settings import STRICT, Grid, Policy

K = 7
TEXTS = (
    "List three colours, then say the list again in reverse order.",
    "Write a Python function that adds two numbers, then a second one that subtracts them.",
    "What is the capital of France? Answer in one sentence, and repeat it twice.",
)
LOOK_UP = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTINGS = {"asd": Policy(8, 0.25, 2), "tight": Policy(4, 0.1, 1), "strict": STRICT}


class EarliestMatch(Drafter, DrafterSession):
    """vLLM's look-up: the earliest match of the longest n-gram of at most three tokens."""

    name, vocab_size, memoryless = "earliest-match", None, True

    def session(self, prompt_ids: Sequence[int]) -> DrafterSession:
        return self

    def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        ids = list(prefix_ids)
        for size in (3, 2, 1):
            for at in range(len(ids) - size):
                if ids[at : at + size] == ids[-size:]:
                    return Proposal(ids[at + size : at + size + num_draft_tokens])
        return Proposal([])


class Check:
    """Engines, what they returned, and what was found wrong."""

    def __init__(self, python: str, tokens: int, number: int) -> None:
        self.python, self.limit = python, tokens
        self.target = load_target("smollm2-135m")
        self.folder = Path(self.target.model.config._name_or_path)
        tokenizer = self.target.tokenizer
        chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                               tokenize=False) for text in TEXTS[:number]]  # fmt: skip
        self.prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in chats]
        self.rows: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}

    def requests(self, setting: str | None = None, which: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return one request for each prompt, under a setting of its own or the engine's."""
        policy = None if setting is None else SETTINGS[setting]
        extra = None if policy is None else {"asd_B": policy.budget, "asd_g": policy.gate, "asd_M": policy.cap}
        chosen = range(len(self.prompts)) if which is None else which
        return [{"prompt": self.prompts[n], "max_tokens": self.limit, "extra": extra} for n in chosen]

    def run(self, name: str, rounds: list[list[dict[str, Any]]], **engine: Any) -> list[Any]:
        """Run one engine; return its rounds."""
        job = {
            "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
            "engine": {"model": str(self.folder), "enforce_eager": True, "dtype": "float32", "max_model_len": 1024,
                       "max_num_seqs": 8, "seed": 0, **engine},
            "rounds": rounds,
        }  # fmt: skip
        script = Path(__file__).with_name("vllm_live.py")
        done = subprocess.run([self.python, str(script)], input=json.dumps(job), capture_output=True, text=True,
                              check=False, timeout=1500, env={**os.environ, "PYTHONPATH": ""})  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found = json.loads(lines[-1] if lines else '{"error": "no answer"}')
        self.results[name] = found
        if "error" in found:
            self.say(f"{name} runs", False, found["error"] + done.stderr[-2000:])
            return []
        return found["rounds"]  # type: ignore[no-any-return]

    def say(self, what: str, right: bool, more: str = "") -> None:
        """Note one comparison."""
        self.rows.append({"what": what, "right": right, "more": more})
        print(f"{'ok   ' if right else 'WRONG'} {what}{': ' if more else ''}{more}", flush=True)

    def live(self, name: str, drafter: Drafter, found: list[dict[str, Any]], setting: str) -> None:
        """Hold one round against live decoding: tokens, steps, ledger."""
        policy = SETTINGS[setting]
        for n, (prompt, one) in enumerate(zip(self.prompts, found, strict=False)):
            first, report = one["tokens"][0], one["asd"]
            request = RequestRecord(f"{n}", "", (*prompt, first), "", None, self.limit - 1, self.target.eos_ids)
            live = decode(self.target, drafter, request, policy, K)
            tokens = one["tokens"] == [first, *live.tokens]
            steps = report["steps"] == len(live.outcomes)
            ledger = abs(report["regret_spent"] - live.ledger) <= 1e-3
            relaxed = report["relaxed"] == sum(outcome.relaxed for outcome in live.outcomes)
            self.say(f"{name} {policy} prompt {n} equals live decoding", tokens and steps and ledger and relaxed,
                     f"{len(one['tokens'])} tokens, {report['steps']} steps ({len(live.outcomes)} live), regret "
                     f"{report['regret_spent']:.4f} ({live.ledger:.4f} live), {report['relaxed']} relaxed")  # fmt: skip


def tokens_of(found: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of a round."""
    return [one["tokens"] for one in found]


def method(check: Check, name: str, speculative: dict[str, Any], drafter: Drafter, plain: list[list[int]]) -> None:
    """Run one drafter: strict, B=0 and two settings, alone and side by side."""
    asked = {"B": 8, "g": 0.25, "M": 2}
    rounds = [
        check.requests("strict"), check.requests(), check.requests("tight", [0]),
        check.requests("tight", [0]) + check.requests(None, [1]) + check.requests("strict", [2]),
        [{**check.requests(None, [0])[0], "temperature": 0.7}],
        [{**check.requests(None, [0])[0], "extra": {"asd_B": "8"}}],
    ]  # fmt: skip
    found = check.run(name, rounds, speculative_config=speculative, additional_config={"asd": asked})
    if not found:
        return
    strict, asd, tight, mixed, sampled, text = found
    check.say(f"{name}: B=0 equals plain decoding", tokens_of(strict["requests"]) == plain)
    check.say(f"{name}: B=0 says that it is lossless", all(one["asd"]["lossless"] for one in strict["requests"]))
    check.live(name, drafter, asd["requests"], "asd")
    check.live(name, drafter, tight["requests"], "tight")
    side = tokens_of(mixed["requests"])
    alone = [tight["requests"][0]["tokens"], asd["requests"][1]["tokens"], strict["requests"][2]["tokens"]]
    ledgers = [one["asd"]["regret_spent"] for one in mixed["requests"]]
    single = [source["requests"][n]["asd"]["regret_spent"] for n, source in enumerate((tight, asd, strict))]
    check.say(f"{name}: three settings side by side equal each alone",
              side == alone and all(abs(a - b) <= 1e-3 for a, b in zip(ledgers, single, strict=True)))  # fmt: skip
    check.say(f"{name}: sampling is refused", "greedy decoding" in sampled.get("error", ""), sampled.get("error", ""))
    check.say(f"{name}: text for B is refused", "not a number" in text.get("error", ""), text.get("error", ""))
    for one in [*strict["requests"], *asd["requests"]]:
        check.rows[-1]["right"] &= not one["asd"]["faults"]


def preemption(check: Check, folder: Path) -> None:
    """Give a tiny model's engine too little memory for all requests, and recompute every ledger from its trace."""
    from asdsim.result import load
    from asdsim.rules.scoring import DEFAULT, lay_block

    make_tiny(folder / "tiny")
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(8, 128, (3, 6), generator=generator).tolist()
    requests = [{"prompt": ids * 3, "max_tokens": 130, "ignore_eos": True} for ids in prompts]
    asked = {"B": 1000, "g": 1.0, "M": 2, "trace": str(folder / "preempted")}
    found = check.run(
        "preemption", [requests], model=str(folder / "tiny"), skip_tokenizer_init=True, max_model_len=256,
        num_gpu_blocks_override=3, enable_prefix_caching=False, additional_config={"asd": asked},
        speculative_config={**LOOK_UP, "num_speculative_tokens": 5},
    )  # fmt: skip
    if not found:
        return
    trace = load(folder / "preempted")
    policy = Policy(1000, 1.0, 2)
    wrong = []
    for record in trace.request_records():
        report = next(one["asd"] for one in found[0]["requests"] if one["asd"]["request_id"] == record.request_id)
        spent = 0.0
        for step in trace.steps_of(record.request_id):
            at, scores, charges = lay_block(DEFAULT, record, step, [])
            stop = min(step.num_draft_tokens, record.max_new_tokens - step.start_pos)
            numbers = policy.budget, policy.gate, policy.cap
            spent += accept(at, scores, charges, stop, spent, *numbers)[1]
        if abs(spent - report["regret_spent"]) > 1e-9 or report["faults"] or report["tokens"] != 130:
            wrong.append(f"{record.request_id}: {spent} recomputed, {report['regret_spent']} reported")
    times = check.results["preemption"]["metrics"].get("vllm:num_preemptions", 0)
    complete = len(trace.request_ids()) == len(requests)
    check.say("forced preemption keeps ledgers", bool(times) and complete and not wrong,
              f"{times:g} preemptions {'; '.join(wrong)}")  # fmt: skip


def make_tiny(folder: Path) -> None:
    """Write a random Llama whose greedy text varies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=7, pad_token_id=None,
        initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def recording(check: Check, head: Path, folder: Path, plain: list[list[int]]) -> None:
    """Record with EAGLE3, then replay, cover, and hold the walk against what the engine did."""
    from asdsim.live.cover import cover_trace
    from asdsim.result import load, replay

    trace = folder / "trace"
    found = check.run(
        "EAGLE3", [check.requests("strict"), check.requests("asd")],
        speculative_config={"method": "eagle3", "model": str(head), "num_speculative_tokens": K},
        additional_config={"asd": {"B": 0, "g": 0.25, "M": 2, "trace": str(trace)}},
    )  # fmt: skip
    if not found:
        return
    strict, asd = (part["requests"] for part in found)
    check.say("EAGLE3: B=0 equals plain decoding", tokens_of(strict) == plain)
    check.live("EAGLE3", make_drafter(f"eagle3:{head}", check.target), asd, "asd")
    names = load(trace).request_ids()
    check.say("every request was recorded", len(names) == len(strict) + len(asd))
    # Steps of a trace count the end of prefill too, one a request.
    steps = {name: len(load(trace).steps_of(name)) for name in names}
    check.say("the trace has the steps that the engine reported", all(
        steps[one["asd"]["request_id"]] == one["asd"]["steps"] + 1 for one in [*strict, *asd]))  # fmt: skip
    cover_trace(trace, Grid.product(8, 0.25, 2), offline=True)
    result = replay(load(trace), B=8, g=0.25, M=2)
    same = [result.tokens(0, names.index(one["asd"]["request_id"])) == other["tokens"]
            for one, other in zip(strict, asd, strict=True)]  # fmt: skip
    check.say("covered, the trace of a strict request walks to what the engine did under ASD", all(same))


def overhead(check: Check) -> None:
    """Say what share of the time asdsim took, in the same run."""
    for name, result in check.results.items():
        for number, part in enumerate(result.get("rounds", [])):
            if part.get("in_asdsim"):
                shares = {key: f"{100 * value / part['seconds']:.1f} %" for key, value in part["in_asdsim"].items()}
                print(f"      {name}, round {number}: {part['seconds']:.1f} s, of which {shares}", flush=True)


def main() -> int:
    """Run everything; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment that has vLLM")
    parser.add_argument("--head", type=Path, help="EAGLE3 head as heads/export.py writes it")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=len(TEXTS))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    check = Check(options.python, options.tokens, options.prompts)
    found = check.run("plain", [check.requests()])
    if not found:
        return 1
    plain = tokens_of(found[0]["requests"])
    method(check, "look-up", LOOK_UP, EarliestMatch(), plain)
    with tempfile.TemporaryDirectory() as folder:
        preemption(check, Path(folder))
        if options.head is not None:
            recording(check, options.head, Path(folder), plain)
    overhead(check)
    wrong = [row for row in check.rows if not row["right"]]
    if options.output is not None:
        options.output.write_text(json.dumps({"checks": check.rows, "engines": check.results}, indent=1) + "\n")
    print(f"{len(check.rows) - len(wrong)} passed, {len(wrong)} failed")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
