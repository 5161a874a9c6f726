"""A fleet on Ray Serve itself, on two Ray nodes of this machine.

Ray starts once for all of it. First the fleet has two engine replicas that learn from each other
and two ingresses; then updates make it another one, and at last nodes and Ray's head are lost.
What a Ray that `tailor fleet up` embeds does beside that is in test_fleet_page.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadtest.fleet import NUM_TEXTS, FleetProcess, Flight, expected, num_up
from server.machine_code import make_ready
from tests.api.live import LiveServer
from tests.api.real_engine import CONTEXT, spec
from tests.fleet.ray_parts import TASKS, FakeParts, free_port
from tests.waiting import wait_until

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: the extra `ray`")

STEP_S = 0.01
OWN_PORTS = free_port(2)
ALL = {"authorization": "Bearer sk-all"}
OFF = {"drafter": "off"}
*ASKED, LEARNS = TASKS  # nobody else asks the last one
NUM_LEFT = 3  # engine replicas, of which some are lost
NUM_REQUESTS = NUM_TEXTS + 60  # a stream each of the last 60

_wait = partial(wait_until, timeout_s=90.0, pause_s=0.3)


@pytest.fixture(scope="module")
def more_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the names of further tasks."""
    file = tmp_path_factory.mktemp("fleet") / "more"
    file.write_text("")
    return file


@pytest.fixture(scope="module")
def fleet(more_tasks: Path) -> Iterator[FleetProcess]:
    # Compiled once here: an engine that compiles while it drafts is taken for one that hangs.
    make_ready()
    options = ["--nodes", "2", "--replicas", "2", "--ingresses", "2", "--step-s", str(STEP_S)]
    options += ["--keys", "--own-ports", str(OWN_PORTS), "--more-tasks", str(more_tasks)]
    with FleetProcess(*options, "--shared", str(more_tasks.with_name("shared"))) as running:
        yield running


@pytest.fixture(scope="module")
def single() -> Iterator[LiveServer]:
    """One server with the same engine, which the fleet must equal."""
    front, engine = FakeParts().front(), spec(drafts=False)
    with LiveServer(
        [engine], max_model_len=CONTEXT, tasks=front.tasks, drafters=front.drafters
    ) as live:
        yield live


def _get(url: str) -> httpx.Response:
    return httpx.get(url, headers=ALL, timeout=30)


def _body(i: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": ASKED[i % len(ASKED)], "prompt": f"the quick {i}", "max_tokens": 8 + i % 24,
        "temperature": 0.8, "seed": i, "ignore_eos": True, **fields,
    }  # fmt: skip


