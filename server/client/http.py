"""The one HTTP client: how a server is called, and when a request is sent again.

An answer of 429, 502, 503 or 504 and a lost connection are tried again, after Retry-After where
the server gives one; all requests wait then. An answer of 500 is tried again twice, and only its
request waits: the request itself may be the cause. With `x-should-retry: false`
nothing is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import json
import math
import random
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx

from server.errors import TailorError

_T = TypeVar("_T")

MAX_WAIT_S = 60.0
FIRST_WAIT_S = 0.5
MAX_FAULT_RETRIES = 2
CONNECT_S = 10.0


class RefusedError(Exception):
    """The server refused one request: an answer, which was read, is an error.

    record: its members in a line of answers. may_retry: trying again may help, after retry_after_s
    if the server gives it. is_fault: it may help, or make the engine fail again.
    """

    def __init__(self, response: httpx.Response) -> None:
        error: Any = None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = response.json()["error"]
        if not isinstance(error, dict):
            error = {"message": f"{response.status_code} {response.reason_phrase}".strip()}
        super().__init__(str(error.get("message", "")))
        self.status = response.status_code
        told = {name: error.get(name) for name in ("type", "param", "code")}
        self.record: dict[str, Any] = {"message": str(self), **told, "status": self.status}
        final = response.headers.get("x-should-retry") == "false"  # as OpenAI's clients read it
        self.may_retry = self.status in RETRY_STATUS and not final
        self.is_fault = self.status == FAULT_STATUS and not final
        self.retry_after_s = _retry_after_s(response.headers.get("retry-after"))


class Caller:
    """Requests to one server, with one pause for all of them. A context manager.

    num_open: requests at once. max_retries: times that one request is sent again. timeout_s:
    longest silence of the server during one request. num_retries: of all requests so far.
    """

    def __init__(
        self, endpoint: Endpoint, *, num_open: int, max_retries: int = 10, timeout_s: float = 600.0
    ) -> None:
        self.endpoint = endpoint
        self.num_retries = 0
        self._num_open = num_open
        self._max_retries = max_retries
        self._runner = asyncio.Runner()
        self._open: dict[asyncio.Task[httpx.Response], Any] = {}
        self._resume_at_s = 0.0
        self._random = random.Random()
        self._client = httpx.AsyncClient(
            headers=endpoint.headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=num_open, max_keepalive_connections=num_open),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._open:
            task.cancel()
        self._runner.run(self._client.aclose())
        self._runner.close()

    def check_task(self, task: str) -> None:
        """Raise CallFailedError at once for a wrong address, key or task."""
        url = f"{self.endpoint.base}/models/{quote(task)}"
        with _calling(self.endpoint):
            self._runner.run(self._send("GET", url, None, may_be_lost=False))

    def answers(
        self,
        asked: Iterable[tuple[_T, str, dict[str, Any]]],
        *,
        hopeless: Collection[int] = (401, 403),
    ) -> Iterator[tuple[_T, httpx.Response | RefusedError]]:
        """The answers to (whose, route below /v1, body), as they come.

        Raises CallFailedError for a server that stayed lost, and for a refusal with a status that
        is hopeless: all requests would meet it.
        """
        waiting, loop = iter(asked), self._runner.get_loop()
        while True:
            for whose, route, body in islice(waiting, self._num_open - len(self._open)):
                sent = self._send("POST", self.endpoint.base + route, body, may_be_lost=True)
                self._open[loop.create_task(sent)] = whose
            if not self._open:
                return
            done, _ = self._runner.run(asyncio.wait(self._open, return_when=FIRST_COMPLETED))
            # What was answered comes first: whoever stops at an error has it.
            for task in sorted(done, key=lambda task: task.exception() is not None):
                whose, error = self._open.pop(task), task.exception()
                if isinstance(error, httpx.HTTPError):
                    reason = str(error) or type(error).__name__
                    raise CallFailedError(f"{self.endpoint.base}: the server is lost: {reason}")
                if isinstance(error, RefusedError):
                    if error.status in hopeless:
                        raise CallFailedError(f"{self.endpoint.base}: {error}")
                    yield whose, error
                else:
                    yield whose, task.result()

    async def _send(
        self, method: str, url: str, body: dict[str, Any] | None, *, may_be_lost: bool
    ) -> httpx.Response:
        num_faults = 0
        for num_sent in itertools.count(1):
            while (pause_s := self._resume_at_s - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            refusal = None
            try:
                response = await self._client.request(method, url, json=body)
                if response.is_success:
                    return response
                raise RefusedError(response)
            except httpx.HTTPError:
                if not may_be_lost or num_sent > self._max_retries:
                    raise
            except RefusedError as error:
                refusal = error
                num_faults += refusal.is_fault
                may_help = refusal.may_retry or refusal.is_fault
                if not may_help or num_sent > self._max_retries or num_faults > MAX_FAULT_RETRIES:
                    raise
            self.num_retries += 1
            wait_s = self._wait_s(num_sent - 1, refusal.retry_after_s if refusal else None)
            if refusal is not None and refusal.is_fault:
                await asyncio.sleep(wait_s)
            else:
                self._resume_at_s = max(self._resume_at_s, time.monotonic() + wait_s)
        raise AssertionError("the loop returns or raises")

    def _wait_s(self, attempt: int, retry_after_s: float | None) -> float:
        """Seconds before the next attempt: the server's, else doubling, with a random part."""
        if retry_after_s is not None and math.isfinite(retry_after_s):
            return min(MAX_WAIT_S, retry_after_s) + 0.1 * self._random.random() + 1e-6
        longest_s = FIRST_WAIT_S * 2.0 ** min(attempt, 64)  # whatever --retries allows
        return min(MAX_WAIT_S, longest_s) * (0.5 + 0.5 * self._random.random())


