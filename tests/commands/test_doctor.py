"""`tailor doctor` finds what is wrong here and says what to do; `tailor cache` shows and clears."""

from __future__ import annotations

import itertools
import os
import resource
import socket
from pathlib import Path

import pytest

from server.commands import doctor
from server.commands.cli import main
from server.machine import Machine
from tests.commands.command_line import Tailor


@pytest.fixture(autouse=True)
def place(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and a quiet machine."""
    monkeypatch.setenv("TAILOR_CODE_DIR", str(tmp_path / "code"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(doctor, "_MIN_SHARED", 0)
    monkeypatch.setattr(doctor, "_MIN_CACHE", 0)
    return tmp_path


def told(
    capsys: pytest.CaptureFixture[str], *words: str, port: str = "0"
) -> tuple[int, dict[str, str]]:
    """The exit status, and what there is to look at with what to do."""
    status = main(["doctor", "--port", port, *words])
    lines = capsys.readouterr().out.splitlines()
    found = {
        line.split(maxsplit=2)[2]: after.split("-> ")[1]
        for line, after in itertools.pairwise(lines)
        if line.startswith("look")
    }
    return status, found


def test_a_model_that_is_here_is_all_well(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert told(capsys, "--model", str(place / "model")) == (0, {})


def test_each_finding_says_what_to_do(
    capsys: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "quota", property(lambda _: 1.5))
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    monkeypatch.setattr(doctor, "_MIN_SHARED", 1 << 60)
    monkeypatch.setattr(doctor, "_MIN_CACHE", 1 << 60)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    config = place / "server.yaml"
    config.write_text("engine: {threads: 1024}\nlisten: {host: 0.0.0.0}\n", encoding="utf-8")
    status, found = told(capsys, "--config", str(config))
    assert status == 1
    for what, todo in {
        "quota of 1.5 cores": "whole cores",
        "engine.threads is 1024, and there are 1 cores": "leave it out",
        "the load is 1000000.0": "end what else runs",
        "/dev/shm has": "--shm-size",
        "may open 64 files": "ulimit -n",
        "GB free": "tailor cache",
        "smollm2-135m-instruct is not on this machine": "tailor models fetch",
        "everyone who reaches 0.0.0.0 may call": "TAILOR_API_KEY",
    }.items():
        assert [t for w, t in found.items() if what in w and todo in t], (what, found)


def test_a_taken_port_and_a_folder_that_is_no_folder(
    capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    (place / "cache").write_text("", encoding="utf-8")
    os.chmod(place / "cache", 0o400)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        _, found = told(capsys, "--tasks", str(place / "none"), port=port)
    assert any(f"cannot listen on 127.0.0.1:{port}" in what for what in found)
    assert any("none" in what for what in found)


def test_cache_shows_what_is_kept_and_clears_one_part(tailor: Tailor, place: Path) -> None:
    for name in ("costs", "tasks"):
        (place / "cache" / name).mkdir(parents=True)
        (place / "cache" / name / "file").write_bytes(b"x" * 3_000_000)
    lines = tailor("cache").out.splitlines()
    sizes = {line.split()[0]: line for line in lines if "  " in line and line[0] != " "}
    assert "3 MB" in sizes["costs"] and "cannot be made again" in sizes["tasks"]
    assert set(sizes) == set(doctor.cache_parts())
    assert "3 MB removed" in tailor("cache", "--clear", "costs").out
    assert (
        not (place / "cache" / "costs").exists() and (place / "cache" / "tasks" / "file").exists()
    )
    tailor("cache", "--clear", "everything", status=2)
