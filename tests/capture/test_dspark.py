"""DSpark heads beyond parity: how they are run, the confidence head, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asdsim.capture.drafters import make_drafter
from asdsim.capture.drafters.dspark import DSpark
from asdsim.capture.drafters.formats import read_checkpoint
from asdsim.engines.transformers.model import HFTarget
from asdsim.errors import CaptureError
from tests.fixtures import headfiles
from tests.support.heads import save

NAMES = [name for name in headfiles.names() if headfiles.load(name).kind == "dspark"]


@pytest.fixture(scope="module")
def model() -> Any:
    """A random target of the fixtures' shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**headfiles.TARGET_CONFIG, initializer_range=0.15)).eval()


def files(name: str, folder: Path, seed: int = 0, drop: str = "none", **config: Any) -> str:
    """Write a dialect's files; ``drop`` leaves tensors out, a config value of None its key."""
    spec = headfiles.load(name)
    tensors = {key: torch.tensor(array) for key, array in spec.arrays(seed).items() if not key.startswith(drop)}
    merged = {key: value for key, value in {**spec.config, **config}.items() if value is not None}
    return save(folder, tensors, json.loads(json.dumps(merged)))


def load(name: str, folder: Path, model: Any, seed: int = 0, **overrides: Any) -> DSpark:
    return DSpark.from_checkpoint(read_checkpoint(files(name, folder, seed)), model, **overrides)


def drawn(head: DSpark, seed: int, length: int = 16) -> tuple[list[int], torch.Tensor]:
    """Return a prefix of ``length`` tokens and its states (length - 1, taps x d)."""
    given = torch.from_numpy(headfiles.states(seed, length - 1))
    ids = [int(x) for x in (headfiles.uniform(f"dspark/{seed}", (length,)) + 1) * 45]
    return ids, torch.cat([given[i] for i in head.taps], -1)


@pytest.mark.parametrize("name", NAMES)
def test_incremental_is_from_scratch_and_many_are_one_by_one(name: str, tmp_path: Path, model: Any) -> None:
    head = load(name, tmp_path, model)
    prefixes = [drawn(head, seed, length) for seed in (1, 2) for length in (2, 5, 9, 16)]
    with torch.inference_mode():
        alone = [head.draft(ids, states, head.memory(), 9) for ids, states in prefixes]
        many = head.draft_many([ids for ids, _ in prefixes], [states for _, states in prefixes], 9)
        for (tokens, rows), (again, same) in zip(alone, many, strict=True):
            assert tokens == again and len(tokens) == head.max_draft_tokens
            torch.testing.assert_close(rows, same, rtol=0, atol=1e-5)
        ids, states = drawn(head, 1)
        memory, held = head.memory(), 0
        for length in (3, 4, 9, 6, 16):  # 6 goes back
            memory.crop(min(held, length - 1))
            tokens, rows = head.draft(ids[:length], states[: length - 1], memory, 4)
            assert len(memory) == length - 1
            fresh = head.draft(ids[:length], states[: length - 1], head.memory(), 4)
            assert tokens == fresh[0]
            torch.testing.assert_close(rows, fresh[1], rtol=0, atol=1e-5)
            held = length


@pytest.mark.parametrize("name", NAMES)
def test_a_proposal_is_the_start_of_a_longer_one(name: str, tmp_path: Path, model: Any) -> None:
    head = load(name, tmp_path, model)
    ids, states = drawn(head, 4)
    with torch.inference_mode():
        whole, rows = head.draft(ids, states, head.memory(), 9)
        for count in range(1, len(whole) + 1):
            part, same = head.draft(ids, states, head.memory(), count)
            assert part == whole[:count]
            torch.testing.assert_close(same, rows[:count], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if "confidence" in headfiles.answers(headfiles.load(name))])
