"""DeviceMeter: how full and how busy a CUDA device is, for /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

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
