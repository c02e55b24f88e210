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
    """Return the largest difference of two tables of logits, infinite where they do not reach the same tokens."""
    if got.shape != rows.shape or not torch.equal(got.isinf(), rows.isinf()):
        return float("inf")
    return float((got - rows)[rows.isfinite()].abs().max())


def draft(head: Head, ids: list[int], seed: int) -> tuple[list[int], Any]:
    """Draft at the given states."""
    given = torch.from_numpy(headfiles.states(seed, len(ids) - 1))
    states = torch.cat([given[i] for i in head.taps], -1)
    with torch.inference_mode():
        tokens, rows = head.draft(ids, states, head.memory(), headfiles.STEPS)
        return tokens, head.over_vocabulary(rows)


@pytest.mark.parametrize("name", headfiles.names())
def test_logits_ids_and_confidence_of_the_public_class(
    name: str, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asdsim.capture.drafters.dspark import DSpark

    read, confidence = DSpark.read, []

    def listening(self: DSpark, *given: Any) -> Any:
        found = read(self, *given)
        confidence.append(found[2])
        return found

    monkeypatch.setattr(DSpark, "read", listening)
    spec = headfiles.load(name)
    for seed in range(headfiles.SEEDS):
        ids, drafts, rows = expected(spec, seed)
        head = build(spec, seed, tmp_path / "head", llama)
        assert head.taps == tuple(spec.taps)
        got, logits = draft(head, ids, seed)
        assert difference(logits, rows) < CLOSE, seed
        assert got == drafts, seed
        if "confidence" in headfiles.answers(spec):
            wanted = torch.from_numpy(headfiles.answers(spec)["confidence"][seed])
            assert difference(confidence[-1][0], wanted) < CLOSE, seed


# ---- faults ----------------------------------------------------------------------------------------------------------


SOME = range(0, headfiles.SEEDS, 13)  # seeds; a fault has to show at each


def shows(spec: headfiles.Spec, compare: Callable[[int, list[int]], Any]) -> None:
    """Check that the comparison refuses what ``compare(seed, ids)`` drafts, at every seed.

    Of heads with a window: at those whose prefix is longer than it.
    """
    window = spec.config.get("transformer_layer_config", spec.config).get("sliding_window") or 0
    long = [seed for seed in range(headfiles.SEEDS) if len(expected(spec, seed)[0]) > window + 2]
    for seed in long[:4] if window else SOME:
        ids, _, rows = expected(spec, seed)
        assert difference(compare(seed, ids), rows) > 100 * CLOSE, seed


def swap_halves(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The feature before the embedding, not behind it."""
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name] = tensors[name].roll(headfiles.HIDDEN, 1)


def drop_d2t(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Draft ids taken for target ids."""
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors.pop("t2d", None)


def flip(key: str) -> Fault:
    def fault(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config[key] = not config.get(key, False)

    return fault


def drop_markov(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The correction by the token before left out."""
    tensors["markov_head.markov_w2.weight"] = torch.zeros_like(tensors["markov_head.markov_w2.weight"])


def swap_markov(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Embedding and projection of the token before mistaken for each other."""
    first, second = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()


def other_mask(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    for table in (config, config.get("dflash_config", {})):
        if "mask_token_id" in table:
            table["mask_token_id"] -= 1


def other_epsilon(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """That of the target."""
    config.get("transformer_layer_config", config)["rms_norm_eps"] = 1e-6


def drop_window(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Layers with a window taken for full ones."""
    layer = config.get("transformer_layer_config", config)
    layer["layer_types"] = ["full_attention"] * len(layer["layer_types"])


def wider_window(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config.get("transformer_layer_config", config)["sliding_window"] += 1


def plain_rope(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The variant of rotary positions ignored."""
    config["rope_parameters"] = {"rope_theta": config["rope_parameters"]["rope_theta"]}


def plain(part: str) -> Fault:
    """A norm without its weights."""

    def fault(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(f"{part}.weight")]:
            tensors[name] = torch.ones_like(tensors[name])

    return fault


WINDOWED = tuple(name for name in headfiles.names() if name.endswith("-window"))

FILE_FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "d2t dropped": (
        drop_d2t,
        ("eagle3-specforge", "eagle3-safeailab", "eagle3-speculators", "dspark-speculators-rnn",
         "dflash-speculators-d2t"),
    ),
    "residual before norm": (
        flip("norm_before_residual"),
        ("eagle3-specforge", "eagle3-deepspec", "eagle3-speculators", "eagle3-speculators-raw",
         "eagle3-speculators-qwen3"),
    ),
    "own state normed or not": (flip("norm_output"), ("eagle3-speculators-qwen3", "eagle3-speculators-raw")),
    "halves swapped": (swap_halves, ("eagle3-specforge", "eagle3-speculators", "eagle3-deepspec")),
    "Markov term dropped": (drop_markov, ("dspark-deepspec", "dspark-specforge", "dspark-speculators-bonus")),
    "Markov tables swapped": (swap_markov, ("dspark-deepspec", "dspark-deepspec-rnn")),
    "another mask": (other_mask, ("dspark-deepspec", "dflash-specforge", "dflash-speculators")),
    "query norm dropped": (plain("q_norm"), ("dspark-deepspec", "eagle3-deepspec")),
    "context norm dropped": (plain("hidden_norm"), ("dspark-deepspec",)),
    "last norm dropped": (plain("norm"), ("dspark-deepspec", "eagle3-specforge")),
    "window dropped": (drop_window, WINDOWED),
    "window by one wider": (wider_window, WINDOWED),
    "block seen both ways": (flip("sliding_window_non_causal"), ("dspark-speculators-window",)),
    "block seen backwards": (flip("sliding_window_non_causal"), ("dflash-speculators-window",)),
    "rotary variant ignored": (plain_rope, ("eagle3-specforge-yarn", "eagle3-specforge-llama3")),
    "epsilon of the target": (other_epsilon, ("dspark-deepspec", "eagle3-specforge", "eagle3-speculators", "eagle")),
}  # fmt: skip


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, (_, names) in FILE_FAULTS.items() for name in names])
def test_a_fault_in_reading_shows(what: str, name: str, llama: Any, tmp_path: Path) -> None:
    spec, fault = headfiles.load(name), FILE_FAULTS[what][0]
    shows(spec, lambda seed, ids: draft(build(spec, seed, tmp_path / "head", llama, fault), ids, seed)[1])


TAPPED = [name for name in headfiles.names() if headfiles.load(name).taps != [headfiles.LAYERS]]
"""All but Medusa and EAGLE-1, whose tap is not in question and which have no theta in their files."""


@pytest.mark.parametrize("name", [*TAPPED, "eagle"])
def test_a_wrong_theta_shows(name: str, llama: Any, tmp_path: Path) -> None:
    spec = headfiles.load(name)
    theta = 500.0 if name == "eagle" else 1e4
    shows(spec, lambda seed, ids: draft(build(spec, seed, tmp_path / "head", llama, rope_theta=theta), ids, seed)[1])


@pytest.mark.parametrize("name", TAPPED)
def test_a_wrong_layer_convention_shows(name: str, llama: Any, tmp_path: Path) -> None:
    spec = headfiles.load(name)
    off = tuple(tap + (1 if min(spec.taps) == 0 else -1) for tap in spec.taps)

    def compare(seed: int, ids: list[int]) -> Any:
        head = build(spec, seed, tmp_path / "head", llama, layer_ids=off)
        assert head.taps == off
        return draft(head, ids, seed)[1]

    shows(spec, compare)


@pytest.mark.parametrize("name", [name for name in headfiles.names() if name.startswith("eagle")])
def test_a_token_beside_its_own_feature_shows(name: str, llama: Any, tmp_path: Path) -> None:
    """Entry i with x_i, not x_{i+1}."""
    spec = headfiles.load(name)
    shows(spec, lambda seed, ids: draft(build(spec, seed, tmp_path / "head", llama), ids[:1] + ids[:-1], seed)[1])


@pytest.mark.parametrize("name", headfiles.names())
def test_a_state_of_the_position_before_shows(name: str, llama: Any, tmp_path: Path) -> None:
    spec = headfiles.load(name)

    def compare(seed: int, ids: list[int]) -> Any:
        head = build(spec, seed, tmp_path / "head", llama)
        given = torch.from_numpy(headfiles.states(seed, len(ids)))
        states = torch.cat([given[i] for i in head.taps], -1).roll(1, 0)[: len(ids) - 1]
        with torch.inference_mode():
            return head.over_vocabulary(head.draft(ids, states, head.memory(), headfiles.STEPS)[1])

    shows(spec, compare)


@pytest.mark.parametrize("name", [*TAPPED, "eagle"])
def test_a_block_one_position_late_shows(
    name: str, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary positions from n on, the drafts' own, one too high."""
    from asdsim.capture.drafters.blocks import Rotary

    spec, turn = headfiles.load(name), Rotary.__call__
    start: list[int] = [0]

    def late(self: Rotary, x: Any, positions: Any) -> Any:
        return turn(self, x, positions + (positions >= start[0]))

    monkeypatch.setattr(Rotary, "__call__", late)

    def compare(seed: int, ids: list[int]) -> Any:
        start[0] = len(ids) - 1
        return draft(build(spec, seed, tmp_path / "head", llama), ids, seed)[1]

    shows(spec, compare)


@pytest.mark.parametrize("name", [name for name in headfiles.names() if headfiles.load(name).kind == "dspark"])
def test_the_other_block_layout_shows(name: str, llama: Any, tmp_path: Path) -> None:
    spec = headfiles.load(name)
    first = "specforge" not in name and "bonus" not in name and not name.startswith("dflash-speculators")

    def compare(seed: int, ids: list[int]) -> Any:
        head = build(spec, seed, tmp_path / "head", llama, anchor="bonus" if first else "first")
        rows = draft(head, ids, seed)[1]
        return torch.nn.functional.pad(rows, (0, 0, 0, headfiles.STEPS - len(rows)))[: headfiles.STEPS]

    shows(spec, compare)


# ---- through the target ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", headfiles.names())
def test_the_session_hands_over_the_states_that_transformers_shows(name: str, llama: Any, tmp_path: Path) -> None:
    from asdsim.engines.transformers.model import HFTarget

    spec = headfiles.load(name)
    head = build(spec, 0, tmp_path / "head", llama)
    drafter = HeadDrafter(head, HFTarget(llama, "tiny"), name, keep_logits=True)
    session = drafter.session([])
    for length in (2, 9, 16):
        ids = [int(x) for x in (headfiles.uniform(f"session/{length}", (length,)) + 1) * 45]
        with torch.inference_mode():
            hidden = llama(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
            states = torch.cat([hidden[i][0] for i in spec.taps], -1)
            drafts, rows = head.draft(ids, states, head.memory(), headfiles.STEPS)
        found = session.propose(ids, headfiles.STEPS)
        assert found.ids == drafts
        assert difference(found.logits, head.over_vocabulary(rows)) < CLOSE
