"""A file of answers that is appended to as they come; a later run continues it.

A record is one JSON line with `line` (the number of the input's line that it answers) and `key` (a
hash of the request, so that answers to another request are noticed). Records are appended whole
lines at a time; a line torn by the end of an earlier run is dropped, and so is one with `error`,
which is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from drafters.atomic_file import EVERYBODY, replacing
from server.errors import TailorError


class AnswerFileError(TailorError):
    """The file cannot be used; the message names file and line."""

    code = "bulk_error"


class AnswerFile:
    """One file of records, locked against other runs. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(f"{path}.lock")

    def __enter__(self) -> AnswerFile:
        """Raises AnswerFileError when another run writes to the file, or nobody can."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise AnswerFileError(f"{self.path}: another run is writing to it") from None
        except OSError as error:
            raise self._error(error) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)

    def take_up(self, keys: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """The answered records of an earlier run by line; they alone stay in the file.

        keys: of what is asked, by line. Raises AnswerFileError for a line that is no record and for
        an answer to something else.
        """
        kept: dict[int, dict[str, Any]] = {}
        raws: list[bytes] = []
        num_read = 0
        try:
            if not self.path.exists():
                self.path.touch()
                return {}
            with self.path.open("rb") as file:
                for raw in file:
                    num_read += 1
                    record = _record(raw)
                    if record is None:
                        if raw.endswith(b"\n"):
                            raise AnswerFileError(f"{self.path}:{num_read}: not a line of answers")
                        continue  # torn by the end of an earlier run
                    if keys.get(record["line"]) != record["key"]:
                        raise AnswerFileError(
                            f"{self.path}:{num_read}: an answer to another request; give the "
                            "answers to these prompts another file"
                        )
                    if "error" not in record and record["line"] not in kept:
                        kept[record["line"]] = record
                        raws.append(raw if raw.endswith(b"\n") else raw + b"\n")
            if len(kept) != num_read:
                with replacing(self.path, EVERYBODY) as out:
                    out.writelines(raws)
        except OSError as error:
            raise self._error(error) from None
        return kept

    @contextmanager
    def appending(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """A function that appends one record. Raises AnswerFileError."""
        try:
            # Unbuffered: a line is in the file with one write, or not at all.
            with self.path.open("ab", buffering=0) as file:
                yield lambda record: _append(file, json.dumps(record).encode() + b"\n")
        except OSError as error:
            raise self._error(error) from None

    def sort(self) -> None:
        """Write the records anew in the order of the input."""
        with self.path.open("rb") as file:
            lines = sorted(((_record(raw) or {"line": 0})["line"], raw) for raw in file)
        with replacing(self.path, EVERYBODY) as out:
            out.writelines(raw for _, raw in lines)

    def _error(self, error: OSError) -> AnswerFileError:
        return AnswerFileError(f"{self.path}: {error.strerror or error}")


def _append(file: BinaryIO, data: bytes) -> None:
    """Write all of it to an unbuffered file, which may take less at once."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _record(raw: bytes) -> dict[str, Any] | None:
    """A line of the file, or None for one that is none."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("line")) is not int:
        return None
    return record if isinstance(record.get("key"), str) else None
