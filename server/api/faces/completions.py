"""POST /v1/completions: prompts in, text out, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal

from msgspec import field
from pydantic import FailFast, Field

from server.api.answer import (
    LOWEST_LOGPROB,
    CharCounter,
    Choice,
    ChunkWriter,
    Piece,
    add_extras,
    around,
    choices_of,
    joined,
    shown_prompt_logprobs,
    sums_of,
)
from server.api.bodies import GenerationBody, Neutral, TokenId, one_of
from server.api.engines.submission import Submission
from server.api.grammars import format_of
from server.api.order import Generation, Order, Target
from server.api.route_context import StreamWriter, TextFace
from server.api.shapes import (
    Chunk,
    Count,
    ErrorAnswer,
    Extras,
    FinishReason,
    GenerationAnswer,
    PromptLogprobs,
    Shape,
)
from server.types import INT31, Delta, TokenLogprob

_Ids = Annotated[list[TokenId], FailFast(), Field(min_length=1)]
_MANY = Field(max_length=65536)  # what limits.max_prompts may be


def _kind_of_prompt(prompt: Any) -> str | None:
    if isinstance(prompt, list) and prompt:
        kinds = ((str, "=texts"), (int, "=ids"), (list, "=lists of ids"))
        return next((name for kind, name in kinds if isinstance(prompt[0], kind)), None)
    return "=text" if isinstance(prompt, str) else None


_PROMPT = one_of(
    {
        "=text": str,
        "=texts": Annotated[list[str], FailFast(), _MANY],
        "=ids": _Ids,
        "=lists of ids": Annotated[list[_Ids], FailFast(), _MANY],
    },
    "must be a string, a list of strings, a list of token ids or a list of lists of token ids",
    _kind_of_prompt,
)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    NEUTRAL: ClassVar[Mapping[str, Neutral]] = {
        **GenerationBody.NEUTRAL,
        "enable_thinking": ((False,), "there is no chat template"),
        "suffix": (("",), "this model has no infill; only prompts are continued"),
        "think": ((False,), "there is no chat template"),
    }
    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **GenerationBody.ELSEWHERE,
        "content": "Send prompt.",
        "text": "Send prompt.",
    }

    prompt: Annotated[Any, _PROMPT]
    max_tokens: int | None = Field(None, ge=0, le=INT31, description="default the task's, else 16")
    best_of: int | None = Field(None, ge=1, le=1024)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, le=INT31, description="keep so many tokens at the prompt's end; usage tells it"
    )


class Logprobs(Shape, kw_only=True):
    """One entry of each list per token; null where a token has none (a prompt's first)."""

    text_offset: list[Count] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)


