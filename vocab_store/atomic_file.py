"""Files that appear whole: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` beside `path` and put it in its place, synced, readable by everybody (0644).

    When that fails, `path` stays as it was. Raises OSError.
    """
    target = Path(path)
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, 0o644)  # mkstemp's 0600 would keep a server's own user out
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
