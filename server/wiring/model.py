"""The models of a server and the adapters beside them: their folders, and what the API needs of
them: tokenizer, sizes, names; never weights. Torch is not imported."""

from __future__ import annotations

import atexit
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.json_text import object_in, parsed
from server import token_bytes
from server.errors import CacheFolderError, ConfigError, ModelError
from server.model.adapter import ENRICHMENT_FILE, enrichment_of, read_json
from server.model.cache_folder import cache_dir, remembered_sha256, writing_to_cache
from server.model.catalog import cached_folder, source_of
from server.token_bytes import TokenBytes
from server.types import PARAMETERS, AdapterOrder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from server.api.served_model import ServedModel
    from server.config import AdapterConfig, EngineConfig, ModelConfig, SamplingDefaults
    from vocab_store.enrichment import Enrichment

log = logging.getLogger("tailor.server")

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", ENRICHMENT_FILE)
_SPARE_PLACES = (None, "/dev/shm")  # the system's folder of temporary files first


def served_model(model: ModelConfig, folder: Path, max_model_len: int | None) -> ServedModel:
    """What the API needs of a model: its tokenizer, its sizes, its name. Reads no weights.

    The id -> bytes table is written into the cache folder beside the converted models, once per
    tokenizer, so that the engines can map it. Raises ModelError.
    """
    from tokenizers import Tokenizer

    from server.api.chat_template import load_chat_template
    from server.api.served_model import ServedModel
    from server.config import SamplingDefaults
    from server.model.families import position_limit, text_values
    from server.model.generic import is_generic
    from server.model.known_config import last_token_id
    from server.model.supported import check_raw

    config_file, tokenizer_file = folder / "config.json", folder / "tokenizer.json"
    try:
        raw = read_json(config_file)
        check_raw(raw)
        values = text_values(raw)
        vocab_size, limit = int(values["vocab_size"]), position_limit(values, max_model_len)
        created = int(config_file.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{config_file}: {type(error).__name__}: {str(error)[:200]}") from None
    if max_model_len is not None and max_model_len > limit:
        raise ModelError(
            f"model {model.name}: max_model_len {max_model_len} is above the model's {limit}"
        )
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{tokenizer_file}: {str(error)[:200]}") from None
    table = _table(tokenizer, table_file(folder), vocab_size)
    # Rows past the tokenizer's ids pad the tables: runners do not know them, nor may a request.
    vocab_size = min(vocab_size, 1 + last_token_id(tokenizer_file))
    try:
        chat = load_chat_template(folder, tokenizer)
    except (OSError, ValueError) as error:
        log.warning("%s cannot chat: %s", model.name, str(error)[:200])
        chat = None
    named = object_in(folder / "tokenizer_config.json").get("tokenizer_class")
    base = ServedModel(
        name=model.name,
        tokenizer=tokenizer,
        table=table,
        vocab_size=vocab_size,
        max_model_len=min(limit, max_model_len or limit),
        created=created,
        fingerprint=f"tailor-{table.fingerprint.hex()[:12]}",
        chat=chat,
        sampling=(
            sampling_defaults(folder) if model.generation_config == "auto" else SamplingDefaults()
        ),
        implementation="transformers" if is_generic(raw) else "tailor",
        aliases=model.aliases,
        # What tokenizer_config.json names; where it names nothing, transformers' own default.
        tokenizer_class=named if isinstance(named, str) else "PreTrainedTokenizerFast",
    )
    return _with_own(base, folder, enrichment_of(model.adapter, table.fingerprint.hex()))


_SAMPLED = {one.name: one.kind for one in PARAMETERS if one.in_models}
"""Keys that vLLM and SGLang take from the file, too."""


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The sampling keys of a model's generation_config.json; nothing where there is no such file.

    A file that cannot be used is logged and left out: the model can be served without it.
    """
    from server.config import SamplingDefaults

    file = folder / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults()
    try:
        raw = parsed(file.read_text(encoding="utf-8"))
        found = {key: kind(raw[key]) for key, kind in _SAMPLED.items() if raw.get(key) is not None}
        defaults = SamplingDefaults(**found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is not used: %s", file, str(error).splitlines()[0][:200])
        return SamplingDefaults()
    if found:
        told = ", ".join(f"{key} {value:g}" for key, value in found.items())
        log.info("%s: where tasks are silent, %s (--generation-config none: not)", file, told)
    return defaults


def _table(tokenizer: Tokenizer, file: Path, vocab_size: int) -> TokenBytes:
    """The table at `file`, which is named after the tokenizer's content (so nothing is compared,
    half a second for 262,000 ids), or a new one."""
    size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    with suppress(OSError, ValueError):
        table = token_bytes.open_table(file)
        if table.vocab_size >= size:
            return table
    return _written(token_bytes.build(tokenizer, size), file)


def _written(table: TokenBytes, file: Path) -> TokenBytes:
    """A table in its file, mapped. Where the cache folder is full or read-only, the file lies in a
    temporary folder until this process ends. Raises CacheFolderError where that is, too."""
    try:
        with writing_to_cache():
            file.parent.mkdir(parents=True, exist_ok=True)
            token_bytes.save(table, file)
    except CacheFolderError as error:
        for place in _SPARE_PLACES:
            with suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix="tailor-", dir=place))
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                token_bytes.save(table, folder / file.name)
                log.warning("%s Until then the table of tokens lies in %s.", error.message, folder)
                return token_bytes.open_table(folder / file.name)
        raise
    return token_bytes.open_table(file)


def _with_own(base: ServedModel, folder: Path, enrichment: Enrichment | None) -> ServedModel:
    """A model with an adapter's own tokens, where it has some; their table is in its file, mapped.
    folder: the base model's."""
    if enrichment is None:
        return base
    wide = token_bytes.enriched(base.table, enrichment.ids, enrichment.parts, enrichment.hash)
    file, table = table_file(folder, enrichment), None
    with suppress(OSError, ValueError):
        table = token_bytes.open_table(file)
    if table is None or table.fingerprint != wide.fingerprint:
        table = _written(wide, file)
    parts = zip(enrichment.ids, map(len, enrichment.parts), strict=True)
    return replace(
        base,
        table=table,
        vocab_size=max(base.vocab_size, *(i + 1 for i in enrichment.ids)),
        fingerprint=f"tailor-{table.fingerprint.hex()[:12]}",
        own_ids=dict(parts),
        reads=enrichment.read,
    )


