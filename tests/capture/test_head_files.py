"""Files of draft heads: which of them count, and that no key that changes the computation is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asdsim.capture.drafters import check_head, make_drafter
from asdsim.capture.drafters.blocks import Rotary
from asdsim.capture.drafters.configuration import FULL, SLIDING, Window, rope_of, windows_of
from asdsim.capture.drafters.formats import Checkpoint, read_checkpoint
from asdsim.cli import main
from asdsim.engines.transformers.model import HFTarget
from asdsim.errors import CaptureError
from tests.support.heads import dspark_config, dspark_tensors, eagle3_config, eagle3_tensors, medusa_tensors, save

from .conftest import VOCAB, tiny_llama

WIDTH, K = 32, 4
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def deep() -> HFTarget:
    return HFTarget(tiny_llama(layers=6), "deep")


def write(tensors: dict[str, torch.Tensor], file: Path) -> None:
    if file.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    else:
        torch.save(tensors, file)


def sharded(folder: Path, suffix: str, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Write an EAGLE-3 head in two shards with an index; return its tensors and the index."""
    tensors = eagle3_tensors(WIDTH, VOCAB, seed=seed)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    files = [f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2)]
    place = {name: files["lm_head" in name or "mlp" in name] for name in tensors}
    folder.mkdir(exist_ok=True)
    for file in files:
        write({name: tensors[name] for name, at in place.items() if at == file}, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    (folder / "config.json").write_text(json.dumps(eagle3_config(WIDTH, VOCAB)))
    return tensors, place


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_only_files_of_the_index_count(tmp_path: Path, suffix: str) -> None:
    tensors, _ = sharded(tmp_path, suffix)
    stale = {name: tensor + 1 for name, tensor in tensors.items()}
    write(stale, tmp_path / ("model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"))
    found = read_checkpoint(str(tmp_path)).tensors
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no shard", r"\w+-00002-of-00002.\w+ is missing, which holds midlayer.mlp.gate_proj.weight"),
        ("no tensor", r"tensor more.weight is not in \w+-00001-of-00002"),
        ("twice", "tensor fc.weight is in another file too"),
        ("elsewhere", r"'../lm_head.bin' is not a file beside the index"),
        ("no names", "weight_map is .*, not an object"),
        ("number", "lm_head.weight is 3, not text"),
        ("empty", "weight_map names no tensors"),
        ("no index", r"\w+-00002-of-00002.\w+ is missing"),
        ("two", "two indexes of weights"),
    ],
)
def test_a_head_in_shards_is_whole_or_refused(tmp_path: Path, suffix: str, fault: str, text: str) -> None:
    tensors, place = sharded(tmp_path, suffix)
    index = next(tmp_path.glob("*.index.json"))
    second = place["lm_head.weight"]
    table: Any = dict(place)
    if fault in ("no shard", "no index"):
        (tmp_path / second).unlink()
    elif fault == "no tensor":
        table["more.weight"] = place["fc.weight"]
    elif fault == "twice":
        part = {name: tensors[name] for name, at in place.items() if at == second}
        write({**part, "fc.weight": tensors["fc.weight"]}, tmp_path / second)
    elif fault == "elsewhere":
        table["lm_head.weight"] = "../lm_head.bin"
    elif fault == "number":
        table["lm_head.weight"] = 3
    elif fault in ("no names", "empty"):
        table = {"no names": list(place), "empty": {}}[fault]
    else:
        (tmp_path / index.name.replace("model", "other" if suffix == "safetensors" else "model_b")).write_text("{}")
    index.write_text(json.dumps({"weight_map": table}))
    if fault == "no index":
        index.unlink()
    with pytest.raises(CaptureError, match=text):
        read_checkpoint(str(tmp_path))


def test_two_files_without_an_index_do_not_override_each_other(tmp_path: Path) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB)
    save(tmp_path, tensors, eagle3_config(WIDTH, VOCAB))
    write({"fc.weight": tensors["fc.weight"]}, tmp_path / "other.safetensors")
    with pytest.raises(CaptureError, match=r"other.safetensors: tensor fc.weight is in another file too"):
        read_checkpoint(str(tmp_path))


