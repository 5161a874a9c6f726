"""How the package compiles: numba in nopython mode, cached on disk where a place can be written.

numba looks for `NUMBA_CACHE_DIR`, then `__pycache__` beside the module, then the user's cache
directory, so a read-only installation still starts from a cache. Where none of these can be
written, it refuses at decoration time; then the function is compiled anew in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

_P = ParamSpec("_P")
_R = TypeVar("_R")

__all__ = ["compiled"]


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` compiled on first use, without the GIL, never in object mode."""
    try:
        return cast(Callable[_P, _R], numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # "cannot cache function: no locator available for file ..."
        return cast(Callable[_P, _R], numba.njit(cache=False, nogil=True)(function))
