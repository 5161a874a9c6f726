"""Grammar tokenizers over a handful of ids, and of tiny tokenizer files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from server import token_bytes
from server.engine.grammar import GrammarCompiler, GrammarState
from server.engine.grammar_library import LibraryTokenizer
from server.engine.grammar_tokenizer import GrammarTokenizer, load_grammar_tokenizer
from server.grammar_text import grammar_text
from server.types import GrammarSpec
from tests.fakes.token_table import table_of
from vocab_store.enrichment import Enrichment


def read_grammar_tokenizer(
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (0,),
    enrichment: Enrichment | None = None,
) -> GrammarTokenizer:
    """load_grammar_tokenizer of a tokenizer's file, with the table of its ids."""
    table = token_bytes.build(tokenizer, vocab_size)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        tokenizer.save(str(file))
        return load_grammar_tokenizer(
            file, table, vocab_size, eos_token_ids, Tokenizer.from_str, enrichment
        )


def allowed_ids(state: GrammarState) -> list[int]:
    """What its mask allows."""
    mask = np.zeros(state.num_words, np.uint32)
    state.fill_mask(mask)
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


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


@dataclass(frozen=True, eq=False)
class BothTokenizers:
    """The same ids for llguidance's Python classes, which the reference walks with, and for the
    engine. pieces: their bytes. Both keep what they have compiled."""

    pieces: tuple[bytes, ...]
    library: LibraryTokenizer
    _reference: LLTokenizer
    _matchers: dict[GrammarSpec, LLMatcher] = field(default_factory=dict)

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """The reference's, before its first token."""
        if spec not in self._matchers:
            made = LLMatcher(self._reference, grammar_text(spec), log_level=0)
            assert not made.is_error(), made.get_error()
            self._matchers[spec] = made
        return self._matchers[spec].deep_copy()

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """The engine's. It is never closed."""
        known = GrammarTokenizer(self.library, {}, table_of([]), lambda text: [])
        return GrammarCompiler(lambda: known)


def tokenizer_over(
    token_bytes: list[bytes], special_ids: tuple[int, ...], eos: tuple[int, ...]
) -> BothTokenizers:
    """Tokenizers whose id i is token_bytes[i]. Every byte that a grammar may force needs an id of
    its own."""
    greedy = _Greedy(token_bytes, special_ids, eos[0])
    reference = LLTokenizer(
        TokenizerWrapper(greedy), n_vocab=len(token_bytes), eos_token=list(eos), slices=[]
    )
    pieces = [
        b"\xff" + piece if i in special_ids else piece for i, piece in enumerate(greedy.tokens)
    ]
    library = LibraryTokenizer(
        np.array([len(piece) for piece in pieces], np.uint32),
        np.frombuffer(b"".join(pieces), np.uint8),
        eos,
        lambda text: greedy(text.encode()),
        (),
    )
    return BothTokenizers(tuple(token_bytes), library, reference)
