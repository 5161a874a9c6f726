"""The body of POST /v1/decisions: OpenAI's Decisions API, as openai-python 3.52 types it.

Pictures are refused by name, and so is anything unknown. `prompt_cache_key`,
`prompt_cache_options`, `prompt_cache_breakpoint` and `safety_identifier` change nothing here: the
prefix cache works by itself. Ids, statuses and phases of the input's items are not shown to the
model; call ids only have to match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from server.api.body_part import BodyPart
from server.api.openapi import schema_of
from server.api.protocol import ModelName, validate
from server.errors import InvalidRequestError, LimitExceededError, UnsupportedFieldError, echoed

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10
MAX_ITEMS = 4096
MAX_LABEL_CHARS = 4096
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 10_000
MAX_JSON_BYTES = 256 * 1024


Name = Annotated[str, Field(max_length=512)]
Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
Description = Annotated[str, Field(max_length=65_536)]
Status = Literal["in_progress", "completed", "incomplete"]


_DATA_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}


class CacheBreakpoint(BodyPart):
    """A mark of the prompt cache; changes nothing here."""

    mode: Literal["explicit"]


class InputText(BodyPart):
    """A text."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputJson(BodyPart):
    """A JSON object, or a list of them, shown as compact JSON."""

    type: Literal["input_json"]
    data: Annotated[Any, WithJsonSchema(_DATA_SCHEMA)]


class OutputText(BodyPart):
    """A text that an assistant wrote."""

    type: Literal["output_text"]
    text: str


class Refusal(BodyPart):
    """A refusal that an assistant wrote."""

    type: Literal["refusal"]
    refusal: str


Part = InputText | InputJson | OutputText | Refusal
_PARTS: dict[str, type[BaseModel]] = {
    "input_text": InputText,
    "input_json": InputJson,
    "output_text": OutputText,
    "refusal": Refusal,
}


def _parts_schema(*kinds: type[BaseModel]) -> dict[str, Any]:
    return {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"anyOf": [schema_of(kind) for kind in kinds]}},
        ]
    }


# Parts are looked at one by one (parts_of): a union would report an error for every member.
InputContent = Annotated[Any, WithJsonSchema(_parts_schema(InputText, InputJson))]
TextContent = Annotated[Any, WithJsonSchema(_parts_schema(InputText))]
OutputContent = Annotated[Any, WithJsonSchema(_parts_schema(OutputText, Refusal))]


class UserMessage(BodyPart):
    """A user's message."""

    role: Literal["user"]
    content: InputContent
    type: Literal["message"] = "message"


class InstructionMessage(BodyPart):
    """A message of a developer or the system."""

    role: Literal["developer", "system"]
    content: TextContent
    type: Literal["message"] = "message"


class AssistantMessage(BodyPart):
    """An assistant's message."""

    role: Literal["assistant"]
    content: OutputContent
    phase: Literal["commentary", "final_answer"] | None = None
    type: Literal["message"] = "message"


class FunctionCall(BodyPart):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    namespace: str | None = None
    status: Status | None = None


class CustomToolCall(BodyPart):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    namespace: str | None = None
    status: Status | None = None


class CallOutput(BodyPart):
    """The result of a call; call_id names a call before it."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextContent
    id: str | None = None
    status: Status | None = None


Item = (
    UserMessage | InstructionMessage | AssistantMessage | FunctionCall | CustomToolCall | CallOutput
)
_ROLES: dict[str, type[BaseModel]] = {
    "user": UserMessage,
    "developer": InstructionMessage,
    "system": InstructionMessage,
    "assistant": AssistantMessage,
}
_CALLS: dict[str, type[BaseModel]] = {
    "function_call": FunctionCall,
    "custom_tool_call": CustomToolCall,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
}


class PredicateQuestion(BodyPart):
    """How likely is it that a statement about the input is true?"""

    type: Literal["predicate"]
    instructions: InputContent
    name: Name | None = None


_VALUE_SCHEMA = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "boolean"}]}


class ChoiceOption(BodyPart):
    """One option of a choice."""

    value: Annotated[Any, WithJsonSchema(_VALUE_SCHEMA)]
    description: Description | None = None


class ChoiceQuestion(BodyPart):
    """Which of the options fits the input?"""

    type: Literal["choice"]
    instructions: InputContent
    choices: list[ChoiceOption] = Field(min_length=2, max_length=MAX_CHOICES)
    name: Name | None = None


class ScoreLevel(BodyPart):
    """One level of a score."""

    label: Label
    description: Description | None = None


class ScoreQuestion(BodyPart):
    """Which of the ordered levels, lowest first, fits the input?"""

    type: Literal["score"]
    instructions: InputContent
    levels: list[ScoreLevel] = Field(min_length=2, max_length=MAX_LEVELS)
    name: Name | None = None


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion
_QUESTIONS: dict[str, type[BaseModel]] = {
    "predicate": PredicateQuestion,
    "choice": ChoiceQuestion,
    "score": ScoreQuestion,
}

_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    schema_of(kind)
                    for kind in (*_ROLES.values(), FunctionCall, CustomToolCall, CallOutput)
                ]
            },
        },
    ]
}
_QUESTIONS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_QUESTIONS,
    "items": {"anyOf": [schema_of(kind) for kind in _QUESTIONS.values()]},
}


class CacheOptions(BodyPart):
    """Options of the prompt cache; change nothing here."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class DecisionBody(BodyPart):
    """POST /v1/decisions."""

    model: ModelName
    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]
    questions: Annotated[Any, WithJsonSchema(_QUESTIONS_SCHEMA)]
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: str | None = None


