"""AdapterShelf: which adapters of its base model an engine knows, and which are in memory.

    register   the engine knows the adapter from now on; a thread reads and checks it
    use        an open request needs it in memory; a thread reads it if it is not there
    release    the request has ended
    forget     no further request may name it; it leaves memory when the last request has ended
    poll       between steps: give what the threads have read a place at the runner

An engine may know hundreds of adapters; `most` of them are in memory. To make room for another, the
least recently used one leaves memory. Pinned adapters and those of open requests stay. Where none
may leave, the request is refused: otherwise it would wait for other clients' requests to end.

An adapter's id holds a hash of its content. So what was kept for one adapter (prefix cache, learned
outputs, calibration) never serves another adapter of the same name.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from drafters.auto.copying import Pieces
from server.engine.batch import PackedAdapter, Runner
from server.engine.grammar import GrammarCompiler
from server.token_bytes import TokenBytes
from server.types import AdapterOrder
from vocab_store.enrichment import Enrichment

_log = logging.getLogger(__name__)

MAX_NAMES = 64
"""Adapters that have figures of their own; further ones share those of OTHER_ADAPTERS."""
OTHER_ADAPTERS = "(others)"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a model or an adapter mean, apart from weights.

    fingerprint: hex, of the ids, as corpora name it. enrichment, stop_table, grammars: None where
    there is none, or where an adapter has the base model's. own_head: whether the adapter's head
    has rows of its own, so that a slice of the base's head does not fit it. pieces: the bytes of
    the ids, for drafting; None: nothing is copied by text.
    """

    fingerprint: str = ""
    enrichment: Enrichment | None = None
    stop_table: TokenBytes | None = None
    grammars: GrammarCompiler | None = None
    own_head: bool = False
    pieces: Pieces | None = None


Reader = Callable[[AdapterOrder], Vocabulary]
"""Reads what an adapter's ids mean, and checks its folder. Raises TailorError."""


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter that the engine knows. Written by the shelf alone.

    vocabulary: None until it was read. place: its index at the runner, -1 while not in memory.
    problem: why it cannot be used, or "". uses: open requests. forgotten: no further request may
    name it.
    """

    order: AdapterOrder
    vocabulary: Vocabulary | None = None
    place: int = -1
    problem: str = ""
    uses: int = 0
    forgotten: bool = False
    num_bytes: int = 0
    reading: Future[Vocabulary] | None = None
    packed: Future[PackedAdapter] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a step may have its rows."""
        return self.place >= 0 and self.vocabulary is not None

    @property
    def has_news(self) -> bool:
        """Whether poll() has something to do for it."""
        if self.is_ready or self.problem:
            return True
        waiting = [future for future in (self.reading, self.packed) if future is not None]
        return bool(waiting) and all(future.done() for future in waiting)

    @property
    def takes_room(self) -> bool:
        """Whether it is in memory or being read."""
        return self.place >= 0 or self.packed is not None


