"""Which drafts a text came from: the text of a Delta cut into runs of one draft source.

A client that sets `include_token_sources` gets, per choice and chunk, a list of runs. Their texts
joined are the chunk's text (without an echoed prompt), their token counts the chunk's tokens.

With `include_rejected_drafts` a choice and a chunk also have the drafts that were not accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from server.api.responses import RejectedDraft, SourceRun
from server.api.text import CharCounter, TextStream
from server.token_bytes import TokenBytes
from server.types import Delta


def text_by_source(stream: TextStream, delta: Delta, wanted: bool) -> tuple[str, list[SourceRun]]:
    """Push a Delta into its choice's TextStream: its text, and its runs where they are wanted."""
    ids, finish_reason = delta.token_ids, delta.finish_reason
    if not wanted or not ids:
        if finish_reason is None:
            return stream.push(ids), []
        text = stream.finish(ids, finish_reason, delta.stop_reason)
        held = SourceRun(source=None, tokens=0, text=text)
        return text, [held] if wanted and text else []
    names = delta.sources or ("",) * len(ids)
    lengths = [(name, len(list(same))) for name, same in groupby(names)]
    runs: list[SourceRun] = []
    start = 0
    for i, (name, num_tokens) in enumerate(lengths):
        part = ids[start : start + num_tokens]
        start += num_tokens
        if finish_reason is not None and i + 1 == len(lengths):
            text = stream.finish(part, finish_reason, delta.stop_reason)
        else:
            text = stream.push(part)
        runs.append(SourceRun(source=name or None, tokens=num_tokens, text=text))
    return "".join(run.text for run in runs), runs


def join_runs(runs: Iterable[SourceRun]) -> list[SourceRun]:
    """The runs of several Deltas as one list, neighbours of one source joined."""
    joined: list[SourceRun] = []
    for run in runs:
        if joined and joined[-1].source == run.source:
            last = joined[-1]
            joined[-1] = SourceRun(
                source=run.source, tokens=last.tokens + run.tokens, text=last.text + run.text
            )
        else:
            joined.append(run)
    return joined


class RejectedDrafts:
    """The rejected drafts of one choice, Delta by Delta."""

    __slots__ = ("_counter", "_num_tokens", "_skip_special", "_table")

    def __init__(self, table: TokenBytes, *, skip_special: bool) -> None:
        self._table = table
        self._skip_special = skip_special
        self._counter = CharCounter()
        self._num_tokens = 0

    def take(self, delta: Delta) -> list[RejectedDraft]:
        """The rejected drafts of one Delta. Called for each, in order."""
        offsets = [
            self._counter.push(self._table.join((token,), skip_special=self._skip_special))
            for token in delta.token_ids
        ]
        before = self._num_tokens
        self._num_tokens += len(offsets)
        return [
            RejectedDraft(
                token=before + at,
                offset=offsets[at],
                source=source,
                tokens=len(ids),
                text=self._table.join(ids, skip_special=False).decode(errors="replace"),
            )
            for at, source, ids in delta.rejected_drafts
        ]
