"""The processes that ``torchrun`` starts to share one model. All of them run the same command; the first one speaks.

Whatever a process decides must be decided alike by all, or they wait for each other for ever: what depends on a clock
or on files is decided by the first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def rank() -> int:
    """Return the number of this process among those that ``torchrun`` started; 0 where it did not."""
    return int(os.environ.get("RANK", 0)) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def world_size() -> int:
    """Return how many processes ``torchrun`` started; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def value_of_first(value: Value) -> Value:
    """Return the value of the first process; the value itself where there is but one."""
    if world_size() == 1:
        return value
    import torch

    held = [value]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(held, 0)
    return held[0]


def own_directory(path: Path) -> Path:
    """Return where this process may write for ``path``: the first there, the others to a copy that is dropped.

    To be called before the model is loaded, which no process ends before all have begun: so nothing changes meanwhile.
    """
    if rank() == 0:
        return path
    import atexit
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="asdsim-rank-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if path.is_dir():
        (folder / path.name).mkdir()
        for file in path.iterdir():
            if file.suffix in (".json", ".parquet") and not file.name.startswith("."):
                shutil.copy(file, folder / path.name / file.name)
    return folder / path.name
