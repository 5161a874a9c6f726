"""Every refusal: its status, its shape, the field it names; and that the server lives on."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest

from server.api.app import ELSEWHERE
from server.config import (
    KeyConfig,
    LimitsConfig,
    SamplingDefaults,
    ServerConfig,
    SpeculationConfig,
    TaskConfig,
)
from server.config.server import CorsConfig, MetricsConfig
from server.config.task import TaskLimits
from server.errors import TailorError
from tests.api.fixtures import over, served_by
from tests.api.live import LiveServer, encode, keyed
from tests.api.unharmed import exchange
from tests.fakes.scripted_engine import ScriptedEngine, saying

LIMITS = LimitsConfig(
    max_body_bytes=200_000,
    max_prompts=8,
    max_choices=4,
    max_request_tokens=2000,
    body_timeout_s=0.5,
)
TASK = TaskConfig(
    name="strict",
    description="A task with limits",
    sampling=SamplingDefaults(temperature=0.0, max_tokens=4, stop=("\n",), seed=11),
    limits=TaskLimits(
        max_tokens=8, max_prompts=2, max_choices=1, max_logprobs=2, max_draft_tokens=6,
        max_prompt_tokens=10,
    ),
    speculation=SpeculationConfig(
        drafter="suffix", max_draft_tokens=6, allowed_drafters=("suffix",)
    ),
)  # fmt: skip


engine, server = served_by(
    lambda: ScriptedEngine(saying(encode(" over the lazy dog"))),
    config=ServerConfig(limits=LIMITS),
    tasks={"strict": TASK},
)


def check(response: httpx.Response, status: int, code: str | None, param: str | None) -> str:
    """The one error shape; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert len(error["message"]) < 500
    return str(error["message"])


def refused(bodies: Mapping[str, Sequence[tuple[dict[str, Any], str]]]) -> pytest.MarkDecorator:
    """A case for each body: `code`, `body` and `param`, the field that the refusal names.

    bodies: by the code that they are refused with.
    """
    rows = [(code, *row) for code, of_code in bodies.items() for row in of_code]
    return pytest.mark.parametrize(("code", "body", "param"), rows, ids=lambda v: str(v)[:40])


BAD_VALUES: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, True, "5", 10**18, 0, []],
    "temperature": [-0.1, 2.1, "1", True, 1e308],
    "top_p": [-0.1, 1.1, False],
    "n": [0, -1, 10**6, True, 1.0],
    "best_of": [0, 10**18, True],
    "logprobs": [-1, 21, True, 10**18],
    "presence_penalty": [2.5, -2.5],
    "frequency_penalty": [1e308],
    "repetition_penalty": [0, -1, 1e9],
    "top_k": [-2, 2**40, 1.5],
    "min_p": [1.5, -0.5],
    "min_tokens": [-1, 10**12, 200],
    "seed": [2**63, 1.5, True, "x"],
    "stop": [[str(i) for i in range(17)], "", [""], "x" * 1001],
    "stop_token_ids": [list(range(300)), [400]],
    "allowed_token_ids": [[], [399, 400]],
    "logit_bias": [
        {"400": 1}, {"-1": 1}, {"x": 1}, {"1": 1, "01": 2}, {str(i): 0 for i in range(1025)},
        {"\u0661": 1},
    ],
    "stream": ["yes", 1],
    "echo": [0],
    "ignore_eos": ["no"],
    "priority": [2**40],
    "cache_salt": ["x" * 257, 5],
    "user": [5],
    "prompt": [
        [], [[]], None, 5, {"a": 1}, ["a", 1], [1, "a"], [True], [[1, True]], [-1], [400],
        [10**18], [1.5], [[1], "a"], "", [[1], []], [None],
    ],
    "model": ["", 5],
    "speculation": [{"drafter": "psychic"}],
    "stream_options": [{"include_usage": True}],
}  # fmt: skip


