"""How much of a device's memory steps take beside weights and KV: measured, before the KV cache has
its size.

What: the largest steps that the sizes allow run over a KV cache of a few slots, then the largest
graphs are captured. What the allocator held at most, less what it still holds when all that is
given back, is what steps take; what the driver took at each capture, beside the allocator, is what
a graph takes, and there will be so many. Adapters' tables, which come later, are calculated
(LoraBank.bytes_for). MARGIN is added: adapters' graphs, slices of vocabularies and fragments. What
remains (cuBLAS, compiled kernels) is not free any more when the KV cache takes its share, so it is
not counted twice.

Not measured: what other processes do on the device meanwhile, which shows as the driver's. Nothing
of this has run on a GPU; tests/model/gpu/test_reserve.py has a device that reports numbers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from server.model.gpu.graphs import MAX_GRAPH_ROWS
from server.model.kv_memory import MARGIN

if TYPE_CHECKING:
    from server.model.gpu.runner import TorchRunner

__all__ = ["FEW_SLOTS", "CudaMemory", "DeviceMemory", "Reserve", "reserve_of"]

FEW_SLOTS = MAX_GRAPH_ROWS
"""Of the KV cache that the measured steps have; the rows of a larger step share them."""

_log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """A device's memory in bytes, as the process sees it. Every method waits for queued work."""

    def release(self) -> None:
        """Give back what the allocator holds for nobody; `most_held` counts from here."""

    def held(self) -> int:
        """What the allocator holds."""

    def most_held(self) -> int:
        """The most that it held."""

    def free(self) -> int:
        """What nobody holds."""

    def elsewhere(self) -> int:
        """What is neither free nor held: the driver's, and other processes'."""


class CudaMemory:
    """DeviceMemory of a CUDA device, by torch's statistics and the driver's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def release(self) -> None:
        """See DeviceMemory."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def held(self) -> int:
        """See DeviceMemory."""
        return torch.cuda.memory_reserved(self._device)

    def most_held(self) -> int:
        """See DeviceMemory. Of blocks that were taken from the driver: with their fragments."""
        return torch.cuda.max_memory_reserved(self._device)

    def free(self) -> int:
        """See DeviceMemory."""
        return torch.cuda.mem_get_info(self._device)[0]

    def elsewhere(self) -> int:
        """See DeviceMemory."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - self.held()


class Reserve(NamedTuple):
    """Bytes that stay free of KV. steps: what the largest step takes. graphs: what graphs take
    beside it, at the driver. adapters: of their tables, calculated. is_measured: else `steps` is
    calculated, too."""

    steps: int
    graphs: int = 0
    adapters: int = 0
    is_measured: bool = True

    @property
    def num_bytes(self) -> int:
        """All of it; what is calculated has the margin."""
        margin = MARGIN if self.is_measured else 0
        return self.steps + self.graphs + self.adapters + margin

    def __str__(self) -> str:
        if not self.is_measured:
            return f"calculated reserve {self.num_bytes >> 20} MiB"
        return (
            f"measured reserve {self.num_bytes >> 20} MiB (steps {self.steps >> 20}, graphs "
            f"{self.graphs >> 20}, adapters {self.adapters >> 20}, margin {MARGIN >> 20})"
        )


def reserve_of(runner: TorchRunner, memory: DeviceMemory, calculated: int) -> Reserve:
    """What a runner's steps take, over the KV cache that it has; `calculated` bytes where measuring
    fails, which the log tells. Call it before any KV is kept; its graphs are gone afterwards."""
    try:
        found = _measured(runner, memory)
    except Exception as error:  # the driver's own kinds too; the engine can start without a figure
        _log.warning(
            "the reserve was not measured (%s: %s); it is calculated",
            type(error).__name__, str(error)[:200],
        )  # fmt: skip
        found = Reserve(calculated, is_measured=False)
        runner.forget_graphs()
        memory.release()
    return found


def _measured(runner: TorchRunner, memory: DeviceMemory) -> Reserve:
    trials = runner.trials
    memory.release()
    runner.try_out(trials.largest())
    before = memory.elsewhere()
    num = runner.try_out(trials.graphs())
    each = max(0, memory.elsewhere() - before) // max(1, num)
    most = memory.most_held()
    runner.forget_graphs()
    memory.release()
    return Reserve(max(0, most - memory.held()), each * num * trials.graphs_a_size)
