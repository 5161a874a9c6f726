"""A model folder, opened: its config, its fingerprint, and its weights one tensor at a time.

    folder = open_model("smollm2-135m-instruct", adapter="adapters/massive")
    folder.weights.get("model.layers.0.self_attn.q_proj.weight")   # read from the file, merged
    module = build_module(folder, torch.float32, torch.device("cpu"))

Nothing here holds two copies of a model. The safetensors files are mapped into memory and read
tensor by tensor; a LoRA is merged into each tensor as it is read; `build_module` makes
transformers' own model on the meta device and puts the weights in one after the other, so the peak
is one copy and one tensor. The CPU runner reads through the same WeightReader.

Only architectures that are on the allow-list, with configs whose every switch we compute, are
opened; the rest is refused with the reason. A wrong answer is worse than none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from server.errors import IntegrityError, ModelError, UnsupportedModelError
from server.model.catalog import Report, cache_dir, model_folder, sha256_of
from server.model.supported import ARCHITECTURES, check_raw, check_supported

__all__ = [
    "ARCHITECTURES",
    "LoraAdapter",
    "ModelFolder",
    "WeightReader",
    "build_module",
    "check_supported",
    "open_model",
]

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


# --- LoRA -----------------------------------------------------------------------------------------

# What a plain LoRA's adapter_config.json may hold without changing W + scale * B @ A.
_LORA_PLAIN_KEYS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# These initialisations change the base weights, so the adapter alone does not tell the model.
_LORA_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraAdapter:
    """A PEFT LoRA (Hu et al. 2021, arXiv 2106.09685): per weight W, delta = scale * B @ A.

    scale = alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732); r and
    alpha per module where rank_pattern and alpha_pattern say so. Everything else that PEFT can put
    into an adapter is refused by its name. Raises ModelError and UnsupportedModelError.
    """

    def __init__(self, folder: Path, *, tied: bool) -> None:
        self.folder = folder
        config_file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        if not config_file.is_file():
            raise ModelError(f"adapter {folder} holds no adapter_config.json")
        if not weights.is_file():
            raise ModelError(
                f"adapter {folder} holds no adapter_model.safetensors (.bin files are not read)"
            )
        self.files = (config_file, weights)
        config = _read_json(config_file)
        self._check(config)
        self._config = config
        self._reader = _open_safetensors(weights)
        self._pairs: dict[str, tuple[str, str]] = {}
        keys = set(self._reader.keys())
        unused = set(keys)
        for key in sorted(keys):
            match = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", key)
            if match is None:
                continue
            other = f"base_model.model.{match[1]}.lora_B.weight"
            if other not in keys:
                raise ModelError(f"adapter {folder}: {key} has no lora_B")
            self._pairs[f"{match[1]}.weight"] = (key, other)
            unused -= {key, other}
        if unused:
            raise UnsupportedModelError(
                f"adapter {folder}: {sorted(unused)[0]} is no LoRA of a linear layer"
            )
        if not self._pairs:
            raise ModelError(f"adapter {folder} changes nothing")
        if EMBEDDING in self._pairs or (tied and HEAD in self._pairs):
            raise UnsupportedModelError(
                f"adapter {folder}: a LoRA on the embedding or on a tied head is not supported"
            )

    def _check(self, config: Mapping[str, Any]) -> None:
        def refuse(reason: str) -> None:
            raise UnsupportedModelError(f"adapter {self.folder} is not supported: {reason}")

        if config.get("peft_type") != "LORA":
            refuse(f"peft_type is {config.get('peft_type')!r} and not 'LORA'")
        if config.get("bias", "none") != "none":
            refuse(f"it trains biases (bias: {config['bias']})")
        init = config.get("init_lora_weights", True)
        if isinstance(init, str) and init.lower().startswith(_LORA_CHANGED_BASE):
            refuse(f"init_lora_weights {init!r} changes the base weights")
        for key, value in sorted(config.items()):
            if value and key not in _LORA_PLAIN_KEYS and key != "bias":
                refuse(f"{key} is set")

    def names(self) -> set[str]:
        """Names of the weights it changes, as the base model's state dict has them."""
        return set(self._pairs)

    def scale(self, name: str) -> float:
        """The factor of B @ A for one weight."""
        module = name.removesuffix(".weight")
        rank = self._of_pattern("rank_pattern", module, self._config["r"])
        alpha = self._of_pattern("alpha_pattern", module, self._config["lora_alpha"])
        stored = self._reader.get_slice(self._pairs[name][0]).get_shape()[0]
        if stored != rank:
            raise ModelError(f"adapter {self.folder}: {name} has rank {stored}, config says {rank}")
        return float(alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank)

    def _of_pattern(self, key: str, module: str, default: float) -> float:
        """PEFT's rule: the first pattern that matches the end of the module's name."""
        patterns: Mapping[str, float] = self._config.get(key) or {}
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless the adapter fits a weight of this shape, rank and all."""
        a, b = (tuple(self._reader.get_slice(key).get_shape()) for key in self._pairs[name])
        self.scale(name)
        if (len(a), len(b)) != (2, 2) or a[0] != b[1] or (b[0], a[1]) != shape:
            raise ModelError(
                f"adapter {self.folder}: {name} is {list(shape)} in the model, and {list(b)} x "
                f"{list(a)} in the adapter"
            )

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [out, in] with the adapter added, in float32. The sum is rounded nowhere else.

        The order of operations is that of PEFT's merge, so in float32 the bits are the same.
        """
        key_a, key_b = self._pairs[name]
        a = self._reader.get_tensor(key_a).float()  # [r, in]
        b = self._reader.get_tensor(key_b).float()  # [out, r]
        merged: torch.Tensor = weight.float() + (b @ a) * self.scale(name)
        return merged


