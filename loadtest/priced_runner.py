"""Steps that take what a table says: what an engine does, told apart from what its machine does.

Within `priced_time`, time.perf_counter is a clock of this thread's CPU seconds that stands still
while a PricedRunner computes and then goes on by the table's seconds for that step. The host's own
work is done for real, behind steps that have filled the caches, and work that is done while a step
is under way costs nothing until the step would have ended. So an engine's times, and all that its
planner decides by them, are hardly changed by what else the machine does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from server.engine.batch import Batch, Drawn, Runner
from server.engine.budget import CostTable


class PricedClock:
    """Seconds; of the thread that made it. `skip` leaves its CPU seconds out."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def now(self) -> float:
        """CPU seconds, and those that were priced."""
        return time.thread_time() + self._ahead_s

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        """What is done within it takes no time."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._ahead_s -= time.thread_time() - began

    def reach(self, when_s: float) -> None:
        """Go on to a time, unless it is over."""
        self._ahead_s += max(0.0, when_s - self.now())


class PricedRunner:
    """A Runner whose steps take what `cost` says. undrawn_row_s: as in ServedBy."""

    def __init__(
        self, runner: Runner, clock: PricedClock, cost: CostTable, undrawn_row_s: float = 0.0
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._cost = cost
        self._undrawn_row_s = undrawn_row_s
        self._flying: deque[tuple[float, float]] = deque()  # (launched at, seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def seconds(self, batch: Batch) -> float:
        """What a step takes."""
        num_keys = int(batch.prefix_len.sum()) + len(batch.path_slots)
        whole = self._cost.cost(batch.num_rows, num_keys)
        return max(0.5 * whole, whole - self._undrawn_row_s * (batch.num_rows - batch.num_draws))

    def launch(self, batch: Batch) -> None:
        """As the runner's."""
        with self._clock.skip():
            self._runner.launch(batch)
            seconds = self.seconds(batch)
        self._flying.append((self._clock.now(), seconds))

    def wait(self) -> Drawn:
        """As the runner's; the clock then stands at the step's end, or later."""
        with self._clock.skip():
            drawn = self._runner.wait()
        launched_s, seconds = self._flying.popleft()
        self._clock.reach(launched_s + seconds)
        return replace(drawn, model_s=seconds, head_s=0.0)


@contextlib.contextmanager
def priced_time() -> Iterator[PricedClock]:
    """time.perf_counter of this thread is the clock that it gives."""
    clock, own, real = PricedClock(), threading.get_ident(), time.perf_counter
    time.perf_counter = lambda: clock.now() if threading.get_ident() == own else real()
    try:
        yield clock
    finally:
        time.perf_counter = real
