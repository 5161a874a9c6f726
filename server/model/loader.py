"""A model folder, opened: its config, its fingerprint, and its weights one tensor at a time.

    folder = open_model("smollm2-135m-instruct", adapter="adapters/massive")
    folder.weights.get("model.layers.0.self_attn.q_proj.weight")   # read from the file, merged
    module = build_module(folder, torch.float32, torch.device("cpu"))

A model is never in memory twice. The safetensors files are mapped into memory and read
tensor by tensor; a LoRA is merged into each tensor as it is read; `build_module` makes
transformers' own model on the meta device and puts the weights in one after the other, so the peak
is one copy and one tensor. The CPU runner reads through the same WeightReader. Importing this
imports no torch: a GGUF that is served as it is needs none.

Only architectures on the allow-list, with configs whose every switch we compute, and dense decoders
of transformers that call its attention interface (generic.py) are opened. Others are refused with
the reason, because a wrong answer is worse than none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from server.errors import ModelError, TailorError, UnsupportedModelError
from server.model import known_config
from server.model.adapter import EMBEDDING, HEAD, LoraAdapter, open_safetensors, read_json
from server.model.cache_folder import origin_of, remembered_sha256
from server.model.catalog import gguf_of, model_folder
from server.model.families import family_of
from server.model.generic import WRAPPERS, is_generic
from server.model.gguf_file import GgufWeights
from server.model.known_config import KnownConfig
from server.model.nf4 import PARTS, STATE, Nf4, read_nf4
from server.model.shape import ModelShape, rope_tables, shape_of
from server.model.supported import check_raw, check_supported
from vocab_store.enrichment import Enrichment
from vocab_store.profile import eos_ids

if TYPE_CHECKING:
    import torch
    from torch import nn


# --- weights --------------------------------------------------------------------------------------


def _full_name(stored: str) -> str | None:
    """A text checkpoint's name as the state dict has it; base models leave `model.` out. None: an
    old checkpoint's rotary table, which is computed."""
    if stored.endswith(".rotary_emb.inv_freq"):
        return None
    return stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"


def _text_name(stored: str) -> str | None:
    """The language model's name of a multimodal checkpoint's tensor; None = not of its text part.

    Two layouts exist: `language_model.model.layers...` and `model.language_model.layers...`.
    """
    for prefix, name in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if stored.startswith(prefix):
            return name + stored.removeprefix(prefix)
    if stored in (HEAD, f"language_model.{HEAD}"):
        return HEAD
    return None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of transformers' state dict. full: from a name in a file; None = not read. embedding,
    head: of the two tables."""

    full: Callable[[str], str | None] = _full_name
    embedding: str = EMBEDDING
    head: str = HEAD


def _generic_names(config: Any, is_wrapped: bool) -> TensorNames:
    """The names of a model of the generic path, renamed as transformers renames old ones."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    module: Any = _meta_module(config)
    where = {id(part): name for name, part in module.named_modules()}
    tables = (module.get_input_embeddings(), module.get_output_embeddings())
    if None in tables:
        raise UnsupportedModelError(f"{type(module).__name__} has no embedding or no LM head")
    mapping = get_model_conversion_mapping(module, add_legacy=False)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    expected = module.state_dict()
    ignored = (r"rotary_emb\.inv_freq$", *(module._keys_to_ignore_on_load_unexpected or ()))

    def full(stored: str) -> str | None:
        name, _ = rename_source_key(stored, renamings, [], module.base_model_prefix, expected)
        is_ignored = any(re.search(pattern, name) for pattern in ignored)
        return None if is_ignored and name not in expected else str(name)

    embedding, head = (f"{where[id(table)]}.weight" for table in tables)
    return TensorNames(_text_name if is_wrapped else full, embedding, head)


