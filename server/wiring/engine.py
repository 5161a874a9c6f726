"""From an EngineOrder to an Engine that is ready: model, drafters, costs, warm-up.

`build_engine` runs inside the engine's own process; only there is torch imported.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafters import DRAFTER_NAMES, make_drafter
from drafters.array_file import ArrayFileError
from server import logs, token_bytes
from server.errors import ModelError
from server.machine import cores, release_memory
from server.model.adapter import enrichment_of
from server.model.cache_folder import cache_dir
from server.types import (
    Request,
    SamplingParams,
    SpeculationParams,
    VocabularyMode,
    VocabularyParams,
    adapter_of,
)
from server.wiring.drafter import (
    WARM_UP,
    FilesRead,
    NamedCorpus,
    make_task_drafter,
    model_fingerprint,
)
from server.wiring.model import table_file
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds

if TYPE_CHECKING:
    from drafters.auto.prior import Prior
    from drafters.base import Drafter
    from server.engine.adapters import AdapterShelf, Vocabulary
    from server.engine.batch import Runner
    from server.engine.engine import Engine
    from server.engine.grammar import GrammarCompiler
    from server.engine.grammar_tokenizer import GrammarTokenizer
    from server.engine.task_store import Exchange, TaskStore
    from server.logs import LogFormat
    from server.model.build import RunnerSpec
    from server.token_bytes import TokenBytes
    from server.types import AdapterOrder, ModelInfo
    from vocab_store.enrichment import Enrichment

log = logging.getLogger("tailor.server")

_MEASURED_ROWS = {"cpu": 128, "cuda": 1024}
"""Rows of the largest step whose cost is measured, by kind of device: sizes beyond it are reckoned
in proportion, which is right once a step's time is its products' and not the weights' way."""

_TARGET_STEP_S = {"cpu": 0.15, "cuda": 0.05}
"""Seconds a step may take while some sequences decode and others prefill: prompt chunks are sized
by the measured cost of rows to fit it, so that a long prompt does not make the others wait. Where
decoding alone takes long, EngineSettings.prefill_ratio lets them take longer."""


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """All that an engine process needs, as plain values that can be pickled.

    name: the engine's. runner: of its model; the adapters beside it are those of `adapters`. table:
    file of the id -> bytes table. drafters: to be compiled before the engine is ready, so that no
    request waits for it. grammars: whether requests may bring one. vocabularies: (mode, profile) of
    those tasks that cut the LM head, to be copied before the engine is ready. slices_only: all do,
    with `mode: slice`, and the LM head stays in its file. namespace: separates what servers of
    different task folders keep. adapters: that the engine knows when it is ready; checks_adapters:
    whether one that cannot be read keeps the engine from starting, or is only logged.
    """

    name: str
    runner: RunnerSpec
    table: str
    drafters: tuple[str, ...]
    grammars: bool = True
    namespace: str = ""
    log_format: LogFormat = "console"
    log_level: str = "info"
    vocabularies: tuple[tuple[VocabularyMode, str], ...] = ()
    slices_only: bool = False
    adapters: tuple[AdapterOrder, ...] = ()
    checks_adapters: bool = True


Share = Callable[[str], "Exchange"]
"""What engines have in common that learn together -> what they learn by."""


def build_engine(order: EngineOrder, share: Share | None = None) -> Engine:
    """Load the model and make its Engine. Called inside the engine's own process. share: makes that
    by which what it learns reaches others; None: it learns for itself.

    Raises ModelError and its kin for a model that cannot be served, ValueError for numbers that
    do not fit the device.
    """
    logs.configure(order.log_format, order.log_level, engine=order.name)
    from server.engine.engine import Engine
    from server.engine.plan import EngineSettings
    from server.engine.probe import load_or_measure
    from server.engine.task_store import TaskStore
    from server.model.build import build_runner

    table = token_bytes.open_table(order.table)
    folders = tuple(adapter.folder for adapter in order.adapters)
    runner = build_runner(replace(order.runner, adapters=folders))
    grammars = _grammars(order, runner.info, table)
    own = enrichment_of(order.runner.adapter)
    vocabularies = _Vocabularies(runner, table, own, grammars)
    # Calibration and learned outputs are kept by tasks, engine and model.
    key = hashlib.sha256(f"{order.name}|{runner.info.fingerprint}".encode()).hexdigest()[:24]
    folder = cache_dir() / "tasks" / order.namespace / "engines" / key
    shared_by = f"{order.namespace}|{runner.info.fingerprint}"
    memory = TaskStore(
        folder,
        fingerprint=vocabularies.fingerprint_of,
        exchange=None if share is None else share(shared_by),
    )
    cost_file = _cost_file(order, runner.info)
    if not cost_file.exists():
        log.info("the first start of this model here: measuring what its steps cost, some seconds")
    engine = Engine(
        runner,
        _drafter_makers(runner.info, memory, vocabularies, _prior_reader(order, runner)),
        EngineSettings(
            **asdict(order.runner.sizes),
            target_step_s=_TARGET_STEP_S[_kind(order)],
            slices_only=order.slices_only,
        ),
        stop_table=table,
        cost=load_or_measure(runner, cost_file, max_rows=_MEASURED_ROWS[_kind(order)]),
        grammars=grammars,
        profiles=profile_reader(table, runner.info.eos_token_ids),
        memory=memory,
    )
    vocabularies.shelf = engine.adapters
    _know_adapters(engine, order, vocabularies)
    _warm_up(engine, order.drafters, order.vocabularies)
    gc.collect()
    if hasattr(runner, "release"):
        runner.release()  # the logits of the rows that were measured
    release_memory()  # of a tokenizer's file loading has freed several times its size
    return engine


