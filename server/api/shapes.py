"""The answers that generate, and what all answers share: declared once, for the encoder, the type
check and /openapi.json.

A member whose default is UNSET may be absent; any other is always there. server.api.route_context
encodes them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from server.errors import TailorError

Count = Annotated[int, Meta(ge=0)]
Chance = Annotated[float, Meta(ge=0, le=1)]
FinishReason = Literal["stop", "length", "content_filter", "tool_calls", "function_call"]


class Shape(Struct, forbid_unknown_fields=True, gc=False):
    """Base of all answers: named members and no others."""


# --- errors ---


class ErrorDetail(Shape, kw_only=True):
    """What went wrong, and the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape, kw_only=True):
    """OpenAI's shape of an error."""

    error: ErrorDetail


def error_answer(error: TailorError) -> ErrorAnswer:
    """The answer of an error."""
    detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    return ErrorAnswer(error=detail)


# --- what generation tells of itself ---


class PromptDetails(Shape, kw_only=True):
    """Details of the prompts. truncated_tokens: cut off by truncate_prompt_tokens, if any were."""

    cached_tokens: Count
    audio_tokens: Count = 0
    truncated_tokens: Count | UnsetType = UNSET


class CompletionDetails(Shape, kw_only=True):
    """Details of the completion. base_tokens: ids of the base tokenizer that it stands for, where
    the model has tokens of its own; in a stream once all that was generated was sent."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count
    reasoning_tokens: Count = 0
    audio_tokens: Count = 0
    base_tokens: Count | UnsetType = UNSET


class Usage(Shape, kw_only=True):
    """Prompts count once, all choices (best_of too) count."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SourceSums(Shape, kw_only=True):
    drafted_tokens: Count
    accepted_tokens: Count


class VocabularyUse(Shape, kw_only=True):
    """What LM-head slices did.

    slice_size: ids of the largest slice. steps_from_slice, steps_from_full_head: decode steps by
    what they were drawn from; head_rows: head rows computed, verification included. loaded_rows:
    rows copied for these requests. misses: proposed tokens that the full head replaced (`exact`);
    dropped_tokens: tokens taken back with them, never sent. verify_every: unverified
    tokens before a verification, now. windows: verifications.
    """

    mode: str
    slice_size: Count
    loaded_rows: Count
    steps_from_slice: Count
    steps_from_full_head: Count
    head_rows: Count
    verify_every: Count | UnsetType = UNSET
    windows: Count | UnsetType = UNSET
    verified_tokens: Count | UnsetType = UNSET
    misses: Count | UnsetType = UNSET
    dropped_tokens: Count | UnsetType = UNSET
    verify_seconds: float | UnsetType = UNSET


class Speculation(Shape, kw_only=True):
    """Sums over all prompts and choices (include_speculation).

    mean_tokens_per_step counts every decode step, drafted or not, and the step that ends the prompt
    with the token it makes; it is null when no step was made. decode_tokens_per_step leaves that
    step and its first token out; null when no step came after it. `vocabulary` is there unless the
    mode is "full".
    """

    drafter: str
    steps: Count
    drafts: Count
    drafted_tokens: Count
    accepted_tokens: Count
    mean_tokens_per_step: float | None
    decode_tokens_per_step: float | None
    accepted_by_depth: list[Count]
    offered_by_depth: list[Count]
    by_source: dict[str, SourceSums]
    vocabulary: VocabularyUse | UnsetType = UNSET


class SourceRun(Shape, kw_only=True):
    """Neighbouring tokens of one source.

    source: the drafter's source whose drafts were accepted, null for tokens that the model drew
    without one. tokens: how many (one that ends the choice counts, its text may be empty). text:
    theirs; a character or a possible stop string that spans runs is in the last one.
    """

    source: str | None
    tokens: Count
    text: str


class RejectedDraft(Shape, kw_only=True):
    """One path of a draft tree from where it left the output to its end.

    token: index in the choice's tokens of the one that stands in its place. offset: characters of
    the choice's text (without an echoed prompt) before that token. source: the drafter's, of the
    path's first token. tokens: how many. text: theirs.
    """

    token: Count
    offset: Count
    source: str
    tokens: Count
    text: str


class Extras(Shape, kw_only=True):
    """Members of a choice beside OpenAI's."""

    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[Count, ...] | UnsetType | None = UNSET
    prompt_token_ids: tuple[Count, ...] | UnsetType | None = UNSET
    token_sources: list[SourceRun] | UnsetType = UNSET
    rejected_drafts: list[RejectedDraft] | UnsetType = UNSET


class PromptTokenLogprob(Shape, kw_only=True):
    """rank: counts from 1."""

    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""By token id, the prompt's own and the likeliest; null for the first token."""


class Chunk(Shape, kw_only=True):
    """What is around the choices of a streamed chunk. usage: present with include_usage; null but
    in the last chunk, or in no chunk (continuous_usage_stats)."""

    id: str
    object: str
    created: Count
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None
    speculation: Speculation | UnsetType = UNSET


class GenerationAnswer(Chunk, kw_only=True):
    """What is around the choices of a whole answer."""

    usage: Usage


# --- tasks ---


class CorpusSize(Shape, kw_only=True):
    """The size of a task's corpus. uploaded: by an operator; else the task file's own."""

    documents: Count
    tokens: Count
    bytes: Count
    uploaded: bool


# --- usage of the routes whose input is no prompt ---


class InputDetails(Shape, kw_only=True):
    cached_tokens: Count
    cache_write_tokens: Count = 0


class OutputDetails(Shape, kw_only=True):
    """base_tokens: see CompletionDetails."""

    reasoning_tokens: Count = 0
    base_tokens: Count | UnsetType = UNSET


class TokenUsage(Shape, kw_only=True):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count
