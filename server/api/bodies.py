"""What the bodies of all routes have in common, and the fields that the generating routes share.

One rule holds for every object that a client sends: types are strict, a member that is null counts
as absent, and any other member is honoured, or refused by its name, or holds the value that applies
anyway (NEUTRAL), or changes nothing at all (user, metadata, ...). What other servers' clients
call by another name is taken under that name, too (ALIASES), and errors have the name that was
sent.

`validate` is the only place where a body is checked against its class, once. Bounds that depend on
the model, the task or the server's configuration are checked in server.api.order.

`read_body` and `parse_object` read a request's body as one strict JSON object: bounded in size and
time, never decompressed, UTF-8 only, no duplicate keys, no NaN or infinity, no lone surrogates, no
nesting deeper than `MAX_DEPTH`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, core_schema
from starlette.requests import Request

from server.config.declared import parameters, request_sections
from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidBodyError,
    InvalidRequestError,
    UnknownFieldError,
    UnsupportedFieldError,
    UnsupportedMediaTypeError,
    echoed,
    nearest,
)
from server.types import INT31, PARAMETERS

Neutral = tuple[tuple[Any, ...], str]
"""Values that apply anyway, and why no other one is taken ("" where there is nothing to say)."""
Path = tuple[str, ...]

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_IDS = 256
_SHOWN_NAMES = 3


class BodyPart(BaseModel):
    """Base of every object that a client sends."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        frozen=True,
        protected_namespaces=(),
    )
    NEUTRAL: ClassVar[Mapping[str, Neutral]] = {}
    ALIASES: ClassVar[Mapping[str, Path]] = {}
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    """What to send instead of a field that other servers have."""
    NAMES: ClassVar[Mapping[str, str]] = {}
    """What this route calls fields that have another name in /v1/completions."""

    _spelled: dict[Path, str] = PrivateAttr(default_factory=dict)
    _num_bytes: int = PrivateAttr(0)

    @property
    def num_bytes(self) -> int:
        """Of a whole body, as it came."""
        return self._num_bytes

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {name: item for name, item in value.items() if item is not None}
        return value

    def called(self, *path: str) -> str:
        """What the client calls the field at this path: its name in this route, or an alias."""
        own = (self.NAMES.get(path[0], path[0]), *path[1:])
        return ".".join(_respelled(own, self._spelled))


def one_of(
    kinds: Mapping[str, Any], wrong: str, kind_of: Callable[[Any], str | None], key: str = ""
) -> GetPydanticSchema:
    """Annotates a member (of type Any) that may hold one of several kinds of values, so that only
    the kind that was sent is checked, and an error is one.

    kinds: types as pydantic takes them, by names that begin with "=". wrong: what is said of a
    value of none of them. kind_of: the name of a value's kind, None for none of them. key: of
    objects, the member that names the kind.
    """
    return GetPydanticSchema(
        lambda _, handler: core_schema.tagged_union_schema(
            {name: handler.generate_schema(kind) for name, kind in kinds.items()},
            kind_of,
            custom_error_type="kind",
            custom_error_message=wrong,
            custom_error_context={"key": key},
        )
    )


def one_by_type(kinds: Mapping[str, type[BodyPart]], other: Any = None) -> GetPydanticSchema:
    """Annotates a member that holds objects whose member `type` names their kind. other: what else
    there may be instead."""

    def kind_of(value: Any) -> str | None:
        if other is not None and not isinstance(value, dict):
            return "="
        name = value.get("type") if isinstance(value, dict) else None
        return f"={name}" if isinstance(name, str) and name in kinds else None

    named: dict[str, Any] = {f"={name}": kind for name, kind in kinds.items()}
    if other is not None:
        named["="] = other
    return one_of(named, f"must be one of {', '.join(kinds)}", kind_of, "type")


def says_nothing(value: Any) -> bool:
    """Whether a value is null or empty, or holds nothing but such values."""
    if isinstance(value, dict):
        return all(says_nothing(item) for item in value.values())
    return value is None or value == "" or value == []