def test_confidence_is_that_of_the_public_class(name: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = headfiles.load(name)
    model = LlamaForCausalLM(LlamaConfig(**headfiles.TARGET_CONFIG)).eval()
    shared = torch.from_numpy(headfiles.draw("target", "embed_tokens.weight", (headfiles.VOCAB, headfiles.HIDDEN)))
    model.get_input_embeddings().load_state_dict({"weight": shared})
    found = headfiles.answers(spec)
    for seed in range(4):
        head = load(name, tmp_path / str(seed), model, seed)
        ids = [int(x) for x in found["ids"][seed] if x >= 0]
        given = torch.from_numpy(headfiles.states(seed, len(ids) - 1))
        states = torch.cat([given[i] for i in head.taps], -1)[None]
        with torch.inference_mode():
            memory, anchors = head.memory(), torch.tensor(ids[-1:])
            head.extend(states, torch.arange(len(ids) - 1)[None], memory)
            places = torch.arange(len(ids) - 1 + head.block)[None]
            hidden = head(head.blocks(anchors), places[:, len(ids) - 1 :], head.masks(places), memory)
            tokens, _, confidence = head.read(hidden, anchors, headfiles.STEPS)
        assert tokens[0].tolist() == found["drafts"][seed].tolist()
        torch.testing.assert_close(confidence[0], torch.from_numpy(found["confidence"][seed]), rtol=0, atol=1e-5)


def test_the_projection_may_be_left_out_where_the_target_has_its_rows(tmp_path: Path, model: Any) -> None:
    name = "dspark-speculators-rnn"
    spec = headfiles.load(name)
    arrays = {key: torch.tensor(array) for key, array in spec.arrays(0).items()}
    arrays["lm_head.weight"] = model.lm_head.weight.detach()[arrays["t2d"]].clone()
    full = DSpark.from_checkpoint(read_checkpoint(save(tmp_path / "full", arrays, spec.config)), model)
    del arrays["lm_head.weight"]
    lean = DSpark.from_checkpoint(read_checkpoint(save(tmp_path / "lean", arrays, spec.config)), model)
    ids, states = drawn(full, 1)
    with torch.inference_mode():
        for head in (full, lean):
            tokens, rows = head.draft(ids, states, head.memory(), 4)
            assert bool(arrays["t2d"][tokens].all()) and rows.shape == (4, 40)
            assert (head.over_vocabulary(rows).isfinite() == arrays["t2d"]).all()
        assert tokens == full.draft(ids, states, full.memory(), 4)[0]


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("dspark-deepspec", {"mask_token_id": None}, "does not say mask_token_id"),
        ("dspark-deepspec", {"block_size": None}, "does not say block_size"),
        ("dspark-deepspec", {"mask_token_id": 96}, "the mask is token 96, the target has 96"),
        ("dspark-deepspec", {"architectures": ["Drafter"]}, "give --draft-anchor first .* or bonus"),
        ("dspark-deepspec", {"target_layer_ids": None}, "--draft-layer-ids"),
        ("dspark-deepspec", {"rope_parameters": None}, "--draft-rope-theta"),
        ("dspark-deepspec", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ("dspark-deepspec", {"drop": "markov_head"}, "Markov rank 12, tensors 0"),
        ("dspark-deepspec", {"drop": "layers.1.mlp.up_proj"}, "tensor layers.1.mlp.up_proj.weight is missing"),
        ("dspark-deepspec", {"drop": "norm."}, "tensor norm.weight is missing"),
    ],
)
def test_what_a_checkpoint_leaves_open_is_asked_for(
    name: str, change: dict[str, Any], text: str, tmp_path: Path, model: Any
) -> None:
    folder = files(name, tmp_path, **change)
    with pytest.raises(CaptureError, match=text):
        make_drafter(f"dspark:{folder}", HFTarget(model, "tiny"))


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = files("dspark-deepspec", tmp_path)
    for size, text in (
        ({"hidden_size": 48}, "hidden size 32, the target has 48"),
        ({"vocab_size": 100}, "vocabulary 96, the target has 100"),
    ):
        other = LlamaForCausalLM(LlamaConfig(**{**headfiles.TARGET_CONFIG, **size})).eval()
        with pytest.raises(CaptureError, match=text):
            make_drafter(f"dspark:{folder}", HFTarget(other, "tiny"))


@pytest.mark.parametrize(("anchor", "most"), [("first", 5), ("bonus", 4)])
def test_the_layout_can_be_said(anchor: str, most: int, tmp_path: Path, model: Any) -> None:
    folder = files("dspark-deepspec", tmp_path, architectures=["Drafter"])
    drafter = make_drafter(f"dspark:{folder}", HFTarget(model, "tiny"), overrides={"anchor": anchor})
    assert drafter.max_draft_tokens == most
    assert drafter.describe()["overrides"] == {"anchor": anchor}
    ids = list(range(3, 12))
    assert len(drafter.session(ids).propose(ids, 9).ids) == most
