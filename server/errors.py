"""Every error of the server, in one tree. A class names its HTTP status, OpenAI type and code where
they are not those of the class above it.

A message is shown to the client, so it never holds more than `MAX_ECHO` characters of what the
client sent (`echoed` cuts it) and nothing about the machine.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from itertools import islice
from typing import ClassVar, Self

MAX_ECHO = 200
"""Most characters of a client's input that a message may repeat."""

_MAX_COMPARED = 1000  # names


def echoed(value: object, limit: int = 80) -> str:
    """A short, printable form of a client's value for an error message.

    At most min(limit, MAX_ECHO) characters; control characters are escaped, so that a log line or
    a terminal cannot be forged. Long strings and containers are cut before they are formatted.
    """
    limit = min(limit, MAX_ECHO)
    if isinstance(value, (str, bytes)):
        text = ascii(value[:limit]) if isinstance(value, str) else repr(value[:limit])
    elif isinstance(value, (list, tuple)):
        return f"a list of {len(value)} items"
    elif isinstance(value, dict):
        return f"an object of {len(value)} members"
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a very large integer"
    elif value is None or isinstance(value, bool):
        return json.dumps(value)  # as the client wrote it
    else:
        text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that somebody may have meant, "" where none is near."""
    near = difflib.get_close_matches(name[:128], [*islice(known, _MAX_COMPARED)], 1, cutoff)
    return near[0] if near else ""


_BY_CODE: dict[str, type[TailorError]] = {}


class TailorError(Exception):
    """The root. `message` is for people; the rest is for programs.

    at: path of the field at fault ("messages[3].content"). It stands before the text in the
    message, and is the `param` where no other is given.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init_subclass__(
        cls, *, status: int | None = None, type: str | None = None, code: str | None = None
    ) -> None:
        cls.status, cls.type, cls.code = status or cls.status, type or cls.type, code or cls.code
        if code is not None:
            _BY_CODE[code] = cls

    def __init__(
        self,
        text: str,
        *,
        at: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.text = text
        self.message = f"{at}: {text}" if at else text
        super().__init__(self.message)
        self.at = at
        self.param = at if param is None else param
        self.retry_after_s = retry_after_s
        self.headers = headers

    def moved(self, at: str) -> Self:
        """The same error of another field."""
        return type(self)(self.text, at=at, retry_after_s=self.retry_after_s, headers=self.headers)


class ConfigError(TailorError, code="config_error"):
    """A configuration file is wrong. The message names the file, the line and the key."""


class ModelError(TailorError, code="model_error"):
    """A model cannot be found, fetched, converted or read. The message says what to do."""


class CacheFolderError(TailorError, code="cache_folder_error"):
    """The cache folder cannot be written (full, read-only, not a folder). The message names it."""


class UnsupportedModelError(ModelError, code="unsupported_model"):
    """A model or adapter that would be computed wrongly; the message names what it needs."""


class IntegrityError(ModelError, code="integrity_error"):
    """A fetched or converted file is not the one that was expected."""


class UnsupportedTokenizerError(TailorError, code="unsupported_tokenizer"):
    """A tokenizer whose ids cannot be turned into bytes one by one (neither byte-level BPE nor
    SentencePiece-like)."""


class RequestError(TailorError, status=400, type="invalid_request_error"):
    """The request is wrong, or is refused with a reason that the client can act on."""


class InvalidRequestError(RequestError, code="invalid_value"):
    """A field holds a value that is not allowed; `param` names it."""


class InvalidHttpError(InvalidRequestError, code="invalid_http"):
    """The bytes are not one unambiguous HTTP/1.1 request; the connection is closed."""


class InvalidBodyError(InvalidRequestError, code="invalid_body"):
    """The body is not one JSON object in UTF-8 (syntax, duplicate keys, NaN, depth, encoding)."""


class UnknownFieldError(InvalidRequestError, code="unknown_parameter"):
    """The body has fields that the route does not know."""


class UnsupportedFieldError(InvalidRequestError, code="unsupported_parameter"):
    """A known field that this model, task or server cannot honour."""


class LimitExceededError(InvalidRequestError, code="limit_exceeded"):
    """A value is above a limit of the server or of the task."""


class ConstraintUnsatisfiableError(InvalidRequestError, code="constraint_unsatisfiable"):
    """No token satisfies all that the request asks for (grammar, allowed and banned ids, ...)."""


class ContextLengthExceededError(InvalidRequestError, code="context_length_exceeded"):
    """Prompt and max_tokens do not fit the model's context. Prompts are never truncated."""


class AuthenticationError(RequestError, status=401, code="invalid_api_key"):
    """No API key, or a wrong one."""


class PermissionDeniedError(
    RequestError, status=403, type="permission_error", code="permission_denied"
):
    """The key is known but may not do this."""


class RouteNotFoundError(RequestError, status=404, code="not_found"):
    """No such path."""


class ModelNotFoundError(RequestError, status=404, code="model_not_found"):
    """The `model` field names neither a task nor a model."""


class TaskNotFoundError(RequestError, status=404, code="task_not_found"):
    """An admin route names a task that does not exist."""


class MethodNotAllowedError(RequestError, status=405, code="method_not_allowed"):
    """The path exists, the method does not."""


class BodyTimeoutError(RequestError, status=408, code="request_timeout"):
    """The body did not arrive in time."""


class BodyTooLargeError(RequestError, status=413, code="request_too_large"):
    """The body is above the limit; it is not read to its end."""


class UnsupportedMediaTypeError(RequestError, status=415, code="unsupported_media_type"):
    """Not application/json, or a compressed body."""


class HeadersTooLargeError(RequestError, status=431, code="headers_too_large"):
    """The request line and headers are above the limit."""


class ClientGoneError(RequestError, status=499, code="client_gone"):
    """The client left before its answer was complete: nginx's 499, only ever logged and counted."""


class QueueFullError(RequestError, status=429, type="rate_limit_error", code="queue_full"):
    """Too many requests or too many prompt tokens are waiting."""


class RateLimitedError(
    RequestError, status=429, type="rate_limit_error", code="rate_limit_exceeded"
):
    """The key is above its own rate or number of open requests."""


class ServerError(TailorError, code="internal_error"):
    """The server's fault. The message says no more than the client needs."""


class StorageError(ServerError, status=507, code="storage_error"):
    """The server could not write what was sent: its disk is full or read-only. Nothing changed."""


class EngineError(ServerError, code="engine_error"):
    """The engine could not finish this request; others go on."""


class EngineDiedError(EngineError, code="engine_died"):
    """The engine that held this request died; it is being restarted."""


class DeadlineExceededError(ServerError, status=504, code="timeout"):
    """The request took longer than its task allows. Sending it again would not help."""


class UnavailableError(ServerError, status=503, code="service_unavailable"):
    """Nothing can serve this now; Retry-After says when to come back."""


class LoadingError(UnavailableError, code="loading"):
    """The model is still being loaded."""


class DrainingError(UnavailableError, code="draining"):
    """The server is shutting down."""


class QueueTimeoutError(UnavailableError, code="queue_timeout"):
    """The request waited for an engine longer than its task allows; nothing was computed."""


class AdaptersFullError(UnavailableError, code="adapters_full"):
    """Every adapter in memory is in use, and this request needs another."""


class NoEngineError(UnavailableError, code="no_engine"):
    """No engine of this model is alive."""


def error_for_engine_code(code: str | None, message: str) -> TailorError:
    """The exception for a Delta whose finish_reason is "error".

    An engine names its errors by the codes above; any other code is an EngineError. "kv_exhausted":
    the request does not fit the engine's KV memory even alone. Those of grammars say which field is
    at fault, too.
    """
    cls = _BY_CODE.get(code or "", EngineError)
    later = (QueueFullError, QueueTimeoutError, AdaptersFullError, NoEngineError)
    return cls(message, retry_after_s=1.0 if issubclass(cls, later) else None)


_BY_CODE |= {
    "kv_exhausted": ContextLengthExceededError,
    "grammar_invalid": InvalidRequestError,
    "grammar_limit": LimitExceededError,
}
