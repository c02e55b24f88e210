"""``--device-map``, ``--tp`` and ``--quantize`` from end to end, and what the manifest makes of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asdsim.capture.drafters import make_drafter
from asdsim.capture.loop import decode
from asdsim.cli import main
from asdsim.engines.transformers.load import QUANTIZED, check_placing
from asdsim.engines.transformers.model import HFTarget
from asdsim.errors import UsageError
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT
from asdsim.trace import read_trace
from tests.capture.conftest import EOS, VOCAB, generate, word_tokenizer
from tests.support.devices import split_map

torch = pytest.importorskip("torch")

Capsys = pytest.CaptureFixture[str]
GRID = ("--B", "0,4", "--g", "1", "--M", "2")


def usual(saved: Path, out: Path, *more: str) -> list[str]:
    return [
        "capture", "-o", str(out), "--target", str(saved / "model"), "--drafter", "layer-skip:1", "--offline",
        "--task", f"jsonl:{saved / 'prompts.jsonl'}", "--limit", "3", "--max-new-tokens", "10", "--K", "3", *more,
    ]  # fmt: skip


def run(capsys: Capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([*args])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def test_a_device_map_is_recorded_and_used_again(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps(split_map(3)))
    assert run(capsys, *usual(saved, tmp_path / "parted", "--device-map", str(file)))[0] == 0
    assert run(capsys, *usual(saved, tmp_path / "whole"))[0] == 0
    placement = read_trace(tmp_path / "parted").manifest.notes["placement"]
    assert placement["device_map"] == str(file)
    assert placement["places"]["disk"] == ["model.layers.1", "lm_head"]
    assert "placement" not in read_trace(tmp_path / "whole").manifest.notes
    assert read_trace(tmp_path / "parted").manifest.target == read_trace(tmp_path / "whole").manifest.target
    file.unlink()  # the manifest knows
    for trace in ("parted", "whole"):
        assert run(capsys, "cover", str(tmp_path / trace), *GRID, "--offline")[0] == 0
    status, out, _ = run(capsys, "verify", str(tmp_path / "parted"), "--offline", "--device-map", "auto")
    assert status == 0 and "6 of 6 pairs identical" in out
    tokens = [
        [step.draft_ids.tolist() for step in trace.steps_of(name)]
        for trace in map(read_trace, (tmp_path / "parted", tmp_path / "whole")) for name in trace.request_ids()
    ]  # fmt: skip
    assert tokens[: len(tokens) // 2] == tokens[len(tokens) // 2 :]


def test_a_quantised_target_is_loaded_so_again_and_not_otherwise(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import LlamaConfig, LlamaForCausalLM

    trace, model = str(tmp_path / "t"), tmp_path / "model"
    config = LlamaConfig(  # bitsandbytes takes rows of 64 weights on the CPU
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=EOS, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(model)
    word_tokenizer().save_pretrained(model)
    more = ("--target", str(model), "--quantize", "4bit", "--dtype", "float32")
    assert run(capsys, *usual(saved, tmp_path / "t", *more))[0] == 0
    manifest = read_trace(trace).manifest
    assert manifest.target["quantization"] == QUANTIZED["4bit"]
    status, _, err = run(capsys, "cover", trace, *GRID, "--offline", "--quantize", "8bit")
    assert status == 2 and "was captured with" in err and "leave --quantize out" in err
    assert run(capsys, "cover", trace, *GRID, "--offline")[0] == 0
    status, out, _ = run(capsys, "verify", trace, "--offline")
    assert status == 0 and "6 of 6 pairs identical" in out


def test_what_cannot_be_combined_is_refused_before_loading(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    for wrong, text in (
        ({"tp": 1}, "--tp 1"), ({"tp": 2, "device_map": "auto"}, "--tp and --device-map"),
        ({"tp": 2, "quantize": "4bit"}, "--tp and --quantize"), ({"quantize": "3bit"}, "3bit"),
        ({"device": "cpu", "device_map": "auto"}, "--device cpu and --device-map"),
        ({"device_map": "nowhere.json"}, "neither auto nor a file"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=text):
            check_placing(**wrong)  # type: ignore[arg-type]
    status, out, err = run(capsys, *usual(saved, tmp_path / "t", "--tp", "2"))
    assert (status, out) == (2, "") and "torchrun --nproc-per-node 2" in err
    assert not (tmp_path / "t").exists()


def test_a_cache_that_cannot_be_cropped_is_copied() -> None:
    pytest.importorskip("transformers.models.deepseek_v4")
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=VOCAB, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
        head_dim=16, q_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=8,
        index_n_heads=2, index_head_dim=8, index_topk=4, sliding_window=8, max_position_embeddings=256,
        eos_token_id=EOS, initializer_range=0.15,
    )  # fmt: skip
    model = DeepseekV4ForCausalLM(config).eval()
    target = HFTarget(model, "v4")
    assert not target.lm.plain
    rng = random.Random(2)
    ids = [rng.randrange(VOCAB) for _ in range(60)]
    session = target.session(())
    prefixes = [ids[: rng.randint(1, 50)] for _ in range(10)]
    drafts = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))] for _ in prefixes]
    for prefix, draft, rows in zip(prefixes, drafts, target.score_many(prefixes, drafts), strict=True):
        fresh = target.session(()).score(prefix, draft)
        for found in (session.score(prefix, draft), session.fork().score(prefix, draft), rows):
            torch.testing.assert_close(found, fresh, rtol=1e-4, atol=1e-4)
    prompt = ids[:12]
    request = RequestRecord("r", "t", tuple(prompt), "", None, 16, (EOS,), "natural")
    for spec in ("layer-skip:1", "lookup:2"):
        drafter = make_drafter(spec, target)
        assert decode(target, drafter, request, STRICT, 4).tokens == generate(model, tuple(prompt), 16)


@pytest.mark.slow
def test_two_processes_give_the_trace_of_one(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    environment = {**os.environ, "ASDSIM_THREADS": "1", "OMP_NUM_THREADS": "1"}

    def both(*args: str) -> Any:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*command, "-m", "asdsim", *args], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # of one process only

    assert both(*usual(saved, tmp_path / "two", "--tp", "2", "--json"))["rows"][0]["requests"] == 3
    assert run(capsys, *usual(saved, tmp_path / "one"))[0] == 0
    two, one = (read_trace(tmp_path / name) for name in ("two", "one"))
    assert two.manifest.notes["placement"] == {"tp": 2}
    assert two.manifest.target == one.manifest.target, "the checksum is that of the whole weights"
    for name in one.request_ids():
        pairs = zip(one.steps_of(name), two.steps_of(name), strict=True)
        assert all((a.draft_ids.tolist(), a.argmax_ids.tolist()) == (b.draft_ids.tolist(), b.argmax_ids.tolist())
                   for a, b in pairs)  # fmt: skip
    assert both("cover", str(tmp_path / "two"), *GRID, "--offline", "--json")["rows"][0]["exact_share"] == 1
    status, _, err = run(capsys, "verify", str(tmp_path / "two"), "--offline")
    assert status == 2 and "--tp 2 needs 2 processes" in err
    status, out, _ = run(capsys, "verify", str(tmp_path / "two"), "--offline", "--device-map", "auto")
    assert status == 0 and "6 of 6 pairs identical" in out