def test_a_shard_alone_is_no_head(tmp_path: Path) -> None:
    sharded(tmp_path, "safetensors")
    with pytest.raises(CaptureError, match="model-00002-of-00002.safetensors is missing"):
        read_checkpoint(str(tmp_path / "model-00001-of-00002.safetensors"))


# ---- maps and dtypes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_map_in_floating_point_is_refused(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB, draft_vocab=40)
    tensors[name] = tensors[name].to(dtype)
    folder = save(tmp_path, tensors, eagle3_config(WIDTH, VOCAB))
    with pytest.raises(CaptureError, match=rf"{name} is stored as \w*float\d+, which rounds token ids"):
        check_head(f"eagle3:{folder}")


def test_so_is_medusas(tmp_path: Path) -> None:
    tensors = {**medusa_tensors(WIDTH, VOCAB, 2, own=False), "token_map": torch.arange(40).to(torch.bfloat16)}
    with pytest.raises(CaptureError, match="token_map is stored as bfloat16"):
        check_head(f"medusa:{save(tmp_path, tensors, {'vocab_size': VOCAB})}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB)
    tensors["midlayer.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].to(dtype)
    with pytest.raises(CaptureError, match="layer.mlp.up_proj.weight is stored as .*quantised"):
        check_head(f"eagle3:{save(tmp_path, tensors, eagle3_config(WIDTH, VOCAB))}")


# ---- keys ------------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"logit_scale": 0.25}, "logit_scale"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"is_causal": False}, "is_causal is false"),
        ({"rope_theta": "10k"}, "rope_theta is '10k', not a finite number"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\], not a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, not a finite number"),
        ({"rope_theta": -1}, "rope_theta is -1, not above 1"),
        ({"target_layer_ids": "1,2,3"}, "target_layer_ids is '1,2,3', not a list"),
        ({"target_layer_ids": [1.0, 2.5, 3]}, r"target_layer_ids\[1\] is 2.5, not a whole number"),
        ({"hidden_act": "sillu"}, "hidden_act is 'sillu', not an activation"),
        ({"hidden_act": 3}, "hidden_act is 3, not text"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a finite number"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_attention_heads": 8, "head_dim": 8}, "num_attention_heads is 8, but the tensors are of 4 x 8"),
        ({"head_dim": 8.5}, "head_dim is 8.5"),
        *(
            ({name: 0}, f"{name} is 0, not a whole number >= 1")
            for name in (
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "vocab_size",
                "draft_vocab_size",
                "target_hidden_size",
            )
        ),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"norm_before_residual": "no"}, "norm_before_residual is 'no', not true or false"),
        ({"fc_norm": True}, "fc_norm is true, but tensor fc_norm.0.weight is missing"),
        ({"num_hidden_layers": 2}, "config.json says 2 layers, but the tensors hold 1"),
        ({"draft_vocab_size": 40}, "draft_vocab_size is 40, but d2t, which names these tokens, is missing"),
        ({"max_position_embeddings": "2k"}, "max_position_embeddings is '2k'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE of type dynamic is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 0, "original_max_position_embeddings": 8}}, "factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}}, "alpha is not known for RoPE of type linear"),
        ({"rope_scaling": 8}, "rope_scaling is 8, not an object"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "rope_type and type differ"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}}, "rope_parameters and rope_scaling differ"),
        ({"layer_types": [SLIDING]}, "does not say sliding_window"),
        ({"layer_types": ["chunked_attention"]}, "layers of type chunked_attention"),
        ({"layer_types": [SLIDING, FULL]}, "layer_types names 2 layers, the head has 1"),
        ({"layer_types": [SLIDING], "sliding_window": 4, "use_sliding_window": False}, "sliding windows"),
        ({"sliding_window": -3}, "sliding_window is -3"),
        ({"sliding_window": 2.5}, "sliding_window is 2.5"),
    ],
)
def test_keys_that_cannot_be_followed_are_refused_by_name(
    tmp_path: Path, deep: HFTarget, change: dict[str, Any], text: str
) -> None:
    folder = save(tmp_path, eagle3_tensors(WIDTH, VOCAB), eagle3_config(WIDTH, VOCAB, **change))
    for refuse in (lambda: check_head(f"eagle3:{folder}"), lambda: make_drafter(f"eagle3:{folder}", deep)):
        with pytest.raises(CaptureError, match=text):
            refuse()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type domino is not supported"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias"),
        ({"dflash_config": {"shift_label": True}}, "shift_label"),
        ({"dflash_config": {"use_swa": True}}, "does not say sliding_window"),
        ({"dflash_config": 7}, "dflash_config.* not a JSON object"),
        ({"block_size": "7"}, "block_size is '7'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 10**9}, "block_size is 1000000000"),
        ({"mask_token_id": 1.5}, "mask_token_id is 1.5"),
        ({"markov_rank": "6"}, "markov_rank is '6'"),
        ({"num_hidden_layers": 3}, "config.json says 3 layers, but the tensors hold 1"),
        ({"sample_from_anchor": 1}, "sample_from_anchor is 1, not true or false"),
        ({"architectures": 5}, "architectures is 5, not a list"),
        ({"architectures": [5]}, r"architectures\[0\] is 5, not text"),
    ],
)
def test_likewise_of_a_block_head(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    folder = save(tmp_path, dspark_tensors(WIDTH, VOCAB, 2), dspark_config(WIDTH, VOCAB, K, (0, 2), **change))
    with pytest.raises(CaptureError, match=text):
        check_head(f"dspark:{folder}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"medusa_num_heads": 3}, "medusa_num_heads is 3, but the tensors hold 2 heads"),
        ({"medusa_num_layers": 2}, "medusa_num_layers is 2, but the tensors hold 1 blocks"),
        ({"truncated_vocab_size": 40}, "truncated_vocab_size is 40, and token_map.* is missing"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"medusa_num_heads": "2"}, "medusa_num_heads is '2'"),
    ],
)
def test_likewise_of_medusa(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    folder = save(tmp_path, medusa_tensors(WIDTH, VOCAB, 2), {"vocab_size": VOCAB, **change})
    with pytest.raises(CaptureError, match=text):
        check_head(f"medusa:{folder}")


def test_a_mask_embedding_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, dspark_tensors(WIDTH, VOCAB, 2), dspark_config(WIDTH, VOCAB, K, (0, 2)))
    torch.save(torch.zeros(WIDTH), tmp_path / "mask_embedding.pt")
    with pytest.raises(CaptureError, match="mask_embedding.pt"):
        check_head(f"dspark:{folder}")


