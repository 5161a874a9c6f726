"""The reduced-vocabulary form that TensorRT-Edge-LLM reads.

Its documentation ("Vocabulary Reduction", custom mapping) says: a folder with
  vocab_map.safetensors  one tensor "vocab_map", int32 [reduced_vocab_size]: the original ids kept,
                         ascending, EOS among them;
  reduced_vocab.json     {"vocab_size": V, "reduced_vocab_size": n}, further keys allowed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from drafters.atomic_file import EVERYBODY, replacing
from vocab_store.slice import VocabSlice

MAP_NAME = "vocab_map.safetensors"
INFO_NAME = "reduced_vocab.json"
_TENSOR = "vocab_map"


def export_vocab_map(slice_: VocabSlice, folder: str | os.PathLike[str]) -> None:
    """Write both files into `folder` (made if absent). Dynamic rows have no place in this form."""
    from safetensors.numpy import save

    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    with replacing(root / MAP_NAME, EVERYBODY) as out:
        out.write(save({_TENSOR: np.ascontiguousarray(slice_.ids, np.int32)}))
    info = {"vocab_size": slice_.vocab_size, "reduced_vocab_size": slice_.num_ids}
    (root / INFO_NAME).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
