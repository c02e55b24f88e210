"""Transformers' assisted generation under ASD: B = 0 is generate, and other settings equal live decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from asdsim.capture.loop import decode  # noqa: E402
from asdsim.engines.protocol import Drafter, DrafterSession, Proposal  # noqa: E402
from asdsim.engines.transformers.assisted import Assisted  # noqa: E402
from asdsim.engines.transformers.model import HFTarget  # noqa: E402
from asdsim.errors import EngineError  # noqa: E402
from asdsim.records import RequestRecord  # noqa: E402
from asdsim.rules.settings import STRICT, Policy, layout_of  # noqa: E402
from tests.capture.conftest import EOS, generate, tiny_llama  # noqa: E402

K = 5
LIMIT = 40


class Theirs(Drafter, DrafterSession):
    """Drafts as Transformers does: the earliest match of the longest n-gram, or an assistant, cut before the limit."""

    memoryless = True

    def __init__(self, prompt: int, limit: int, assistant: Any = None, vocab: int = 96) -> None:
        self.name, self.vocab_size = "theirs", vocab
        self.longest, self.assistant = prompt + limit, assistant

    def session(self, prompt_ids: Sequence[int]) -> DrafterSession:
        return self

    def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        room = min(num_draft_tokens, self.longest - len(prefix_ids) - 1)
        ids = list(prefix_ids)
        if self.assistant is not None:
            return Proposal(generate(self.assistant, tuple(ids), room) if room > 0 else [])
        if room <= 0:
            return Proposal([])
        for size in range(min(2, len(ids) - 1), 0, -1):
            for at in range(len(ids) - size):
                found = ids[at + size : at + size + num_draft_tokens]
                if ids[at : at + size] == ids[-size:] and found:
                    end = found.index(EOS) if EOS in found else len(found)
                    return Proposal(found[:end])
        return Proposal([])


def prompts(number: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    base = torch.randint(8, 96, (number, 6), generator=generator).tolist()
    return [tuple(ids + ids[:4]) for ids in base]


def run(model: Any, prompt: tuple[int, ...], asd: Assisted, limit: int = LIMIT, **more: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit,
                         custom_generate=asd, **more)  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def assistant_of(model: Any) -> Any:
    """Return a copy that mostly agrees: the same weights, slightly shaken."""
    other = tiny_llama()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    settings = other.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = K, "constant"
    settings.assistant_confidence_threshold = 0.0
    return other


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama()


READINGS = [("paper", 0.0, 0.5, 2.0), ("paper", 3.0, 0.5, 2.0), ("paper", 8.0, 2.0, 1.0), ("core", 3.0, 0.5, 2.0),
            ("dspark", 3.0, 1.0, 2.0), ("lightllm", 3.0, 0.5, 2.0)]  # fmt: skip


@pytest.mark.parametrize("drafts", ["look-up", "assistant"])
@pytest.mark.parametrize(("semantics", "B", "g", "M"), READINGS)
def test_tokens_steps_and_ledger_equal_live_decoding(
    llama: Any, drafts: str, semantics: str, B: float, g: float, M: float
) -> None:
    policy = Policy(B, g, M, semantics, layout_of(semantics))
    target = HFTarget(llama, "tiny-llama")
    assistant = assistant_of(llama) if drafts == "assistant" else None
    relaxed = 0
    for prompt in prompts(6):
        asd = Assisted(policy, assistant)
        more = {} if assistant is not None else {"prompt_lookup_num_tokens": K, "max_matching_ngram_size": 2}
        tokens = run(llama, prompt, asd, **more)
        request = RequestRecord("r", "", prompt, "", None, LIMIT, (EOS,))
        live = decode(target, Theirs(len(prompt), LIMIT, assistant), request, policy, K)
        assert tokens == live.tokens
        report = asd.report
        assert report is not None and report.tokens == len(tokens)
        assert (report.steps, report.relaxed) == (len(live.outcomes), sum(o.relaxed for o in live.outcomes))
        assert report.accepted == sum(o.accepted for o in live.outcomes)
        assert report.drafted == sum(o.num_draft_tokens for o in live.outcomes)
        assert report.spent == pytest.approx(live.ledger, abs=1e-4)
        relaxed += report.relaxed
        if B == 0.0:
            assert tokens == generate(llama, prompt, LIMIT) and report.spent == 0.0
    assert (relaxed > 0) == (B > 0)


def test_early_exit_drafts_too(llama: Any) -> None:
    relaxed = 0
    for prompt in prompts(4):
        strict = run(llama, prompt, Assisted(STRICT), assistant_early_exit=2)
        assert strict == generate(llama, prompt, LIMIT)
        asd = Assisted(Policy(8, 2.0, 2))
        tokens = run(llama, prompt, asd, assistant_early_exit=2)
        assert asd.report is not None and asd.report.spent <= 8.0 and asd.report.tokens == len(tokens)
        relaxed += asd.report.relaxed
    assert relaxed > 0


def test_the_folder_serves_as_custom_generate(llama: Any, tmp_path: Path) -> None:
    import asdsim.engines.transformers.assisted as home

    prompt = prompts(1)[0]
    ids = torch.tensor([prompt])
    out = llama.generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate=str(Path(home.__file__).parent),
        trust_remote_code=True, B=3.0, g=0.5, M=2, prompt_lookup_num_tokens=K, do_sample=False, max_new_tokens=LIMIT,
    )  # fmt: skip
    assert out[0, len(prompt) :].tolist() == run(
        llama, prompt, Assisted(Policy(3.0, 0.5, 2)), prompt_lookup_num_tokens=K
    )


def test_what_cannot_be_done_is_refused(llama: Any) -> None:
    prompt = prompts(1)[0]
    with pytest.raises(EngineError, match="nothing drafts"):
        run(llama, prompt, Assisted(STRICT))
    ids = torch.tensor([prompt, prompt])
    with pytest.raises(EngineError, match="one sequence at a time"):
        llama.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=Assisted(STRICT), max_new_tokens=3,
                       prompt_lookup_num_tokens=2)  # fmt: skip
    one = torch.tensor([prompt])
    with pytest.raises(EngineError, match="greedy"):
        llama.generate(one, attention_mask=torch.ones_like(one), custom_generate=Assisted(STRICT), max_new_tokens=3,
                       prompt_lookup_num_tokens=2, do_sample=True)  # fmt: skip
    with pytest.raises(EngineError, match="one row at a time"):
        Assisted(Policy(1, 1, 1, "paper", layout_of("paper", value="reuse")))


def test_nan_logits_are_an_error(llama: Any) -> None:
    broken = tiny_llama()
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(EngineError, match="the target's logits hold NaN"):
        run(broken, prompts(1)[0], Assisted(Policy(1, 1, 1)), prompt_lookup_num_tokens=K)


@pytest.mark.smollm2
@pytest.mark.xdist_group("smollm2")
def test_smollm2_with_look_up_and_an_assistant() -> None:
    from asdsim.capture.drafters.layer_skip import skip_layers
    from asdsim.engines.transformers.load import load_target

    target = load_target("smollm2-135m")
    text = "List the names of three colours, then repeat the list of three colours."
    prompt = tuple(target.tokenizer(text)["input_ids"])
    small = skip_layers(target.model, (12,))
    settings = small.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = K, "constant"
    settings.assistant_confidence_threshold = 0.0
    plain = generate(target.model, prompt, 24)
    for assistant in (None, small):
        more = {} if assistant is not None else {"prompt_lookup_num_tokens": K, "max_matching_ngram_size": 2}
        assert run(target.model, prompt, Assisted(STRICT, assistant), 24, **more) == plain
        policy = Policy(8, 0.25, 2)
        asd = Assisted(policy, assistant)
        tokens = run(target.model, prompt, asd, 24, **more)
        request = RequestRecord("r", "", prompt, "", None, 24, target.eos_ids)
        live = decode(target, Theirs(len(prompt), 24, assistant, target.vocab_size), request, policy, K)
        assert asd.report is not None
        assert (tokens, asd.report.steps) == (live.tokens, len(live.outcomes))
        assert asd.report.spent == pytest.approx(live.ledger, abs=1e-3)
