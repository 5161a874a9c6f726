"""Static vocabulary pruning ("VP"): VocabTailor's baseline, which cuts the tokenizer as well.

Not used for serving. A pruned tokenizer writes the same texts with other, more ids: prompts no
longer look as the model learned them, which is what breaks it (arXiv 2508.15229, table 2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vocab_store.documents import Example
from vocab_store.errors import VocabStoreError
from vocab_store.slice import RequiredIds, VocabSlice


def static_pruning_ids(examples: Sequence[Example], required: RequiredIds) -> VocabSlice:
    """The paper's "VP": every id of the corpus, inputs and outputs, and the required ones."""
    seen = np.zeros(required.vocab_size, bool)
    seen[required.ids] = True
    for example in examples:
        seen[example.input_ids] = True
        seen[example.output_ids] = True
    return VocabSlice.make(np.flatnonzero(seen), required)


def close_under_merges(tokenizer_json: str, ids: npt.NDArray[np.integer[Any]]) -> list[int]:
    """ids and every part that a BPE merges on the way to them; ascending.

    Without the parts a kept token is never written: "the" needs "th" or "he" in between. All
    merges that make a token are followed, as which of them runs depends on what stands around
    it: so a text whose ids are all in `ids` keeps its ids exactly.
    """
    vocab, merges = _bpe(json.loads(tokenizer_json)["model"])
    parts: dict[int, set[int]] = {}
    for left, right in merges:
        parts.setdefault(vocab[left + right], set()).update((vocab[left], vocab[right]))
    closed: set[int] = set()
    waiting = [int(i) for i in ids]
    while waiting:
        token_id = waiting.pop()
        if token_id not in closed:
            closed.add(token_id)
            waiting.extend(parts.get(token_id, ()))
    return sorted(closed)


def _bpe(model: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    if model.get("type") != "BPE":
        raise VocabStoreError(f"cannot prune a {model.get('type')} tokenizer, only BPE")
    pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
    return model["vocab"], [(left, right) for left, right in pairs]


def prune_tokenizer(tokenizer_json: str, keep: VocabSlice) -> tuple[str, npt.NDArray[np.int32]]:
    """A BPE tokenizer cut to `keep`: (its JSON, old id of each new id int32 [n]).

    New ids are the ranks of the kept old ones, so rows of embedding and head are cut to
    `keep.ids`. A merge stays when both its parts and its result do: close `keep` under merges
    first (close_under_merges), or kept tokens are never written. Special
    tokens must be in `keep` (RequiredIds has them); those that are not vanish.

    Raises VocabStoreError for a tokenizer that is not BPE.
    """
    spec: dict[str, Any] = json.loads(tokenizer_json)
    model = spec["model"]
    old_vocab, old_merges = _bpe(model)
    new_id = {int(old): new for new, old in enumerate(keep.ids)}
    vocab = {token: new_id[i] for token, i in old_vocab.items() if i in new_id}
    model["vocab"] = vocab
    model["merges"] = [
        [left, right]
        for left, right in old_merges
        if left in vocab and right in vocab and left + right in vocab
    ]
    spec["added_tokens"] = [
        {**token, "id": new_id[token["id"]]}
        for token in spec.get("added_tokens", ())
        if token["id"] in new_id
    ]
    post = spec.get("post_processor")
    for step in post.get("processors", [post]) if post else ():
        for token in step.get("special_tokens", {}).values():
            token["ids"] = [new_id[i] for i in token["ids"]]
    return json.dumps(spec), keep.ids
