"""Every error of the server, in one tree. Each class has its HTTP status, OpenAI type and code.

    class                                      status type                  code
    TailorError                                500    server_error          -
    ├── ConfigError (start-up)                 500    server_error          config_error
    ├── ModelError (start-up)                  500    server_error          model_error
    │   ├── UnsupportedModelError              500    server_error          unsupported_model
    │   └── IntegrityError                     500    server_error          integrity_error
    ├── CacheFolderError (start-up)            500    server_error          cache_folder_error
    ├── UnsupportedTokenizerError (start-up)   500    server_error          unsupported_tokenizer
    ├── RequestError                           400    invalid_request_error -
    │   ├── InvalidRequestError                400    invalid_request_error invalid_value
    │   │   ├── InvalidHttpError               400    invalid_request_error invalid_http
    │   │   ├── InvalidBodyError               400    invalid_request_error invalid_body
    │   │   ├── UnknownFieldError              400    invalid_request_error unknown_parameter
    │   │   ├── UnsupportedFieldError          400    invalid_request_error unsupported_parameter
    │   │   ├── LimitExceededError             400    invalid_request_error limit_exceeded
    │   │   ├── ConstraintUnsatisfiableError   400    invalid_request_error constraint_unsatisfiable
    │   │   └── ContextLengthExceededError     400    invalid_request_error context_length_exceeded
    │   ├── AuthenticationError                401    invalid_request_error invalid_api_key
    │   ├── PermissionDeniedError              403    permission_error      permission_denied
    │   ├── RouteNotFoundError                 404    invalid_request_error not_found
    │   ├── ModelNotFoundError                 404    invalid_request_error model_not_found
    │   ├── TaskNotFoundError                  404    invalid_request_error task_not_found
    │   ├── MethodNotAllowedError              405    invalid_request_error method_not_allowed
    │   ├── BodyTimeoutError                   408    invalid_request_error request_timeout
    │   ├── BodyTooLargeError                  413    invalid_request_error request_too_large
    │   ├── UnsupportedMediaTypeError          415    invalid_request_error unsupported_media_type
    │   ├── HeadersTooLargeError               431    invalid_request_error headers_too_large
    │   ├── ClientGoneError                    499    invalid_request_error client_gone
    │   ├── QueueFullError (Retry-After)       429    rate_limit_error      queue_full
    │   └── RateLimitedError (Retry-After)     429    rate_limit_error      rate_limit_exceeded
    └── ServerError                            500    server_error          internal_error
        ├── StorageError                       507    server_error          storage_error
        ├── EngineError                        500    server_error          engine_error
        │   └── EngineDiedError                500    server_error          engine_died
        ├── DeadlineExceededError              504    server_error          timeout
        └── UnavailableError (Retry-After)     503    server_error          service_unavailable
            ├── LoadingError                   503    server_error          loading
            ├── DrainingError                  503    server_error          draining
            ├── QueueTimeoutError              503    server_error          queue_timeout
            ├── AdaptersFullError              503    server_error          adapters_full
            └── NoEngineError                  503    server_error          no_engine

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


class TailorError(Exception):
    """The root. `message` is for people; the rest is for programs.

    at: path of the field at fault ("messages[3].content"). It stands before the text in the
    message, and is the `param` where no other is given.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

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


class ConfigError(TailorError):
    """A configuration file is wrong. The message names the file, the line and the key."""

    code = "config_error"


class ModelError(TailorError):
    """A model cannot be found, fetched, converted or read. The message says what to do."""

    code = "model_error"


class CacheFolderError(TailorError):
    """The cache folder cannot be written (full, read-only, not a folder). The message names it."""

    code = "cache_folder_error"


class UnsupportedModelError(ModelError):
    """A model or adapter that would be computed wrongly; the message names what it needs."""

    code = "unsupported_model"


class IntegrityError(ModelError):
    """A fetched or converted file is not the one that was expected."""

    code = "integrity_error"


class UnsupportedTokenizerError(TailorError):
    """A tokenizer whose ids cannot be turned into bytes one by one (neither byte-level BPE nor
    SentencePiece-like)."""

    code = "unsupported_tokenizer"


class RequestError(TailorError):
    """The request is wrong, or is refused with a reason that the client can act on."""

    status = 400
    type = "invalid_request_error"


class InvalidRequestError(RequestError):
    """A field holds a value that is not allowed; `param` names it."""

    code = "invalid_value"


class InvalidHttpError(InvalidRequestError):
    """The bytes are not one unambiguous HTTP/1.1 request; the connection is closed."""

    code = "invalid_http"


