"""How the package compiles: numba in nopython mode, cached on disk where a place can be written.

numba looks for `NUMBA_CACHE_DIR`, then `__pycache__` beside the module, then the user's cache
directory, so a read-only installation still starts from a cache. Where none of these can be
written, it refuses at decoration time; then the function is compiled anew in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba

_P = ParamSpec("_P")
_R = TypeVar("_R")

_njit: Any = numba.njit  # its type knows no _nrt


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` compiled on first use, without the GIL, never in object mode."""
    return _compiled(function)


def borrowing(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`compiled`, and arrays are borrowed: nothing in it makes an array or keeps one.

    Numba counts a reference for each array that is taken out of a record, and every count is an
    atomic instruction: they were half of a proposal's time. Such a function calls `inlined` ones.
    """
    return _compiled(function, _nrt=False)


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`borrowing`, and made a part of each function that calls it.

    For inner functions that take records: one of ten arrays is eighty words, to be copied for
    every call.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: Callable[_P, _R], **flags: bool) -> Callable[_P, _R]:
    try:
        return cast(Callable[_P, _R], _njit(cache=True, nogil=True, **flags)(function))
    except RuntimeError:  # "cannot cache function: no locator available for file ..."
        return cast(Callable[_P, _R], _njit(cache=False, nogil=True, **flags)(function))