@pytest.mark.parametrize("field", BAD_VALUES)
def test_a_bad_value_is_a_400_that_names_the_field(server: LiveServer, field: str) -> None:
    for value in BAD_VALUES[field]:
        response = server.post(**{field: value})
        assert response.status_code == 400, (value, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] in ("invalid_value", "limit_exceeded", "context_length_exceeded")
        assert error["param"].split(".")[0].split("[")[0] == field, (value, error)
        assert len(error["message"]) < 400


def strict(**body: Any) -> dict[str, Any]:
    """A body that is for the task, whose limits are hard."""
    return {"model": "strict", **body}


@refused({
    "invalid_value": [
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"logit_bias": {"5": 101}}, "logit_bias.'5'"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"stream": True, "best_of": 2}, "best_of"),
        (strict(speculation={"drafter": "off"}), "speculation.drafter"),
    ],
    "unknown_parameter": [
        ({"frobnicate": 1}, "frobnicate"),
        ({"speculation": {"depth": 1}}, "speculation.depth"),
    ],
    "unsupported_parameter": [
        ({"use_beam_search": True}, "use_beam_search"),
        ({"suffix": "end"}, "suffix"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
    ],
    "limit_exceeded": [
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a"] * 8, "n": 4, "max_tokens": 100}, "max_tokens"),
        (strict(max_tokens=9), "max_tokens"),
        (strict(n=2), "n"),
        (strict(prompt=["a", "b", "c"]), "prompt"),
        (strict(logprobs=3), "logprobs"),
        (strict(speculation={"max_draft_tokens": 7}), "speculation.max_draft_tokens"),
    ],
    "context_length_exceeded": [
        ({"prompt": [1] * 257}, "prompt"),
        ({"prompt": [1] * 256}, "prompt"),
        ({"prompt": "the " * 3000}, "prompt"),
        ({"prompt": "x" * 150_000}, "prompt"),
        ({"prompt": [1] * 100, "max_tokens": 157}, "max_tokens"),
        (strict(prompt=[1] * 11), "prompt"),
    ],
})  # fmt: skip
def test_refusals_by_code(server: LiveServer, code: str, body: dict[str, Any], param: str) -> None:
    check(server.post(**body), 400, code, param)


def test_a_prompt_that_just_fits(server: LiveServer) -> None:
    assert server.post(prompt=[1] * 100, max_tokens=156).status_code == 200


def test_messages_do_not_repeat_long_input(server: LiveServer) -> None:
    secret = "s3cret" * 5000
    for body in (
        {"model": secret}, {"stop": ["a", secret]}, {"temperature": secret}, {secret: 1},
        {"speculation": {"drafter": secret[:60]}}, {"logit_bias": {secret: 1}},
        {"speculation": {secret: 1}}, {"metadata": secret}, {"stream_options": secret},
    ):  # fmt: skip
        response = server.post(**body)
        assert response.status_code in (400, 404)
        assert response.text.count("s3cret") * 6 <= 400
        assert len(response.text) < 700


def test_a_tasks_defaults_fill_what_is_not_given(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    body = server.post(model="strict", prompt="the").json()
    assert body["model"] == "strict"
    server.post(model="strict", prompt="the", temperature=0.5, stop=[], seed=3, max_tokens=2)
    first, second = engine.submitted
    s = first.sampling
    assert (s.temperature, s.max_tokens, s.stop, s.seed) == (0.0, 4, (b"\n",), 11)
    assert (first.task, first.model) == ("strict", "tiny")
    assert (first.speculation.drafter, first.speculation.max_draft_tokens) == ("suffix", 6)
    s = second.sampling
    assert (s.temperature, s.max_tokens, s.stop, s.seed) == (0.5, 2, (), 3)


# uvicorn.access is off (no handler); pytest gives one to each logger that does not propagate.
LOGGERS = ("tailor", "uvicorn.error")


# --- bodies ---


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def raw(server: LiveServer, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    return server.http.post(
        server.url + "/v1/completions",
        content=content,
        headers={"content-type": "application/json", **headers},
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": {"b": 1, "b": 1}}', "twice"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "out of range"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"prompt": ["a\\udc00\\ud800b"]}', "surrogate"),
        (b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}", "nested"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, "nested"),
        (b"{} {}", "not JSON"),
    ],
    ids=range(20),
)
def test_bodies_that_are_no_strict_json(server: LiveServer, content: bytes, says: str) -> None:
    message = check(raw(server, content), 400, "invalid_body", None)
    assert says in message


@pytest.mark.parametrize("prompt", ["a\\u0000\\ud83d\\ude00", '[{\\"' * 80])
def test_nul_surrogate_pairs_and_brackets_in_strings_are_text(
    server: LiveServer, prompt: str
) -> None:
    content = f'{{"model": "tiny", "prompt": "{prompt}", "max_tokens": 1}}'
    assert raw(server, content.encode()).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "br"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-16"}, 415),
        ({"content-type": "application/json; charset=UTF-8"}, 200),
        ({"content-encoding": "identity"}, 200),
    ],
)
def test_media_types(server: LiveServer, headers: dict[str, str], status: int) -> None:
    content = b'{"model": "tiny", "prompt": "the", "max_tokens": 1}'
    response = raw(server, content, **headers)
    if status == 200:
        assert response.status_code == 200
    else:
        check(response, status, "unsupported_media_type", None)


