"""From the speculation section of a task or request to a Drafter with its corpus.

The same function makes the drafters of an engine and those that `tailor tasks tune` tries.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from drafters.array_file import ArrayFileError, FingerprintError
from drafters.catalog import Need, make_drafter, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from drafters.auto.copying import Pieces
    from drafters.auto.prior import Prior
    from drafters.base import Drafter, DraftSession
    from drafters.corpus import Corpus
    from drafters.options import OptionFile
    from server.engine.task_store import TaskStore
    from server.types import SpeculationParams
    from vocab_store.enrichment import Enrichment

log = logging.getLogger(__name__)

Read = TypeVar("Read")

WARM_UP = "warm-up"
"""The task of the requests that an engine answers itself before it is ready."""


class FilesRead(Generic[Read]):
    """What was read of files, each once for all who ask. A replaced file is read again; whoever
    has begun with what it held keeps that. Not for several threads."""

    _MOST = 64  # those used longest ago are let go

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[tuple[int, ...], Read]] = OrderedDict()

    def __call__(self, path: str, read: Callable[[], Read], of: str = "") -> Read:
        """What `read` made of the file, for `of` where it makes several things of one. Raises what
        that raises, each time."""
        key = path, of
        stamp: tuple[int, ...] = ()  # of a file that is not there
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            stamp = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        known = self._known.get(key)
        if known is None or known[0] != stamp:
            known = stamp, read()
            # What an earlier upload held is gone, and takes its room on disk while it is mapped.
            for old, (was, _) in list(self._known.items()):
                if was and not os.path.exists(old[0]):
                    del self._known[old]
            self._known[key] = known
            if len(self._known) > self._MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known[1]


NamedCorpus = tuple["Corpus | None", str]
"""A corpus, and an id that names it by its content; (None, "") where it cannot be drafted from."""


def _named_corpus(path: str, fingerprint: str, task: str) -> NamedCorpus:
    """Raises FingerprintError for another tokenizer's; what else is wrong is told in the log."""
    from drafters.corpus import Corpus

    try:
        return Corpus.load(path, fingerprint=fingerprint), content_id(Path(path))
    except FingerprintError:
        raise
    except (OSError, ArrayFileError) as error:
        log.error("task %s drafts without its corpus: %s", task, error)
        return None, ""


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
    corpora: FilesRead[NamedCorpus] | None = None,
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
        read = functools.partial(_named_corpus, speculation.corpus, fingerprint, task)
        corpus, corpus_id = (corpora or FilesRead())(speculation.corpus, read, fingerprint)
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