def one_of(kinds: dict[str, type[BaseModel]], key: str, value: Any, at: str) -> Any:
    """`value` as the model that its member `key` names."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{at}: must be an object; got {echoed(value)}.", param=at)
    kind = value.get(key)
    if not isinstance(kind, str) or kind not in kinds:
        if kind in ("input_image", "input_audio", "input_file"):
            raise UnsupportedFieldError(
                f"{at}: {kind} is not supported; only text and JSON are read.", param=at
            )
        raise InvalidRequestError(
            f"{at}.{key}: must be one of {', '.join(kinds)}; got {echoed(kind)}.",
            param=f"{at}.{key}",
        )
    return validate(kinds[kind], value, at)


def questions_of(questions: Any) -> list[Question]:
    """The questions of a body, checked. Raises InvalidRequestError and its kin."""
    if not isinstance(questions, list) or not questions:
        raise InvalidRequestError(
            f"questions: must be a list of questions; got {echoed(questions)}.", param="questions"
        )
    if len(questions) > MAX_QUESTIONS:
        raise LimitExceededError(
            f"questions: at most {MAX_QUESTIONS}; got {len(questions)}.", param="questions"
        )
    checked: list[Question] = []
    for i, value in enumerate(questions):
        at = f"questions[{i}]"
        question: Question = one_of(_QUESTIONS, "type", value, at)
        if isinstance(question, ChoiceQuestion):
            for k, option in enumerate(question.choices):
                if not isinstance(option.value, bool) and not (
                    isinstance(option.value, str) and 0 < len(option.value) <= MAX_LABEL_CHARS
                ):
                    raise InvalidRequestError(
                        f"{at}.choices[{k}].value: must be a boolean or a text of 1 to "
                        f"{MAX_LABEL_CHARS} characters; got {echoed(option.value)}.",
                        param=f"{at}.choices[{k}].value",
                    )
            values = {(type(option.value), option.value) for option in question.choices}
            if len(values) < len(question.choices):
                raise InvalidRequestError(
                    f"{at}.choices: every value must be there once.", param=f"{at}.choices"
                )
        checked.append(question)
    return checked


def items_of(items: Any) -> list[Item] | str:
    """The input of a body, checked: a text, or its items. Raises InvalidRequestError."""
    if isinstance(items, str) and items:
        return items
    if not isinstance(items, list) or not items:
        raise InvalidRequestError(
            f"input: must be a text or a list of items, not empty; got {echoed(items)}.",
            param="input",
        )
    if len(items) > MAX_ITEMS:
        raise LimitExceededError(
            f"input: at most {MAX_ITEMS} items; got {len(items)}.", param="input"
        )
    checked: list[Item] = []
    calls: set[str] = set()
    for i, value in enumerate(items):
        at = f"input[{i}]"
        kind = value.get("type") if isinstance(value, dict) else None
        is_call = isinstance(kind, str) and kind in _CALLS
        item: Item = one_of(_CALLS if is_call else _ROLES, "type" if is_call else "role", value, at)
        if isinstance(item, (FunctionCall, CustomToolCall)):
            calls.add(item.call_id)
        elif isinstance(item, CallOutput) and item.call_id not in calls:
            raise InvalidRequestError(
                f"{at}.call_id: no call before it has this id.", param=f"{at}.call_id"
            )
        checked.append(item)
    return checked


def parts_of(content: Any, allowed: Sequence[str], at: str) -> list[Part] | str:
    """A content field: a text, or parts of the allowed types. Raises InvalidRequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(
            f"{at}: must be a text or a list of parts; got {echoed(content)}.", param=at
        )
    if len(content) > MAX_ITEMS:
        raise LimitExceededError(f"{at}: at most {MAX_ITEMS} parts.", param=at)
    kinds = {name: _PARTS[name] for name in allowed}
    return [one_of(kinds, "type", part, f"{at}[{i}]") for i, part in enumerate(content)]
