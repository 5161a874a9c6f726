"""A file appears whole or not at all, and is for those who may read it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafters.atomic_file import EVERYBODY, OWNER, replacing


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with replacing(path) as out:
        out.write(b"old")
        assert not path.exists()
    with pytest.raises(RuntimeError, match="torn"), replacing(path) as out:  # noqa: PT012
        out.write(b"half of the n")
        raise RuntimeError("torn")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["table"], "nothing is left beside it"
    # Of processes that were killed, long ago and just now; and others'.
    for name in (".table.0123abcd", ".table.89abcdef", ".table.backup", ".tables.0123abcd"):
        (tmp_path / name).touch()
        if name != ".table.89abcdef":
            os.utime(tmp_path / name, (1e9, 1e9))
    with replacing(path) as out:
        out.write(b"new")
    assert path.read_bytes() == b"new"
    left = {file.name for file in tmp_path.iterdir()} - {"table"}
    assert left == {".table.89abcdef", ".table.backup", ".tables.0123abcd"}


@pytest.mark.parametrize(("mode", "umask", "readers"), [
    (OWNER, 0o022, 0o600), (EVERYBODY, 0o022, 0o644), (EVERYBODY, 0o077, 0o600),
])  # fmt: skip
def test_who_may_read_it(tmp_path: Path, mode: int, umask: int, readers: int) -> None:
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "file", mode):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == readers