def _kind(order: EngineOrder) -> str:
    """Of the device: cpu or cuda."""
    return order.runner.device.partition(":")[0]


def profile_reader(
    table: TokenBytes, eos_token_ids: Sequence[int]
) -> Callable[[str], VocabProfile]:
    """Gives vocabulary profiles by their files; raises VocabStoreError (a ValueError) or OSError.

    table: of the model's tokenizer. Every profile must hold the EOS ids, the special ids and the
    byte tokens.
    """
    files: FilesRead[VocabProfile] = FilesRead()
    required = functools.cache(lambda: RequiredIds.from_tokens(table, tuple(eos_token_ids)))

    def load(name: str) -> VocabProfile:
        return VocabProfile.load(name, fingerprint=table.fingerprint, required=required())

    return lambda name: files(name, functools.partial(load, name))


class _Vocabularies:
    """What ids mean: the base model's, and an adapter's. shelf: of the engine, once it is made."""

    def __init__(
        self,
        runner: Runner,
        table: TokenBytes,
        enrichment: Enrichment | None,
        grammars: GrammarCompiler | None,
    ) -> None:
        """table, grammars: of the base's tokenizer. enrichment: tokens of a merged adapter."""
        from drafters.auto.copying import Pieces
        from server.engine.adapters import Vocabulary

        self._runner, self._grammars = runner, grammars
        pieces = Pieces(table.offsets, table.blob)
        self._base = Vocabulary(table.fingerprint.hex(), enrichment, pieces=pieces)
        self.shelf: AdapterShelf | None = None

    def of(self, adapter_id: str) -> Vocabulary:
        """Raises ValueError for an adapter that is not known any more."""
        if not adapter_id:
            return self._base
        found = None if self.shelf is None else self.shelf.vocabulary(adapter_id)
        if found is None:
            raise ValueError("the adapter is not loaded")
        return found

    def fingerprint_of(self, scope: str) -> str:
        """Of the ids that a scope's texts are in; as `of`."""
        return self.of(adapter_of(scope)).fingerprint

    def read(self, order: AdapterOrder) -> Vocabulary:
        """What an engine reads of an adapter besides its weights: see engine.adapters.Reader.

        Raises ModelError and its kin.
        """
        from drafters.auto.copying import Pieces
        from server.engine.adapters import Vocabulary
        from server.engine.grammar import GrammarCompiler
        from server.engine.grammar_tokenizer import enriched_grammar_tokenizer

        eos_token_ids, grammars = self._runner.info.eos_token_ids, self._grammars
        own_head = self._runner.check_adapter(order.folder)
        enrichment = enrichment_of(order.folder, self._base.fingerprint)
        if (enrichment is not None) != bool(order.table):
            raise ModelError(f"adapter {order.adapter_id}: its files have changed")
        if enrichment is None:
            return Vocabulary(self._base.fingerprint, own_head=own_head, pieces=self._base.pieces)
        wide, own_grammars = token_bytes.open_table(order.table), None
        if grammars is not None:

            def load() -> GrammarTokenizer:
                return enriched_grammar_tokenizer(
                    grammars.tokenizer(), order.vocab_size, eos_token_ids, enrichment
                )

            own_grammars = GrammarCompiler(load)
        return Vocabulary(
            wide.fingerprint.hex(),
            enrichment,
            wide,
            own_grammars,
            own_head,
            Pieces(wide.offsets, wide.blob),
        )


def prior_file(fingerprint: str) -> Path:
    """Where the prior of a model lies, once `tailor models prior` has made it. The 3 is its
    format's version (drafters.auto.prior): one of another is not found, so that it is made anew."""
    return cache_dir() / "priors" / f"{model_fingerprint(fingerprint)[:24]}-3.prior"


def _prior_reader(order: EngineOrder, runner: Runner) -> Callable[[], Prior | None]:
    """Gives the model's prior; None where there is none that can be used, which the log tells. One
    that is made beside the engine is drafted with once drafters are made anew."""
    from server.engine.batch import StateRunner

    name, fingerprint = runner.info.name, runner.info.fingerprint
    file, files = prior_file(fingerprint), FilesRead["Prior | None"]()

    def load() -> Prior | None:
        from drafters.auto.prior import Prior

        if not file.exists():
            return None
        if not isinstance(runner, StateRunner):
            log.warning("%s has a prior, which is not used on %s", name, _kind(order))
            return None
        try:
            return Prior.load(file, fingerprint=model_fingerprint(fingerprint))
        except (OSError, ArrayFileError) as error:
            log.warning("%s is drafted for without its prior: %s", name, error)
            return None

    return lambda: files(str(file), load)