def _post(url: str, body: dict[str, Any], client: httpx.Client | None = None) -> dict[str, Any]:
    post = httpx.post if client is None else client.post
    response = post(url + "/v1/completions", json=body, headers=ALL, timeout=90)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _streamed(url: str, body: dict[str, Any], heard: Callable[[], object]) -> str:
    """The text of a stream. heard: called at each piece of it."""
    told = ""
    asked = {**body, "stream": True}
    with httpx.stream(
        "POST", url + "/v1/completions", json=asked, headers=ALL, timeout=90
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                told += json.loads(line[6:])["choices"][0]["text"]
                heard()
    return told


def _wanted(single: LiveServer, body: dict[str, Any]) -> Any:
    return _post(single.url, body)["choices"]


def _sum(metrics: str, series: str, where: str = "") -> float:
    """The values of a series, added up, of all labels that hold `where`."""
    found = re.findall(rf"^{series}{{([^}}]*)}} (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for labels, value in found if where in labels)


def _wait_for_replicas(fleet: FleetProcess, num: int) -> None:
    _wait(
        lambda: len(json.loads(fleet.ask("steps", "STEPS"))) == num,
        told=lambda: fleet.ask("status", "STATUS"),
    )


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
    extra = {"ignore_eos": body.pop("ignore_eos"), "speculation": OFF}
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
        return _sum(_get(fleet.url + "/metrics").text, "tailor_engine_steps_total")

    wait_until(lambda: steps_on_main() == _sums()["steps"], 20)  # each ingress looks by itself


def _sums() -> dict[str, float]:
    texts = [_get(f"http://127.0.0.1:{OWN_PORTS + i}/metrics").text for i in range(2)]
    assert any("tailor_time_to_first_token_seconds_bucket{" in text for text in texts)
    names = {
        "up": "engine_up", "steps": "engine_steps_total", "requests": "request_success_total",
    }  # fmt: skip
    return {key: sum(_sum(text, f"tailor_{name}") for text in texts) for key, name in names.items()}


def test_a_client_that_leaves_frees_its_engine(fleet: FleetProcess) -> None:
    body = _body(1, max_tokens=200, stream=True, speculation=OFF)
    with httpx.stream(
        "POST", fleet.url + "/v1/completions", json=body, headers=ALL, timeout=60
    ) as response:
        next(response.iter_raw())

    def running() -> float:
        metrics = _get(fleet.url + "/metrics").text
        return _sum(metrics, "tailor_num_requests_running", 'engine="tiny/')

    began_s = time.monotonic()
    wait_until(lambda: running() == 0.0, 30)
    assert time.monotonic() - began_s < 200 * STEP_S + 20


def test_a_bad_request_is_refused_as_by_one_server(fleet: FleetProcess) -> None:
    for body in ({"model": "nobody"}, {"model": "tiny", "prompt": "a", "max_tokens": -1}):
        response = httpx.post(fleet.url + "/v1/completions", json=body, headers=ALL, timeout=30)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"]


def _served(port: int) -> float:
    """Completions that the ingress on its own port has answered."""
    metrics = _get(f"http://127.0.0.1:{port}/metrics").text
    return _sum(metrics, "tailor_http_responses_total", "/v1/completions")


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
        assert _post(f"http://127.0.0.1:{port}", _body(1, max_tokens=2, model="invoices"))


def test_a_replica_killed_mid_stream_costs_no_answer(
    fleet: FleetProcess, single: LiveServer
) -> None:
    bodies = [_body(i, max_tokens=120, speculation=OFF) for i in range(24)]
    begun: list[int] = []
    with ThreadPoolExecutor(24) as threads:
        heard = partial(begun.append, 1)
        answers = [threads.submit(_streamed, fleet.url, body, heard) for body in bodies]
        wait_until(lambda: len(begun) > 200, 60)
        fleet.ask("kill", "KILLED")
        texts = [answer.result(90) for answer in answers]
    for body, text in zip(bodies, texts, strict=True):
        assert text == _wanted(single, body)[0]["text"]
    _wait_for_replicas(fleet, 2)


# --- what a replica learned outlives it, and an update loses no request ---


def _learned(fleet: FleetProcess, series: str) -> dict[str, float]:
    """The series of the task that learns, of every engine."""
    metrics = _get(fleet.url + "/metrics").text
    labels = rf'{{engine="([^"]+)",[^}}]*task="{LEARNS}"[^}}]*}}'
    return {
        engine: float(value)
        for engine, value in re.findall(rf"^{series}{labels} (\S+)$", metrics, re.MULTILINE)
    }


def test_what_a_replica_learned_is_drafted_where_it_is_replaced(fleet: FleetProcess) -> None:
    def ask(prompt: str = "the quick") -> Any:
        body = _body(0, model=LEARNS, prompt=prompt, max_tokens=40, temperature=0.0)
        return _post(fleet.url, body)["choices"]

    first = ask()
    _wait(lambda: max(_learned(fleet, "tailor_learned_version").values(), default=0) >= 1)
    written: dict[str, float] = {}
    # The two ingresses hear of an engine one after the other.
    _wait(lambda: bool(written.update(_learned(fleet, "tailor_learned_segments_total")) or written))
    home = max(written, key=lambda name: written[name])
    fleet.ask(f"kill {home}", "KILLED")
    prompts = (f"the quick {i}" for i in itertools.count())

    def has_arrived() -> bool:
        # Each prompt is new: an answer that is held already would not be held twice.
        ask(next(prompts))
        told = json.loads(fleet.ask(f"learned {LEARNS}", "LEARNED"))
        return any(held > 40 * own for held, own in told.values())

    _wait(has_arrived)
    assert ask() == first


def test_an_update_loses_no_request(fleet: FleetProcess) -> None:
    """Engines and ingresses are replaced. Half of the clients keep their connections."""
    bodies = [_body(i, temperature=0.0, max_tokens=40) for i in range(8)]
    wanted = [_post(fleet.url, body)["choices"] for body in bodies]
    stop = threading.Event()
    num_asked: list[int] = []

    def go_on(i: int) -> None:
        with httpx.Client() as kept:
            while not stop.is_set():
                answer = _post(fleet.url, bodies[i], kept if i % 2 else None)
                assert answer["choices"] == wanted[i]
                num_asked.append(i)

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(go_on, i) for i in range(8)]
        try:
            _wait(lambda: len(num_asked) > 12)
            fleet.ask("update", "UPDATED", timeout_s=120)
            before = len(num_asked)
            _wait(lambda: len(num_asked) > before + 12)
        finally:
            stop.set()
        for thread in running:
            thread.result(60)
    status = fleet.ask("status", "STATUS")
    assert status.count("HEALTHY") == 4 and "UNHEALTHY" not in status  # a builder among them


# --- replicas come and go by what waits, down to none ---


def _become(fleet: FleetProcess, *options: str) -> None:
    fleet.ask(" ".join(("become", *options)), "BECAME", 120.0)


def _num_engines(fleet: FleetProcess) -> int:
    return num_up(_get(fleet.url + "/metrics").text)


@pytest.fixture(scope="module")
def before_it_scaled(fleet: FleetProcess) -> Any:
    """An update has switched scaling on; what the fleet had answered to the first body."""
    before = _post(fleet.url, _body(0))["choices"]
    _become(fleet, "--least", "0", "--replicas", "2", "--step-s", "0.03")
    return before


def test_a_model_sleeps_and_a_request_wakes_it(fleet: FleetProcess, before_it_scaled: Any) -> None:
    _wait(lambda: _num_engines(fleet) == 0)
    assert _post(fleet.url, _body(0))["choices"] == before_it_scaled  # it waited for a replica


@pytest.mark.usefixtures("before_it_scaled")
def test_a_model_grows_by_what_waits(fleet: FleetProcess) -> None:
    grew = threading.Event()

    def go_on(i: int) -> None:
        while not grew.is_set():
            _post(fleet.url, _body(i, max_tokens=40))

    with ThreadPoolExecutor(48) as threads:
        answers = [threads.submit(go_on, i) for i in range(48)]
        try:
            _wait(lambda: _num_engines(fleet) == 2)
        finally:
            grew.set()
        for answer in answers:
            answer.result()


@pytest.fixture(scope="module")
def fixed(fleet: FleetProcess, before_it_scaled: Any) -> None:
    """An update has switched scaling off: the fleet has one replica, and 0.5 s of drain_s."""
    _become(fleet, "--replicas", "1", "--step-s", "0.015", "--drain-s", "0.5")


@pytest.mark.usefixtures("fixed")
def test_an_update_switches_scaling_off(fleet: FleetProcess) -> None:
    _wait(lambda: _num_engines(fleet) == 1)


@pytest.mark.usefixtures("fixed")
def test_a_stream_ends_on_the_weights_that_began_it(fleet: FleetProcess) -> None:
    """It takes longer than server.yaml's drain_s, and the new model writes another text."""
    body = _body(0, temperature=0.0, max_tokens=200)
    with ThreadPoolExecutor(1) as threads:
        wanted = _post(fleet.url, body)["choices"][0]["text"]
        begun = threading.Event()
        answer = threads.submit(_streamed, fleet.url, body, begun.set)
        assert begun.wait(30)
        fleet.ask("rewrite", "REWRITTEN", timeout_s=120)
        assert answer.result(60) == wanted
        assert _post(fleet.url, body)["choices"][0]["text"] != wanted


# --- Ray's head and a node are lost ---


@pytest.fixture(scope="module")
def texts(single: LiveServer) -> list[str]:
    """What a single server answers to the requests of a Flight."""
    return asyncio.run(expected(single.url))


@pytest.fixture(scope="module")
def on_two_nodes(fleet: FleetProcess) -> None:
    """The fleet has replicas on both nodes."""
    fleet.deploy("--replicas", str(NUM_LEFT), "--step-s", "0.01")


def _fly(fleet: FleetProcess, texts: list[str], *events: Callable[[], object]) -> None:
    """Requests in flight; the events come while they are. None is lost, and all are `texts`."""
    flight = Flight(fleet.url, texts, NUM_REQUESTS)
    at = [(NUM_REQUESTS * (i + 1) // 8, event) for i, event in enumerate(events)]
    asyncio.run(flight.run(at))
    assert (flight.num_lost, flight.num_wrong) == (0, 0), flight.problems
    assert flight.num_answered == NUM_REQUESTS


@pytest.mark.usefixtures("on_two_nodes")
def test_the_head_dies_in_flight_and_comes_back(fleet: FleetProcess, texts: list[str]) -> None:
    _fly(
        fleet,
        texts,
        lambda: fleet.ask("behead", "BEHEADED", 60),
        lambda: fleet.ask("kill", "KILLED"),  # whose replacement needs a head that knows of it
    )
    _wait_for_replicas(fleet, NUM_LEFT)


@pytest.mark.usefixtures("on_two_nodes")
def test_a_node_is_lost_in_flight(fleet: FleetProcess, texts: list[str]) -> None:
    num_gone: list[int] = []
    _fly(fleet, texts, lambda: num_gone.append(int(fleet.ask("lose", "LOST", 60))))
    assert num_gone[0] > 0
    _wait_for_replicas(fleet, NUM_LEFT)
