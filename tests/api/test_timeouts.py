"""Time-outs of tasks, comments that keep a stream alive, and bounds of a connection."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.api.faces import decisions
from server.config import LimitsConfig, ServerConfig, SpeculationConfig, TaskConfig
from server.config.task import TaskLimits
from tests.api.fixtures import over, served_by
from tests.api.live import LiveServer, encode
from tests.api.real_engine import CONTEXT, spec
from tests.api.test_lifecycle import send_request
from tests.api.unharmed import exchange
from tests.fakes.scripted_engine import ScriptedEngine, saying
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

IDS = encode(" over the lazy dog")
LIMITS = {
    "hurried": TaskLimits(total_timeout_s=1.0),
    "patient": TaskLimits(total_timeout_s=60),
    "impatient": TaskLimits(queue_timeout_s=0.4),
    "calm": TaskLimits(queue_timeout_s=1.0),
}
TASKS = {
    name: TaskConfig(name=name, limits=limits, speculation=SpeculationConfig(drafter="suffix"))
    for name, limits in LIMITS.items()
}


# --- total and queue ---


engine, server = served_by(lambda: ScriptedEngine(saying(IDS), step_s=0.02), tasks=TASKS)


def test_a_request_that_takes_too_long_is_a_504_and_is_aborted(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    before = server.sample("tailor_request_outcomes_total", outcome="error")
    began_s = time.monotonic()
    late = server.post(model="hurried", max_tokens=200)
    assert time.monotonic() - began_s > 0.95
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    assert late.headers["x-should-retry"] == "false"
    wait_until(lambda: len(engine.aborted) == 1 and server.client.num_open == 0)
    stream = server.post(model="hurried", max_tokens=200, stream=True)
    assert '"code":"timeout"' in stream.text and stream.text.endswith("data: [DONE]\n\n")
    assert server.post(model="hurried", max_tokens=3).status_code == 200
    assert server.post(model="patient", max_tokens=30).status_code == 200
    wait_until(
        lambda: server.sample("tailor_request_outcomes_total", outcome="error") == before + 2
    )


def test_the_server_s_limit_and_the_task_s_the_tighter_one_counts() -> None:
    engine = ScriptedEngine(saying(IDS), step_s=0.02)
    config = ServerConfig(limits=LimitsConfig(total_timeout_s=0.2))
    with LiveServer([engine], tasks=TASKS, config=config) as live:
        for model in ("tiny", "patient", "hurried"):
            assert live.post(model=model, max_tokens=200).status_code == 504


one_seat = over(
    spec(step_s=0.05, max_num_seqs=1), name="one_seat", tasks=TASKS, max_model_len=CONTEXT
)
"""A real engine with one seat and slow steps: the second request waits."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_is_refused_and_the_others_go_on(
    one_seat: LiveServer, stream: bool
) -> None:
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one_seat.post, max_tokens=40, ignore_eos=True)
        wait_until(lambda: one_seat.client.num_open == 1)
        late = one_seat.post(model="impatient", max_tokens=2, stream=stream)
        assert not first.done()  # it did not wait for the first one's end
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "queue_timeout" and late.headers["retry-after"]
        assert first.result().status_code == 200
    assert one_seat.post(model="impatient", max_tokens=2).status_code == 200
    assert one_seat.client.num_open == 0


def test_a_request_that_has_begun_is_not_in_the_queue_any_more(one_seat: LiveServer) -> None:
    answer = one_seat.post(model="impatient", max_tokens=14, ignore_eos=True)  # 0.7 s of steps
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 14


