"""Sizes that the kernels and those who lay memory out for them share, by the CPU's registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from drafters.target import chosen

LANES = 16
"""float32 lanes of a vector of IR, and slots of a block of KV."""

WIDE_REGISTERS = "avx512f" in chosen().features
"""Whether there are 32 registers of 512 bits."""

VECTORS_PER_PANEL = 4 if WIDE_REGISTERS else 1
"""Vectors of outputs in a panel of floats. A kernel of 6 rows x 4 vectors fills 32 zmm registers,
one of 6 x 1 (two ymm each) 16 ymm registers."""

PANEL = LANES * VECTORS_PER_PANEL
"""Outputs of a panel of float weights."""

MAX_ROWS = 6
"""Rows of the largest kernel of floats."""

ROW_SPAN = 16 * MAX_ROWS
"""Most rows of one work item: their inputs stay in a core's L2."""

ADAPTER_WIDE = max(2, VECTORS_PER_PANEL)
"""Vectors of a wide kernel of adapters: 4 rows of them fill the registers."""

WIDE_HEADS = 12 if WIDE_REGISTERS else 0
"""Heads of several rows of one sequence that attention computes together. 0: there are no registers
for it."""

KV_TYPES: dict[str, type[Any]] = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
"""Type of the KV cache's numbers by the name of `engine.kv_cache_dtype`. A type's place is the
number that kernels know it by."""

KV_BYTES = tuple(np.dtype(kind).itemsize for kind in KV_TYPES.values())


def tile_rows(group: int) -> int:
    """Most rows whose scores and sums are computed together, with `group` query heads a KV head:
    their query heads share each load."""
    if WIDE_HEADS > 0 and WIDE_HEADS % group == 0:
        return WIDE_HEADS // group
    return 4


def integer_kernel(features: frozenset[str]) -> str:
    """The integer kernel for a CPU: the widest that it has all instructions of."""
    if {"avx512f", "avx512bw", "avx512vnni"} <= features:
        return "avx512-vnni"
    if {"avx2", "avxvnni"} <= features:
        return "avx-vnni"
    if {"avx512f", "avx512bw"} <= features:
        return "avx512"
    if "avx2" in features:
        return "avx2"
    if {"neon", "i8mm"} <= features:
        return "neon-i8mm"
    return "neon-dotprod" if {"neon", "dotprod"} <= features else "plain"


INTEGER_KERNEL = integer_kernel(chosen().features)
"""Name of the kernel in use, for the log and /metrics."""

TILES = INTEGER_KERNEL == "avx512-vnni" and {"amx-tile", "amx-int8"} <= chosen().features
"""Whether kernels have a part for AMX tiles; integers/amx.py finds out whether this machine runs
it."""
