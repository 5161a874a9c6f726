"""Which names what is learned has in the storage, and the manifest that says what is published.

    <model>/<task>/e<epoch>/<scope>/segments/<writer>-<number>-<hash>.bin
                                   /state-<hash>.bin  layer-<hash>.bin  published.json

Models, tasks and scopes are named by hashes. A task that forgets begins a new epoch: what is late
for an old one is never read again. Names tell the hash of what they hold, so what is torn is seen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from drafters.json_text import parsed
from server.engine.calibrations import digest
from server.engine.exchange import Key
from server.fleet.learning.storage import Storage

MAX_FILE = 1 << 30
_MAX_MANIFEST = 1 << 20
_EPOCH = re.compile(r"e(\d{1,9})")
_SEGMENT = re.compile(r"([0-9a-f]{12})-(\d{8})-([0-9a-f]{16})\.bin")
_SCOPE_FOLDER = re.compile(r"[0-9a-f]{16}/[0-9a-f]{16}/e\d{1,9}/[0-9a-f]{16}")
MANIFEST = "published.json"


class TornError(ValueError):
    """A file does not hold what its name says, or no such thing at all."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is published of a scope.

    version: ascending. published_ns: time.time_ns(). state, layer: names of files in the scope's
    folder; layer "" for none. corpus_id: of the corpus that the layer was built over, "" for
    none. num_merged, num_torn: segments, ever. marks: of each writer the number of its last segment
    that is merged, and when that was.
    """

    version: int
    published_ns: int
    state: str
    layer: str = ""
    corpus_id: str = ""
    num_merged: int = 0
    num_torn: int = 0
    marks: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def mark(self, writer: str) -> int:
        """Segments of the writer up to this number are merged, or lost."""
        return self.marks.get(writer, (0, 0))[0]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Raises TornError."""
        try:
            body = parsed(data)
            marks = {str(k): (int(n), int(at)) for k, (n, at) in body.pop("marks").items()}
            manifest = Manifest(**body, marks=marks)
            numbers = (manifest.version, manifest.published_ns, manifest.num_merged)
            if not all(isinstance(n, int) and n >= 0 for n in (*numbers, manifest.num_torn)):
                raise ValueError("its numbers are none")
            if not re.fullmatch(r"state-[0-9a-f]{16}\.bin", manifest.state):
                raise ValueError("its state has no name")
            if not re.fullmatch(r"(layer-[0-9a-f]{16}\.bin)?", manifest.layer):
                raise ValueError("its layer has no name")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TornError(f"the manifest is damaged: {str(error)[:100]}") from None
        return manifest


@dataclass(frozen=True, slots=True)
class SegmentName:
    """writer: an engine, as long as it keeps the scope in memory; its segments are numbered from
    1."""

    writer: str
    number: int
    hash: str

    @property
    def file(self) -> str:
        """Its name in the folder `segments`."""
        return f"{self.writer}-{self.number:08d}-{self.hash}.bin"

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


def is_scope_folder(path: str) -> bool:
    """Whether a path may be one that scope_folder gave."""
    return _SCOPE_FOLDER.fullmatch(path) is not None


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
                storage.delete_folder(f"{folder}/{name}")


def read_manifest(storage: Storage, scope: str) -> Manifest | None:
    """What is published in a scope_folder; None for nothing. Raises StorageError, TornError."""
    try:
        return Manifest.decode(storage.read(f"{scope}/{MANIFEST}", most=_MAX_MANIFEST))
    except FileNotFoundError:
        return None


def read_hashed(storage: Storage, path: str) -> bytes:
    """A file whose name ends in -<hash>.bin. Raises StorageError, TornError."""
    try:
        data = storage.read(path, most=MAX_FILE)
    except FileNotFoundError:
        raise TornError(f"{path} is gone") from None
    if hash_of(data) != path.rpartition("-")[2].removesuffix(".bin"):
        raise TornError(f"{path} does not hold what its name says")
    return data
