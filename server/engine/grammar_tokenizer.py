"""A tokenizer for grammars that never reads the name of a control token in a text as that token.

A tokenizer.json turns "<|im_end|>" inside any text into the control token of that name, and
llguidance asks it how a forced text is tokenized. Then a schema's constant, a choice or a tool's
enum that holds such a name would end the answer, or be refused. So llguidance gets the bytes of the
ids, control tokens with random names that no client can guess, and texts are cut by a TextCutter
that does not know their names. A Lark grammar may still ask for a control token, by its name
without quotes or as <[id]>.

A whole tokenizer of 49,000 ids takes 13 MiB of an engine's memory and one of 262,000 ids 94: its
vocabulary in two directions and its merges, in hash tables. An engine needs it for the few texts
that grammars force. So the `tokenizers` library only does here what comes before the merges
(added tokens, normalisation, words, the characters or bytes that a word begins as), with a
vocabulary of these alone, and the merges (Sennrich, Haddow and Birch 2016) are one sorted table,
mapped from a file. Other kinds of tokenizers are read whole.

The file is one of drafters.array_file, with the rest of the tokenizer.json as bytes.
pairs: int64 [M], ascending: left id << 32 | right id. merged: int64 [M]: rank << 32 | new id.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drafters.array_file import ArrayFormat, Column
from drafters.arrays import Int64
from drafters.heap import pop, push
from drafters.jit import compiled, entry
from drafters.json_text import parsed
from drafters.sorted_keys import find_row
from server.engine.grammar_library import LibraryTokenizer

if TYPE_CHECKING:
    from server.token_bytes import TokenBytes
    from server.types import GrammarSpec
    from vocab_store.enrichment import Enrichment

# -- texts cut into ids, from mapped tables --------------------------------------------------------


ReadTokenizer = Callable[[str], Any]
"""Tokenizer.from_str of the `tokenizers` library, which this package does not import."""

_FORMAT = ArrayFormat(
    "table of merges",
    2,
    {
        "told": Column("uint8", (None,)),
        "pairs": Column("int64", ("pairs",), low=0, ascends=True),
        "merged": Column("int64", ("pairs",), low=0),
    },
)


@dataclass(frozen=True, slots=True)
class CutterTables:
    """What a TextCutter is made of.

    spec: a tokenizer.json; with `pairs`, of the words' beginnings alone. control: id of each
    control token, by name. num_ids: above every id of the tokenizer. pairs, merged: int64 [M], as
    in the file; None where `spec` is whole.
    """

    spec: Mapping[str, Any]
    control: Mapping[str, int]
    num_ids: int
    pairs: Int64 | None
    merged: Int64 | None


def control_tokens(spec: Mapping[str, Any]) -> dict[str, int]:
    """Names and ids of a tokenizer.json's control tokens: the special ones, and what llguidance
    takes for one, an added token like <tool_call>. Other added tokens ("   ") are text."""
    return {
        token["content"]: int(token["id"])
        for token in spec.get("added_tokens") or ()
        if token.get("special") or (token["content"][:1] == "<" and token["content"][-1:] == ">")
    }


def make_tables(spec: Mapping[str, Any]) -> CutterTables:
    """The tables of a tokenizer.json.

    A control token's name in a text is text: the tokenizer does not know these names. No space is
    put before a text, which goes on what stands before it.
    """
    control = control_tokens(spec)
    spec = dict(spec, truncation=None, padding=None, post_processor=None)
    spec["normalizer"] = _without_prefix(spec.get("normalizer"))
    spec["pre_tokenizer"] = _without_prefix(spec.get("pre_tokenizer"))
    added = [t for t in spec.get("added_tokens") or () if t["content"] not in control]
    model = spec["model"]
    vocab = model["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    num_ids = 1 + max([*ids, *control.values(), *(int(t["id"]) for t in added)], default=-1)
    if not _merges_alone(model):
        whole = dict(spec, added_tokens=added, model=_renamed(model, control))
        return CutterTables(whole, control, num_ids, None, None)
    begins = {
        piece: i
        for piece, i in vocab.items()
        if piece == model.get("unk_token")
        or ((len(piece) == 1 or _is_byte(piece)) and piece not in control)
    }
    begins.update((t["content"], int(t["id"])) for t in added)
    pairs, merged = _merge_tables(vocab, model["merges"])
    small = dict(spec, added_tokens=added, model=dict(model, vocab=begins, merges=[]))
    return CutterTables(small, control, num_ids, pairs, merged)


def _merges_alone(model: Mapping[str, Any]) -> bool:
    """Whether the merges say all of how a word is cut."""
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    return model.get("type") == "BPE" and not any(model.get(name) for name in others)


def _renamed(model: Mapping[str, Any], control: Mapping[str, int]) -> dict[str, Any]:
    """A model that looks for whole words or pieces, with names of control tokens that no text
    has."""
    secret = secrets.token_hex(16)
    names = {name: f"<{secret}-{token_id}>" for name, token_id in control.items()}
    model = dict(model)
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    else:  # Unigram: [piece, score] by id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return model


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts nothing before a text, as llguidance has it."""
    if not isinstance(part, dict):
        return part
    if part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return dict(part, prepend_scheme="never")
    for name in ("normalizers", "pretokenizers"):
        if part["type"] == "Sequence" and name in part:
            kept = [_without_prefix(inner) for inner in part[name]]
            kept = [inner for inner in kept if inner is not None]
            return dict(part, **{name: kept}) if kept else None
    return part


