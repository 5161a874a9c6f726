"""What an unfriendly internet sends. After each attack the server answers a normal request, the KV
cache is empty, nothing is open and the memory is where it was.

Refusals by field are in test_errors.py, clients that leave in test_leaving.py and
test_end_to_end.py, what keys learn of each other in test_isolation.py, slow and large HTTP in
test_timeouts.py, chats, tools and grammars in test_attacks_chat.py, task names and uploads in
test_tasks.py, configs in tests/setup; here is the rest of the list.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from server import logs
from server.api import bodies, grammars, route_context
from server.config import LimitsConfig
from tests.api.fixtures import noted, over
from tests.api.live import LiveServer, as_key, keyed
from tests.api.real_engine import CONTEXT, spec
from tests.api.test_errors import raw
from tests.api.unharmed import exchange, unharmed_by
from tests.waiting import wait_until

pytestmark = pytest.mark.attack

LIMITS = LimitsConfig(max_body_bytes=8 << 20, body_timeout_s=1.0, header_timeout_s=2.0)
KEY = as_key("sk-one")


server = over(spec(), config=keyed("one", limits=LIMITS), max_model_len=CONTEXT)


@pytest.fixture(autouse=True)
def unharmed(server: LiveServer) -> Iterator[None]:
    """Asserts after each test that the attack left nothing behind."""
    with unharmed_by(
        server, lambda: post(server, prompt="the quick brown", max_tokens=3, ignore_eos=True)
    ):
        yield


def post(live: LiveServer, **body: Any) -> httpx.Response:
    return live.post("/v1/completions", "sk-one", **body)


# --- values ---

INTEGERS = (
    "n", "best_of", "logprobs", "max_tokens", "min_tokens", "top_k", "seed", "priority",
    "speculation.max_draft_tokens",
)  # fmt: skip
NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
LITERALS = (
    *(str(10**k) for k in (6, 9, 18, 30)), "9" * 400, "-1", "-1000000", str(-(10**18)),
    "1.5", "1e308", "-1e308", "1e999", "NaN", "Infinity", "-Infinity", "true", "false", '"5"',
    '""', "[]", "[1]", "{}", '{"a": 1}', "0", "-0", "-0.0", "1e-400",
)  # fmt: skip


def test_no_number_breaks_it(server: LiveServer) -> None:
    for field, literal in itertools.product((*INTEGERS, *NUMBERS), LITERALS):
        outer, _, inner = field.partition(".")
        value = f'{{"{inner}": {literal}}}' if inner else literal
        base = "" if outer == "max_tokens" else '"max_tokens": 2, '
        content = f'{{"model": "tiny", "prompt": "a", {base}"{outer}": {value}}}'
        began_s = time.process_time()
        answer = raw(server, content.encode(), **KEY)
        assert time.process_time() - began_s < 5, (field, literal)
        assert answer.status_code in (200, 400), (field, literal, answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["code"] == "invalid_body" or error["param"].startswith(outer), error
        elif field in INTEGERS and outer not in ("seed", "priority", "top_k"):
            assert literal in ("0", "-0"), (field, literal)


MANY = 20_000


LARGE: tuple[Callable[[], dict[str, Any]], ...] = (
    lambda: {"prompt": ["a"] * MANY},
    lambda: {"prompt": [[1]] * MANY},
    lambda: {"prompt": [[]] * MANY},
    lambda: {"prompt": [1] * MANY},
    lambda: {"prompt": list(range(MANY))},
    lambda: {"prompt": ["a", *[1] * MANY]},
    lambda: {"prompt": "a" * (4 << 20)},
    lambda: {"prompt": "\U0001f600" * (1 << 19)},
    lambda: {"prompt": ["a" * 100] * 256, "n": 128, "max_tokens": 100},
    lambda: {"prompt": "a", "logit_bias": {str(i): 1 for i in range(MANY)}},
    lambda: {"prompt": "a", "logit_bias": {"1" * 1_000_000: 1}},
    lambda: {"prompt": "a", "stop": "x" * (1 << 20)},
    lambda: {"prompt": "a", "stop": ["x" * (1 << 20)] * 4},
    lambda: {"prompt": "a", "stop": ["x"] * MANY},
    lambda: {"prompt": "a", "stop_token_ids": [1] * MANY},
    lambda: {"prompt": "a", "allowed_token_ids": [1] * 1_000_000},
    lambda: {"prompt": "a", "model": "x" * (1 << 20)},
    lambda: {"prompt": "a", "cache_salt": "x" * (1 << 20)},
    lambda: {"prompt": "a", "context": {"after": "x" * (1 << 20)}},
    lambda: {"prompt": "a", **{f"field{i}": 1 for i in range(MANY)}},
    lambda: {"prompt": "a", "speculation": {f"field{i}": 1 for i in range(MANY)}},
)


def test_large_things_are_refused_quickly(server: LiveServer) -> None:
    for i, made in enumerate(LARGE):
        body = made()
        began_s = time.process_time()
        answer = post(server, **body)
        assert answer.status_code == 400, i
        assert time.process_time() - began_s < 2, i
        assert len(answer.text) < 1000, i


def test_no_op_fields_may_be_large_and_are_let_go(server: LiveServer) -> None:
    body: dict[str, Any] = {"metadata": {str(i): "v" for i in range(MANY)}, "user": "u" * (1 << 20)}
    assert post(server, prompt="a", max_tokens=1, **body).status_code == 200


# --- bodies ---


def long_bodies() -> Iterator[bytes]:
    """One at a time: together they are 30 MB."""
    yield b'{"b":"' + b"[" * 65 + b'","a":"' + b'\\"' * 500_000
    yield b'{"b":"' + b"[" * 65 + b'","a":"' + b"\\" * 500_001
    yield b'"' * 1_000_001 + b"[" * 65
    yield b"[" * 64 + b'"' + b'\\"[' * 300_000
    yield b'{"a":' * 1_000_000
    yield b'{"prompt": "a", "seed": ' + b"9" * 4_000_000 + b"}"
    yield b'{"temperature": 0.' + b"1" * 4_000_000 + b"}"
    yield b'{"a": ' + b" " * 4_000_000 + b"1}"
    yield b'{"a": [' + b"[]," * 2_000_000 + b"1]}"
    yield b"{" + b",".join(b'"a%d":1' % i for i in range(200_000)) + b',"a7":1}'
    yield b"\x00" * 1_000_000


def test_no_body_takes_long_to_refuse(server: LiveServer) -> None:
    for i, content in enumerate(long_bodies()):
        began_s = time.process_time()
        answer = raw(server, content, **KEY)
        assert answer.status_code == 400, i
        assert time.process_time() - began_s < 3, i


def test_large_bodies_are_read_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_thread(*_: Any) -> str:
        return threading.current_thread().name

    threads = [
        noted(monkeypatch, owner, name, by_thread)
        for owner, name in ((route_context, "parse_object"), (grammars, "prepared"))
    ]
    for num in (1, 1 << 17):
        schema = {"type": "null", "description": "x" * num}
        post(server, prompt="a", structured_outputs={"json": schema})  # it has no grammars
    for names in threads:
        assert [name.startswith("tokenize") for name in names] == [False, True]


def test_others_go_on_while_numbers_of_a_large_body_are_read() -> None:
    is_read, turns = threading.Event(), list[float]()

    def others() -> None:
        while not is_read.wait(0.001):
            turns.append(time.monotonic())

    thread = threading.Thread(target=others)
    thread.start()
    body = bodies.parse_object(b'{"prompt": [' + b"1," * (1 << 21) + b"1]}")
    is_read.set()
    thread.join()
    assert len(body["prompt"]) == (1 << 21) + 1 and len(turns) > 20


# --- ways around the key ---

PATHS = (
    "/v1/%6dodels", "/v1/%2e%2e/v1/models", "/./v1/models", "/v1/./models", "/v1//models",
    "/health/../v1/models", "/health%2f..%2fv1%2fmodels", "/health;/v1/models", "/HEALTH",
    "/health%00", "/health%20", "/health%0d%0a", "/ready/v1/models", "/%68ealth/x", "/metrics/x",
    "/v1/models%2ftiny", "/v1/models?x=/health", "/v1/models#/health", "/\\health", "/v1\\models",
    "/v1/models/tiny", "/v1/completions", "//v1/completions", "/tokenize", "/detokenize",
    "/version", "/openapi.json", "/nothing", "//health", "/health/", "/%2fhealth",
    "/v1/tasks", "/v1/tasks/..%2fmodels", "/v1/models/..%2f..%2fetc%2fpasswd",
)  # fmt: skip


def test_no_spelling_of_a_path_opens_a_route(server: LiveServer) -> None:
    for path in PATHS:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"):
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            answer = exchange(server, head.encode())
            assert answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), (method, path, answer)


HEADS = (
    "GET http://x/v1/models HTTP/1.1\r\nhost: x",
    "GET http://127.0.0.1/health/../v1/models HTTP/1.1\r\nhost: x",
    "GET //health/v1/models HTTP/1.1\r\nhost: /health",
    "GET /v1/models HTTP/1.1\r\nhost: x/health?",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nx-original-url: /health",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nx-rewrite-url: /health",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nx-forwarded-prefix: /health",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nx-http-method-override: GET",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 127.0.0.1",
    "GET /v1/models HTTP/1.0",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer x\r\nauthorization: Bearer sk-one",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-one, Bearer x",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-one,sk-two",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-onesk-two",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer SK-ONE",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Basic c2stb25l",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\napi-key: sk-one",
    "GET /v1/models?api_key=sk-one HTTP/1.1\r\nhost: x",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\ncookie: authorization=Bearer sk-one",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13",
    "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\n"
    "upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__",
)


def test_no_header_opens_a_route(server: LiveServer) -> None:
    for head in HEADS:
        answer = exchange(server, f"{head}\r\nconnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 401 "), (head, answer[:200])
        assert b'"code":"invalid_api_key"' in answer, head
        assert answer.count(b"HTTP/1.1 ") == 1, head


# --- HTTP that has two meanings, or none ---

AUTH = b"host: x\r\nauthorization: Bearer sk-one\r\ncontent-type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + AUTH
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-one\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
AMBIGUOUS = (
    b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}   ",
    b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    b"content-length: -1\r\n\r\n",
    b"content-length: +5\r\n\r\n{}   ",
    b"content-length: 99999999999999999999999\r\n\r\n",
    CHUNKED + b"-1\r\n",
    CHUNKED + b"ffffffffffffffffff\r\n",
    CHUNKED + b"2\r\n{}X\r\n0\r\n\r\n",
)
"""What may stand behind POST, so that two readers disagree where the hidden request begins."""


NO_HTTP = (
    *(POST + rest + HIDDEN for rest in AMBIGUOUS),
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\na: b\r\n c: folded\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\na\x00b: c\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\na: b\rc: d\r\n\r\n",
    b"GET /v1/models\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\n\r\n",
    b"GET\t/v1/models\tHTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/2.0\r\n" + AUTH + b"\r\n",
    b"GET /v1/models HTTP/0.9\r\n" + AUTH + b"\r\n",
    b"GET /v1/models HTTP/1.1\r\nauthorization: Bearer sk-one\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: y\r\n" + AUTH + b"\r\n",
    b"GET /v1/models HTTP/1.1\r\nexpect: 200-ok\r\n" + AUTH + b"\r\n",
    b"FROB /v1/models HTTP/1.1\r\n\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    b"\x00" * 1000,
    b"SSH-2.0-OpenSSH_9.6\r\n",
)


def test_http_with_two_meanings_or_none_is_refused_once(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    for data in NO_HTTP:
        answer = exchange(server, data)
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert not warned, data
        assert answer.count(b"HTTP/1.1 ") == 1, (data, answer)
        assert not answer.startswith(b"HTTP/1.1 200 "), data
        assert b'"object": "list"' not in answer, data
        head, _, body = answer.partition(b"\r\n\r\n")
        if b"HTTP/1.1 4" in head:
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}, data
            assert b"x-request-id:" in head, data


def test_garbage_after_a_request_does_not_cut_its_answer(server: LiveServer) -> None:
    content = b'{"model": "tiny", "prompt": "a", "max_tokens": 2}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as s:
        s.sendall(POST + b"content-length: %d\r\n\r\n%b" % (len(content), content))
        assert s.recv(65536).startswith(b"HTTP/1.1 200 ")
        s.sendall(b"\x00\x01garbage\r\n\r\n")
        answer = s.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"invalid_http" in answer


def test_many_connections_and_pipelined_requests(server: LiveServer) -> None:
    one = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-one\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    answer = exchange(server, one * 300 + last)
    assert answer.count(b"HTTP/1.1 200 ") == 301
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for s in held:
            s.sendall(b"GET /v1/models HTTP/1.1\r\n")
        assert post(server, prompt="a", max_tokens=1).status_code == 200
    finally:
        for s in held:
            s.close()


# --- logs ---


@pytest.mark.parametrize("format", ["console", "json"])
def test_nothing_from_a_client_forges_a_log_line(server: LiveServer, format: Any) -> None:
    stream = io.StringIO()
    logs.configure(format, "info", stream=stream)  # the root logger's handlers come back
    evil = "%0d%0a2026-01-01T00:00:00Z [info] FORGED%1b[31m%9b0m%e2%80%a8%00"
    forged: list[dict[Any, Any]] = [
        KEY,
        {"x-request-id": "a\tb"},
        {**KEY, "x-request-id": b"\x85FORGED"},
    ]
    for headers in forged:
        for path in (f"/{evil}", f"/v1/models/{evil}", "/v1/completions"):
            httpx.post(server.url + path, content=b"\x1b[31m", headers=headers)
    post(server, prompt="the secret \x1b[31m word", model="\x1b[31mFORGED\r\n", user="\r\nu")
    post(server, prompt="the secret word", max_tokens=1)
    exchange(server, b"\x1b[31mFORGED\r\n\r\n")
    wait_until(lambda: "completion_tokens" in stream.getvalue())
    logging.getLogger("uvicorn").setLevel(logging.NOTSET)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 12
    for line in lines:
        assert line.isprintable() and "secret" not in line and "sk-one" not in line
        if format == "json":
            assert {"event", "level", "timestamp", "logger"} <= set(json.loads(line))
        else:
            assert re.match(r"20\d\d-\d\d-\d\dT[\d:.]+Z \[", line), line
    assert any("FORGED" in line for line in lines)  # it was there, in its place
