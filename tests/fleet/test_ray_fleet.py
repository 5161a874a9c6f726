"""A fleet on Ray Serve itself: two engine replicas, two ingresses, all on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from loadtest.fleet import FleetProcess
from tests.api.live import LiveServer
from tests.fleet.ray_parts import FakeParts, free_port
from tests.installed import needs
from tests.waiting import wait_until

pytestmark = needs("ray")

STEP_S = 0.01


OWN_PORTS = free_port(2)
ALL = {"authorization": "Bearer sk-all"}


@pytest.fixture(scope="module")
def more_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the names of further tasks."""
    file = tmp_path_factory.mktemp("fleet") / "more"
    file.write_text("")
    return file


@pytest.fixture(scope="module")
def fleet(more_tasks: Path) -> Iterator[FleetProcess]:
    options = ["--replicas", "2", "--ingresses", "2", "--step-s", str(STEP_S), "--keys"]
    options += ["--own-ports", str(OWN_PORTS), "--more-tasks", str(more_tasks)]
    with FleetProcess(*options) as running:
        yield running


def _get(url: str) -> httpx.Response:
    return httpx.get(url, headers=ALL, timeout=30)


@pytest.fixture(scope="module")
def single() -> Iterator[LiveServer]:
    """One server with the same engine, which the fleet must equal."""
    with FakeParts().single() as live:
        yield live


