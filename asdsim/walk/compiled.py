"""How one plain Python source becomes compiled code, cached safely.

numba keys its cache by the file of the outermost function alone, so an edited rule would go on running as it was. The
names of what is compiled here therefore carry a hash of every source that goes into it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..rules import asd as rule
from ..rules.asd import Reading
from . import request

COMPILING = "compiling the kernel for this machine, once; some seconds"


def named(function: Callable[..., Any], variant: str | Reading) -> Callable[..., Any]:
    """Return ``function`` under a name that tells its variant and the sources that it is compiled with."""
    sources = "".join(inspect.getsource(module) for module in (rule, request, inspect.getmodule(function)) if module)
    digest = hashlib.sha256(sources.encode()).hexdigest()[:12]
    variant = variant if isinstance(variant, str) else "_".join(variant)
    function.__qualname__ = f"{function.__name__}_{variant}_{digest}"
    return function


def compile_cached(jit: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Any:
    """Compile with an on-disk cache, or without one where no cache directory can be written."""
    try:
        return jit(cache=True, **options)(function)
    except RuntimeError:  # numba: "no locator available"
        return jit(**options)(function)


def to_single(x):
    """Round to float32; what :func:`asdsim.rules.asd.single` is in compiled code."""
    return np.float64(np.float32(x))


def compiled_rule(reading: Reading) -> dict[str, Any]:
    """Return the two names that a kernel's source leaves open, compiled: who judges, and how charges are entered."""
    settle = rule.bind(rule.settle_of(reading.semantics, helper(to_single)))
    return {
        "judge": rule.judge_of(reading, lambda judge: helper(named(judge, reading.semantics))),
        "settle": helper(named(settle, reading.semantics)),
    }


def python_rule(reading: Reading) -> dict[str, Any]:
    """Return the same as plain Python."""
    return {"judge": rule.judge_of(reading), "settle": rule.settle_of(reading.semantics)}


def helper(function: Callable[..., Any]) -> Any:
    """Compile for use inside another compiled function.

    Without numba's runtime for counted references: a helper allocates nothing, and counting the references of fourteen
    arrays at every call, atomically, took three quarters of the time of a walk.
    """
    import numba

    return compile_cached(numba.njit, function, _nrt=False, forceinline=True)


def is_cached(module: Any, reading: Reading) -> bool:
    """Return whether a module's kernel is on disk or was used in this process; True where that cannot be told."""
    kernel = module.kernel(reading)
    folder = getattr(getattr(kernel, "stats", None), "cache_path", None)
    if not folder or kernel.signatures:
        return True
    return any(Path(folder).glob(f"*{kernel.py_func.__qualname__}*.nbi"))
