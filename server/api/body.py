"""Reads a request body as one strict JSON object, with an error of its own for each fault.

Bounded while it is read (size, time), never decompressed, UTF-8 only, no duplicate keys, no NaN or
infinity, no lone surrogates, no nesting deeper than `MAX_DEPTH`.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from starlette.requests import Request

from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidBodyError,
    UnsupportedMediaTypeError,
    echoed,
)

MAX_DEPTH = 64

# Possessive, and a string without an end reaches to the end of the body: every byte is looked at
# once, whatever the body holds.
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_CLOSE = (("connection", "close"),)
"""The rest of an unread body must not be taken for the next request."""


async def read_object(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body of `request` as a JSON object. Raises what read_body and parse_object raise."""
    return parse_object(await read_body(request, max_bytes, timeout_s))


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body of `request`, whose content type is JSON.

    Raises UnsupportedMediaTypeError, BodyTooLargeError, BodyTimeoutError, and
    starlette.requests.ClientDisconnect when the client leaves before the body is complete.
    """
    headers = request.headers
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaTypeError(
            f"Compressed bodies are not accepted (content-encoding {echoed(encoding, 40)}).",
            headers=_CLOSE,
        )
    media, _, parameters = headers.get("content-type", "").partition(";")
    media = media.strip().lower()
    if media != "application/json" and not (
        media.startswith("application/") and media.endswith("+json")
    ):
        raise UnsupportedMediaTypeError(
            f"The content-type must be application/json, not {echoed(media, 60)}.", headers=_CLOSE
        )
    charset = re.search(r"charset\s*=\s*\"?([\w.-]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise UnsupportedMediaTypeError("The body must be UTF-8.", headers=_CLOSE)
    too_large = BodyTooLargeError(
        f"The body is larger than the limit of {max_bytes} bytes.", headers=_CLOSE
    )
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise too_large
                body += part
    except TimeoutError:
        raise BodyTimeoutError(
            f"The body did not arrive within {timeout_s:g} seconds.", headers=_CLOSE
        ) from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """One JSON object from bytes. Raises InvalidBodyError with what is wrong."""
    if not body.strip():
        raise InvalidBodyError("The body is empty; send a JSON object.")
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidBodyError("The body begins with a byte order mark; send plain UTF-8.")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidBodyError(f"The body is not UTF-8 (byte {error.start}).") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(body)
    try:
        value = _JSON.decode(text)
    except InvalidBodyError:
        raise
    except json.JSONDecodeError as error:
        raise InvalidBodyError(
            f"The body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # an integer of more than 4,300 digits
        raise InvalidBodyError("The body holds a number that is out of range.") from None
    if not isinstance(value, dict):
        raise InvalidBodyError("The body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(body):
        _check_surrogates(value)
    return value


def _too_deep() -> InvalidBodyError:
    return InvalidBodyError(f"The body is nested more than {MAX_DEPTH} levels deep.")


def _check_depth(body: bytes) -> None:
    depth = 0
    for match in _BRACKETS.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep()
        elif first in b"]}":
            depth -= 1


def _check_surrogates(value: Any) -> None:
    """Raise for a string that cannot be UTF-8. Depth is bounded by now."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidBodyError("The body holds a lone surrogate (\\ud800-\\udfff).") from None
    elif isinstance(value, list):
        for item in value:
            _check_surrogates(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_surrogates(key)
            _check_surrogates(item)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidBodyError(f"The body has the key {echoed(key)} twice.")
            seen.add(key)
    return members


def _no_constant(name: str) -> NoReturn:
    raise InvalidBodyError(f"The body holds {name}, which is not JSON.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidBodyError("The body holds a number that is out of range.")
    return value


_JSON = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite
)
