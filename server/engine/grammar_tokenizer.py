"""A tokenizer for grammars that never reads the name of a control token in a text as that token.

A tokenizer.json turns "<|im_end|>" inside any text into the control token of that name, and
llguidance asks it how a forced text is tokenized. Then a schema's constant, a choice or a tool's
enum that holds such a name would end the answer, or be refused. So llguidance gets the bytes of the
ids, control tokens with random names that no client can guess, and texts are cut by a TextCutter
that does not know their names. A Lark grammar may still ask for a control token, by its name
without quotes or as <[id]>.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from drafters.json_text import parsed
from server.engine.grammar_library import LibraryTokenizer
from server.engine.text_cutter import (
    CutterTables,
    ReadTokenizer,
    TextCutter,
    check_tables,
    make_tables,
    open_tables,
    save_tables,
)

if TYPE_CHECKING:
    import numpy.typing as npt

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


_SLICES = (r'[^"\\\x00-\x1F\x7F]{1,12}',)
"""Sets of tokens that llguidance allows at once where all of a set may follow: of 1 to 12
characters of a JSON string. Each set costs tries of all tokens, and only strings of a bounded
length need one: a mask in a free string is kept from one token to the next."""


class TokenPieces(Protocol):
    """The id -> bytes table (server/token_bytes.py), as much of it as is needed here."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def offsets(self) -> npt.NDArray[np.int64]: ...

    @property
    def blob(self) -> npt.NDArray[np.uint8]: ...

    def bytes_of(self, token_id: int) -> bytes:
        """b"" for an id that it does not hold."""


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """library: llguidance's tokenizer. control: id of each control token, by the name that it has
    in tokenizer.json. pieces, cut: bytes of the base tokenizer's ids, and how it cuts a text."""

    library: LibraryTokenizer
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
    """llguidance's view of a tokenizer.json. Takes 0.1 s for 49,000 ids and 0.8 s for 262,000,
    without the interpreter lock.

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
    control = tables.control
    library = _library_tokenizer(
        pieces, cut, control.values(), vocab_size, eos_token_ids, enrichment
    )
    return GrammarTokenizer(library, control, pieces, cut)


def prepare_grammar_tokenizer(tokenizer_file: Path | str, kept: Path) -> None:
    """Have in `kept`, before requests come, what load_grammar_tokenizer would hold the
    interpreter lock for: once for a tokenizer, 2 s for 262,000 ids. Raises OSError, ValueError,
    KeyError for a file that is no tokenizer's."""
    try:
        check_tables(kept)
    except (OSError, ValueError):
        _tables(Path(tokenizer_file), kept)


def _tables(tokenizer_file: Path, kept: Path | None) -> CutterTables:
    """What `kept` holds of the tokenizer, or what is read of its file, and then kept."""
    try:
        if kept is not None:
            return open_tables(kept)
    except (OSError, ValueError, KeyError):
        pass  # not there yet, or of an interrupted machine
    tables = make_tables(parsed(tokenizer_file.read_text(encoding="utf-8")))
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
    library = _library_tokenizer(
        base.pieces, base.cut, base.control.values(), vocab_size, eos_token_ids, enrichment
    )
    return replace(base, library=library)


def _library_tokenizer(
    pieces: TokenPieces,
    cut: Callable[[str], list[int]],
    control: Iterable[int],
    vocab_size: int,
    eos_token_ids: Sequence[int],
    enrichment: Enrichment | None,
) -> LibraryTokenizer:
    """llguidance's tokenizer of these tokens, which it copies. control: ids of control tokens."""
    secret = secrets.token_hex(16)  # a name that could be guessed could be written
    renamed = {
        i: b"\xff" + f"<{secret}-{i}>".encode()
        for i in {*control, *eos_token_ids}
        if i < vocab_size
    }
    if enrichment is not None:
        for token_id, parts in zip(enrichment.ids, enrichment.parts, strict=True):
            renamed[token_id] = b"".join(pieces.bytes_of(part) for part in parts)
    num_known = min(vocab_size, pieces.vocab_size)
    offsets, blob = pieces.offsets, pieces.blob
    lengths = np.zeros(vocab_size, np.uint32)
    lengths[:num_known] = np.diff(offsets[: num_known + 1])
    parts_of_blob, done = [], 0
    for i in sorted(renamed):
        start, end = offsets[min(i, num_known)], offsets[min(i + 1, num_known)]
        parts_of_blob += [blob[done:start], np.frombuffer(renamed[i], np.uint8)]
        lengths[i], done = len(renamed[i]), end
    parts_of_blob.append(blob[done : offsets[num_known]])

    def segmented(text: str) -> list[int]:
        ids = cut(text)
        return ids if enrichment is None else enrichment.segment(ids)

    return LibraryTokenizer(
        lengths, np.concatenate(parts_of_blob), eos_token_ids, segmented, _SLICES
    )
