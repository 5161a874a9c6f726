"""From a GGUF to a folder in transformers' form: config and tokenizer, and its weights as floats.

It makes the files that both kinds of folders have, the one that a GGUF is served from as it is and
the one of float32 copies. Where folders lie and who makes them: catalog.py, gguf_folder.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.errors import UnsupportedModelError
from server.model.gguf_config import config_values
from server.model.gguf_file import HEAD, GgufWeights
from server.model.gguf_index import GgufIndex
from server.model.gguf_tokenizer import convert_tokenizer, eos_ids, gguf_fields
from server.model.wheels import Report

__all__ = ["describe", "write_floats"]

_SHARD_BYTES = 2 << 30
"""The largest file of weights; one is held in memory while it is made."""


def describe(gguf: Path, out: Path, report: Report) -> tuple[Any, Mapping[str, tuple[int, ...]]]:
    """Write config, generation config and tokenizer of a GGUF into `out`.

    Returns (transformers' config, name -> shape of the weights that its model has). Raises
    UnsupportedModelError for an architecture, a switch or a tokenizer that is not read, ModelError
    and IntegrityError.
    """
    import torch
    import transformers

    index = GgufIndex(gguf)
    values = config_values(index, gguf.name)
    index.check_layers()
    fields = gguf_fields(index)
    kind = values.pop("model_type")
    try:
        config: Any = transformers.AutoConfig.for_model(kind, **values)
        with torch.device("meta"):  # nothing is allocated: sizes are compared first
            model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # its own checks, and whatever its classes do with odd values
        raise UnsupportedModelError(
            f"{gguf.name}: transformers refuses what the file says: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from None
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config._name_or_path = ""
    name = index.fields.get("general.name")
    if name is not None:
        config._model_name_or_path = str(name)
    generation: Any = transformers.GenerationConfig.from_model_config(config)
    eos = eos_ids(fields)
    if eos:
        config.eos_token_id = eos[0]
        generation.eos_token_id = eos[0] if len(eos) == 1 else eos
    generation._from_model_config = False
    config.save_pretrained(out)
    generation.save_pretrained(out)
    convert_tokenizer(fields, out, gguf.name, report)
    return config, {name: tuple(value.shape) for name, value in model.state_dict().items()}


def write_floats(
    gguf: Path, config: Any, expected: Mapping[str, tuple[int, ...]], out: Path
) -> None:
    """Write the weights of a GGUF into `out` as float32 safetensors.

    float32 because a dequantised value (an integer times an fp16 scale, plus an fp16 minimum) has
    more bits than bfloat16 or float16 keep. config, expected: as `describe` gives them.
    """
    weights = GgufWeights(gguf, config, expected)
    part: dict[str, npt.NDArray[np.float32]] = {}
    parts: list[list[str]] = []
    size = 0
    for name in sorted(expected):
        if name == HEAD and config.tie_word_embeddings:
            continue
        values = weights.floats(name)
        if part and size + values.nbytes > _SHARD_BYTES:
            parts.append(_save(part, out, len(parts)))
            part, size = {}, 0
        part[name] = values
        size += values.nbytes
    parts.append(_save(part, out, len(parts)))
    weights.close()
    _name_shards(parts, out)


def _save(part: Mapping[str, npt.NDArray[np.float32]], out: Path, number: int) -> list[str]:
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(values) for name, values in part.items()}
    save_file(whole, out / f"part{number}", metadata={"format": "pt"})
    return list(part)


def _name_shards(parts: list[list[str]], out: Path) -> None:
    """The names that transformers gives to one file, or to several and their index."""
    if len(parts) == 1:
        (out / "part0").rename(out / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        (out / f"part{number}").rename(out / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
