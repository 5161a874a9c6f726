"""The HTTP bodies: their fields (pydantic, strict, nothing unknown).

Pydantic validates each body once. Answers are declared in server.api.responses. Every number has
bounds here; bounds that depend on the model, the task or the server's configuration are checked in
server.api.intake.

No-op fields, the complete list (NO_OP_FIELDS): they are accepted and change nothing. Any other
field is honoured or refused with a 400 that names it; null counts as absent everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from server.api.body_part import BodyPart, says_nothing
from server.api.peer_fields import advice, in_schema, without_neutral
from server.api.structured import ResponseFormatBody, StructuredOutputsBody
from server.config.drafter_sections import request_sections
from server.errors import (
    InvalidRequestError,
    UnknownFieldError,
    UnsupportedFieldError,
    echoed,
)

NO_OP_FIELDS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})

NEUTRAL: Mapping[str, tuple[bool | float, str]] = {
    "use_beam_search": (False, "nothing is searched, choices are drawn"),
    "length_penalty": (1.0, "it belongs to beam search"),
    "early_stopping": (False, "it belongs to beam search"),
    "spaces_between_special_tokens": (True, "text is made of the tokens' own bytes"),
    "detokenize": (True, "answers have text"),
}
"""Fields of vLLM's that are accepted only with the value that applies anyway, and why."""

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 256
MAX_ALLOWED_IDS = 1 << 18
MAX_LOGPROB_IDS = 128
MAX_EXAMPLES = 1_000_000
INT31 = (1 << 31) - 1
INT63 = (1 << 63) - 1


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        },
    ]
}
# Checked by hand in intake: a union of four shapes would report four errors for every item.
Prompt = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            "maxItems": MAX_STOPS,
        },
        {"type": "null"},
    ]
}
Stop = Annotated[Any, WithJsonSchema(_STOP_SCHEMA)]
_TEXT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        },
    ]
}
TokenId = Annotated[int, Field(ge=0, le=INT31)]
ModelName = Annotated[str, Field(min_length=1, max_length=512)]


class StreamOptions(BodyPart):
    """stream_options, of OpenAI and vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = Field(
        False, description="only false is honoured: chunks are never padded"
    )


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
    content: Annotated[Any, WithJsonSchema(_TEXT_SCHEMA)]


class GenerationBody(BodyPart):
    """What /v1/completions and /v1/chat/completions share. None is "not given": the task's or the
    server's default."""

    model_config = ConfigDict(json_schema_extra=in_schema)

    model: ModelName = Field(description="default the server's first")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIAS
    )
    seed: int | None = Field(None, ge=-INT63 - 1, le=INT63)
    user: str | None = None
    prediction: PredictionBody | None = None

    # vLLM's.
    top_k: int | None = Field(None, ge=-1, le=INT31, description="0 and -1 are off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    min_tokens: int | None = Field(None, ge=0, le=INT31)
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_IDS)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_IDS)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-INT31, le=INT31)
    cache_salt: str | None = Field(None, max_length=256)
    structured_outputs: StructuredOutputsBody | None = None
    response_format: ResponseFormatBody | None = None
    additional_properties: bool | None = Field(
        None,
        description="whether objects of a JSON schema that do not say may have members that it "
        "does not describe; default the task's, else false",
    )

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
        None, max_length=MAX_LOGPROB_IDS, description="told by logprobs in place of the likeliest"
    )

    # Accepted only with the value that applies anyway (see NEUTRAL).
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    spaces_between_special_tokens: Any = None
    detokenize: Any = None

    # Ours.
    speculation: SpeculationBody | None = None
    vocabulary: VocabularyBody | None = None
    include_speculation: bool | None = None
    include_token_sources: bool | None = None
    include_rejected_drafts: bool | None = None
    context: ContextMarksBody | None = None

    # No-ops of OpenAI's other routes that clients send everywhere.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, le=INT31)
    best_of: int | None = Field(None, ge=1, le=1024)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, le=INT31, description="keep so many tokens at the prompt's end; usage tells it"
    )


class ExampleBody(BodyPart):
    """One example of a corpus upload: texts, or ids as `tailor record` writes them."""

    prompt: str | None = None
    completion: str | None = None
    prompt_ids: list[TokenId] | None = Field(None, fail_fast=True)
    output_ids: list[TokenId] | None = Field(None, min_length=1, fail_fast=True)


class CorpusBody(BodyPart):
    """POST /v1/tasks/{task}/corpus."""

    examples: Annotated[list[ExampleBody], FailFast()] = Field(
        min_length=1, max_length=MAX_EXAMPLES
    )
    mode: Literal["append", "replace"] = Field(
        "append", description="with what was uploaded before, or instead of it"
    )