def _drafter_makers(
    info: ModelInfo,
    memory: TaskStore,
    vocabularies: _Vocabularies,
    prior: Callable[[], Prior | None],
) -> dict[str, Callable[[str, SpeculationParams], Drafter]]:
    """(task, speculation) -> Drafter, by the drafter's name."""
    corpora: FilesRead[NamedCorpus] = FilesRead()

    def make(name: str, task: str, speculation: SpeculationParams) -> Drafter:
        own = vocabularies.of(speculation.adapter)
        return make_task_drafter(
            name,
            own.fingerprint,
            info.eos_token_ids,
            task,
            speculation,
            model=info.fingerprint,
            memory=memory,
            enrichment=own.enrichment,
            corpora=corpora,
            pieces=own.pieces,
            prior=prior(),
        )

    return {name: functools.partial(make, name) for name in DRAFTER_NAMES if name != "off"}


def _know_adapters(engine: Engine, order: EngineOrder, vocabularies: _Vocabularies) -> None:
    """Register the adapters that are served. Raises ModelError for one that cannot be used."""
    engine.adapters.read = vocabularies.read
    for adapter in order.adapters:
        engine.adapters.register(adapter, load=False)
    problems = engine.adapters.settle()
    if problems and order.checks_adapters:
        raise ModelError("\n".join(problems))


def _grammars(order: EngineOrder, info: ModelInfo, table: TokenBytes) -> GrammarCompiler | None:
    """What compiles grammars, once one comes; None where they are switched off."""
    from server.engine.grammar import GrammarCompiler
    from server.engine.grammar_tokenizer import prepare_grammar_tokenizer

    if not order.grammars:
        return None
    folder = Path(order.runner.folder)
    file, kept = folder / "tokenizer.json", table_file(folder).with_suffix(".merges")
    try:
        prepare_grammar_tokenizer(file, kept)
    except (OSError, ValueError, KeyError) as error:
        log.warning("structured outputs are not available: %s", error)

    def load() -> GrammarTokenizer:
        from tokenizers import Tokenizer

        from server.engine.grammar_tokenizer import load_grammar_tokenizer

        try:
            return load_grammar_tokenizer(
                file,
                table,
                info.vocab_size,
                info.eos_token_ids,
                Tokenizer.from_str,
                enrichment_of(order.runner.adapter),
                kept,
            )
        finally:
            table.release_pages()
            release_memory()

    return GrammarCompiler(load)


def _cost_file(order: EngineOrder, info: ModelInfo) -> Path:
    """Where the cost of a step is kept: by device, model with the types of weights and KV, and
    threads."""
    threads, device = order.runner.threads or cores(), order.runner.device
    if device == "cpu":
        name = f"{platform.node()} {platform.processor() or platform.machine()}"
    else:
        import torch

        name = torch.cuda.get_device_name(device)
    key = f"{device}|{name}|{info.fingerprint}|{info.kv_dtype}|{threads}"
    key += "|head in its file" * (info.head_bytes_in_file > 0)
    return cache_dir() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _warm_up(
    engine: Engine,
    drafters: Sequence[str],
    vocabularies: Sequence[tuple[VocabularyMode, str]] = (),
) -> None:
    """Run a short request with each drafter and each profile: what is imported, loaded or copied on
    first use is ready before the engine is. The prefix cache is emptied after it."""
    from server.engine.slices import NO_PROFILE

    for name in drafters:
        if name != "off":
            make_drafter(name)
    prompt = [i for i in range(3, 64) if i not in engine.info.eos_token_ids][:3]
    runs = [("off", VocabularyParams(mode, profile)) for mode, profile in vocabularies]
    usual = runs[0][1] if engine.info.head_bytes_in_file and runs else VocabularyParams()
    runs += [(name, usual) for name in dict.fromkeys(("off", *drafters))]
    for i, (name, vocabulary) in enumerate(runs):
        engine.submit(
            Request(
                request_id=f"warm-up-{i}",
                task=WARM_UP,
                model=engine.info.name,
                prompt_ids=tuple(prompt * 4),
                sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
                speculation=SpeculationParams(name, 0 if name == "off" else 4),
                vocabulary=vocabulary,
            )
        )
        deltas = engine.take_deltas()
        while engine.has_work:
            deltas += engine.step()
        for delta in deltas:
            if delta.finish_reason != "error":
                continue
            # An engine that starts again: the file was there when the server read its tasks.
            if delta.error_code != NO_PROFILE:
                raise ModelError(f"{engine.info.name} cannot be run: {delta.error}")
    engine.pool.drop_cache()