# --- weights --------------------------------------------------------------------------------------


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path}: {str(error)[:200]}") from None


class WeightReader:
    """The tensors of a model folder by name, read when asked for. Opened by `open_model`.

    Names are those of transformers' state dict. With tied embeddings the head is the embedding.
    Not closed explicitly, the mapped files go with the object.
    """

    def __init__(
        self, files: Sequence[Path], *, tied: bool, adapter: LoraAdapter | None = None
    ) -> None:
        self._tied = tied
        self._adapter = adapter
        self._readers: list[Any] = []
        self._where: dict[str, tuple[int, str]] = {}
        for file in files:
            reader = _open_safetensors(file)
            for stored in reader.keys():  # noqa: SIM118 (no mapping)
                if stored.endswith(".rotary_emb.inv_freq"):  # old checkpoints; recomputed
                    continue
                name = stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"
                if name in self._where:
                    raise ModelError(f"{file}: {name} is in two files")
                self._where[name] = (len(self._readers), stored)
            self._readers.append(reader)
        if tied:
            self._where.pop(HEAD, None)

    def names(self) -> tuple[str, ...]:
        """All names, `lm_head.weight` included when it is tied."""
        names = list(self._where)
        if self._tied:
            names.append(HEAD)
        return tuple(sorted(names))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it. Raises KeyError."""
        reader, stored = self._locate(name)
        return tuple(reader.get_slice(stored).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype, or in float32 where an adapter is merged.

        A view of the mapped file where nothing is merged: read-only by contract, paged in by use.
        Raises KeyError for an unknown name and RuntimeError after close().
        """
        reader, stored = self._locate(name)
        tensor: torch.Tensor = reader.get_tensor(stored)
        if self._adapter is not None and name in self._adapter.names():
            tensor = self._adapter.merged(name, tensor)
        return tensor

    def _locate(self, name: str) -> tuple[Any, str]:
        if not self._readers:
            raise RuntimeError("the weights are closed")
        if self._tied and name == HEAD:
            name = EMBEDDING
        index, stored = self._where[name]
        return self._readers[index], stored

    def close(self) -> None:
        """Let go of the files. Tensors that were read stay valid. Idempotent."""
        self._readers.clear()


# --- a folder -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """An opened model.

    path: the folder. config: transformers' config, checked by `check_supported`.
    fingerprint: sha256 (hex) over config, weights and adapter; equal means equal outputs.
    tokenizer_file: tokenizer.json. tokenizer_fingerprint: its sha256.
    eos_token_ids: every id of config.json and generation_config.json that ends a text, ascending.
    weights: the tensors.
    """

    path: Path
    config: Any
    fingerprint: str
    tokenizer_file: Path
    tokenizer_fingerprint: str
    eos_token_ids: tuple[int, ...]
    weights: WeightReader

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model says it is in; float32 when it does not say."""
        value = getattr(self.config, "dtype", None)
        return value if isinstance(value, torch.dtype) else torch.float32

    @property
    def max_position_embeddings(self) -> int:
        """The longest context that the model was made for, in tokens."""
        return int(self.config.max_position_embeddings)


