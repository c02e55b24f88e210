"""EAGLE-3 heads against a plain forward of the same weights, in every layout, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asdsim.capture.drafters import make_drafter
from asdsim.capture.drafters.configuration import rope_of, taps_of
from asdsim.capture.drafters.formats import Checkpoint
from asdsim.engines.transformers.model import HFTarget
from asdsim.errors import CaptureError
from tests.support.heads import HEADS, eagle3_config, eagle3_plain, eagle3_tensors, rms, save

from .conftest import VOCAB, tiny_llama

WIDTH, LAYERS, K = 32, 6, 5
TAPS = (2, 3, 3)  # 2, L // 2, L - 3


@pytest.fixture(scope="module")
def deep() -> HFTarget:
    return HFTarget(tiny_llama(layers=LAYERS), "deep")


@torch.inference_mode()
def true_states(target: HFTarget, ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    hidden = target.model(input_ids=torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[tap][0] for tap in taps], -1)


def prefixes(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 30))] for _ in range(count)]


def check(
    target: HFTarget, folder: str, tensors: dict[str, torch.Tensor], taps: tuple[int, ...], overrides: Any = None,
    **plain: Any,
) -> None:  # fmt: skip
    drafter = make_drafter(f"eagle3:{folder}", target, keep_logits=True, overrides=overrides)
    assert drafter.head.taps == taps
    embedding = target.model.get_input_embeddings().weight.detach()
    token_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"] if "d2t" in tensors else slice(None)
    for ids in prefixes(12):
        expected, rows = eagle3_plain(tensors, embedding, ids, true_states(target, ids, taps), K, **plain)
        found = drafter.session(ids).propose(ids, K)
        assert found.ids == expected
        torch.testing.assert_close(found.logits[:, token_ids], rows, rtol=0, atol=1e-5)
        assert int(torch.isfinite(found.logits).sum()) == rows.numel()


@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_the_layout_of_safeailab(deep: HFTarget, tmp_path: Path, draft_vocab: int | None) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB, draft_vocab=draft_vocab)
    folder = save(tmp_path, tensors, eagle3_config(WIDTH, VOCAB), "pytorch_model.bin")
    (tmp_path / "training_args.bin").write_bytes(b"not read")
    check(deep, folder, tensors, TAPS)


@pytest.mark.parametrize("before_residual", [False, True])
def test_the_layout_of_speculators(deep: HFTarget, tmp_path: Path, before_residual: bool) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB, draft_vocab=50, seed=1)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    config = {
        "speculators_model_type": "eagle3", "transformer_layer_config": eagle3_config(WIDTH, VOCAB),
        "norm_before_residual": before_residual, "draft_vocab_size": 50,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 5],
    }  # fmt: skip
    check(deep, save(tmp_path, renamed, config), tensors, (1, 4, 5), before_residual=before_residual)


def test_the_layout_of_deepspec(deep: HFTarget, tmp_path: Path) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB, taps=5, seed=2, norms=True)
    config = eagle3_config(WIDTH, VOCAB, architectures=["Qwen3Eagle3Model"], target_layer_ids=[-1, 1, 2, 3, 5])
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    check(deep, save(tmp_path, tensors, config), tensors, (0, 2, 3, 4, 6))


def test_another_theta_and_the_output_norm_that_every_head_has(deep: HFTarget, tmp_path: Path) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB, seed=3)
    folder = save(tmp_path, tensors, eagle3_config(WIDTH, VOCAB, norm_output=True))  # SpecForge's meaning
    overrides = {"rope_theta": 10000.0, "layer_ids": (0, 1, 6)}
    check(deep, folder, tensors, (0, 1, 6), overrides, theta=10000.0)


def test_an_own_embedding_is_used(deep: HFTarget, tmp_path: Path) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB, seed=4)
    own = torch.randn((VOCAB, WIDTH), generator=torch.Generator().manual_seed(9))
    folder = save(tmp_path, {**tensors, "embed_tokens.weight": own}, eagle3_config(WIDTH, VOCAB))
    drafter = make_drafter(f"eagle3:{folder}", deep, keep_logits=True)
    ids = prefixes(1)[0]
    expected, rows = eagle3_plain(tensors, own, ids, true_states(deep, ids, TAPS), K)
    found = drafter.session(ids).propose(ids, K)
    assert found.ids == expected
    torch.testing.assert_close(found.logits, rows, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_eagle_1_is_its_variant(deep: HFTarget, tmp_path: Path) -> None:
    """One entry is enough to tell: no input norms, the fc over both, and the target's own projection."""
    full = eagle3_tensors(WIDTH, VOCAB, taps=2, seed=5)
    tensors = {}
    for name, tensor in full.items():
        if not name.startswith(("midlayer.hidden_norm", "midlayer.input_layernorm", "norm", "lm_head")):
            narrow = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            tensors[name.replace("midlayer.", "layers.0.")] = tensor[:, :WIDTH] if narrow else tensor
    tensors["fc.bias"] = torch.full((WIDTH,), 0.1)
    folder = save(tmp_path, tensors, eagle3_config(WIDTH, VOCAB, architectures=["LlamaForCausalLMEagle"]))
    drafter = make_drafter(f"eagle3:{folder}", deep, keep_logits=True)
    assert drafter.head.taps == (LAYERS,)
    ids = [5, 9]
    found = drafter.session(ids).propose(ids, 1)
    state, model = true_states(deep, ids, (LAYERS,)), deep.model
    w = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    entry = torch.cat([model.get_input_embeddings().weight[[9]], state], -1) @ w["fc.weight"].T + w["fc.bias"]
    value = (entry @ w["self_attn.v_proj.weight"].T).view(1, -1, WIDTH // HEADS).repeat_interleave(2, dim=1)
    x = entry + value.flatten(1) @ w["self_attn.o_proj.weight"].T  # one entry attends to itself alone
    h = rms(x, w["post_attention_layernorm.weight"])
    gate, up, down = (w[f"mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    x = x + (torch.nn.functional.silu(h @ gate) * (h @ up)) @ down
    torch.testing.assert_close(found.logits, model.get_output_embeddings()(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 64}, "hidden size 64, the target has 32"),
        ({"vocab_size": 100}, "vocabulary 100, the target has 96"),
        ({"rope_theta": None}, "--draft-rope-theta"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "--draft-rope-theta"),
        ({"target_layer_ids": [1, 2]}, "fc takes 3 hidden states, target_layer_ids names 2"),
        (
            {"target_layer_ids": [1, 2, 9]},
            r"reads hidden states \[2, 3, 10\], the target has 0 to 6.*--draft-layer-ids",
        ),
        ({"target_layer_ids": [1, 2, 3], "aux_hidden_state_layer_ids": [1, 2, 3]}, "disagrees.*--draft-layer-ids"),
        ({"aux_hidden_state_layer_ids": [1, 2, 6]}, "before the target's final norm.*--draft-layer-ids"),
        ({"num_attention_heads": None}, "attention heads"),
    ],
)
def test_what_the_configuration_leaves_open_is_asked_for(
    deep: HFTarget, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    width = change.get("hidden_size", WIDTH)
    tensors = eagle3_tensors(width, change.get("vocab_size", VOCAB))
    folder = save(tmp_path, tensors, eagle3_config(width, VOCAB, **change))
    with pytest.raises(CaptureError, match=text):
        make_drafter(f"eagle3:{folder}", deep)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("missing", "tensor norm.weight is missing"),
        ("extra", "tensor more.weight has no place"),
        ("shape", r"tensor layer.mlp.down_proj.weight is \(32, 63\)"),
        ("no map", "lm_head has 40 rows, the target 96 tokens, and d2t is missing"),
        ("other map", "d2t and t2d name different"),
        ("beyond", "names token 96, the target has 96"),
        ("second layer", r"tensor layers.1.mlp.up_proj.weight has no place"),
    ],
)
def test_damaged_checkpoints_are_refused(deep: HFTarget, tmp_path: Path, fault: str, text: str) -> None:
    tensors = eagle3_tensors(WIDTH, VOCAB, draft_vocab=40)
    if fault == "missing":
        del tensors["norm.weight"]
    elif fault == "extra":
        tensors["more.weight"] = torch.zeros(2)
    elif fault == "shape":
        tensors["midlayer.mlp.down_proj.weight"] = torch.zeros(WIDTH, 63)
    elif fault == "no map":
        del tensors["d2t"], tensors["t2d"]
    elif fault == "other map":
        tensors["d2t"][3:] += 1
    elif fault == "beyond":
        tensors["d2t"][-1] = VOCAB - 39
        del tensors["t2d"]
    else:
        tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(2)
    with pytest.raises(CaptureError, match=text):
        make_drafter(f"eagle3:{save(tmp_path, tensors, eagle3_config(WIDTH, VOCAB))}", deep)


