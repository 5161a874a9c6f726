"""Triton kernels compiled for a GPU that is not there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
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


def stack_bytes(made: Any, folder: Path) -> int:
    """Bytes that each thread of a compiled kernel keeps in memory: values that found no register,
    as the machine code itself says (cuobjdump of triton's package). folder: for its file."""
    import triton

    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    done = subprocess.run(
        [programs / "cuobjdump", "-res-usage", file],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    found = re.search(r"REG:\d+ STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1]) + int(found[2])
