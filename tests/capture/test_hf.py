"""Hugging Face models as targets and drafters, on tiny random ones, against Transformers and against each other."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asdsim.capture.drafters import make_drafter
from asdsim.capture.drafters.layer_skip import GreedyDrafter, skip_layers
from asdsim.capture.drafters.model import ModelDrafter, check_same_tokenizer
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.engines.protocol import Proposal
from asdsim.engines.transformers.model import HFTarget, weights_sha256
from asdsim.errors import AsdsimError, CaptureError, UsageError
from asdsim.records import RequestRecord, StepRecord
from asdsim.rules.settings import STRICT, Policy
from tests.capture.conftest import EOS, VOCAB, generate, tiny_llama, word_tokenizer

torch = pytest.importorskip("torch")

Requests = Callable[..., list[RequestRecord]]


def other_models() -> dict[str, Any]:
    """Return tiny models of other families: absolute positions, biases, sliding windows with soft-capped logits."""
    from transformers import Gemma2Config, GPT2Config, Qwen2Config
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
        "eos_token_id": EOS, "pad_token_id": None, "initializer_range": 0.15,
    }  # fmt: skip
    configs = {
        "gpt2": GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=128, initializer_range=0.15,
            bos_token_id=None, eos_token_id=EOS, pad_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        ),
        "qwen2": Qwen2Config(**common),
        "gemma2": Gemma2Config(**common, head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
    }  # fmt: skip
    models = {}
    for name, config in configs.items():
        torch.manual_seed(5)
        models[name] = AutoModelForCausalLM.from_config(config).eval()
    return models


@pytest.fixture(scope="module")
def family() -> dict[str, Any]:
    return other_models()


@pytest.mark.parametrize("spec", ["layer-skip:1", "lookup:3", "model"])
@pytest.mark.parametrize(("policy", "count"), [(STRICT, 30), (Policy(0, 1, 2), 200)], ids=["strict", "asd-B0"])
def test_zero_budget_is_what_generate_decodes(
    target: HFTarget, requests: Requests, generated: Callable[..., list[int]], spec: str, policy: Policy, count: int
) -> None:
    drafter = ModelDrafter(tiny_llama(seed=0, layers=2), "other") if spec == "model" else make_drafter(spec, target)
    recorder = Recorder() if policy is STRICT else None
    accepted = 0
    for request in requests(count, limit=16):
        result = decode(target, drafter, request, policy, 5, recorder)
        assert result.tokens == generated(request), request
        assert result.ledger == 0.0
        accepted += sum(outcome.accepted for outcome in result.outcomes)
    assert accepted > 0, "no draft was ever accepted: nothing was tested"


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gemma2"])
@pytest.mark.parametrize("spec", ["layer-skip:1", "lookup:3"])
def test_other_families_decode_as_generate_does(
    family: dict[str, Any], requests: Requests, name: str, spec: str
) -> None:
    target = HFTarget(family[name], name)
    drafter = make_drafter(spec, target)
    for request in requests(10, limit=40, seed=3):  # beyond the sliding window
        assert decode(target, drafter, request, STRICT, 4).tokens == generate(family[name], request.prompt_ids, 40)


def test_sessions_answer_by_the_prefix_alone(target: HFTarget, family: dict[str, Any]) -> None:
    rng = random.Random(2)
    for model in (target, HFTarget(family["gemma2"], "gemma2")):
        session = model.session(())
        ids = [rng.randrange(VOCAB) for _ in range(60)]
        for _ in range(40):
            at, width = rng.randint(1, 50), rng.randint(0, 6)
            prefix = ids[:at] if rng.random() < 0.7 else [*ids[: at - 1], rng.randrange(VOCAB)]
            draft = [rng.randrange(VOCAB) for _ in range(width)]
            found = session.score(prefix, draft)
            fresh = model.session(()).score(prefix, draft)
            assert found.shape == (width + 1, VOCAB)
            # another split of the same sums: float32 rounding only
            torch.testing.assert_close(found, fresh, rtol=1e-4, atol=1e-4)


def blocks(count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    drafts = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))] for _ in range(count)]
    return prefixes, drafts


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "gemma2"])
def test_batches_score_as_one_by_one(llama: Any, family: dict[str, Any], name: str) -> None:
    target = HFTarget({**family, "llama": llama}[name], name)
    prefixes, drafts = blocks(24, seed=4)
    for batched, prefix, draft in zip(target.score_many(prefixes, drafts), prefixes, drafts, strict=True):
        single = target.session(prefix).score(prefix, draft)
        assert batched.shape == single.shape == (len(draft) + 1, VOCAB)
        assert batched.argmax(-1).tolist() == single.argmax(-1).tolist()
        torch.testing.assert_close(batched, single, rtol=1e-4, atol=1e-4)
    assert target.score_many([], []) == []


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "gemma2"])
def test_batches_propose_as_one_by_one(llama: Any, family: dict[str, Any], name: str) -> None:
    target = HFTarget({**family, "llama": llama}[name], name)
    drafter = make_drafter("layer-skip:2", target)
    prefixes, _ = blocks(16, seed=6)
    for batched, prefix in zip(drafter.propose_many(prefixes, 5), prefixes, strict=True):
        single = drafter.session(prefix).propose(prefix, 5)
        assert batched.ids == single.ids
        np.testing.assert_allclose(batched.logprobs, single.logprobs, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_layer_skip_is_the_model_without_the_layer(
    llama: Any, family: dict[str, Any], name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = {**family, "llama": llama}[name]
    before = weights_sha256(model)
    thin = skip_layers(model, [1])
    thin.save_pretrained(tmp_path)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert alone.config.num_hidden_layers == model.config.num_hidden_layers - 1
    ids = torch.tensor([[5, 9, 2, 40, 40, 3, 8]])
    with torch.inference_mode():
        assert torch.equal(thin(ids).logits, alone(ids).logits)
        assert not torch.allclose(thin(ids).logits, model(ids).logits)
    assert weights_sha256(model) == before
    shared = {tensor.data_ptr() for tensor in model.parameters()}
    assert all(tensor.data_ptr() in shared for tensor in thin.parameters()), "weights must be shared, not copied"
    proposals = [
        drafter.session(()).propose([5, 9, 2, 40], 6)
        for drafter in (GreedyDrafter(thin, "thin"), ModelDrafter(alone, "alone"))
    ]
    assert proposals[0].ids == proposals[1].ids


def test_drafter_logprobs_and_logits_are_its_own(target: HFTarget) -> None:
    drafter = make_drafter("layer-skip:1", target, keep_logits=True)
    prefix = [4, 8, 15, 16, 23, 42]
    proposal = drafter.session(prefix).propose(prefix, 4)
    with torch.inference_mode():
        rows = drafter.model(torch.tensor([[*prefix, *proposal.ids]])).logits[0, len(prefix) - 1 : -1]
    assert rows.argmax(-1).tolist() == proposal.ids
    torch.testing.assert_close(proposal.logits, rows, rtol=1e-4, atol=1e-4)
    expected = rows.log_softmax(-1).gather(1, torch.tensor(proposal.ids)[:, None])[:, 0]
    np.testing.assert_allclose(proposal.logprobs, expected, atol=1e-4)


def test_divergences_are_recorded_where_asked_for(target: HFTarget, requests: Requests) -> None:
    request = requests(1, limit=8)[0]
    drafter = make_drafter("layer-skip:1", target, keep_logits=True)
    steps = decode(target, drafter, request, STRICT, 3, Recorder(divergences=("kl", "tv"))).steps
    assert all(set(step.divergences) == {"kl", "tv"} for step in steps)
    assert all(step.divergences["kl"].shape == (3,) and (step.divergences["kl"] > 0).all() for step in steps)
    with pytest.raises(UsageError, match="lookup gives no distribution"):
        make_drafter("lookup", target, keep_logits=True)


def same_step(a: StepRecord, b: StepRecord) -> bool:
    """Equal in everything but time."""
    for entry in dataclasses.fields(StepRecord):
        x, y = getattr(a, entry.name), getattr(b, entry.name)
        if not entry.name.endswith("_us") and not np.array_equal(x, y):
            return False
    return True


@pytest.mark.parametrize("policy", [STRICT, Policy(4, 0.5, 2)], ids=str)
def test_a_second_capture_is_the_same(target: HFTarget, requests: Requests, policy: Policy) -> None:
    drafter = make_drafter("layer-skip:1", target)
    for request in requests(10, seed=9):
        a, b = (decode(target, drafter, request, policy, 5, Recorder()) for _ in range(2))
        assert (a.tokens, a.ledger, a.outcomes) == (b.tokens, b.ledger, b.outcomes)
        assert all(same_step(x, y) for x, y in zip(a.steps, b.steps, strict=True))


def test_a_relaxed_capture_relaxes_within_its_bounds(target: HFTarget, requests: Requests) -> None:
    drafter = make_drafter("layer-skip:1", target)
    policy = Policy(3, 0.6, 2)
    relaxed = 0
    for request in requests(20, seed=10):
        result = decode(target, drafter, request, policy, 5, Recorder())
        assert 0 <= result.ledger <= policy.budget
        assert all(outcome.relaxed <= policy.cap for outcome in result.outcomes)
        relaxed += sum(outcome.relaxed for outcome in result.outcomes)
        # every committed token is the draft's or the target's own choice at its place
        for step, outcome in zip(result.steps, result.outcomes, strict=True):
            own = outcome.tokens[outcome.accepted :]
            assert outcome.tokens[: outcome.accepted] == step.draft_ids[: outcome.accepted].tolist()
            assert own in ([], [int(step.argmax_ids[outcome.accepted])])
    assert relaxed > 0


@pytest.mark.parametrize(
    ("ids", "n", "K", "expected"),
    [
        ([1, 2, 3, 9, 9, 1, 2, 3], 3, 3, [9, 9, 1]),
        ([1, 2, 5, 1, 2, 6, 1, 2], 3, 2, [6, 1]),  # the most recent match
        ([7, 1, 2, 8, 2, 9, 1, 2], 3, 1, [8]),  # a longer match beats a more recent one
        ([1, 2, 3, 4], 3, 4, []),
        ([5], 3, 4, []),
        ([5, 5], 3, 4, [5]),
        ([1, 2, 1], 1, 4, [2, 1]),  # fewer than asked for
    ],
)
def test_lookup(target: HFTarget, ids: list[int], n: int, K: int, expected: list[int]) -> None:
    drafter = make_drafter(f"lookup:{n}", target)
    assert drafter.session(ids).propose(ids, K) == Proposal(expected)
    assert drafter.propose_many([ids, ids], K) == [Proposal(expected)] * 2


def test_float32_logits_of_a_bfloat16_model(requests: Requests) -> None:
    plain = HFTarget(tiny_llama(seed=4).bfloat16(), "tiny")
    wide = HFTarget(tiny_llama(seed=4).bfloat16(), "tiny", logits_dtype="float32")
    assert (plain.logits_dtype, wide.logits_dtype, wide.dtype) == ("bfloat16", "float32", "bfloat16")
    assert plain.weights_sha256 == wide.weights_sha256
    request = requests(1)[0]
    narrow, fine = (model.session(()).score(request.prompt_ids, [1, 2]) for model in (plain, wide))
    assert (narrow.dtype, fine.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(fine, narrow.float(), rtol=2e-2, atol=2e-2)  # half a bfloat16 step
    assert not torch.equal(fine, fine.bfloat16().float())
    assert decode(wide, make_drafter("layer-skip:1", wide), request, STRICT, 3, Recorder()).tokens


def test_identity_follows_the_weights(target: HFTarget) -> None:
    assert HFTarget(tiny_llama(seed=0), "again").weights_sha256 == target.weights_sha256
    changed = tiny_llama(seed=0)
    with torch.no_grad():
        changed.model.norm.weight[3] += 1e-3
    assert HFTarget(changed, "changed").weights_sha256 != target.weights_sha256
    described = target.describe()
    assert described["vocab_size"] == VOCAB and described["dtype"] == "float32" and described["eos_ids"] == [EOS]


def test_drafters_that_do_not_fit_are_refused(target: HFTarget, requests: Requests, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_llama(vocab=VOCAB + 1).save_pretrained(other)
    with pytest.raises(CaptureError, match=f"vocabulary has {VOCAB + 1} tokens, the target's {VOCAB}"):
        make_drafter(f"model:{other}", target)
    with pytest.raises(CaptureError, match="layer 12 does not exist, the target has 3 layers .*layer-skip:1"):
        make_drafter("layer-skip", target)
    with pytest.raises(CaptureError, match="no layer would be left"):
        make_drafter("layer-skip:0,1,2", target)
    for spec, message in {
        "layer-skp": "did you mean 'layer-skip'",
        "layer-skip:": "ends with a colon",
        "layer-skip:a": "not a list of layers",
        "lookup:0": "not an n-gram length",
        "lookup:x": "not an n-gram length",
        "model": "names no model",
    }.items():
        with pytest.raises(AsdsimError, match=message):
            make_drafter(spec, target)
    with pytest.raises(CaptureError, match="need 301 positions, but the target has 256"):
        decode(target, make_drafter("lookup", target), requests(1, limit=300, longest=1)[0], STRICT, 1)


def test_tokenizers_must_agree() -> None:
    mine = word_tokenizer()
    check_same_tokenizer(mine, word_tokenizer())
    check_same_tokenizer(mine, None)
    with pytest.raises(CaptureError, match=f"has {VOCAB} entries, the drafter's {VOCAB + 3}"):
        check_same_tokenizer(mine, word_tokenizer(VOCAB + 3))

    class Swapped:
        def get_vocab(self) -> dict[str, int]:
            return {**mine.get_vocab(), "w3": 4, "w4": 3}

    with pytest.raises(CaptureError, match="'w3' is 3 here and 4 there"):
        check_same_tokenizer(mine, Swapped())
