"""Waiting for what no event tells: where tests poll."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = 20.0,
    *,
    pause_s: float = 0.005,
    told: Callable[[], object] = lambda: "the condition did not come true in time",
) -> None:
    """Poll until the condition holds. After the timeout, which a busy machine may need, it fails
    with what `told` says."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, told()
        time.sleep(pause_s)


async def until(
    condition: Callable[[], object], timeout_s: float = 20.0, *, pause_s: float = 0.005
) -> None:
    """The same in an event loop. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(pause_s)