def test_questions_wait_for_the_engine_and_not_for_those_before_them(
    one_seat: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But all of them together are one request, which may take so long and no longer."""
    monkeypatch.setattr(decisions, "MAX_WAVE_QUESTIONS", 1)
    questions = [{"type": "predicate", "instructions": f"{i}"} for i in range(24)]
    for task, status in (("calm", 200), ("hurried", 504)):
        answer = one_seat.post("/v1/decisions", model=task, input="x", questions=questions)
        assert answer.status_code == status, answer.text


# --- streams ---


def test_a_silent_stream_sends_comments_that_clients_skip() -> None:
    engine = ScriptedEngine(saying(IDS))
    config = ServerConfig(limits=LimitsConfig(sse_keep_alive_s=0.1))
    with LiveServer([engine], config=config) as live:
        engine.gate.clear()
        s = send_request(live.port, stream=True, max_tokens=3)
        got = b""
        while got.count(b": keep-alive\n\n") < 3:
            got += s.recv(4096)
        assert b"data:" not in got
        engine.gate.set()
        while not got.endswith(b"0\r\n\r\n"):
            part = s.recv(65536)
            assert part, got
            got += part
        s.close()
        events = [e for e in got.split(b"\n\n") if b"data: {" in e]
        assert len(events) == 3 and got.count(b"data: [DONE]\n\n") == 1
        engine.step_s = 0.3
        client = live.openai()
        chunks = client.completions.create(model="tiny", prompt="the", stream=True, max_tokens=3)
        assert len(list(chunks)) == 3


def test_a_stream_that_speaks_has_no_comments_and_0_is_off() -> None:
    config = ServerConfig(limits=LimitsConfig(sse_keep_alive_s=1.0))
    with LiveServer([ScriptedEngine(saying(IDS), step_s=0.02)], config=config) as live:
        assert "keep-alive" not in live.post(stream=True, max_tokens=60).text
    config = ServerConfig(limits=LimitsConfig(sse_keep_alive_s=0))
    with LiveServer([ScriptedEngine(saying(IDS), step_s=0.3)], config=config) as live:
        assert "keep-alive" not in live.post(stream=True, max_tokens=2).text


# --- connections ---


STRICT = LimitsConfig(
    max_header_bytes=4096, header_timeout_s=0.8, send_timeout_s=0.4, body_timeout_s=0.5
)
strict = over(ScriptedEngine(saying(IDS)), name="strict", config=ServerConfig(limits=STRICT))


def connect(live: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=10)


def check_json(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"content-type: application/json" in head and b"x-request-id: req-" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code


def test_slow_headers_time_out(strict: LiveServer) -> None:
    before = strict.sample("tailor_http_responses_total", code="request_timeout")
    answer = exchange(strict, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n")
    check_json(answer, 408, "request_timeout")
    with connect(strict) as s:  # byte by byte is no better
        began_s = time.monotonic()
        s.settimeout(0.02)
        answer = b""
        for byte in b"GET /v1/models HTTP/1.1\r\n" + b"a: b\r\n" * 1000:
            try:
                s.send(bytes([byte]))
                answer = s.recv(4096)
                break
            except TimeoutError:
                continue
        assert time.monotonic() - began_s < 30  # all of it would take two minutes
        check_json(answer, 408, "request_timeout")
    assert strict.sample("tailor_http_responses_total", code="request_timeout") == before + 2


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"\r\n\r\n\r\n"])
def test_an_idle_connection_is_closed(strict: LiveServer, sent: bytes) -> None:
    answer = exchange(strict, sent)
    assert not answer or answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("rest", [b"a", b"a" * 100], ids=["a part", "all"])
def test_a_body_behind_its_answer_keeps_no_connection_open(strict: LiveServer, rest: bytes) -> None:
    with connect(strict) as s:
        s.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
        answer = b""
        while b"not_found" not in answer:
            answer += s.recv(4096)
        s.sendall(rest)
        assert s.recv(4096) == b""


def test_a_connection_that_is_used_again_is_not_cut(strict: LiveServer) -> None:
    with httpx.Client() as client:
        for _ in range(4):
            assert client.get(strict.url + "/v1/models").status_code == 200
            time.sleep(0.3)


def test_a_long_answer_outlives_the_header_timeout() -> None:
    limits = LimitsConfig(header_timeout_s=0.2)
    engine = ScriptedEngine(saying(IDS), step_s=0.02)
    with LiveServer([engine], config=ServerConfig(limits=limits)) as live:
        assert live.post(max_tokens=20).status_code == 200
        assert live.post(max_tokens=20, stream=True).text.endswith("[DONE]\n\n")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(1000)) + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * 500_000,
    ],
    ids=["a long value", "a long path", "many", "without an end"],
)
def test_large_headers_are_a_431(strict: LiveServer, head: bytes) -> None:
    answer = exchange(strict, head)
    if answer:  # else it hung up while we were still sending
        check_json(answer, 431, "headers_too_large")


@pytest.mark.parametrize("what", ["trailers", "extension"])
def test_trailers_and_chunk_extensions_are_bounded(strict: LiveServer, what: str) -> None:
    with connect(strict) as s:
        s.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        sent = 0
        try:
            s.sendall(b"0\r\nx: " if what == "trailers" else b"1;")
            while sent < 50_000_000:
                s.sendall(b"a" * 65536)
                sent += 65536
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert sent < 20_000_000
    assert strict.post(max_tokens=1).status_code == 200


def test_small_chunks_are_no_attack(strict: LiveServer) -> None:
    body = json.dumps({"model": "tiny", "prompt": "the", "max_tokens": 1, "user": "u" * 3000})
    with connect(strict) as s:
        s.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
            + b"".join(b"1\r\n%c\r\n" % byte for byte in body.encode())
            + b"0\r\n\r\n"
        )
        assert s.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_cut_off(
    strict: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tailor.http")
    one = len(strict.http.get(strict.url + "/openapi.json").content)
    num = 1 + 30_000_000 // one
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", strict.port))
        s.settimeout(30)
        s.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * num)
        wait_until(lambda: "cut off" in caplog.text, 30)
        got = 0
        with contextlib.suppress(ConnectionError):
            while part := s.recv(1 << 20):
                got += len(part)
    assert got < num * one
