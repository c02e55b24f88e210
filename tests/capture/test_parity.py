"""Our draft heads against the public classes: what they answered is frozen in ``tests/fixtures/heads``.

Weights and target states are drawn by name (:mod:`tests.fixtures.headfiles`); ``tests/fixtures/make_heads.py`` says
which class of which package answered, and how to ask again. Then each fault that people put into such loaders is put
in on purpose, and the comparison has to see it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import headfiles

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from asdsim.capture.drafters.formats import read_checkpoint  # noqa: E402
from asdsim.capture.drafters.heads import Head, HeadDrafter, head_class  # noqa: E402

CLOSE = 1e-5
Fault = Callable[[dict[str, Any], dict[str, Any]], None]  # changes config and tensors


@pytest.fixture(scope="module")
def llama() -> Any:
    """The target: drawn weights, tied embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**headfiles.TARGET_CONFIG)).eval()
    state = model.model.state_dict()
    drawn = {name: torch.from_numpy(headfiles.draw("target", name, tuple(t.shape))) for name, t in state.items()}
    model.model.load_state_dict(drawn)
    return model


def build(
    spec: headfiles.Spec, seed: int, folder: Path, llama: Any, fault: Fault | None = None, **overrides: Any
) -> Head:
    """Write a dialect's files with the weights of a seed, and load them with our loader."""
    config = json.loads(json.dumps(spec.config))
    tensors = {name: torch.tensor(array) for name, array in spec.arrays(seed).items()}
    if fault is not None:
        fault(config, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if spec.file.endswith(".safetensors"):
        from safetensors.torch import save_file

        save_file(tensors, folder / spec.file)
    else:
        torch.save(tensors, folder / spec.file)
    checkpoint = read_checkpoint(str(folder))
    assert checkpoint.kind == spec.kind
    return head_class(spec.kind).from_checkpoint(checkpoint, llama, **{**spec.overrides, **overrides})


def expected(spec: headfiles.Spec, seed: int) -> tuple[list[int], list[int], Any]:
    """Return prefix, draft ids and logits (STEPS, V); -inf outside the draft vocabulary."""
    found = headfiles.answers(spec)
    rows = torch.from_numpy(found["logits"][seed])
    if rows.shape[1] != headfiles.VOCAB:
        kept = torch.from_numpy(headfiles.draw(f"{spec.answers}/{seed}", "token_map", ()))
        full = rows.new_full((len(rows), headfiles.VOCAB), -torch.inf)
        full[:, kept] = rows
        rows = full
    return [int(x) for x in found["ids"][seed] if x >= 0], found["drafts"][seed].tolist(), rows


def difference(got: Any, rows: Any) -> float:
    """Return the largest difference of two logit tables, infinite where they do not reach the same tokens."""
    if got.shape != rows.shape or not torch.equal(got.isinf(), rows.isinf()):
        return float("inf")
    return float((got - rows)[rows.isfinite()].abs().max())


def draft(head: Head, ids: list[int], seed: int, taps: list[int] | None = None) -> tuple[list[int], Any]:
    """Draft at the given states, those that the head asks for unless ``taps`` says others."""
    given = torch.from_numpy(headfiles.states(seed, len(ids) - 1))
    states = torch.cat([given[i] for i in (taps or head.taps)], -1)
    with torch.inference_mode():
        return head.draft(ids, states, head.memory(), headfiles.STEPS)


@pytest.mark.parametrize("name", headfiles.names())
def test_logits_and_ids_of_the_public_class(name: str, llama: Any, tmp_path: Path) -> None:
    spec = headfiles.load(name)
    for seed in range(headfiles.SEEDS):
        ids, drafts, rows = expected(spec, seed)
        head = build(spec, seed, tmp_path / "head", llama)
        assert head.taps == tuple(spec.taps)
        got, logits = draft(head, ids, seed)
        assert difference(logits, rows) < CLOSE, seed
        assert got == drafts, seed


# ---- faults ----------------------------------------------------------------------------------------------------------


def config_fault(**values: Any) -> Fault:
    return lambda config, tensors: config.update(values)


def swap_halves(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The feature before the embedding, not behind it."""
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name] = tensors[name].roll(headfiles.HIDDEN, 1)


def drop_d2t(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Draft ids taken for target ids."""
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors.pop("t2d", None)


def flip_residual(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["norm_before_residual"] = not config.get("norm_before_residual", False)


def flip_norm_output(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["norm_output"] = not config["norm_output"]


def drop_markov(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The correction by the token before left out."""
    tensors["markov_head.markov_w2.weight"] = torch.zeros_like(tensors["markov_head.markov_w2.weight"])


def other_markov(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Embedding and projection of the token before swapped."""
    first, second = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()


def other_mask(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    for table in (config, config.get("dflash_config", {})):
        if "mask_token_id" in table:
            table["mask_token_id"] -= 1


def no_weights(part: str) -> Fault:
    """A norm without its weights."""

    def fault(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(f"{part}.weight")]:
            tensors[name] = torch.ones_like(tensors[name])

    return fault


FILE_FAULTS: list[tuple[str, str, Fault]] = [
    *[(name, "d2t dropped", drop_d2t) for name in (
        "eagle3-specforge", "eagle3-safeailab", "eagle3-speculators", "dflash-speculators-d2t",
    )],
    *[(name, "residual before norm", flip_residual) for name in (
        "eagle3-specforge", "eagle3-deepspec", "eagle3-speculators", "eagle3-speculators-raw",
        "eagle3-speculators-qwen3",
    )],
    *[(name, "halves swapped", swap_halves) for name in ("eagle3-specforge", "eagle3-speculators", "eagle3-deepspec")],
    ("eagle3-speculators-qwen3", "feature not normed", flip_norm_output),
    *[(name, "Markov term dropped", drop_markov) for name in ("dspark-deepspec", "dspark-speculators-bonus")],
    *[(name, "Markov tables swapped", other_markov) for name in ("dspark-deepspec", "dspark-deepspec-rnn")],
    *[(name, "another mask", other_mask) for name in ("dspark-deepspec", "dflash-specforge", "dflash-speculators")],
    *[(name, "query norm dropped", no_weights("q_norm")) for name in ("dspark-deepspec", "eagle3-deepspec")],
    ("dspark-deepspec", "context norm dropped", no_weights("hidden_norm")),
    ("eagle3-deepspec", "epsilon of the target", config_fault(rms_norm_eps=1e-6)),
]  # fmt: skip


def failures(spec: headfiles.Spec, compare: Callable[[int], float]) -> int:
    """Return how many seeds the comparison refuses."""
    return sum(compare(seed) >= CLOSE for seed in range(headfiles.SEEDS))


@pytest.mark.parametrize(("name", "what", "fault"), FILE_FAULTS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_fault_in_what_is_read_shows(name: str, what: str, fault: Fault, llama: Any, tmp_path: Path) -> None:
    spec = headfiles.load(name)

    def compare(seed: int) -> float:
        ids, _, rows = expected(spec, seed)
        return difference(draft(build(spec, seed, tmp_path / "head", llama, fault), ids, seed)[1], rows)

    assert failures(spec, compare) == headfiles.SEEDS


ROTARY = ("eagle3-specforge", "eagle3-speculators", "eagle3-deepspec", "dspark-deepspec", "dflash-specforge",
          "dspark-speculators")  # fmt: skip


@pytest.mark.parametrize("name", ROTARY)
def test_a_wrong_theta_shows(name: str, llama: Any, tmp_path: Path) -> None:
    spec = headfiles.load(name)

    def compare(seed: int) -> float:
        ids, _, rows = expected(spec, seed)
        return difference(draft(build(spec, seed, tmp_path / "head", llama, rope_theta=1e4), ids, seed)[1], rows)

    assert failures(spec, compare) == headfiles.SEEDS


@pytest.mark.parametrize("name", [n for n in headfiles.names() if not n.startswith(("medusa", "eagle-", "eagle.")) and n != "eagle"])
def test_a_wrong_layer_convention_shows(name: str, llama: Any, tmp_path: Path) -> None:
    spec = headfiles.load(name)
    off = [tap + 1 if min(spec.taps) == 0 else tap - 1 for tap in spec.taps]

    def compare(seed: int) -> float:
        ids, _, rows = expected(spec, seed)
        head = build(spec, seed, tmp_path / "head", llama, layer_ids=tuple(off))
        assert head.taps == tuple(off)
        return difference(draft(head, ids, seed)[1], rows)

    assert failures(spec, compare) == headfiles.SEEDS