def call(
    endpoint: Endpoint,
    method: Literal["GET", "POST"],
    route: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = 30.0,
) -> Any:
    """The JSON that a server answers to one request, which is not sent again.

    Raises CallFailedError.
    """
    with _calling(endpoint):
        return json.loads(tell(endpoint, route, body, timeout_s, method))


def tell(
    endpoint: Endpoint,
    route: str,
    body: dict[str, Any] | None,
    timeout_s: float,
    method: Literal["GET", "POST"] = "POST",
) -> str:
    """The text that a server answers to one request, which is not sent again. Raises
    CallFailedError."""
    with _calling(endpoint):
        response = httpx.request(
            method,
            endpoint.base + route,
            json=body,
            headers=endpoint.headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        )
        if not response.is_success:
            raise RefusedError(response)
        return response.text


def events(
    endpoint: Endpoint, route: str, body: dict[str, Any], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer. Raises CallFailedError."""
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
    with (
        _calling(endpoint),
        httpx.stream(
            "POST", endpoint.base + route, json=body, headers=endpoint.headers, timeout=timeout
        ) as response,
    ):
        if not response.is_success:
            response.read()
            raise CallFailedError(str(RefusedError(response)))
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise CallFailedError(str(chunk["error"].get("message")))
                yield chunk
    raise CallFailedError(f"{endpoint.base}: the stream ended too early")


@contextlib.contextmanager
def _calling(endpoint: Endpoint) -> Iterator[None]:
    """What goes wrong within is a CallFailedError."""
    try:
        yield
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError):
            reason = "nothing answers there; is the server running?"
        raise CallFailedError(f"{endpoint.base} cannot be reached: {reason}") from None
    except RefusedError as error:
        raise CallFailedError(f"{endpoint.base}: {error}") from None
    except ValueError:
        raise CallFailedError(f"{endpoint.base} does not answer as Tailor does") from None


RETRY_STATUS = frozenset({429, 502, 503, 504})
"""Statuses after which the same request may succeed: the server is overloaded or not ready."""

FAULT_STATUS = 500
"""The server failed at this request, or an engine died that held it: another request may have been
the cause, or this one, which then fails every time."""


class CallFailedError(TailorError, code="call_failed"):
    """The server cannot be reached, or refused what the whole command depends on."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: its address, with or without /v1 at the end, and the key that it wants."""

    url: str
    api_key: str | None = None

    @property
    def base(self) -> str:
        """The address up to /v1."""
        base = self.url.rstrip("/")
        base = base if "://" in base else f"http://{base}"
        return base if base.endswith("/v1") else f"{base}/v1"

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


# --- sums over answers ----------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What responses add up to; `add` is the only writer."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    by_source: dict[str, list[int]] = field(default_factory=dict)

    def add(self, response: dict[str, Any]) -> None:
        """Count a response, or the last chunk of a stream. Members that are missing count 0."""
        usage = response.get("usage") or {}
        self.num_prompt_tokens += int(usage.get("prompt_tokens", 0))
        self.num_tokens += int(usage.get("completion_tokens", 0))
        report = response.get("speculation") or {}
        self.num_steps += int(report.get("steps", 0))
        for source, counts in (report.get("by_source") or {}).items():
            sums = self.by_source.setdefault(str(source), [0, 0])
            sums[0] += int(counts.get("drafted_tokens", 0))
            sums[1] += int(counts.get("accepted_tokens", 0))

    def summary(self) -> str:
        """ "2.31 tokens/step; accepted: suffix 120 of 200, prompt 8 of 40" """
        num = self.num_steps
        parts = [f"{self.num_tokens / num:.2f} tokens/step"] if num else []
        sources = ", ".join(f"{name} {a} of {d}" for name, (d, a) in sorted(self.by_source.items()))
        return "; ".join([*parts, f"accepted: {sources}" if sources else "no drafts"])