class LoadAdapterBody(BodyPart):
    """POST /v1/load_lora_adapter: vLLM's body, and what is Tailor's own."""

    lora_name: str = Field(max_length=256, description="what the `model` field will call it")
    lora_path: str = Field(min_length=1, max_length=4096, description="folder that PEFT saved")
    load_inplace: bool = Field(False, description="whether it may replace one of the same name")
    base_model_name: ModelName | None = Field(
        None, description="the model that it is beside; default the server's first"
    )
    pinned: bool = Field(False, description="whether it stays in memory")


class UnloadAdapterBody(BodyPart):
    """POST /v1/unload_lora_adapter: vLLM's body."""

    lora_name: str = Field(max_length=256)
    lora_int_id: int | None = Field(None, description="vLLM's number of it; not looked at")


class TokenizeBody(BodyPart):
    """POST /tokenize, vLLM's shape: a prompt, or a chat's messages and tools as their template
    writes them. Without a model: the server's first."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema({"type": "array"})] = None
    tools: Annotated[Any, WithJsonSchema({"type": "array"})] = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="of a prompt; default true")
    return_token_strs: bool | None = None


class DetokenizeBody(BodyPart):
    """POST /detokenize, vLLM's shape."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], FailFast()]


_TEXT_PARTS: Mapping[str, str] = {"text": "text", "refusal": "refusal"}


def joined_texts(
    content: Any,
    at: str,
    separator: str,
    *,
    parts: Mapping[str, str] = _TEXT_PARTS,
    ignored: frozenset[str] = frozenset({"cache_control"}),
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
            f"{at}: must be a string or a list of text parts; got {echoed(content)}.", param=at
        )
    texts = []
    for i, part in enumerate(content):
        where = f"{at}[{i}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidRequestError(
                f"{where}: a part is an object with a type; got {echoed(part)}.", param=where
            )
        kind = part["type"]
        key = parts.get(kind)
        if key is None:
            raise UnsupportedFieldError(
                f"{where}: this model reads text only; a part of type {echoed(kind, 40)} cannot be "
                "used, and nothing is fetched.",
                param=where,
            )
        if not isinstance(part.get(key), str):
            raise InvalidRequestError(
                f"{where}.{key}: must be a string; got {echoed(part.get(key))}.",
                param=f"{where}.{key}",
            )
        for name, value in part.items():
            if name not in ("type", key, *ignored) and not says_nothing(value):
                path = f"{where}.{echoed(name, 40).strip(chr(39))}"
                raise UnknownFieldError(f"Unknown field: {path}.", param=path)
        texts.append(part[key])
    return separator.join(texts)


def refuse_unless_neutral(body: BodyPart, neutral: Mapping[str, tuple[bool | float, str]]) -> None:
    """Raise UnsupportedFieldError for a field of `neutral` that asks for something else."""
    for name, (value, reason) in neutral.items():
        given = getattr(body, name)
        if given is None or (given == value and isinstance(given, bool) == isinstance(value, bool)):
            continue
        raise UnsupportedFieldError(
            f"{name}: {reason}; only {json.dumps(value)} is taken, got {echoed(given)}.", param=name
        )


_B = TypeVar("_B", bound=BaseModel)


def validate(model: type[_B], body: dict[str, Any], at: str = "") -> _B:
    """`body` as a `model`. Raises UnknownFieldError or InvalidRequestError naming the field.

    at: where the object lies in the body ("questions[3]"), for the error's param.
    """
    if issubclass(model, GenerationBody):
        body = without_neutral(body, model.model_fields)
    unknown = [key for key in body if key not in model.model_fields and body[key] is not None]
    if unknown:
        names = ", ".join(echoed(key, 40) for key in unknown[:3])
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        told = advice(unknown[0], model.model_fields)
        raise UnknownFieldError(
            f"Unknown field{'s' if len(unknown) > 1 else ''}: {names}{more}.{told}",
            param=(f"{at}." if at else "") + echoed(unknown[0], 64).strip("'"),
        )
    try:
        return model.model_validate(body)
    except ValidationError as error:
        # The first one is enough, and a list of 10^5 wrong items must not become a page of errors.
        raise _invalid(error.errors(include_url=False, include_input=False)[0], body, at) from None


_PLAIN = {
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "too_short": "must have a length of at least {min_length}",
    "too_long": "may have at most {max_length} items",
}
"""Texts of pydantic's that name its own classes, in words."""


def _invalid(problem: ErrorDetails, body: Mapping[str, Any], at: str) -> Exception:
    param = at
    value: Any = body
    for part in problem["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        else:
            known = part.isascii() and part.isidentifier() and len(part) <= 40
            name = part if known else echoed(part, 40)
            param += f".{name}" if param else name
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    kind = problem["type"]
    message = problem["msg"]
    if kind in _PLAIN:
        message = _PLAIN[kind].format(**problem.get("ctx", {}))
    if kind == "extra_forbidden":
        return UnknownFieldError(f"Unknown field: {param}.", param=param)
    if kind == "missing":
        return InvalidRequestError(f"The field {param} is required.", param=param)
    message = message[:1].lower() + message[1:]
    return InvalidRequestError(f"{param}: {message}; got {echoed(value)}.", param=param)