def _body(i: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": f"task-{i % 24}", "prompt": f"the quick {i}", "max_tokens": 8 + i % 24,
        "temperature": 0.8, "seed": i, "ignore_eos": True, **fields,
    }  # fmt: skip


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(url + "/v1/completions", json=body, headers=ALL, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _wanted(single: LiveServer, body: dict[str, Any]) -> Any:
    return _post(single.url, body)["choices"]


def test_a_start_tells_what_it_does(fleet: FleetProcess) -> None:
    told = fleet.told
    wanted = ("preparing", "starting Ray", "starting replicas")
    assert [next(i for i, line in enumerate(told) if line.startswith(w)) for w in wanted] == [
        0,
        1,
        2,
    ]
    states = [line for line in told if line.startswith("engine-tiny: ")]
    assert states and all(" starting" in line or " running" in line for line in states), told


def test_answers_are_those_of_a_single_server(fleet: FleetProcess, single: LiveServer) -> None:
    bodies = [_body(i, n=1 + i % 2, logprobs=2) for i in range(24)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: _post(fleet.url, body), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["choices"] == _wanted(single, body)
        assert answer["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]


def test_the_openai_client_streams_through_it(fleet: FleetProcess, single: LiveServer) -> None:
    client = openai.OpenAI(api_key="sk-all", base_url=fleet.url + "/v1", max_retries=0, timeout=60)
    body = _body(3, max_tokens=60)
    extra = {"ignore_eos": True}
    body.pop("ignore_eos")
    began_s = time.monotonic()
    at_s, text = [], ""
    for chunk in client.completions.create(stream=True, extra_body=extra, **body):
        text += chunk.choices[0].text
        at_s.append(time.monotonic() - began_s)
    assert text == _wanted(single, {**body, **extra})[0]["text"]
    assert len(at_s) > 20 and at_s[0] < at_s[-1] / 2  # it came as it was made


def test_the_state_of_every_replica_is_told(fleet: FleetProcess) -> None:
    metrics = _get(fleet.url + "/metrics").text
    for name in ("tiny/0", "tiny/1"):
        assert f'tailor_num_requests_running{{engine="{name}",model="tiny"}}' in metrics
    health = _get(fleet.url + "/health").json()  # as a single server's, the fleet one engine
    assert health["status"] == "ok"
    assert [engine["name"] for engine in health["engines"]] == ["tiny/fleet"]
    assert _get(fleet.url + "/v1/models").status_code == 200


def test_sums_over_all_that_are_scraped_count_nothing_twice(fleet: FleetProcess) -> None:
    """What Prometheus scrapes: each ingress on its own port."""
    before, num = _sums(), 12
    for i in range(num):
        _post(f"http://127.0.0.1:{OWN_PORTS + i % 2}", _body(i))
    wait_until(lambda: _sums()["steps"] > before["steps"], 20)
    after = _sums()
    assert after["up"] == 2.0
    assert after["requests"] - before["requests"] == num
    assert "/fleet" not in _get(fleet.url + "/metrics").text

    def steps_on_main() -> float:
        return _total(_get(fleet.url + "/metrics").text, "tailor_engine_steps_total")

    wait_until(lambda: steps_on_main() == _sums()["steps"], 20)  # each ingress looks by itself


def _sums() -> dict[str, float]:
    texts = [_get(f"http://127.0.0.1:{OWN_PORTS + i}/metrics").text for i in range(2)]
    assert any("tailor_time_to_first_token_seconds_bucket{" in text for text in texts)
    return {
        "up": sum(_total(text, "tailor_engine_up") for text in texts),
        "steps": sum(_total(text, "tailor_engine_steps_total") for text in texts),
        "requests": sum(_total(text, "tailor_request_success_total") for text in texts),
    }


def _total(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_client_that_leaves_frees_its_engine(fleet: FleetProcess) -> None:
    body = _body(1, max_tokens=200, stream=True)
    with httpx.stream(
        "POST", fleet.url + "/v1/completions", json=body, headers=ALL, timeout=60
    ) as response:
        next(response.iter_raw())

    def running() -> float:
        lines = _get(fleet.url + "/metrics").text.splitlines()
        names = [line for line in lines if line.startswith("tailor_num_requests_running{")]
        return sum(float(line.rpartition(" ")[2]) for line in names if 'engine="tiny/' in line)

    began_s = time.monotonic()
    wait_until(lambda: running() == 0.0, 30)
    assert time.monotonic() - began_s < 200 * STEP_S + 20


def test_what_listens_on_other_addresses_asks_for_a_token(fleet: FleetProcess) -> None:
    """Serve's replicas alone do: a call of them would run code."""
    grpc = pytest.importorskip("grpc")

    listening = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == fleet.pid:
                found = process.net_connections("tcp")
                listening |= {one.laddr for one in found if one.status == psutil.CONN_LISTEN}
    assert len(listening) > 5
    elsewhere = [at for at in listening if not at.ip.endswith("127.0.0.1") and at.ip != "::1"]
    assert {at.ip for at in elsewhere} <= {"::"}
    for at in elsewhere:
        with grpc.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            for metadata in ([], [("authorization", "Bearer guessed")]):
                call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"", timeout=10, metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_bad_request_is_refused_as_by_one_server(fleet: FleetProcess) -> None:
    for body in ({"model": "nobody"}, {"model": "tiny", "prompt": "a", "max_tokens": -1}):
        response = httpx.post(fleet.url + "/v1/completions", json=body, headers=ALL, timeout=30)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"]


def _served(port: int) -> float:
    """Completions that the ingress on its own port has answered."""
    lines = _get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    answers = [x for x in lines if x.startswith("tailor_http_responses_total{")]
    return sum(float(x.rpartition(" ")[2]) for x in answers if "/v1/completions" in x)


def test_both_ingresses_serve_and_hold_a_key_to_its_limit_together(fleet: FleetProcess) -> None:
    few = {"authorization": "Bearer sk-few"}
    body = _body(1, max_tokens=1)
    ports = [fleet.port, OWN_PORTS, OWN_PORTS + 1]
    before = [_served(port) for port in ports[1:]]

    def ask(i: int) -> int:
        url = f"http://127.0.0.1:{ports[i % 3]}/v1/completions"
        return httpx.post(url, json=body, headers=few, timeout=30).status_code

    began_s = time.monotonic()
    with ThreadPoolExecutor(6) as threads:
        told = list(threads.map(ask, range(45)))
    # On a busy machine the desk may be late, and then an ingress lets in less, never more.
    while told.count(200) < 20 and time.monotonic() < began_s + 60:
        time.sleep(0.2)
        told.append(ask(len(told)))
    earned = (time.monotonic() - began_s) * 20 / 60
    assert set(told) == {200, 429}
    assert 20 <= told.count(200) <= 21 + earned
    after = [_served(port) for port in ports[1:]]
    assert all(now > then for now, then in zip(after, before, strict=True))


def test_a_reload_at_one_ingress_is_known_to_both(fleet: FleetProcess, more_tasks: Path) -> None:
    more_tasks.write_text("invoices receipts")
    url = f"http://127.0.0.1:{OWN_PORTS}/v1/tasks/reload"
    answer = httpx.post(url, headers=ALL, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["added"] == ["invoices", "receipts"]
    for port in (OWN_PORTS, OWN_PORTS + 1):
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json=_body(1, max_tokens=2, model="invoices"),
            headers=ALL,
            timeout=30,
        )
        assert answer.status_code == 200, answer.text


def test_a_replica_killed_mid_stream_costs_no_answer(
    fleet: FleetProcess, single: LiveServer
) -> None:
    bodies = [_body(i, max_tokens=120, stream=True) for i in range(24)]
    begun = []

    def stream(body: dict[str, Any]) -> str:
        text = ""
        with httpx.stream(
            "POST", fleet.url + "/v1/completions", json=body, headers=ALL, timeout=90
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    begun.append(1)
        return text

    with ThreadPoolExecutor(24) as threads:
        answers = [threads.submit(stream, body) for body in bodies]
        wait_until(lambda: len(begun) > 200, 60)
        fleet.ask("kill", "KILLED")
        texts = [answer.result(90) for answer in answers]
    for body, text in zip(bodies, texts, strict=True):
        assert text == _wanted(single, {**body, "stream": False})[0]["text"]
