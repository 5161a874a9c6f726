"""FleetHandle: what replicas send reaches the EngineClient once, on either event loop."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server import channel
from server.errors import error_for_engine_code
from server.fleet import far_engine
from server.fleet.desk import FleetState
from server.fleet.far_engine import FleetHandle, ReplicaLostError
from server.fleet.routing import Job
from server.types import Delta, FinishReason, Request, SamplingParams
from tests.fakes.fake_runner import fake_info
from tests.profiles import examples

LOOPS: tuple[Callable[[], asyncio.AbstractEventLoop], ...] = (
    asyncio.new_event_loop,
    uvloop.new_event_loop,
)
"""The server's is uvloop's where it is installed."""


class _Scripted:
    """far_engine.Replicas that write `tokens`, in Deltas of `size`, and are lost after each number
    of Deltas in `deaths`."""

    def __init__(self, tokens: list[int], size: int, deaths: list[int]) -> None:
        self._tokens = tokens
        self._size = size
        self._deaths = deaths
        self.queue_timeouts_s: list[float] = []
        """Of each run."""

    async def stream(self, request: bytes, age_s: float, job: Job) -> AsyncGenerator[bytes, None]:
        order: Request = channel.decode(request)[1]
        self.queue_timeouts_s.append(order.queue_timeout_s)
        dies_after = self._deaths.pop(0) if self._deaths else None
        starts = range(0, len(self._tokens), self._size)
        yield channel.encode(("deltas", []))  # it has begun
        for num, at in enumerate(starts):
            if num == dies_after:
                raise ReplicaLostError("it was killed")
            ids = tuple(self._tokens[at : at + self._size])
            ended: FinishReason | None = "length" if at == starts[-1] else None
            delta = Delta(order.request_id, 0, ids, finish_reason=ended)
            yield channel.encode(("deltas", [delta]))
        if dies_after == len(starts):
            raise ReplicaLostError("it was killed behind its last token")

    async def control(self, name: str, payload: Any) -> list[dict[str, Any]]:
        return []

    async def state(self) -> FleetState:
        return FleetState(None, {})


class _Client:
    """Where an EngineClient would be: a handle, and what it has told."""

    def __init__(self, handle: FleetHandle, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = handle
        self._loop = loop
        self._told: queue.SimpleQueue[channel.Message] = queue.SimpleQueue()
        loop.call_soon_threadsafe(handle.open, self._told.put)

    def submit(self) -> None:
        request = Request("r", "task", "m", (1, 2), SamplingParams(), queue_timeout_s=60.0)
        self._loop.call_soon_threadsafe(self._handle.send, ("submit", request))

    def told(self) -> channel.Message:
        """The next message."""
        return self._told.get(timeout=10.0)

    def error(self) -> Delta:
        """The Delta that ends the request."""
        delta: Delta = self.told()[1][0]
        return delta

    def received(self) -> list[int]:
        """The tokens up to the end of the text."""
        ids: list[int] = []
        while True:
            for delta in self.told()[1]:
                assert delta.error is None
                ids += delta.token_ids
                if delta.finish_reason is not None:
                    return ids


@contextmanager
def _client(
    replicas: _Scripted,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    max_wait_s: float = 60.0,
) -> Iterator[_Client]:
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    handle = FleetHandle(
        replicas, name="m/fleet", loop=loop, max_runs=100, max_wait_s=max_wait_s, first_pause_s=0.0
    )
    try:
        yield _Client(handle, loop)
    finally:
        handle.stop(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


class _Failing(_Scripted):
    """Every stream ends with an error."""

    error: Exception = ReplicaLostError("it is full", taken=False)

    async def stream(self, request: bytes, age_s: float, job: Job) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.01)
        raise self.error
        yield b""


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (_Failing.error, (503, "no_engine", 1.0, "No replica of")),  # it may come again
        (ValueError("no message"), (500, "engine_died", None, "The engine died")),
        (ReplicaLostError("each is killed"), (500, "engine_died", None, "The engine died")),
    ],
)
def test_a_request_that_no_replica_can_serve_fails(
    error: Exception, wanted: tuple[int, str, float | None, str]
) -> None:
    replicas = _Failing([], 1, [])
    replicas.error = error
    with _client(replicas, uvloop.new_event_loop, max_wait_s=0.1) as client:
        client.submit()
        delta = client.error()
    told = error_for_engine_code(delta.error_code, delta.error or "")
    assert (told.status, told.code, told.retry_after_s) == wanted[:3]
    assert told.message.startswith(wanted[3])


class _Silent(_Scripted):
    """Who knows how the replicas are tells it once."""

    is_known = False

    async def state(self) -> FleetState:
        if self.is_known:
            await asyncio.sleep(3600.0)
        self.is_known = True
        return FleetState(fake_info(vocab_size=64), {})


def test_an_ingress_lives_while_nobody_knows_how_its_replicas_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_POLL_S", "_STATE_S"):
        monkeypatch.setattr(far_engine, name, 0.01)
    with _client(_Silent([], 1, []), uvloop.new_event_loop) as client:
        assert [client.told()[0] for _ in range(3)] == ["ready", "beat", "beat"]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 4),
    st.lists(st.integers(0, 8), max_size=6),
    st.sampled_from(LOOPS),
)
@example(20_000, 10, [0, 1500, 2000], LOOPS[0])
@example(20_000, 10, [0, 1500, 2000], LOOPS[1])
def test_any_sequence_of_deaths_gives_each_token_once(
    num_tokens: int,
    size: int,
    deaths: list[int],
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    tokens = list(range(1_000_000, 1_000_000 + num_tokens))
    replicas = _Scripted(tokens, size, [*deaths])
    with _client(replicas, new_loop) as client:
        client.submit()
        assert client.received() == tokens
    # It has waited for its first step once, and is not run again behind its last token.
    lost = itertools.takewhile(lambda after: after * size < num_tokens, deaths)
    assert replicas.queue_timeouts_s == [60.0, *(0.0 for _ in lost)]