def table_file(folder: Path, enrichment: Enrichment | None = None) -> Path:
    """Where the id -> bytes table of a model's tokenizer is kept, with an enrichment's tokens."""
    # Versions that write other files may serve from one cache, as while one replaces the other.
    tables = cache_dir() / "tokens" / "v3"
    name = remembered_sha256(folder / "tokenizer.json")[:24]
    if enrichment is not None:
        name += f"-{enrichment.hash[:24]}"
    return tables / f"{name}.bin"


def serves_file(model: ModelConfig, engine: EngineConfig) -> bool:
    """Whether a model is served from its GGUF as it is: asked for, or nothing else is."""
    own = model.over(engine)
    if own.weights != "auto":
        return own.weights == "file"
    on_cpu = all(device == "cpu" for device in model.devices)
    plain = own.dtype == "auto" and model.adapter is None and on_cpu
    return plain and source_of(model.path) is not None


def ready_folder(model: ModelConfig, engine: EngineConfig) -> Path:
    """The model's folder. Fetching and converting, once, is done by a process of its own, because
    it loads torch and the whole model, and this one will only speak HTTP."""
    kind = model.over(engine).weights if serves_file(model, engine) else "float32"
    folder = cached_folder(model.path, "float32" if kind == "float32" else "file")
    if folder is None:
        command = [sys.executable, "-m", "server.commands.cli", "models", "fetch", model.path]
        command += ["--form", kind]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(done.returncode)  # it has said why
        folder = Path(done.stdout.strip().splitlines()[-1])
    return folder


class AdapterSet:
    """The adapters that are served now, of all models, and the orders that engines get.

    An adapter is a folder that PEFT saved. Its files are hashed here, and what its ids mean is
    read; the engines read and check its weights.

    bases: the ServedModels. folders: of the models. Used from one event loop; `read` in threads.
    """

    def __init__(self, bases: Mapping[str, ServedModel], folders: Mapping[str, Path]) -> None:
        self._bases = dict(bases)
        self._folders = dict(folders)
        self.served: dict[str, ServedModel] = {}  # by their names

    def orders(self, model: str) -> tuple[AdapterOrder, ...]:
        """The adapters that an engine of a model gets when it starts."""
        return tuple(
            s.adapter for s in self.served.values() if s.name == model and s.adapter is not None
        )

    def read(self, config: AdapterConfig, model: str | None = None) -> ServedModel:
        """An adapter as the API knows it. model: its base, one of `bases`; None for the first.

        Raises ConfigError for what cannot be served and ModelError for files that cannot be read.
        """
        base = self._bases[model] if model else next(iter(self._bases.values()))
        folder = Path(config.path).expanduser()
        for name in _ADAPTER_FILES[:2]:
            if not (folder / name).is_file():
                raise ConfigError(
                    f"adapter {config.name}: {folder}: holds no {name}; an adapter is a folder "
                    "that PEFT saved"
                )
        digest = hashlib.sha256()
        for name in _ADAPTER_FILES:
            if (folder / name).is_file():
                digest.update(f"{name} {remembered_sha256(folder / name)}\n".encode())
        enrichment = enrichment_of(folder, base.table.fingerprint.hex())
        served = _with_own(base, self._folders[base.name], enrichment)
        table = "" if enrichment is None else str(served.table.path)
        version = digest.hexdigest()[:16]
        return replace(
            served,
            created=int((folder / _ADAPTER_FILES[1]).stat().st_mtime),
            fingerprint=f"{base.fingerprint}-{version[:12]}",
            root=config.path,
            adapter=AdapterOrder(
                f"{config.name}@{version}", str(folder), served.vocab_size, table, config.pinned
            ),
        )

    def add(self, served: ServedModel) -> ServedModel | None:
        """Serve an adapter; the one that had its name before."""
        old = self.served.get(served.key)
        self.served[served.key] = served
        return old

    def remove(self, name: str) -> None:
        """Stop serving it."""
        self.served.pop(name, None)
