"""docs/fleet.md is followed: its file is checked, and a fleet of a real (tiny) model is started.
Beside it, what server.fleet.app does where none runs: it imports Ray, as this file does anyway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from loadtest.fleet import starts_alone
from server.fleet import local
from server.fleet.far_engine import ReplicaLostError
from server.fleet.parts import FleetParts
from server.fleet.routing import Job
from tests.commands.command_line import Tailor
from tests.fleet.ray_parts import CALM, free_port
from tests.installed import needs
from tests.setup.pages import DOCS, ROOT
from tests.waiting import until, wait_until

PAGE = (DOCS / "fleet.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_file: Path) -> Path:
    """A folder with the page's first cluster.yaml, a server.yaml of a tiny model and a task."""
    folder = tmp_path_factory.mktemp("fleet")
    first, *_ = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M)
    cluster = first.replace("configs/server.yaml", "server.yaml").replace("min: 2", "min: 1")
    learning = "{storage: learned, append_s: 0.5, publish_s: 0.5, look_s: 0.5}"
    cluster = cluster.replace("num_cpus: 1", "num_cpus: 0.5") + f"learning: {learning}\n"
    (folder / "cluster.yaml").write_text(cluster)
    (folder / "tasks").mkdir()
    (folder / "tasks" / "slots.yaml").write_text(
        "name: slots\nsampling: {max_tokens: 12}\nspeculation: {learn: persist}\n"
    )
    (folder / "server.yaml").write_text(
        f"listen: {{port: {free_port()}}}\nmodels: [{{name: tiny, path: {tiny_file}}}]\n"
        "tasks: tasks\n"
        "engine: {max_num_seqs: 4, max_num_batched_tokens: 64, threads: 1,"
        " kv_cache_memory: 64MiB, structured_outputs: false}\n"
    )
    return folder


def test_the_page_s_file_is_checked(folder: Path, tailor: Tailor) -> None:
    assert "tailor fleet check cluster.yaml" in PAGE
    told = tailor("fleet", "check", folder / "cluster.yaml").out
    assert "tiny: 1 replica, each with 0.5 cores" in told and "Ray: started here" in told
    assert f"travel of slots; they lie in {folder / 'learned'}" in told


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server: no.yaml", "cluster.yaml:1: server:"),
        ("server: server.yaml\nreplica: {min: 2}", "did you mean replicas?"),
        ("server: server.yaml\nmodels:\n  nobody: {min: 1}", "server.yaml has no model of this"),
        ("server: server.yaml\nreplicas: {min: 3, max: 2}", "cluster.yaml:2: replicas: max must"),
        ("server: server.yaml\nreplicas: {min: 0}", "min 0 needs max"),
        ("server: server.yaml\nreplicas: {num_gpus: 1}", "give its replicas no num_gpus"),
        ("server: server.yaml\nlearning: {storage: 'no://x'}", "cluster.yaml:2: learning.storage"),
        ("server: server.yaml\nembedded: {object_store_memory: 0.5}", "must be an amount"),
    ],
)
def test_a_problem_names_file_line_and_key(
    folder: Path, tailor: Tailor, text: str, problem: str
) -> None:
    bad = folder / "bad"
    bad.mkdir(exist_ok=True)
    (bad / "cluster.yaml").write_text(text.replace("server.yaml", "../server.yaml"))
    assert problem in tailor("fleet", "check", bad / "cluster.yaml", status=1).err


@pytest.fixture(scope="module")
def app() -> Any:
    """server.fleet.app. It imports Ray: not every process that reads this file needs it."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: the extra `ray`")
    from server.fleet import app

    return app


def test_ray_serve_s_own_commands_find_the_fleet(
    app: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve build server.fleet.app:fleet` and `serve run server.fleet.app:build config=...`."""
    from ray.serve import Application

    config = str(folder / "cluster.yaml")
    monkeypatch.setenv("TAILOR_CLUSTER", config)
    names = re.findall(r"`serve (?:run|build) server\.fleet\.app:(\w+)", PAGE)
    assert {"build", "fleet"} <= {*names}
    assert isinstance(app.fleet, Application)
    assert isinstance(app.build({"config": config}), Application)
    with pytest.raises(AttributeError):
        _ = app.nothing