class WeightReader:
    """The tensors of a model folder by name, read when asked for. Opened by `open_model`.

    Names are those of transformers' state dict. With tied embeddings the head is the embedding.
    NF4 weights of bitsandbytes (nf4.py) are floats here. The files are unmapped with the object.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        tied: bool,
        adapter: LoraAdapter | None = None,
        tensor_names: TensorNames,
    ) -> None:
        self.tensor_names = tensor_names
        self._tied = tied
        self._adapter = adapter
        self._where: dict[str, tuple[Any, str]] = {}  # in which file, under which name
        self._parts: dict[str, Any] = {}  # of NF4 weights, by stored name
        for file in files:
            reader = open_safetensors(file)
            for stored in reader.keys():  # noqa: SIM118 (no mapping)
                if stored.endswith(PARTS):
                    self._parts[stored] = reader
                    continue
                name = tensor_names.full(stored)
                if name is None:
                    continue
                if name in self._where:
                    raise ModelError(f"{file}: {name} is in two files")
                self._where[name] = reader, stored
        if tied:
            self._where.pop(self.tensor_names.head, None)

    def names(self) -> tuple[str, ...]:
        """All names, the head's included when it is tied."""
        names = list(self._where)
        if self._tied:
            names.append(self.tensor_names.head)
        return tuple(sorted(names))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it. Raises KeyError, and UnsupportedModelError
        for one that is neither floats nor NF4."""
        reader, stored = self._locate(name)
        narrow, found = self.nf4(name), reader.get_slice(stored)
        if narrow is None and not found.get_dtype().startswith(("F", "BF")):
            raise UnsupportedModelError(f"{stored} is stored as {found.get_dtype()}, not as floats")
        shape = tuple(found.get_shape()) if narrow is None else narrow.shape
        if self._adapter is not None and name in (EMBEDDING, HEAD):
            shape = (self._adapter.num_rows(shape[0]), *shape[1:])
        return shape

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype, or in float32 where an adapter is merged.

        A view of the mapped file where nothing is merged: read-only by contract, paged in by use; a
        copy where an adapter has rows in the table. Raises KeyError for an unknown name.
        """
        reader, stored = self._locate(name)
        narrow, tensor = self.nf4(name), None
        if narrow is None:
            tensor = reader.get_tensor(stored)
        else:
            import torch

            tensor = narrow.widened(0, narrow.shape[0], torch.float32)
        adapter = self._adapter
        if adapter is None:
            return tensor
        if name in adapter.names():
            tensor = adapter.merged(name, tensor)
        return adapter.table(name, tensor) if adapter.changes_table(name) else tensor

    def nf4(self, name: str) -> Nf4 | None:
        """A weight as it is stored, where that is NF4. Raises KeyError, and ModelError for one that
        is not whole."""
        reader, stored = self._locate(name)
        if f"{stored}{STATE}" not in self._parts:
            return None
        readers = {**self._parts, stored: reader}
        return read_nf4(stored, lambda part: readers[part].get_tensor(part))

    def _locate(self, name: str) -> tuple[Any, str]:
        """(in which file, the tensor's name there)."""
        if self._tied and name == self.tensor_names.head:
            name = self.tensor_names.embedding
        return self._where[name]


# --- a folder -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """An opened model.

    path: the folder. config: transformers' config, checked by `check_supported`.
    fingerprint: sha256 (hex) over config, weights and adapter; equal means equal outputs.
    tokenizer_file: tokenizer.json.
    eos_token_ids: every id of config.json and generation_config.json that ends a text, ascending.
    weights: the tensors. enrichment: of the adapter's own ids. known: the kept values of
    transformers' config; then `config` has only the attributes that this class reads.
    """

    path: Path
    config: Any
    fingerprint: str
    tokenizer_file: Path
    eos_token_ids: tuple[int, ...]
    weights: WeightReader | GgufWeights
    enrichment: Enrichment | None = None
    known: KnownConfig | None = None

    def shape(self) -> ModelShape:
        """Sizes and switches of the model."""
        return shape_of(self.config) if self.known is None else self.known.shape

    def ropes(self, num_positions: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(cos, sin) of shape.rope_tables, kept for the next start."""
        raw, shape = _raw_config(self.path), self.shape()
        tables = known_config.find_ropes(raw, shape, num_positions, self.path)
        if tables is None:
            config = self.config if self.known is None else _config(self.path)
            tables = rope_tables(config, shape, num_positions)
            known_config.keep_ropes(raw, tables)
        return tables

    @property
    def floats(self) -> WeightReader:
        """The weights as torch tensors. Raises UnsupportedModelError for a GGUF as it is."""
        if isinstance(self.weights, GgufWeights):
            raise UnsupportedModelError(
                f"{self.path} holds a GGUF as it is, for CPUs; `tailor models fetch --form "
                "float32` makes a copy in floats"
            )
        return self.weights

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the model's config; float32 where it has none."""
        import torch

        value = getattr(self.config, "dtype", None)
        return value if isinstance(value, torch.dtype) else torch.float32

    @property
    def num_token_ids(self) -> int:
        """Ids that have a text; rows past them pad the tables and are never drawn."""
        last = known_config.last_token_id(self.tokenizer_file)
        if self.enrichment is not None:
            last = max(last, *self.enrichment.ids)
        return min(int(self.config.vocab_size), last + 1)