@pytest.mark.parametrize("text", ["{", "[]", '{"rope_theta": 1} {}', '{"a": ' + "[" * 20000, "\ufeff{", ""])
def test_a_configuration_that_is_no_object_gives_one_error(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, eagle3_tensors(WIDTH, VOCAB), {})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CaptureError, match=r"config.json"):
        check_head(f"eagle3:{folder}")


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("fc.weight", (0, 96), r"fc.weight is \(0, 96\), not a matrix"),
        ("fc.weight", (32,), "no known head"),
        ("lm_head.weight", (), "lm_head.weight is .*, not a matrix"),
        ("embed_tokens.weight", (), "embed_tokens.weight is .*, not a matrix"),
        ("d2t", (2, 2), "d2t is .*, not a list of tokens"),
        ("t2d", (), "t2d is .*, not a list of tokens"),
    ],
)
def test_tensors_of_another_rank_are_refused(tmp_path: Path, name: str, shape: tuple[int, ...], text: str) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB, draft_vocab=40)
    tensors[name] = torch.zeros(shape, dtype=torch.int64 if name in ("d2t", "t2d") else torch.float32)
    with pytest.raises(CaptureError, match=text):
        check_head(f"eagle3:{save(tmp_path, tensors, eagle3_config(WIDTH, VOCAB))}")


