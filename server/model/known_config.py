"""Keeps what transformers makes of a config.json, in the cache folder, or beside a config.json that
was converted here, so that not even the first start behind it asks transformers.

Importing transformers and its model takes seconds and a hundred megabytes; what a CPU needs of it
is a ModelShape, the names and shapes of the weights, and the tables of the rotation. They are kept
by the sha256 of the config, of transformers' version and of our own code that reads configs, so
that a change of any of them uses transformers again. A read-only cache only costs time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from drafters.array_file import ArrayFileError, ArrayFormat, Column
from drafters.atomic_file import EVERYBODY, replacing
from server.model import families, shape, supported
from server.model.cache_folder import cache_dir, remembered_sha256
from server.model.shape import ModelShape

Float32 = npt.NDArray[np.float32]
Read = TypeVar("Read")

_ROPES = ArrayFormat(
    "rope tables",
    1,
    dict.fromkeys(("cos", "sin"), Column("float32", ("types", "positions", "numbers"))),
)

_CONFIG_KEYS = (
    "eos_token_id", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "tie_word_embeddings", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownConfig:
    """config: those attributes of transformers' config that a ModelFolder is asked for, by name.
    shape: as shape_of gives it. expected: name -> shape of the weights."""

    config: dict[str, Any]
    shape: ModelShape
    expected: Mapping[str, tuple[int, ...]]


def find(raw: Mapping[str, Any], folder: Path | None = None) -> KnownConfig | None:
    """The KnownConfig of a config.json with these values, of this folder, or None."""
    for place in (folder, None):
        with suppress(OSError, ValueError):
            return _read(_key(raw), KnownConfig, place)
    return None


def find_ropes(
    raw: Mapping[str, Any], shape: ModelShape, num_positions: int, folder: Path | None = None
) -> tuple[Float32, Float32] | None:
    """rope_tables of at least so many positions, when they are kept: mapped, because tables of a
    long context are larger than what is ever read of them."""
    key, size = _key(raw), (len(shape.rope_layer_types), shape.rotary_dim // 2)
    for place in (folder, None):
        with suppress(OSError, ArrayFileError):
            read = _ROPES.read(_file(key, "ropes", place), fingerprint=key)
            cos, sin = read.arrays["cos"], read.arrays["sin"]
            # With `longrope`, tables of more positions than the usual are other ones.
            usual = shape.max_position_embeddings
            is_long = num_positions > usual
            fits = cos.shape[1] >= num_positions and (cos.shape[1] > usual) == is_long
            if fits and cos.shape[::2] == size:
                return cos, sin
    return None


def keep(
    raw: Mapping[str, Any],
    config: Any,
    expected: Mapping[str, tuple[int, ...]],
    place: Path | None = None,
) -> None:
    """Keep what transformers said of a config that is supported, in the cache or another folder."""
    own = {name: getattr(config, name, None) for name in _CONFIG_KEYS}
    _write(_key(raw), KnownConfig(own, shape.shape_of(config), expected), place)


def keep_ropes(
    raw: Mapping[str, Any], ropes: tuple[Float32, Float32], place: Path | None = None
) -> None:
    """Keep tables that rope_tables made."""
    key, (cos, sin) = _key(raw), ropes
    with suppress(OSError):
        file = _file(key, "ropes", place)
        _ROPES.write(file, {"cos": cos, "sin": sin}, fingerprint=key, mode=EVERYBODY)


def last_token_id(tokenizer_file: Path) -> int:
    """The highest id that a tokenizer.json knows, -1 for none; kept by the file's sha256, because
    the tokenizer takes five times its file's size to read."""
    key = f"{remembered_sha256(tokenizer_file)[:32]}-ids"
    with suppress(OSError, ValueError):
        return _read(key, int)
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(tokenizer_file)).get_vocab(with_added_tokens=True)
    last: int = max(known.values(), default=-1)
    _write(key, last)
    return last


def _key(raw: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
    digest.update(importlib.metadata.version("transformers").encode())
    for module in (families, shape, supported):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:32]


def _file(key: str, suffix: str, place: Path | None = None) -> Path:
    return (place or cache_dir() / "configs") / f"{key}.{suffix}"


def _read(key: str, kind: type[Read], place: Path | None = None) -> Read:
    """What `_write` kept. A ModelShape says what compiled code indexes: it is checked, not trusted.

    Raises OSError, ValueError.
    """
    import msgspec  # here: loadtest/gpu_check.py runs where it is not

    digest, _, told = _file(key, "json", place).read_bytes().partition(b"\n")
    if hashlib.sha256(told).hexdigest().encode() != digest:
        raise ValueError(f"{key}.json is damaged")
    return msgspec.json.decode(told, type=kind)


def _write(key: str, plain: Any, place: Path | None = None) -> None:
    import msgspec

    file, told = _file(key, "json", place), msgspec.json.encode(plain)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, EVERYBODY) as out:
            out.write(hashlib.sha256(told).hexdigest().encode() + b"\n" + told)
