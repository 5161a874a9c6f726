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
    with what `told` says. What takes long to ask, as a page of metrics does, is asked more seldom:
    it would take a core from what is waited for."""
    end_s = time.monotonic() + timeout_s
    asked_s = time.monotonic()
    while not condition():
        answered_s = time.monotonic()
        assert answered_s < end_s, told()
        time.sleep(max(pause_s, min(2 * (answered_s - asked_s), 0.05)))
        asked_s = time.monotonic()


async def until(
    condition: Callable[[], object], timeout_s: float = 20.0, *, pause_s: float = 0.005
) -> None:
    """The same in an event loop. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(pause_s)
