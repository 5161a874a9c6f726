"""From Deltas to completions: the choices of one response, whole or in chunks, in OpenAI's
shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace

from msgspec import UNSET

from server.api.chunks import CompletionChunk, CompletionChunkChoice
from server.api.engines.submission import Submission
from server.api.intake import CompletionOrder
from server.api.intake_prompts import PromptText
from server.api.responses import (
    CompletionAnswer,
    CompletionChoice,
    Logprobs,
    RejectedDraft,
    SourceRun,
)
from server.api.sources import RejectedDrafts, join_runs, text_by_source
from server.api.streaming import (
    LOWEST_LOGPROB,
    ChunkFrame,
    shown_finish,
    shown_prompt_logprobs,
    shown_stop_reason,
    stream_events,
)
from server.api.text import CharCounter, TextStream, TokenIdNames, TokenNames
from server.api.usage import speculation_report, usage_report
from server.types import Delta, Request, TokenLogprob


@dataclass(slots=True)
class _Piece:
    """What one Delta adds to a choice's answer."""

    text: str
    logprobs: Logprobs | None
    token_ids: tuple[int, ...]
    sources: list[SourceRun]
    rejected: list[RejectedDraft]


class _Choice:
    """One choice: its text, logprobs and ids as they grow. Written by `take` alone."""

    def __init__(
        self, order: CompletionOrder, request: Request, prompt: PromptText, index: int
    ) -> None:
        sampling = request.sampling
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | bytes | None = None
        self.sum_logprob = 0.0
        self.num_tokens = 0
        self.request = request
        self._prompt = prompt
        self._skip_special = sampling.skip_special_tokens
        self._logprobs = order.logprobs
        self._names = order.token_names
        self._table = order.model.table
        self._echo = order.echo
        self._rejected = (
            RejectedDrafts(order.model.table, skip_special=sampling.skip_special_tokens)
            if order.include_rejected_drafts
            else None
        )
        self._started = False
        self._counter = CharCounter(len(prompt.text))
        self._stream = TextStream(
            order.model.table,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special=sampling.skip_special_tokens,
        )

    def take(self, delta: Delta, prompt_logprobs: tuple[TokenLogprob | None, ...]) -> _Piece:
        """Add one Delta. prompt_logprobs: those of the prompt (echo with logprobs)."""
        text = ""
        logprobs: Logprobs | None = None
        if self._logprobs is not None:
            logprobs = Logprobs()
        if not self._started:
            self._started = True
            if self._echo:
                text = self._prompt.text
                if logprobs is not None:
                    self._echo_logprobs(logprobs, prompt_logprobs)
        new_text, sources = text_by_source(self._stream, delta, self.request.report_sources)
        text += new_text
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        for entry in delta.logprobs:
            self.sum_logprob += entry.logprob
            if logprobs is not None:
                data = self._table.join((entry.token_id,), skip_special=self._skip_special)
                _add_logprob(logprobs, self._counter.push(data), entry, self._names)
        self.num_tokens += len(delta.token_ids)
        rejected = [] if self._rejected is None else self._rejected.take(delta)
        return _Piece(text, logprobs, delta.token_ids, sources, rejected)

    def _echo_logprobs(self, logprobs: Logprobs, entries: tuple[TokenLogprob | None, ...]) -> None:
        counter = CharCounter()
        for i, piece in enumerate(self._prompt.pieces):
            offset = counter.push(piece)
            entry = entries[i] if i < len(entries) else None
            if entry is not None:
                entry = replace(entry, top=entry.top[: self._logprobs])
                _add_logprob(logprobs, offset, entry, self._names)
            else:
                logprobs.text_offset.append(offset)
                logprobs.tokens.append(self._names[self.request.prompt_ids[i]])
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)

    @property
    def mean_logprob(self) -> float:
        """The figure that best_of ranks by."""
        return self.sum_logprob / self.num_tokens if self.num_tokens else float("-inf")


def _add_logprob(
    logprobs: Logprobs, offset: int, entry: TokenLogprob, names: TokenNames | TokenIdNames
) -> None:
    name, logprob = names[entry.token_id], max(entry.logprob, LOWEST_LOGPROB)
    top: dict[str, float] = {}
    for token_id, value in entry.top:
        top.setdefault(names[token_id], max(value, LOWEST_LOGPROB))
    top.setdefault(name, logprob)
    logprobs.text_offset.append(offset)
    logprobs.tokens.append(name)
    logprobs.token_logprobs.append(logprob)
    logprobs.top_logprobs.append(top)


class _Choices:
    """The choices of all prompts of an order, and the prompts' logprobs once they arrived."""

    def __init__(self, order: CompletionOrder) -> None:
        self._prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}
        self.of: list[list[_Choice]] = [
            [
                _Choice(order, request, prompt, i * request.num_choices + k)
                for k in range(request.num_choices)
            ]
            for i, (request, prompt) in enumerate(zip(order.requests, order.prompts, strict=True))
        ]

    def prompt_logprobs_of(self, i: int) -> tuple[TokenLogprob | None, ...]:
        """Those of the i-th prompt."""
        return self._prompt_logprobs.get(i, ())

    def take(self, arrived: list[tuple[int, Delta]]) -> Iterable[tuple[_Choice, Delta, _Piece]]:
        for i, delta in arrived:
            if delta.prompt_logprobs and i not in self._prompt_logprobs:
                self._prompt_logprobs[i] = delta.prompt_logprobs
        for i, delta in arrived:
            choice = self.of[i][delta.choice_id]
            yield choice, delta, choice.take(delta, self._prompt_logprobs.get(i, ()))


