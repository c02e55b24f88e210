"""Heads for engines: what is written drafts, through our own loader, what the head drafts here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asdsim.capture.drafters import make_drafter
from asdsim.capture.drafters.formats import read_checkpoint
from asdsim.engines.transformers.model import HFTarget
from asdsim.errors import AsdsimError
from heads.export import export
from tests.support.heads import dspark_config, dspark_tensors, eagle3_config, eagle3_tensors, medusa_tensors, save

from .conftest import VOCAB, tiny_llama

WIDTH, K = 32, 4
PREFIXES = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 9], [2, 71, 82, 81, 8, 2, 84, 59, 0, 45, 23, 53, 60]]


@pytest.fixture(scope="module")
def deep() -> HFTarget:
    return HFTarget(tiny_llama(layers=6), "deep")


def proposals(deep: HFTarget, spec: str) -> list[Any]:
    drafter = make_drafter(spec, deep, keep_logits=True)
    return [drafter.session(ids).propose(ids, K) for ids in PREFIXES]


def check_same(deep: HFTarget, before: str, after: str) -> None:
    for here, there in zip(proposals(deep, before), proposals(deep, after), strict=True):
        assert here.ids == there.ids
        torch.testing.assert_close(here.logits, there.logits, rtol=0, atol=1e-5)


def borrowing(folder: Path, **config: Any) -> str:
    """Write an EAGLE-3 head in float16 that uses the target's projection, as those in heads/."""
    tensors = eagle3_tensors(WIDTH, VOCAB, draft_vocab=40)
    del tensors["lm_head.weight"]
    halves = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    return save(folder, halves, eagle3_config(WIDTH, VOCAB, max_position_embeddings=64, **config))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_eagle3_gets_the_rows_that_it_drafts_from(deep: HFTarget, tmp_path: Path, engine: str) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    before = borrowing(tmp_path / "head", rope_scaling=scaling, target_layer_ids=[0, 2, 4])
    export(read_checkpoint(before), deep.model, engine, tmp_path / "out")
    check_same(deep, f"eagle3:{before}", f"eagle3:{tmp_path / 'out'}")
    written, config = read_checkpoint(str(tmp_path / "out")), json.loads((tmp_path / "out/config.json").read_text())
    token_ids = torch.arange(40) + written.tensors["d2t"]
    assert torch.equal(written.tensors["lm_head.weight"], deep.model.lm_head.weight[token_ids])
    assert written.tensors["d2t"].dtype == torch.int64 and written.tensors["fc.weight"].dtype == torch.float16
    assert all(name.split(".")[0] in ("fc", "midlayer", "norm", "lm_head", "d2t", "t2d") for name in written.tensors)
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (40, VOCAB, 1)
    table = config if engine == "vllm" else config["eagle_config"]
    assert table["eagle_aux_hidden_state_layer_ids"] == ([1, 3, 5] if engine == "vllm" else [0, 2, 4])


def test_windows_and_norms_go_along_to_vllm(deep: HFTarget, tmp_path: Path) -> None:
    more = {"layer_types": ["sliding_attention"], "sliding_window": 4, "norm_before_residual": True}
    before = borrowing(tmp_path / "head", **more)
    export(read_checkpoint(before), deep.model, "vllm", tmp_path / "out")
    check_same(deep, f"eagle3:{before}", f"eagle3:{tmp_path / 'out'}")
    with pytest.raises(AsdsimError, match="sglang does not read norm_before_residual"):
        export(read_checkpoint(before), deep.model, "sglang", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("own", [False, True])
def test_medusa_gets_the_whole_projection(deep: HFTarget, tmp_path: Path, own: bool) -> None:
    tensors = medusa_tensors(WIDTH, VOCAB, K, own=own)
    before = save(tmp_path / "head", tensors, {"medusa_num_heads": K, "vocab_size": VOCAB})
    export(read_checkpoint(before), deep.model, "vllm", tmp_path / "out")
    check_same(deep, f"medusa:{before}", f"medusa:{tmp_path / 'out'}")
    written, config = read_checkpoint(str(tmp_path / "out")), json.loads((tmp_path / "out/config.json").read_text())
    assert config["original_lm_head"] is not own and config["truncated_vocab_size"] == VOCAB
    assert (config["model_type"], config["num_heads"], config["medusa_fc_bias"]) == ("medusa", K, True)
    if not own:
        assert torch.equal(written.tensors["0.1.weight"], deep.model.lm_head.weight)
        assert "1.1.weight" not in written.tensors


def test_a_token_map_is_left_out(deep: HFTarget, tmp_path: Path) -> None:
    chosen = torch.arange(0, VOCAB, 3)
    tensors = {**medusa_tensors(WIDTH, VOCAB, K, own=False), "token_map": chosen}
    before = save(tmp_path / "head", tensors, {"vocab_size": VOCAB, "truncated_vocab_size": len(chosen)})
    export(read_checkpoint(before), deep.model, "vllm", tmp_path / "out")
    pairs = zip(proposals(deep, f"medusa:{before}"), proposals(deep, f"medusa:{tmp_path / 'out'}"), strict=True)
    for mapped, whole in pairs:
        torch.testing.assert_close(whole.logits[:, chosen], mapped.logits[:, chosen], rtol=0, atol=1e-5)
        assert whole.ids == whole.logits.argmax(-1).tolist()


def test_what_an_engine_would_compute_otherwise_is_refused(deep: HFTarget, tmp_path: Path) -> None:
    normed = save(tmp_path / "normed", eagle3_tensors(WIDTH, VOCAB, norms=True), eagle3_config(WIDTH, VOCAB))
    block = save(tmp_path / "block", dspark_tensors(WIDTH, VOCAB, 2), dspark_config(WIDTH, VOCAB, K, (0, 2)))
    medusa = save(tmp_path / "medusa", medusa_tensors(WIDTH, VOCAB, 2), {})
    for folder, engine, text in (
        (normed, "vllm", "norms of queries and keys"), (block, "vllm", "kind dspark cannot be exported for vllm"),
        (medusa, "sglang", "kind medusa cannot be exported for sglang"),
    ):  # fmt: skip
        with pytest.raises(AsdsimError, match=text):
            export(read_checkpoint(folder), deep.model, engine, tmp_path / "out")
    with pytest.raises(AsdsimError, match="the directory is not empty"):
        export(read_checkpoint(medusa), deep.model, "vllm", tmp_path / "block")
