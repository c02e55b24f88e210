"""The real model and the real prompt sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.capture.conftest import generate

pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("smollm2")]

LIMIT = 32


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from asdsim.engines.transformers.load import load_target

    return load_target("smollm2-135m")


@pytest.mark.parametrize("prompts", [1, pytest.param(2, marks=pytest.mark.slow)])  # of each set
def test_zero_budget_is_what_generate_decodes(smollm2: Any, tmp_path: Path, prompts: int) -> None:
    from asdsim.capture.drafters import make_drafter
    from asdsim.capture.run import Plan, capture_with
    from asdsim.capture.tasks import load_prompts
    from asdsim.rules.settings import Policy
    from asdsim.trace import read_trace

    plan = Plan(
        out=tmp_path / "t", target="smollm2-135m", drafter="layer-skip", task="gsm8k,humaneval,mt-bench",
        limit=prompts, max_new_tokens=LIMIT, policy=Policy(0, 0.25, 2),
    )  # fmt: skip
    chosen = load_prompts(plan.task, limit=plan.limit)
    summary = capture_with(smollm2, make_drafter(plan.drafter, smollm2), chosen, plan)
    trace = read_trace(plan.out)
    assert len(trace.request_records()) == 3 * prompts and summary.accepted > summary.steps
    for request in trace.request_records():
        expected = generate(smollm2.model, request.prompt_ids, LIMIT)
        found: list[int] = []
        steps = trace.steps_of(request.request_id)
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            end = len(expected) if after is None else after.start_pos
            width = end - step.start_pos
            drafted = step.draft_ids[:width].tolist()
            found += drafted if width <= len(drafted) and drafted[-1] == step.argmax_ids[width - 1] else [
                *step.draft_ids[: width - 1].tolist(), int(step.argmax_ids[width - 1])
            ]  # fmt: skip
        assert found == expected, request.request_id


def test_prompt_sets() -> None:
    from asdsim.capture.tasks import load_prompts

    prompts = load_prompts("gsm8k,humaneval,mt-bench", limit=2, offset=1)
    assert [p.id for p in prompts] == [
        "gsm8k/51", "gsm8k/54", "humaneval/1", "humaneval/2", "mt-bench/82", "mt-bench/83",
    ]  # fmt: skip
    assert [len(load_prompts(task)) for task in ("gsm8k", "humaneval", "mt-bench")] == [100, 164, 80]
    word = prompts[0]
    assert word.text.endswith("\nPlease reason step by step, and put your final answer within \\boxed{}.")
    assert word.reference is not None and float(word.reference) == int(word.reference)
    code = prompts[2]
    assert code.text.startswith(
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\nfrom typing"
    )
    assert code.text.endswith("\n\n```")
    assert code.reference is not None and json.loads(code.reference)["entry_point"] == "separate_paren_groups"


def test_the_chat_template_is_applied(smollm2: Any) -> None:
    from asdsim.capture.run import encode

    whole = smollm2.tokenizer.decode(encode(smollm2.tokenizer, "Hello", True))
    assert whole.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert whole.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.tokenizer.decode(encode(smollm2.tokenizer, "Hello", False)) == "Hello"
    assert smollm2.eos_ids == (2,) and smollm2.vocab_size == 49152
