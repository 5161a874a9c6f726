"""Documents that a profile is made from, in ids, and their hash."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Progress = Callable[[str, int, int | None], None]
"""(stage, done, total or None), called now and then."""

TICK = 256
"""Documents between two calls of a Progress."""


class Example(NamedTuple):
    """One document: the ids of its prompt and of its output. int32, flat."""

    input_ids: Int32
    output_ids: Int32


def corpus_hash(examples: Iterable[Example]) -> str:
    """sha256 over the documents' lengths and ids, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(struct.pack("<II", len(example.input_ids), len(example.output_ids)))
        digest.update(np.ascontiguousarray(example.input_ids, "<i4").tobytes())
        digest.update(np.ascontiguousarray(example.output_ids, "<i4").tobytes())
    return digest.hexdigest()
