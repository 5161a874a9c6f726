"""docs/fleet.md is followed: its file is checked, and `fleet up` serves a real (tiny) model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from server.commands.cli import main
from tests.fleet.ray_parts import free_port
from tests.model.tiny_models import save_tiny
from tests.setup.pages import DOCS, ROOT
from tests.waiting import wait_until

PAGE = (DOCS / "fleet.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's first cluster.yaml, a server.yaml and a tiny model."""
    folder = tmp_path_factory.mktemp("fleet")
    model = folder / "model"
    save_tiny(model, "llama", vocab_size=260, max_position_embeddings=512)
    first, *_ = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M)
    cluster = first.replace("configs/server.yaml", "server.yaml").replace("min: 2", "min: 1")
    learning = "{storage: learned, append_s: 0.2, publish_s: 0.2, look_s: 0.2}"
    cluster = cluster.replace("num_cpus: 1", "num_cpus: 0.5") + f"learning: {learning}\n"
    (folder / "cluster.yaml").write_text(cluster)
    (folder / "tasks").mkdir()
    (folder / "tasks" / "slots.yaml").write_text(
        "name: slots\nsampling: {max_tokens: 12}\nspeculation: {learn: persist}\n"
    )
    (folder / "server.yaml").write_text(
        f"listen: {{port: {free_port()}}}\nmodels: [{{name: tiny, path: ./model}}]\ntasks: tasks\n"
        "engine: {max_num_seqs: 4, max_num_batched_tokens: 64, threads: 1,"
        " kv_cache_memory: 64MiB, structured_outputs: false}\n"
    )
    return folder


def test_the_page_s_file_is_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tailor fleet check cluster.yaml" in PAGE
    assert main(["fleet", "check", str(folder / "cluster.yaml")]) == 0
    told = capsys.readouterr().out
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
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    bad = folder / "bad"
    bad.mkdir(exist_ok=True)
    (bad / "cluster.yaml").write_text(text.replace("server.yaml", "../server.yaml"))
    assert main(["fleet", "check", str(bad / "cluster.yaml")]) == 1
    assert problem in capsys.readouterr().err


def test_ray_serve_s_own_commands_find_the_fleet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve build server.fleet.app:fleet` and `serve run server.fleet.app:build config=...`."""
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: the extra `ray`")
    from server.fleet import app

    for name in re.findall(r"`serve (?:run|build) server\.fleet\.app:(\w+)", PAGE):
        monkeypatch.setenv("TAILOR_CLUSTER", str(folder / "cluster.yaml"))
        found = getattr(app, name)
        if name == "build":
            found = found({"config": str(folder / "cluster.yaml")})
        assert isinstance(found, serve.Application), name
    with pytest.raises(AttributeError):
        _ = app.nothing


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`tailor fleet up` on a Ray of its own, in a session of its own; what it says is in `log`."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: the extra `ray`")
    command = [sys.executable, "-m", "server.commands.cli", "fleet", "up", "cluster.yaml"]
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(folder, lambda: process.poll() is not None or "is ready" in log.read_text())
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _wait(folder: Path, condition: Callable[[], object]) -> None:
    wait_until(condition, 240, pause_s=0.2, told=(folder / "log").read_text)


def _url(folder: Path) -> str:
    [port] = re.findall(r"port: (\d+)", (folder / "server.yaml").read_text())
    return f"http://127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.usefixtures("up")
def test_fleet_up_tells_what_it_does(folder: Path) -> None:
    told = (folder / "log").read_text()
    at = [told.index(what) for what in ("preparing", "starting Ray", "starting replicas")]
    assert at == sorted(at) and at[-1] < told.index("The fleet is ready")
    states = re.findall(r"engine-tiny: (.*)", told)
    assert states and all(" starting" in line or " running" in line for line in states), told


@pytest.mark.slow
@pytest.mark.usefixtures("up")
def test_fleet_up_serves_the_tasks_of_a_real_model_and_learns(folder: Path) -> None:
    url = _url(folder)
    body = {"model": "slots", "prompt": "Town 1:", "temperature": 0}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert 0 < answer.json()["usage"]["completion_tokens"] <= 12
    tasks = httpx.get(url + "/v1/models", timeout=30).json()
    assert "slots" in json.dumps(tasks)
    learned = r'^tailor_learned_version{engine="tiny/0",model="tiny",task="slots"} 1'
    _wait(folder, lambda: re.search(learned, httpx.get(url + "/metrics", timeout=30).text, re.M))


@pytest.mark.slow
def test_what_listens_on_other_addresses_asks_for_a_token(up: subprocess.Popen[bytes]) -> None:
    """Serve's replicas alone do: a call of them would run code."""
    grpc = pytest.importorskip("grpc")

    listening = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == up.pid:
                found = process.net_connections("tcp")
                listening |= {one.laddr for one in found if one.status == psutil.CONN_LISTEN}
    assert len(listening) > 5
    elsewhere = [at for at in listening if not at.ip.endswith("127.0.0.1") and at.ip != "::1"]
    assert elsewhere and {at.ip for at in elsewhere} <= {"::"}
    for at in elsewhere:
        with grpc.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            for metadata in ([], [("authorization", "Bearer guessed")]):
                call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"", timeout=10, metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.slow
def test_a_hangup_reads_the_files_again_and_a_sigterm_ends_all(
    up: subprocess.Popen[bytes], folder: Path
) -> None:
    (folder / "tasks" / "more.yaml").write_text("name: more\n")
    up.send_signal(signal.SIGHUP)  # new ingresses, the same engine
    _wait(folder, lambda: "the fleet is up to date" in (folder / "log").read_text())
    more = {"model": "more", "prompt": "Town 1:", "temperature": 0}
    ask = partial(httpx.post, _url(folder) + "/v1/completions", json=more, timeout=60)
    _wait(folder, lambda: ask().status_code == 200)  # the old ingress ends what it has
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