# --- what a generating route takes ----------------------------------------------------------------

_STOP_TEXT = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_STOP = one_of(
    {"=text": _STOP_TEXT, "=texts": Annotated[list[_STOP_TEXT], Field(max_length=MAX_STOPS)]},
    "must be a string or a list of strings",
    lambda value: {"str": "=text", "list": "=texts"}.get(type(value).__name__),
)
_SCHEMA_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}


def content_schema(*kinds: str) -> dict[str, Any]:
    """The JSON schema of a text or a list of parts (joined_texts). kinds: types of parts."""
    part = {
        "type": "object",
        "properties": {
            "type": {"enum": [*kinds]},
            "text": {"type": "string"},
            "refusal": {"type": "string"},
            **({"data": {"type": ["object", "array"]}} if "input_json" in kinds else {}),
        },
        "required": ["type"],
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}


TokenId = Annotated[int, Field(ge=0, le=INT31)]
ModelName = Annotated[str, Field(min_length=1, max_length=512)]


class StreamOptions(BodyPart):
    """stream_options, of OpenAI and vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = Field(
        False, description="only false is honoured: chunks are never padded"
    )


class CacheOptions(BodyPart):
    """prompt_cache_options, of OpenAI. They change nothing: the prefix cache works by itself."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


@request_sections(BodyPart)
class SpeculationBody(BodyPart):
    """How this request drafts, within the task's limits. It changes speed, never the text."""

    drafter: str | None = Field(None, min_length=1, max_length=64)
    max_draft_tokens: int | None = Field(None, ge=0, le=256)
    corpus: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="a task whose corpus to draft from, or off for none",
    )


class VocabularyBody(BodyPart):
    """What part of the LM head this request computes, within the task's allowed modes."""

    mode: Literal["full", "slice", "exact"] | None = None
    verify_every: int | None = Field(
        None, ge=1, le=1024, description="tokens that exact verifies at once"
    )


class ContextMarksBody(BodyPart):
    """Where the prompt's context lies: after the first `after`, before the next `before`."""

    after: str | None = Field(None, min_length=1, max_length=1000)
    before: str | None = Field(None, min_length=1, max_length=1000)


class PredictionBody(BodyPart):
    """OpenAI's predicted output: text that the answer will probably repeat. It changes speed only.

    content: the text, or a list of text parts that are joined as they are.
    """

    type: Literal["content"]
    content: Annotated[Any, WithJsonSchema(content_schema("text"))]


class StructuredOutputsBody(BodyPart):
    """vLLM's structured_outputs: exactly one of json, regex, choice, grammar and json_object."""

    json_value: Annotated[Any, WithJsonSchema(_SCHEMA_SCHEMA)] = Field(
        None, alias="json", description="a JSON schema, as an object or as its text"
    )
    regex: str | None = Field(None, min_length=1, max_length=1 << 18)
    choice: list[str] | None = Field(None, min_length=1, max_length=4096)
    grammar: str | None = Field(
        None,
        min_length=1,
        max_length=1 << 18,
        description="Lark, as llguidance reads it, or GBNF, llama.cpp's",
    )
    json_object: bool | None = None
    whitespace_pattern: str | None = Field(
        None,
        max_length=1000,
        description='regular expression of the white space between two JSON tokens; "" is none',
    )
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = Field(
        None,
        description="whether objects that do not say allow no other members; default: only objects "
        "that describe their members",
    )