class _Response:
    """A handle of engines, and its response: a replica that tells one message and then nothing.
    error: what ends it instead."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.is_cancelled, self.waits = error, False, Event()
        self.stream = self.control = self.ask = SimpleNamespace(remote=lambda *_: self)

    def options(self, **_: Any) -> Any:
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"told"
        if self.error is not None:
            raise self.error
        self.waits.set()
        await asyncio.sleep(60.0)

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_stream_that_is_left_is_cancelled_at_its_replica(app: Any) -> None:
    """Wherever it is left. Ray does as much by itself as long as it sends by gRPC, so that no
    fleet tells."""
    from ray.exceptions import RayActorError

    def stream_of(response: Any) -> AsyncGenerator[bytes, None]:
        return app.ServeReplicas("tiny", response, response).stream(b"", 0.0, Job("t", 1, 1))

    closed, waiting, lost = _Response(), _Response(), _Response(RayActorError())
    strange = _Response(RuntimeError("Unexpected error (StatusCode.INTERNAL)"))  # as gRPC has it
    async with contextlib.aclosing(stream_of(closed)) as stream:
        assert await anext(stream) == b"told"
    reading = asyncio.create_task(_read(stream_of(waiting)))
    await until(waiting.waits.is_set)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    for response in (lost, strange):
        with pytest.raises(ReplicaLostError):
            await _read(stream_of(response))
    assert [one.is_cancelled for one in (closed, waiting, lost)] == [True, True, False]


async def _read(stream: AsyncIterator[bytes]) -> list[bytes]:
    return [message async for message in stream]


async def test_a_replica_tells_of_itself_again_where_its_engine_answered_nonsense(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_TELL_S", 0.01)
    num_looks = num_told = 0

    async def look() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            raise KeyError("value")

    async def tell() -> None:
        nonlocal num_told
        num_told += 1

    replica: Any = SimpleNamespace(look=look, _tell_once=tell)
    telling = asyncio.create_task(app.EngineDeployment.tell(replica))
    await until(lambda: num_told == 3)
    telling.cancel()


def _ask_for_a_token(session: int) -> None:
    """Of all that listens in a session's processes, Serve's replicas alone are reached on other
    addresses than this machine's own; they want a token, because a call of them would run code."""
    grpc = pytest.importorskip("grpc")

    listening = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session:
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


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_fleet_that_still_makes_its_model(
    sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Making:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Making:
            os.kill(os.getpid(), sent)
            time.sleep(10.0)
            return self

        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(local, "Fleet", Making)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    unused: Any = None
    try:
        with pytest.raises(SystemExit):
            local.up(unused, unused, lambda: pytest.fail("it is ready"), unused)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@needs("ray")
def test_a_ray_that_does_not_start_is_told_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tailor: Tailor
) -> None:
    """A node that starts late raises a plain Exception."""
    import ray

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(FleetParts, "prepare", lambda _: None)
    monkeypatch.setattr(local, "_catch", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    told = tailor("fleet", "up", folder / "cluster.yaml", status=1).err
    assert "Ray could not be reached or started: The current node timed" in told


def test_ray_ends_where_serve_does_not(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray import serve

    ended: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("Ray"))
    monkeypatch.setattr(serve, "shutdown", lambda: 1 / 0)
    monkeypatch.setattr(local, "_ask_desk", lambda *_: None)
    unused: Any = None
    fleet = local.Fleet(unused, unused)
    keeper: Any = SimpleNamespace(let_go=lambda: ended.append("keeper"), stop=lambda: None)
    fleet.keeper = keeper
    with pytest.raises(ZeroDivisionError):
        fleet.__exit__()
    assert ended == ["keeper", "Ray"]


@pytest.mark.slow
@needs("ray")
def test_fleet_up_serves_the_tasks_of_a_real_model(folder: Path) -> None:
    port = int(re.findall(r"port: (\d+)", (folder / "server.yaml").read_text())[0])
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "server.commands.cli", "fleet", "up", "cluster.yaml"]
    env = {"PYTHONPATH": str(ROOT), **CALM}
    log = folder / "log"
    with starts_alone(), log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **env},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _wait = partial(wait_until, timeout_s=240, pause_s=0.2, told=log.read_text)
        try:
            _wait(lambda: process.poll() is not None or "The fleet is ready" in log.read_text())
            assert process.poll() is None, log.read_text()
            steps = ("preparing", "starting Ray", "starting replicas", "engine-tiny: ", "is ready")
            told = [log.read_text().find(step) for step in steps]
            assert told[0] > -1 and told == sorted(told), log.read_text()
            _ask_for_a_token(process.pid)
            body = {"model": "slots", "prompt": "Town 1:", "temperature": 0}
            answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert 0 < answer.json()["usage"]["completion_tokens"] <= 12
            tasks = httpx.get(url + "/v1/models", timeout=30).json()
            assert "slots" in json.dumps(tasks)
            learned = r'^tailor_learned_version{engine="tiny/0",model="tiny",task="slots"} 1'
            _wait(lambda: re.search(learned, httpx.get(url + "/metrics", timeout=30).text, re.M))
            (folder / "tasks" / "more.yaml").write_text("name: more\n")
            process.send_signal(signal.SIGHUP)  # new ingresses, the same engine
            _wait(lambda: "the fleet is up to date" in log.read_text())
            more = {**body, "model": "more"}
            ask = partial(httpx.post, url + "/v1/completions", json=more, timeout=60)
            _wait(lambda: ask().status_code == 200)  # the old ingress ends what it has
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
