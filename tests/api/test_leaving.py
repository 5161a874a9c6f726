"""A client that leaves is no fault: each route counts and logs 499 where its answer was not
complete, streamed or not, and nothing stays behind."""

from __future__ import annotations

import logging
import socket
import struct
from typing import Any

import pytest

from tests.api.chat_models import says
from tests.api.fixtures import BODIES, STREAMED, chat_by
from tests.api.live import LiveServer, post_bytes
from tests.api.test_decisions import scoring
from tests.fakes.scripted_engine import ScriptedEngine
from tests.waiting import wait_until

SEVERAL = {"prompt": ["the", "a"], "n": 2, "max_tokens": 50}
ASKED = {**BODIES, "/v1/completions": SEVERAL}
READ = ("/tokenize", "/detokenize", "/v1/chat/completions/render")
GENERATES = [route for route in BODIES if route not in READ]
WAYS = [*((route, False) for route in GENERATES), *((route, True) for route in STREAMED)]


_SAYS, _SCORES = says(" over the lazy dog" * 10), scoring(-1.0, -2.0, -4.0)
engine, server = chat_by(lambda request: (_SCORES if request.label_ids else _SAYS)(request))


class Visitor:
    """A client on a socket of its own, and what the server told of its request."""

    def __init__(self, server: LiveServer, route: str, log: pytest.LogCaptureFixture) -> None:
        log.set_level(logging.INFO, logger="tailor.http")
        self._server, self._route, self._log = server, route, log
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        self._before = self._counted("499"), self._counted("200")

    def send(self, body: dict[str, Any], num_missing: int = 0) -> None:
        """A POST of this body; of its bytes, the last so many are not sent."""
        data = post_bytes(self._route, {"model": "hermes", **body})
        self._socket.sendall(data[: len(data) - num_missing])

    def read_until(self, text: bytes) -> None:
        seen = b""
        while text not in seen:
            part = self._socket.recv(4096)
            assert part, seen
            seen += part

    def leave(self, *, reset: bool) -> None:
        if reset:
            no_linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        self._socket.close()

    def was_told(self, status: str) -> None:
        """The server counted and logged this status, and nothing as a fault."""
        own = 0 if status == "499" else 1
        wait_until(lambda: self._counted(status) == self._before[own] + 1)
        assert self._counted("499") + self._counted("200") == sum(self._before) + 1
        wait_until(lambda: any(hasattr(record, "status") for record in self._log.records))
        [line] = [record for record in self._log.records if hasattr(record, "status")]
        assert (line.levelno, str(line.status)) == (logging.INFO, status)
        client = self._server.client
        assert client.num_open == len(client.waiting) == client.waiting.num_tokens == 0

    def _counted(self, status: str) -> float:
        name = "tailor_http_responses_total"
        return self._server.sample(name, route=self._route, status=status)


@pytest.mark.parametrize(
    ("route", "reset"), [("/v1/completions", True), *((route, False) for route in BODIES)]
)
def test_before_its_body_is_complete(
    server: LiveServer, route: str, reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    visitor = Visitor(server, route, caplog)
    visitor.send(ASKED[route], num_missing=10)
    visitor.leave(reset=reset)
    visitor.was_told("499")


@pytest.mark.parametrize(
    ("route", "stream", "reset"),
    [*((*way, False) for way in WAYS), ("/v1/completions", False, True), (STREAMED[0], True, True)],
)
def test_while_its_answer_is_made(
    server: LiveServer,
    engine: ScriptedEngine,
    route: str,
    stream: bool,
    reset: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its requests are aborted before another step, and counted as such."""
    engine.gate.clear()
    before = server.sample("tailor_request_outcomes_total", outcome="abort")
    visitor = Visitor(server, route, caplog)
    visitor.send({**ASKED[route], **({"stream": True} if stream else {})})
    num = 2 if route == "/v1/completions" else 1
    wait_until(lambda: len(engine.submitted) == num)
    visitor.leave(reset=reset)
    visitor.was_told("499")
    submitted = [request.request_id for request in engine.submitted]
    wait_until(lambda: sorted(engine.aborted) == sorted(submitted))
    left = server.sample("tailor_request_outcomes_total", outcome="abort")
    assert left == before + num


@pytest.mark.parametrize(
    ("route", "reset"), [(STREAMED[0], True), *((route, False) for route in STREAMED)]
)
def test_in_the_middle_of_a_stream(
    server: LiveServer,
    engine: ScriptedEngine,
    route: str,
    reset: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.step_s = 0.05
    visitor = Visitor(server, route, caplog)
    visitor.send({**ASKED[route], "stream": True})
    visitor.read_until(b"lazy")
    steps = engine.num_steps
    visitor.leave(reset=reset)
    visitor.was_told("499")
    wait_until(lambda: len(engine.aborted) == len(engine.submitted))
    assert engine.num_steps - steps <= 2, "the step under way, and at most one more"


@pytest.mark.parametrize(("route", "stream"), WAYS)
def test_once_it_has_its_answer(
    server: LiveServer, route: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    visitor = Visitor(server, route, caplog)
    visitor.send({**ASKED[route], **({"stream": True} if stream else {})})
    visitor.read_until(b"\r\n0\r\n\r\n" if stream else b'"usage"')
    visitor.leave(reset=True)
    visitor.was_told("200")
