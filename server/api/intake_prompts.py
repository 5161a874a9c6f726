"""The prompts of a body: their four shapes, where their context lies, what an echo repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.api.fields import MAX_TOKENS, PROMPT
from server.api.served_model import ServedModel
from server.errors import ContextLengthExceededError, InvalidRequestError, echoed
from server.token_bytes import TokenBytes
from server.types import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as the client gave it (text), or as its ids read; pieces: the bytes of each id.

    Both are empty unless the answer repeats the prompt (echo).
    """

    text: str = ""
    pieces: tuple[bytes, ...] = ()


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The four shapes of `prompt` as a list of texts or id lists. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequestError(
            f"{PROMPT}: must be a string, a list of strings, a list of token ids or a list of "
            f"lists of token ids; got {echoed(prompt)}.",
            param=str(PROMPT),
        )
    if not prompt:
        raise InvalidRequestError(f"{PROMPT}: the list is empty.", param=str(PROMPT))
    first = prompt[0]
    if isinstance(first, int):
        return [_ids_of(prompt, str(PROMPT))]
    kind = str if isinstance(first, str) else list
    prompts: list[str | list[int]] = []
    for i, item in enumerate(prompt):
        if not isinstance(item, kind):
            raise InvalidRequestError(
                f"{PROMPT}[{i}]: all items must have one type (strings, token ids or lists of "
                f"token ids); got {echoed(item)}.",
                param=str(PROMPT),
            )
        prompts.append(item if isinstance(item, str) else _ids_of(item, f"{PROMPT}[{i}]"))
    return prompts


def _ids_of(items: Any, at: str) -> list[int]:
    if not items:
        raise InvalidRequestError(f"{at}: the list of token ids is empty.", param=str(PROMPT))
    for i, item in enumerate(items):
        if type(item) is not int or item < 0:
            raise InvalidRequestError(
                f"{at}[{i}]: a token id is an integer of 0 or more; got {echoed(item)}.",
                param=str(PROMPT),
            )
    ids: list[int] = items
    return ids


def check_prompt_ids(ids: Sequence[int], model: ServedModel, at: str) -> None:
    """Raise InvalidRequestError for an id that the model does not have."""
    for token_id in ids:
        if token_id >= model.vocab_size:
            raise InvalidRequestError(
                f"{at}: token id {echoed(token_id)} is not below the vocabulary size, "
                f"{model.vocab_size}.",
                param=str(PROMPT),
            )


def too_long(
    at: str, num_prompt: str, max_tokens: int | None, room: int
) -> ContextLengthExceededError:
    """The error of a text that does not fit. num_prompt: its tokens, or "at least ..."."""
    extra = "" if not max_tokens else f" and {max_tokens} for the completion ({MAX_TOKENS})"
    return ContextLengthExceededError(
        f"{at}: the model's context holds {room} tokens, but the request has {num_prompt} in the "
        f"prompt{extra}. Prompts are never truncated.",
        param=str(
            MAX_TOKENS if max_tokens and num_prompt.isdigit() and int(num_prompt) < room else PROMPT
        ),
    )


def context_span(
    table: TokenBytes, ids: Sequence[int], after: str | None, before: str | None
) -> tuple[int, int] | None:
    """[start, end) of the ids between the marks, or None when a mark is missing."""
    pieces = table.prompt_bytes(ids, skip_special=False)
    data = b"".join(pieces)
    start_byte, end_byte = 0, len(data)
    if after is not None:
        at = data.find(after.encode())
        if at < 0:
            return None
        start_byte = at + len(after.encode())
    if before is not None:
        end_byte = data.find(before.encode(), start_byte)
        if end_byte < 0:
            return None
    position, start, end = 0, len(ids), len(ids)
    for i, piece in enumerate(pieces):
        if position >= start_byte and start == len(ids):
            start = i
        if position >= end_byte:
            end = i
            break
        position += len(piece)
    return (start, end) if start < end else None


def echo_text(
    model: ServedModel, prompt: str | list[int], ids: Sequence[int], sampling: SamplingParams
) -> PromptText:
    """What an answer with echo repeats."""
    pieces = model.table.prompt_bytes(ids, skip_special=sampling.skip_special_tokens)
    if isinstance(prompt, str):
        return PromptText(prompt, tuple(pieces))
    return PromptText(b"".join(pieces).decode(errors="replace"), tuple(pieces))
