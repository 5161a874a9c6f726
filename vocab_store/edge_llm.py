"""The reduced-vocabulary form that TensorRT-Edge-LLM reads and writes.

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
from drafters.json_text import parsed
from vocab_store.errors import ProfileFileError
from vocab_store.slice import RequiredIds, VocabSlice

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


def import_vocab_map(folder: str | os.PathLike[str], required: RequiredIds) -> VocabSlice:
    """Read a map made for a model with these required ids. reduced_vocab.json may be absent.

    The form carries no tokenizer fingerprint: only V can be checked.

    Raises ProfileFileError naming the file when the tensor is absent, not int32 or int64, not
    ascending, or of another V; MissingIdsError when EOS, special or byte ids are not inside.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path, info_path = Path(folder) / MAP_NAME, Path(folder) / INFO_NAME
    try:
        tensors = load_file(str(path))
    except SafetensorError as error:
        raise ProfileFileError(f"{path}: {error}") from error
    ids = tensors.get(_TENSOR)
    if ids is None or ids.ndim != 1 or ids.dtype not in (np.int32, np.int64):
        raise ProfileFileError(f"{path}: no flat int32 tensor {_TENSOR!r}")
    if ids.size and (np.diff(ids) <= 0).any():
        raise ProfileFileError(f"{path}: the ids are not ascending and unique")
    if info_path.exists():
        info = parsed(info_path.read_text(encoding="utf-8"))
        if info.get("vocab_size") != required.vocab_size:
            raise ProfileFileError(
                f"{info_path}: for {info.get('vocab_size')} tokens, the model has "
                f"{required.vocab_size}"
            )
        if info.get("reduced_vocab_size") != ids.size:
            raise ProfileFileError(
                f"{info_path}: says {info.get('reduced_vocab_size')} ids, the map holds {ids.size}"
            )
    if ids.size and (ids[0] < 0 or ids[-1] >= required.vocab_size):
        raise ProfileFileError(f"{path}: ids outside the {required.vocab_size} of the model")
    return VocabSlice.make(ids, required)
