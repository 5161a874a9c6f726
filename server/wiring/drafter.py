"""From the speculation section of a task or request to a Drafter with its corpus.

The same function makes the drafters of an engine and those that `tailor tasks tune` tries.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.array_file import ArrayFileError, FingerprintError
from drafters.catalog import Need, make_drafter, spec_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drafters.auto.copying import Pieces
    from drafters.auto.prior import Prior
    from drafters.base import Drafter, DraftSession
    from drafters.corpus import Corpus
    from drafters.options import OptionFile
    from server.engine.task_store import TaskStore
    from server.types import SpeculationParams
    from vocab_store.enrichment import Enrichment

log = logging.getLogger(__name__)

WARM_UP = "warm-up"
"""The task of the requests that an engine answers itself before it is ready."""


class CorpusFiles:
    """Corpora by file, each checked and mapped once for all scopes that draft from it. A replaced
    file is read again; sessions keep what they began with. Not for several threads."""

    _MOST = 64  # those used longest ago are let go

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[tuple[int, ...], Corpus | None, str]] = OrderedDict()

    def load(self, path: str, fingerprint: str, task: str) -> tuple[Corpus | None, str]:
        """(the corpus, an id that names it by its content); (None, "") where it cannot be drafted
        from, which is told once in the log. Raises FingerprintError for another tokenizer's."""
        from drafters.corpus import Corpus

        key = f"{fingerprint} {path}"
        stamp: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            stamp = stamp_of(path)
        known = self._known.get(key)
        if known is None or known[0] != stamp:
            try:
                corpus = Corpus.load(path, fingerprint=fingerprint)
                known = stamp, corpus, content_id(Path(path))
            except FingerprintError:
                raise
            except (OSError, ArrayFileError) as error:
                log.error("task %s drafts without its corpus: %s", task, error)
                known = stamp, None, ""
            # That of an earlier upload is gone, and takes its room on disk while it is mapped.
            for old, (_, held, _) in list(self._known.items()):
                if held is not None and not os.path.exists(old.partition(" ")[2]):
                    del self._known[old]
            self._known[key] = known
            if len(self._known) > self._MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known[1:]


def make_task_drafter(
    name: str,
    fingerprint: str,
    eos_token_ids: tuple[int, ...],
    task: str,
    speculation: SpeculationParams,
    *,
    model: str | None = None,
    memory: TaskStore | None = None,
    enrichment: Enrichment | None = None,
    corpora: CorpusFiles | None = None,
    pieces: Pieces | None = None,
    prior: Prior | None = None,
) -> Drafter:
    """The drafter that a task or request names, with its options and the task's corpus.

    memory: its learned outputs are drafted from too, and its calibration is used.
    fingerprint: of the tokenizer; a corpus of another one is refused. eos_token_ids: never
    drafted, because what comes after them is cut off. model: the model's fingerprint; bigrams of
    another one are refused (None: not checked). enrichment: the model writes its outputs in these
    ids, so prompts are read in them, too. corpora: of the engine. pieces: of the same ids;
    None: nothing is copied by text. prior: the model's. Raises ValueError.
    """
    spec = spec_of(name)
    given: dict[str, Any] = {}
    if Need.EOS in spec.needs:
        given[Need.EOS.value] = eos_token_ids
    for key, value in speculation.options:
        section, _, option = key.partition(".")
        if section == name:
            one = spec.option(option)
            if one.file is not None:
                value = _read(one.file, str(value), task, fingerprint, model)
            given[one.name] = value
    corpus_id = ""
    if speculation.corpus is not None and Need.CORPUS in spec.needs:
        corpus, corpus_id = (corpora or CorpusFiles()).load(speculation.corpus, fingerprint, task)
        given |= {} if corpus is None else {Need.CORPUS.value: corpus}
    if memory is not None and speculation.learn_tokens > 0 and Need.LEARNED in spec.needs:
        given[Need.LEARNED.value] = memory.learned(
            task,
            speculation.scope,
            speculation.corpus,
            speculation.learn_tokens,
            speculation.persists,
        )
    if memory is not None and speculation.learn_tokens > 0 and Need.SEEN in spec.needs:
        given[Need.SEEN.value] = memory.seen(task, speculation.scope)
    if Need.PIECES in spec.needs:
        given[Need.PIECES.value] = pieces
    if prior is not None and Need.PRIOR in spec.needs:
        given[Need.PRIOR.value] = prior
    drafter = make_drafter(name, **given)
    if memory is not None and task != WARM_UP:
        memory.calibrate(task, drafter, corpus_id, speculation.scope)
    return drafter if enrichment is None else EnrichedDrafter(drafter, enrichment)


class EnrichedDrafter:
    """A drafter for a model with tokens of its own: it reads prompts as the model would write them.

    A prompt keeps its base ids in the model; only here is it segmented, so that what the output
    copies from it matches and is drafted in the output's ids. All else is the drafter's own.
    """

    def __init__(self, drafter: Drafter, enrichment: Enrichment) -> None:
        self._drafter = drafter
        self._segment = enrichment.segment
        self.name = drafter.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def open(
        self,
        prompt_ids: Sequence[int],
        *,
        context_span: tuple[int, int] | None = None,
        prediction_ids: Sequence[int] = (),
    ) -> DraftSession:
        """As Drafter.open; the span goes along with the ids."""
        first, last = context_span or (0, len(prompt_ids))
        before = self._segment(prompt_ids[:first])
        inside = self._segment(prompt_ids[first:last])
        span = None if context_span is None else (len(before), len(before) + len(inside))
        return self._drafter.open(
            [*before, *inside, *self._segment(prompt_ids[last:])],
            context_span=span,
            prediction_ids=self._segment(prediction_ids),
        )


def _read(file: OptionFile, name: str, task: str, fingerprint: str, model: str | None) -> Any:
    """The content of an option's file. Raises ValueError."""
    module, _, attribute = file.kind.partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    expected: str | None = fingerprint
    if file.of == "model":
        expected = None if model is None else model_fingerprint(model)
    try:
        return kind.load(name, fingerprint=expected)
    except OSError as error:
        raise ValueError(f"{file.what} of task {task}: {error.strerror}") from None
    except FingerprintError:
        raise ValueError(
            f"{file.what} of task {task}: {name} was taken from another {file.of}; make it again "
            f"with `{file.made_by}`"
        ) from None


def model_fingerprint(fingerprint: str) -> str:
    """A model's fingerprint without the storage types of weights and KV cache, which hardly change
    what it says next."""
    return fingerprint.partition(":")[0]


def stamp_of(path: str | Path) -> tuple[int, ...]:
    """Another one where the file was replaced or written. Raises OSError."""
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def content_id(path: Path) -> str:
    """Names a file by its size and samples of its content: a copy is the same, an edit is not.

    Raises OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for i in range(16):
            file.seek(size * i // 16)
            digest.update(file.read(4096))
    return digest.hexdigest()[:24]
