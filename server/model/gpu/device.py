"""What a CUDA device tells of itself: DeviceMeter, how full and how busy it is, for /metrics;
DeviceMemory, its memory as the process sees it, before the KV cache has its size; Reserve, what
stays free of KV."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from server.model.kv_memory import MARGIN
from server.types import DeviceFigures

INTERVAL_S = 1.0
"""The driver is asked at most this often: its answer may take as long as a step."""


class DeviceMeter:
    """What torch and the driver tell of a device; syncs nothing. clock: seconds."""

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device = device
        self._clock = clock
        self._last: DeviceFigures | None = None
        self._read_s = 0.0
        self._knows_use = True

    def figures(self) -> DeviceFigures:
        """The present figures, at most INTERVAL_S old."""
        now_s = self._clock()
        if self._last is None or now_s - self._read_s >= INTERVAL_S:
            free, total = torch.cuda.mem_get_info(self._device)
            self._last = DeviceFigures(
                reserved=torch.cuda.memory_reserved(self._device),
                allocated=torch.cuda.memory_allocated(self._device),
                free=free,
                total=total,
                utilisation=self._utilisation(),
            )
            self._read_s = now_s
        return self._last

    def _utilisation(self) -> float | None:
        """Share of the last sample period in which a kernel ran; None without NVML's bindings."""
        if not self._knows_use:
            return None
        try:
            return torch.cuda.utilization(self._device) / 100
        except Exception:  # pynvml's own kinds, which are known only where it is installed
            self._knows_use = False
            return None


class DeviceMemory(Protocol):
    """A device's memory in bytes, as the process sees it. Every method waits for queued work."""

    def release(self) -> None:
        """Give back what the allocator holds for nobody; `most_held` counts from here."""

    def held(self) -> int:
        """What the allocator holds."""

    def most_held(self) -> int:
        """The most that it held."""

    def free(self) -> int:
        """Free device memory, in bytes."""

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
    beside it, at the driver. adapters: of their tables, which come later: calculated
    (LoraBank.bytes_for). MARGIN is for adapters' graphs, slices of vocabularies and fragments."""

    steps: int
    graphs: int
    adapters: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.steps + self.graphs + self.adapters + MARGIN

    def __str__(self) -> str:
        return (
            f"reserve {self.num_bytes >> 20} MiB (steps {self.steps >> 20}, graphs "
            f"{self.graphs >> 20}, adapters {self.adapters >> 20}, margin {MARGIN >> 20})"
        )
