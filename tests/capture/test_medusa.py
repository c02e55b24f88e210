"""Medusa heads: every layout gives the formula's logits; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asdsim.capture.drafters import make_drafter
from asdsim.engines.transformers.model import HFTarget
from asdsim.errors import CaptureError, UsageError
from tests.support.heads import medusa_tensors, save

from .conftest import VOCAB

WIDTH, N = 32, 4
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def plain(target: HFTarget, tensors: dict[str, torch.Tensor], layers: int, own: bool) -> torch.Tensor:
    """Return logit rows (N, V) behind IDS, from the formula."""
    with torch.inference_mode():
        inner = target.model.model(input_ids=torch.tensor([IDS[:-1]])).last_hidden_state[0, -1]
        rows = []
        for i in range(N):
            h = inner
            for j in range(layers):
                a = tensors[f"{i}.{j}.linear.weight"] @ h + tensors[f"{i}.{j}.linear.bias"]
                h = h + a * torch.sigmoid(a)
            rows.append(tensors[f"{i}.{layers}.weight"] @ h if own else target.model.lm_head(h))
        return torch.stack(rows)


def check(target: HFTarget, folder: str, rows: torch.Tensor) -> Any:
    drafter = make_drafter(f"medusa:{folder}", target, keep_logits=True)
    assert (drafter.head.taps, drafter.max_draft_tokens) == ((3,), N)
    for width in range(1, N + 1):
        found = drafter.session(IDS).propose(IDS, width)
        torch.testing.assert_close(found.logits, rows[:width], rtol=0, atol=1e-5)
        assert found.ids == rows[:width].argmax(-1).tolist()
    return drafter


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize(("layers", "own"), [(1, True), (2, True), (1, False)])
def test_the_layout_of_the_public_code(target: HFTarget, tmp_path: Path, file: str, layers: int, own: bool) -> None:
    tensors = medusa_tensors(WIDTH, VOCAB, N, layers, own)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "somewhere/else"}
    folder = save(tmp_path, tensors, config, file)
    (tmp_path / "pytorch_model.bin").write_bytes(b"the whole model lies beside some heads, and is not read")
    drafter = check(target, folder, plain(target, tensors, layers, own))
    told = drafter.describe()
    assert (told["kind"], told["taps"], told["max_draft_tokens"], told["dtype"]) == ("medusa", [3], N, "float32")
    assert len(told["weights_sha256"]) == 64 and told["overrides"] == {}
    one_file = make_drafter(f"medusa:{Path(folder) / file}", target)
    assert one_file.describe()["weights_sha256"] == told["weights_sha256"]


@pytest.mark.parametrize("shared", [False, True])
def test_the_layout_of_vllm(target: HFTarget, tmp_path: Path, shared: bool) -> None:
    tensors = medusa_tensors(WIDTH, VOCAB, N, 1)
    if shared:
        tensors.update({f"{i}.1.weight": tensors["0.1.weight"] for i in range(N)})
    renamed = {}
    for i in range(N):
        renamed[f"blocks.{i}.layers.0.weight"] = tensors[f"{i}.0.linear.weight"]
        renamed[f"blocks.{i}.layers.0.bias"] = tensors[f"{i}.0.linear.bias"]
        renamed["lm_head.weight" if shared else f"lm_heads.{i}.weight"] = tensors[f"{i}.1.weight"]
    check(target, save(tmp_path, renamed, {}), plain(target, tensors, 1, True))


@pytest.mark.parametrize("own", [True, False])
def test_a_token_map_leaves_the_other_tokens_out(target: HFTarget, tmp_path: Path, own: bool) -> None:
    chosen = torch.tensor([1, 5, 8, 40, 77, 95])
    tensors = medusa_tensors(WIDTH, VOCAB, N, 1)
    renamed = {"token_map": chosen}
    for i in range(N):
        renamed[f"blocks.{i}.layers.0.weight"] = tensors[f"{i}.0.linear.weight"]
        renamed[f"blocks.{i}.layers.0.bias"] = tensors[f"{i}.0.linear.bias"]
        if own:
            renamed[f"lm_heads.{i}.weight"] = tensors[f"{i}.1.weight"][chosen]
    rows = torch.full((N, VOCAB), -torch.inf)
    rows[:, chosen] = plain(target, tensors, 1, own)[:, chosen]
    check(target, save(tmp_path, renamed, {}), rows)


@pytest.mark.parametrize(
    ("width", "vocab", "text"),
    [(48, VOCAB, "hidden size 48, the target has 32"), (WIDTH, 80, "vocabulary 80, the target has 96")],
)
def test_a_head_of_another_target_is_refused(
    target: HFTarget, tmp_path: Path, width: int, vocab: int, text: str
) -> None:
    folder = save(tmp_path, medusa_tensors(width, vocab, 2), {}, "medusa_lm_head.pt")
    with pytest.raises(CaptureError, match=text):
        make_drafter(f"medusa:{folder}", target)


def test_what_is_no_medusa_head_is_refused(target: HFTarget, tmp_path: Path) -> None:
    gap = medusa_tensors(WIDTH, VOCAB, 3)
    del gap["1.0.linear.weight"]
    extra = {**medusa_tensors(WIDTH, VOCAB, 2), "more": torch.zeros(1)}
    uneven = medusa_tensors(WIDTH, VOCAB, 3)
    del uneven["2.1.weight"]
    for number, (tensors, text) in enumerate(
        [
            (gap, "tensor blocks.1.0.weight is missing"),
            (extra, "tensor more does not belong"),
            (uneven, "3 heads, but 2 projections"),
            ({"some.weight": torch.zeros(2, 2)}, "no known head"),
        ]
    ):
        folder = save(tmp_path / str(number), tensors, {}, "medusa_lm_head.pt")
        with pytest.raises(CaptureError, match=text):
            make_drafter(f"medusa:{folder}", target)
    folder = save(tmp_path / "good", medusa_tensors(WIDTH, VOCAB, 2), {})
    with pytest.raises(UsageError, match="kind medusa, not eagle3.*write --drafter medusa:"):
        make_drafter(f"eagle3:{folder}", target)
    with pytest.raises(UsageError, match="--draft-rope-theta has no effect on drafter medusa"):
        make_drafter(f"medusa:{folder}", target, overrides={"rope_theta": 1e4})


def test_a_pickle_with_more_than_tensors_is_not_run(target: HFTarget, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "run",))

    torch.save({"0.0.linear.weight": Trap()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CaptureError, match="cannot read it"):
        make_drafter(f"medusa:{tmp_path}", target)
    assert not (tmp_path / "run").exists()
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"no archive")
    with pytest.raises(CaptureError, match="cannot read it"):
        make_drafter(f"medusa:{tmp_path}", target)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such", "a/b/c", "plain", "~/none"])
def test_a_path_that_does_not_exist_is_refused_before_anything_is_loaded(name: str) -> None:
    from asdsim.capture.drafters import check_spec

    with pytest.raises(UsageError, match="no file or directory"):
        check_spec(f"medusa:{name}")
    with pytest.raises(UsageError, match="names no head"):
        check_spec("eagle3")