def test_a_client_that_sends_all_before_it_reads_is_told_what_is_wrong(server: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for kind, size, status in (("text/plain", 15, 415), ("application/json", 17, 413)):
        headers = {"content-type": kind}
        connection.request("POST", "/v1/completions", b" " * (size << 20), headers)
        answer = connection.getresponse()
        assert (answer.status, bool(json.loads(answer.read())["error"])) == (status, True)
    connection.close()


def test_a_large_body_is_refused_by_its_length_before_it_is_sent(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as s:
        s.sendall(POST + b"content-length: 999999999999\r\n\r\n")
        answer = b""
        while b"request_too_large" not in answer:
            answer += s.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_large_chunked_body_is_refused_while_it_is_read(server: LiveServer) -> None:
    sent: list[int] = []

    def endless() -> Iterator[bytes]:
        for i in range(10_000):
            sent.append(i)
            yield b" " * 65536

    with suppress(httpx.TransportError):  # the server hangs up, perhaps before its answer is read
        check(raw(server, endless()), 413, "request_too_large", None)
    assert len(sent) < 100  # long before the end
    assert server.post(max_tokens=1).status_code == 200


def test_a_slow_body_times_out(server: LiveServer) -> None:
    answer = exchange(server, POST + b'content-length: 100\r\n\r\n{"model')
    assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer


# --- routes ---


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("POST", "//v1/completions", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_routes_that_are_not_there(
    server: LiveServer, method: str, path: str, status: int, code: str
) -> None:
    response = httpx.request(method, server.url + path)
    check(response, status, code, "model" if code == "model_not_found" else None)
    if status == 405:
        assert response.headers["allow"] == ("POST" if "completions" in path else "GET, HEAD")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/completions", "There is no route '/completions'. Ask /v1/completions."),
        ("/v1/v1/chat/completions", "Ask /v1/chat/completions."),
        ("//v1/completions", "Ask /v1/completions."),
        ("/completion", "Ask /v1/completions."),
        ("/api/chat", "Ask /v1/chat/completions."),
        ("/healthz", "Ask /health."),
        ("/v1/tokenize", "Ask /tokenize."),
        ("/v1/embeddings", "generates text and has no vectors or scores of whole texts."),
        ("/rerank", "generates text and has no vectors or scores of whole texts."),
        ("/nothing", "There is no route '/nothing'."),
    ],
)
def test_a_route_of_another_server_is_told_where_to_go(
    server: LiveServer, path: str, says: str
) -> None:
    message = httpx.post(server.url + path, json={}).json()["error"]["message"]
    assert message.endswith(says)


def test_the_routes_that_are_advised_are_there(server: LiveServer) -> None:
    known = httpx.get(server.url + "/openapi.json").json()["paths"]
    for path in ELSEWHERE:
        told = httpx.post(server.url + path, json={}).json()["error"]["message"]
        named = told.partition(" Ask ")[2].removesuffix(".").split(" and ")
        assert set(named) <= {*known, "/metrics"}, path


def test_models_are_listed(server: LiveServer) -> None:
    client = server.openai()
    listed = list(client.models.list())
    assert [m.id for m in listed] == ["tiny", "strict", "completion"]
    assert all(m.object == "model" and m.owned_by == "tailor" for m in listed)
    task = client.models.retrieve("strict").model_dump()
    assert (task["root"], task["parent"], task["max_model_len"]) == ("tiny", "tiny", 256)
    assert task["description"] == "A task with limits"


def test_tokenize_and_detokenize(server: LiveServer) -> None:
    text = "héllo <|user|> wörld"
    body = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert body["tokens"] == encode(text) and body["count"] == len(encode(text))
    assert len(body["token_strs"]) == body["count"]
    assert server.post("/tokenize", prompt="the", add_special_tokens=False).json() == {
        "count": 1, "max_model_len": 256, "tokens": encode("the"), "token_strs": None,
    }  # fmt: skip
    back = server.post("/detokenize", tokens=body["tokens"]).json()
    assert back == {"prompt": text}
    theirs = server.post("/tokenize", content=text)  # llama.cpp's
    assert check(theirs, 400, "unknown_parameter", "content").endswith("Send prompt.")
    check(server.post("/detokenize", tokens=[400]), 400, "invalid_value", "tokens")
    check(server.post("/detokenize", tokens=[True]), 400, "invalid_value", "tokens[0]")
    check(server.post("/tokenize"), 400, "invalid_value", "prompt")
    check(server.post("/tokenize", prompt="x", model="?"), 404, "model_not_found", "model")
    assert server.post("/tokenize", prompt="the " * 5000).json()["count"] == 5001


def test_version_and_health(server: LiveServer) -> None:
    from server import __version__

    assert httpx.get(server.url + "/version").json() == {"version": __version__}
    health = httpx.get(server.url + "/health").json()
    assert health["status"] == "ok"
    [engine] = health["engines"]
    assert (engine["model"], engine["state"], engine["restarts"]) == ("tiny", "ready", 0)
    assert httpx.get(server.url + "/ready").json() == {"status": "ready"}


def test_openapi_describes_the_body(server: LiveServer) -> None:
    document = httpx.get(server.url + "/openapi.json").json()
    post = document["paths"]["/v1/completions"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] == {"type": "null"}  # null is as good as absent
    assert {"model", "prompt", "max_tokens", "speculation"} <= set(schema["properties"])
    assert "$ref" not in json.dumps(schema)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2:3", True), ("x" * 129, False), ("a b", False), ("a;b", False), ("", False)],
)
def test_request_ids_go_in_and_out(server: LiveServer, given: str, kept: bool) -> None:
    response = httpx.get(server.url + "/version", headers={"x-request-id": given})
    assert (response.headers["x-request-id"] == given) is kept
    assert response.headers["x-request-id"]


