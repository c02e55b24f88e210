"""Pieces of tokens join to the text that the tokenizer itself gives, for the kinds of tokenizers there are."""

from __future__ import annotations

import random
from typing import Any

import pytest

from asdsim.capture.vocabulary import make_vocabulary

pytest.importorskip("transformers")

TEXTS = ("Plain words, two  blanks.", " naïve café – €5", "tabs\tand\nlines", "日本語 🙂 mixed \u200d joiner", "x" * 40)


def fast(core: Any, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    core.train_from_iterator(TEXTS, trainer)
    return fast(core, eos_token="</s>", bos_token="<s>")


def sentence_piece() -> Any:
    """BPE over words that begin with a lower block sign, bytes where nothing else fits, as Llama 2 has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<s>", "</s>", "<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    core = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(core, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_pieces_join_to_the_tokenizers_text(make: Any) -> None:
    tokenizer = make()
    vocabulary = make_vocabulary(tokenizer, range(len(tokenizer)))
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert vocabulary.text(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
        ids = [0, *ids, 1]
        assert vocabulary.text(ids, special=True).startswith("<s>")
    rng = random.Random(4)
    for _ in range(50):  # any order of bytes, broken characters too
        ids = [rng.randrange(3, len(tokenizer)) for _ in range(12)]
        if make is byte_level:  # the other kind replaces bytes one by one
            assert vocabulary.text(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_words_that_a_tokenizer_joins_by_blanks() -> None:
    from tests.capture.conftest import word_tokenizer

    tokenizer = word_tokenizer(20)
    vocabulary = make_vocabulary(tokenizer, range(20))
    assert vocabulary.text([3, 4, 19]) == tokenizer.decode([3, 4, 19]) == "w3 w4 w19"


@pytest.mark.smollm2
def test_the_committed_vocabulary_is_that_of_the_tokenizer() -> None:
    from pathlib import Path

    import asdsim
    from asdsim.engines.transformers.text import load_tokenizer

    trace = asdsim.load(Path(__file__).parents[2] / "traces/smollm2-layerskip-k4")
    tokenizer = load_tokenizer(trace.manifest.target)
    assert trace.vocabulary is not None
    outputs = asdsim.replay(trace, B="0,8", g=0.5, M="1,2").outputs().tokens
    for tokens in [ids for of_request in outputs for ids in of_request]:
        expected = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert trace.vocabulary.text(tokens) == expected
