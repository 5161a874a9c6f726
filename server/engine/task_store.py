"""TaskStore: what an engine keeps of its tasks beyond a request: calibration, learned outputs.

*Calibration* is the drafters' own (drafters.auto.trust, drafters.calibration): one table per (task,
drafter, corpus, scope), shared by all drafters made of these, so that making one anew forgets
nothing. *Seen* (drafters.auto.retrieval) are ids that the model held likely and the last few
outputs, by (task, scope) of tasks that learn, in memory only; server/engine/calibrations.py has
both. *Learned outputs* are those of finished requests of tasks that learn, one reservoir per
(task, scope). The scope is made of tenant and cache_salt, so that nobody's drafts are made of
another's text, nor as many or as few as another's text made them. Learned outputs stay in memory
unless the task says `learn: persist`; then they are kept as calibrations are: written atomically
into the engine's own
folder at intervals and at the end, and read from there when they are first needed. The folder
belongs to one model and one engine: engines of one model learn apart, each from what it served,
unless an Exchange takes what may be written down to the others and brings theirs. Then that is
where it is kept, and no file of learned outputs is written here.

Nothing here is on a step's path: `learn` puts a copy of the ids into a queue, and a thread of low
priority keeps the reservoirs, writes files, and builds layers (drafters.learned), hardly ever while
a request waits for its first token (`gives_way`). `poll` says between two steps which layers are
new. Sequences that run keep the drafter they began with.

TaskControl hands it the outputs of requests that have finished well, makes drafters anew where a
layer is new, and answers ("control", ...) messages, which report, reload and forget.

Written by the engine's thread: calibrations, queue, `gives_way`. By the worker: reservoirs, files,
`layers`, `_sizes` (whole entries at a time).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from drafters.array_file import ArrayFileError
from server.engine.calibrations import OF_SALT, Calibrations, digest, keep_some
from server.engine.draft import DrafterRegistry
from server.engine.sequence import Sequence
from server.types import SpeculationParams

if TYPE_CHECKING:
    from drafters.base import Drafter
    from drafters.corpus import Corpus
    from drafters.learned import LearnedOutputs
    from drafters.shared_counts import Counts, TableId
    from server.types import SharedFigures


Int32 = npt.NDArray[np.int32]
Job = Callable[[], object]

_log = logging.getLogger(__name__)

_LOOK_MS = 500
MOST_WAIT_S = 0.5  # that a layer gives way to requests that wait for their first token


# -- what is told between the threads, and to other engines ----------------------------------------


Key = tuple[str, str]
"""(task, scope)"""
Example = tuple[Int32, Int32]
"""(prompt ids, output ids)"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a key, over the task's corpus file, if it has one. generation: counted up
    where a task forgets. persist: its outputs may be on disk, and travel. fingerprint: of the
    ids."""

    key: Key
    generation: int
    corpus: str | None
    max_tokens: int
    persist: bool
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version that was published. examples: its own, oldest first. tables: the counts of all
    engines, this one's too."""

    wanted: Wanted
    examples: SequenceOf[Example]
    tables: Mapping[TableId, Counts]


class Exchange(Protocol):
    """The seam by which what one engine learned reaches others, and theirs reaches it. A TaskStore
    hands on every finished output of a task whose learned outputs may be written down, and takes in
    what comes. What is behind it (server/fleet/learning) runs in threads of its own.

    Called from any thread; returns at once."""

    def start(self, on_arrival: Callable[[Arrival], None]) -> None:
        """on_arrival: called in a thread of the exchange. Before all else."""

    def open(self, wanted: Wanted) -> None:
        """From now on what others learned of this key is wanted; the last word counts."""

    def append(self, key: Key, example: Example) -> None:
        """An output that was finished; of a key that is open."""

    def count(self, key: Key, table: TableId, counts: Counts) -> None:
        """Drafts that came true since the last call; dropped for a key that is not open."""

    def unpublished(self, key: Key) -> list[Example]:
        """What was appended and is in no version that has arrived, oldest first."""

    def forget(self, task: str) -> None:
        """What was appended and not sent yet is dropped; keys are to be opened again."""

    def figures(self) -> tuple[SharedFigures, ...]:
        """By task."""

    def close(self) -> None:
        """Send what is left; returns when that is done or has failed."""


