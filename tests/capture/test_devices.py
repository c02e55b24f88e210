"""Models whose layers lie on several devices: split by accelerate's hooks on the CPU, and on pretended CUDA devices.

A pretended device computes shapes only, but raises where an operation meets tensors of two devices, as a real one does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asdsim.capture.cover import BatchRunner, FaithfulRunner, Job, Missing
from asdsim.capture.drafters import make_drafter
from asdsim.capture.drafters.formats import Checkpoint
from asdsim.capture.drafters.layer_skip import skip_layers
from asdsim.capture.drafters.model import ModelDrafter
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.engines.transformers.model import HFTarget, weights_sha256
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT, Policy
from tests.capture.conftest import VOCAB, tiny_llama
from tests.support import heads
from tests.support.devices import on_disk, pretended, spread

torch = pytest.importorskip("torch")

Requests = Callable[..., list[RequestRecord]]
LAYERS, K = 5, 3
SPECS = ("layer-skip:1", "lookup:2", "medusa", "medusa-own", "eagle3", "dspark", "model")


def checkpoint_of(spec: str) -> Checkpoint | None:
    """Return a random head; None for a drafter that is none."""
    if spec.startswith("medusa"):
        return Checkpoint("head", {}, heads.medusa_tensors(32, VOCAB, K, own=spec == "medusa-own"))
    if spec == "eagle3":
        tensors = heads.eagle3_tensors(32, VOCAB, draft_vocab=40)
        return Checkpoint("head", heads.eagle3_config(32, VOCAB), {n: t for n, t in tensors.items() if n != "t2d"})
    if spec == "dspark":
        return Checkpoint("head", heads.dspark_config(32, VOCAB, K, [0, 2]), heads.dspark_tensors(32, VOCAB, 2))
    return None


def drafter_of(spec: str, target: HFTarget, checkpoint: Checkpoint | None, device: str = "cpu") -> Any:
    """Return a drafter."""
    if spec == "model":
        return ModelDrafter(tiny_llama(seed=3, layers=2).to(device), "other", keep_logits=True)
    if checkpoint is not None:
        spec = f"{spec.partition('-')[0]}:{Path(__file__).parent}"  # any place that is there
    return make_drafter(spec, target, keep_logits=not spec.startswith("lookup"), checkpoint=checkpoint)


def jobs_of(requests: list[RequestRecord]) -> list[Job]:
    """Return steps to compute behind different prefixes of requests, some of them shared."""
    return [
        Job(request, 1 + n, 1, Missing(0, -1, 0, tuple(range(1, 1 + n % 3)), 1))
        for request in requests for n in range(3)
    ]  # fmt: skip


def everything(target: HFTarget, drafter: Any, requests: list[RequestRecord]) -> list[Any]:
    """Return what capturing, and covering in either way, records."""
    recorder = Recorder(divergences=() if drafter.vocab_size is None else ("kl",))
    asked = [*((request, STRICT) for request in requests), (requests[0], Policy(4, 1, 2))]
    steps = [step for one, policy in asked for step in decode(target, drafter, one, policy, K, recorder).steps]
    jobs = jobs_of(requests)
    for runner in (
        BatchRunner(target, drafter, K, recorder, batch=4), BatchRunner(target, drafter, K, recorder, 4, kv_bytes=0),
        FaithfulRunner(target, drafter, K, recorder, lambda name: []),
    ):  # fmt: skip
        steps += list(runner(jobs)) + list(runner(jobs[::-1]))  # the second time the pool holds the prefixes
    return steps


def assert_same(ours: list[Any], theirs: list[Any], tolerance: float = 1e-4) -> None:
    """Hold two lists of steps against each other: ids are equal, logits up to rounding.

    Weights that were read from disk lie at other addresses, where the CPU adds up in another order.
    """
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        fields = {name: value for name, value in vars(one).items() if not name.endswith("_us")}
        for name, value in fields.items():
            twin = getattr(other, name)
            if isinstance(value, dict):
                assert value.keys() == twin.keys()
                for key in value:
                    np.testing.assert_allclose(value[key], twin[key], rtol=10 * tolerance, atol=tolerance)
            elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
                np.testing.assert_allclose(value, twin, rtol=tolerance, atol=tolerance)
            else:
                np.testing.assert_array_equal(value, twin)


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_split_by_hooks_gives_the_same_trace(requests: Requests, tmp_path: Path, spec: str) -> None:
    model = tiny_llama(layers=LAYERS)
    parted = HFTarget(on_disk(model, tmp_path / "weights"), "tiny")
    assert parted.model.lm_head.weight.device.type == "meta", "nothing was parted"
    one = HFTarget(model, "tiny")
    some = requests(3, limit=8, seed=5)
    runs = [everything(target, drafter_of(spec, target, checkpoint_of(spec)), some) for target in (one, parted)]
    assert_same(*runs)
    assert one.describe() == parted.describe()


def test_layer_skip_of_a_hooked_model_runs_its_own_layers(tmp_path: Path) -> None:
    model = tiny_llama(layers=LAYERS)
    parted = on_disk(model, tmp_path)
    before = weights_sha256(parted)
    thin = skip_layers(parted, [1, 2])
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(thin(ids).logits, skip_layers(model, [1, 2])(ids).logits)
        assert torch.equal(parted(ids).logits, model(ids).logits)
    assert weights_sha256(parted) == before == weights_sha256(model)


def test_float32_logits_of_an_offloaded_projection(tmp_path: Path) -> None:
    model = tiny_llama(layers=LAYERS).to(torch.bfloat16)
    ids = list(range(9))
    rows = [
        HFTarget(each, "tiny", logits_dtype="float32").session(()).score(ids, [4])
        for each in (on_disk(model, tmp_path), model)
    ]
    assert rows[0].dtype == torch.float32
    assert torch.equal(*rows)


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")], ids=["one", "two"])
@pytest.mark.parametrize("spec", SPECS)
def test_no_tensor_is_left_on_another_device(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, spec: str, devices: Any
) -> None:
    monkeypatch.setattr("asdsim.capture.drafters.heads.check_token_ids", lambda *_: None)  # looks at numbers
    checkpoint = checkpoint_of(spec)
    with pretended():
        model = tiny_llama(layers=LAYERS)
        target = HFTarget(spread(model, devices) if len(devices) > 1 else model.to(devices[0]), "tiny")
        assert [str(device) for device in target.lm.devices] == list(devices)
        drafter = drafter_of(spec, target, checkpoint, devices[0])
        target.synchronize = lambda: None  # type: ignore[method-assign]
        # A second request would take the same operations: there are no numbers here that could differ.
        steps = everything(target, drafter, requests(1, limit=5, seed=5, stop="fixed"))
        session = target.session(())
        rows = session.score([1, 2, 3], [4, 5])
        assert str(rows.device) == devices[0]
        if drafter.reads_target:
            assert {str(parameter.device) for parameter in drafter.head.parameters()} == {devices[0]}
    assert len(steps) > 20


def test_a_pretended_device_refuses_to_be_mixed() -> None:
    with pretended(), pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")
