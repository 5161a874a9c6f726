"""`tailor run`: a file of prompts through a task, answers into a file.

A line of the input is a JSON string (the prompt), or an object with `prompt` (or `messages`, for
chat), an `id` of the caller's, and `request`: further fields of that line's request. Other members
are left alone. A line of the output is

    {"line": 7, "id": "a", "text": "...", "finish_reason": "stop", "usage": {...}, "key": "9f..."}
    {"line": 8, "id": null, "error": {"message": ..., "code": ..., "status": 400, ...}, "key": ...}

Answers are appended as they come, whole lines at a time. When every line has one the file is
written anew in the order of the input. A run that was stopped, by anything, goes on where it was:
lines that have an answer are not sent again, those with an error are. `key` is a hash of the
request, so that answers to other prompts are noticed.

An answer of 429, 502, 503 or 504 and a lost connection are tried again, after Retry-After where
the server says one; everybody waits then. An answer of 500 is tried again twice, and only its line
waits: the line itself may be what the server fails at. With `x-should-retry: false` nothing is
tried again, and any other error belongs to its line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx
from filelock import FileLock, Timeout

from server.client.connection import CallFailedError, Endpoint, refusal_of
from server.client.speculation import Tally
from server.errors import TailorError

__all__ = ["BulkError", "BulkOutcome", "BulkRun"]

MAX_LINE_BYTES = 64 << 20
MAX_WAIT_S = 60.0
FIRST_WAIT_S = 0.5
MAX_FAULT_RETRIES = 2


class BulkError(TailorError):
    """The input or output file cannot be used; the message names file and line."""

    code = "bulk_error"


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

    def told(self) -> list[str]:
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
                f"{self.tally.told()}"
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


class _Stopped(Exception):
    """The run cannot go on; the message says why."""


class BulkRun:
    """One input file through one task.

        run = BulkRun(endpoint, "tagging", Path("prompts.jsonl"), Path("answers.jsonl"))
        outcome = asyncio.run(run.run(on_progress))

    concurrency: requests that are open at once. max_retries: times that one line is tried again.
    timeout_s: longest silence of the server during one request.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        task: str,
        source: Path,
        target: Path,
        *,
        concurrency: int = 8,
        max_retries: int = 10,
        timeout_s: float = 600.0,
        max_tokens: int | None = None,
    ) -> None:
        if concurrency < 1 or max_retries < 0:
            raise ValueError("concurrency must be at least 1 and max_retries at least 0")
        self.outcome = BulkOutcome()
        self._endpoint = endpoint
        self._task = task
        self._source = source
        self._target = target
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._defaults: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
        self._resume_at_s = 0.0
        self._random = random.Random()

    async def run(self, on_progress: Callable[[BulkOutcome], None] = lambda _: None) -> BulkOutcome:
        """Answer every line that has no answer yet. on_progress: called after each line.

        Raises BulkError for files that cannot be used and CallFailedError when the server is not
        there or knows neither key nor task; what was answered until then is in the file.
        """
        started_s = time.monotonic()
        lock = FileLock(f"{self._target}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise BulkError(f"{self._target}: another run is writing to it") from None
        except OSError as error:
            raise BulkError(f"{self._target}: {error.strerror or error}") from None
        try:
            answered = self._take_up()
            limits = httpx.Limits(
                max_connections=self._concurrency, max_keepalive_connections=self._concurrency
            )
            async with httpx.AsyncClient(
                headers=self._endpoint.headers,
                timeout=httpx.Timeout(self._timeout_s, connect=10.0),
                limits=limits,
            ) as client:
                if len(answered) < self.outcome.num_lines:
                    await self._check_task(client)
                on_progress(self.outcome)
                await self._answer_all(client, answered, on_progress)
            self._sort()
        finally:
            self.outcome.wall_s = time.monotonic() - started_s
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)
        return self.outcome

    # -- files ------------------------------------------------------------------------------

    def _lines(self) -> Iterator[_Line]:
        """The lines of the input; blank ones count but are passed over. Raises BulkError."""
        try:
            with self._source.open("rb") as file:
                for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                    if raw.strip():
                        yield self._line(number, raw)
        except OSError as error:
            raise BulkError(f"{self._source}: {error.strerror or error}") from None

    def _line(self, number: int, raw: bytes) -> _Line:
        at = f"{self._source}:{number}"
        try:
            value = json.loads(raw.decode(), parse_constant=_no_constant)
            json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates
        except (ValueError, RecursionError):
            raise BulkError(f"{at}: the line is not JSON in UTF-8") from None
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict):
            raise BulkError(f"{at}: a line is a JSON string or an object")
        named = [name for name in ("prompt", "messages") if name in value]
        if len(named) != 1:
            raise BulkError(f"{at}: a line needs either a prompt or messages")
        extra = value.get("request", {})
        if not isinstance(extra, dict) or extra.get("stream"):
            raise BulkError(f"{at}: request must be an object of request fields, without stream")
        body = {
            **self._defaults,
            **extra,
            "model": self._task,
            named[0]: value[named[0]],
            "include_speculation": True,
        }
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
        route = "/completions" if named[0] == "prompt" else "/chat/completions"
        return _Line(number, value.get("id"), route, body, digest)

    def _take_up(self) -> set[int]:
        """Check both files; the numbers of answered lines, which alone stay in the file."""
        keys = {line.number: line.key for line in self._lines()}
        self.outcome.num_lines = len(keys)
        kept: dict[int, bytes] = {}
        num_read = 0
        try:
            if not self._target.exists():
                self._target.touch()
                return set()
            with self._target.open("rb") as file:
                for raw in file:
                    num_read += 1
                    record = _record(raw)
                    if record is None:
                        if raw.endswith(b"\n"):
                            raise BulkError(f"{self._target}:{num_read}: not a line of answers")
                        continue  # torn by the end of an earlier run
                    number = record["line"]
                    if keys.get(number) != record["key"]:
                        raise BulkError(
                            f"{self._target}:{num_read}: an answer to another request; give the "
                            "answers to these prompts another file"
                        )
                    if "error" not in record:
                        kept[number] = raw if raw.endswith(b"\n") else raw + b"\n"
            if len(kept) != num_read:
                self._replace(kept.values())
        except OSError as error:
            raise BulkError(f"{self._target}: {error.strerror or error}") from None
        self.outcome.num_before = len(kept)
        return set(kept)

    def _sort(self) -> None:
        """The answers in the order of the input."""
        with self._target.open("rb") as file:
            lines = sorted(((_record(raw) or {"line": 0})["line"], raw) for raw in file)
        self._replace(raw for _, raw in lines)

    def _replace(self, lines: Any) -> None:
        """Write the output file anew, atomically."""
        temporary = self._target.with_name(f"{self._target.name}.tmp")
        with temporary.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._target)

    # -- requests ---------------------------------------------------------------------------

    async def _check_task(self, client: httpx.AsyncClient) -> None:
        """Learn of a wrong address, key or task before the first line. Raises CallFailedError."""
        url = f"{self._endpoint.base}/models/{quote(self._task)}"
        for attempt in range(self._max_retries + 1):
            try:
                response = await client.get(url)
            except httpx.HTTPError as error:
                raise CallFailedError(
                    f"{self._endpoint.base} cannot be reached: {error or type(error).__name__}"
                ) from None
            if response.is_success:
                return
            refusal = refusal_of(response)
            if not refusal.may_retry or attempt == self._max_retries:
                break
            await asyncio.sleep(self._wait_s(attempt, refusal.retry_after_s))
        raise CallFailedError(f"{self._endpoint.base}: {refusal.message}")

    async def _answer_all(
        self,
        client: httpx.AsyncClient,
        answered: set[int],
        on_progress: Callable[[BulkOutcome], None],
    ) -> None:
        todo = (line for line in self._lines() if line.number not in answered)

        async def work(file: BinaryIO) -> None:
            for line in todo:  # one generator, shared: every line is taken once
                record = await self._answer(client, line)
                _append(file, json.dumps(record).encode() + b"\n")
                on_progress(self.outcome)

        # Unbuffered: a line is in the file with one write, or not at all.
        with self._target.open("ab", buffering=0) as file:
            workers = [asyncio.create_task(work(file)) for _ in range(self._concurrency)]
            try:
                await asyncio.gather(*workers)
            except OSError as error:
                raise BulkError(f"{self._target}: {error.strerror or error}") from None
            except _Stopped as stopped:
                raise CallFailedError(
                    f"{stopped}; {self.outcome.num_done} of {self.outcome.num_lines} lines are "
                    "done, the same command goes on from there"
                ) from None
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, client: httpx.AsyncClient, line: _Line) -> dict[str, Any]:
        """One line's record. Raises _Stopped when the server is lost."""
        head = {"line": line.number, "id": line.caller_id}
        attempt = 0
        while True:
            while (pause_s := self._resume_at_s - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            try:
                response = await client.post(self._endpoint.base + line.route, json=line.body)
            except httpx.HTTPError as error:
                refusal, why = None, f"the server is lost: {error or type(error).__name__}"
            else:
                if response.is_success:
                    return self._answered(head, line, response)
                refusal = refusal_of(response)
                if response.status_code in (401, 403):
                    raise _Stopped(refusal.message)
                why = refusal.message
            most = self._max_retries
            alone = refusal is not None and refusal.is_fault
            if alone:
                most = min(most, MAX_FAULT_RETRIES)
            if attempt < most and (refusal is None or refusal.may_retry or alone):
                self.outcome.num_retries += 1
                wait_s = self._wait_s(attempt, refusal.retry_after_s if refusal else None)
                attempt += 1
                if alone:
                    await asyncio.sleep(wait_s)
                else:
                    self._resume_at_s = max(self._resume_at_s, time.monotonic() + wait_s)
                continue
            if refusal is None:
                raise _Stopped(why)
            self.outcome.num_failed += 1
            error_record = refusal.record() if refusal is not None else {"message": why}
            return {**head, "error": error_record, "key": line.key}

    def _answered(
        self, head: dict[str, Any], line: _Line, response: httpx.Response
    ) -> dict[str, Any]:
        try:
            answer = response.json()
            choices = answer["choices"]
            texts = [choice.get("text", choice.get("message")) for choice in choices]
            reasons = [choice["finish_reason"] for choice in choices]
        except (ValueError, KeyError, TypeError, AttributeError):
            self.outcome.num_failed += 1
            message = "the server answered with something else than a completion"
            return {**head, "error": {"message": message}, "key": line.key}
        self.outcome.num_answered += 1
        self.outcome.tally.add(answer)
        what = "text" if line.route == "/completions" else "message"
        shown: dict[str, Any] = (
            {what: texts[0], "finish_reason": reasons[0]}
            if len(texts) == 1
            else {f"{what}s": texts, "finish_reasons": reasons}
        )
        return {**head, **shown, "usage": answer.get("usage"), "key": line.key}

    def _wait_s(self, attempt: int, retry_after_s: float | None) -> float:
        """Seconds before the next attempt: what the server says, else doubling with some chance."""
        if retry_after_s is not None and math.isfinite(retry_after_s):
            return min(MAX_WAIT_S, retry_after_s) + 0.1 * self._random.random()
        return min(MAX_WAIT_S, FIRST_WAIT_S * 2.0**attempt) * (0.5 + 0.5 * self._random.random())


def _append(file: BinaryIO, data: bytes) -> None:
    """Write all of it to an unbuffered file, which may take less at once."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _record(raw: bytes) -> dict[str, Any] | None:
    """A line of the output, or None for one that is none."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("line")) is not int:
        return None
    return record if isinstance(record.get("key"), str) else None
