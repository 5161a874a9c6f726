"""FleetHandle's pipe to the EngineClient: every message arrives whole, on either event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from server import channel
from server.fleet.far_engine import FleetHandle, FleetState, ReplicaLostError, RetryPolicy
from server.fleet.routing import Job
from server.types import Delta, Request, SamplingParams

LOOPS: tuple[Callable[[], asyncio.AbstractEventLoop], ...] = (
    asyncio.new_event_loop,
    uvloop.new_event_loop,
)
"""The server's is uvloop's where it is installed."""


class _Scripted:
    """far_engine.Replicas that write `tokens`, in Deltas of `size`, and are lost after each number
    of Deltas in `deaths`. `written` is set when a run has sent its last Delta."""

    def __init__(self, tokens: list[int], size: int, deaths: list[int]) -> None:
        self._tokens = tokens
        self._size = size
        self._deaths = deaths
        self.written = threading.Event()
        self.prompts: list[int] = []

    async def stream(self, request: bytes, age_s: float, job: Job) -> AsyncGenerator[bytes, None]:
        order: Request = channel.decode(request)[1]
        self.prompts.append(len(order.prompt_ids))
        dies_after = self._deaths.pop(0) if self._deaths else None
        starts = range(0, len(self._tokens), self._size)
        for num, at in enumerate(starts):
            if num == dies_after:
                raise ReplicaLostError("it was killed")
            ids = tuple(self._tokens[at : at + self._size])
            ended = "length" if at == starts[-1] else None
            delta = Delta(order.request_id, 0, ids, finish_reason=ended)
            yield channel.encode(("deltas", [delta], None))
        self.written.set()

    async def control(self, name: str, payload: Any) -> list[dict[str, Any]]:
        return []

    async def state(self) -> FleetState:
        return FleetState(None, {})


@contextmanager
def _handle(
    replicas: _Scripted, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> Iterator[FleetHandle]:
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    retry = RetryPolicy(max_runs=100, first_pause_s=0.0)
    handle = FleetHandle(replicas, name="m/fleet", loop=loop, retry=retry)
    try:
        yield handle
    finally:
        handle.stop(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


def _submit(handle: FleetHandle) -> None:
    request = Request("r", "task", "m", (1, 2), SamplingParams())
    channel.send(handle.connection, ("submit", request))


def _received(handle: FleetHandle) -> list[int]:
    """The tokens up to the end of the text."""
    ids: list[int] = []
    while True:
        assert handle.connection.poll(10.0), f"nothing comes after {len(ids)} tokens"
        for delta in channel.receive(handle.connection)[1]:
            assert delta.error is None
            ids += delta.token_ids
            if delta.finish_reason is not None:
                return ids


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_reader_that_is_slow_misses_no_delta(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    tokens = list(range(1_000_000, 1_200_000))  # a pipe holds much less
    replicas = _Scripted(tokens, 100, [1000, 1500])
    with _handle(replicas, new_loop) as handle:
        _submit(handle)
        replicas.written.wait(0.5)  # all of it, or until the pipe is full
        assert _received(handle) == tokens
    assert len(replicas.prompts) == 3


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_request_that_arrives_in_parts_is_taken(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    request = Request("r", "task", "m", tuple(range(1000)), SamplingParams())
    near, far = multiprocessing.Pipe()
    with near, far:
        channel.send(near, ("submit", request))
        framed = os.read(far.fileno(), 1 << 16)
    replicas = _Scripted([1, 2, 3], 1, [])
    with _handle(replicas, new_loop) as handle:
        os.write(handle.connection.fileno(), framed[:500])
        time.sleep(0.2)  # the loop reads the first part
        os.write(handle.connection.fileno(), framed[500:])
        assert _received(handle) == [1, 2, 3]
    assert replicas.prompts == [1000]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 4),
    st.lists(st.integers(0, 8), max_size=6),
    st.sampled_from(LOOPS),
)
def test_any_sequence_of_deaths_gives_each_token_once(
    num_tokens: int,
    size: int,
    deaths: list[int],
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    tokens = list(range(num_tokens))
    with _handle(_Scripted(tokens, size, deaths), new_loop) as handle:
        _submit(handle)
        assert _received(handle) == tokens
