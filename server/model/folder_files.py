"""What a model folder holds beside its config: weights, ids that end a text, a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server.errors import ModelError
from server.model.adapter import read_json
from server.model.cache_folder import remembered_sha256

__all__ = ["eos_token_ids", "fingerprint_of", "weight_files"]


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder. Raises ModelError."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: holds no weight_map")
        files = tuple(path / str(name) for name in sorted(set(weight_map.values())))
        for file in files:
            if file.parent != path or not file.is_file():
                raise ModelError(f"{index} names {file.name}, which is not there")
        return files
    if (path / "model.safetensors").is_file():
        return (path / "model.safetensors",)
    raise ModelError(f"{path} holds no model.safetensors (.bin files are not read: they are code)")


def eos_token_ids(path: Path, sources: list[Any], vocab_size: int) -> tuple[int, ...]:
    """Every id that ends a text, ascending: of the sources and of generation_config.json."""
    ids: set[int] = set()
    if (path / "generation_config.json").is_file():
        sources = [*sources, read_json(path / "generation_config.json").get("eos_token_id")]
    for value in sources:
        for token_id in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(token_id, int) and 0 <= token_id < vocab_size:
                ids.add(token_id)
    return tuple(sorted(ids))


def fingerprint_of(
    raw_config: Mapping[str, Any], weights: Sequence[Path], adapter: Sequence[Path]
) -> str:
    """sha256 over the config (less what only names its origin) and the hashes of all files."""
    kept = {
        k: v for k, v in raw_config.items() if k not in ("transformers_version", "_name_or_path")
    }
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for kind, files in (("weights", weights), ("adapter", adapter)):
        for file in files:
            digest.update(f"\n{kind} {remembered_sha256(file)}".encode())
    return digest.hexdigest()
