"""The document at /openapi.json: bodies from pydantic, answers from msgspec, and the errors that
every route can answer, so that a new route has them without declaring them."""

from __future__ import annotations

import functools
from copy import copy
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct
from pydantic import TypeAdapter

from server.api.bodies import BodyPart
from server.api.shapes import ErrorAnswer

JSON = "application/json"
EVENTS = "text/event-stream"


@functools.cache
def schema_of(model: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic model or a type, without references."""
    schema = TypeAdapter(model).json_schema()
    shown: dict[str, Any] = _inline(schema, schema.pop("$defs", {}), _with_nulls)
    return shown


@functools.cache
def answer_schema(answer: type[Struct]) -> dict[str, Any]:
    """The JSON schema of an answer, without references. What may be absent is not required."""
    [schema], components = msgspec.json.schema_components([answer], ref_template="{name}")
    shown: dict[str, Any] = _inline(schema, components, _of_answer)
    return shown


def _inline(value: Any, definitions: Any, change: Any) -> Any:
    """The schema with its references resolved and `change` applied to a copy of each object."""
    if isinstance(value, list):
        return [_inline(item, definitions, change) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(ref := value.get("$ref"), str):
        return _inline(definitions[ref.rsplit("/", 1)[-1]], definitions, change)
    return change({key: _inline(item, definitions, change) for key, item in value.items()})


def _with_nulls(shown: dict[str, Any]) -> dict[str, Any]:
    """A BodyPart's schema: null is as good as absent, for members that it knows and for others."""
    if shown.get("additionalProperties") is not False:
        return shown
    required, null = shown.get("required", ()), {"type": "null"}
    properties = {
        name: item
        if name in required
        or not item.keys() - {"title", "description", "default"}
        or null in item.get("anyOf", ())
        else {"anyOf": [{k: v for k, v in item.items() if k != "default"}, null]}
        for name, item in shown.get("properties", {}).items()
    }
    return {**shown, "properties": properties, "additionalProperties": null}


def _of_answer(shown: dict[str, Any]) -> dict[str, Any]:
    """An answer's schema: constants, and what is always there. A default is sent as well; only
    UNSET is left out."""
    if len(shown.get("enum", ())) == 1:
        return {"const": shown["enum"][0], **{k: v for k, v in shown.items() if k == "default"}}
    properties = shown.get("properties")
    if shown.get("type") != "object" or not isinstance(properties, dict):
        # A tagged union's discriminator says what the members' constants say already.
        return {key: item for key, item in shown.items() if key != "discriminator"}
    required = set(shown.get("required", ()))
    return {
        **{key: item for key, item in shown.items() if key != "title"},
        "properties": {
            name: {k: v for k, v in item.items() if k != "default"}
            for name, item in properties.items()
        },
        "required": [n for n, item in properties.items() if n in required or "default" in item],
    }


_LATER = "x-later"
_NO_KEY = {"/health", "/ready", "/ping", "/openapi.json"}
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


def described(
    summary: str,
    answer: type[Struct] | None = None,
    *,
    body: type[BodyPart] | None = None,
    chunks: tuple[type[Struct], ...] = (),
    own_503: bool = False,
) -> dict[str, Any]:
    """Keywords for a route: what it does, the body that it reads by hand, its answer and what the
    data of its events can be. own_503: whether that status has the answer, too. Schemas are made
    when the document is asked for: all of them take longer than the rest of an app."""

    def later() -> dict[str, Any]:
        content: dict[str, Any] = {}
        if answer is not None:
            content[JSON] = {"schema": answer_schema(answer)}
        if chunks:
            # As a reader of server-sent events has it: data is a string, contentSchema its JSON.
            data: list[dict[str, Any]] = [
                {"type": "string", "contentMediaType": JSON, "contentSchema": answer_schema(shape)}
                for shape in chunks
            ]
            is_named = ErrorAnswer not in chunks  # the others end with data that is no JSON
            properties = {
                "event": {"type": "string", "description": "data.type" if is_named else "message"},
                "data": {"anyOf": data if is_named else [*data, {"const": "[DONE]"}]},
            }
            event = {"type": "object", "properties": properties, "required": ["data"]}
            content[EVENTS] = {"schema": {"description": "one server-sent event", **event}}
        responses = {"200": {"description": summary, **({"content": content} if content else {})}}
        if own_503:
            responses["503"] = {**responses["200"], "description": "Not now"}
        extra: dict[str, Any] = {"responses": responses, "x-generates": bool(chunks)}
        if body is not None:
            shown = {JSON: {"schema": schema_of(body)}}
            extra["requestBody"] = {"required": True, "content": shown}
        return extra

    return {"summary": summary, "openapi_extra": {_LATER: later}}


def document(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """The whole document; made once and kept, as FastAPI does. has_keys: are keys asked for?"""
    if app.openapi_schema is None:
        routes: list[Any] = list(map(copy, app.routes))
        for route in routes:
            extra = getattr(route, "openapi_extra", None) or {}
            if _LATER in extra:
                extra |= extra.pop(_LATER)()
            route.methods = route.methods - {"HEAD"}  # each GET route has it
        made = get_openapi(title=app.title, version=app.version, routes=routes)
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                _complete(method, path, operation, has_keys)
        components = made.setdefault("components", {})
        components["schemas"] = {"Error": answer_schema(ErrorAnswer)}
        if has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = made
    return app.openapi_schema


def _complete(method: str, path: str, operation: dict[str, Any], has_keys: bool) -> None:
    """Add an operation's errors and the key that it wants."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's; nothing here answers with it
    statuses = ["500"]
    if path not in _NO_KEY:
        statuses += ["401", "429"]
    if path.startswith("/v1/tasks") or path.endswith("load_lora_adapter"):
        statuses.append("403")
    if "parameters" in operation:
        statuses += ["400", "404"]
    if method != "get":
        statuses += ["400", "404", "408", "413", "415", "503"]
    if operation.pop("x-generates", False) or path in ("/v1/decisions", "/v1/systemone"):
        statuses.append("504")
    reference = {"schema": {"$ref": "#/components/schemas/Error"}}
    for status in sorted(set(statuses)):
        responses.setdefault(
            status, {"description": _MEANINGS[status], "content": {JSON: reference}}
        )
    if has_keys and path not in _NO_KEY:
        operation["security"] = [{"key": []}]
