"""The training script on a tiny target: batched answers are greedy ones, and what it trains is what the loaders run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asdsim.capture.drafters.formats import read_checkpoint
from asdsim.capture.drafters.heads import head_class
from asdsim.engines.transformers.forward import LanguageModel
from heads import data, train

from .conftest import EOS, VOCAB, generate

TAPS = [2, 4, 5, 8]


@pytest.fixture(scope="module")
def model() -> Any:
    """A random Llama of the heads' shape: 64 wide a head, three query heads a key."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=64, num_hidden_layers=8, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=None, eos_token_id=EOS, pad_token_id=None,
        initializer_range=0.06, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def shard(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers to random prompts, as ``generate`` writes them."""
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 12))] for _ in range(24)]
    lm = LanguageModel(model)
    lm.tap(TAPS)
    answers, states = data.decode(lm, prompts, 24, data.greedy, [EOS])
    path = tmp_path_factory.mktemp("heads") / "shard-00000.safetensors"
    data.save_shard(path, [data.Source(f"t/{n}", "") for n in range(24)], prompts, answers, states)
    return path


def test_answers_are_greedy_and_states_are_the_targets(model: Any, shard: Path) -> None:
    found = data.read_sequences([shard])
    assert len(found) == 24
    for ids, begin, states in zip(found.ids, found.begins, found.states, strict=True):
        tokens = ids.tolist()
        assert tokens[begin:] == generate(model, tuple(tokens[:begin]), 24)
        hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[tap][0] for tap in TAPS], -1)
        torch.testing.assert_close(states.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("grouped", [False, True])
def test_grouped_attention_is_plain_attention(grouped: bool) -> None:
    from .conftest import tiny_llama

    llama = tiny_llama(5)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(7)]
    expected = [generate(llama, tuple(prompt), 16) for prompt in prompts]
    if grouped:
        data.use_grouped_attention(llama)
    found, _ = data.decode(LanguageModel(llama), prompts, 16, data.greedy, [EOS])
    assert found == expected


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dspark"])
def test_training_learns_and_the_loader_drafts_alike(kind: str, model: Any, shard: Path, tmp_path: Path) -> None:
    answers = train.Answers([shard], TAPS, model, size=80)
    torch.manual_seed(0)
    trainer = {
        "medusa": lambda: train.MedusaTrainer(answers),
        "eagle3": lambda: train.EagleTrainer(answers, inner=64),
        "dspark": lambda: train.DSparkTrainer(answers, 0, inner=64),
    }[kind]()
    optimizer = torch.optim.AdamW(trainer.head.parameters(), lr=3e-3)
    losses = []
    for epoch in range(12):
        for batch in answers.batches(256, random.Random(epoch)):
            loss = trainer.loss(batch, random.Random(epoch), 0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    train.save_head(trainer, tmp_path, False, "tiny")
    checkpoint = read_checkpoint(str(tmp_path))
    head = head_class(kind).from_checkpoint(checkpoint, model)
    trainer.head.load_state_dict(head.state_dict())  # the rounding to float16 too
    batch = answers.batch(range(6))
    near = alike = 0
    with torch.inference_mode():
        drafts = trainer.drafts(batch)
        for row in range(6):
            for n in range(int(batch.begin[row]) - 1, int(batch.end[row]) - 1, 3):
                ids, states = batch.ids[row, : n + 1].tolist(), answers.read_by(head, batch)[row, :n]
                got, _ = head.draft(ids, states, head.memory(), drafts.shape[-1])
                near, alike = near + 1, alike + (got == drafts[row, n].tolist())
    assert alike >= near - 1 > 30  # one near-tie may fall the other way


def test_what_is_too_close_to_a_held_out_prompt_is_refused() -> None:
    held = "Tom has three red apples and buys seven more green apples at the old market in town today."
    guard = data.Guard([held + data.SUFFIX, "Say hello."])
    assert guard.refuses(held) and guard.refuses("say HELLO") and guard.refuses("Once, " + held.lower() + " How many?")
    assert not guard.refuses("Tom has three red apples and buys seven more." + data.SUFFIX)


def test_acceptance_counts_what_decoding_would_accept(model: Any, shard: Path) -> None:
    answers = train.Answers([shard], TAPS, model, size=80)

    class Perfect:
        """Drafts three tokens of the answer, the third wrong."""

        def drafts(self, batch: Any) -> torch.Tensor:
            padded = torch.nn.functional.pad(batch.ids, (0, 3), value=-1)
            right = torch.stack([padded[:, 1 + k : 1 + k + batch.ids.shape[1]] for k in range(3)], -1)
            right[..., 2] = -2
            return right

    (proposals, hits) = train.accepted(Perfect(), answers)["t"]
    tokens = [len(ids) - begin for ids, begin in zip(answers.data.ids, answers.data.begins, strict=True)]
    assert proposals == sum(-(-n // 3) for n in tokens)
    assert hits == sum(n - n // 3 for n in tokens)