def test_cors_is_off(server: LiveServer) -> None:
    response = httpx.get(server.url + "/version", headers={"origin": "https://evil.example"})
    assert not any(name.startswith("access-control") for name in response.headers)


def test_prompts_are_not_logged(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert server.post(prompt="the secret word").status_code == 200
    server.post(prompt="the secret word", frobnicate="secret")
    server.post(prompt="the secret word", stop="x" * 2000 + "secret")
    httpx.get(server.url + "/%0d%0aFORGED%1b[31m", params={"prompt": "secret"})
    lines = [str(vars(r)) for r in caplog.records if r.name.startswith(LOGGERS)]
    done = [r for r in caplog.records if r.getMessage() == "request"]
    assert [(vars(r)["path"], vars(r)["status"]) for r in done[:1]] == [("/v1/completions", 200)]
    assert not any("secret" in line for line in lines)


@pytest.mark.server_error
def test_a_bug_is_a_500_without_details(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("the secret prompt")

    monkeypatch.setattr(server.client, "submit", broken)
    message = check(server.post(), 500, "internal_error", None)
    assert "secret" not in message
    assert not any("secret" in str(vars(r)) for r in caplog.records)
    assert any(vars(r).get("error") == "ValueError" for r in caplog.records)


def test_responses_are_counted_by_route_status_and_code(server: LiveServer) -> None:
    def count(**labels: str) -> float:
        return server.sample("tailor_http_responses_total", **labels)

    before = count(route="/v1/completions", status="400", code="invalid_value")
    other = count(route="other")
    server.post(n=0)
    httpx.get(server.url + "/invented-by-a-client")
    assert count(route="/v1/completions", status="400", code="invalid_value") == before + 1
    assert count(route="other", status="404") >= 1 and count(route="other") == other + 1


# --- keys ---


locked = over(ScriptedEngine(saying([5])), name="locked", config=keyed("one"))


def test_open_routes_need_none(locked: LiveServer) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert httpx.get(locked.url + path).status_code == 200


@pytest.mark.parametrize("path", ["/", "/dashboard", "/dashboard/live.js", "/docs", "/metrics"])
def test_a_browser_asks_for_the_key_of_a_page(locked: LiveServer, path: str) -> None:
    closed = httpx.get(locked.url + path)
    check(closed, 401, "invalid_api_key", None)
    assert closed.headers["www-authenticate"] == 'Basic realm="Tailor"'
    assert httpx.get(locked.url + path, auth=("", "sk-three")).status_code == 401
    assert (
        httpx.get(locked.url + path, headers={"authorization": "Basic sk-one"}).status_code == 401
    )
    for how in ({"auth": ("anybody", "sk-one")}, {"headers": {"authorization": "Bearer sk-one"}}):
        opened = httpx.get(locked.url + path, follow_redirects=True, **how)
        assert opened.status_code == 200


def test_no_other_route_takes_a_key_that_a_browser_sends_by_itself(locked: LiveServer) -> None:
    assert httpx.get(locked.url + "/v1/models", auth=("", "sk-one")).status_code == 401
    body = {"prompt": "a", "max_tokens": 1}
    for site, status in (("cross-site", 401), ("same-site", 401), ("same-origin", 200)):
        headers = {"sec-fetch-site": site}
        url, auth = locked.url + "/v1/completions", ("", "sk-one")
        assert httpx.post(url, auth=auth, json=body, headers=headers).status_code == status


def test_a_program_s_key_is_a_bearer_s(locked: LiveServer) -> None:
    response = httpx.get(locked.url + "/v1/models", headers={"authorization": "Basic sk-one"})
    check(response, 401, "invalid_api_key", None)
    assert response.headers["www-authenticate"] == "Bearer"


def test_metrics_and_cors_have_their_own_settings() -> None:
    cors = CorsConfig(allow_origins=("https://app.example",))
    config = keyed("one", metrics=MetricsConfig(require_key=False), cors=cors)
    with LiveServer([ScriptedEngine(saying([5]))], config=config) as live:
        assert httpx.get(live.url + "/metrics").status_code == 200
        preflight = httpx.options(
            live.url + "/v1/completions",
            headers={
                "origin": "https://app.example",
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization, content-type, x-stainless-lang",
            },
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        other = httpx.get(live.url + "/ready", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_no_two_errors_have_one_code() -> None:
    import server.errors as errors

    def classes(root: type[TailorError]) -> Iterator[type[TailorError]]:
        yield root
        for child in root.__subclasses__():
            if child.__module__ == errors.__name__:  # the client's commands have their own
                yield from classes(child)

    codes = [cls.code for cls in classes(TailorError) if cls.code is not None]
    assert len(set(codes)) == len(codes) > 30
    assert errors.LoadingError.status == 503 and errors.LoadingError.type == "server_error"
    assert errors.RequestError.code is None and errors.InvalidHttpError.status == 400


def test_key_config_is_not_kept_in_the_clear() -> None:
    from server.api.keys import ApiKey

    key = KeyConfig.model_validate({"id": "one", "key": "sk-one"})
    assert "sk-one" not in repr(ApiKey.from_config(key))
