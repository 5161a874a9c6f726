"""Where the server is, and what its refusals mean for a client."""

from __future__ import annotations

import contextlib
import email.utils
import time
from dataclasses import dataclass
from typing import Any

import httpx

from server.errors import TailorError

RETRY_STATUS = frozenset({429, 502, 503, 504})
"""Statuses after which the same request may succeed: the server is overloaded or not ready."""

FAULT_STATUS = 500
"""The server failed at this request, or an engine died that held it: another request may have been
the cause, or this one, which then fails every time."""


class CallFailedError(TailorError):
    """The server cannot be reached, or refused what the whole command depends on."""

    code = "call_failed"


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


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is an error. may_retry: trying again may help, after retry_after_s if the
    server gives it. is_fault: it may help, or make the engine fail again."""

    status: int
    message: str
    type: str | None
    param: str | None
    code: str | None
    may_retry: bool
    is_fault: bool
    retry_after_s: float | None

    def record(self) -> dict[str, Any]:
        """Its members in a line of answers."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            "status": self.status,
        }


def refusal_of(response: httpx.Response) -> Refusal:
    """The refusal in a response that was read and is not a success."""
    error: Any = None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = response.json()["error"]
    if not isinstance(error, dict):
        error = {"message": f"{response.status_code} {response.reason_phrase}".strip()}
    final = response.headers.get("x-should-retry") == "false"  # as OpenAI's clients read it
    return Refusal(
        response.status_code,
        str(error.get("message", "")),
        error.get("type"),
        error.get("param"),
        error.get("code"),
        response.status_code in RETRY_STATUS and not final,
        response.status_code == FAULT_STATUS and not final,
        _retry_after_s(response.headers.get("retry-after")),
    )


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