class JsonSchemaBody(BodyPart):
    """response_format.json_schema. Name and `strict` change nothing: a schema always holds."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = Field(None, max_length=1 << 16)
    schema_value: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormatBody(BodyPart):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None
    schema_value: dict[str, Any] | None = Field(
        None,
        alias="schema",
        description="of json_object or json_schema, as llama.cpp and Together take it",
    )


_NEUTRAL: Mapping[str, Neutral] = {
    # OpenAI
    "moderation": ((), "this server has no moderation"),
    "prompt_cache_retention": (("in_memory",), "the prefix cache promises no lifetime"),
    # vLLM
    "use_beam_search": ((False,), "nothing is searched, choices are drawn"),
    "length_penalty": ((1.0,), "it belongs to beam search"),
    "early_stopping": ((False,), "it belongs to beam search"),
    "spaces_between_special_tokens": ((True,), "text is made of the tokens' own bytes"),
    "detokenize": ((True,), "answers have text"),
    "include_reasoning": ((True,), ""),
    "logits_processors": (([],), ""),
    "vllm_xargs": (({},), ""),
    "mm_processor_kwargs": (({},), "this model reads text only"),
    "return_mm_kwargs": ((True,), "this model reads text only"),
    "return_token_offsets": ((False,), ""),
    "routed_experts_prompt_start": ((0,), ""),
    "watermarking": ((False,), ""),
    # llama.cpp: samplers that are off, and what changes no text
    "cache_prompt": ((True,), ""),
    "dry_multiplier": ((0,), ""),
    "dynatemp_range": ((0,), ""),
    "id_slot": ((-1,), ""),
    "min_keep": ((0,), ""),
    "mirostat": ((0,), ""),
    "n_keep": ((0,), "prompts are never cut"),
    "n_probs": ((0,), ""),
    "post_sampling_probs": ((False,), ""),
    "repeat_last_n": ((-1,), "penalties read the whole text"),
    "return_progress": ((False,), ""),
    "t_max_predict_ms": ((0,), "a task limits the time"),
    "tfs_z": ((1,), ""),
    "timings_per_token": ((False,), ""),
    "top_n_sigma": ((-1,), ""),
    "typical_p": ((1,), ""),
    "verbose": ((False,), ""),
    "xtc_probability": ((0,), ""),
}
_GRAMMAR: Path = ("structured_outputs", "grammar")
_ALIASES: Mapping[str, Path] = {
    # llama.cpp
    "grammar": _GRAMMAR,
    "json_schema": ("structured_outputs", "json"),
    "return_tokens": ("return_token_ids",),
    # SGLang
    "ebnf": _GRAMMAR,
    "regex": ("structured_outputs", "regex"),
    # older vLLM
    "guided_choice": ("structured_outputs", "choice"),
    "guided_grammar": _GRAMMAR,
    "guided_json": ("structured_outputs", "json"),
    "guided_regex": ("structured_outputs", "regex"),
    "guided_whitespace_pattern": ("structured_outputs", "whitespace_pattern"),
}
_ELSEWHERE = {
    "input": "It belongs to /v1/responses.",
    "messages": "They belong to /v1/chat/completions.",
    "n_probs": "Send logprobs.",
    "prompt": "It belongs to /v1/completions.",
    "request_id": "Send the header x-request-id.",
    "sampling_params": "Send its members themselves.",
}


def aliases(names: Mapping[str, str], further: Mapping[str, Path] = {}) -> Mapping[str, Path]:
    """ALIASES of a generating route. names: its NAMES, parameters (server.types.PARAMETERS) among
    them."""
    own: dict[str, Path] = {}
    for one in PARAMETERS:
        path = (names.get(one.name, one.name),)
        own |= dict.fromkeys(one.aliases, path)
        if path != (one.name,):
            own[one.name] = path
    return {**_ALIASES, **own, **further}


def _in_schema(schema: dict[str, Any], model: type[BodyPart]) -> None:
    """Tell a body's JSON schema of neutral fields and aliases, and that `model` may be absent."""
    if "model" in schema.get("required", ()):
        schema["required"].remove("model")
    for name, (values, reason) in model.NEUTRAL.items():
        told = f"changes nothing: {reason}" if reason else "changes nothing"
        schema["properties"][name] = {"enum": list(values), "description": told}
    for name, path in model.ALIASES.items():
        if path[0] not in model.NEUTRAL:
            schema["properties"][name] = {"description": f"another name of {'.'.join(path)}"}


