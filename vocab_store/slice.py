"""VocabSlice: the sorted ids that an LM head computes (in which rows they lie: slice_cache.py).

VocabTailor (arXiv 2508.15229, section 3): the head on the device holds T, a static set per task,
and I_i, the ids of request i's prompt. Here the set is frozen at admission as a function of the
request and the pinned profile only (docs/DESIGN.md section 6), so no result depends on other
requests or on what a cache happens to hold. Ids stay global everywhere; only the head and the
sampler see columns.

Faults of the paper's public code that this module excludes:
- pad columns are zeros and win when every logit is negative: here a runner makes them -inf;
- ids are unsorted, so ties are broken differently: ids are ascending, and columns in their order;
- an EOS id outside the slice never stops: `RequiredIds.check` refuses such a map by name;
- T is copied for every request: SliceCacheIndex loads a task's T once, shared by its requests;
- batch 1 only: one cached union, a column list for each sequence.

Pure data: no weights here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from drafters.atomic_file import EVERYBODY, replacing
from vocab_store.errors import VocabStoreError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer[Any]] | Iterable[int]

_PLACEHOLDERS = re.compile(rb"<unused\d+>|<\|reserved_special_token_\d+\|>")
"""Gemma's and Llama 3's special tokens that only reserve a number and are never written: Gemma 3
marks 6,242 so, 2.4 % of V."""


class TokenTexts(Protocol):
    """What vocab_store needs to know of a tokenizer. The server's TokenBytes table is one.

    vocab_size: ids 0..V-1; fingerprint: bytes that differ between tokenizers; special_ids: int64,
    ascending; bytes_of: an id's text as bytes, b"" for an id that no token has.
    """

    @property
    def fingerprint(self) -> bytes: ...

    @property
    def special_ids(self) -> Int64: ...

    @property
    def vocab_size(self) -> int: ...

    def bytes_of(self, token_id: int) -> bytes: ...


def _sorted_ids(ids: Ids, vocab_size: int) -> Int32:
    """Ascending unique int32 copy, read-only. Raises IndexError for an id outside [0, V)."""
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if array.size == 0:
        array = np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"ids must be flat integers, not {array.dtype} {list(array.shape)}")
    array = np.unique(array)
    if array.size and (array[0] < 0 or array[-1] >= vocab_size):
        wrong = int(array[0]) if array[0] < 0 else int(array[-1])
        raise IndexError(f"token id {wrong} is outside the vocabulary of {vocab_size} tokens")
    result = array.astype(np.int32)
    result.flags.writeable = False
    return result


def _find(ids: Int32, wanted: npt.NDArray[np.integer[Any]]) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """(where each of `wanted` stands in ascending unique ids, or would; whether it does)."""
    at = np.searchsorted(ids, wanted)
    found = at < ids.shape[0]
    found[found] = ids[at[found]] == wanted[found]
    return at, found


def _merge(base: Int32, extra: Int32) -> Int32:
    """Union of two ascending unique arrays, in O(len(base)); `base` itself if nothing is new."""
    at, known = _find(base, extra)
    if known.all():
        return base
    merged: Int32 = np.insert(base, at[~known], extra[~known])
    merged.flags.writeable = False
    return merged


@dataclass(frozen=True, slots=True)
class RequiredIds:
    """Ids that every slice of a model holds: without them it cannot stop or write every text.

    kinds: "EOS", every EOS id of the generation config; "special", the tokenizer's special tokens;
    "byte", tokens of exactly one byte, the last resort for any text (byte-level alphabets and
    SentencePiece's <0xNN>). Each int32, ascending. ids: their union.
    """

    vocab_size: int
    kinds: Mapping[str, Int32]
    ids: Int32

    @classmethod
    def of(
        cls, vocab_size: int, *, eos_ids: Ids, special_ids: Ids = (), byte_ids: Ids = ()
    ) -> RequiredIds:
        """From plain ids. Raises ValueError without any EOS id, IndexError for an id outside."""
        given = {"EOS": eos_ids, "special": special_ids, "byte": byte_ids}
        kinds = {kind: _sorted_ids(ids, vocab_size) for kind, ids in given.items()}
        if kinds["EOS"].size == 0:
            raise ValueError("a slice needs at least one EOS id: without one nothing ever stops")
        return cls(vocab_size, kinds, reduce(_merge, kinds.values()))

    @classmethod
    def from_tokens(cls, tokens: TokenTexts, eos_ids: Ids) -> RequiredIds:
        """The required ids of a tokenizer. An EOS id is required whatever its text."""
        num = tokens.vocab_size
        special = [
            int(i)
            for i in tokens.special_ids
            if not _PLACEHOLDERS.fullmatch(tokens.bytes_of(int(i)))
        ]
        return cls.of(
            num,
            eos_ids=eos_ids,
            special_ids=special,
            byte_ids=[i for i in range(num) if len(tokens.bytes_of(i)) == 1],
        )

    def with_own(self, ids: Ids) -> RequiredIds:
        """These and the ids of tokens of a model's own. Raises IndexError for an id outside."""
        return replace(self, ids=_merge(self.ids, _sorted_ids(ids, self.vocab_size)))

    def check(self, ids: Int32) -> None:
        """Refuse a map (ascending ids) that lacks any required id.

        Raises VocabStoreError naming the kind and the ids; EOS ids first, because without them an
        answer never stops.
        """
        for kind, wanted in self.kinds.items():
            missing = np.setdiff1d(wanted, ids, assume_unique=True)
            if missing.size:
                shown = ", ".join(map(str, missing[:8].tolist()))
                more = f" and {missing.size - 8} more" if missing.size > 8 else ""
                raise VocabStoreError(
                    f"the vocabulary map lacks {kind} token ids {shown}{more}: "
                    "a model cut to it could not stop or could not write every text"
                )


@dataclass(frozen=True, slots=True, eq=False)
class VocabSlice:
    """The ids that an LM head computes: a frozen, ascending, unique set within a vocabulary.

    ids: int32 [n], read-only. A slice's *position* (or column) of an id is its index in `ids`, so
    that the lowest position among ties is the lowest id, as in the full head.
    """

    ids: Int32
    vocab_size: int

    @classmethod
    def make(cls, ids: Ids, required: RequiredIds) -> VocabSlice:
        """A slice of exactly these ids. Raises VocabStoreError when required ones are absent."""
        result = cls(_sorted_ids(ids, required.vocab_size), required.vocab_size)
        required.check(result.ids)
        return result

    def union(self, *others: Ids) -> VocabSlice:
        """A slice with further ids; self when nothing is new. Of T, the ids of a request, fixed at
        admission: equal arguments give equal slices whatever else runs. `exact` adds missed ids so.

        Raises IndexError for an id outside the vocabulary.
        """
        merged = self.ids
        for ids in others:
            merged = _merge(merged, _sorted_ids(ids, self.vocab_size))
        return self if merged is self.ids else VocabSlice(merged, self.vocab_size)

    @property
    def num_ids(self) -> int:
        return int(self.ids.shape[0])

    @property
    def share(self) -> float:
        """Of the vocabulary, in 0..1."""
        return self.num_ids / self.vocab_size

    def positions(self, token_ids: npt.NDArray[np.integer[Any]] | Sequence[int]) -> Int32:
        """Global -> local: the position of each id, -1 for an id outside the slice."""
        at, found = _find(self.ids, np.asarray(token_ids, np.int64))
        return np.where(found, at, -1).astype(np.int32)

    def __contains__(self, token_id: int) -> bool:
        at = int(np.searchsorted(self.ids, token_id))
        return at < self.num_ids and int(self.ids[at]) == token_id


MAP_NAME = "vocab_map.safetensors"
INFO_NAME = "reduced_vocab.json"


def export_vocab_map(slice_: VocabSlice, folder: str | os.PathLike[str]) -> None:
    """Write the reduced vocabulary that TensorRT-Edge-LLM reads ("Vocabulary Reduction", custom
    mapping) into `folder` (made if absent). Dynamic rows have no place in this form.

    vocab_map.safetensors: one tensor "vocab_map", int32 [n], the ids kept, ascending, EOS among
    them. reduced_vocab.json: {"vocab_size": V, "reduced_vocab_size": n}, further keys allowed.
    """
    from safetensors.numpy import save

    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    with replacing(root / MAP_NAME, EVERYBODY) as out:
        out.write(save({"vocab_map": np.ascontiguousarray(slice_.ids, np.int32)}))
    info = {"vocab_size": slice_.vocab_size, "reduced_vocab_size": slice_.num_ids}
    (root / INFO_NAME).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