async def completion_object(order: CompletionOrder, submission: Submission) -> CompletionAnswer:
    """The whole response, once every choice ended. Raises the TailorError that ended it early."""
    choices = _Choices(order)
    pieces: dict[int, list[_Piece]] = {}
    async for arrived in submission:
        for choice, _, piece in choices.take(arrived):
            pieces.setdefault(choice.index, []).append(piece)
    shown = []
    for i, of_prompt in enumerate(choices.of):
        best = of_prompt
        if len(of_prompt) > order.num_choices:
            best = sorted(of_prompt, key=lambda c: (-c.mean_logprob, c.index))[: order.num_choices]
        for k, choice in enumerate(best):
            own = pieces.get(choice.index, [])
            shown.append(_shown(order, choice, own, i * order.num_choices + k))
            if order.prompt_logprobs is not None:
                shown[-1].prompt_logprobs = shown_prompt_logprobs(
                    choices.prompt_logprobs_of(i), order.prompt_logprobs, order.token_names
                )
    return CompletionAnswer(
        id=order.request_id,
        created=order.created,
        model=order.label,
        system_fingerprint=order.model.fingerprint or None,
        choices=shown,
        usage=usage_report(submission.accounts, num_truncated=order.num_truncated),
        speculation=(
            speculation_report(submission.accounts) if order.include_speculation else UNSET
        ),
    )


def _shown(
    order: CompletionOrder, choice: _Choice, pieces: list[_Piece], index: int
) -> CompletionChoice:
    """The choice of the answer, once it ended."""
    shown = CompletionChoice(
        text="".join(piece.text for piece in pieces),
        index=index,
        logprobs=_join_logprobs(pieces) if order.logprobs is not None else None,
        finish_reason=shown_finish(choice.finish_reason),
    )
    if choice.stop_reason is not None:
        shown.stop_reason = shown_stop_reason(choice.stop_reason)
    if order.return_token_ids:
        shown.token_ids = tuple(t for piece in pieces for t in piece.token_ids)
        shown.prompt_token_ids = choice.request.prompt_ids
    if order.include_token_sources:
        shown.token_sources = join_runs([run for piece in pieces for run in piece.sources])
    if order.include_rejected_drafts:
        shown.rejected_drafts = [draft for piece in pieces for draft in piece.rejected]
    return shown


def _join_logprobs(pieces: list[_Piece]) -> Logprobs:
    joined = Logprobs()
    for piece in pieces:
        if piece.logprobs is not None:
            joined.text_offset += piece.logprobs.text_offset
            joined.token_logprobs += piece.logprobs.token_logprobs
            joined.tokens += piece.logprobs.tokens
            joined.top_logprobs += piece.logprobs.top_logprobs
    return joined


class _ChunkWriter:
    """Writes the chunks of a response as events."""

    def __init__(self, order: CompletionOrder, submission: Submission) -> None:
        self._order = order
        self._choices = _Choices(order)
        self._num_open = sum(len(of_prompt) for of_prompt in self._choices.of)
        self._seen: set[int] = set()
        self.frame = ChunkFrame(order, submission, CompletionChunk)

    def write(self, arrived: list[tuple[int, Delta]]) -> bytes:
        """The events of the Deltas that arrived together."""
        out: list[bytes] = []
        for choice, delta, piece in self._choices.take(arrived):
            self._num_open -= delta.finish_reason is not None
            out.append(self._chunk(choice, delta, piece))
        return b"".join(out)

    def _chunk(self, choice: _Choice, delta: Delta, piece: _Piece) -> bytes:
        """The chunk of one Delta, b"" while its text may still be part of a stop string."""
        order = self._order
        self.frame.num_sent += len(delta.token_ids)
        ended = delta.finish_reason is not None
        has_logprobs = piece.logprobs is not None and bool(piece.logprobs.tokens)
        has_ids = order.return_token_ids and bool(piece.token_ids)
        has_drafts = bool(piece.sources or piece.rejected)
        if not (piece.text or ended or has_logprobs or has_ids or has_drafts):
            return b""
        shown = CompletionChunkChoice(text=piece.text, index=choice.index, logprobs=piece.logprobs)
        if ended:
            shown.finish_reason = shown_finish(choice.finish_reason)
        if order.return_token_ids:
            shown.token_ids = piece.token_ids
            if choice.index not in self._seen:
                self._seen.add(choice.index)
                shown.prompt_token_ids = choice.request.prompt_ids
        if order.include_token_sources:
            shown.token_sources = piece.sources
        if order.include_rejected_drafts:
            shown.rejected_drafts = piece.rejected
        if choice.stop_reason is not None:
            shown.stop_reason = shown_stop_reason(choice.stop_reason)
        return self.frame.chunk(shown, is_last=not self._num_open)


def completion_events(
    order: CompletionOrder, submission: Submission
) -> AsyncGenerator[bytes, None]:
    """The response as server-sent events (see stream_events).

    Chunks of a choice come in order; its last one has the finish_reason. With include_usage every
    chunk has `usage` (null unless continuous_usage_stats), and one more without choices has the
    sums. The `speculation` object is in the last chunk.
    """
    writer = _ChunkWriter(order, submission)
    return stream_events(submission, writer.write, writer.frame)
