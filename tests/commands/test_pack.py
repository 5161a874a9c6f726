"""`tailor tasks pack` and `unpack`: a task goes to another machine whole, or not at all."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from server.commands.cli import main
from server.config import load_task
from tests.commands.command_line import Tailor


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "slots.corpus").write_bytes(b"corpus" * 100)
    (folder / "slots.corpus").chmod(0o600)
    (folder / "slots.vocab").write_bytes(b"profile")
    file = folder / "slots.yaml"
    file.write_text(
        "speculation:\n  corpus: slots.corpus\nvocabulary:\n  mode: exact\n  profile: slots.vocab\n"
    )
    return file


def test_a_task_travels_whole(task: Path, tmp_path: Path, tailor: Tailor) -> None:
    told = tailor("tasks", "pack", task).out
    assert "written: slots.tailor-task (slots.yaml, slots.corpus, slots.vocab)" in told
    assert "next: tailor tasks unpack slots.tailor-task" in told
    there = tmp_path / "there"
    unpack = ["tasks", "unpack", "slots.tailor-task", "--tasks", there]
    assert f"next: tailor tasks check {there}" in tailor(*unpack).out
    for name in ("slots.yaml", "slots.corpus", "slots.vocab"):
        assert (there / name).read_bytes() == (task.parent / name).read_bytes()
    assert (there / "slots.corpus").stat().st_mode & 0o044, "a service of another user reads it"
    assert load_task(there / "slots.yaml").speculation.corpus == str(there / "slots.corpus")
    assert "is there already; --force" in tailor(*unpack, status=1).err
    first = (tmp_path / "slots.tailor-task").read_bytes()
    assert "adapter" not in tailor("tasks", "pack", task, "--force").out
    assert (tmp_path / "slots.tailor-task").read_bytes() == first, "equal tasks, equal files"
    task.write_text(f"# Serve: tailor serve --adapter slots.make/adapter\n{task.read_text()}")
    told = tailor("tasks", "pack", task, "--force").out
    assert "not in it: the adapter; carry its folder, too (tailor serve" in told


def test_what_lies_elsewhere_or_nowhere_is_told(task: Path, tmp_path: Path, tailor: Tailor) -> None:
    (task.parent / "slots.vocab").rename(tmp_path / "slots.vocab")
    assert "no file" in tailor("tasks", "pack", task, status=1).err
    task.write_text(task.read_text().replace("slots.vocab", "../slots.vocab"))
    assert "lies elsewhere; put it beside" in tailor("tasks", "pack", task, status=1).err
    assert not list(tmp_path.glob("*.tailor-task"))


def _changed(packed: Path, name: str, data: bytes, **manifest: object) -> None:
    with zipfile.ZipFile(packed) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    contents[name] = data
    if manifest:
        facts = json.loads(contents["manifest.json"]) | manifest
        contents["manifest.json"] = json.dumps(facts).encode()
    with zipfile.ZipFile(packed, "w") as archive:
        for one, content in contents.items():
            archive.writestr(one, content)


def test_damage_and_foreign_paths_are_refused(
    task: Path, tmp_path: Path, tailor: Tailor, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, there = tmp_path / "slots.tailor-task", tmp_path / "there"

    def says() -> str:
        told = tailor("tasks", "unpack", packed, "--tasks", there, status=1).err
        assert not there.exists()
        return told

    tailor("tasks", "pack", task)
    whole = packed.read_bytes()
    _changed(packed, "slots.corpus", b"another one")
    assert "slots.corpus is damaged" in says()
    packed.write_bytes(whole)
    outside = {"slots.yaml": {"bytes": 1, "sha256": "x"}, "../x": {"bytes": 1, "sha256": "x"}}
    _changed(packed, "../x", b"x", files=dict(reversed(outside.items())))
    assert "'../x' is no name of a file" in says()
    packed.write_bytes(whole)
    _changed(packed, "x", b"", format=9)
    assert "is of a newer Tailor" in says()
    for files in ([1], {"slots.yaml": {"bytes": -9, "sha256": ""}}, {"slots.yaml": {"bytes": 1e9}}):
        packed.write_bytes(whole)
        _changed(packed, "x", b"", files=files)
        assert "is no packed task, or a damaged one" in says()
    for at in range(0, len(whole), 29):  # a byte is another one: nothing but these is told
        packed.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        if main(["tasks", "unpack", str(packed), "--tasks", str(tmp_path / f"{at}")]):
            assert re.search("damaged|is no name of a file|newer Tailor", capsys.readouterr().err)
    packed.write_bytes(b"PK nothing")
    assert "is no packed task, or a damaged one" in says()
