"""Models split over devices: by accelerate's hooks on the CPU, and on CUDA devices that are pretended."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode


def split_map(layers: int) -> dict[str, str]:
    """Return a device map of a Llama: every second layer and the projection on disk."""
    places = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(layers)}
    return {"model.embed_tokens": "cpu", **places, "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}


def on_disk(model: Any, folder: Path) -> Any:
    """Return a copy of a Llama of which accelerate fetches half the layers from disk whenever they run."""
    layers = int(model.config.num_hidden_layers)
    return dispatch_model(copy.deepcopy(model), split_map(layers), main_device="cpu", offload_dir=str(folder))


def spread(model: Any, devices: Sequence[str]) -> Any:
    """Put the layers of a Llama on devices in turn, the embedding on the first and the projection on the last."""
    core = model.model
    places = [(core.embed_tokens, devices[0]), (core.norm, devices[-1]), (model.lm_head, devices[-1])]
    places += [(layer, devices[i % len(devices)]) for i, layer in enumerate(core.layers)]
    places += [(core.rotary_emb, devices[0])]
    for module, device in places:
        module.to(device)
        # The cache is left where it is, as Transformers asks accelerate to.
        for part in module.modules():
            add_hook_to_module(part, AlignDevicesHook(execution_device=device, skip_keys="past_key_values"))
    return model


def _views(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[Any]]:
    """Split an index into views, which are taken, and tensors, which are left: those of each axis, or None."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(2 if isinstance(p, torch.Tensor) and p.dtype == torch.bool and p.ndim == 2 else 1
                for p in parts if p is not None and p is not Ellipsis)  # fmt: skip
    at = next((n for n, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * (tensor.ndim - taken)
    left: list[Any] = []
    for part in parts:
        axis = len(left)
        if part is None:
            tensor = torch.ops.aten.unsqueeze.default(tensor, axis)
            left.append(None)
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = torch.ops.aten.slice.Tensor(tensor, axis, part.start, part.stop, part.step or 1)
            left.append(None)
        elif isinstance(part, int):
            tensor = torch.ops.aten.select.int(tensor, axis, part)
        else:
            left.append(part if isinstance(part, torch.Tensor) else torch.tensor(part))
    return tensor, left if any(part is not None for part in left) else []


def _get(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Index by the operators: Python's own way looks for the device."""
    view, left = _views(tensor, index)
    return torch.ops.aten.index.Tensor(view, left) if left else torch.ops.aten.alias.default(view)


def _set(tensor: torch.Tensor, index: Any, value: Any) -> None:
    view, left = _views(tensor, index)
    fresh = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=view.dtype)
    if left:
        torch.ops.aten.index_put_.default(view, left, fresh)
    else:
        torch.ops.aten.copy_.default(view, fresh)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, **how: Any
) -> torch.Tensor:
    """Attend by plain operators: the choice among fused ones looks for the device."""
    k, v = (held.repeat_interleave(q.shape[1] // held.shape[1], 1) for held in (k, v))
    scores = q @ k.transpose(-1, -2)
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v


@contextmanager
def pretended() -> Iterator[FakeTensorMode]:
    """Make tensors without data on devices that are not there.

    Shapes and devices are computed as always, and an operation on tensors of two devices raises as it would on them.
    What Python reads from a tensor is 0.
    """

    def zeros(tensor: torch.Tensor, *_: Any) -> Any:
        return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    from_real_tensor = FakeTensorConverter.from_real_tensor

    def without_numbers(*given: Any, make_constant: bool = False, **more: Any) -> Any:
        return from_real_tensor(*given, **more)  # a tensor whose numbers are known would be moved for real

    def apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    with torch.no_grad():  # autograd would look for the device
                        moved = function(tensor)
                    held[name] = torch.nn.Parameter(moved, False) if held is module._parameters else moved
        return module

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        patch.setattr(FakeTensorConverter, "from_real_tensor", without_numbers)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", _attention)
        patch.setattr(torch.nn.Module, "_apply", apply)
        patch.setattr(torch.Tensor, "contiguous", lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        patch.setattr(torch.Tensor, "__getitem__", _get)
        patch.setattr(torch.Tensor, "__setitem__", _set)
        patch.setattr(torch.Tensor, "numpy", zeros)
        patch.setattr(torch.Tensor, "tolist", lambda tensor: zeros(tensor).tolist())
        for name, kind in (("__int__", int), ("__float__", float), ("__bool__", bool), ("item", int)):
            patch.setattr(torch.Tensor, name, lambda tensor, kind=kind: kind(0))
        patch.setattr(
            torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata + tensor.storage_offset()
        )
        yield mode
