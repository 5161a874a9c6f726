"""The memory of steps, as the engine measures it at its start.

Then a KV cache of what remains is made, the largest steps run again and the graphs are captured:
what is free at the end says how much of the margin is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadtest.gpu.shapes import BLOCK_SIZE, SHAPES, Asked, build, info_of
from server.model.gpu.device import CudaMemory, DeviceMemory
from server.model.gpu.kv_cache import bytes_per_block
from server.model.gpu.runner import FEW_SLOTS, GpuOptions, TorchModel, TorchRunner
from server.model.kv_memory import num_blocks_for
from server.types import DEFAULT_ROWS, DEFAULT_SEQS

__all__ = ["check"]


class _NoDevice:
    """DeviceMemory of a dry run: 1 GiB, all of it free."""

    def release(self) -> None: ...

    def held(self) -> int:
        return 0

    most_held = elsewhere = held

    def free(self) -> int:
        return 1 << 30


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """A line: what was measured, and what is free beside KV once all has run."""
    device, shape = asked.device, SHAPES[asked.name]
    on_gpu = device.type == "cuda"
    module = build(shape, device, asked.dtype)
    rows, seqs = (DEFAULT_ROWS["cuda"], DEFAULT_SEQS["cuda"]) if on_gpu else (64, 4)
    info = info_of(
        module, device, num_blocks=-(-FEW_SLOTS // BLOCK_SIZE), max_model_len=shape.max_model_len,
        max_num_seqs=seqs, max_num_batched_tokens=rows,
    )  # fmt: skip
    memory: DeviceMemory = CudaMemory(device) if on_gpu else _NoDevice()
    runner = TorchRunner(TorchModel(module), info, GpuOptions(cuda_graphs=on_gpu))
    reserve = runner.reserve(memory, (), 0)
    free = memory.free()
    per_block = bytes_per_block(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE, asked.dtype
    )
    blocks = num_blocks_for(per_block, device, fraction=1.0, reserve=reserve.num_bytes, free=free)
    runner.resize_kv(blocks if on_gpu else 64, info.max_model_len)
    runner.warm_up()
    runner.try_out(runner.trials.largest())
    yield {
        "what": "reserve", "shape": asked.name, "steps_mib": reserve.steps >> 20,
        "graphs_mib": reserve.graphs >> 20, "free_mib": free >> 20,
        "kv_tokens": blocks * BLOCK_SIZE, "free_at_the_end_mib": memory.free() >> 20,
        "ok": memory.free() > 0,
    }  # fmt: skip
    runner.close()