class AdapterShelf:
    """The adapters of one engine (see the top of this file). Public methods are called from the
    engine's thread.

    read: reads what an adapter's ids mean; server.wiring sets it. figures: by name, of each adapter
    that was in memory or asked for: num_requests, num_loads, num_evictions since the engine's
    start, num_bytes in memory now.
    """

    def __init__(self, runner: Runner, most: int) -> None:
        """most: adapters in memory at once."""
        self.read: Reader = lambda _: Vocabulary()
        self._runner = runner
        self._most = most
        self.known: OrderedDict[str, Adapter] = OrderedDict()  # the one used longest ago first
        self._free = list(range(most - 1, -1, -1))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self.figures: dict[str, Counter[str]] = {}

    def settle(self) -> list[str]:
        """Wait until everything registered is read; returns what is wrong with those that cannot be
        used. Called at start only, because it blocks the loop."""
        for adapter in list(self.known.values()):
            under_way: list[Future[Any]] = [f for f in (adapter.reading, adapter.packed) if f]
            wait(under_way)
        self.poll()
        return [
            f"adapter {adapter.order.name}: {adapter.problem}"
            for adapter in self.known.values()
            if adapter.problem
        ]

    def _count(self, adapter: Adapter, **more: int) -> None:
        """Add to the figures of an adapter's name; num_bytes sums all adapters of that name."""
        name = adapter.order.name
        if name not in self.figures and len(self.figures) >= MAX_NAMES:
            name = OTHER_ADAPTERS
        self.figures.setdefault(name, Counter()).update(more)

    # -- what is known ----------------------------------------------------------------------

    def register(self, order: AdapterOrder, *, load: bool = True) -> None:
        """Add an adapter. load: read its weights as well, where there is room."""
        adapter = self.known.setdefault(order.adapter_id, Adapter(order))
        is_new = bool(adapter.problem) or (adapter.vocabulary is None and adapter.reading is None)
        adapter.order, adapter.problem, adapter.forgotten = order, "", False
        if is_new:
            adapter.reading = self._threads.submit(self.read, order)
        if ((load and is_new) or order.pinned) and not adapter.takes_room and self._make_room():
            self._load(adapter)

    def forget(self, adapter_id: str) -> None:
        """Refuse further requests for it; unknown ids are fine."""
        adapter = self.known.get(adapter_id)
        if adapter is not None:
            adapter.forgotten = True
            self._let_go(adapter)

    def vocabulary(self, adapter_id: str) -> Vocabulary | None:
        """What the ids of an adapter mean, None until it was read. Called from any thread."""
        adapter = self.known.get(adapter_id)
        return None if adapter is None else adapter.vocabulary

    # -- requests ---------------------------------------------------------------------------

    def refusal(self, adapter_id: str) -> tuple[str, str] | None:
        """(message, code) for a request that cannot have its adapter, or None."""
        adapter = self.known.get(adapter_id)
        if adapter is None or adapter.forgotten:
            return "the adapter is not loaded (any more)", "model_not_found"
        if adapter.takes_room or self._num_free > 0 or self._victim() is not None:
            return None
        text = (
            f"all {self._most} adapters in memory are in use (engine.max_adapters); try again later"
        )
        return text, "adapters_full"

    def use(self, adapter_id: str) -> Adapter:
        """The adapter of an open request; it is read now if it is not in memory. Called after
        `refusal` said None; the caller calls `release` once."""
        adapter = self.known[adapter_id]
        self.known.move_to_end(adapter_id)
        adapter.uses += 1
        self._count(adapter, num_requests=1)
        if not adapter.takes_room and self._make_room():
            adapter.problem = ""
            self._load(adapter)
        return adapter

    def release(self, adapter: Adapter) -> None:
        """A request that uses it has ended."""
        adapter.uses -= 1
        self._let_go(adapter)

    # -- between steps ----------------------------------------------------------------------

    def poll(self) -> None:
        """Take what the threads have read."""
        for adapter in list(self.known.values()):
            if adapter.reading is not None and adapter.reading.done():
                reading, adapter.reading = adapter.reading, None
                error = reading.exception()
                if error is None:
                    adapter.vocabulary = reading.result()
                else:
                    self._fail(adapter, error)
            if adapter.packed is not None and adapter.packed.done() and adapter.reading is None:
                packed, adapter.packed = adapter.packed, None
                self._place(adapter, packed)

    def _place(self, adapter: Adapter, packed: Future[PackedAdapter]) -> None:
        try:
            weights = packed.result()
            if adapter.problem or weights.vocab_size != adapter.order.vocab_size:
                raise ValueError(adapter.problem or "its files have changed since it was loaded")
            adapter.place = self._free.pop()
            self._runner.hold_adapter(adapter.place, weights)
        except Exception as error:
            if adapter.place >= 0:  # the device has no room for it, say
                self._drop(adapter)
            self._fail(adapter, error)
            return
        adapter.num_bytes = weights.num_bytes
        self._count(adapter, num_loads=1, num_bytes=adapter.num_bytes)
        self._let_go(adapter)

    def _fail(self, adapter: Adapter, error: BaseException) -> None:
        adapter.problem = str(error)[:300] or type(error).__name__
        _log.error("adapter %s cannot be used: %s", adapter.order.adapter_id, adapter.problem)
        self._let_go(adapter)

    def _load(self, adapter: Adapter) -> None:
        if adapter.vocabulary is None and adapter.reading is None:
            adapter.reading = self._threads.submit(self.read, adapter.order)
        adapter.packed = self._threads.submit(self._runner.pack_adapter, adapter.order.folder)

    def _victim(self) -> Adapter | None:
        """The least recently used adapter that may leave memory, or None."""
        for adapter in self.known.values():
            if adapter.place >= 0 and not adapter.uses and not adapter.order.pinned:
                return adapter
        return None

    @property
    def _num_free(self) -> int:
        return self._most - sum(adapter.takes_room for adapter in self.known.values())

    def _make_room(self) -> bool:
        """Take one adapter out of memory if all places are taken. False: none may leave."""
        if self._num_free > 0:
            return True
        victim = self._victim()
        if victim is None:
            return False
        self._count(victim, num_evictions=1)
        self._drop(victim)
        return True

    def _drop(self, adapter: Adapter) -> None:
        self._runner.drop_adapter(adapter.place)
        self._free.append(adapter.place)
        self._count(adapter, num_bytes=-adapter.num_bytes)
        adapter.place, adapter.num_bytes = -1, 0

    def _let_go(self, adapter: Adapter) -> None:
        """Take an adapter that nobody may use any more out of memory, and forget it."""
        if not adapter.forgotten or adapter.uses or adapter.packed is not None:
            return
        if adapter.place >= 0:
            self._drop(adapter)
        self._close(self.known.pop(adapter.order.adapter_id, adapter))

    def _close(self, adapter: Adapter) -> None:
        if adapter.vocabulary is not None and adapter.vocabulary.grammars is not None:
            adapter.vocabulary.grammars.close()

    def close(self) -> None:
        """End the threads, of grammars too. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for adapter in self.known.values():
            self._close(adapter)

    # -- what the API may ask ---------------------------------------------------------------

    @property
    def controls(self) -> Mapping[str, Callable[[Any], Any]]:
        """What ("control", ...) messages may call, by name, with plain values."""
        return {
            "adapter_register": lambda payload: self.register(AdapterOrder(**payload)),
            "adapter_forget": self.forget,
            "adapter_states": self._states,
        }

    def _states(self, _: Any) -> list[dict[str, Any]]:
        """The state of each adapter that requests may name."""
        self.poll()
        return [
            {
                "id": adapter.order.adapter_id,
                "pending": adapter.reading is not None or adapter.packed is not None,
                "in_memory": adapter.place >= 0,
                "problem": adapter.problem,
                "uses": adapter.uses,
                "num_bytes": adapter.num_bytes,
            }
            for adapter in self.known.values()
            if not adapter.forgotten
        ]
