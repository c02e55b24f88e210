"""How one plain Python source becomes compiled code, cached safely.

numba keys its cache by the file of the outermost function alone, so an edited rule would go on running as it was. The
names of what is compiled here therefore carry a hash of every source that goes into it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from .. import rule
from . import request


def named(function: Callable[..., Any], variant: str) -> Callable[..., Any]:
    """Return ``function`` under a name that tells its variant and the sources that it is compiled with."""
    sources = "".join(inspect.getsource(module) for module in (rule, request, inspect.getmodule(function)) if module)
    digest = hashlib.sha256(sources.encode()).hexdigest()[:12]
    function.__qualname__ = f"{function.__name__}_{variant.replace(':', '_')}_{digest}"
    return function


def compile_cached(jit: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Any:
    """Compile with an on-disk cache, or without one where no cache directory can be written."""
    try:
        return jit(cache=True, **options)(function)
    except RuntimeError:  # numba: "no locator available"
        return jit(**options)(function)


def helper(function: Callable[..., Any]) -> Any:
    """Compile for use inside another compiled function.

    Without numba's runtime for counted references: a helper allocates nothing, and counting the references of fourteen
    arrays at every call, atomically, took three quarters of the time of a walk.
    """
    import numba

    return compile_cached(numba.njit, function, _nrt=False)
