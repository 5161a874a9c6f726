"""How many KV blocks fit into the memory that is for them. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.machine import available_memory

if TYPE_CHECKING:
    import torch

DEFAULT_FRACTIONS = {"cpu": 0.3, "cuda": 0.85}
"""Of the free memory that the KV cache takes, by kind of device: others use a CPU's memory too."""

MARGIN = 256 << 20
"""Bytes beside what the largest steps have taken: smaller graphs, adapters' graphs, slices of
vocabularies and fragments."""


def num_blocks_for(
    per_block: int,
    device: torch.device | str,
    *,
    num_bytes: int | None = None,
    fraction: float | None = None,
    reserve: int = 0,
) -> int:
    """How many blocks fit.

    num_bytes: memory given to the KV cache; when None, `fraction` of what is free on the device
    now (the weights are loaded by then; on the CPU, memory that this process may still take), less
    `reserve` bytes, of which at most half of the free memory is kept. fraction: None is that of
    DEFAULT_FRACTIONS. Raises ValueError when not even one block fits.
    """
    kind = str(device).partition(":")[0]
    if num_bytes is None:
        if fraction is None:
            fraction = DEFAULT_FRACTIONS[kind]
        if kind == "cuda":
            import torch

            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = available_memory()
        num_bytes = int((free - min(reserve, free // 2)) * fraction)
    num_blocks = num_bytes // per_block - 1  # one block more is allocated for padded rows
    if num_blocks < 1:
        raise ValueError(
            f"{max(num_bytes, 0)} bytes of KV memory hold no block of {per_block} bytes "
            "beside the one kept for padding"
        )
    return num_blocks