@parameters(lambda one: one.name != "max_tokens")
class GenerationBody(BodyPart):
    """What the generating routes share. None is "not given": the task's or the server's default.

    The parameters of server.types.PARAMETERS are fields of it, too; what bounds the output's length
    has another name in each route.
    """

    model_config = ConfigDict(json_schema_extra=_in_schema)
    NEUTRAL = _NEUTRAL
    ALIASES = aliases({})
    ELSEWHERE: ClassVar[Mapping[str, str]] = _ELSEWHERE

    model: ModelName | None = Field(None, description="default the server's first")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=1024)
    stop: Annotated[Any, _STOP] = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024
    )
    prediction: PredictionBody | None = None
    response_format: ResponseFormatBody | None = None

    # vLLM's.
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_IDS)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=1 << 18)
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-INT31, le=INT31)
    cache_salt: str | None = Field(None, max_length=256)
    structured_outputs: StructuredOutputsBody | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="of every prompt token; not with stream"
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='tokens of logprobs as "token_id:123"'
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None, max_length=256, description="words of one token each, which are never written"
    )
    logprob_token_ids: list[TokenId] | None = Field(
        None, max_length=128, description="told by logprobs in place of the likeliest"
    )

    # Ours.
    additional_properties: bool | None = Field(
        None,
        description="whether objects of a JSON schema that do not say may have members that it "
        "does not describe; default the task's, else false",
    )
    lenient_schemas: bool | None = Field(
        None,
        description="whether keywords of JSON schemas that cannot be held are left out; default "
        "the task's, else false: they are refused by name",
    )
    speculation: SpeculationBody | None = None
    vocabulary: VocabularyBody | None = None
    include_speculation: bool | None = None
    include_token_sources: bool | None = None
    include_rejected_drafts: bool | None = None
    context: ContextMarksBody | None = None

    # No-ops.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None

    if TYPE_CHECKING:  # the parameters are declared in server.types

        def __getattr__(self, name: str) -> Any: ...


# --- checking -------------------------------------------------------------------------------------

_B = TypeVar("_B", bound=BodyPart)


def validate(model: type[_B], body: dict[str, Any], num_bytes: int = 0) -> _B:
    """`body` as a `model`. Raises InvalidRequestError and its kin, naming the field."""
    spelled: dict[Path, str] = {}
    if not body.keys() <= model.model_fields.keys() or not body.keys().isdisjoint(model.NEUTRAL):
        body = _translated(model, body, spelled)
    try:
        made = model.model_validate(body)
    except ValidationError as error:
        # The first one is enough, and a list of 10^5 wrong items must not become a page of errors.
        first = error.errors(include_url=False, include_input=False)[0]
        raise _invalid(first, body, spelled) from None
    made._spelled, made._num_bytes = spelled, num_bytes
    return made


def _translated(
    model: type[BodyPart], body: dict[str, Any], spelled: dict[Path, str]
) -> dict[str, Any]:
    """The body in the model's own names, without neutral fields. spelled: gets the aliases."""
    ours: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        if name in model.NEUTRAL:
            _check_neutral(model, name, value)
        elif name in model.model_fields:
            ours[name] = value
        elif name not in model.ALIASES:
            unknown.append(name)
    if unknown:
        raise _unknown(model, unknown)
    for name, path in model.ALIASES.items():
        value = body.get(name)
        if value is None or name in model.model_fields:
            continue
        if path[0] in model.NEUTRAL:
            _check_neutral(model, path[0], value, name)
            continue
        inside = ours
        if path[:-1]:
            inside = ours.get(path[0], {})
            if not isinstance(inside, dict):
                continue  # what is wrong with it is told where it is checked
            inside = ours[path[0]] = dict(inside)
        before = inside.get(path[-1])
        if before is None:
            inside[path[-1]] = before = value
        if before is not value and (before != value or type(before) is not type(value)):
            other = spelled.get(path, ".".join(path))
            raise InvalidRequestError(
                f"this and {other} are two names of one field; give one.", at=name
            )
        spelled.setdefault(path, name)
    return ours


