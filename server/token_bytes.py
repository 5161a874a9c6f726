"""The id -> bytes table: what each token id adds to the text, as bytes.

The engine matches stop strings on these bytes and the API turns ids into text with them, so the two
agree, and neither calls the tokenizer per token. The table is built once per tokenizer, written to
a file and memory-mapped by every process.

Contract: the bytes of the ids of a text, joined and decoded as UTF-8 (errors="replace"), are the
text that `tokenizer.decode(ids, skip_special_tokens=False)` gives, except for the leading space
that SentencePiece-like decoders strip at the very start of a text (`strip_start`: how many).

Two families of tokenizers are supported, by their own decoder:
- byte-level BPE (GPT-2's byte alphabet: "Ġ" is a space);
- SentencePiece-like: "▁" is a space, "<0xNN>" is one byte (byte fallback).
Added and special tokens go through the same decoder, as in `tokenizers` itself.

The file is one of drafters.array_file.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drafters.array_file import ArrayFile, ArrayFileError, ArrayFormat, Column
from server.errors import UnsupportedTokenizerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenizers import Tokenizer

_FORMAT = ArrayFormat(
    "token table",
    2,
    {
        "offsets": Column("int64", ("ids+1",), cuts="bytes"),
        "special_ids": Column("int64", (None,), low=0, high="ids", ascends=True),
        "blob": Column("uint8", ("bytes",)),
    },
)


class TokenBytes:
    """An immutable id -> bytes table.

    offsets: int64 [V + 1]; the bytes of id i are blob[offsets[i] : offsets[i + 1]].
    blob: uint8 [offsets[V]]. special_ids: int64, ascending: ids marked special in the tokenizer.
    strip_start: leading spaces that the tokenizer's decode() drops at the start of a text (0 or 1).
    fingerprint: sha256 (32 bytes) of the tokenizer's JSON. path: of its file, if it has one.
    Ids of V or above, and ids the tokenizer does not know (a padded vocabulary), have no bytes.
    """

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        blob: npt.NDArray[np.uint8],
        special_ids: npt.NDArray[np.int64],
        strip_start: int,
        fingerprint: bytes,
        file: ArrayFile | None = None,
        path: Path | None = None,
    ) -> None:
        """file: that the arrays are views of."""
        self.offsets = offsets
        self.blob = blob
        self.special_ids = special_ids
        self.strip_start = strip_start
        self.fingerprint = fingerprint
        self._file = file
        self.path = path
        # Python ints and memoryview slices: a numpy scalar per token would cost ten times more.
        self._offsets = offsets.data
        self._blob = blob.data
        self._special = frozenset(int(i) for i in special_ids)

    @property
    def vocab_size(self) -> int:
        """V: the number of ids in the table."""
        return len(self._offsets) - 1

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one id; b"" for an id the table does not hold."""
        if 0 <= token_id < len(self._offsets) - 1:
            return bytes(self._blob[self._offsets[token_id] : self._offsets[token_id + 1]])
        return b""

    def release_pages(self) -> None:
        """Give back the memory of what was read of the file; it is read again when needed."""
        if self._file is not None:
            self._file.release_pages()

    def showing(self, token_ids: Iterable[int]) -> TokenBytes:
        """The same table, with these ids no longer special: they have text where special ids are
        skipped.

        The arrays are shared.
        """
        shown = frozenset(token_ids)
        special = [i for i in self.special_ids.tolist() if i not in shown]
        return TokenBytes(
            self.offsets,
            self.blob,
            np.asarray(special, np.int64),
            self.strip_start,
            self.fingerprint,
        )

    @cached_property
    def names(self) -> TokenNames:
        """Of tokens, for logprobs."""
        return TokenNames(self)

    @cached_property
    def chat_names(self) -> TokenNames:
        """Of tokens, for logprobs of chats."""
        return TokenNames(self, prefix="")

    def join(self, token_ids: Iterable[int], *, skip_special: bool) -> bytes:
        """The bytes of several ids, without special ones if asked."""
        offsets, blob, num = self._offsets, self._blob, len(self._offsets) - 1
        skipped = self._special if skip_special else ()
        return b"".join(
            [
                blob[offsets[i] : offsets[i + 1]]
                for i in token_ids
                if 0 <= i < num and i not in skipped
            ]
        )

    def prompt_bytes(self, token_ids: Iterable[int], *, skip_special: bool) -> list[bytes]:
        """The bytes of each id of a text that starts here: the leading space is stripped from the
        first id that has text, as the tokenizer's decode() does. One item per id."""
        pieces: list[bytes] = []
        left = self.strip_start
        for token_id in token_ids:
            piece = b"" if skip_special and token_id in self._special else self.bytes_of(token_id)
            if left and piece:
                if piece.startswith(b" "):
                    piece = piece[1:]
                left = 0
            pieces.append(piece)
        return pieces


class TokenNames(dict[int, str]):
    """Token strings for logprobs: the token's text, or "bytes:\\xe2\\x80" as OpenAI writes tokens
    that are not UTF-8 by themselves; in chats without the prefix, where the answer has the bytes
    beside them. Names are made on first use and kept: by a table, which adapters share."""

    def __init__(self, table: TokenBytes, *, prefix: str = "bytes:") -> None:
        super().__init__()
        self._table = table
        self._prefix = prefix

    def __missing__(self, token_id: int) -> str:
        data = self._table.bytes_of(token_id)
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = self._prefix + "".join(f"\\x{byte:02x}" for byte in data)
        self[token_id] = name
        return name


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable alphabet for bytes, character -> byte: bytes that are printable Latin-1
    stand for themselves, the 68 others take U+0100 and up, in order (Radford et al. 2019)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in own}
    for i, b in enumerate(b for b in range(256) if b not in own):
        alphabet[chr(0x100 + i)] = b
    return alphabet


