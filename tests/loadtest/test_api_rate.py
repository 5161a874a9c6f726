"""The API's rate: which step an event is of, and what is told of delays."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from loadtest import api_rate
from loadtest.paced import PacedRunner, tick_of
from loadtest.peer import PeerFailed
from server.types import ModelInfo
from tests.model.batches import BatchBuilder, Pages, draw_params

INFO = ModelInfo("m", 4096, 64, (0,), 8, 16, "cpu", "float32", "fp", 2, 64)


def event(now: float, *token_ids: int) -> tuple[float, bytes]:
    data = json.dumps({"choices": [{"text": "x", "token_ids": token_ids}]})
    return now, f"5a\r\ndata: {data}\n\n".encode()


def test_a_token_tells_the_step_that_drew_it() -> None:
    for tick in (7, 999, 1000, 123_456):
        for delay in (0.0001, 0.004, 2.5, 9.9):
            assert tick_of(1000 + tick % 1000, tick / 100.0 + delay, 100.0) == tick


def test_a_paced_step_draws_its_number_when_it_ends() -> None:
    runner = PacedRunner(INFO, rate=200.0)
    assert runner.info.fingerprint != INFO.fingerprint, "its costs are not the model's"
    builder = BatchBuilder()
    rows = builder.add_rows(Pages(64, seed=1).sequence(3), [5, 6, 7], 0)
    params = builder.add_params(draw_params())
    for row in rows:
        builder.draw(row, params)
    seen = []
    for _ in range(2):
        runner.launch(builder.build())
        drawn = runner.wait()
        now = time.perf_counter()
        assert len(set(drawn.token_ids.tolist())) == 1 and drawn.token_ids.dtype == np.int32
        seen.append(tick_of(int(drawn.token_ids[0]), now, 200.0))
        assert seen[-1] / 200.0 <= now
    assert seen[0] < seen[1]


def test_figures_are_of_the_time_in_which_all_streams_run() -> None:
    one = [event(t / 100 + 0.002, 1000 + t) for t in range(10, 40)]
    # Of the other one, two tokens come at a time: the first of them has waited for a step.
    two = [event((t + 1) / 100 + 0.004, 1000 + t, 1001 + t) for t in range(10, 40, 2)]
    two.append((0.5, b"e\r\ndata: [DONE]\n\n"))
    streams = [api_rate.tokens_of(one), api_rate.tokens_of(two)]
    found = api_rate.report(streams, 0.2, 0.4, 100.0)
    assert found["steps_per_s"] == pytest.approx(100.0, abs=6)
    assert found["tokens_per_s"] == pytest.approx(200.0, abs=10)
    assert found["events_per_s"] == pytest.approx(150.0, abs=6)
    assert found["kept_up"] == pytest.approx(1.0, abs=0.05)
    assert 2.0 <= found["delay_ms"]["p50"] <= 4.0
    with pytest.raises(PeerFailed, match="no token"):
        api_rate.report(streams, 5.0, 6.0, 100.0)
