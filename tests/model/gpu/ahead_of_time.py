"""Triton kernels compiled for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compiled(
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    other: str,
    **options: Any,
) -> Any:
    """The kernel for sm_`capability`, down to machine code.

    kinds: argument -> its type in Triton's words; other: of those that are not named. constants:
    values of the compile-time ones. options: of the launch. Triton's cache must be a folder of the
    test's own (TRITON_CACHE_DIR).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {**kinds, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, other) for name in names},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
