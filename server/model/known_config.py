"""Keeps in the cache folder what transformers makes of a config.json.

Importing transformers and its model takes seconds and a hundred megabytes; what a CPU needs of it
is a ModelShape, the names and shapes of the weights, and the tables of the rotation. They are kept
by the sha256 of the config, of transformers' version and of our own code that reads configs, so
that a change of any of them uses transformers again. A read-only cache only costs time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.array_file import ArrayFileError, Column, read_arrays, write_arrays
from drafters.atomic_file import EVERYBODY, replacing
from drafters.json_text import parsed
from server.model import families, shape, supported
from server.model.cache_folder import cache_dir
from server.model.families import WeightNames
from server.model.shape import ModelShape

__all__ = ["KnownConfig", "find", "keep", "keep_ropes", "last_token_id"]

Float32 = npt.NDArray[np.float32]

_ROPES = "rope tables"

_CONFIG_KEYS = (
    "eos_token_id", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "tie_word_embeddings", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownConfig:
    """config: those attributes of transformers' config that a ModelFolder is asked for. shape: as
    shape_of gives it. expected: name -> shape of the weights."""

    key: str
    config: Any
    shape: ModelShape
    expected: Mapping[str, tuple[int, ...]]

    def ropes(self, num_positions: int) -> tuple[Float32, Float32] | None:
        """rope_tables of at least so many positions, when they are kept: mapped, because tables
        of a long context are larger than what is ever read of them."""
        size = (len(self.shape.rope_layer_types), "positions", self.shape.rotary_dim // 2)
        try:
            read = read_arrays(
                _file(self.key, "ropes"), kind=_ROPES, version=1, fingerprint=self.key,
                columns=dict.fromkeys(("cos", "sin"), Column("float32", size)),
            )  # fmt: skip
        except (OSError, ArrayFileError):
            return None
        cos, sin = read.arrays["cos"], read.arrays["sin"]
        if cos.shape[1] < num_positions:
            return None
        # With `longrope`, tables of more positions than the usual are other ones.
        usual = self.shape.max_position_embeddings
        if (cos.shape[1] > usual) != (num_positions > usual):
            return None
        return cos, sin


def find(raw: Mapping[str, Any]) -> KnownConfig | None:
    """The KnownConfig of a config.json with these values, or None."""
    key = _key(raw)
    try:
        plain = _read(key)
        own = {name: _tuples(value) for name, value in plain["shape"].items()}
        names = WeightNames(**{k: _tuples(v) for k, v in plain["shape"]["names"].items()})
        return KnownConfig(
            key=key,
            config=SimpleNamespace(**plain["config"]),
            shape=ModelShape(**{**own, "names": names}),
            expected={name: tuple(size) for name, size in plain["expected"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(raw: Mapping[str, Any], config: Any, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Keep what transformers said of a config that is supported."""
    plain = {
        "config": {name: getattr(config, name, None) for name in _CONFIG_KEYS},
        "shape": dataclasses.asdict(shape.shape_of(config)),
        "expected": {name: list(size) for name, size in expected.items()},
    }
    _write(_key(raw), plain)


def keep_ropes(raw: Mapping[str, Any], ropes: tuple[Float32, Float32]) -> None:
    """Keep tables that rope_tables made."""
    key, (cos, sin) = _key(raw), ropes
    with suppress(OSError):
        write_arrays(
            _file(key, "ropes"), kind=_ROPES, version=1, fingerprint=key, meta={},
            arrays={"cos": cos, "sin": sin}, mode=EVERYBODY,
        )  # fmt: skip


def last_token_id(tokenizer_file: Path, fingerprint: str) -> int:
    """The highest id that a tokenizer.json knows, -1 for none; kept by the file's sha256, because
    the tokenizer takes five times its file's size to read."""
    key = f"{fingerprint[:32]}-ids"
    try:
        return int(_read(key))
    except (OSError, ValueError, TypeError):
        pass
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


def _file(key: str, suffix: str) -> Path:
    return cache_dir() / "configs" / f"{key}.{suffix}"


def _read(key: str) -> Any:
    """What `_write` kept. A ModelShape says what compiled code indexes: it is checked, not trusted.

    Raises OSError, ValueError.
    """
    digest, _, told = _file(key, "json").read_bytes().partition(b"\n")
    if hashlib.sha256(told).hexdigest().encode() != digest:
        raise ValueError(f"{key}.json is damaged")
    return parsed(told)


def _write(key: str, plain: Any) -> None:
    file, told = _file(key, "json"), json.dumps(plain).encode()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, EVERYBODY) as out:
            out.write(hashlib.sha256(told).hexdigest().encode() + b"\n" + told)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