def test_a_wrong_hidden_size_of_the_target_names_both(tmp_path: Path, deep: HFTarget) -> None:
    folder = save(tmp_path, eagle3_tensors(WIDTH, VOCAB), eagle3_config(WIDTH, VOCAB, target_hidden_size=48))
    with pytest.raises(CaptureError, match="hidden size 48, the target has 32"):
        make_drafter(f"eagle3:{folder}", deep)


def test_layer_ids_mean_what_their_key_says() -> None:
    def read(config: dict[str, Any], count: int = 3, **more: Any) -> tuple[int, ...]:
        return taps_of(Checkpoint("x", config, {}), count, 30, **more)

    default = (2, 15, 27)
    assert read({}, default=default) == default
    assert read({"target_layer_ids": [-1, 3, 29]}) == (0, 4, 30)
    assert read({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}) == (2, 4, 6)
    assert read({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}}) == (3, 5, 7)  # SpecForge, SGLang
    assert read({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, default=default) == default
    assert read({"target_layer_ids": [1, 2, 3]}, given=(7, 8, 9)) == (7, 8, 9)
    agreed = {"target_layer_ids": [1, 2, 3], "aux_hidden_state_layer_ids": [2, 3, 4]}
    assert read(agreed) == (2, 3, 4)
    with pytest.raises(CaptureError, match="does not say which 5 layers"):
        read({}, 5, default=default)


def test_rope_theta_lies_where_either_version_of_transformers_puts_it() -> None:
    def read(config: dict[str, Any], given: float | None = None) -> dict[str, Any]:
        return rope_of(Checkpoint("x", config, {}), given)

    assert read({"rope_theta": 5.0}) == {"rope_type": "default", "rope_theta": 5.0}
    assert read({"rope_parameters": {"rope_theta": 6.0}})["rope_theta"] == 6.0
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 64
    llama3 = read({"rope_theta": 7.0, "rope_scaling": scaling}, 9.0)
    assert (llama3["rope_type"], llama3["factor"], llama3["rope_theta"]) == ("llama3", 8.0, 9.0)
