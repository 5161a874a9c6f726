"""`tailor run`: a file of prompts through a task, answers into a file.

A row of the input (server.datasets reads it) has a `prompt`, or `messages` for a chat, an `id` of
the caller's and, in JSON lines, `request`: further fields of its request. Other members are left
alone. A line of the output is

    {"line": 7, "id": "a", "text": "...", "finish_reason": "stop", "usage": {...}, "key": "9f..."}
    {"line": 8, "id": null, "error": {"message": ..., "code": ..., "status": 400, ...}, "key": ...}

Answers are appended as they come, whole lines at a time. When every line has one the file is
written anew in the order of the input. A stopped run continues where it was: lines that have an
answer are not sent again, those with an error are. `key` is a hash of the request, so that answers
to other prompts are noticed.

server.client.http decides which requests are tried again, and when; any other error is its line's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from filelock import FileLock, Timeout

from drafters.atomic_file import EVERYBODY, replacing
from server.client.http import Caller, CallFailedError, Endpoint, RefusedError, Tally
from server.datasets import TABLES, Fields, check_file, rows
from server.errors import TailorError


class BulkError(TailorError, code="bulk_error"):
    """The input or output file cannot be used; the message names file and line."""


class AnswerFile:
    """A file of answers that is appended to as they come, locked against other runs; a later run
    continues it. A context manager.

    A record is one JSON line with `line` (the number of the input's line that it answers) and `key`
    (a hash of the request, so that answers to another request are noticed). Records are appended
    whole lines at a time; a line torn by the end of an earlier run is dropped, and so is one with
    `error`, which is asked again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(f"{path}.lock")

    def __enter__(self) -> AnswerFile:
        """Raises BulkError when another run writes to the file, or nobody can."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise BulkError(f"{self.path}: another run is writing to it") from None
        except OSError as error:
            raise self._error(error) from None
        return self

    def __exit__(self, *_: object) -> None:
        # While it is held: whoever takes it then sees that its file is gone, and tries anew.
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def take_up(self, key_of: Callable[[int], str | None]) -> dict[int, dict[str, Any]]:
        """The answered records of an earlier run by line; they alone stay in the file.

        key_of: the key of what is asked in a line, None for a line that is not. Raises BulkError
        for a line that is no record and for an answer to something else.
        """
        kept: dict[int, dict[str, Any]] = {}
        raws: list[bytes] = []
        num_read = 0
        try:
            if not self.path.exists():
                return {}
            with self.path.open("rb") as file:
                for raw in file:
                    num_read += 1
                    record = _record(raw)
                    if record is None:
                        if raw.endswith(b"\n"):
                            raise BulkError(f"{self.path}:{num_read}: not a line of answers")
                        continue  # torn by the end of an earlier run
                    if "error" in record:
                        continue  # asked again, and whoever mended the input has another key
                    if key_of(record["line"]) != record["key"]:
                        raise BulkError(
                            f"{self.path}:{num_read}: an answer to another request; give the "
                            "answers to these prompts another file"
                        )
                    if record["line"] not in kept:
                        kept[record["line"]] = record
                        raws.append(raw if raw.endswith(b"\n") else raw + b"\n")
            if len(kept) != num_read:
                with replacing(self.path, self.path.stat().st_mode & EVERYBODY) as out:
                    out.writelines(raws)
        except OSError as error:
            raise self._error(error) from None
        return kept

    @contextmanager
    def appending(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """A function that appends one record. Raises BulkError."""
        try:
            # Unbuffered: a line is in the file with one write, or not at all.
            with self.path.open("ab", buffering=0) as file:
                # An id of a table may be a date or a decimal.
                yield lambda record: _append(file, json.dumps(record, default=str).encode() + b"\n")
        except OSError as error:
            raise self._error(error) from None

    def sort(self) -> None:
        """Write the records anew in the order of the input."""
        with self.path.open("rb") as file:
            lines = sorted(((_record(raw) or {"line": 0})["line"], raw) for raw in file)
        with replacing(self.path, EVERYBODY) as out:
            out.writelines(raw for _, raw in lines)

    def _error(self, error: OSError) -> BulkError:
        return BulkError(f"{self.path}: {error.strerror or error}")


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


# --- one run --------------------------------------------------------------------------------------


@dataclass(slots=True)
class BulkOutcome:
    """How far a run is. num_before: lines that an earlier run answered."""

    num_lines: int = 0
    num_before: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_retries: int = 0
    wall_s: float = 0.0
    tally: Tally = field(default_factory=Tally)

    @property
    def num_done(self) -> int:
        """Lines that need nothing more in this run."""
        return self.num_before + self.num_answered + self.num_failed

    def summary(self) -> list[str]:
        """The closing summary, one line each."""
        tokens = self.tally.num_tokens
        rate = tokens / self.wall_s if self.wall_s > 0 else 0.0
        before = f", {self.num_before} of an earlier run kept" if self.num_before else ""
        lines = [
            f"{self.num_answered} answered, {self.num_failed} failed{before}; "
            f"{self.num_retries} tried again; {self.wall_s:.1f} s",
        ]
        if self.num_answered:
            lines.append(
                f"{self.tally.num_prompt_tokens} tokens in, {tokens} out: {rate:.1f} tokens/s, "
                f"{self.tally.summary()}"
            )
        return lines


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the input: where it goes and what is sent."""

    number: int
    caller_id: Any
    route: str
    body: dict[str, Any]
    key: str


def answer_file(
    endpoint: Endpoint,
    task: str,
    source: Path,
    target: Path,
    outcome: BulkOutcome,
    *,
    concurrency: int = 8,
    max_retries: int = 10,
    timeout_s: float = 600.0,
    max_tokens: int | None = None,
    prompt_field: str = "prompt",
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """One input file through one task: answer every line that has no answer yet.

    outcome: a new one, which has what was done however this ends. concurrency: requests that are
    open at once. max_retries: times that one line is tried again. timeout_s: longest silence of the
    server during one request. prompt_field: where a prompt is. on_progress: called after each line.

    Raises BulkError for files that cannot be used and CallFailedError when the server is not
    there or knows neither key nor task; what was answered until then is in the file.
    """
    started_s = time.monotonic()
    check_file(source)
    try:
        with AnswerFile(target) as file:
            lines = partial(_lines, source, task, prompt_field, max_tokens)
            keys = {line.number: line.key for line in lines()}
            outcome.num_lines = len(keys)
            answered = set(file.take_up(keys.get))
            outcome.num_before = len(answered)
            todo = (line for line in lines() if line.number not in answered)
            with Caller(
                endpoint, num_open=concurrency, max_retries=max_retries, timeout_s=timeout_s
            ) as caller:
                if len(answered) < outcome.num_lines:
                    caller.check_task(task)
                on_progress()
                asked = ((line, line.route, line.body) for line in todo)
                try:
                    with file.appending() as append:
                        for line, answer in caller.answers(asked):
                            outcome.num_retries = caller.num_retries
                            append(_told(line, answer, outcome))
                            on_progress()
                except CallFailedError as error:
                    raise CallFailedError(
                        f"{error.message}; {outcome.num_done} of {outcome.num_lines} lines are "
                        "done, the same command goes on from there"
                    ) from None
            file.sort()
    finally:
        outcome.wall_s = time.monotonic() - started_s


def _lines(source: Path, task: str, named: str, max_tokens: int | None) -> Iterator[_Line]:
    """The lines of the input; blank ones count but are passed over. named: where a prompt is.
    Raises BulkError and ConfigError, which name file and line."""
    is_table = source.suffix.lower() in TABLES  # which has texts alone
    for number, row in rows(source):
        at = f"{source}:{number}"
        has_messages = "messages" in row and not is_table
        if has_messages and named in row:
            raise BulkError(f"{at}: a line needs either a prompt or messages")
        asked = row["messages"] if has_messages else row.get(named)
        if asked is None or isinstance(asked, str):
            asked = Fields(prompt_field=named).prompt_of(row, at)
        extra = {} if is_table else row.get("request", {})
        own = {"model": task, "messages" if has_messages else "prompt": asked}
        if (
            not isinstance(extra, dict)
            or extra.get("stream")
            or any(extra.get(name) not in (None, value) for name, value in own.items())
        ):
            raise BulkError(
                f"{at}: request must be an object of request fields, without stream and "
                f"another {' or '.join(own)}"
            )
        body = {
            **({} if max_tokens is None else {"max_tokens": max_tokens}),
            **extra,
            **own,
            "include_speculation": True,
        }
        try:
            sent = json.dumps(body, sort_keys=True, allow_nan=False)
        except ValueError:
            raise BulkError(f"{at}: holds a number that JSON does not have") from None
        digest = hashlib.sha256(sent.encode()).hexdigest()[:16]
        route = "/chat/completions" if has_messages else "/completions"
        yield _Line(number, row.get("id"), route, body, digest)


def _told(
    line: _Line, response: httpx.Response | RefusedError, outcome: BulkOutcome
) -> dict[str, Any]:
    """One line's record, which is counted."""
    head = {"line": line.number, "id": line.caller_id}
    if isinstance(response, RefusedError):
        outcome.num_failed += 1
        return {**head, "error": response.record, "key": line.key}
    try:
        answer = response.json()
        choices = answer["choices"]
        texts = [choice.get("text", choice.get("message")) for choice in choices]
        reasons = [choice["finish_reason"] for choice in choices]
    except (ValueError, KeyError, TypeError, AttributeError):
        outcome.num_failed += 1
        message = "the server answered with something else than a completion"
        return {**head, "error": {"message": message}, "key": line.key}
    outcome.num_answered += 1
    outcome.tally.add(answer)
    what = "text" if line.route == "/completions" else "message"
    shown: dict[str, Any] = (
        {what: texts[0], "finish_reason": reasons[0]}
        if len(texts) == 1
        else {f"{what}s": texts, "finish_reasons": reasons}
    )
    return {**head, **shown, "usage": answer.get("usage"), "key": line.key}
