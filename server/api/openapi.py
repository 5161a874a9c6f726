"""The content of /openapi.json: bodies as pydantic checks them, answers as declared, every status.

FastAPI knows neither, because bodies are read by hand and answers are msgspec's. `described`
gives a route its texts and schemas; `document` writes the whole, with the errors that every route
can answer, so that a new route has them without declaring them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct
from pydantic import TypeAdapter

from server.api.chunks import ChatChunk, CompletionChunk
from server.api.responses import (
    ChatAnswer,
    CompletionAnswer,
    Decision,
    ErrorAnswer,
    SystemOneAnswer,
)
from server.api.responses_api.shapes import ErrorEvent, ResponseAnswer, ResponseEvent
from server.api.state_responses import (
    CorpusAnswer,
    CorpusDeleted,
    Detokenized,
    Health,
    Load,
    ModelEntry,
    ModelList,
    Ready,
    ReloadAnswer,
    RenderedPrompt,
    TaskAnswer,
    TaskList,
    TokenizerInfo,
    Tokens,
    Version,
)

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
            shown = {key: inline(item) for key, item in value.items()}
            return _with_nulls(shown) if shown.get("additionalProperties") is False else shown
        return [inline(item) for item in value] if isinstance(value, list) else value

    result: dict[str, Any] = inline(schema)
    return result


def _with_nulls(body_part: dict[str, Any]) -> dict[str, Any]:
    """A BodyPart's schema: null is as good as absent, for members that it knows and for others."""
    required, properties = body_part.get("required", ()), body_part.get("properties", {})
    null = {"type": "null"}
    shown = {
        name: item
        if name in required
        or not item.keys() - {"title", "description", "default"}
        or null in item.get("anyOf", ())
        else {"anyOf": [{k: v for k, v in item.items() if k != "default"}, null]}
        for name, item in properties.items()
    }
    return {**body_part, "properties": shown, "additionalProperties": null}


def answer_schema(answer: type[Struct]) -> dict[str, Any]:
    """The JSON schema of an answer, without references. What may be absent is not required."""
    [schema], components = msgspec.json.schema_components([answer], ref_template="{name}")

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(item) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(ref := value.get("$ref"), str):
            return inline(components[ref])
        if len(value.get("enum", ())) == 1:
            return {"const": value["enum"][0]}
        if value.get("type") == "object" and isinstance(value.get("properties"), dict):
            required, properties = set(value.get("required", ())), value["properties"]
            return {
                **{key: item for key, item in value.items() if key != "title"},
                "properties": {
                    name: {k: v for k, v in inline(item).items() if k != "default"}
                    for name, item in properties.items()
                },
                # A default is sent as well; only UNSET is left out.
                "required": [
                    name
                    for name, item in properties.items()
                    if name in required or "default" in item
                ],
            }
        # A tagged union's discriminator says what the members' constants say already.
        return {key: inline(item) for key, item in value.items() if key != "discriminator"}

    result: dict[str, Any] = inline(schema)
    return result


_ANSWERS: dict[tuple[str, str], tuple[str, type[Struct]]] = {
    ("get", "/v1/models"): ("The models and tasks that the key may use", ModelList),
    ("get", "/v1/models/{model}"): ("One model or task", ModelEntry),
    ("get", "/health"): ("The state of every engine", Health),
    ("get", "/ready"): ("Whether requests are taken", Ready),
    ("get", "/load"): ("Open requests", Load),
    ("get", "/tokenizer_info"): ("Special tokens and chat template of a model", TokenizerInfo),
    ("post", "/v1/chat/completions/render"): ("A chat as the model gets it", RenderedPrompt),
    ("get", "/version"): ("The server's version", Version),
    ("post", "/v1/completions"): ("A text completion", CompletionAnswer),
    ("post", "/v1/chat/completions"): ("A chat's next message", ChatAnswer),
    ("post", "/v1/responses"): ("A response; nothing is stored", ResponseAnswer),
    ("post", "/v1/decisions"): ("Typed answers about an input", Decision),
    ("post", "/v1/systemone"): ("Answers about a state, by name", SystemOneAnswer),
    ("post", "/tokenize"): ("Token ids of a text", Tokens),
    ("post", "/detokenize"): ("Text of token ids", Detokenized),
    ("get", "/v1/tasks"): ("The tasks", TaskList),
    ("get", "/v1/tasks/{task}"): ("One task: settings, corpus, calibration", TaskAnswer),
    ("post", "/v1/tasks/reload"): ("Read the task files again", ReloadAnswer),
    ("get", "/v1/tasks/{task}/corpus"): ("A task's corpus and what it learned", CorpusAnswer),
    ("post", "/v1/tasks/{task}/corpus"): ("Upload a task's examples", CorpusAnswer),
    ("delete", "/v1/tasks/{task}/corpus"): (
        "Delete what was uploaded and what was learned",
        CorpusDeleted,
    ),
}
"""Summary and answer of each operation; one that is not here answers with any JSON."""

_STREAMS: dict[str, tuple[type[Struct], ...]] = {
    "/v1/completions": (CompletionChunk, ErrorAnswer),
    "/v1/chat/completions": (ChatChunk, ErrorAnswer),
    "/v1/responses": (ResponseEvent, ErrorEvent),
}
"""What the data of an event can be."""
_GENERATES = {*_STREAMS, "/v1/decisions", "/v1/systemone"}
_OPEN = {"/health", "/ready", "/ping", "/openapi.json"}
_OWN_503: dict[str, type[Struct]] = {"/health": Health, "/ready": Ready}

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
        components["schemas"] = {"Error": answer_schema(ErrorAnswer)}
        if has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = made
    return app.openapi_schema


def _event_schema(path: str) -> dict[str, Any]:
    """The schema of one event of a stream, as a reader of server-sent events has it: data is a
    string, and contentSchema says what its JSON is."""
    data: list[dict[str, Any]] = [
        {"type": "string", "contentMediaType": JSON, "contentSchema": answer_schema(shape)}
        for shape in _STREAMS[path]
    ]
    is_named = path == "/v1/responses"  # the others end with data that is no JSON
    return {
        "description": "one server-sent event",
        "type": "object",
        "properties": {
            "event": {"type": "string", "description": "data.type" if is_named else "message"},
            "data": {"anyOf": data if is_named else [*data, {"const": "[DONE]"}]},
        },
        "required": ["data"],
    }


def _complete(method: str, path: str, operation: dict[str, Any], has_keys: bool) -> None:
    """Add an operation's answer, its errors and the key that it wants."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's; nothing here answers with it
    known = _ANSWERS.get((method, path))
    if known is not None:
        summary, schema = known
        operation["summary"] = summary
        content = {JSON: {"schema": answer_schema(schema)}}
        if path in _STREAMS:
            content[EVENTS] = {"schema": _event_schema(path)}
        responses["200"] = {"description": summary, "content": content}
    is_admin = path.startswith("/v1/tasks") or path.endswith("load_lora_adapter")
    statuses = ["500"]
    if path not in _OPEN:
        statuses += ["401", "429"]
    if is_admin:
        statuses.append("403")
    if "parameters" in operation:
        statuses += ["400", "404"]
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
            "content": {JSON: {"schema": answer_schema(_OWN_503[path])}},
        }
    if has_keys and path not in _OPEN:
        operation["security"] = [{"key": []}]
