"""Ids of a text that continues another one: a piece of a chat, a predicted output.

SentencePiece-like tokenizers put a space before whatever they are given (Llama 2's "▁"), because
they take it for the start of a text. Encoding a later piece behind a line break, and taking the
break's ids off again, gives the ids that the piece has inside a text.
"""

from __future__ import annotations

from tokenizers import Tokenizer

__all__ = ["SegmentEncoder"]

_ANCHOR = "\n"


class SegmentEncoder:
    """Encodes texts without the tokenizer's own BOS and EOS; added tokens are found in them."""

    __slots__ = ("_anchor_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        anchor: list[int] = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids
        behind: list[int] = tokenizer.encode(_ANCHOR + "a", add_special_tokens=False).ids
        alone: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
        needs_anchor = behind[: len(anchor)] == anchor and behind[len(anchor) :] != alone
        self._anchor_ids = anchor if needs_anchor else []

    def first(self, text: str) -> list[int]:
        """Ids of a text that starts the prompt."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def later(self, text: str) -> list[int]:
        """Ids of a text that other text stands before."""
        anchor = self._anchor_ids
        if anchor and text:
            ids: list[int] = self._tokenizer.encode(_ANCHOR + text, add_special_tokens=False).ids
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self.first(text)