def _check_neutral(model: type[BodyPart], field: str, value: Any, name: str | None = None) -> None:
    values, reason = model.NEUTRAL[field]
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
        return
    told = reason or "this server has no such setting"
    if values:
        told += f"; only {' and '.join(map(json.dumps, values))} is taken, got {echoed(value)}"
    hint = model.ELSEWHERE.get(name or field, "")
    raise UnsupportedFieldError(f"{told}.{hint and ' '}{hint}", at=name or field)


def _unknown(model: type[BodyPart], names: list[str]) -> UnknownFieldError:
    shown = ", ".join(echoed(name, 40) for name in names[:_SHOWN_NAMES])
    if len(names) > _SHOWN_NAMES:
        shown += f" and {len(names) - _SHOWN_NAMES} more"
    near = nearest(names[0], [*model.model_fields, *model.ALIASES], 0.75)
    hint = model.ELSEWHERE.get(names[0], f"Did you mean {near}?" if near else "")
    return UnknownFieldError(
        f"Unknown field{'s' if len(names) > 1 else ''}: {shown}.{hint and ' '}{hint}",
        param=echoed(names[0], 64).strip("'"),
    )


def _respelled(path: tuple[Any, ...], spelled: Mapping[Path, str]) -> tuple[Any, ...]:
    """The path in the client's own names."""
    for i in range(len(path), 0, -1):
        if path[:i] in spelled:
            return (spelled[path[:i]], *path[i:])
    return path


