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

`enrich` is the paper's Algorithm 1: which output n-grams become tokens.

    V_0 = base vocabulary. Until the budget M is spent: collect all token n-grams, n <= n_max, of
    the task's outputs E under the current vocabulary; score f_merge = freq x (n - 1); take the
    best that was not tried; add it if its Prefix Collision Score is below alpha.

Ours beside it: a rarer n-gram than min_count is passed over, and the search goes on. What outputs
copy from their prompts (`copied`) is no part of a token: a model copies the ids that it reads, and
has to learn by heart whatever it writes in another. What is written seldom (`least`) is no token
at the end: a row learns from the outputs that it stands in alone.

PCS(t^n) is the probability, over E, that the string of the n-gram's last constituent is a proper
prefix of another token's string: with a tokenizer that matches strings, the new token would cut
such a token in two ("in|the" against "in|therapy"). Ids cannot be cut, but text that people write
by hand can be read both ways, and the test makes outputs no longer, so it is kept.

Where prompts are read in the tokens, too, a second pass finds what prompts repeat (`enrich`).

E are outputs *as they stand behind their prompts* (leading space, merges): mined bare, the same
tokens shorten an output half as much. After a merge only its surroundings are counted again.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import os
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

from drafters.atomic_file import replacing
from drafters.json_text import parsed
from vocab_store.errors import VocabStoreError

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
    _by_first: dict[int, list[tuple[tuple[int, ...], int]]] = field(
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
        object.__setattr__(self, "_parts_of", dict(zip(self.ids, self.parts, strict=True)))
        object.__setattr__(self, "_by_first", by_first)

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
        made = {**self.made, "budget": min(budget, len(self))}
        return replace(self, ids=self.ids[:budget], parts=self.parts[:budget], made=made)

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

        tokenizer: fingerprint (hex) that it must be made for. Raises VocabStoreError for a file
        that is damaged, of another version or of another tokenizer, and OSError.
        """
        try:
            body = parsed(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise VocabStoreError(f"{path}: no enrichment: {str(error)[:100]}") from None
        if not isinstance(body, dict) or body.get("kind") != _KIND:
            raise VocabStoreError(f"{path}: no enrichment (`tailor tasks enrich` makes one)")
        if body.get("version") != _VERSION:
            raise VocabStoreError(
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
            raise VocabStoreError(f"{path}: damaged: {str(error)[:100]}") from None
        if enrichment.hash != body.get("hash"):
            raise VocabStoreError(f"{path}: damaged: its hash is of other tokens")
        if tokenizer is not None and tokenizer != enrichment.tokenizer:
            raise VocabStoreError(
                f"{path}: made for another tokenizer ({enrichment.tokenizer[:16]}; this is "
                f"{tokenizer[:16]})"
            )
        return enrichment


# --- mining ---------------------------------------------------------------------------------------

Gram = tuple[int, ...]
Progress = Callable[[int, int], None]
"""(tokens found, budget), called after each token."""
_SHARE_OF_PROMPTS = 0.5
_NEARLY_ALL = 0.95


@dataclass(frozen=True, slots=True)
class EnrichSettings:
    """budget: M, the most tokens, 1 or more. n_max: longest n-gram of *current* tokens, 2 or more.
    alpha: the prefix collision score, above 0, that a token must stay below; above 1 switches the
    test off. min_count: an n-gram seen fewer times never becomes a token. least: a token that the
    texts hold fewer times, each in its fewest ids, is dropped again; the paper drops none."""

    budget: int = 500
    n_max: int = 4
    alpha: float = 0.02
    min_count: int = 2
    least: int = 0


class _Outputs:
    """The outputs under the current vocabulary, and the counts of their n-grams.

    Equal outputs are one entry with a weight. A symbol is a base id, or base_vocab_size + k for the
    k-th new token. barriers: ids that no token may hold (EOS and specials). min_count: rarer
    n-grams are counted and never popped. copied: of each output, the base ids that it may copy.
    """

    def __init__(
        self,
        outputs: Iterable[Sequence[int]],
        n_max: int,
        barriers: Collection[int],
        min_count: int,
        copied: Iterable[Collection[int]] = (),
    ) -> None:
        unique: dict[Gram, list[Collection[int]]] = {}
        for output, own in zip_longest(outputs, copied, fillvalue=()):
            unique.setdefault(tuple(int(i) for i in output), []).append(own)
        self.weights = list(map(len, unique.values()))
        self._copied = list(unique.values())  # of each text, by output that reads so
        self.unigrams: Counter[int] = Counter()
        self.num_tokens = 0
        self._texts: list[list[int]] = [list(text) for text in unique]
        self._counts: Counter[Gram] = Counter()
        self._heap: list[tuple[int, int, Gram]] = []  # (-f_merge, -length, n-gram), lazily stale
        # The texts that an n-gram stands in; one that it left may still be named.
        self._where: defaultdict[Gram, set[int]] = defaultdict(set)
        self._n_max = n_max
        self._min_count = min_count
        self._barriers = frozenset(barriers)
        for place, text in enumerate(self._texts):
            self._count(place, text, 1, self._counts)
        for gram in self._counts:
            self._push(gram)

    def _count(self, place: int, part: Sequence[int], sign: int, counts: Counter[Gram]) -> None:
        """Add what stands in a part of a text to the counts, or, with sign -1, take it off."""
        weight = self.weights[place] * sign
        for at in range(len(part)):
            for end in range(at + 1, min(at + self._n_max, len(part)) + 1):
                if part[end - 1] in self._barriers:
                    break
                if end - at > 1:
                    gram = tuple(part[at:end])
                    counts[gram] += weight
                    if sign > 0:
                        self._where[gram].add(place)
        for symbol in part:
            self.unigrams[symbol] += weight
        self.num_tokens += weight * len(part)

    def _push(self, gram: Gram) -> None:
        count = self._counts[gram]
        if count >= self._min_count:
            heapq.heappush(self._heap, (-count * (len(gram) - 1), -len(gram), gram))

    def pop(self) -> Gram | None:
        """The n-gram of the highest f_merge; None where none is left. It is given out again only
        after its count has changed."""
        while self._heap:
            negative, _, gram = heapq.heappop(self._heap)
            if -negative == self._counts[gram] * (len(gram) - 1):
                return gram
        return None

    def copies(self, gram: Gram, flat: Gram) -> bool:
        """Whether nearly all outputs that hold `gram` may copy some of its base ids, `flat`."""
        num = num_copied = 0
        for place in self._where[gram]:
            text, n = self._texts[place], len(gram)
            if any(tuple(text[at : at + n]) == gram for at in range(len(text) - n + 1)):
                num += self.weights[place]
                num_copied += sum(any(i in own for i in flat) for own in self._copied[place])
        return num_copied >= _NEARLY_ALL * num

    def merge(self, gram: Gram, symbol: int) -> None:
        """Replace `gram` by `symbol` everywhere, from the left."""
        changes: Counter[Gram] = Counter()
        n, near = len(gram), self._n_max - 1
        for place in sorted(self._where.pop(gram)):
            text, at = self._texts[place], 0
            while at <= len(text) - n:
                if text[at] == gram[0] and tuple(text[at : at + n]) == gram:
                    # Every n-gram that changes stands in these surroundings.
                    first, end = max(0, at - near), at + n + near
                    self._count(place, text[first:end], -1, changes)
                    text[at : at + n] = [symbol]
                    self._count(place, text[first : end - n + 1], 1, changes)
                at += 1
        for other, change in changes.items():
            if change:
                self._counts[other] += change
                self._push(other)


def _collision_score(outputs: _Outputs, string: bytes, strings: list[tuple[bytes, int]]) -> float:
    """PCS: the share of E's tokens that begin with the last constituent's string and go on.
    strings: of every symbol, ascending, so that those stand behind the string itself."""
    colliding, at = 0, bisect_right(strings, string, key=itemgetter(0))
    while at < len(strings) and strings[at][0].startswith(string):
        colliding += outputs.unigrams[strings[at][1]]
        at += 1
    return colliding / max(1, outputs.num_tokens)


def enrich(
    outputs: Iterable[Sequence[int]],
    piece: Callable[[int], bytes],
    *,
    tokenizer: str,
    base_vocab_size: int,
    settings: EnrichSettings | None = None,
    barriers: Collection[int] = (),
    reserved_ids: Sequence[int] = (),
    copied: Iterable[Collection[int]] = (),
    prompts: Iterable[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> Enrichment:
    """The tokens that Algorithm 1 finds in `outputs`, and then in `prompts`.

    outputs: base ids of each output, behind its prompt, EOS included. piece: the bytes of a base
    id. barriers: ids that are never part of a token (EOS and special ids). reserved_ids: ids of
    rows that the model has and never uses; they are given out first, in this order. copied: of each
    output the base ids that it may copy from its prompt (`may_copy`); none: it copies none.
    prompts: base ids of each prompt, for a model that reads them in its tokens, too; their n-grams
    follow those of the outputs, beyond the budget, where half of the prompts hold them: the task's
    own words, not what is asked. progress: see Progress. Equal f_merge: the longer n-gram, then the
    smaller ids. Raises ValueError for outputs without a single n-gram that occurs min_count times,
    or `least` times.
    """
    settings = settings or EnrichSettings()

    def numbered(parts: Sequence[Gram], made: Mapping[str, Any]) -> Enrichment:
        num_reserved = min(len(reserved_ids), len(parts))
        ids = [*reserved_ids[:num_reserved]]
        ids += range(base_vocab_size, base_vocab_size + len(parts) - num_reserved)
        reads = prompts is not None
        return Enrichment(tokenizer, base_vocab_size, tuple(ids), tuple(parts), made, reads)

    def found(
        texts: Sequence[Sequence[int]], at_least: int, copyable: Iterable[Collection[int]]
    ) -> tuple[list[Gram], dict[str, Any]]:
        state = _Outputs(texts, settings.n_max, barriers, at_least, copyable)
        told = progress if texts is written else None
        parts, figures = _mine(state, piece, base_vocab_size, settings, told)
        while seldom := _seldom(numbered(parts, {}), texts, at_least if settings.least else 0):
            parts = [part for part in parts if part not in seldom]
        return parts, figures

    written = list(outputs)
    often = max(settings.min_count, settings.least)
    own, figures = found(written, often, copied)
    if not own:
        raise ValueError(f"no n-gram occurs {often} times and may become a token")
    parts, made = own, asdict(settings) | figures
    if prompts is not None:
        texts = list(prompts)
        read, _ = found(texts, max(often, math.ceil(_SHARE_OF_PROMPTS * len(texts))), ())
        parts = list(dict.fromkeys([*own, *read]))
        made["of_prompts"] = len(parts) - len(own)
    return numbered(parts, made)


def may_copy(prompts: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """Of each prompt the ids that an output may copy: all but those that nearly all prompts hold,
    which are the task's own words."""
    each = [frozenset(prompt) for prompt in prompts]
    holding = Counter(i for ids in each for i in ids)
    return [frozenset(i for i in ids if holding[i] < _NEARLY_ALL * len(each)) for ids in each]


def _seldom(enrichment: Enrichment, texts: Sequence[Sequence[int]], least: int) -> set[Gram]:
    """The seldomest third of the tokens that the texts, in the fewest ids, hold fewer times than
    `least`: without these, others are written more often."""
    if not least:
        return set()
    uses = Counter(i for text in texts for i in enrichment.segment(text))
    few = sorted((i for i in enrichment.ids if uses[i] < least), key=lambda i: uses[i])
    return {enrichment.parts_of(i) for i in few[: math.ceil(len(few) / 3)]}


def _mine(
    state: _Outputs,
    piece: Callable[[int], bytes],
    base_vocab_size: int,
    settings: EnrichSettings,
    progress: Progress | None,
) -> tuple[list[Gram], dict[str, Any]]:
    """Algorithm 1 over texts: the base ids of the tokens that were found, in this order, and
    figures. The other parameters: see `enrich`."""
    num_before = state.num_tokens
    parts: list[Gram] = []

    def expanded(symbol: int) -> Gram:
        return (symbol,) if symbol < base_vocab_size else parts[symbol - base_vocab_size]

    def string(symbol: int) -> bytes:
        return b"".join(map(piece, expanded(symbol)))

    strings = sorted((string(symbol), symbol) for symbol in state.unigrams)
    num_rejected = 0
    tried: set[Gram] = set()
    while len(parts) < settings.budget and (gram := state.pop()) is not None:
        if gram in tried:
            continue
        tried.add(gram)
        if _collision_score(state, string(gram[-1]), strings) >= settings.alpha:
            num_rejected += 1
            continue
        flat = tuple(i for symbol in gram for i in expanded(symbol))
        if state.copies(gram, flat):
            continue
        # Never the parts of another token: equal base ids between two borders that no merge has
        # crossed are merged alike everywhere.
        symbol = base_vocab_size + len(parts)
        parts.append(flat)
        insort(strings, (string(symbol), symbol))
        state.merge(gram, symbol)
        if progress is not None:
            progress(len(parts), settings.budget)
    num = max(1, sum(state.weights))
    return parts, {
        "outputs": sum(state.weights),
        "base_ids_per_output": num_before / num,
        "ids_per_output": state.num_tokens / num,
        "rejected": num_rejected,
    }