class _Decoder:
    """Token string -> bytes, read from a tokenizer's decoder; one instance per build."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.alphabet: dict[str, int] | None = None
        self.byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.strip_start = 0
        decoder = spec.get("decoder")
        if decoder is None:
            # tokenizers joins tokens with spaces when there is no decoder: not a table.
            raise UnsupportedTokenizerError("the tokenizer has no decoder")
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            kind = step["type"]
            if kind == "ByteLevel":
                self.alphabet = _byte_alphabet()
            elif kind == "Replace" and "String" in step["pattern"]:
                self.replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "ByteFallback":
                self.byte_fallback = True
            elif kind == "Metaspace":
                self.replacements.append((step.get("replacement", "▁"), " "))
                if step.get("prepend_scheme", "always") != "never":
                    self.strip_start = 1
            elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
                self.strip_start = int(step["start"])
            elif kind != "Fuse":
                raise UnsupportedTokenizerError(f"the tokenizer's decoder step {kind!r}")
        if self.strip_start > 1:
            raise UnsupportedTokenizerError("a decoder that strips more than one leading space")

    def bytes_of(self, token: str) -> bytes:
        if self.alphabet is not None:
            codes = [self.alphabet.get(c) for c in token]
            if None not in codes:
                return bytes(c for c in codes if c is not None)
            return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass
        return token.encode()


def _fingerprint(spec_json: str) -> bytes:
    """Of the tokenizer alone: models that pad the same vocabulary differently share corpora."""
    return hashlib.sha256(f"{_FORMAT.version}:".encode() + spec_json.encode()).digest()


def build(tokenizer: Tokenizer, vocab_size: int | None = None) -> TokenBytes:
    """The table of a tokenizer, V = max(vocab_size, the tokenizer's own ids).

    vocab_size: the model's vocabulary, which may be padded above the tokenizer's. Raises
    UnsupportedTokenizerError for a decoder that is neither byte-level nor SentencePiece-like.
    """
    spec_json = tokenizer.to_str()
    spec = json.loads(spec_json)
    decoder = _Decoder(spec)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    size = max(max(vocab.values(), default=-1) + 1, vocab_size or 0)
    pieces = [b""] * size
    for token, token_id in vocab.items():
        pieces[token_id] = decoder.bytes_of(token)
    special = sorted(t["id"] for t in spec.get("added_tokens", ()) if t["special"])
    return _of(pieces, np.asarray(special, np.int64), decoder.strip_start, _fingerprint(spec_json))


def _of(
    pieces: Sequence[bytes], special_ids: npt.NDArray[np.int64], strip_start: int, digest: bytes
) -> TokenBytes:
    """The table of the bytes of each id."""
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    blob = np.frombuffer(b"".join(pieces), np.uint8)
    return TokenBytes(offsets, blob, special_ids, strip_start, digest)


def enriched(
    table: TokenBytes, ids: Sequence[int], parts: Sequence[Sequence[int]], fingerprint: str
) -> TokenBytes:
    """`table` with tokens of an adapter's own: ids[i] has the bytes of parts[i], one after another.

    fingerprint: of the enrichment (hex). The table's own fingerprint covers it, so that corpora of
    enriched ids and of base ids are never taken for each other.
    """
    size = max(table.vocab_size, max(ids, default=-1) + 1)
    pieces = [table.bytes_of(i) for i in range(size)]
    for token_id, token in zip(ids, parts, strict=True):
        pieces[token_id] = b"".join(table.bytes_of(part) for part in token)
    digest = hashlib.sha256(table.fingerprint + fingerprint.encode()).digest()
    return _of(pieces, table.special_ids, table.strip_start, digest)


def save(table: TokenBytes, path: str | Path) -> None:
    """Write the table atomically. Raises OSError."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "offsets": np.asarray(table.offsets, np.int64),
        "special_ids": np.asarray(table.special_ids, np.int64),
        "blob": table.blob,
    }
    meta = {"strip_start": table.strip_start}
    _FORMAT.write(path, arrays, fingerprint=table.fingerprint.hex(), meta=meta)


def open_table(path: str | Path) -> TokenBytes:
    """Memory-map a table written by `save`; pages are shared between processes.

    Raises ArrayFileError when the file is not a table of this version or is damaged, OSError when
    it cannot be read.
    """
    read = _FORMAT.read(path, fingerprint=None)
    strip_start, fingerprint = read.meta.get("strip_start"), read.meta["fingerprint"]
    if strip_start not in (0, 1) or not re.fullmatch("[0-9a-f]{64}", fingerprint):
        raise ArrayFileError(f"{path} is damaged: it does not say whose it is")
    return TokenBytes(
        read.arrays["offsets"],
        read.arrays["blob"],
        read.arrays["special_ids"],
        int(strip_start),
        bytes.fromhex(fingerprint),
        read,
        Path(path),
    )