def _joined(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


_PLAIN = {
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "too_short": "must have a length of at least {min_length}",
    "too_long": "may have at most {max_length} items",
}
"""Texts of pydantic's that name its own classes, in words."""


def _invalid(
    problem: ErrorDetails, body: Mapping[str, Any], spelled: Mapping[Path, str]
) -> InvalidRequestError:
    path: list[Any] = []
    value: Any = body
    for part in problem["loc"]:
        if str(part).startswith("=") and not (isinstance(value, dict) and part in value):
            continue  # a kind is no member
        path.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    param = ""
    for part in _respelled(tuple(path), spelled):
        if isinstance(part, int):
            param += f"[{part}]"
        else:
            known = part.isascii() and part.isidentifier() and len(part) <= 40
            param = _joined(param, part if known else echoed(part, 40))
    kind = problem["type"]
    message = problem["msg"]
    context = problem.get("ctx", {})
    if kind in _PLAIN:
        message = _PLAIN[kind].format(**context)
    if kind == "kind" and context["key"]:
        if isinstance(value, dict):
            param, value = _joined(param, context["key"]), value.get(context["key"])
        else:
            message = _PLAIN["dict_type"]
    if kind == "extra_forbidden":
        return UnknownFieldError(f"Unknown field: {param}.", param=param)
    if kind == "missing":
        return required(param)
    return InvalidRequestError(
        f"{message[:1].lower()}{message[1:]}; got {echoed(value)}.", at=param
    )


def required(at: str) -> InvalidRequestError:
    """The error of a field that is missing."""
    return InvalidRequestError(f"The field {at} is required.", param=at)


TEXT_PARTS: Mapping[str, str] = {"text": "text", "refusal": "refusal"}


def joined_texts(
    content: Any,
    at: str,
    separator: str,
    *,
    parts: Mapping[str, str] = TEXT_PARTS,
    ignored: frozenset[str] = frozenset({"cache_control", "prompt_cache_breakpoint"}),
) -> str:
    """The text of a string or of a list of text parts.

    at: path of the content in the body. parts: types of text parts, and the member with the text.
    ignored: further members that may hold anything; others may be null or empty. Raises
    InvalidRequestError, and UnsupportedFieldError for parts that are no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"must be a string or a list of text parts; got {echoed(content)}.", at=at
        )
    texts = []
    for i, part in enumerate(content):
        where = f"{at}[{i}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidRequestError(
                f"a part is an object with a type; got {echoed(part)}.", at=where
            )
        kind = part["type"]
        key = parts.get(kind)
        if key is None:
            raise UnsupportedFieldError(
                f"this model reads text only; a part of type {echoed(kind, 40)} cannot be used, "
                "and nothing is fetched.",
                at=where,
            )
        if not isinstance(part.get(key), str):
            raise InvalidRequestError(
                f"must be a string; got {echoed(part.get(key))}.", at=f"{where}.{key}"
            )
        refuse_members(part, {"type", key, *ignored}, where)
        texts.append(part[key])
    return separator.join(texts)


def refuse_members(item: Mapping[str, Any], known: Set[str], at: str) -> None:
    """Raise UnknownFieldError for a member that is none of `known` and says something."""
    for name, value in item.items():
        if name not in known and not says_nothing(value):
            path = f"{at}.{echoed(name, 40).strip(chr(39))}"
            raise UnknownFieldError(f"Unknown field: {path}.", param=path)


# --- reading a body ------------------------------------------------------------------------------


MAX_DEPTH = 64

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_CLOSE = (("connection", "close"),)
"""What is left of a body that may never end, or is too slow, is not waited for."""


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body of `request`, whose content type is JSON.

    Raises UnsupportedMediaTypeError, BodyTooLargeError, BodyTimeoutError, and
    starlette.requests.ClientDisconnect when the client leaves before the body is complete.
    """
    headers = request.headers
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaTypeError(
            f"Compressed bodies are not accepted (content-encoding {echoed(encoding, 40)})."
        )
    media, _, parameters = headers.get("content-type", "").partition(";")
    media = media.strip().lower()
    if media != "application/json" and not (
        media.startswith("application/") and media.endswith("+json")
    ):
        raise UnsupportedMediaTypeError(
            f"The content-type must be application/json, not {echoed(media, 60)}."
        )
    charset = re.search(r"charset\s*=\s*\"?([\w.-]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise UnsupportedMediaTypeError("The body must be UTF-8.")
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise _too_large(max_bytes, _CLOSE)
                body += part
    except TimeoutError:
        raise BodyTimeoutError(
            f"The body did not arrive within {timeout_s:g} seconds.", headers=_CLOSE
        ) from None
    return bytes(body)


def _too_large(max_bytes: int, headers: tuple[tuple[str, str], ...] = ()) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"The body is larger than the limit of {max_bytes} bytes.", headers=headers
    )


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
    try:
        value = (_JSON if len(body) < _LARGE_BYTES else _LARGE_JSON).decode(text)
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH < extent(value)[0]:
            raise RecursionError
    except json.JSONDecodeError as error:
        raise InvalidBodyError(
            f"The body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise InvalidBodyError(f"The body is nested more than {MAX_DEPTH} levels deep.") from None
    except ValueError:  # an integer of more than 4,300 digits
        raise InvalidBodyError("The body holds a number that is out of range.") from None
    if not isinstance(value, dict):
        raise InvalidBodyError("The body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidBodyError("The body holds a lone surrogate (\\ud800-\\udfff).") from None
    return value


def extent(value: Any, most: int = MAX_DEPTH + 1) -> tuple[int, int]:
    """(levels of objects and lists, values) of a value: itself and all within it, at most `most`
    levels deep, where it stops looking."""
    num_levels, num_values, level = 0, 1, [value]
    while num_levels < most and (level := [v for v in level if isinstance(v, (dict, list))]):
        level = [item for v in level for item in (v.values() if isinstance(v, dict) else v)]
        num_levels, num_values = num_levels + 1, num_values + len(level)
    return num_levels, num_values


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


_LARGE_BYTES = 1 << 20
_decoder = functools.partial(
    json.JSONDecoder,
    object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite,
)  # fmt: skip
# Between numbers that Python code reads, other threads run; `int` itself holds all up meanwhile.
_JSON, _LARGE_JSON = _decoder(), _decoder(parse_int=lambda text: int(text))
