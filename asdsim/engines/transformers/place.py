"""Where the parts of a model are: on one device, on several under a device map, or a shard of each on every process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch


def device_of(module: Any) -> torch.device:
    """Return the device that a module computes on, which is not where its weights wait if they are offloaded."""
    for hook in _hooks(module):
        place = getattr(hook, "execution_device", None)
        if place is not None:
            return torch.device(place)
    tensor = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _hooks(module: Any) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", [] if hook is None else [hook]))


def whole(module: Any, name: str) -> Any:
    """Return a tensor of a module in full: loaded if it is offloaded, gathered if each process holds a shard.

    To gather is a collective: all processes must ask for the same tensors in the same order.
    """
    tensor = getattr(module, name, None)
    if tensor is None:
        return None
    if tensor.device.type == "meta":
        for hook in _hooks(module):
            if getattr(hook, "weights_map", None) is not None:
                return hook.weights_map[name].to(device_of(module))
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()


class WholeState(Mapping[str, torch.Tensor]):
    """The state of a model by name, each tensor :func:`whole` and only while it is looked at."""

    def __init__(self, model: Any) -> None:
        self._model, self._state = model, model.state_dict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __getitem__(self, name: str) -> torch.Tensor:
        held: torch.Tensor = self._state[name]
        if held.device.type != "meta" and not hasattr(held, "full_tensor"):
            return held
        path, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = whole(self._model.get_submodule(path), leaf)
        return tensor


def is_sharded(model: Any) -> bool:
    """Return whether this process holds a shard of the model (tensor parallelism)."""
    return any(hasattr(tensor, "full_tensor") for tensor in model.parameters())


def from_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of the first process, so that all processes decide alike."""
    tensor = tensor.contiguous()
    torch.distributed.broadcast(tensor, 0)
    return tensor
