"""What crosses between CPU memory and the device: one packed upload a step, copies that run beside
it, page-locked tables and rows that are gathered from them. Without CUDA a copy is made at once and
locking does nothing.

A copy is asynchronous only from page-locked memory, which must stay as it is until the copy has run
(torch's notes on CUDA semantics, "Use pinned memory buffers").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_ALIGNMENT = 16


class Upload:
    """Many small host arrays to the device by one copy on the current stream.

    Arrays are packed in order, each aligned to 16 bytes, so equal shapes get equal addresses from
    call to call: what CUDA graphs read. Call it again once the copy has run: whoever waits for a
    step has waited for its upload. moved: called when arrays need a larger buffer, after which
    earlier addresses are invalid.
    """

    def __init__(
        self, device: torch.device, num_bytes: int, moved: Callable[[], None] = lambda: None
    ) -> None:
        self._device = device
        self._moved = moved
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._host = self._memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        if on_gpu:
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Tensors of the same names, shapes and dtypes on the device; valid until the next call."""
        offsets: list[int] = []
        end = 0
        for array in arrays.values():
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._host.shape[0]:
            self._allocate(2 * end)
            self._moved()
        raw, memory = self._host.numpy(), self._memory
        for array, offset in zip(arrays.values(), offsets, strict=True):
            raw[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        if memory is not self._host:
            memory[:end].copy_(self._host[:end], non_blocking=True)
        return {
            name: memory[offset : offset + array.nbytes]
            .view(getattr(torch, array.dtype.name))  # one name in both
            .view(array.shape)
            for (name, array), offset in zip(arrays.items(), offsets, strict=True)
        }


class Beside:
    """A stream for copies, which run beside what is queued on the runner's; without CUDA none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_ahead = False

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """What is queued inside comes behind all that is queued so far, and beside what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_ahead = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is queued on the current stream from here on comes behind the copies."""
        if self._is_ahead and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._is_ahead = False


def page_locked(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table [rows, width] in CPU memory that a device reads. For CUDA a page-locked copy, whose
    room torch rounds up to a power of two; else the table itself (a view of the mapped file stays
    one, shared by all processes of the host). Raises MemoryError when it cannot be locked."""
    if device.type != "cuda":
        return table.contiguous()
    try:
        return table.contiguous().pin_memory()
    except RuntimeError as error:
        raise MemoryError(
            f"{table.nbytes} bytes of CPU memory cannot be page-locked ({error}): raise the limit "
            "of locked memory, or keep the full head on the device"
        ) from error


def gathered(table: torch.Tensor, token_ids: Array) -> Array:
    """Rows of a table in CPU memory, as numpy has them: float32, or int16 with a half's bits."""
    rows = table.index_select(0, torch.from_numpy(np.ascontiguousarray(token_ids)))
    found: Array = (rows if rows.dtype == torch.float32 else rows.view(torch.int16)).numpy()
    return found
