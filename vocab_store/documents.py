"""Documents that a profile is made from: read, tokenized in pairs, and hashed."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drafters.json_text import parsed
from vocab_store.errors import VocabStoreError

Int32 = npt.NDArray[np.int32]
Progress = Callable[[str, int, int | None], None]
"""(stage, done, total or None), called now and then."""

TICK = 256
"""Documents between two calls of a Progress."""


class Example(NamedTuple):
    """One document: the ids of its prompt and of its output. int32, flat."""

    input_ids: Int32
    output_ids: Int32


def read_pairs(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """(prompt, completion) of each line of a JSONL file; blank lines are skipped.

    Raises VocabStoreError naming file and line when one is no object with these two strings.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parsed(line)
                pair = row["prompt"], row["completion"]
            except (ValueError, KeyError, TypeError) as error:
                raise VocabStoreError(
                    f"{path}:{number}: no JSON object with prompt and completion"
                ) from error
            if not (isinstance(pair[0], str) and isinstance(pair[1], str)):
                raise VocabStoreError(f"{path}:{number}: prompt and completion must be strings")
            yield pair


def tokenize_pairs(
    pairs: Sequence[tuple[str, str]],
    tokenizer: Any,
    *,
    joint: str = " ",
    progress: Progress | None = None,
) -> list[Example]:
    """Documents in ids, each output tokenized *in place after its prompt*.

    tokenizer: a tokenizers.Tokenizer (not imported here; only encode_batch_fast is used).
    joint: put between prompt and completion where neither brings a blank. An output is what the
    whole text's ids hold after their common start with the prompt's, so that a token merged over
    the border counts as output.
    """
    result: list[Example] = []
    for start in range(0, len(pairs), TICK):
        some = pairs[start : start + TICK]
        prompts = [prompt for prompt, _ in some]
        whole = [
            prompt
            + ("" if not prompt or prompt[-1].isspace() or out[:1].isspace() else joint)
            + out
            for prompt, out in some
        ]
        heads, texts = tokenizer.encode_batch_fast(prompts), tokenizer.encode_batch_fast(whole)
        for head, text in zip(heads, texts, strict=True):
            a, b = np.asarray(head.ids, np.int32), np.asarray(text.ids, np.int32)
            num = min(a.shape[0], b.shape[0])
            differs = np.flatnonzero(a[:num] != b[:num])
            result.append(Example(a, b[int(differs[0]) if differs.size else num :]))
        if progress is not None:
            progress("tokenize", len(result), len(pairs))
    return result


def corpus_hash(examples: Iterable[Example]) -> str:
    """sha256 over the documents' lengths and ids, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(struct.pack("<II", len(example.input_ids), len(example.output_ids)))
        digest.update(np.ascontiguousarray(example.input_ids, "<i4").tobytes())
        digest.update(np.ascontiguousarray(example.output_ids, "<i4").tobytes())
    return digest.hexdigest()
