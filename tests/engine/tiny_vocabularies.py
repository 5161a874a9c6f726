"""Grammar tokenizers over a handful of ids, and of tiny tokenizer files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from server import token_bytes
from server.engine.grammar_tokenizer import GrammarTokenizer, load_grammar_tokenizer
from vocab_store.enrichment import Enrichment

NO_PIECES = token_bytes.TokenBytes(
    np.zeros(1, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64), 0, b""
)
"""A table without ids, for a GrammarTokenizer that nobody widens."""


def read_grammar_tokenizer(
    tokenizer_file: Path,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    enrichment: Enrichment | None = None,
) -> GrammarTokenizer:
    """load_grammar_tokenizer with the table of the file's ids."""
    table = token_bytes.build(Tokenizer.from_file(str(tokenizer_file)), vocab_size)
    return load_grammar_tokenizer(
        tokenizer_file, table, vocab_size, eos_token_ids, Tokenizer.from_str, enrichment
    )


class _Greedy:
    """Longest match first, over the ids' bytes."""

    bos_token_id = None

    def __init__(self, token_bytes: list[bytes], special_ids: tuple[int, ...], eos: int) -> None:
        self.eos_token_id = eos
        self.special_token_ids = list(special_ids)
        # A special id's bytes are its name, which no text contains.
        self.tokens = [
            b"<%d>" % i if i in special_ids else piece for i, piece in enumerate(token_bytes)
        ]
        self._ids: dict[bytes, int] = {}
        for i, piece in enumerate(token_bytes):
            if piece and i not in special_ids:
                self._ids.setdefault(piece, i)
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            for size in range(self._longest, 0, -1):
                token = self._ids.get(text[at : at + size])
                if token is not None and at + size <= len(text):
                    ids.append(token)
                    at += size
                    break
            else:
                at += 1  # llguidance tries a text of its own when it is made
        return ids


def tokenizer_over(
    token_bytes: list[bytes], special_ids: tuple[int, ...], eos: tuple[int, ...]
) -> Any:
    """An LLTokenizer whose id i is token_bytes[i]. Every byte that a grammar may force needs an
    id of its own."""
    wrapper = TokenizerWrapper(_Greedy(token_bytes, special_ids, eos[0]))
    return LLTokenizer(wrapper, n_vocab=len(token_bytes), eos_token=list(eos), slices=[])
