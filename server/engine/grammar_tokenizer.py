"""A tokenizer for grammars that never reads the name of a control token in a text as that token.

A tokenizer.json turns "<|im_end|>" inside any text into the control token of that name, and
llguidance asks it how a forced text is tokenized. Then a schema's constant, a choice or a tool's
enum that holds such a name would end the answer, or be refused. So llguidance gets the bytes of the
ids, control tokens with random names that no client can guess, and texts are cut by a TextCutter
that does not know their names. A Lark grammar may still ask for a control token, by its name
without quotes or as <[id]>.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from server.engine.text_cutter import (
    CutterTables,
    ReadTokenizer,
    TextCutter,
    make_tables,
    open_tables,
    save_tables,
)

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from server.types import GrammarSpec
    from vocab_store.enrichment import Enrichment

_LARK = re.compile(
    r"""
    (?P<other> "(?:\\.|[^"\\])*" | //[^\n]* | /(?:\\.|[^/\\\n])+/ )
    | (?P<name> <[^<>\s"/\[\]]+> )
    """,
    re.VERBOSE,
)
"""A literal, comment or regular expression of Lark, or the name of a control token."""


_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = (_STRING + "{1,10}", _STRING + "{1,30}")
"""Sets of tokens that llguidance allows at once where all of a set may follow: what a JSON string
is made of. Its own list has white space and longer tokens, too, which make no mask faster and take
a third of the memory."""


class TokenPieces(Protocol):
    """The id -> bytes table (server/token_bytes.py), as much of it as is needed here."""

    @property
    def vocab_size(self) -> int: ...

    def bytes_of(self, token_id: int) -> bytes:
        """b"" for an id that it does not hold."""


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """library: llguidance's tokenizer. control: id of each control token, by the name that it has
    in tokenizer.json. pieces, cut: bytes of the base tokenizer's ids, and how it cuts a text."""

    library: LLTokenizer
    control: Mapping[str, int]
    pieces: TokenPieces
    cut: Callable[[str], list[int]]

    def spelled(self, spec: GrammarSpec) -> GrammarSpec:
        """The grammar with control tokens named by their ids."""
        if spec.kind != "lark" or "<" not in spec.source:
            return spec

        def by_id(found: re.Match[str]) -> str:
            token_id = self.control.get(found["name"] or "")
            return found[0] if token_id is None else f"<[{token_id}]>"

        return replace(spec, source=_LARK.sub(by_id, spec.source))


def load_grammar_tokenizer(
    tokenizer_file: Path | str,
    pieces: TokenPieces,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    read: ReadTokenizer,
    enrichment: Enrichment | None = None,
    kept: Path | None = None,
) -> GrammarTokenizer:
    """llguidance's view of a tokenizer.json. Takes 0.1 s for 49,000 ids and 0.8 s for 262,000, and
    holds the interpreter lock meanwhile.

    pieces: the bytes of its ids. vocab_size: the model's, which may be padded above the
    tokenizer's; padded ids are in no mask. read: see TextCutter. enrichment: tokens of the model's
    own; a forced text is cut into the fewest ids. kept: file where what is read of tokenizer.json
    is kept, for this content of it; without one, or where it cannot be written, the whole is read
    again: 2 s more for 262,000 ids. Raises ValueError for a tokenizer with ids that the model has
    not.
    """
    tables = _tables(Path(tokenizer_file), kept)
    if tables.num_ids > vocab_size:
        raise ValueError(f"the tokenizer has {tables.num_ids} ids, the model {vocab_size}")
    cut = TextCutter(tables, read)
    special = sorted({*tables.control.values(), *eos_token_ids})
    wrapper = _Tokenizer(pieces, cut, vocab_size, special, eos_token_ids[0], enrichment)
    return GrammarTokenizer(wrapper.read(eos_token_ids), tables.control, pieces, cut)


def _tables(tokenizer_file: Path, kept: Path | None) -> CutterTables:
    """What `kept` holds of the tokenizer, or what is read of its file, and then kept."""
    try:
        if kept is not None:
            return open_tables(kept)
    except (OSError, ValueError, KeyError):
        pass  # not there yet, or of an interrupted machine
    tables = make_tables(json.loads(tokenizer_file.read_text(encoding="utf-8")))
    if kept is None or tables.pairs is None:
        return tables
    try:
        save_tables(tables, kept)
        return open_tables(kept)
    except OSError:  # a full or read-only cache
        return tables


def enriched_grammar_tokenizer(
    base: GrammarTokenizer,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    enrichment: Enrichment,
) -> GrammarTokenizer:
    """`base` with an enrichment's tokens. Takes as long as load_grammar_tokenizer."""
    special = sorted({*base.control.values(), *eos_token_ids})
    wrapper = _Tokenizer(base.pieces, base.cut, vocab_size, special, eos_token_ids[0], enrichment)
    return replace(base, library=wrapper.read(eos_token_ids))


class _Tokenizer:
    """What llguidance asks of a tokenizer (its TokenizerWrapper).

    tokens[i] are the bytes of id i; an id without a token has none and is in no mask.
    """

    is_tokenizer_wrapper = True

    def __init__(
        self,
        pieces: TokenPieces,
        cut: Callable[[str], list[int]],
        vocab_size: int,
        special_token_ids: Sequence[int],
        eos_token_id: int,
        enrichment: Enrichment | None,
    ) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        self.special_token_ids = [i for i in special_token_ids if i < vocab_size]
        self.tokens = [pieces.bytes_of(i) for i in range(vocab_size)]
        secret = secrets.token_hex(16)  # a name that could be guessed could be written
        for i in self.special_token_ids:
            self.tokens[i] = f"<{secret}-{i}>".encode()
        self._cut = cut
        self._segment = None if enrichment is None else enrichment.segment
        if enrichment is not None:
            for token_id, parts in zip(enrichment.ids, enrichment.parts, strict=True):
                self.tokens[token_id] = b"".join(pieces.bytes_of(part) for part in parts)

    def __call__(self, text: str) -> list[int]:
        ids = self._cut(text)
        return ids if self._segment is None else self._segment(ids)

    def read(self, eos_token_ids: Sequence[int]) -> LLTokenizer:
        """llguidance's tokenizer of these tokens, which it copies: none is left here."""
        from llguidance import LLTokenizer

        wrapper: Any = self
        library = LLTokenizer(
            wrapper, n_vocab=len(self.tokens), eos_token=list(eos_token_ids), slices=list(_SLICES)
        )
        self.tokens = []
        return library
