"""What a supervisor sees: how the server's process ends, and that it comes back on the same port.

docker/tailor.service and docker/compose.yaml restart it on any end but a clean one. systemd itself
needs to be the first process of a machine; here its own checker reads the unit, and supervisord
(Debian: apt-get install supervisor) restarts a real server in its place, by the unit's rules.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml

from loadtest.peer import free_port
from tests.docker.test_container_files import UNIT, unit
from tests.processes import Running
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
"""A first start compiles kernels, on a machine that may be busy."""


@pytest.fixture(scope="module")
def folder(tiny_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("supervised")
    (made / "tiny").symlink_to(tiny_file)
    (made / "server.yaml").write_text(json.dumps({"restart": {"max_restarts": 0}}))
    return made


def command(folder: Path, port: int) -> list[str]:
    return [
        sys.executable, "-m", "server.commands.cli", "serve",
        "--host", "127.0.0.1", "--port", str(port),
        "--config", str(folder / "server.yaml"), "--model", str(folder / "tiny"),
        "--kv-cache-memory", "64MiB", "--max-num-seqs", "4",
    ]  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    return {"TAILOR_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(REPOSITORY)}


def serves(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


wait = partial(wait_until, timeout_s=LIMIT_S, pause_s=0.1)


def engine_of(server: int) -> psutil.Process:
    """The process that holds the model: the child with the most memory."""
    return max(psutil.Process(server).children(), key=lambda child: child.memory_info().rss)


def test_the_unit_serves_the_server_yaml_that_its_head_installs_until_the_last_engine_dies(
    folder: Path,
) -> None:
    """Its head's `cp` and its ExecStart, with another folder for /etc/tailor. An end that is not
    clean has status 1, as `Restart=on-failure` needs it."""
    (copied,) = re.findall(r"cp -r (.+) /etc/tailor/", UNIT.read_text())
    etc = folder / "etc"
    etc.mkdir()
    for source in copied.split():
        path = REPOSITORY / source
        (shutil.copytree if path.is_dir() else shutil.copy)(path, etc / path.name)
    settings = yaml.safe_load((etc / "server.yaml").read_text())
    settings["models"] = [{"name": "tiny", "path": str(folder / "tiny")}]
    settings["keys"] = [{"id": "one", "key": "sk-one"}]
    settings["limits"]["max_body_bytes"] = 2048
    settings["engine"] |= {"max_num_seqs": 4}
    settings["restart"] = {"max_restarts": 0}
    (etc / "server.yaml").write_text(json.dumps(settings))
    start = unit()["Service"]["ExecStart"].replace("/etc/tailor", str(etc)).split()
    assert start[:2] == ["/opt/tailor/bin/tailor", "serve"]

    def status(prompt: str, key: str | None = None) -> int:
        try:
            body = {"model": "extraction", "prompt": prompt, "max_tokens": 2}
            server.ask("/v1/completions", body, key)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        return 200

    with Running(start[2:], environment(folder), cwd=folder) as server:
        assert status("the") == 401
        assert status("the", "sk-one") == 200  # extraction: a task of the copied folder
        assert status("the " * 1000, "sk-one") == 413
        engine_of(server.process.pid).kill()
        server.wait_for("no engine is left")
        assert server.process.wait(LIMIT_S) == 1


def test_systemd_reads_the_unit_without_a_complaint(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    start = unit()["Service"]["ExecStart"].split()[0]
    text = UNIT.read_text().replace(start, "/bin/true")  # verify wants the program to be there
    (tmp_path / "tailor.service").write_text(text)

    def verify() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [analyze, "verify", "--man=no", str(tmp_path / "tailor.service")],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    done = verify()
    complaints = [line for line in done.stderr.splitlines() if "tailor.service" in line]
    assert done.returncode == 0 and complaints == []
    (tmp_path / "tailor.service").write_text(text.replace("Restart=on-failure", "Restart=perhaps"))
    assert "perhaps" in verify().stderr  # it would have said so


def test_a_supervisor_brings_the_server_back_and_leaves_a_clean_end_alone(folder: Path) -> None:
    supervisord = shutil.which("supervisord")
    if supervisord is None:
        pytest.skip("supervisord is not installed (Debian: apt-get install supervisor)")
    service = unit()["Service"]
    restart = {"on-failure": "unexpected"}[service["Restart"]]
    compose = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text())
    assert compose["services"]["tailor"]["restart"] == "unless-stopped"
    port = free_port()
    words = " ".join(command(folder, port))
    values = ",".join(f'{name}="{value}"' for name, value in environment(folder).items())
    (folder / "supervisord.conf").write_text(
        f"[supervisord]\nnodaemon=true\nlogfile={folder}/supervisor.log\n"
        f"pidfile={folder}/supervisor.pid\nchildlogdir={folder}\n"
        f"[program:tailor]\ncommand={words}\ndirectory={folder}\nenvironment={values}\n"
        f"autorestart={restart}\nexitcodes=0\nstartsecs=1\n"
        f"stopwaitsecs={service['TimeoutStopSec']}\nredirect_stderr=true\n"
        f"stdout_logfile={folder}/child.log\n"
    )
    supervisor = subprocess.Popen(
        [supervisord, "-c", str(folder / "supervisord.conf")], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip

    def told() -> str:
        return (folder / "supervisor.log").read_text() + (folder / "child.log").read_text()

    def pid() -> int:
        children = psutil.Process(supervisor.pid).children()
        return children[0].pid if children else 0

    try:
        wait(lambda: serves(port), told=told)
        seen = [pid()]
        for end in (
            lambda server: os.kill(server, signal.SIGKILL),  # as the kernel does without memory
            lambda server: engine_of(server).kill(),
        ):
            engine = engine_of(seen[-1])
            end(seen[-1])
            wait(lambda: pid() not in (0, seen[-1]), told=told)
            wait(lambda: serves(port), told=told)  # on the same port
            wait(lambda engine=engine: not engine.is_running(), told=told)  # type: ignore[misc]
            seen.append(pid())
        assert len(set(seen)) == 3
        os.kill(seen[-1], signal.SIGTERM)
        wait(lambda: "exit status 0; expected" in told(), told=told)
        time.sleep(2.0)
        assert pid() == 0
    finally:
        supervisor.terminate()
        supervisor.wait(60)
