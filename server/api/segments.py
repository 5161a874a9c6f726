"""Ids of a text that continues another one: a piece of a chat, a predicted output.

SentencePiece-like tokenizers put a space before whatever they are given (Llama 2's "▁"), because
they take it for the start of a text. Encoding a later piece behind a line break, and taking the
break's ids off again, gives the ids that the piece has inside a text.
"""

from __future__ import annotations

from tokenizers import Tokenizer

_ANCHOR = "\n"


class SegmentEncoder:
    """Encodes texts without the tokenizer's own BOS and EOS; added tokens are found in them."""

    __slots__ = ("_anchor_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor_ids: list[int] | None = None  # found out when it is first needed

    def first(self, text: str) -> list[int]:
        """Ids of a text that starts the prompt."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def later(self, text: str) -> list[int]:
        """Ids of a text that other text stands before."""
        anchor = self._anchor_ids
        if anchor is None:
            anchor = self._anchor_ids = self._find_anchor()
        if anchor and text:
            ids = self.first(_ANCHOR + text)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self.first(text)

    def _find_anchor(self) -> list[int]:
        """The ids of the line break; none for a tokenizer that puts no space before a text."""
        anchor, behind = self.first(_ANCHOR), self.first(_ANCHOR + "a")
        if behind[: len(anchor)] == anchor and behind[len(anchor) :] != self.first("a"):
            return anchor
        return []
