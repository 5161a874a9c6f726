"""The container files name what is there, and the proof script reads them as a builder would."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docker import prove, resolve
from tests.small_server import Handler, serving

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((REPOSITORY / "docker").glob("Dockerfile*"))
UNIT = REPOSITORY / "docker" / "tailor.service"


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(UNIT)
    return parsed


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_every_copy_has_its_source_and_the_server_is_not_root(file: Path) -> None:
    found = list(prove.instructions(file.read_text()))
    names = [name for name, _ in found]
    for name, rest in found:
        if name == "COPY" and not rest.startswith("--from"):
            for source in [word for word in rest.split()[:-1] if not word.startswith("--")]:
                assert (REPOSITORY / source).exists(), source
                assert not prove.ignored(source, prove.rules()), source
    last = dict(found)  # the last of each kind is what counts
    user = last["USER"].split(":")
    assert user[0].isdigit() and int(user[0]) > 0
    # A tuned task's corpus comes with it, and its owner alone may read it.
    assert ("COPY", f"--chown={last['USER']} configs/tasks /etc/tailor/tasks") in found
    assert not prove.ignored("configs/tasks/births.corpus", prove.rules())
    assert "RUN" not in names[names.index("USER") :]
    for name in ("ENTRYPOINT", "CMD", "VOLUME"):
        assert all(isinstance(word, str) for word in json.loads(last[name]))
    assert "127.0.0.1" not in last["CMD"]  # a container's own loopback is nobody else's
    assert json.loads(last["VOLUME"]) == ["/var/cache/tailor"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_health_check_asks_the_server_itself_for_its_status(file: Path) -> None:
    """Docker gives its client's proxy to each container."""
    told = dict(prove.instructions(file.read_text()))["HEALTHCHECK"]
    words = prove.exec_form(told.partition("CMD")[2])[1:]

    statuses = [503, 200]

    class Answer(Handler):
        def do_GET(self) -> None:
            assert self.path == "/ready"
            self.reply({}, statuses.pop(0))

    with serving(Answer) as url:
        port = url.rpartition(":")[2]
        command = [sys.executable, *(word.replace("8000", port) for word in words)]
        proxy = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        found = [subprocess.run(command, env=proxy, check=False).returncode for _ in range(2)]
    assert found == [1, 0]


def pins() -> list[str]:
    return (REPOSITORY / "constraints.txt").read_text().splitlines()


def test_both_images_and_make_install_torch_as_the_constraints_pin_it() -> None:
    [pinned] = [line for line in pins() if line.startswith("torch==")]
    assert len(DOCKERFILES) == 2
    for file in DOCKERFILES:
        assert f"-c constraints.txt {pinned}" in file.read_text()
    named = re.findall(r"torch==[\d.]+", (REPOSITORY / "Makefile").read_text())
    assert set(named) == {pinned}


def test_the_cuda_image_leaves_triton_to_torch() -> None:
    """torch's CUDA build names one Triton; the one that CPU builds are tested with is another."""
    assert not any(line.lower().startswith(("triton", "pytorch-triton")) for line in pins())
    for file in DOCKERFILES:
        assert "constraints-triton" not in file.read_text()
    # What follows torch must not bring another build of it.
    cuda = (REPOSITORY / "docker" / "Dockerfile").read_text()
    assert cuda.index("torch==") < cuda.index('".${EXTRAS}"')
    assert "ARG EXTRAS=[gpu]\n" in cuda


@pytest.mark.skipif(
    os.environ.get("TAILOR_RESOLVE") != "1", reason="asks the package index: TAILOR_RESOLVE=1"
)
def test_what_the_cuda_image_installs_fits_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "torch==2.13.0" in lines and any(line.startswith("triton==") for line in lines)


def test_the_resolver_asks_for_what_the_image_installs() -> None:
    file = REPOSITORY / "docker" / "Dockerfile"
    assert resolve.asked(file.read_text()) == ["torch==2.13.0", f"{REPOSITORY}[gpu]"]


def test_a_machine_without_a_gpu_gets_the_cpu_s_torch() -> None:
    """make and the CPU image ask uv, which knows its index; pip's usual index is what is left."""
    assert any(line.startswith("uv==") for line in pins())
    for name in ("Makefile", "docker/Dockerfile.cpu"):
        text = (REPOSITORY / name).read_text()
        asked, left = text.index("--torch-backend cpu"), text.rindex("torch==2.13.0")
        assert asked < text.index("||", asked) < left and "TORCH_INDEX" in text
    assert "--torch-backend" not in (REPOSITORY / "docker" / "Dockerfile").read_text()


def test_ignored_like_dockerignore() -> None:
    lines = ["*", "!server", "!configs", "**/__pycache__", "**/*.pyc", "configs/tasks/*.corpus"]
    kept = ["server/commands/cli.py", "server/api/app.py", "configs/tasks/sql.yaml"]
    out = [
        "README.md", "tests/x.py", "server/__pycache__/cli.pyc", "server/api/a.pyc",
        "configs/tasks/sql.corpus",
    ]  # fmt: skip
    assert [path for path in kept + out if prove.ignored(path, lines)] == out


def test_instructions_are_joined_and_refused_when_cut_short() -> None:
    text = "# x\nFROM a AS b\nRUN one \\\n    # said why\n    && two\n\nUSER 1\n"
    assert [(n, " ".join(r.split())) for n, r in prove.instructions(text)] == [
        ("FROM", "a AS b"), ("RUN", "one && two"), ("USER", "1"),
    ]  # fmt: skip
    with pytest.raises(prove.ProofError, match="ends inside"):
        list(prove.instructions("RUN a \\\n"))
    with pytest.raises(prove.ProofError, match="exec form"):
        prove.exec_form("tailor serve")


def test_compose_mounts_what_is_there_and_waits_for_health() -> None:
    plain = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text())
    assert set(plain["services"]) == {"tailor", "prometheus", "grafana"}
    for name, service in plain["services"].items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        if "healthcheck" in service:  # of the service itself, not of what a proxy says
            assert service["healthcheck"]["test"][1:4] == ["wget", "-Y", "off"], name
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), port
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (REPOSITORY / "docker" / source).resolve().exists(), volume
            else:
                assert source in plain["volumes"], volume
    targets = yaml.safe_load((REPOSITORY / "docker/targets/tailor.yml").read_text())
    assert targets == [{"targets": ["tailor:8000"]}]


def test_the_unit_installs_the_build_of_torch_for_a_cpu() -> None:
    """pip's usual index has CUDA's build alone."""
    head = UNIT.read_text().partition("[Unit]")[0].replace("\\\n#", "")
    assert "uv pip install --python /opt/tailor/bin/python --torch-backend cpu" in head
    assert "/opt/tailor/bin/pip install -c constraints.txt torch" not in head


def test_the_unit_restarts_after_failure_and_drains_before_it_is_killed() -> None:
    service = unit()["Service"]
    assert service["Restart"] == "on-failure" and service["KillMode"] == "mixed"
    assert service["User"] == "tailor" and service["NoNewPrivileges"] == "yes"
    assert int(service["TimeoutStopSec"]) >= 60