def open_model(
    name_or_path: str | Path,
    adapter: str | Path | None = None,
    *,
    remembers: bool = False,
) -> ModelFolder:
    """Open a model: a built-in name, a folder, a GGUF file or a Hugging Face id.

    adapter: folder of a PEFT LoRA to merge. remembers: what transformers makes of the config is
    taken from the cache where it is kept, without importing transformers; not for build_module.
    Raises ModelError (missing files, wrong shapes), IntegrityError and UnsupportedModelError.
    """
    path = model_folder(str(name_or_path))
    try:
        return _open(path, adapter, remembers)
    except TailorError:
        raise
    except Exception as error:  # what transformers' classes do with odd values in config.json
        raise ModelError(
            f"{path}/config.json: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def _open(path: Path, adapter: str | Path | None, remembers: bool) -> ModelFolder:
    raw = _raw_config(path)
    known = known_config.find(raw, path) if remembers and adapter is None else None
    config: Any = _config(path) if known is None else SimpleNamespace(**known.config)
    eos = [getattr(config, "eos_token_id", None)]
    is_own = known is not None or not is_generic(raw)
    wrappers = family_of(raw).wrappers if is_own else WRAPPERS
    # Multimodal: its text part is what is opened.
    is_wrapped = known is None and raw["architectures"][0] in wrappers
    if is_wrapped:
        config = _text_config(raw, config)
        eos.append(getattr(config, "eos_token_id", None))
    if known is None:
        check_supported(config)
    tokenizer_file = path / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ModelError(
            f"{path} holds no tokenizer.json; save the tokenizer once with transformers' "
            "AutoTokenizer(...).save_pretrained to get one"
        )
    gguf, lora = gguf_of(path), None
    files = (gguf,) if gguf is not None else weight_files(path)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if adapter is not None:
        if gguf is not None:
            raise UnsupportedModelError(
                f"adapter {adapter} cannot be merged into {gguf.name} as it is; with `weights: "
                "int8` or floats it can"
            )
        lora = LoraAdapter(Path(adapter).expanduser(), tied=tied)
        config.vocab_size = lora.num_rows(int(config.vocab_size))
        config.tie_word_embeddings = tied and not lora.separate_head
    expected = _expected(config) if known is None else known.expected
    weights: WeightReader | GgufWeights
    if gguf is not None:
        weights = GgufWeights(gguf, config, expected)
    else:
        names = TensorNames(_text_name if is_wrapped else _full_name)
        if not is_own:
            names = _generic_names(config, is_wrapped)
        weights = WeightReader(files, tied=tied, adapter=lora, tensor_names=names)
    _check_complete(path, expected, weights, lora)
    if is_own and known is None:
        shape_of(config)  # what is no size in it raises here, and not in a running engine
    if remembers and known is None and lora is None and is_own and not is_wrapped:
        known_config.keep(raw, config, expected)
    return ModelFolder(
        path=path,
        config=config,
        fingerprint=fingerprint_of(raw, files, () if lora is None else lora.files),
        tokenizer_file=tokenizer_file,
        eos_token_ids=eos_token_ids(path, eos, int(config.vocab_size)),
        weights=weights,
        enrichment=None if lora is None else lora.enrichment,
        known=known,
    )


def _raw_config(path: Path) -> dict[str, Any]:
    """config.json of a folder, of a model that may be supported."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json")
    raw = read_json(path / "config.json")
    check_raw(raw)
    return raw


def _config(path: Path) -> Any:
    """A folder's config as transformers reads it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True)


def _expected(config: Any) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the weights that transformers' own class has."""
    state = _meta_module(config).state_dict()  # nothing is allocated before sizes are compared
    return {name: tuple(value.shape) for name, value in state.items()}


def _text_config(raw: Mapping[str, Any], config: Any) -> Any:
    """The language model's config of a multimodal checkpoint, complete in itself."""
    text = config.text_config
    name = raw["architectures"][0]
    text.architectures = [WRAPPERS[name] if name in WRAPPERS else family_of(raw).architecture]
    own = raw.get("text_config")
    own = own if isinstance(own, Mapping) else {}
    tied = own.get("tie_word_embeddings", getattr(config, "tie_word_embeddings", False))
    text.tie_word_embeddings = bool(tied)
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(config, "dtype", None)
    return text


def _check_complete(
    path: Path,
    expected: Mapping[str, tuple[int, ...]],
    weights: WeightReader | GgufWeights,
    adapter: LoraAdapter | None,
) -> None:
    """Compare names and shapes with those that are expected."""
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
        adapter.check(expected)


# --- transformers' own module ---------------------------------------------------------------------


def _meta_module(config: Any) -> nn.Module:
    """transformers' model for `config` with all parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights  # which takes longer than all else

    with no_init_weights(), init_empty_weights(include_buffers=False):
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
    import torch

    module = _meta_module(folder.config)
    tied = bool(getattr(folder.config, "tie_word_embeddings", False))
    weights = folder.weights
    names = getattr(weights, "tensor_names", TensorNames())
    absent = {*skip, names.head} if tied else set(skip)
    state = {}
    for name in module.state_dict():  # parameters, and constants that are saved
        if name in absent:
            continue
        raw = weights.floats(name) if isinstance(weights, GgufWeights) else weights.get(name)
        tensor = torch.as_tensor(raw).to(device=device, dtype=dtype)
        # A view of the mapped file would change with the file: copy it.
        if tensor.device.type == "cpu":
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        state[name] = tensor
    module.load_state_dict(state, strict=False, assign=True)
    if tied and names.head not in skip:
        head: Any = module.get_submodule(names.head.rpartition(".")[0])
        head.weight = module.get_parameter(names.embedding)
    for owner in module.modules():
        for leaf, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, leaf, buffer.to(device))
    return module.requires_grad_(False).eval()


def finish_module(module: nn.Module, num_positions: int = 0) -> nn.Module:
    """Make a module's rotation the same for all positions; for TorchRunner only.

    longrope (Phi) has the short factors, or the long ones where num_positions, the length that was
    asked for, is beyond the original context (families.position_limit): looking at the positions
    would stop the host at every step.
    """
    rotary: Any = getattr(module.base_model, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) == "longrope":
        last = max(num_positions, 1) - 1
        rotary(rotary.inv_freq, rotary.inv_freq.new_full((1, 1), last).long())
        rotary.rope_type = "default"
    return module


# -- What a folder holds beside its config --------------------------------------------------------


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder. Raises ModelError."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: holds no weight_map")
        files = tuple(path / name for name in sorted(set(map(str, weight_map.values()))))
        for file in files:
            if file.parent != path or not file.is_file():
                raise ModelError(f"{index} names {file.name}, which is not there")
        return files
    if (path / "model.safetensors").is_file():
        return (path / "model.safetensors",)
    raise ModelError(f"{path} holds no model.safetensors (.bin files are not read: they are code)")


def eos_token_ids(path: Path, sources: list[Any], vocab_size: int) -> tuple[int, ...]:
    """Every id that ends a text, ascending: of the sources and of generation_config.json."""
    if (path / "generation_config.json").is_file():
        sources = [*sources, read_json(path / "generation_config.json").get("eos_token_id")]
    return eos_ids(sources, vocab_size)


def fingerprint_of(
    raw_config: Mapping[str, Any], weights: Sequence[Path], adapter: Sequence[Path]
) -> str:
    """sha256 over the config (less what only names its origin) and the hashes of all files. A
    GGUF and what was converted from it are one model: drafts that were taken from it in one form
    serve all."""
    kept = {
        k: v for k, v in raw_config.items() if k not in ("transformers_version", "_name_or_path")
    }
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for origin in dict.fromkeys(map(origin_of, weights)):
        digest.update(f"\nweights {origin}".encode())
    for file in adapter:
        digest.update(f"\nadapter {remembered_sha256(file)}".encode())
    return digest.hexdigest()