def test_a_gap_between_layers_or_heads_is_refused(tmp_path: Path) -> None:
    block = dspark_tensors(WIDTH, VOCAB, 2) | {"layers.9999.mlp.up_proj.weight": torch.zeros(64, 32)}
    folder = save(tmp_path / "block", block, dspark_config(WIDTH, VOCAB, K, (0, 2)))
    with pytest.raises(CaptureError, match="the tensors of layer 1 are missing"):
        check_head(f"dspark:{folder}")
    heads = medusa_tensors(WIDTH, VOCAB, 1) | {"700.0.linear.weight": torch.zeros(WIDTH, WIDTH)}
    with pytest.raises(CaptureError, match="the tensors of head 1 are missing"):
        check_head(f"medusa:{save(tmp_path / 'medusa', heads, {})}")


def test_more_draft_tokens_than_a_head_has_are_refused_by_its_files(tmp_path: Path) -> None:
    folder = save(tmp_path, medusa_tensors(WIDTH, 20, 2), {})
    check_head(f"medusa:{folder}", num_draft_tokens=2)
    with pytest.raises(CaptureError, match=r"K=3 is more than drafter medusa:.* can draft.*K <= 2"):
        check_head(f"medusa:{folder}", num_draft_tokens=3)


def test_good_heads_pass_and_are_read_once(tmp_path: Path, deep: HFTarget) -> None:
    folder = save(tmp_path, eagle3_tensors(WIDTH, VOCAB, draft_vocab=40), eagle3_config(WIDTH, VOCAB))
    checkpoint = check_head(f"eagle3:{folder}")
    (tmp_path / "model.safetensors").unlink()
    drafter = make_drafter(f"eagle3:{folder}", deep, checkpoint=checkpoint)
    assert len(drafter.session(IDS).propose(IDS, K).ids) == K
    assert check_head("lookup:3") is None


