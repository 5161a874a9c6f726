"""AdapterSet: the adapters that are served now, of all models, and the orders that engines get.

An adapter is a folder that PEFT saved. This module hashes its files and reads what its ids mean;
the engines read and check its weights. It does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from server.errors import ConfigError, ModelError
from server.types import AdapterOrder

if TYPE_CHECKING:
    from drafters.auto.copying import Pieces
    from server.api.served_model import ServedModel
    from server.config import AdapterConfig
    from server.engine.adapters import Vocabulary
    from server.engine.batch import AdaptingRunner
    from server.engine.grammar import GrammarCompiler
    from server.token_bytes import TokenBytes
    from vocab_store.enrichment import Enrichment


_FILES = ("adapter_config.json", "adapter_model.safetensors", "enrichment.json")


class AdapterSet:
    """The adapters of a server (see the top of this file).

    bases: the ServedModels. folders: of the models. Used from one event loop; `read` in threads.
    """

    def __init__(self, bases: Mapping[str, ServedModel], folders: Mapping[str, Path]) -> None:
        self._bases = dict(bases)
        self._folders = dict(folders)
        self._served: dict[str, ServedModel] = {}

    @property
    def served(self) -> Mapping[str, ServedModel]:
        """The adapters by their names."""
        return self._served

    def orders(self, model: str) -> tuple[AdapterOrder, ...]:
        """The adapters that an engine of a model gets when it starts."""
        return tuple(
            s.adapter for s in self._served.values() if s.name == model and s.adapter is not None
        )

    def read(self, config: AdapterConfig, model: str | None = None) -> ServedModel:
        """An adapter as the API knows it. model: its base, None for the first model.

        Raises ConfigError for what cannot be served and ModelError for files that cannot be read.
        """
        from server.model.cache_folder import remembered_sha256
        from server.wiring.model import enriched_table, enrichment_of, own_ids

        base = self._bases.get(model) if model else next(iter(self._bases.values()))
        if base is None:
            raise ConfigError(f"adapter {config.name}: there is no model {model}")
        folder = Path(config.path).expanduser()
        for name in _FILES[:2]:
            if not (folder / name).is_file():
                raise ConfigError(
                    f"adapter {config.name}: {folder}: holds no {name}; an adapter is a folder "
                    "that PEFT saved"
                )
        digest = hashlib.sha256()
        for name in _FILES:
            if (folder / name).is_file():
                digest.update(f"{name} {remembered_sha256(folder / name)}\n".encode())
        enrichment = enrichment_of(str(folder), base.table)
        table, table_path, vocab_size = base.table, "", base.vocab_size
        if enrichment is not None:
            base_folder = self._folders[base.name]
            table = enriched_table(base_folder, base.table, enrichment)
            table_path = str(table.path)
            vocab_size = max(vocab_size, *(i + 1 for i in enrichment.ids))
        version = digest.hexdigest()[:16]
        return replace(
            base,
            table=table,
            vocab_size=vocab_size,
            created=int((folder / _FILES[1]).stat().st_mtime),
            fingerprint=f"{base.fingerprint}-{version[:12]}",
            own_ids=own_ids(enrichment),
            reads=None if enrichment is None else enrichment.read,
            root=config.path,
            adapter=AdapterOrder(
                f"{config.name}@{version}", str(folder), vocab_size, table_path, config.pinned
            ),
        )

    def add(self, served: ServedModel) -> ServedModel | None:
        """Serve an adapter; the one that had its name before."""
        old = self._served.get(served.key)
        self._served[served.key] = served
        return old

    def remove(self, name: str) -> None:
        """Stop serving it."""
        self._served.pop(name, None)


class VocabularyReader:
    """What an engine reads of an adapter besides its weights: see engine.adapters.Reader.

    table, pieces: of the base's tokenizer. grammars: makes the compiler of an enrichment's ids,
    None where they are switched off.
    """

    def __init__(
        self,
        runner: AdaptingRunner,
        table: TokenBytes,
        pieces: Pieces | None,
        grammars: Callable[[Enrichment, int], GrammarCompiler] | None,
    ) -> None:
        self._runner = runner
        self._table = table
        self._pieces = pieces
        self._grammars = grammars

    def __call__(self, order: AdapterOrder) -> Vocabulary:
        """Raises ModelError and its kin."""
        from drafters.auto.copying import Pieces
        from server import token_bytes
        from server.engine.adapters import Vocabulary
        from server.engine.stops import StopTable
        from server.wiring.model import enrichment_of

        own_head = self._runner.check_adapter(order.folder)
        enrichment = enrichment_of(order.folder, self._table)
        if (enrichment is not None) != bool(order.table):
            raise ModelError(f"adapter {order.adapter_id}: its files have changed")
        if enrichment is None:
            return Vocabulary(self._table.fingerprint.hex(), own_head=own_head, pieces=self._pieces)
        wide = token_bytes.open_table(order.table)
        return Vocabulary(
            wide.fingerprint.hex(),
            enrichment,
            StopTable(wide.offsets, wide.blob, (int(i) for i in wide.special_ids)),
            None if self._grammars is None else self._grammars(enrichment, order.vocab_size),
            own_head,
            Pieces(wide.offsets, wide.blob),
        )
