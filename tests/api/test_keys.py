"""API keys: what each may call, how often, and that one does not see what another asks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from server.api.admin import ADAPTER_PATHS
from server.api.keys import ApiKey, Bucket, Keyring
from server.config import KeyConfig, ServerConfig, TaskConfig
from server.errors import ConfigError
from server.types import Delta
from tests.api.fixtures import BODIES, served_by
from tests.api.live import LiveServer, as_key, encode, served
from tests.api.test_errors import check
from tests.fakes.scripted_engine import ScriptedEngine, saying, steps_of
from tests.waiting import wait_until

SAYS = saying(encode(" over the lazy dog"))
TASKS = {name: TaskConfig(name=name) for name in ("sql", "summary")}


def ask(live: LiveServer, secret: str, model: str = "tiny", **body: Any) -> httpx.Response:
    return live.post("/v1/completions", secret, **{"model": model, "max_tokens": 2, **body})


# --- buckets, with a clock of our own ---


def test_a_bucket_holds_a_minute_and_fills_at_its_rate() -> None:
    bucket = Bucket(60, now_s=100.0)
    for _ in range(60):
        assert bucket.wait_s(1, 100.0) == 0.0
        bucket.take(1)
    assert bucket.wait_s(1, 100.0) == pytest.approx(1.0)
    assert bucket.wait_s(10, 105.0) == pytest.approx(5.0)
    assert bucket.wait_s(10, 110.0) == 0.0
    assert bucket.wait_s(60, 10_000.0) == 0.0  # no more than a minute's worth is saved
    bucket.take(60)
    assert bucket.wait_s(1, 10_000.0) > 0


def test_more_than_a_minute_s_worth_waits_for_a_full_bucket_and_then_owes() -> None:
    bucket = Bucket(60, now_s=0.0)
    assert bucket.wait_s(180, 0.0) == 0.0
    bucket.take(180)
    assert bucket.wait_s(1, 0.0) == pytest.approx(121.0)
    bucket.take(-150)  # it was not used
    assert bucket.wait_s(30, 0.0) == 0.0
    assert bucket.wait_s(31, 0.0) > 0


def test_giving_back_never_makes_more_than_a_minute_s_worth() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(-1000)
    bucket.take(60)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)


def test_equal_secrets_are_refused() -> None:
    told = ({"id": name, "key": "sk-1", "admin": name == "b"} for name in "ab")
    keys = [ApiKey.from_config(KeyConfig.model_validate(one)) for one in told]
    with pytest.raises(ConfigError, match="same secret"):
        Keyring(keys)


@pytest.mark.parametrize(
    "field",
    [
        {"requests_per_minute": 0}, {"tokens_per_minute": -1}, {"max_concurrent_requests": True},
        {"requests_per_minute": float("inf")}, {"tasks": "sql"}, {"limit": 1},
    ],
)  # fmt: skip
def test_wrong_limits_are_told(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        KeyConfig.model_validate({"id": "a", "key": "sk", **field})


# --- on a server ---


CONFIG = ServerConfig.model_validate(
    {
        "keys": (
            {"id": "all", "key": "sk-all"},
            {"id": "sql-only", "key": "sk-sql", "tasks": ("sql",)},
            {"id": "model", "key": "sk-model", "tasks": ("tiny",)},
            {"id": "boss", "key": "sk-boss", "admin": True},
            {"id": "few", "key": "sk-few", "requests_per_minute": 3},
            {"id": "seat", "key": "sk-seat", "max_concurrent_requests": 2},
            {"id": "tokens", "key": "sk-tokens", "tokens_per_minute": 100},
            {"id": "unused", "key": "sk-unused", "tokens_per_minute": 100},
            {"id": "asks", "key": "sk-asks", "tokens_per_minute": 100},
        )
    }
)
engine, server = served_by(lambda: ScriptedEngine(SAYS), config=CONFIG, tasks=TASKS)


def test_an_admin_key_opens_the_admin_routes_and_no_other_does(server: LiveServer) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        url = server.url + "/v1/tasks/none-of-this-name/x"
        refused = httpx.request(method, url, headers=as_key("sk-all"))
        assert refused.status_code == 403
        if method != "HEAD":
            assert refused.json()["error"]["code"] == "permission_denied"
        opened = httpx.request(method, url, headers=as_key("sk-boss"))
        assert opened.status_code in (404, 405)
        assert httpx.request(method, url).status_code == 401
    assert ask(server, "sk-boss").status_code == 200
    refused = httpx.put(server.url + "/v1/tasks/sql/corpus", headers=as_key("sk-boss"))
    assert refused.headers["allow"] == "DELETE, GET, HEAD, POST"


def test_a_key_uses_what_its_list_names(server: LiveServer) -> None:
    may = {
        "sk-sql": {"sql"},
        "sk-model": {"tiny", "completion"},
        "sk-all": {"tiny", "completion", "sql", "summary"},
    }
    for secret, names in may.items():
        client = server.openai(secret)
        assert {m.id for m in client.models.list()} == names
        for name in ("tiny", "completion", "sql", "summary", "nothing"):
            answer = ask(server, secret, name)
            assert answer.status_code == (200 if name in names else 404), (secret, name)
            head = httpx.get(f"{server.url}/v1/models/{name}", headers=as_key(secret))
            assert head.status_code == answer.status_code
            tokens = server.post("/tokenize", secret, model=name, prompt="the")
            assert tokens.status_code == answer.status_code


def test_no_route_takes_a_model_that_the_key_may_not_use(server: LiveServer) -> None:
    document = httpx.get(server.url + "/openapi.json", headers=as_key("sk-all")).json()
    posts = {p for p, item in document["paths"].items() if "post" in item}
    ours = {p for p in posts if not p.startswith("/v1/tasks")}
    assert ours - ADAPTER_PATHS == set(BODIES)
    for path, body in BODIES.items():
        for model in ("summary", "tiny", "none-of-this-name"):
            answer = server.post(path, "sk-sql", **{**body, "model": model})
            assert answer.status_code == 404, (path, answer.text)
            assert answer.json()["error"]["code"] == "model_not_found"
        told = check(server.post(path, "sk-sql", model=None, **body), 400, "invalid_value", "model")
        assert "tiny" not in told, "who may not use the first must name its own"


def test_a_closed_name_looks_like_one_that_is_not_there(server: LiveServer) -> None:
    closed, missing = (ask(server, "sk-sql", name).json() for name in ("summary", "surmise"))
    assert str(closed).replace("summary", "X") == str(missing).replace("surmise", "X")


def test_a_404_tells_the_names_that_the_key_may_use(server: LiveServer) -> None:
    def told(secret: str, model: str) -> str:
        return str(ask(server, secret, model).json()["error"]["message"])

    assert told("sk-all", "gpt-9").endswith(" There are: tiny, sql, summary, completion.")
    assert told("sk-sql", "gpt-9").endswith(" There are: sql.")
    assert told("sk-all", "summarry").endswith(" Did you mean summary?")
    assert told("sk-sql", "summarry").endswith(" There are: sql.")


def test_a_rate_is_held_and_told(server: LiveServer) -> None:
    answers = [ask(server, "sk-few") for _ in range(5)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429, 429]
    error = answers[-1].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 20
    assert ask(server, "sk-all").status_code == 200  # the others go on
    listed = httpx.get(server.url + "/v1/models", headers=as_key("sk-few"))
    assert listed.status_code == 429


def test_open_requests_are_bounded_streams_too(server: LiveServer, engine: ScriptedEngine) -> None:
    engine.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        held = [threads.submit(ask, server, "sk-seat", stream=s) for s in (False, True)]
        wait_until(lambda: server.client.num_open == 2)
        refused = ask(server, "sk-seat")
        engine.gate.set()
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert [h.result().status_code for h in held] == [200, 200]
    assert ask(server, "sk-seat").status_code == 200


def test_a_refused_request_and_one_that_fails_give_their_seats_back(server: LiveServer) -> None:
    for _ in range(5):
        assert ask(server, "sk-seat", n=0).status_code == 400
        assert ask(server, "sk-seat", model="nothing").status_code == 404
    assert ask(server, "sk-seat").status_code == 200


def test_a_token_rate_counts_prompts_and_choices(server: LiveServer) -> None:
    prompt = [5] * 10
    assert ask(server, "sk-tokens", prompt=prompt, max_tokens=30).status_code == 200  # 40 of 100
    for n in (2, 4):
        refused = ask(server, "sk-tokens", prompt=prompt, max_tokens=30, n=n)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1


def test_unused_tokens_come_back(server: LiveServer, engine: ScriptedEngine) -> None:
    engine.script = lambda request: steps_of(request, [5], finish_reason="stop")
    for status in (*[200] * 6, 429):  # each asks for 50 tokens and uses 9
        answer = ask(server, "sk-unused", prompt=[5] * 8, max_tokens=42)
        assert answer.status_code == status


def test_more_questions_than_a_minute_s_worth_are_let_in_by_a_full_bucket(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    """As one prompt is: the first question, which goes alone, takes nothing from the others."""
    told: Any = {"finish_reason": "length", "label_logprobs": (-1.0, -2.0)}
    engine.script = lambda r: [[Delta(r.request_id, 0, (), **told)]]
    question = {"type": "predicate", "instructions": "y"}
    body = {"model": "tiny", "input": "x", "questions": [question] * 9}
    for status in (200, 429):
        answer = server.post("/v1/decisions", "sk-asks", **body)
        assert answer.status_code == status, answer.text


def test_without_keys_admin_routes_are_closed_and_the_rest_open() -> None:
    engine = ScriptedEngine(SAYS)
    with LiveServer([engine], models={"tiny": served()}) as live:
        assert live.post(max_tokens=1).status_code == 200
        assert engine.submitted[0].tenant == ""
        assert httpx.get(live.url + "/v1/tasks").status_code == 403