def test_a_bad_head_is_refused_before_the_target_is_loaded(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target").mkdir()  # nothing there to load
    (tmp_path / "target" / "config.json").write_text("{}")
    head = save(tmp_path / "head", eagle3_tensors(WIDTH, VOCAB), eagle3_config(WIDTH, VOCAB, rope_theta=None))
    with pytest.raises(SystemExit) as stopped:
        main([
            "capture", "-o", str(tmp_path / "t"), "--target", str(tmp_path / "target"), "--drafter", f"eagle3:{head}",
            "--task", f"jsonl:{saved / 'prompts.jsonl'}", "--limit", "1",
        ])  # fmt: skip
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and len(error.strip().splitlines()) == 1
    assert "config.json names no RoPE theta" in error and "--draft-rope-theta 10000" in error


def test_a_prompt_that_runs_past_the_positions_of_the_head_is_told(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taps = {"target_layer_ids": [-1, 0, 1]}
    for number, (positions, told) in enumerate(((40, True), (200, False))):
        config = eagle3_config(WIDTH, VOCAB, max_position_embeddings=positions, **taps)
        head = save(tmp_path / f"head{number}", eagle3_tensors(WIDTH, VOCAB), config)
        with pytest.raises(SystemExit) as stopped:
            main([
                "capture", "-o", str(tmp_path / f"t{number}"), "--target", str(saved / "model"), "--drafter",
                f"eagle3:{head}", "--task", f"jsonl:{saved / 'prompts.jsonl'}", "--limit", "3", "--K", "4",
                "--max-new-tokens", "36",
            ])  # fmt: skip
        error = capsys.readouterr().err
        assert not stopped.value.code
        assert ("3 of 3 requests may run past the 40 positions that drafter eagle3:" in error) == told


# ---- a tied embedding ------------------------------------------------------------------------------------------------


def test_a_tied_embedding_of_its_own_is_the_projection(tmp_path: Path, deep: HFTarget) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB)
    own = torch.randn((VOCAB, WIDTH), generator=torch.Generator().manual_seed(9))
    both = {**tensors, "embed_tokens.weight": own, "lm_head.weight": own.clone()}
    full = save(tmp_path / "full", both, eagle3_config(WIDTH, VOCAB))
    lean = {**tensors, "embed_tokens.weight": own}
    del lean["lm_head.weight"]
    config = eagle3_config(WIDTH, VOCAB, tie_word_embeddings=True)
    folders = full, save(tmp_path / "lean", lean, config)
    one, other = (
        make_drafter(f"eagle3:{folder}", deep, keep_logits=True).session(IDS).propose(IDS, K) for folder in folders
    )
    assert one.ids == other.ids and torch.equal(one.logits, other.logits)
    apart = save(tmp_path / "apart", {**lean, "lm_head.weight": own + 1}, config)
    with pytest.raises(CaptureError, match="embed_tokens.weight and lm_head.weight differ"):
        check_head(f"eagle3:{apart}")


# ---- windows ---------------------------------------------------------------------------------------------------------


def windowed(tmp_path: Path, deep: HFTarget, kind: str, **change: Any) -> Any:
    """Return what a head drafts behind IDS."""
    if kind == "eagle3":
        tensors, config = eagle3_tensors(WIDTH, VOCAB, seed=1), eagle3_config(WIDTH, VOCAB, **change)
    else:
        tensors, config = dspark_tensors(WIDTH, VOCAB, 2), dspark_config(WIDTH, VOCAB, K, (0, 2), **change)
    folder = save(tmp_path / str(len(list(tmp_path.iterdir()))), tensors, config)
    return make_drafter(f"{kind}:{folder}", deep, keep_logits=True).session(IDS).propose(IDS, K)


def test_a_window_changes_the_first_draft_and_one_wider_than_the_prefix_does_not(
    tmp_path: Path, deep: HFTarget
) -> None:
    full = windowed(tmp_path, deep, "eagle3")
    short = windowed(tmp_path, deep, "eagle3", sliding_window=4, layer_types=[SLIDING])
    assert short.ids[0] != full.ids[0]
    assert float((short.logits[0] - full.logits[0]).abs().max()) > 0.1
    count = len(IDS) - 1  # entries
    same = windowed(tmp_path, deep, "eagle3", sliding_window=count, layer_types=[SLIDING])
    assert same.ids == full.ids and torch.equal(same.logits, full.logits)
    less = windowed(tmp_path, deep, "eagle3", sliding_window=count - 1, layer_types=[SLIDING])
    assert not torch.equal(less.logits, full.logits)
    for off in ({"sliding_window": 4, "use_sliding_window": False}, {"sliding_window": 4, "layer_types": [FULL]}):
        assert torch.equal(windowed(tmp_path, deep, "eagle3", **off).logits, full.logits)


def test_so_do_those_of_blocks(tmp_path: Path, deep: HFTarget) -> None:
    full = windowed(tmp_path, deep, "dspark")
    both_ways = {"causal": False, "mask_token_id": 3, "target_layer_ids": [0, 2]}
    for size in (4, len(IDS) + K):
        found = windowed(
            tmp_path, deep, "dspark", sliding_window=size, layer_types=[SLIDING], dflash_config=both_ways,
            sample_from_anchor=True,
        )  # fmt: skip
        assert torch.equal(found.logits, full.logits) == (size > 4)
    backwards = windowed(tmp_path, deep, "dspark", sliding_window=len(IDS) + K, layer_types=[SLIDING])
    assert not torch.equal(backwards.logits[0], full.logits[0])  # slot 0 sees no mask token behind it
    assert torch.equal(
        windowed(tmp_path, deep, "dspark", sliding_window=4, dflash_config={**both_ways, "use_swa": True},
                 sample_from_anchor=True).logits,
        windowed(tmp_path, deep, "dspark", layer_types=[SLIDING], sliding_window=4, dflash_config=both_ways,
                 sample_from_anchor=True).logits,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, [None, None]),
        ({"sliding_window": 8}, [8, 8]),  # as Mistral's
        ({"sliding_window": 8, "use_sliding_window": False}, [None, None]),  # as Qwen2's
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8]),
        ({"sliding_window": 8, "layer_types": [SLIDING, FULL], "use_sliding_window": True}, [8, None]),
        ({"sliding_window": 8, "layer_types": [FULL] * 36}, [None, None]),
        ({"sliding_window": 8, "dflash_config": {"swa_window_size": 6, "use_swa": True}}, [6, 6]),
    ],
)
def test_which_layers_have_windows(config: dict[str, Any], sizes: list[int | None]) -> None:
    assert [window.size for window in windows_of(Checkpoint("x", config, {}), 2)] == sizes


