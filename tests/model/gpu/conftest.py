"""Triton's kernels where there is no GPU: in its interpreter, in the process of the test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our kernels, and the functions of Triton's language that they call, are interpreted, as if
    TRITON_INTERPRET=1 had been said before triton was imported. The interpreter puts its own words
    into triton.language for each call of each function; that is done once here, for the whole test:
    it is a quarter of the time of a kernel of few rows."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton import knobs
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction, _LangPatchScope, _patch_lang
    from triton.runtime.jit import JITFunction

    from server.model.gpu import triton_kernels

    @functools.cache
    def interpreted(function: Callable[..., Any], *fixed: str) -> Any:
        return InterpretedFunction(function, do_not_specialize=fixed)

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    modules: tuple[Any, ...] = (tl, standard, triton_kernels)
    examples: dict[Any, Any] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, interpreted(value.fn, *value.do_not_specialize))
                examples[module] = value.fn
    scopes = [_patch_lang(function) for function in examples.values()]
    monkeypatch.setattr("triton.runtime.interpreter._patch_lang", lambda _: _LangPatchScope())
    yield
    for scope in reversed(scopes):
        scope.restore()
