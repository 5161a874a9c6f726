"""The body of POST /v1/responses. Nothing is stored, so references to stored things are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from server.api.body_part import BodyPart
from server.api.chat_protocol import FUNCTION_NAME, MAX_TOOLS
from server.api.protocol import INT31, INT63, ModelName, SpeculationBody

_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}
_NAME = r"^[A-Za-z0-9_-]{1,64}$"


class FormatBody(BodyPart):
    """text.format. Name and strict change nothing: a schema always holds."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=_NAME)
    description: str | None = Field(None, max_length=1 << 16)
    schema_value: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextBody(BodyPart):
    """text."""

    format: FormatBody | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionToolBody(BodyPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ReasoningBody(BodyPart):
    """reasoning. There are no summaries; auto is accepted and gives none."""

    effort: str | None = Field(None, max_length=64)
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(BodyPart):
    """stream_options; chunks are never padded."""

    include_obfuscation: bool | None = None


class ResponsesBody(BodyPart):
    """POST /v1/responses."""

    model_config = ConfigDict(json_schema_extra=lambda schema: schema["required"].remove("model"))

    model: ModelName = Field(description="default the server's first")
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: list[FunctionToolBody] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    # Ours and vLLM's.
    seed: int | None = Field(None, ge=-INT63 - 1, le=INT63)
    top_k: int | None = Field(None, ge=-1, le=INT31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    cache_salt: str | None = Field(None, max_length=256)
    priority: int | None = Field(None, ge=-INT31, le=INT31)
    speculation: SpeculationBody | None = None
    additional_properties: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)

    # No-ops.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Accepted only with the value that applies anyway (see intake).
    store: Any = None
    background: Any = None
    include: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    top_logprobs: Any = None
    truncation: Any = None
