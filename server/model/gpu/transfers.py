"""What crosses between CPU memory and the device: one packed upload, copies on a side stream,
page-locked tables. Everything that needs CUDA for that is in this file; without it, copies happen
at once and in order, and locking does nothing.

Rules kept here, from torch's notes on CUDA semantics ("CUDA streams", "Use pinned memory buffers")
and Tensor.record_stream: a copy is asynchronous only from page-locked memory, which must stay as it
is until the copy has run; memory is allocated, and given back, on the stream that the allocator
knows it by, after every other stream's use of it was waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

TURNS = 2
"""Page-locked buffers that an Upload takes in turn: as many copies may be under way."""

_ALIGNMENT = 16
_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: locked for every context of the process


class Upload:
    """Many small host arrays to the device by one copy on the current stream.

    Arrays are packed in order, each aligned to 16 bytes, so equal shapes get equal addresses from
    call to call: what CUDA graphs read. Without CUDA there is one buffer. moved: called when arrays
    need a larger one, after which earlier addresses are invalid. Use one Upload on one stream.
    """

    def __init__(
        self, device: torch.device, num_bytes: int, moved: Callable[[], None] = lambda: None
    ) -> None:
        self._device = device
        self._moved = moved
        self._on_gpu = device.type == "cuda"
        self._next = 0
        self._turns = TURNS if self._on_gpu else 1
        self._events: list[torch.cuda.Event | None] = [None] * self._turns
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._host = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
            for _ in range(self._turns)
        ]
        self._memory = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            if self._on_gpu
            else self._host[0]
        )
        self._capacity = num_bytes

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Tensors of the same names, shapes and dtypes on the device; valid until the next call."""
        offsets: list[int] = []
        end = 0
        for array in arrays.values():
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._capacity:
            if self._on_gpu:
                # Freed memory is reused in stream order, so steps in flight keep their inputs; the
                # pinned side must be read before it goes.
                torch.cuda.current_stream(self._device).synchronize()
            self._events = [None] * self._turns
            self._allocate(2 * end)
            self._moved()
        turn, self._next = self._next, (self._next + 1) % self._turns
        event = self._events[turn]
        if event is not None:
            event.synchronize()  # TURNS copies ago: over long since
        host = self._host[turn]
        raw = host.numpy()
        for array, offset in zip(arrays.values(), offsets, strict=True):
            raw[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        memory = host
        if self._on_gpu:
            memory = self._memory
            memory[:end].copy_(host[:end], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events[turn] = event
        return {
            name: memory[offset : offset + array.nbytes]
            .view(getattr(torch, array.dtype.name))  # one name in both
            .view(array.shape)
            for (name, array), offset in zip(arrays.items(), offsets, strict=True)
        }


class Fence:
    """The end of some work of a SideStream."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """What the current stream is given from now on runs after that work. The host goes on."""
        if self._event is not None:
            self._event.wait()  # of the current stream


class SideStream:
    """A second stream, for copies that run beside the model. Without CUDA, work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object]) -> Fence:
        """Queue `work` behind all that the current stream was given so far; the host goes on.

        Memory that `work` touches and did not allocate must live until the fence was waited for.
        """
        if self._stream is None:
            work()
            return Fence()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Fence(event)

    def synchronize(self) -> None:
        """Wait for all of its work, on the host."""
        if self._stream is not None:
            self._stream.synchronize()


class HostTable:
    """A table [rows, width] in CPU memory that a device reads: page-locked where that is CUDA.

    Locking takes a copy of its own: the driver locks a mapped file's pages by copying them one by
    one, and cudaHostRegister's read-only form is not supported everywhere. torch's own pinned
    allocator is not used because it rounds up to a power of two. Without CUDA the tensor is kept
    as it is (a view of the mapped file stays one, shared by all processes of the host).

    Raises MemoryError when the memory cannot be locked.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        if tensor.device.type != "cpu" or tensor.dim() != 2:
            raise ValueError("a host table is a matrix in CPU memory")
        self._locked = device.type == "cuda"
        self.tensor = tensor.contiguous()
        if self._locked:
            self.tensor = self.tensor.clone()
            size = self.tensor.numel() * self.tensor.element_size()
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(
                cudart.cudaHostRegister(self.tensor.data_ptr(), size, _HOST_REGISTER_PORTABLE)
            )
            if code:
                self._locked = False
                raise MemoryError(
                    f"{size} bytes of CPU memory cannot be page-locked (CUDA error {code}): raise "
                    "the limit of locked memory, or keep the full head on the device"
                )

    def close(self) -> None:
        """Unlock the memory; no copy from it may be under way. Idempotent."""
        if self._locked:
            self._locked = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]
