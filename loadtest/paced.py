"""`tailor` with engines whose steps compute nothing and end at a steady pace (peers/paced.sh).

    STEPS_PER_S=100 python -m loadtest.paced serve --model smollm2-135m-instruct

The API process, the channel and the engine's loop are the real ones, so a load test of this server
says what they cost without a model: CPU seconds per 1,000 tokens, and whether as many tokens arrive
as steps end. Step number n ends at n / rate on the monotonic clock; a step that is late ends at the
next such time.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from server.commands import cli
from server.engine.batch import Batch, Drawn, Int32
from server.types import ModelInfo

RATE = "STEPS_PER_S"
"""Environment variable: steps a second."""

_ID = 1000
"""What every row draws."""


class PacedRunner:
    """A Runner that draws one id everywhere. info: of the model that it stands for."""

    head_row_bytes = 0

    def __init__(self, info: ModelInfo, rate: float) -> None:
        # What is measured of it is kept apart from the model's.
        self.info = replace(info, fingerprint=f"paced-{rate:g}")
        self._rate = rate
        self._batch: Batch | None = None

    def launch(self, batch: Batch) -> None:
        """Begin a step."""
        self._batch = batch

    def wait(self) -> Drawn:
        """Its draws, when it ends."""
        assert self._batch is not None
        began_s = time.perf_counter()
        tick = int(began_s * self._rate) + 1
        time.sleep(max(0.0, tick / self._rate - began_s))
        num = self._batch.num_draws
        none: Int32 = np.zeros(0, np.int32)
        return Drawn(
            np.full(num, _ID, np.int32), np.full(num, np.nan, np.float32),
            np.zeros(num, np.int32), [()] * num, none.astype(np.float32), none, [],
            time.perf_counter() - began_s,
        )  # fmt: skip

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """There is no KV."""

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """There is no KV."""

    def close(self) -> None:
        """There is no device."""


def _pace() -> None:
    """From now on this process, an engine's, has paced runners."""
    from server.model import build

    real: Any = build.build_runner

    def paced(spec: Any) -> Any:
        runner = real(spec)
        runner.close()
        return PacedRunner(runner.info, float(os.environ.get(RATE, "100")))

    build.build_runner = paced


if __name__ == "__mp_main__":  # in an engine's process, which imports what the API's runs
    _pace()
if __name__ == "__main__":
    sys.exit(cli.main())
