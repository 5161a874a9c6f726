"""What a part of the fleet is made of, as a short name: a part is replaced when that changes.

`tailor fleet up` on a fleet that runs deploys again. Serve replaces the replicas whose version is
another one, new ones first, and leaves the others alone: new weights at the same path replace the
engines of their model; ingresses, the desk and what they know stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

_FOR_INGRESS = (".json", ".jinja", ".model", ".txt", ".yaml")
"""How the names of a model's files end that an ingress reads: tokenizer, template, config."""


def version_of(*parts: object) -> str:
    """Of values whose repr tells all of them."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def files_id(paths: Iterable[Path], *, endings: Sequence[str] = ("",)) -> str:
    """Of files and of all that lies in folders: names, sizes and times of writing, of those whose
    name ends so. What is not there counts as such."""
    told: list[tuple[str, int, int]] = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.name.endswith(tuple(endings)):
                continue
            try:
                stat = file.stat()
            except OSError:
                told.append((str(file), -1, -1))
                continue
            if file.is_file():
                told.append((str(file), stat.st_size, stat.st_mtime_ns))
    return version_of(told)


def for_ingress(paths: Iterable[Path]) -> str:
    """files_id of what an ingress reads of models and tasks."""
    return files_id(paths, endings=_FOR_INGRESS)