def test_what_a_window_lets_through() -> None:
    layers = {"layer_types": [SLIDING, FULL], "sliding_window": 8}

    def read(**config: Any) -> tuple[Window, ...]:
        return windows_of(Checkpoint("x", config, {}), 2)

    assert read(**layers) == (Window(8, True), Window())
    assert read(**layers, dflash_config={"causal": False}) == (Window(8), Window())
    assert read(**layers, is_causal=True) == (Window(8, True), Window(None, True))
    assert read(sliding_window=8, dflash_config={"use_swa": True}) == (Window(8), Window(8))  # as MiMo's
    told = {"speculators_model_type": "dspark", "transformer_layer_config": layers}
    assert read(**told) == (Window(8, True, True), Window())
    assert read(**told, sliding_window_non_causal=True) == (Window(8, False, True), Window())


# ---- rotary positions ------------------------------------------------------------------------------------------------


def test_mrope_is_plain_for_text() -> None:
    plain = {"rope_type": "default", "rope_theta": 5.0}
    for scaling in (
        {"type": "mrope", "mrope_section": [16, 24, 24]},
        {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    ):
        assert rope_of(Checkpoint("x", {"rope_theta": 5.0, "rope_scaling": scaling}, {})) == plain


def test_each_kind_of_layers_may_have_its_own() -> None:
    config = {
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        }
    }  # fmt: skip
    assert rope_of(Checkpoint("x", config, {}))["rope_theta"] == 1e6
    assert rope_of(Checkpoint("x", config, {}), layer_type=SLIDING)["rope_theta"] == 1e4
    assert rope_of(Checkpoint("x", config, {}), 7.0, SLIDING)["rope_theta"] == 7.0
    told = {"speculators_model_type": "eagle3", "transformer_layer_config": config}
    assert rope_of(Checkpoint("x", told, {}))["rope_theta"] == 1e4  # its classes have one rotary embedding
    del config["rope_parameters"][FULL]
    with pytest.raises(CaptureError, match="rope_parameters: full_attention is missing"):
        rope_of(Checkpoint("x", config, {}))


def turned(scaling: dict[str, Any]) -> list[float]:
    """Return what position 40 makes of eight ones, a rotary embedding of 8 numbers."""
    rope = rope_of(Checkpoint("x", {"rope_theta": 500.0, "rope_scaling": scaling}, {}))
    result = Rotary(rope, 8)(torch.ones(1, 1, 1, 8), torch.tensor([[40]]))
    return [round(float(x), 5) for x in result.flatten()]


YARN_AT_40 = {
    "yarn": [-1.6078, 1.57458, 0.53425, 1.02602, 0.08901, -0.33714, 1.51906, 1.24107],
    "deepseek": [-1.41205, 1.38287, 0.4692, 0.9011, 0.07818, -0.29609, 1.33411, 1.08996],
    "mscale alone": [-1.55045, 1.51841, 0.51519, 0.98942, 0.08584, -0.32511, 1.46487, 1.19679],
}
"""From the formula (Peng et al., arXiv 2309.00071, and DeepSeek's public code) in float64, factor 4, 64 positions."""


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"type": "yarn"}, "yarn"),
        ({"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "truncate": True}, "yarn"),
        ({"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}, "deepseek"),
        ({"type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 1.0}, "deepseek"),
        ({"type": "deepseek_yarn"}, "yarn"),
        ({"type": "deepseek_yarn", "mscale": 0.707}, "mscale alone"),
    ],
)
def test_yarn_and_deepseeks(scaling: dict[str, Any], name: str) -> None:
    found = turned({"factor": 4.0, "original_max_position_embeddings": 64, **scaling})
    assert found == pytest.approx(YARN_AT_40[name], abs=3e-5)


def test_yarn_without_its_length_takes_the_heads(tmp_path: Path) -> None:
    config = {"rope_theta": 500.0, "max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert rope_of(Checkpoint("x", config, {}))["original_max_position_embeddings"] == 64
    del config["max_position_embeddings"]
    with pytest.raises(CaptureError, match="max_position_embeddings is missing"):
        rope_of(Checkpoint("x", config, {}))
