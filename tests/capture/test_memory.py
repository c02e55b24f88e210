"""Memory computed before loading, against models that are loaded; refusals; layers parted over devices."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from asdsim.capture import memory
from asdsim.capture.memory import GIB, Load, Shape, Unit, parted, plan_memory, pretended_devices, shape_of
from asdsim.cli import main
from asdsim.engines.transformers.forward import LanguageModel
from asdsim.engines.transformers.kvpool import GROWTH, _put
from asdsim.errors import CaptureError, UsageError
from tests.capture.conftest import tiny_llama

torch = pytest.importorskip("torch")

LOAD = Load(K=3, positions=40)


def held(model: Any) -> int:
    """Return the bytes of a model's parameters and buffers, and of what bitsandbytes keeps beside them."""
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    tensors |= {name: t for name, t in model.state_dict().items() if name.endswith(("absmax", "quant_map", "SCB"))}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, "4bit", "8bit"])
def test_weights_are_those_of_the_loaded_model(saved: Path, dtype: str, quantize: str | None) -> None:
    from asdsim.engines.transformers.load import load_model

    if quantize:
        pytest.importorskip("bitsandbytes")
    shape = shape_of(str(saved / "model"), dtype=dtype, quantize=quantize)
    loaded = load_model(str(saved / "model"), dtype=dtype, device="cpu", quantize=quantize)
    assert shape.weights == held(loaded.model)
    assert loaded.identity.get("quantization") == memory.QUANTIZED.get(quantize or "")