def _merge_tables(vocab: Mapping[str, int], merges: Sequence[Any]) -> tuple[Int64, Int64]:
    """(pairs, merged) of a vocabulary's merges, "left right" or [left, right] in their order."""
    pairs = np.empty(len(merges), np.int64)
    merged = np.empty(len(merges), np.int64)
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        pairs[rank] = vocab[left] << 32 | vocab[right]
        merged[rank] = rank << 32 | vocab[left + right]
    order = np.argsort(pairs, kind="stable")
    pairs, merged = pairs[order], merged[order]
    last = np.ones(pairs.shape[0], np.bool_)  # of a pair that stands twice
    last[:-1] = pairs[1:] != pairs[:-1]
    return pairs[last], merged[last]


def save_tables(tables: CutterTables, path: Path) -> None:
    """Write tables that have merges, atomically. Raises OSError."""
    assert tables.pairs is not None and tables.merged is not None
    spec = {"spec": tables.spec, "control": tables.control, "num_ids": tables.num_ids}
    told = np.frombuffer(json.dumps(spec).encode(), np.uint8)
    arrays: dict[str, Any] = {"told": told, "pairs": tables.pairs, "merged": tables.merged}
    _FORMAT.write(path, arrays, fingerprint="")


def open_tables(path: Path) -> CutterTables:
    """Map what `save_tables` wrote. Raises ValueError for another file, OSError."""
    read = _FORMAT.read(path, fingerprint="")
    told = parsed(read.arrays["told"].tobytes())
    read.release_pages()
    return CutterTables(
        told["spec"],
        told["control"],
        told["num_ids"],
        read.arrays["pairs"],
        read.arrays["merged"],
    )


class TextCutter:
    """Cuts texts into ids as the tokenizer does whose tables these are, without special tokens."""

    def __init__(self, tables: CutterTables, read: ReadTokenizer) -> None:
        self._begin = read(json.dumps(tables.spec))
        self._pairs, self._merged = tables.pairs, tables.merged

    def __call__(self, text: str) -> list[int]:
        found = self._begin.encode(text, add_special_tokens=False)
        if self._pairs is None or self._merged is None or len(found) == 0:
            return list(found.ids)
        ids = np.array(found.ids, np.int64)
        words = np.array([-1 if w is None else w for w in found.word_ids], np.int64)
        num = _merge(ids, words, self._pairs, self._merged)
        return [int(i) for i in ids[:num]]


@entry
@compiled
def _merge(ids: Int64, words: Int64, pairs: Int64, merged: Int64) -> int:
    """Merge ids of the same word, the lowest rank first, of equal ones the leftmost; in place.
    Returns how many ids are left. Time n log n in the ids."""
    n, num_pairs = ids.shape[0], pairs.shape[0]
    after = np.arange(1, n + 1)
    before = np.arange(-1, n - 1)
    rows = np.full(n, -1, np.int64)  # of the pair that begins here now
    # What waits: at first a pair a place, then two a merge. Keys: -(rank, place).
    keys = np.empty(3 * n, np.int64)
    places = np.arange(3 * n).astype(np.int32)
    waiting = np.empty(3 * n, np.int64)  # the pair's row
    size = 0
    for i in range(n - 1):
        if words[i] == words[i + 1]:
            rows[i] = find_row(pairs, 0, num_pairs, ids[i] << 32 | ids[i + 1])
            if rows[i] >= 0:
                key = (merged[rows[i]] >> 32) << 32 | i
                waiting[push(keys, places, size, -key)] = rows[i]
                size += 1
    while size > 0:
        first = -keys[0] & 0xFFFFFFFF
        row = waiting[pop(keys, places, size)]
        size -= 1
        if rows[first] != row:
            continue
        gone = after[first]
        ids[first] = merged[row] & 0xFFFFFFFF
        after[first] = after[gone]
        rows[first] = rows[gone] = -1
        if after[first] < n:
            before[after[first]] = first
        for left in (before[first], first):
            if left >= 0 and after[left] < n:
                right = after[left]
                rows[left] = -1
                if words[left] == words[right]:
                    rows[left] = find_row(pairs, 0, num_pairs, ids[left] << 32 | ids[right])
                if rows[left] >= 0:
                    key = (merged[rows[left]] >> 32) << 32 | left
                    waiting[push(keys, places, size, -key)] = rows[left]
                    size += 1
    num, place = 0, 0
    while place < n:
        ids[num] = ids[place]
        num += 1
        place = int(after[place])
    return num


# -- what llguidance is given ----------------------------------------------------------------------

_LARK = re.compile(
    r"""
    (?P<other> "(?:\\.|[^"\\\n])*" | (?://|\#)[^\n]* | /(?:\\.|[^/\\])+/ )
    | (?P<name> <[^<>\s"/\[\]]+> )
    """,
    re.VERBOSE,
)
"""A literal, comment or regular expression of Lark, or the name of a control token. As llguidance
has them: in a grammar that it takes each ends, so that the time to find them is linear."""


_SLICES = (r'[^"\\\x00-\x1F\x7F]{1,12}',)
"""Sets of tokens that llguidance allows at once where all of a set may follow: of 1 to 12
characters of a JSON string. Each set costs tries of all tokens, and only strings of a bounded
length need one: a mask in a free string is kept from one token to the next."""


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """library: llguidance's tokenizer. control: id of each control token, by the name that it has
    in tokenizer.json. pieces, cut: bytes of the base tokenizer's ids, and how it cuts a text."""

    library: LibraryTokenizer
    control: Mapping[str, int]
    pieces: TokenBytes
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
    pieces: TokenBytes,
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
    pieces: TokenBytes,
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