class CompletionChoice(Extras, kw_only=True):
    """With vLLM's members, which are null where they were not asked for."""

    text: str
    index: Count
    logprobs: Logprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: tuple[Count, ...] | None = None
    prompt_token_ids: tuple[Count, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(GenerationAnswer, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class CompletionChunkChoice(Extras, kw_only=True):
    text: str
    index: Count
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionChunk(Chunk, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]


class Completions(TextFace[CompletionBody]):
    """The route."""

    path = "/v1/completions"
    summary = "A text completion"
    body = CompletionBody
    answer = CompletionAnswer
    chunks = (CompletionChunk, ErrorAnswer)
    id_prefix = "cmpl-"

    async def generation(self, body: CompletionBody, target: Target) -> Generation:
        is_list = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
        return Generation(
            body=body,
            prompts=body.prompt if is_list else [body.prompt],
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            form=format_of(body.response_format),
            best_of=body.best_of,
            echo=bool(body.echo),
            adds_special_tokens=body.add_special_tokens is not False,
            truncate_to=body.truncate_prompt_tokens,
        )

    async def whole(self, order: Order, submission: Submission) -> CompletionAnswer:
        deltas = await submission.rest()
        shown: list[CompletionChoice] = []
        for i, of_prompt in enumerate(choices_of(order)):
            ended = [(choice, joined(deltas[i, k])) for k, choice in enumerate(of_prompt)]
            if len(ended) > order.num_choices:
                ended.sort(key=lambda one: (-_mean_logprob(one[1]), one[0].index))
            prompt_logprobs = next((d.prompt_logprobs for _, d in ended if d.prompt_logprobs), ())
            for choice, delta in ended[: order.num_choices]:
                writer = _ChoiceWriter(order, choice)
                answer, _ = writer.write(CompletionChoice, delta, prompt_logprobs)
                answer.index = len(shown)
                answer.prompt_logprobs = shown_prompt_logprobs(order, prompt_logprobs)
                shown.append(answer)
        sums = sums_of(order, submission)
        return CompletionAnswer(choices=shown, **around(order), **sums)

    def writer(self, order: Order, submission: Submission) -> StreamWriter:
        return _Chunks(order, submission)


def _mean_logprob(delta: Delta) -> float:
    """The figure that best_of ranks by."""
    if not delta.token_ids:
        return float("-inf")
    return sum(entry.logprob for entry in delta.logprobs) / len(delta.token_ids)


class _ChoiceWriter:
    """One choice as it is told, with the prompt before its text where it is repeated."""

    def __init__(self, order: Order, choice: Choice) -> None:
        self._order = order
        self._choice = choice
        self._has_begun = False
        self._skip_special = choice.request.sampling.skip_special_tokens
        self._pieces, self._echo = self._prompt()
        self._counter = CharCounter(len(self._echo))

    def _prompt(self) -> tuple[list[bytes], str]:
        """Of a prompt that is repeated: the bytes of each id, and the text as the client gave it,
        or as the ids read."""
        generation = self._order.generation
        if not generation.echo:
            return [], ""
        ids = self._choice.request.prompt_ids
        pieces = self._order.table.prompt_bytes(ids, skip_special=self._skip_special)
        given = generation.prompts[self._choice.prompt_id]
        if isinstance(given, str) and generation.truncate_to is None:
            return pieces, given
        return pieces, b"".join(pieces).decode(errors="replace")

    def write(
        self, kind: Any, delta: Delta, prompt_logprobs: Sequence[TokenLogprob | None]
    ) -> tuple[Any, Piece]:
        """What a Delta adds, as a `kind` of choice. prompt_logprobs: of an echoed prompt."""
        choice, order = self._choice, self._order
        piece = choice.take(delta)
        text = "".join([event for event in piece.events if isinstance(event, str)])
        logprobs = None if order.generation.logprobs is None else Logprobs()
        if not self._has_begun:
            text = self._echo + text
            if logprobs is not None and order.generation.echo:
                self._add_prompt(logprobs, prompt_logprobs)
        if logprobs is not None:
            for entry in piece.logprobs:
                data = order.table.join((entry.token_id,), skip_special=self._skip_special)
                self._add(logprobs, self._counter.push(data), entry.token_id, entry)
        shown = kind(text=text, index=choice.index, logprobs=logprobs, finish_reason=None)
        if delta.finish_reason is not None:
            shown.finish_reason = choice.end(shown)
        add_extras(order, shown, piece)
        if order.body.return_token_ids and not self._has_begun:
            shown.prompt_token_ids = choice.request.prompt_ids
        self._has_begun = True
        return shown, piece

    def _add_prompt(self, logprobs: Logprobs, entries: Sequence[TokenLogprob | None]) -> None:
        counter, num_top = CharCounter(), self._order.generation.logprobs
        ids = self._choice.request.prompt_ids
        for piece, token_id, entry in zip_longest(self._pieces, ids, entries):
            shown = None if entry is None else replace(entry, top=entry.top[:num_top])
            self._add(logprobs, counter.push(piece), token_id, shown)

    def _add(
        self, logprobs: Logprobs, offset: int, token_id: int, entry: TokenLogprob | None
    ) -> None:
        names = self._order.token_names
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(names[token_id])
        if entry is None:
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
            return
        top: dict[str, float] = {}
        for other_id, value in (*entry.top, (token_id, entry.logprob)):
            top.setdefault(names[other_id], max(value, LOWEST_LOGPROB))
        logprobs.token_logprobs.append(max(entry.logprob, LOWEST_LOGPROB))
        logprobs.top_logprobs.append(top)


class _Chunks(ChunkWriter[CompletionChunk]):
    """A chunk of a Delta. The chunks of a choice come in order; its last one has the finish_reason.
    With include_usage every chunk has `usage` (null unless continuous_usage_stats), and one more
    without choices has the sums. The `speculation` object is in the last chunk."""

    def __init__(self, order: Order, submission: Submission) -> None:
        super().__init__(order, submission, CompletionChunk)
        self._writers = [
            [_ChoiceWriter(order, choice) for choice in of_prompt] for of_prompt in self.choices
        ]

    def chunks(self, i: int, delta: Delta) -> bytes:
        writer = self._writers[i][delta.choice_id]
        shown, piece = writer.write(CompletionChunkChoice, delta, self.prompt_logprobs.get(i, ()))
        self.num_sent += len(delta.token_ids)
        says = shown.text or shown.finish_reason or (shown.logprobs and shown.logprobs.tokens)
        has_ids = self.order.body.return_token_ids and piece.token_ids
        if not (says or has_ids or piece.sources or piece.rejected):
            return b""
        return self.chunk(shown)