class InvalidBodyError(InvalidRequestError):
    """The body is not one JSON object in UTF-8 (syntax, duplicate keys, NaN, depth, encoding)."""

    code = "invalid_body"


class UnknownFieldError(InvalidRequestError):
    """The body has fields that the route does not know."""

    code = "unknown_parameter"


class UnsupportedFieldError(InvalidRequestError):
    """A known field that this model, task or server cannot honour."""

    code = "unsupported_parameter"


class LimitExceededError(InvalidRequestError):
    """A value is above a limit of the server or of the task."""

    code = "limit_exceeded"


class ConstraintUnsatisfiableError(InvalidRequestError):
    """No token satisfies all that the request asks for (grammar, allowed and banned ids, ...)."""

    code = "constraint_unsatisfiable"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and max_tokens do not fit the model's context. Prompts are never truncated."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """No API key, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    """The key is known but may not do this."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class RouteNotFoundError(RequestError):
    """No such path."""

    status = 404
    code = "not_found"


class ModelNotFoundError(RequestError):
    """The `model` field names neither a task nor a model."""

    status = 404
    code = "model_not_found"


class TaskNotFoundError(RequestError):
    """An admin route names a task that does not exist."""

    status = 404
    code = "task_not_found"


class MethodNotAllowedError(RequestError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class BodyTooLargeError(RequestError):
    """The body is above the limit; it is not read to its end."""

    status = 413
    code = "request_too_large"


class UnsupportedMediaTypeError(RequestError):
    """Not application/json, or a compressed body."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLargeError(RequestError):
    """The request line and headers are above the limit."""

    status = 431
    code = "headers_too_large"


class ClientGoneError(RequestError):
    """The client left before its answer was complete: nginx's 499, only ever logged and counted."""

    status = 499
    code = "client_gone"


class QueueFullError(RequestError):
    """Too many requests or too many prompt tokens are waiting."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RateLimitedError(RequestError):
    """The key is above its own rate or number of open requests."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ServerError(TailorError):
    """The server's fault. The message says no more than the client needs."""

    code = "internal_error"


class StorageError(ServerError):
    """The server could not write what was sent: its disk is full or read-only. Nothing changed."""

    status = 507
    code = "storage_error"


class EngineError(ServerError):
    """The engine could not finish this request; others go on."""

    code = "engine_error"


class EngineDiedError(EngineError):
    """The engine that held this request died; it is being restarted."""

    code = "engine_died"


class DeadlineExceededError(ServerError):
    """The request took longer than its task allows. Sending it again would not help."""

    status = 504
    code = "timeout"


class UnavailableError(ServerError):
    """Nothing can serve this now; Retry-After says when to come back."""

    status = 503
    code = "service_unavailable"


class LoadingError(UnavailableError):
    """The model is still being loaded."""

    code = "loading"


class DrainingError(UnavailableError):
    """The server is shutting down."""

    code = "draining"


class QueueTimeoutError(UnavailableError):
    """The request waited for an engine longer than its task allows; nothing was computed."""

    code = "queue_timeout"


class AdaptersFullError(UnavailableError):
    """Every adapter in memory is in use, and this request needs another."""

    code = "adapters_full"


class NoEngineError(UnavailableError):
    """No engine of this model is alive."""

    code = "no_engine"


def error_for_engine_code(code: str | None, message: str) -> TailorError:
    """The exception for a Delta whose finish_reason is "error".

    An engine names its errors by the codes above; any other code is an EngineError. "kv_exhausted":
    the request does not fit the engine's KV memory even alone.
    """
    if code == "kv_exhausted":
        return ContextLengthExceededError(message)
    cls = _OF_ENGINES.get(code or "", EngineError)
    later = (QueueFullError, QueueTimeoutError, AdaptersFullError, NoEngineError)
    return cls(message, retry_after_s=1.0 if issubclass(cls, later) else None)


_OF_ENGINES: dict[str, type[TailorError]] = {
    str(cls.code): cls
    for cls in (
        QueueFullError, ContextLengthExceededError, ConstraintUnsatisfiableError,
        LimitExceededError, InvalidRequestError, UnsupportedFieldError, ModelNotFoundError,
        DrainingError, QueueTimeoutError, AdaptersFullError, NoEngineError, EngineDiedError,
    )
}  # fmt: skip
_OF_ENGINES |= {"grammar_invalid": InvalidRequestError, "grammar_limit": LimitExceededError}
"""By the code in a Delta. Those of grammars say which field is at fault, too."""