def open_model(
    name_or_path: str | Path,
    adapter: str | Path | None = None,
    *,
    wheel_dir: Path | None = None,
    report: Report | None = None,
) -> ModelFolder:
    """Open a model: a built-in name, a folder, a GGUF file or a Hugging Face id.

    adapter: folder of a PEFT LoRA to merge.
    Raises ModelError (missing files, wrong shapes), IntegrityError and UnsupportedModelError.
    """
    from transformers import AutoConfig

    path = model_folder(str(name_or_path), wheel_dir=wheel_dir, report=report)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json")
    raw = _read_json(path / "config.json")
    check_raw(raw)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}/config.json: {str(error)[:300]}") from None
    check_supported(config)
    tokenizer_file = path / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ModelError(
            f"{path} holds no tokenizer.json; save the tokenizer once with transformers' "
            "AutoTokenizer(...).save_pretrained to get one"
        )
    files = _weight_files(path)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    lora = None if adapter is None else LoraAdapter(Path(adapter).expanduser(), tied=tied)
    weights = WeightReader(files, tied=tied, adapter=lora)
    _check_complete(path, config, weights, lora)
    return ModelFolder(
        path=path,
        config=config,
        fingerprint=_fingerprint(raw, files, () if lora is None else lora.files),
        tokenizer_file=tokenizer_file,
        tokenizer_fingerprint=sha256_of(tokenizer_file),
        eos_token_ids=_eos_token_ids(path, config),
        weights=weights,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _weight_files(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
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


def _check_complete(
    path: Path, config: Any, weights: WeightReader, adapter: LoraAdapter | None
) -> None:
    """Compare names and shapes with what transformers' own class expects."""
    expected = {
        name: tuple(value.shape) for name, value in _meta_module(config).state_dict().items()
    }
    names = set(weights.names())
    missing, extra = sorted(set(expected) - names), sorted(names - set(expected))
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} tensors, first {missing[0]}")
    if extra:
        raise UnsupportedModelError(f"{path} has tensors that are not computed, first {extra[0]}")
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise ModelError(f"{path}: {name} is {weights.shape(name)}, the config says {shape}")
    if adapter is not None:
        unknown = sorted(adapter.names() - set(expected))
        if unknown:
            raise ModelError(f"adapter {adapter.folder} changes {unknown[0]}, which is not there")
        for name in adapter.names():
            adapter.check(name, expected[name])


def _eos_token_ids(path: Path, config: Any) -> tuple[int, ...]:
    ids: set[int] = set()
    sources = [getattr(config, "eos_token_id", None)]
    if (path / "generation_config.json").is_file():
        sources.append(_read_json(path / "generation_config.json").get("eos_token_id"))
    for value in sources:
        for token_id in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(token_id, int) and 0 <= token_id < config.vocab_size:
                ids.add(token_id)
    return tuple(sorted(ids))


def _fingerprint(
    raw_config: Mapping[str, Any], weights: Sequence[Path], adapter: Sequence[Path]
) -> str:
    """sha256 over the config (less what only names its origin) and the hashes of all files."""
    kept = {
        k: v for k, v in raw_config.items() if k not in ("transformers_version", "_name_or_path")
    }
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for kind, files in (("weights", weights), ("adapter", adapter)):
        for file in files:
            digest.update(f"\n{kind} {_remembered_sha256(file)}".encode())
    return digest.hexdigest()


def _remembered_sha256(path: Path) -> str:
    """sha256 of a file, kept in the cache folder by (path, size, mtime, inode).

    Hashing reads every byte, a second per gigabyte or two, at every start; a file that was hashed
    and has not changed since is not read again.
    """
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
    store = cache_dir() / "sha256.json"
    try:
        known = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if isinstance(known, dict) and isinstance(known.get(key), str):
        return str(known[key])
    value = sha256_of(path)
    known = known if isinstance(known, dict) else {}
    known = dict(list(known.items())[-200:]) | {key: value}
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=".sha256-", dir=store.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1)
        os.replace(scratch, store)
    except OSError:  # a read-only cache only costs the next start a second
        pass
    return value


# --- transformers' own module ---------------------------------------------------------------------


def _meta_module(config: Any) -> nn.Module:
    """transformers' model for `config` with all parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        module: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return module


def build_module(
    folder: ModelFolder,
    dtype: torch.dtype,
    device: torch.device,
    *,
    skip: Sequence[str] = (),
) -> nn.Module:
    """transformers' own model with the folder's weights, for inference, without a second copy.

    dtype, device: of the parameters. Buffers go to the device in their own dtype (rotary
        frequencies stay float32, as transformers keeps them).
    skip: names that stay on the meta device, for a caller that keeps them elsewhere (the embedding
        table in CPU memory, an LM head of its own).
    """
    module = _meta_module(folder.config)
    tied = bool(getattr(folder.config, "tie_word_embeddings", False))
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if name in skip or (tied and name == HEAD):
            continue
        owner_name, _, leaf = name.rpartition(".")
        tensor = folder.weights.get(name).to(device=device, dtype=dtype)
        if tuple(tensor.shape) != tuple(parameter.shape):
            raise ModelError(f"{name} is {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
        # A view of the mapped file would change under us when the file does: own the memory.
        if tensor.device.type == "cpu":
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        owner = module.get_submodule(owner_name)
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    if tied and HEAD not in skip:
        head: Any = module.get_submodule("lm_head")
        head.weight = module.get_parameter(EMBEDDING)
    for owner in module.modules():
        for leaf, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, leaf, buffer.to(device))
    return module.eval()
