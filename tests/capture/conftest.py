"""Tiny seeded models, built in memory."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from asdsim.records import RequestRecord

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

VOCAB = 96
EOS = 7


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch to one thread: several test processes share the cores."""
    os.environ.setdefault("ASDSIM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def still_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep notes on a busy machine out of what is compared: tests share theirs."""
    monkeypatch.setattr("asdsim.capture.passes.PassTimes.problems_of", lambda *_: [])


def tiny_llama(seed: int = 0, layers: int = 3, vocab: int = VOCAB, positions: int = 256) -> Any:
    """Return a random Llama whose greedy text varies (a wide initialisation keeps it from looping at once)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, bos_token_id=None, eos_token_id=EOS,
        pad_token_id=None, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def llama() -> Any:
    """One tiny Llama for the whole session; nothing may change its weights."""
    return tiny_llama()


@pytest.fixture(scope="session")
def target(llama: Any) -> Any:
    """That Llama as a target."""
    from asdsim.engines.transformers.model import HFTarget

    return HFTarget(llama, "tiny-llama")


@pytest.fixture(scope="session")
def requests() -> Callable[..., list[RequestRecord]]:
    """Return random requests over the tiny vocabulary."""

    def make(count: int, *, seed: int = 0, limit: int = 24, longest: int = 24, stop: str = "natural") -> Any:
        rng = random.Random(seed)
        return [
            RequestRecord(
                request_id=f"r/{n}",
                task="random",
                prompt_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))),
                prompt_text="",
                reference=None,
                max_new_tokens=limit,
                eos_ids=(EOS,),
                stop=stop,
            )
            for n in range(count)
        ]

    return make


def generate(model: Any, prompt_ids: tuple[int, ...], limit: int) -> list[int]:
    """Return what Transformers itself decodes greedily."""
    ids = torch.tensor([prompt_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="session")
def generated(llama: Any) -> Callable[[RequestRecord], list[int]]:
    """What Transformers decodes of a request, computed once for each prompt and limit."""
    known = cache(lambda prompt_ids, limit: generate(llama, prompt_ids, limit))
    return lambda request: list(known(request.prompt_ids, request.max_new_tokens))


def word_tokenizer(vocab: int = VOCAB) -> Any:
    """Return a tokenizer of ``vocab`` words ``w0 w1 ...``, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"w{EOS}", unk_token="w0")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A directory with the tiny Llama and its tokenizer, and one with 24 prompts for it."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_llama().save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    rng = random.Random(6)
    with (folder / "prompts.jsonl").open("w") as file:
        for n in range(24):
            words = " ".join(f"w{rng.randrange(VOCAB)}" for _ in range(rng.randint(2, 20)))
            file.write(json.dumps({"prompt": words, "reference": str(n)}) + "\n")
    return folder
