"""The plug-ins as an engine finds them: light, inert until asked for, and clear about what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asdsim.errors import EngineError
from asdsim.rules.settings import Policy

pytest.importorskip("torch")
from asdsim.engines import vllm as plugin
from asdsim.engines.config import check_model, engine_config, request_policy

ROOT = Path(__file__).resolve().parents[2]


MODULES = ["vllm", "vllm.v1", "vllm.v2", "sglang", "record"]


@pytest.mark.parametrize("module", [*(f"asdsim.engines.{name}" for name in MODULES), "asdsim.live.serving"])
def test_a_plug_in_needs_no_compiler_data_frame_or_storage(module: str) -> None:
    missing = ("numba", "polars", "pyarrow", "scipy", "matplotlib", "rapidfuzz", "tqdm")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_entry_points_lead_to_functions() -> None:
    from importlib import import_module

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        module, _, function = groups[group]["asdsim"].partition(":")
        assert callable(getattr(import_module(module), function))


def engine(asked: Any = None, **speculative: Any) -> Any:
    chosen = {"rejection_sample_method": "standard", "speculative_token_tree": None, **speculative}
    return SimpleNamespace(
        additional_config={} if asked is None else {"asd": asked}, speculative_config=SimpleNamespace(**chosen),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )  # fmt: skip


def params(temperature: float = 0.0, **extra: Any) -> Any:
    return SimpleNamespace(extra_args=extra or None, temperature=temperature)


def test_an_engine_that_is_not_asked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASDSIM_POLICY", raising=False)
    monkeypatch.delenv("ASDSIM_TRACE", raising=False)
    assert plugin.asked_of(engine()) is None
    assert plugin.request_setting(engine(), params(0.7), "request") is None
    with pytest.raises(EngineError, match="the engine was started without it"):
        plugin.request_setting(engine(), params(asd_B=8), "request")


def test_a_request_has_the_engines_setting_and_its_own_numbers() -> None:
    asked = engine({"B": 8, "g": 0.25, "M": 2, "semantics": "core"})
    assert plugin.request_setting(asked, params(), "r") == Policy(8, 0.25, 2, "core")
    assert plugin.request_setting(asked, params(asd_B=4, asd_M="inf"), "r") == Policy(4, 0.25, float("inf"), "core")
    assert plugin.request_setting(asked, params(0.7, asd_B=0), "r") == Policy(0, 0.25, 2, "core")
    for extra, error in (
        ({"asd_B": "8"}, "asd_B is '8', not a number"),
        ({"asd_B": True}, "asd_B is True, not a number"),
        ({"asd_g": -1}, "g=-1 is negative"),
        ({"asd_M": 1.5}, "M=1.5 is not a whole number"),
        ({"asd_budget": 8}, "unknown key 'asd_budget'"),
    ):
        with pytest.raises(EngineError, match=error):
            plugin.request_setting(asked, params(**extra), "request r")
    with pytest.raises(EngineError, match="temperature 0.7: ASD verifies greedy decoding only"):
        plugin.request_setting(asked, params(0.7), "r")


def test_what_the_lift_does_not_reach_is_refused_at_start() -> None:
    config = engine_config({"B": 8, "g": 0.25, "M": 2}, {}, "here")
    assert config is not None
    plugin.check_engine(engine(), config)
    plugin.check_engine(engine(speculative_token_tree="[(0,), (0, 0)]"), config)  # a chain
    for asked, error in (
        (engine(rejection_sample_method="synthetic"), "synthetic decides by itself"),
        (engine(speculative_token_tree="[(0,), (1,)]"), "drafts are a tree"),
        (SimpleNamespace(speculative_config=None), "no drafter"),
    ):
        with pytest.raises(EngineError, match=error):
            plugin.check_engine(asked, config)
    with pytest.raises(EngineError, match="vLLM 9.9 is not among the tested versions"):
        plugin.check_version("9.9")
    with pytest.raises(EngineError, match="model runner object is not known"):
        plugin.adapt(object(), engine(), config, None)


def policy_file(tmp_path: Path, **changed: Any) -> str:
    record = {
        "schema_version": 1, "kind": "asdsim policy", "rule": "asd", "B": 8.0, "g": 0.25, "M": 2.0,
        "semantics": "paper", "target": {"name": "toy", "vocab_size": 96, "dtype": "float32"},
        "drafter": {"name": "toy"}, "num_draft_tokens": 7, **changed,
    }  # fmt: skip
    (tmp_path / "policy.json").write_text(json.dumps(record))
    return str(tmp_path / "policy.json")


def test_a_policy_belongs_to_one_vocabulary_and_draft_length(tmp_path: Path) -> None:
    config = engine_config(None, {"ASDSIM_POLICY": policy_file(tmp_path)}, "here")
    assert config is not None and config.policy == Policy(8, 0.25, 2)
    assert check_model(config, vocab_size=96, num_draft_tokens=7, dtype="float32") == []
    assert "float32 weights, this engine runs bfloat16" in check_model(
        config, vocab_size=96, num_draft_tokens=7, dtype="bfloat16"
    )[0]  # fmt: skip
    with pytest.raises(EngineError, match="vocabulary of 96, this model has 128"):
        check_model(config, vocab_size=128, num_draft_tokens=7)
    with pytest.raises(EngineError, match="frozen at 7 draft tokens per step, this engine drafts 5"):
        check_model(config, vocab_size=96, num_draft_tokens=5)


def test_configuration_by_its_errors(tmp_path: Path) -> None:
    for asked, error in (
        ({"b": 8}, "unknown key 'b'"),
        ({"B": 8}, "no g"),
        ({"B": "8", "g": 1, "M": 1}, "B is '8', not a number"),
        ({"B": 8, "g": 1, "M": 1, "policy": "x"}, "both a policy file and numbers"),
        ({"policy": str(tmp_path / "none.json")}, "none.json"),
        ({"B": 8, "g": 1, "M": 1, "semantics": "papr"}, "papr"),
        ("B=8", "not a JSON object"),
    ):
        with pytest.raises(EngineError, match=error):
            engine_config(asked, {}, "here")
    with pytest.raises(EngineError, match="rule fuzzy reads more than the target's logits"):
        file = policy_file(tmp_path, rule="fuzzy", parameters={"T": 0.4})
        engine_config({"policy": file}, {}, "here")
    only_trace = engine_config(None, {"ASDSIM_TRACE": "/t"}, "here")
    assert only_trace is not None and only_trace.policy.budget == 0.0 and only_trace.trace == "/t"
    assert engine_config(None, {}, "here") is None
    assert request_policy(None, Policy(1, 2, 3), "r") == Policy(1, 2, 3)


def test_hooks_are_put_in_place_once() -> None:
    class Owner:
        def method(self) -> str:
            return "plain"

    for _ in range(2):
        plugin._wrap(Owner, "method", lambda plain: lambda self: f"[{plain(self)}]")
    assert Owner().method() == "[plain]"
    with pytest.raises(EngineError, match="vLLM has no Owner.gone"):
        plugin._wrap(Owner, "gone", lambda plain: plain)
