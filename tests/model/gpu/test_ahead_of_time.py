"""Triton kernels compiled down to machine code, for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kept import kept_folder
from tests.model.gpu.needs import needs_triton
from tests.profiles import share

SMALLEST_SHARED_MEMORY = 99 << 10  # compute capability 8.6 and 8.9
FLOATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Launch:
    """A kernel, launched as in server.model.gpu.triton_kernels.

    kinds: argument -> its type in Triton's words; other: of those that are not named. constants:
    values of the compile-time ones. most_spilled: bytes that a thread may keep in memory instead of
    registers. options: num_warps and num_stages.
    """

    kernel: str
    kinds: Mapping[str, str]
    other: str
    constants: Mapping[str, Any]
    most_spilled: int = 0
    options: Mapping[str, int] = field(default_factory=lambda: {"num_warps": 4})


def _attention(
    kernel: str, dtype: torch.dtype, head_dim: int, most_spilled: int, block_m: int, splits: bool
) -> Launch:
    from server.model.gpu import triton_kernels

    constants: dict[str, int | bool] = {
        "NUM_KV_HEADS": 2, "GROUP_SIZE": 3, "NUM_HEADS": 6, "HEAD_DIM": head_dim,
        "BLOCK_D": triton_kernels.block_d_of(head_dim), "BLOCK_SIZE": 16, "SPLIT_SIZE": 256,
        "BLOCK_S": triton_kernels.SPLITS_AT_ONCE, "HAS_WINDOW": True, "HAS_CAP": True,
        "SPLIT": splits,
    }  # fmt: skip
    options = {"num_warps": 4}
    if kernel == "_attend_tiles":
        options = triton_kernels.tile_options(head_dim, block_m, dtype)
        constants |= {name: options.pop(name) for name in ("BLOCK_M", "BLOCK_N")}
    kinds = (
        dict.fromkeys(("query", "keys", "values", "out"), f"*{FLOATS[dtype]}")
        | dict.fromkeys(("part_out", "part_max", "part_sum"), "*fp32")
        | dict.fromkeys(("tiles", "block_tables", "prefix_len", "positions"), "*i32")
        | dict.fromkeys(("split_rows", "ancestors"), "*i32")
        | {"slots": "*i64", "scaling": "fp32", "cap": "fp32"}
    )
    return Launch(kernel, kinds, "i32", constants, most_spilled, options)


def _adapters(use: str, dtype: torch.dtype) -> Launch:
    """An adapter's two products: x @ A, and t @ B, which is added to what is there."""
    from server.model.gpu import triton_kernels

    is_first = use == "x @ A"
    of_x = dtype if is_first else torch.float32
    kinds = {"spans": "*i32", "num_outputs": "i32", "y" if is_first else "x": "*fp32"}
    kinds |= {f"stride_{name}": "i32" for name in ("x", "y", "place", "k", "n")}
    constants = {
        "SIZE": 2048 if is_first else 64, "ADDS": not is_first,
        "BLOCK_N": triton_kernels.GROUPED_N, "BLOCK_K": triton_kernels.block_k(of_x),
    }  # fmt: skip
    return Launch("_grouped", kinds, f"*{FLOATS[dtype]}", constants)


def _delta_rows() -> Launch:
    """At Qwen3.5's sizes."""
    kinds = {"items": "*i32", "lines": "*i32", "kept": "*bf16", "out": "*bf16", "scale": "fp32"}
    constants = {
        "KEY_HEADS": 16, "HEADS": 32, "DK": 128, "DV": 128, "BLOCK_K": 128, "BLOCK_V": 32,
        "NUM_TAPS": 4,
    }  # fmt: skip
    return Launch("_delta_rows", kinds, "*fp32", constants)


BF16, FP32 = torch.bfloat16, torch.float32
# Enough launches to meet every branch. float32 tiles kept 9,024 bytes at first; Gemma's head keeps
# 160 with Triton 3.6. Large tiles in float32 are of models with more than 16 query heads a KV head.
LAUNCHES = {
    "decode and trees, bf16": lambda: _attention("_attend_tiles", BF16, 64, 24, 16, True),
    "decode and trees, fp32": lambda: _attention("_attend_tiles", FP32, 128, 16, 16, True),
    "chunk, bf16, Gemma's head": lambda: _attention("_attend_tiles", BF16, 256, 160, 64, False),
    "chunk, fp32, many heads": lambda: _attention("_attend_tiles", FP32, 128, 0, 64, False),
    "splits": lambda: _attention("_combine_splits", BF16, 128, 0, 16, True),
    "x @ A, bf16": lambda: _adapters("x @ A", BF16),
    "x @ A, fp32": lambda: _adapters("x @ A", FP32),
    "t @ B, bf16": lambda: _adapters("t @ B", BF16),
    "delta": _delta_rows,
}
NEWER = {"chunk, bf16, Gemma's head": 90, "decode and trees, bf16": 100}
"""Whose products are made in another way there; the others are compiled for 80."""
AT_NIGHT = [("decode and trees, bf16", 80), ("chunk, fp32, many heads", 80), ("x @ A, fp32", 80)]
"""What others come near to."""


def compiled(launch: Launch, capability: int) -> Any:
    """The kernel for sm_`capability`, from Triton's cache where that has it: by its source, its
    options and Triton's version."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from server.model.gpu import triton_kernels

    kernel = getattr(triton_kernels, launch.kernel)
    names, constants = kernel.arg_names, launch.constants
    kinds = {**launch.kinds, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, launch.other) for name in names},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
    )
    options = {**launch.options, **triton_kernels.FUSE}
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


@needs_triton
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        case
        for case in [*((name, NEWER.get(name, 80)) for name in LAUNCHES), AT_NIGHT[0]]
        if share() == 1 or case not in AT_NIGHT
    ],
)
def test_a_kernel_compiles_for_a_gpu(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shared memory that it asks for and what it spills in bounds."""
    from server.model.gpu import triton_kernels

    source = Path(str(triton_kernels.__file__)).read_bytes()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kept_folder("triton", source)))
    launch = LAUNCHES[name]()
    made = compiled(launch, capability)
    assert made.metadata.shared <= SMALLEST_SHARED_MEMORY
    assert stack_bytes(made, tmp_path) <= launch.most_spilled
