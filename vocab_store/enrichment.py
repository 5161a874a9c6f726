"""An enrichment: tokens that a task adds to its model's vocabulary, each a tuple of base ids.

TASC-ft (arXiv 2602.24174, section 4) adds a task's frequent output n-grams to the tokenizer. Here
they are added to the *ids* and the tokenizer stays as it is: a prompt keeps its ids, prompt caches
and requests for the base model are not touched, and half characters, stop strings and streaming
work through the bytes of the parts. The paper's way, `add_tokens`, cuts inside base tokens and
changes the ids of every prompt; `tailor tasks enrich --export` writes it for other programs.

    enrichment = Enrichment.load("massive.enrichment.json")
    short = enrichment.segment(ids)          # the fewest ids that spell the same base ids
    assert enrichment.expand(short) == ids   # exact, always

File: one JSON object {"kind", "version", "tokenizer", "base_vocab_size", "ids", "parts", "prompts",
"made", "hash"}. The hash covers the tokenizer, the ids and the parts, so that corpora and adapters
can name the enrichment that their ids belong to; it also covers prompts where that is true.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafters.atomic_file import replacing
from drafters.json_text import parsed
from vocab_store.errors import EnrichmentFileError

_KIND = "tailor enrichment"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Enrichment:
    """Tokens of a task's own over a base vocabulary.

    tokenizer: fingerprint of the base tokenizer (hex). base_vocab_size: rows of the base model's
    embedding. ids[i]: the id of token i; rows that the model reserved and never used come first,
    then base_vocab_size, base_vocab_size + 1, ... parts[i]: the base ids that token i stands for,
    two or more, in the order in which the tokens were found. made: how it was made, for people.
    prompts: the model reads its prompts in these tokens, too, as in the paper. Raises ValueError
    for tokens that do not fit these rules.
    """

    tokenizer: str
    base_vocab_size: int
    ids: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    made: Mapping[str, Any] = field(default_factory=dict)
    prompts: bool = False
    _parts_of: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _by_first: dict[int, tuple[tuple[tuple[int, ...], int], ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.parts):
            raise ValueError(f"{len(self.ids)} ids for {len(self.parts)} tokens")
        if len(set(self.ids)) != len(self.ids) or len(set(self.parts)) != len(self.parts):
            raise ValueError("a token or an id stands twice")
        own = set(self.ids)
        new = sorted(i for i in self.ids if i >= self.base_vocab_size)
        if new != list(range(self.base_vocab_size, self.base_vocab_size + len(new))):
            raise ValueError("new ids must follow the base vocabulary without a gap")
        by_first: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for token_id, parts in zip(self.ids, self.parts, strict=True):
            if token_id < 0 or len(parts) < 2:
                raise ValueError(f"token {token_id} has {len(parts)} parts")
            for part in parts:
                if not 0 <= part < self.base_vocab_size or part in own:
                    raise ValueError(f"token {token_id}: part {part} is no id of the base")
            by_first.setdefault(parts[0], []).append((parts, token_id))
        longest_first = {
            first: tuple(sorted(found, key=lambda entry: (-len(entry[0]), entry[1])))
            for first, found in by_first.items()
        }
        object.__setattr__(self, "_parts_of", dict(zip(self.ids, self.parts, strict=True)))
        object.__setattr__(self, "_by_first", longest_first)

    def __len__(self) -> int:
        """M: the number of tokens."""
        return len(self.ids)

    @property
    def vocab_size(self) -> int:
        """Rows of the enriched embedding: the base's, and one for each id above them."""
        return self.base_vocab_size + sum(i >= self.base_vocab_size for i in self.ids)

    @property
    def hash(self) -> str:
        """sha256 (hex) of tokenizer, ids and parts: what the ids mean."""
        body = [self.tokenizer, self.base_vocab_size, self.ids, self.parts]
        body += ["prompts"] if self.prompts else []
        return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()

    def parts_of(self, token_id: int) -> tuple[int, ...]:
        """The base ids of any id; a base id is its own only part."""
        return self._parts_of.get(token_id, (token_id,))

    def expand(self, token_ids: Iterable[int]) -> list[int]:
        """Base ids that spell the same bytes. The inverse of `segment`."""
        return [part for token_id in token_ids for part in self.parts_of(token_id)]

    def segment(self, base_ids: Sequence[int]) -> list[int]:
        """The fewest ids that stand for `base_ids`; of several such, the longest token first.

        A shortest path by dynamic programming from the end (Viterbi): O(n x tokens that begin with
        an id). Never longer than `base_ids`.
        """
        given = tuple(base_ids)
        num = len(given)
        fewest = [0] * (num + 1)
        choice: list[tuple[int, int]] = [(0, 0)] * num  # (id, number of base ids)
        for at in range(num - 1, -1, -1):
            best, chosen = fewest[at + 1] + 1, (given[at], 1)
            for parts, token_id in self._by_first.get(given[at], ()):
                length = len(parts)
                if given[at : at + length] != parts:
                    continue
                total = fewest[at + length] + 1
                if total < best or (total == best and length > chosen[1]):
                    best, chosen = total, (token_id, length)
            fewest[at], choice[at] = best, chosen
        out: list[int] = []
        at = 0
        while at < num:
            token_id, length = choice[at]
            out.append(token_id)
            at += length
        return out

    def read(self, base_ids: Sequence[int]) -> list[int]:
        """A prompt of base ids as the model reads it: as it is, or in these tokens (`prompts`)."""
        return self.segment(base_ids) if self.prompts else list(base_ids)

    def first(self, budget: int) -> Enrichment:
        """The enrichment with only the first `budget` tokens that were found."""
        return Enrichment(
            self.tokenizer,
            self.base_vocab_size,
            self.ids[:budget],
            self.parts[:budget],
            dict(self.made) | {"budget": min(budget, len(self))},
            self.prompts,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically, for its owner to read: it spells parts of the data. Raises
        OSError."""
        body = {
            "kind": _KIND,
            "version": _VERSION,
            "tokenizer": self.tokenizer,
            "base_vocab_size": self.base_vocab_size,
            "hash": self.hash,
            "prompts": self.prompts,
            "made": dict(self.made),
            "ids": self.ids,
            "parts": self.parts,
        }
        text = json.dumps(body, separators=(",", ":")) + "\n"
        with replacing(path) as out:
            out.write(text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, tokenizer: str | None = None) -> Enrichment:
        """Read a file that `save` wrote.

        tokenizer: fingerprint (hex) that it must be made for. Raises EnrichmentFileError for a file
        that is damaged, of another version or of another tokenizer, and OSError.
        """
        try:
            body = parsed(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise EnrichmentFileError(f"{path}: no enrichment: {str(error)[:100]}") from None
        if not isinstance(body, dict) or body.get("kind") != _KIND:
            raise EnrichmentFileError(f"{path}: no enrichment (`tailor tasks enrich` makes one)")
        if body.get("version") != _VERSION:
            raise EnrichmentFileError(
                f"{path}: version {str(body.get('version'))[:20]}; this program reads {_VERSION}"
            )
        try:
            enrichment = cls(
                str(body["tokenizer"]),
                int(body["base_vocab_size"]),
                tuple(int(i) for i in body["ids"]),
                tuple(tuple(int(i) for i in parts) for parts in body["parts"]),
                dict(body.get("made", {})),
                body.get("prompts", False) is True,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EnrichmentFileError(f"{path}: damaged: {str(error)[:100]}") from None
        if enrichment.hash != body.get("hash"):
            raise EnrichmentFileError(f"{path}: damaged: its hash is of other tokens")
        if tokenizer is not None and tokenizer != enrichment.tokenizer:
            raise EnrichmentFileError(
                f"{path}: made for another tokenizer ({enrichment.tokenizer[:16]}; this is "
                f"{tokenizer[:16]})"
            )
        return enrichment
