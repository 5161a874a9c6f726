"""Files that appear whole: a reader sees the old content or the new one, never a part.

Of the standard library alone: vocab_store and all of the server write their files with it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO

OWNER, EVERYBODY = 0o600, 0o666
"""Who may read a file: its owner, or whoever the process's umask lets read files that it makes."""

_MOST_S = 86_400.0
"""Who has not ended a file by then was killed: no write takes a day."""


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = OWNER) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well.

    It is written beside `path`, whose folder must exist, and is on the disk before it takes the
    place. mode: OWNER or EVERYBODY. When the block raises, `path` stays as it was, and nothing is
    left beside it; what a killed process left goes with a later write. Raises OSError.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "w+b") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
            now_s = os.fstat(out.fileno()).st_mtime  # by the clock of the disk, which may be far
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):
        for begun in target.parent.glob(f".{escape(target.name)}.{'[0-9a-f]' * 8}"):
            if now_s - begun.stat().st_mtime > _MOST_S:
                begun.unlink()
