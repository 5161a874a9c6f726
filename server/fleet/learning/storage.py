"""Storage: bytes under names, in a folder or in whatever fsspec can reach; which names what is
learned has there, and the manifest that says what is published.

A file is there whole or not at all: in a folder it is written beside its place and moved there, an
object store puts objects whole. Where neither holds, readers find out: names tell the hash of what
they hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from drafters.atomic_file import replacing
from server.engine.calibrations import digest
from server.engine.task_store import Key


class StorageError(OSError):
    """The storage is away or refuses."""


class Storage:
    """url: a folder, or a URL as fsspec reads it; credentials are where fsspec finds them.

    Paths are relative, with slashes. Every method may block. Raises StorageError; `read` also
    FileNotFoundError, and TornError for a file that is larger than any of ours.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs: Any = None
        self._root = ""

    def read(self, path: str, *, most: int) -> bytes:
        """What is in a file, which may hold `most` bytes."""
        with self._at(path) as (fs, place):
            data: bytes = fs.cat_file(place, start=0, end=most + 1)
        if len(data) > most:
            raise TornError(f"{path} has more than {most} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        """Put a file there, in place of what there is."""
        with self._at(path, StorageError) as (fs, place):
            if "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol):
                local = Path(place)
                local.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with replacing(local) as out:
                    out.write(data)
            else:
                fs.pipe_file(place, data)

    def files(self, path: str = "") -> list[str]:
        """All files below a folder, in order; none where there is no such folder."""
        found = list[Any]()
        with contextlib.suppress(FileNotFoundError), self._at(path) as (fs, place):
            found = fs.find(place)
        return sorted(str(name)[len(self._root) :].lstrip("/") for name in found)

    def folders(self, path: str = "") -> list[str]:
        """The names of the folders in a folder."""
        names = set[str]()
        with contextlib.suppress(FileNotFoundError), self._at(path) as (fs, place):
            found = fs.ls(place, detail=True)
            names = {str(f["name"]).rstrip("/") for f in found if f["type"] == "directory"}
            names.discard(place)
        return sorted(name.rpartition("/")[2] for name in names)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """A file, or a folder with all that is in it, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._at(path) as (fs, place):
            fs.rm(place, recursive=recursive)

    @contextlib.contextmanager
    def _at(
        self, path: str, kept: type[Exception] = FileNotFoundError
    ) -> Iterator[tuple[Any, str]]:
        """The file system and the place in it. What it and what is behind it raise is a
        StorageError, but for `kept`."""
        try:
            if self._fs is None:
                import fsspec

                # Others write there, too: nothing is remembered of what a folder holds.
                self._fs, root = fsspec.url_to_fs(self._url, use_listings_cache=False)
                self._root = root.rstrip("/")
            yield self._fs, f"{self._root}/{path}" if path else self._root
        except kept:
            raise
        except Exception as error:
            raise StorageError(f"{type(error).__name__}: {str(error)[:200]}") from error


# --- names ----------------------------------------------------------------------------------------

#     <model>/<task>/e<epoch>/<scope>/segments/<writer>-<number>-<hash>.bin
#                                    /state-<hash>.bin  published.json
#
# Models, tasks and scopes are named by hashes. A task that forgets begins a new epoch: what is late
# for an old one is never read again.

MAX_FILE = 1 << 30
_MAX_MANIFEST = 1 << 20
_EPOCH = re.compile(r"e(\d{1,9})")
_SEGMENT = re.compile(r"([0-9a-f]{12})-(\d{8})-([0-9a-f]{16})\.bin")
SCOPE_FOLDER = re.compile(r"[0-9a-f]{16}/[0-9a-f]{16}/e\d{1,9}/[0-9a-f]{16}")
MANIFEST = "published.json"


class TornError(ValueError):
    """A file does not hold what its name says, or no such thing at all."""


Count = Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True):
    """What is published of a scope. What earlier versions of Tailor say beside it is not looked at.

    version: ascending. published_ns: time.time_ns(). state: name of a file in the scope's folder.
    num_merged: segments, ever. marks: of each writer the number of its last segment that is merged,
    and when that was.
    """

    version: Count
    published_ns: Count
    state: Annotated[str, msgspec.Meta(pattern=r"^state-[0-9a-f]{16}\.bin\Z")]
    num_merged: Count = 0
    marks: dict[str, tuple[int, int]] = {}


@dataclass(frozen=True, slots=True)
class SegmentName:
    """writer: an engine, as long as it keeps the scope in memory; its segments are numbered from
    1."""

    writer: str
    number: int
    hash: str

    def path(self, scope: str) -> str:
        """Below a scope_folder."""
        return f"{scope}/segments/{self.writer}-{self.number:08d}-{self.hash}.bin"

    @staticmethod
    def of(file: str) -> SegmentName | None:
        """None for what is no segment."""
        found = _SEGMENT.fullmatch(file)
        return None if found is None else SegmentName(found[1], int(found[2]), found[3])


def task_folder(model: str, task: str) -> str:
    """model: what the engines have in common that learn together."""
    return f"{digest(model)}/{digest(task)}"


def scope_folder(model: str, key: Key, epoch: int) -> str:
    """Of a (task, scope)."""
    return f"{task_folder(model, key[0])}/e{epoch}/{digest(*key)}"


def hash_of(data: bytes) -> str:
    """What names tell: 16 hex digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def epoch_of(storage: Storage, task: str) -> int:
    """The epoch that counts in a task_folder. Raises StorageError."""
    epochs = [int(m[1]) for name in storage.folders(task) if (m := _EPOCH.fullmatch(name))]
    return max(epochs, default=0)


def forget(storage: Storage, task: str) -> None:
    """Begin a new epoch of a task in every model's folder, and drop what is there.

    Raises StorageError: then nobody may say that it is forgotten.
    """
    for model in storage.folders():
        folder = f"{model}/{digest(task)}"
        epoch = epoch_of(storage, folder) + 1
        storage.write(f"{folder}/e{epoch}/began", b"")
        for name in storage.folders(folder):
            if name != f"e{epoch}":
                storage.delete(f"{folder}/{name}", recursive=True)


def read_manifest(storage: Storage, scope: str) -> Manifest | None:
    """What is published in a scope_folder; None for nothing. Raises StorageError, TornError."""
    try:
        data = storage.read(f"{scope}/{MANIFEST}", most=_MAX_MANIFEST)
        return msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TornError(f"the manifest is damaged: {str(error)[:100]}") from None


def read_hashed(storage: Storage, path: str) -> bytes:
    """A file whose name ends in -<hash>.bin. Raises StorageError, TornError."""
    try:
        data = storage.read(path, most=MAX_FILE)
    except FileNotFoundError:
        raise TornError(f"{path} is gone") from None
    if hash_of(data) != path.rpartition("-")[2].removesuffix(".bin"):
        raise TornError(f"{path} does not hold what its name says")
    return data
