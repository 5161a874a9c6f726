"""What /openapi.json says: bodies as pydantic checks them, answers as they are built, every status.

FastAPI knows neither, because bodies are read by hand and answers are plain dicts. `described`
gives a route its texts and schemas; `document` writes the whole, with the errors that every route
can answer, so that a new route has them without saying so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

__all__ = ["described", "document", "schema_of"]

JSON = "application/json"
EVENTS = "text/event-stream"


def schema_of(model: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic model or a type, without references."""
    schema = TypeAdapter(model).json_schema()
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if isinstance(ref := value.get("$ref"), str):
                return inline(definitions[ref.rsplit("/", 1)[-1]])
            return {key: inline(item) for key, item in value.items()}
        return [inline(item) for item in value] if isinstance(value, list) else value

    result: dict[str, Any] = inline(schema)
    return result


def _object(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    """An object with these members and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "number"}
CHANCE = {"type": "number", "minimum": 0, "maximum": 1}
BOOLEAN = {"type": "boolean"}
NAME_OR_NULL = _or_null(TEXT)
ID = {"type": "integer", "minimum": 0}

ERROR = _object(
    {"error": _object({"message": TEXT, "type": TEXT, "param": NAME_OR_NULL, "code": NAME_OR_NULL})}
)

USAGE = _object(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _object({"cached_tokens": COUNT, "audio_tokens": COUNT}),
        "completion_tokens_details": _object(
            {
                "reasoning_tokens": COUNT,
                "audio_tokens": COUNT,
                "accepted_prediction_tokens": COUNT,
                "rejected_prediction_tokens": COUNT,
            }
        ),
    }
)

SPECULATION = {
    "type": "object",
    "properties": {
        "drafter": TEXT,
        "steps": COUNT,
        "drafts": COUNT,
        "drafted_tokens": COUNT,
        "accepted_tokens": COUNT,
        "mean_tokens_per_step": _or_null(NUMBER),
        "accepted_by_depth": _list(COUNT),
        "offered_by_depth": _list(COUNT),
        "by_source": {
            "type": "object",
            "additionalProperties": _object({"drafted_tokens": COUNT, "accepted_tokens": COUNT}),
        },
    },
    "required": ["drafter", "steps", "mean_tokens_per_step", "by_source"],
}

TOKEN_SOURCES = _list(_object({"source": NAME_OR_NULL, "tokens": COUNT, "text": TEXT}))

REJECTED_DRAFTS = _list(
    _object({"token": COUNT, "offset": COUNT, "source": TEXT, "tokens": COUNT, "text": TEXT})
)

FINISH_REASONS = {"enum": ["stop", "length", "content_filter", "tool_calls", "function_call"]}

COMPLETION = _object(
    {
        "id": TEXT,
        "object": {"const": "text_completion"},
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": NAME_OR_NULL,
        "choices": _list(
            _object(
                {
                    "text": TEXT,
                    "index": COUNT,
                    "logprobs": _or_null(
                        _object(
                            {
                                "text_offset": _list(COUNT),
                                "tokens": _list(TEXT),
                                "token_logprobs": _list(_or_null(NUMBER)),
                                "top_logprobs": _list(
                                    _or_null({"type": "object", "additionalProperties": NUMBER})
                                ),
                            }
                        )
                    ),
                    "finish_reason": FINISH_REASONS,
                },
                stop_reason={"anyOf": [TEXT, ID]},
                token_ids=_list(ID),
                prompt_token_ids=_list(ID),
                token_sources=TOKEN_SOURCES,
                rejected_drafts=REJECTED_DRAFTS,
            )
        ),
        "usage": USAGE,
    },
    speculation=SPECULATION,
)

_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": _list(COUNT)}
CHAT_LOGPROBS = _object(
    {
        "content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
TOOL_CALL = _object(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": _object({"name": TEXT, "arguments": TEXT}),
    }
)

CHAT = _object(
    {
        "id": TEXT,
        "object": {"const": "chat.completion"},
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": NAME_OR_NULL,
        "choices": _list(
            _object(
                {
                    "index": COUNT,
                    "message": _object(
                        {
                            "role": {"const": "assistant"},
                            "content": NAME_OR_NULL,
                            "refusal": {"type": "null"},
                            "annotations": _list({}),
                        },
                        tool_calls=_list(TOOL_CALL),
                    ),
                    "logprobs": _or_null(CHAT_LOGPROBS),
                    "finish_reason": FINISH_REASONS,
                },
                stop_reason={"anyOf": [TEXT, ID]},
                token_ids=_list(ID),
                prompt_token_ids=_list(ID),
                token_sources=TOKEN_SOURCES,
                rejected_drafts=REJECTED_DRAFTS,
            )
        ),
        "usage": USAGE,
    },
    service_tier={"const": "default"},
    speculation=SPECULATION,
)

_CHOICE_VALUE = {"anyOf": [TEXT, BOOLEAN]}
DECISION = _object(
    {
        "model": TEXT,
        "answers": _list(
            {
                "anyOf": [
                    _object(
                        {
                            "type": {"const": "predicate"},
                            "name": NAME_OR_NULL,
                            "probability": CHANCE,
                        }
                    ),
                    _object(
                        {
                            "type": {"const": "choice"},
                            "name": NAME_OR_NULL,
                            "choice": _CHOICE_VALUE,
                            "confidence": CHANCE,
                            "probabilities": _list(
                                _object({"value": _CHOICE_VALUE, "probability": CHANCE})
                            ),
                        }
                    ),
                    _object(
                        {
                            "type": {"const": "score"},
                            "name": NAME_OR_NULL,
                            "score": {"type": "number", "minimum": 0},
                            "confidence": CHANCE,
                            "probabilities": _list(
                                _object({"label": TEXT, "value": COUNT, "probability": CHANCE})
                            ),
                        }
                    ),
                ]
            }
        ),
        "usage": _object(
            {
                "input_tokens": COUNT,
                "input_tokens_details": _object(
                    {"cached_tokens": COUNT, "cache_write_tokens": COUNT}
                ),
                "output_tokens": COUNT,
                "output_tokens_details": _object({"reasoning_tokens": COUNT}),
                "total_tokens": COUNT,
            }
        ),
    }
)

MODEL = _object(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        "root": TEXT,
        "parent": NAME_OR_NULL,
        "max_model_len": COUNT,
        "description": TEXT,
    }
)
MODELS = _object({"object": {"const": "list"}, "data": _list(MODEL)})
TOKENS = _object(
    {
        "count": COUNT,
        "max_model_len": COUNT,
        "tokens": _list(ID),
        "token_strs": _or_null(_list(NAME_OR_NULL)),
    }
)
DETOKENIZED = _object({"prompt": TEXT})
HEALTH = _object(
    {
        "status": {"enum": ["ok", "degraded", "loading", "dead"]},
        "engines": _list(
            _object(
                {
                    "name": TEXT,
                    "model": TEXT,
                    "device": TEXT,
                    "state": {"enum": ["loading", "ready", "restarting", "failed", "stopped"]},
                    "restarts": COUNT,
                    "open_requests": COUNT,
                }
            )
        ),
    }
)
READY = _object({"status": {"enum": ["ready", "loading", "draining"]}})
VERSION = _object({"version": TEXT})

CORPUS_SIZE = _or_null(
    _object({"documents": COUNT, "tokens": COUNT, "bytes": COUNT, "uploaded": BOOLEAN})
)
LEARNED = _object({"tokens": COUNT, "outputs": COUNT, "scopes": COUNT})
_TASK = {
    "id": TEXT,
    "object": {"const": "task"},
    "description": TEXT,
    "model": TEXT,
    "drafter": TEXT,
    "max_draft_tokens": COUNT,
    "learn": BOOLEAN,
    "corpus": CORPUS_SIZE,
}
_SETTINGS = {"type": "object", "description": "keys of the task's file"}
TASKS = _object({"object": {"const": "list"}, "data": _list(_object(_TASK))})
TASK = _object(
    {
        **_TASK,
        "version": TEXT,
        "sampling": _SETTINGS,
        "limits": _SETTINGS,
        "speculation": _SETTINGS,
        "vocabulary": _SETTINGS,
        "learned": LEARNED,
        "expected_tokens_per_step": _or_null(NUMBER),
        "measured_steps": COUNT,
        "engines": _list(_object({"name": TEXT, "state": TEXT, "answered": BOOLEAN})),
        "calibration": _list(
            _object(
                {
                    "source": TEXT,
                    "min_match_length": COUNT,
                    "predicted_share": NUMBER,
                    "offered": NUMBER,
                    "accepted": NUMBER,
                    "chance": CHANCE,
                }
            )
        ),
    }
)
TASK_CORPUS = _object(
    {
        "object": {"const": "task.corpus"},
        "task": TEXT,
        "corpus": CORPUS_SIZE,
        "learn": BOOLEAN,
        "learned": LEARNED,
    }
)
CORPUS_DELETED = _object(
    {"object": {"const": "task.corpus.deleted"}, "task": TEXT, "deleted": {"const": True}}
)
_NAMES = _list(TEXT)
RELOAD = _object(
    {
        "object": {"const": "task.reload"},
        "tasks": _NAMES,
        "added": _NAMES,
        "removed": _NAMES,
        "changed": _NAMES,
    }
)

_ANSWERS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("get", "/v1/models"): ("The models and tasks that the key may use", MODELS),
    ("get", "/v1/models/{model}"): ("One model or task", MODEL),
    ("get", "/health"): ("The state of every engine", HEALTH),
    ("get", "/ready"): ("Whether requests are taken", READY),
    ("get", "/version"): ("The server's version", VERSION),
    ("post", "/v1/completions"): ("A text completion", COMPLETION),
    ("post", "/v1/chat/completions"): ("A chat's next message", CHAT),
    ("post", "/v1/decisions"): ("Typed answers about an input", DECISION),
    ("post", "/tokenize"): ("Token ids of a text", TOKENS),
    ("post", "/detokenize"): ("Text of token ids", DETOKENIZED),
    ("get", "/v1/tasks"): ("The tasks", TASKS),
    ("get", "/v1/tasks/{task}"): ("One task: settings, corpus, calibration", TASK),
    ("post", "/v1/tasks/reload"): ("Read the task files again", RELOAD),
    ("get", "/v1/tasks/{task}/corpus"): ("A task's corpus and what it learned", TASK_CORPUS),
    ("post", "/v1/tasks/{task}/corpus"): ("Upload a task's examples", TASK_CORPUS),
    ("delete", "/v1/tasks/{task}/corpus"): (
        "Delete what was uploaded and what was learned",
        CORPUS_DELETED,
    ),
}
"""Summary and answer of each operation; one that is not here answers with any JSON."""

_STREAMS = {"/v1/completions", "/v1/chat/completions"}
_GENERATES = {*_STREAMS, "/v1/decisions"}
_CHUNKS = "server-sent events: the data of each is a chunk as JSON, of the last one [DONE]"
_OPEN = {"/health", "/ready", "/openapi.json"}
_OWN_503 = {"/health": HEALTH, "/ready": READY}

_MEANINGS = {
    "400": "A field, the body or the combination of fields is refused; `param` names the field",
    "401": "No API key, or a wrong one",
    "403": "The key may not do this",
    "404": "No such model, task or route",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not application/json, or compressed",
    "429": "Too much at once, for the key or the server; Retry-After says when to come back",
    "500": "The server's fault",
    "504": "It took longer than the task allows; the same again would, too",
    "503": "Nothing can serve this now; Retry-After says when to come back",
}


def described(body: type[Any], summary: str) -> dict[str, Any]:
    """Keywords for the route of a body that is read by hand."""
    return {
        "summary": summary,
        "openapi_extra": {
            "requestBody": {"required": True, "content": {JSON: {"schema": schema_of(body)}}}
        },
    }


def document(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """The whole document; made once and kept, as FastAPI does. has_keys: are keys asked for?"""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                _complete(method, path, operation, has_keys)
        components = made.setdefault("components", {})
        components["schemas"] = {"Error": ERROR}
        if has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = made
    return app.openapi_schema


def _complete(method: str, path: str, operation: dict[str, Any], has_keys: bool) -> None:
    """Add an operation's answer, its errors and the key that it wants."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's; nothing here answers with it
    known = _ANSWERS.get((method, path))
    if known is not None:
        summary, schema = known
        operation["summary"] = summary
        content = {JSON: {"schema": schema}}
        if path in _STREAMS:
            content[EVENTS] = {"schema": {"description": _CHUNKS}}
        responses["200"] = {"description": summary, "content": content}
    is_admin = path.startswith("/v1/tasks")
    statuses = ["500"]
    if path not in _OPEN:
        statuses += ["401", "429"]
    if is_admin:
        statuses.append("403")
    if "{" in path:
        statuses.append("404")
    if method != "get":
        statuses += ["400", "404", "408", "413", "415", "503"]
    if path in _GENERATES:
        statuses.append("504")
    reference = {"schema": {"$ref": "#/components/schemas/Error"}}
    for status in sorted(set(statuses)):
        responses.setdefault(
            status, {"description": _MEANINGS[status], "content": {JSON: reference}}
        )
    if path in _OWN_503:
        responses["503"] = {
            "description": "Not now",
            "content": {JSON: {"schema": _OWN_503[path]}},
        }
    if has_keys and path not in _OPEN:
        operation["security"] = [{"key": []}]