def test_tied_weights_count_once(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    tied = type(model)(model.config)
    tied.save_pretrained(tmp_path)
    assert shape_of(str(tmp_path), dtype="float32").weights == held(tied)


def test_keys_and_values_are_those_that_a_model_caches(saved: Path, tmp_path: Path) -> None:
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    latent = DeepseekV3Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(latent).save_pretrained(tmp_path)
    for name in (saved / "model", tmp_path):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            LanguageModel(model).run(torch.arange(5)[None], cache, 1)
        bytes_of = [sum(t.numel() * t.element_size() for t in (layer.keys, layer.values)) for layer in cache.layers]
        shape = shape_of(str(name), dtype="float32")
        assert [5 * unit.kv for unit in shape.units if unit.kv] == bytes_of
        assert not shape.notes


def test_a_stored_quantisation_is_counted_by_its_files(saved: Path, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert shape_of(str(tmp_path), dtype="bfloat16").weights == pytest.approx(stored, rel=1e-3)


def test_each_process_of_a_parallel_model_holds_its_share(saved: Path) -> None:
    whole, half = (shape_of(str(saved / "model"), dtype="float32", tp=tp) for tp in (None, 2))
    assert half.kv == whole.kv // 2
    layers = [(a.weights, b.weights) for a, b in zip(whole.units, half.units, strict=True) if a.kv]
    norms = 2 * 32 * 4
    assert layers and all(half == (full - norms) // 2 + norms for full, half in layers)


def brute(costs: list[float], parts: int) -> float:
    """Return the smallest possible fullest part, over all ways to cut a sequence."""
    best = float("inf")
    for count in range(min(parts, len(costs))):
        for cuts in itertools.combinations(range(1, len(costs)), count):
            ends = [0, *cuts, len(costs)]
            best = min(best, max(sum(costs[a:b]) for a, b in itertools.pairwise(ends)))
    return best


def test_layers_are_parted_as_evenly_as_can_be() -> None:
    rng = random.Random(4)
    for _ in range(60):
        units = tuple(Unit(f"m.{n}", rng.randrange(1, 50), rng.randrange(3)) for n in range(rng.randint(2, 8)))
        shape = Shape(units, per_token=1, states=1, row=1, keeps=True, tied=False)
        devices = [f"cuda:{n}" for n in range(rng.randint(1, 4))]
        groups = parted(shape, devices, 10.0)
        assert list(itertools.chain(*groups.values())) == list(units)
        assert set(groups) <= set(devices)
        costs = [unit.weights + 10.0 * unit.kv for unit in units]
        fullest = max(sum(unit.weights + 10.0 * unit.kv for unit in group) for group in groups.values())
        assert fullest == pytest.approx(brute(costs, len(devices)), rel=1e-6)


def test_more_to_hold_takes_more(saved: Path) -> None:
    def total(load: Load, spec: str = "layer-skip:1", **more: Any) -> int:
        found = plan_memory(str(saved / "model"), spec, load, dtype="float32", devices={"cpu": 1 << 60}, **more)
        return found.parts[0].total

    base = total(LOAD)
    assert total(Load(3, 80)) > base < total(Load(3, 40, batch=4)) < total(Load(3, 40, batch=4, kv_bytes=GIB))
    assert total(Load(3, 40, batch=4, kv_bytes=GIB)) > 2 * GIB  # a pool for each model
    assert total(LOAD, "lookup") < base < total(LOAD, f"model:{saved / 'model'}")
    assert total(Load(3, 40, sessions=64)) > base
    placed = plan_memory(
        str(saved / "model"), "lookup", LOAD, dtype="float32", device_map="auto",
        devices={f"cuda:{n}": 1 << 40 for n in range(3)},
    )  # fmt: skip
    assert set(placed.places.values()) == {0, 1, 2} and placed.fits
    assert sum(part.weights for part in placed.parts) == placed.target_weights


def test_what_does_not_fit_is_refused_with_what_would(saved: Path) -> None:
    name = str(saved / "model")
    big = plan_memory(name, "lookup", LOAD, dtype="float32", devices={"cpu": 1 << 60}).parts[0]
    room = {"cpu": big.total - big.weights // 3}
    found = plan_memory(name, "lookup", LOAD, dtype="float32", devices=room)
    assert not found.fits and "would fit: --dtype bfloat16" in found.hints
    with pytest.raises(CaptureError, match=r"needs .* on cpu .*weights.*KV.*are free.*would fit: --dtype bfloat16"):
        found.refuse(name)
    pooled = plan_memory(
        name, "lookup", Load(3, 40, batch=4, kv_bytes=16 * GIB), dtype="float32", devices={"cpu": 10 * GIB}
    )
    assert "would fit: --kv-gb 8" in pooled.hints
    gpus = {"cuda:0": GIB + big.total // 2, "cuda:1": GIB + big.total}
    assert any("--device-map auto" in hint for hint in
               plan_memory(name, "lookup", LOAD, dtype="float32", device="cuda:0", devices=gpus).hints)  # fmt: skip
    tiny = plan_memory(name, "lookup", LOAD, dtype="bfloat16", devices={"cpu": 9})
    assert "nothing that was tried fits" in tiny.hints[0]


def test_a_pool_doubles_up_to_its_bound() -> None:
    pool: list[torch.Tensor] = []
    most, filled = GROWTH + 900, 0
    for count, room in ((GROWTH, GROWTH), (100, most), (700, most), (500, GROWTH + 1300)):
        _put(pool, 0, filled, torch.full((count, 2), float(count)), most)
        filled += count
        assert len(pool[0]) == room
    assert pool[0].sum() == 2 * sum(count * count for count in (GROWTH, 100, 700, 500))


def test_devices_may_be_pretended() -> None:
    assert pretended_devices("plan:2x80") == {"cuda:0": 80 * GIB, "cuda:1": 80 * GIB}
    assert pretended_devices("check") is pretended_devices("plan") is None
    for wrong in ("plan:", "plan:0x80", "plan:8", "later"):
        with pytest.raises(UsageError, match="--fit"):
            pretended_devices(wrong)


def test_a_capture_plans_and_refuses_before_any_weight_is_read(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("asdsim.engines.transformers.load.load_model", read)
    usual = [
        "capture", "-o", str(tmp_path / "t"), "--target", str(saved / "model"), "--drafter", "layer-skip:1",
        "--task", f"jsonl:{saved / 'prompts.jsonl'}", "--max-new-tokens", "20", "--offline",
    ]  # fmt: skip

    def run(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([*usual, *more])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    status, out, _ = run("--fit", "plan:2x4", "--device-map", "auto", "--json")
    plan = json.loads(out)["memory"]
    assert status == 0 and [part["device"] for part in plan["devices"]] == ["cuda:0", "cuda:1"] and plan["fits"]
    status, out, _ = run("--fit", "plan")
    assert status == 0 and "| cpu" in out and "computed, not measured" in out
    monkeypatch.setattr(memory, "free_memory", lambda: {"cpu": 1000})
    status, out, err = run()
    assert status == 2 and "are free" in err and out == ""
    assert run("--fit", "plan")[0] == 1
    assert not (tmp_path / "t").exists()
