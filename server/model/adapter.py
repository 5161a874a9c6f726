"""A PEFT adapter's folder: LoRA of linear layers, and rows of the embedding and the head.

    adapter = LoraAdapter(Path("adapters/massive"), tied=True)
    adapter.merged("model.layers.0.mlp.up_proj.weight", weight)    # W + scale * B @ A
    adapter.table("model.embed_tokens.weight", embedding)          # its own rows put in

Rows come from PEFT's `trainable_token_indices`. They are absolute, not deltas; ids at and above the
base's vocabulary are tokens of the adapter's own, which `enrichment.json` beside the weights
describes. Everything else that PEFT can put into an adapter is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drafters.json_text import parsed
from server.engine.batch import places_of
from server.errors import IntegrityError, ModelError, UnsupportedModelError
from vocab_store.enrichment import Enrichment
from vocab_store.errors import VocabStoreError

if TYPE_CHECKING:
    import torch

    from server.engine.batch import Batch, Int64
    from server.model.shape import ModelShape

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
ENRICHMENT_FILE = "enrichment.json"
NO_SPANS = np.zeros((0, 3), np.int64)


# What a plain LoRA's adapter_config.json may hold without changing W + scale * B @ A.
_LORA_PLAIN_KEYS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "trainable_token_indices",
    "use_rslora",
}  # fmt: skip
_STORED = ("F32", "F16", "BF16")
_MOST_VALUE = 1e6  # of a weight, or of what is added to one: no model's are near it
_MOST_ID = 1 << 24
_MODULE = r"\^?[A-Za-z0-9_]+(\\?\.[A-Za-z0-9_]+)*\$?"
"""A pattern that is a module's name, or the end of one: what PEFT writes. Others are regular
expressions of strangers, which may run for ever."""
# These initialisations change the base weights, so the adapter alone does not define the model.
_LORA_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraAdapter:
    """A PEFT LoRA (Hu et al. 2021, arXiv 2106.09685) with its rows: per weight, scale * B @ A.

    scale = alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732); r and
    alpha per module where rank_pattern and alpha_pattern say so. separate_head: whether a tied
    model's head has rows of its own. enrichment: what ids of the adapter's own stand for, or None.
    files: what the fingerprint covers. Raises ModelError and UnsupportedModelError.
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
        self.files: tuple[Path, ...] = (config_file, weights)
        config = read_json(config_file)
        self._check(config)
        self._config = config
        self._reader = open_safetensors(weights)
        # The largest magnitude of each tensor: not finite where one of its numbers is not.
        self._largest: dict[str, float] = {}
        self._pairs: dict[str, tuple[str, str]] = {}
        keys = set(self._reader.keys())
        self._rows = self._row_keys(keys)
        unused = keys - {key for _, key in self._rows.values()}
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
        if not self._pairs and not self._rows:
            raise ModelError(f"adapter {folder} changes nothing")
        for key in sorted(keys):  # numbers that a weight may change by
            stored = self._reader.get_slice(key).get_dtype()
            if stored not in _STORED:
                raise UnsupportedModelError(
                    f"adapter {folder}: {key} is stored as {stored}, and not as one of "
                    f"{', '.join(_STORED)}"
                )
            tensor = self._reader.get_tensor(key)
            self._largest[key] = float(tensor.abs().max()) if tensor.numel() else 0.0
            if not self._largest[key] <= _MOST_VALUE:
                raise self._wrong(f"{key} holds {self._largest[key]:g}, which is no weight")
        if EMBEDDING in self._pairs or (tied and HEAD in self._pairs):
            raise UnsupportedModelError(
                f"adapter {folder}: a LoRA on the embedding or on a tied head is not supported"
            )

        self.separate_head = tied and HEAD in self._rows
        self._tied = tied
        if tied and EMBEDDING in self._rows:  # a tied head's are the same unless it has others
            self._rows.setdefault(HEAD, self._rows[EMBEDDING])
        self.enrichment = enrichment_of(folder)
        if self.enrichment is not None:
            self.files = (*self.files, folder / ENRICHMENT_FILE)
            for table, (ids, _) in self._rows.items():
                if set(self.enrichment.ids) - set(ids):
                    raise self._wrong(f"{ENRICHMENT_FILE} names ids that have no row in {table}")

    def _row_keys(self, keys: set[str]) -> dict[str, tuple[tuple[int, ...], str]]:
        """{table: (its ids, tensor with a row for each)}, of EMBEDDING and HEAD."""
        indices = self._config.get("trainable_token_indices")
        if not indices:
            return {}
        if isinstance(indices, list):  # PEFT's short form: the input embedding, and a tied head
            indices = {"embed_tokens": indices}
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        names = {"embed_tokens": EMBEDDING, "lm_head": HEAD}
        if not isinstance(indices, dict):
            raise self._wrong("trainable_token_indices is no list of ids")
        for layer, ids in indices.items():
            table = names.get(str(layer).rpartition(".")[2])
            if table is None:
                raise UnsupportedModelError(
                    f"adapter {self.folder}: trainable_token_indices of {layer!r}; only "
                    f"{' and '.join(names)} are supported"
                )
            if not (isinstance(ids, list) and ids) or not all(
                type(i) is int and 0 <= i < _MOST_ID for i in ids
            ):
                raise self._wrong("trainable_token_indices holds what is no id, or none")
            if len(set(ids)) != len(ids):
                raise self._wrong("trainable_token_indices names an id twice")
            module = table.removesuffix(".weight")
            key = f"base_model.model.{module}.token_adapter.trainable_tokens_delta"
            if key not in keys:
                raise ModelError(f"adapter {self.folder} holds no {key}")
            found[table] = (tuple(ids), key)
        return found

    def _check(self, config: Mapping[str, Any]) -> None:
        def refuse(reason: str) -> None:
            raise UnsupportedModelError(f"adapter {self.folder} is not supported: {reason}")

        if config.get("peft_type") != "LORA":
            refuse(f"peft_type is {str(config.get('peft_type'))[:40]!r} and not 'LORA'")
        if config.get("bias", "none") != "none":
            refuse(f"it trains biases (bias: {str(config['bias'])[:40]})")
        init = config.get("init_lora_weights", True)
        if isinstance(init, str) and init.lower().startswith(_LORA_CHANGED_BASE):
            refuse(f"init_lora_weights {init[:40]!r} changes the base weights")
        for key, value in sorted(config.items()):
            if value and key not in _LORA_PLAIN_KEYS and key != "bias":
                refuse(f"{key[:80]} is set")
        for key, name, fits in (
            ("r", "rank_pattern", lambda v: type(v) is int and 1 <= v <= 1 << 14),
            (
                "lora_alpha", "alpha_pattern",
                lambda v: type(v) in (int, float) and -_MOST_VALUE <= v <= _MOST_VALUE,
            ),
        ):  # fmt: skip
            patterns = config.get(name) or {}
            if not isinstance(patterns, dict):
                raise self._wrong(f"{name} is no object")
            if key not in config:
                raise self._wrong(f"adapter_config.json lacks {key}")
            for value in (config[key], *patterns.values()):
                if not fits(value):
                    raise self._wrong(f"{key} is {str(value)[:40]!r}")
            for pattern in patterns:
                if not re.fullmatch(_MODULE, pattern):
                    refuse(f"{name} has {pattern[:80]!r}, and only names of modules are read")

    def _wrong(self, problem: str) -> ModelError:
        return ModelError(f"adapter {self.folder}: {problem}")

    def names(self) -> set[str]:
        """Names of the weights it changes, as the base model's state dict has them."""
        return set(self._pairs)

    def num_rows(self, num_base: int) -> int:
        """Rows of the embedding and of the head with this adapter over a base of `num_base`.

        Raises ModelError for ids that leave a gap, and where only one of the tables has rows for
        new ids; UnsupportedModelError for new ids without a text.
        """
        ids = {i for own, _ in self._rows.values() for i in own}
        new = sorted(i for i in ids if i >= num_base)
        if not new:
            return num_base
        if new != list(range(num_base, num_base + len(new))):
            raise self._wrong(
                f"its new ids {new[0]}..{new[-1]} do not follow the base's {num_base} ids"
            )
        for table, (own, _) in self._rows.items():
            if not set(new) <= set(own):
                raise self._wrong(f"{table} lacks rows of new ids")
        if not self._tied and len(self._rows) < 2:
            raise self._wrong("one of embedding and head lacks rows")
        if self.enrichment is None:
            raise UnsupportedModelError(
                f"adapter {self.folder} brings {len(new)} ids of its own and no {ENRICHMENT_FILE} "
                "that says what they stand for"
            )
        if self.enrichment.base_vocab_size != num_base:
            raise self._wrong(
                f"{ENRICHMENT_FILE} is of {self.enrichment.base_vocab_size} "
                f"base ids, the model has {num_base}"
            )
        return num_base + len(new)

    def changes_table(self, name: str) -> bool:
        """Whether the embedding or the head (by name) has rows of this adapter."""
        return name in self._rows

    def table(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """`base` [V, width] with the adapter's rows, [V or more, width]; a copy, in base's dtype.
        Raises ModelError for rows of another width."""
        own = self.rows(name, base.shape[1])
        import torch

        wide = torch.zeros((self.num_rows(base.shape[0]), base.shape[1]), dtype=base.dtype)
        wide[: base.shape[0]] = base
        wide[torch.from_numpy(own.ids)] = own.rows.to(base.dtype)
        return wide

    def rows(self, name: str, width: int) -> TokenRows:
        """Its own rows [n, width] of a table that it changes. Raises ModelError for rows of another
        width."""
        unsorted, key = self._rows[name]
        rows: torch.Tensor = self._reader.get_tensor(key)
        if rows.shape != (len(unsorted), width):
            raise self._wrong(
                f"the rows of {name} are {list(rows.shape)}, expected {[len(unsorted), width]}"
            )
        ids = np.array(unsorted, np.int64)
        order = np.argsort(ids)
        return TokenRows(ids[order], rows[order])

    def pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [r, in], B [out, r]) of a weight that it changes, in float32."""
        a, b = (self._reader.get_tensor(key).float() for key in self._pairs[name])
        return a, b

    def rank(self, name: str) -> int:
        """Rows of A of a weight that it changes, as they are stored."""
        return int(self._reader.get_slice(self._pairs[name][0]).get_shape()[0])

    @property
    def form(self) -> str:
        """What all its matrices are stored in: "float32", "bfloat16" or "float16"; "float32" where
        they differ, or are stored in anything else."""
        stored = {
            self._reader.get_slice(key).get_dtype() for pair in self._pairs.values() for key in pair
        }
        return {"BF16": "bfloat16", "F16": "float16"}.get("".join(stored), "float32")

    def scale(self, name: str) -> float:
        """The factor of B @ A for one weight."""
        module = name.removesuffix(".weight")
        rank = self._of_pattern("rank_pattern", module, self._config["r"])
        alpha = self._of_pattern("alpha_pattern", module, self._config["lora_alpha"])
        stored = self.rank(name)
        if stored != rank:
            raise self._wrong(f"{name} has rank {stored}, config says {rank}")
        return float(alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank)

    def _of_pattern(self, key: str, module: str, default: float) -> float:
        """PEFT's rule: the first pattern that is the module's name or its end."""
        patterns: Mapping[str, float] = self._config.get(key) or {}
        for pattern, value in patterns.items():
            name = pattern.removeprefix("^").removesuffix("$").replace("\\", "")
            if module == name or (module.endswith(f".{name}") and not pattern.startswith("^")):
                return value
        return default

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError unless it fits weights of these shapes, by their names, rank and all."""
        for name, pair in sorted(self._pairs.items()):
            if name not in shapes:
                raise ModelError(f"adapter {self.folder} changes {name}, which is not there")
            a, b = (tuple(self._reader.get_slice(key).get_shape()) for key in pair)
            if (len(a), len(b)) != (2, 2) or a[0] != b[1] or (b[0], a[1]) != shapes[name]:
                raise self._wrong(
                    f"{name} is {list(shapes[name])} in the model, and {list(b)} x {list(a)} in "
                    "the adapter"
                )
            most = math.prod(self._largest[key] for key in pair) * a[0]
            if abs(self.scale(name)) * most > _MOST_VALUE:
                raise self._wrong(f"{name} changes by numbers that are no weights")

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [out, in] with the adapter added, in float32. The sum is rounded nowhere else.

        The order of operations is that of PEFT's merge, so in float32 the bits are the same.
        """
        a, b = self.pair(name)
        merged: torch.Tensor = weight.float() + (b @ a) * self.scale(name)
        return merged


def enrichment_of(folder: str | Path | None, tokenizer: str | None = None) -> Enrichment | None:
    """What the ids of an adapter's own stand for; None where it brings none, or there is none.

    tokenizer: fingerprint (hex) of the base's, which must be the enrichment's. Raises ModelError.
    """
    file = None if folder is None else Path(folder).expanduser() / ENRICHMENT_FILE
    if file is None or not file.is_file():
        return None
    try:
        return Enrichment.load(file, tokenizer=tokenizer)
    except (VocabStoreError, OSError) as error:
        raise ModelError(f"adapter {folder}: {error}") from None


def linear_sizes(s: ModelShape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every matrix that the layers have, by its name: a short convolution's
    layer has no attention."""
    hidden, attended, inner = s.hidden_size, s.num_heads * s.head_dim, s.intermediate_size
    keys = s.num_kv_heads * s.head_dim

    def sized(names: Sequence[str], outputs: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Of several matrices, or of one with the rows of all."""
        num = outputs if len(names) > 1 else [sum(outputs)]
        return {name: (n, hidden) for name, n in zip(names, num, strict=True)}

    attention = sized(s.names.qkv, (attended, keys, keys)) | {s.names.out: (hidden, attended)}
    convolution = {s.names.conv[0]: (3 * hidden, hidden), s.names.conv[2]: (hidden, hidden)}
    mlp = sized(s.names.gate_up, (inner, inner)) | {s.names.down: (hidden, inner)}
    return {
        f"model.layers.{layer}.{module}.weight": size
        for layer, convolves in enumerate(s.convolutions)
        for module, size in ((convolution if convolves else attention) | mlp).items()
    }


def opened_adapter(folder: Path, shape: ModelShape, num_base: int) -> LoraAdapter:
    """An adapter that may stand beside a base model, once everything but the numbers was looked at.

    num_base: rows of the base's embedding table. Raises ModelError for one that does not fit,
    UnsupportedModelError for what no runner computes.
    """
    lora = LoraAdapter(folder, tied=shape.tied)
    if HEAD in lora.names():
        raise UnsupportedModelError(
            f"adapter {folder}: a LoRA of the LM head is served only when the adapter is "
            "merged (`adapter:` of a model of its own)"
        )
    lora.check(linear_sizes(shape))
    lora.num_rows(num_base)
    return lora


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an adapter's own in a table: ids int64 [n], ascending; rows [n, hidden_size], a
    tensor as they are stored, until a runner has packed them in a form of its own."""

    ids: Int64
    rows: Any


def token_rows(lora: LoraAdapter, shape: ModelShape) -> tuple[TokenRows | None, TokenRows | None]:
    """The own rows of an opened adapter, of (the embedding, the head), None where it has none."""
    embedding, head = (
        lora.rows(name, shape.hidden_size) if lora.changes_table(name) else None
        for name in (EMBEDDING, HEAD)
    )
    return embedding, head


def own_embeddings(
    batch: Batch, held: Mapping[int, Any]
) -> Iterator[tuple[TokenRows, Int64, Int64]]:
    """(an adapter's own rows of the embedding, rows of the batch with ids that it has, their places
    among its rows). held: a runner's packed adapters by place, whose `embedding` has these rows or
    is None."""
    if batch.seq_adapters is None:
        return
    of_rows = batch.seq_adapters[batch.seq_ids]
    for place in np.unique(of_rows).tolist():
        own = None if place < 0 else held[place].embedding
        if own is not None:
            rows = np.flatnonzero(of_rows == place)
            at, found = places_of(own.ids, batch.token_ids[rows])
            if at.shape[0]:
                yield own, rows[found], at


def check_adapter(folder: Path, shape: ModelShape, num_base: int) -> bool:
    """Whether an adapter's head has rows of its own; reads no weights. Raises as opened_adapter."""
    return opened_adapter(folder, shape, num_base).changes_table(HEAD)


def num_ids_with(lora: LoraAdapter, num_ids: int) -> int:
    """Ids that a request with the adapter may have, over a base of num_ids real ids."""
    own = () if lora.enrichment is None else lora.enrichment.ids
    return max((num_ids, *(i + 1 for i in own)))


def adapter_spans(batch: Batch, most_rows: int) -> Int64:
    """int64 [n, 3]: (first row, rows, place) of every run of rows of one adapter, in pieces of
    most_rows; empty where no row has one."""
    if batch.seq_adapters is None:
        return NO_SPANS
    spans: list[tuple[int, int, int]] = []
    places, first = batch.seq_adapters[batch.seq_ids], 0
    for end in (*(np.flatnonzero(np.diff(places)) + 1).tolist(), places.shape[0]):
        place = int(places[first]) if end > first else -1
        if place >= 0:
            starts = range(first, end, most_rows)
            spans += [(at, min(most_rows, end - at), place) for at in starts]
        first = end
    return np.array(spans, np.int64).reshape(-1, 3)


def open_safetensors(path: Path) -> Any:
    """The mapped file. Raises IntegrityError."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path}: {str(error)[:200]}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError."""
    try:
        value = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {str(error)[:200] or type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