# -- learned outputs, as the thread that learns keeps them -----------------------------------------


MAX_PROMPT = 1024  # tokens of a prompt, its last ones, that are kept with an output
MAX_FILES = 256  # learned files in an engine's folder; of salts, which clients invent, go first
MAX_HELD_TOKENS = 1_000_000  # in all reservoirs in memory and their layers


@dataclass(slots=True)
class Reservoir:
    """num_unbuilt, num_unsaved: outputs that are in no layer, in no file; the first that is learned
    is not counted, as it stands beside the next request without a layer (drafters.auto.retrieval),
    and many scopes have but one. is_wanted: whether its layer is drafted from now. Times are
    time.monotonic()."""

    wanted: Wanted
    outputs: LearnedOutputs
    num_unbuilt: int = 0
    num_unsaved: int = 0
    is_wanted: bool = True
    saved_at_s: float = field(default_factory=time.monotonic)

    @property
    def is_due(self) -> bool:
        """Whether a new layer is worth its time: where nobody drafts from it, only once as much
        again was learned, so that all builds together take twice the last one's."""
        return self.num_unbuilt >= max(1, 0 if self.is_wanted else (len(self.outputs) + 1) // 2)

    def rebuild(self) -> None:
        """Its layer is to be built anew, whatever was learned."""
        self.num_unbuilt, self.is_wanted = max(1, self.num_unbuilt), True

    def restore(self, path: Path) -> None:
        """What `save` wrote, where that is there and right."""
        key = self.wanted.key
        try:
            fingerprint = self.wanted.fingerprint
            self.outputs.restore(path, fingerprint=fingerprint, scope=digest(*key))
            self.num_unbuilt = len(self.outputs)
        except FileNotFoundError:
            pass
        except (ArrayFileError, OSError) as error:
            _log.warning("task %s learns anew: %s", key[0], error)

    def replace(self, examples: Iterable[Example]) -> None:
        """Hold these, oldest first; those that were not held before are in no layer."""
        from drafters.learned import text_of

        outputs, held = _outputs(self.wanted), {text_of(*one) for one in self.outputs.examples()}
        for prompt, output in examples:
            outputs.add(prompt, output)
        self.num_unbuilt += sum(text_of(*one) not in held for one in outputs.examples())
        outputs.num_seen = self.outputs.num_seen
        self.outputs = outputs

    def save(self, path: Path) -> bool:
        """Write it, and keep no more such files than may be. Whether that was possible."""
        key = self.wanted.key
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.outputs.save(path, fingerprint=self.wanted.fingerprint, scope=digest(*key))
            keep_some(path.parent.glob("learned-*.bin"), MAX_FILES)
            return True
        except OSError as error:
            _log.warning("task %s: what it learned could not be written: %s", key[0], error)
            return False


def _outputs(wanted: Wanted) -> LearnedOutputs:
    from drafters.learned import LearnedOutputs

    seed = int(digest(*wanted.key), 16)
    return LearnedOutputs(wanted.max_tokens, max_prompt=MAX_PROMPT, seed=seed)


# -- the store -------------------------------------------------------------------------------------


class TaskStore:
    """Calibration and learned outputs of tasks (see the top of this file). Public methods are
    called from the engine's thread."""

    def __init__(
        self,
        folder: Path | None,
        *,
        fingerprint: str | Callable[[str], str],
        save_every_s: float = 60.0,
        build_share: float = 0.05,
        max_scopes: int = 64,
        max_queued: int = 4096,
        exchange: Exchange | None = None,
    ) -> None:
        """folder: where to keep things, or None. fingerprint: of the tokenizer; of a scope's, which
        raises ValueError for an adapter that is not loaded.

        save_every_s: seconds between writes. build_share: of the time may go into building layers.
        max_scopes: reservoirs in memory; those used longest ago leave it (and are read again when
        they are needed), also where there are more than MAX_HELD_TOKENS. max_queued: finished
        outputs that wait for the worker; more are not learned. exchange: with other engines."""
        self._folder = folder
        self._fingerprint_of = (
            (lambda _: fingerprint) if isinstance(fingerprint, str) else fingerprint
        )
        self._save_every_s = save_every_s
        self._build_share = build_share
        self._max_scopes = max_scopes
        self._max_queued = max_queued

        # The engine's thread.
        self.gives_way = False
        self._exchange = exchange
        self._calibrations = Calibrations(
            folder,
            save_every_s,
            self._put,
            None if exchange is None else exchange.count,
        )
        self.calibrate = self._calibrations.calibrate
        self.observe = self._calibrations.observe
        self.seen = self._calibrations.seen
        self._num_learned: dict[str, int] = {}
        self._opened: dict[Key, str | None] = {}
        self._generations: dict[str, int] = {}
        self._closed = False

        # The worker's.
        self._jobs: Queue[Job] = Queue()
        self._has_ended = False
        self._reservoirs: OrderedDict[Key, Reservoir] = OrderedDict()
        self.layers: dict[Key, tuple[Wanted, Corpus]] = {}  # as it was wanted; over its corpus
        self._sizes: dict[Key, tuple[int, int]] = {}  # tokens held, outputs ever learned
        self._fresh: deque[Key] = deque()
        self._totals: deque[tuple[Key, Mapping[TableId, Counts]]] = deque()
        self._next_build_s = 0.0
        self._gave_way_s = 0.0
        self._thread: threading.Thread | None = None
        if exchange is not None:
            exchange.start(lambda arrival: self._jobs.put(partial(self._adopt, arrival)))

    # -- calibration ------------------------------------------------------------------------

    def report(self, task: str, drafter: Drafter | None) -> Callable[[], dict[str, Any]]:
        """What gives, in any thread, plain values for GET /v1/tasks/{task}; it may read files.

        What Calibrations.report tells of the drafter's table, if it has one: each scope's began
        with what the corpus says. num_steps, num_tokens: decayed, of finished requests.
        num_learned_tokens: held now; num_learned_outputs: ever learned.
        """
        name = "off" if drafter is None else drafter.name
        table = getattr(drafter, "trust", None) or getattr(drafter, "calibration", None)
        num_steps, num_tokens = self._calibrations.tally(task, name)
        sizes = [size for key, size in list(self._sizes.items()) if key[0] == task]
        return lambda: {
            **({} if table is None else self._calibrations.report(table)),
            "num_steps": num_steps,
            "num_tokens": num_tokens,
            "num_learned_tokens": sum(tokens for tokens, _ in sizes),
            "num_learned_outputs": sum(outputs for _, outputs in sizes),
            "num_learned_scopes": len(sizes),
        }

    # -- learning ---------------------------------------------------------------------------

    def learn(
        self,
        task: str,
        scope: str,
        corpus: str | None,
        max_tokens: int,
        prompt_ids: Int32,
        output_ids: Int32,
        persist: bool = False,
        *,
        rests: bool = False,
    ) -> None:
        """Take a finished output. corpus: the file that the task drafts from, if it has one.
        persist: what the scope learns is written to disk, and read from there. rests: drafts do not
        pay there now, so that a new layer is not urgent."""
        if self._jobs.qsize() >= self._max_queued:
            return
        key = (task, scope)
        # Asked here: the scope's adapter may be unloaded before the worker comes to it.
        try:
            fingerprint = self._fingerprint_of(scope)
        except ValueError:  # it was unloaded while it answered
            return
        self._opened[key] = corpus
        self._num_learned[task] = self._num_learned.get(task, 0) + 1
        self.seen(task, scope).add(output_ids)
        generation = self._generations.get(task, 0)
        wanted = Wanted(key, generation, corpus, max_tokens, persist, fingerprint)
        example = prompt_ids[-MAX_PROMPT:].copy(), output_ids.copy()
        self._put(partial(self._take, wanted, example, is_wanted=not rests))

    def learned(
        self, task: str, scope: str, corpus: str | None, max_tokens: int, persist: bool = False
    ) -> Corpus | None:
        """The layer to draft from if it is built, else None: `poll` reports it soon."""
        key = (task, scope)
        generation = self._generations.get(task, 0)
        known = self.layers.get(key)  # the worker may take it out meanwhile
        if known is not None and (known[0].corpus, known[0].generation) == (corpus, generation):
            return known[1]
        if key not in self._opened or self._opened[key] != corpus:
            # Of a new scope that is not on disk there is nothing to read: the worker would take the
            # cores of its first step.
            if persist or key in self._sizes:
                self._opened[key] = corpus
                fingerprint = self._fingerprint_of(scope)
                wanted = Wanted(key, generation, corpus, max_tokens, persist, fingerprint)
                self._put(partial(self._open, wanted))
        return None

    def forget(self, task: str) -> None:
        """Drop what a task has learned. Drafts stop at once; its files are deleted soon after."""
        self._generations[task] = self._generations.get(task, 0) + 1
        for key in [key for key in self._opened if key[0] == task]:
            del self._opened[key]
        self._calibrations.forget_seen(task)
        self._put(partial(self._drop_task, task))

    def refresh(self) -> None:
        """Build all layers anew: a corpus may have changed under its name."""
        if self._thread is not None:
            self._put(self._rebuild)

    def sizes(self) -> tuple[tuple[str, int, int], ...]:
        """(task, tokens held, outputs learned since the start) of every task that learns."""
        held = dict.fromkeys(self._num_learned, 0)
        for (task, _), (num_tokens, _) in list(self._sizes.items()):
            held[task] = held.get(task, 0) + num_tokens
        return tuple(
            (task, num_tokens, self._num_learned.get(task, 0))
            for task, num_tokens in sorted(held.items())
        )

    def shared(self) -> tuple[SharedFigures, ...]:
        """Of tasks whose learned outputs travel."""
        return () if self._exchange is None else self._exchange.figures()

    # -- upkeep -----------------------------------------------------------------------------

    def poll(self) -> list[Key]:
        """Between steps: the (task, scope) whose drafters are to be made anew. Saves when due."""
        self._calibrations.poll()
        while self._totals:
            self._calibrations.adopt(*self._totals.popleft())
        if not self._fresh:
            return []
        fresh: list[Key] = []
        while self._fresh:
            key = self._fresh.popleft()
            if key not in self.layers:
                self._opened.pop(key, None)  # put away: to be opened again when it is needed
            fresh.append(key)
        return fresh

    def due_ms(self) -> int | None:
        """Milliseconds until poll() has something to do; None for nothing."""
        due_ms = self._calibrations.due_ms()
        if due_ms != 0 and self._thread is not None and self._jobs.unfinished_tasks:
            return 50
        if self._exchange is not None and self._opened:  # something may have come from others
            return _LOOK_MS if due_ms is None else min(due_ms, _LOOK_MS)
        return due_ms

    def close(self) -> None:
        """Write everything. Idempotent; outputs that come later are lost."""
        if self._closed:
            return
        self._calibrations.flush()
        self._closed = True
        if self._thread is not None:
            self._jobs.put(self._end)
            self._thread.join(30.0)
        if self._exchange is not None:
            self._exchange.close()

    def _put(self, job: Job) -> None:
        """Let the worker do something."""
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="task-memory", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    # -- files ------------------------------------------------------------------------------

    def _learned_file(self, key: Key) -> Path | None:
        if self._folder is None or self._exchange is not None:
            return None
        of_salt = "" if key[1].endswith("\0") else OF_SALT
        return self._folder / f"learned-{digest(key[0])}-{digest(key[1])}{of_salt}.bin"

    # -- the worker -------------------------------------------------------------------------

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux: the priority of this thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while not self._has_ended:
            is_idle = not any(r.is_due or r.num_unsaved for r in self._reservoirs.values())
            job: Job | None = None
            try:
                with contextlib.suppress(Empty):
                    job = self._jobs.get(timeout=None if is_idle else 0.05)
                    job()
                if self._has_ended or self._jobs.empty():
                    self._tend()
            except Exception:
                _log.exception("what a task learned could not be kept")
            if job is not None:
                self._jobs.task_done()

    def _end(self) -> None:
        """Write everything, then end."""
        self._has_ended = True

    def _rebuild(self) -> None:
        """A corpus may have changed."""
        for reservoir in self._reservoirs.values():
            reservoir.rebuild()

    def _open(self, wanted: Wanted) -> Reservoir:
        """The reservoir of a key, read from its file if it is not in memory."""
        key = wanted.key
        reservoir = self._reservoirs.get(key)
        if reservoir is None:
            reservoir = Reservoir(wanted, _outputs(wanted))
            path = self._learned_file(key) if wanted.persist else None
            if path is not None:
                reservoir.restore(path)
            self._reservoirs[key] = reservoir
            self._note_size(key, reservoir)
            self._open_exchange(reservoir)
        reservoir.outputs.max_tokens = wanted.max_tokens
        known, reservoir.wanted = reservoir.wanted, wanted
        if (known.corpus, known.persist) != (wanted.corpus, wanted.persist):
            reservoir.rebuild()
            self._open_exchange(reservoir)
        self._reservoirs.move_to_end(key)
        return reservoir

    def _open_exchange(self, reservoir: Reservoir) -> None:
        if self._exchange is not None and reservoir.wanted.persist:
            self._exchange.open(reservoir.wanted)

    def _adopt(self, arrival: Arrival) -> None:
        """What was published, and what was learned here since, takes the place of what is held."""
        key = arrival.wanted.key
        reservoir = self._reservoirs.get(key)
        if self._exchange is None or reservoir is None or not reservoir.wanted.persist:
            return
        if reservoir.wanted.generation != arrival.wanted.generation:
            return
        reservoir.replace(chain(arrival.examples, self._exchange.unpublished(key)))
        self._totals.append((key, arrival.tables))
        self._note_size(key, reservoir)
        if not arrival.examples and self.layers.pop(key, None) is not None:  # it was forgotten
            reservoir.rebuild()
            self._fresh.append(key)

    def _take(self, wanted: Wanted, example: Example, *, is_wanted: bool) -> None:
        """Learn a finished output. is_wanted: see Reservoir."""
        reservoir = self._open(wanted)
        if self._exchange is not None and wanted.persist:
            self._exchange.append(wanted.key, example)
        is_new = reservoir.outputs.add(*example)
        reservoir.num_unbuilt += is_new and len(reservoir.outputs) > 1
        reservoir.is_wanted = is_wanted
        reservoir.num_unsaved += is_new and wanted.persist
        self._note_size(wanted.key, reservoir)

    def _note_size(self, key: Key, reservoir: Reservoir) -> None:
        self._sizes[key] = (reservoir.outputs.num_tokens, reservoir.outputs.num_seen)

    def _tend(self) -> None:
        """Build and write what is due."""
        for key, reservoir in list(self._reservoirs.items()):
            # Those used longest ago come first: they get no more, so nobody waits for ever.
            now_s = time.monotonic()
            if reservoir.is_due and not self._has_ended and self._may_build(now_s):
                self._build(key, reservoir)
            if reservoir.num_unsaved and (
                self._has_ended or now_s - reservoir.saved_at_s >= self._save_every_s
            ):
                self._save_reservoir(key, reservoir)
        while len(self._reservoirs) > 1 and (
            len(self._reservoirs) > self._max_scopes or self._held() > MAX_HELD_TOKENS
        ):
            key, reservoir = self._reservoirs.popitem(last=False)
            if reservoir.num_unsaved:
                self._save_reservoir(key, reservoir)
            self.layers.pop(key, None)
            self._sizes.pop(key, None)
            self._fresh.append(key)

    def _may_build(self, now_s: float) -> bool:
        """Whether it is time for a layer, and nobody waits for a first token, or somebody has at
        every look for MOST_WAIT_S."""
        if now_s < self._next_build_s:
            return False
        since_s = self._gave_way_s or now_s
        waits = self.gives_way and now_s - since_s < MOST_WAIT_S
        self._gave_way_s = since_s if waits else 0.0
        return not waits

    def _held(self) -> int:
        layers = (layer.automaton.num_states // 2 for _, layer in self.layers.values())
        return sum(layers) + sum(r.outputs.num_tokens for r in self._reservoirs.values())

    def _build(self, key: Key, reservoir: Reservoir) -> None:
        from drafters.corpus import Corpus, build_corpus

        began_s = time.monotonic()
        reservoir.num_unbuilt = 0
        base: Corpus | None = None
        wanted, fingerprint = reservoir.wanted, reservoir.wanted.fingerprint
        if wanted.corpus is not None:
            try:
                base = Corpus.load(wanted.corpus, fingerprint=fingerprint)
            except (OSError, ValueError) as error:
                _log.warning("task %s learns beside no corpus: %s", key[0], error)
        if len(reservoir.outputs) == 0:
            return
        layer = build_corpus(reservoir.outputs.examples(), base=base, fingerprint=fingerprint)
        self.layers[key] = wanted, layer
        now_s = time.monotonic()
        self._next_build_s = now_s + (now_s - began_s) / self._build_share
        self._fresh.append(key)

    def _save_reservoir(self, key: Key, reservoir: Reservoir) -> None:
        reservoir.saved_at_s = time.monotonic()
        path = self._learned_file(key)
        if path is None or reservoir.save(path):
            reservoir.num_unsaved = 0

    def _drop_task(self, task: str) -> None:
        if self._exchange is not None:
            self._exchange.forget(task)
        for key in [key for key in self._reservoirs if key[0] == task]:
            del self._reservoirs[key]
            self.layers.pop(key, None)
            self._fresh.append(key)
        for key in [key for key in self._sizes if key[0] == task]:
            del self._sizes[key]
        if self._folder is not None:
            for path in self._folder.glob(f"learned-{digest(task)}-*.bin"):
                path.unlink(missing_ok=True)


# -- what the API asks of it -----------------------------------------------------------------------


class TaskControl:
    """Keeps and reports what was learned of tasks. memory: None keeps nothing."""

    def __init__(self, drafters: DrafterRegistry, memory: TaskStore | None) -> None:
        self._drafters = drafters
        self._memory = memory
        self._outputs: dict[str, list[Int32] | None] = {}  # of open requests; None: not to learn

    @property
    def controls(self) -> dict[str, Callable[[Any], Any]]:
        """What ("control", ...) messages may call, by name, with plain values."""
        return {
            "task_report": self._report,
            "task_forget": self._forget,
            "drafters_reload": self._reload,
        }

    def take_learned(self, *, gives_way: bool = False) -> None:
        """Make drafters anew where the learned outputs have a new layer. gives_way: learning waits,
        for a request's first token does."""
        if self._memory is not None:
            self._memory.gives_way = gives_way
            for task, scope in self._memory.poll():
                self._drafters.forget(task, scope)

    def remember(self, sequence: Sequence, finished: bool, is_last: bool) -> None:
        """A choice has ended. finished: it ended well. is_last: its request has ended with it; then
        its outputs are learned, unless one of its choices did not end well."""
        memory = self._memory
        if memory is None:
            return
        request, num_output = sequence.request, sequence.num_output
        if finished and num_output:
            scope, name = request.scope, sequence.drafter_name
            memory.observe(request.task, name, scope, sequence.num_steps, num_output)
        spec = request.speculation
        if spec.learn_tokens <= 0:
            return
        outputs = self._outputs.pop(request.request_id, [])
        if not finished:
            outputs = None
        elif outputs is not None and num_output:
            outputs.append(sequence.ids[sequence.prompt_len : sequence.num_tokens])
        if not is_last:
            self._outputs[request.request_id] = outputs
            return
        prompt = sequence.ids[: sequence.prompt_len]
        for output in outputs or ():
            memory.learn(
                request.task,
                request.scope,
                spec.corpus,
                spec.learn_tokens,
                prompt,
                output,
                spec.persists,
                rests=sequence.is_resting,
            )

    def _report(self, payload: Any) -> Any:
        """What gives what the engine keeps of a task. payload: {"task", "drafter", "options",
        "corpus", "adapter"}."""
        if self._memory is None:
            return {}
        spec = SpeculationParams(
            payload["drafter"],
            1,
            tuple((name, value) for name, value in payload["options"]),
            payload["corpus"],
            adapter=payload.get("adapter", ""),
        )
        drafter = self._drafters.resolve(payload["task"], spec)
        return self._memory.report(payload["task"], drafter)

    def _reload(self, _: Any) -> None:
        """Make drafters anew for later requests; corpora may have changed."""
        self._drafters.forget()
        if self._memory is not None:
            self._memory.refresh()

    def _forget(self, payload: Any) -> None:
        """Drop what a task has learned. payload: {"task"}."""
        if self._memory is not None:
            self._memory.forget(payload["task"])
        self._drafters.forget(payload["task"])
