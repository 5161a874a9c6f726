"""What an engine tells of itself when somebody asks: a row a series, its declaration and its value.

`FIGURES` is the one table. Its declarations go to the API in ModelInfo.figures, its values answer
the control "figures", in the same order. To add a series, add a row: /metrics has it, with the
labels `engine` and `model` before its own. Counters and histograms count from the engine's start.
StepFigures notes what each step took, for them and for who learns from it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from server.engine.adapters import OTHER_ADAPTERS, AdapterShelf
from server.engine.admission import Admission
from server.engine.batch import Drawn, MeasuredRunner, Runner
from server.engine.blocks import BlockPool
from server.engine.build import Built
from server.engine.gain import REST, Gain
from server.engine.plan import Rows, Scheduler
from server.engine.slices import SliceBook
from server.engine.step_times import CostTable
from server.engine.task_store import TaskStore
from server.engine.trees import Trees
from server.types import (
    LATENCY_BUCKETS_S,
    ROW_BUCKETS,
    SHORT_BUCKETS_S,
    DeviceFigures,
    Figure,
    FigureKind,
    FigureValue,
)

_MOST_UNCOUNTED = 256  # steps


class StepTotals:
    """What all steps took. rows: of prompts, of last tokens, of drafts. ceiling: the most nodes
    that could have paid in the last step. Of the steps' values those of the last ones lie as they
    came: they are counted when somebody asks, or when there are many."""

    EDGES = (LATENCY_BUCKETS_S, LATENCY_BUCKETS_S, SHORT_BUCKETS_S, SHORT_BUCKETS_S, ROW_BUCKETS)

    def __init__(self) -> None:
        self.num_steps = 0
        self.rows = [0, 0, 0]
        self.ceiling = 0
        self._last: list[tuple[float, ...]] = []
        self._counts = [np.zeros(len(edges) + 1, np.int64) for edges in self.EDGES]
        self._sums = np.zeros(len(self.EDGES))

    def observe(self, *values: float) -> None:
        """One more step: its seconds, those of model, drafting and host, and its rows."""
        self.num_steps += 1
        self._last.append(values)
        if len(self._last) == _MOST_UNCOUNTED:
            self._count()

    def histogram(self, i: int) -> FigureValue:
        """One of `EDGES`, as Figure has it: how many values lay in each bucket and above the last,
        and their sum."""
        self._count()
        return tuple(self._counts[i].tolist()), float(self._sums[i])

    def _count(self) -> None:
        values, self._last = np.array(self._last).reshape(-1, len(self.EDGES)), []
        self._sums += values.sum(axis=0)
        for counts, edges, column in zip(self._counts, self.EDGES, values.T, strict=True):
            counts += np.bincount(np.searchsorted(edges, column), minlength=len(counts))


class Parts(Protocol):
    """Of an engine, what its figures are read from."""

    scheduler: Scheduler
    admission: Admission
    pool: BlockPool
    slices: SliceBook
    adapters: AdapterShelf
    memory: TaskStore | None
    runner: Runner
    steps: StepTotals


Read = Callable[[Parts], FigureValue]


def _row(kind: FigureKind, name: str, text: str, read: Read, *labels: str) -> tuple[Figure, Read]:
    return Figure(name, kind, text, labels), read


def _steps(i: int, name: str, text: str) -> tuple[Figure, Read]:
    figure = Figure(name, "histogram", text, (), StepTotals.EDGES[i])
    return figure, lambda e: e.steps.histogram(i)


def _adapters(kind: str) -> Read:
    """By name; the name of further ones is there from the start, so that an engine without adapters
    reads 0."""

    def values(e: Parts) -> FigureValue:
        found = {OTHER_ADAPTERS: Counter[str](), **e.adapters.figures}
        return tuple(((name,), sums[kind]) for name, sums in found.items())

    return values


def _learned(at: int) -> Read:
    """By task; at: of TaskStore.sizes."""
    return lambda e: (
        () if e.memory is None else tuple(((row[0],), row[at]) for row in e.memory.sizes())  # type: ignore[misc]
    )


def _shared(field: str) -> Read:
    """By task; field: of SharedFigures."""
    return lambda e: (
        ()
        if e.memory is None
        else tuple(((one.task,), getattr(one, field)) for one in e.memory.shared())
    )


def _device(read: Callable[[DeviceFigures], FigureValue]) -> Read:
    """None where there is no accelerator."""

    def value(e: Parts) -> FigureValue:
        runner = e.runner
        figures = runner.device_figures() if isinstance(runner, MeasuredRunner) else None
        return None if figures is None else read(figures)

    return value


FIGURES: tuple[tuple[Figure, Read], ...] = (
    _row("gauge", "num_requests_running", "Sequences in the running batch",
         lambda e: len(e.scheduler.running)),
    _row("gauge", "num_requests_waiting", "Requests waiting in the engine",
         lambda e: len(e.scheduler.waiting) + len(e.admission.preparing)),
    _row("gauge", "num_tokens_waiting", "Prompt tokens waiting",
         lambda e: e.scheduler.num_waiting_tokens),
    _row("gauge", "kv_cache_usage_perc", "Used share of KV blocks, 0 to 1",
         lambda e: (e.pool.num_blocks - e.pool.num_free) / e.pool.num_blocks),
    _row("gauge", "prefix_cache_blocks", "Blocks that hold a reusable prefix",
         lambda e: e.pool.num_cached),
    _row("gauge", "draft_budget", "Most draft rows that could pay in the last step",
         lambda e: e.steps.ceiling),
    _row("gauge", "slice_cache_rows", "LM-head rows copied beside the head",
         lambda e: e.slices.num_rows),
    _row("gauge", "slice_cache_bytes", "Their bytes", lambda e: e.slices.num_bytes),
    _row("gauge", "vocab_verify_every", "Unverified tokens before a verification, adapted last",
         lambda e: e.slices.last_verify_every),
    _row("counter", "slice_cache_hits", "Prompt rows found in the slice cache",
         lambda e: e.slices.index.num_hits),
    _row("counter", "slice_cache_loads", "LM-head rows copied",
         lambda e: e.slices.index.num_loads),
    _row("counter", "slice_cache_evictions", "Rows that the slice cache forgot",
         lambda e: e.slices.index.num_evictions),
    _row("counter", "engine_steps", "Steps", lambda e: e.steps.num_steps),
    _row("counter", "engine_rows", "Rows computed: prefill, decode and draft",
         lambda e: tuple(((kind,), num) for kind, num in
                         zip(("prefill", "decode", "draft"), e.steps.rows, strict=True)),
         "kind"),
    _steps(0, "step_time_seconds", "Wall time of a step"),
    _steps(1, "step_model_time_seconds", "Forward pass and draws of a step"),
    _steps(2, "propose_time_seconds", "Drafting of a step"),
    _steps(3, "step_host_time_seconds", "All of a step but the model"),
    _steps(4, "step_rows", "Rows of a step"),
    _row("counter", "num_preemptions", "Preempted sequences",
         lambda e: e.scheduler.num_preemptions),
    _row("counter", "prefix_cache_queries", "Prompt tokens looked up",
         lambda e: e.scheduler.prefix_queries),
    _row("counter", "prefix_cache_hits", "Prompt tokens found",
         lambda e: e.scheduler.prefix_hits),
    _row("counter", "adapter_requests", "Requests that named it",
         _adapters("num_requests"), "adapter"),
    _row("counter", "adapter_loads", "Times that it was put into memory",
         _adapters("num_loads"), "adapter"),
    _row("counter", "adapter_evictions", "Times that it made room",
         _adapters("num_evictions"), "adapter"),
    _row("gauge", "adapter_bytes", "Bytes of it in memory",
         _adapters("num_bytes"), "adapter"),
    _row("gauge", "learned_tokens", "Learned tokens that are held", _learned(1), "task"),
    _row("counter", "learned_outputs", "Finished outputs that were learned", _learned(2), "task"),
    _row("counter", "learned_segments", "Segments that were written for other replicas",
         _shared("num_written"), "task"),
    _row("gauge", "learned_segments_merged",
         "Segments of all replicas in what this one has from others", _shared("num_merged"),
         "task"),
    _row("gauge", "learned_version", "Version that this one has from others", _shared("version"),
         "task"),
    _row("gauge", "learned_published_timestamp_seconds",
         "When that version was published, as Unix time; 0 for none yet", _shared("published_s"),
         "task"),
    _row("gauge", "device_memory_bytes",
         "Memory of a GPU: reserved and allocated by the engine, free and total of the device",
         _device(lambda d: tuple(((kind,), getattr(d, kind)) for kind in
                                 ("reserved", "allocated", "free", "total"))), "kind"),
    _row("gauge", "device_utilization_ratio",
         "Share of time in which a GPU runs a kernel, by NVML", _device(lambda d: d.utilisation)),
    _row("counter", "cuda_graph_steps",
         "Steps of a GPU by whether they replayed a CUDA graph, captured one first or had none",
         _device(lambda d: tuple(((kind,), num) for kind, num in
                                 zip(("replayed", "captured", "none"), d.steps, strict=True))),
         "kind"),
)  # fmt: skip


def declared() -> tuple[Figure, ...]:
    """The declarations."""
    return tuple(figure for figure, _ in FIGURES)


def values(engine: Parts) -> list[Any]:
    """The values now, in the order of `declared`."""
    return [read(engine) for _, read in FIGURES]


# -- what steps take -------------------------------------------------------------------------------


class StepFigures:
    """Notes every step that succeeded. cost: the budget's table, if there is one."""

    def __init__(self, cost: CostTable | None, gain: Gain, slices: SliceBook) -> None:
        self._cost = cost
        self._gain = gain
        self._slices = slices
        self.totals = StepTotals()
        self._num_alike = 0

    def observe(self, rows: Rows, trees: Trees, built: Built, results: Drawn, began: float) -> None:
        """A step that began at `began` (time.perf_counter) is over."""
        model_s = results.model_s
        step_s = time.perf_counter() - began
        host_s = max(0.0, step_s - model_s)
        batch = built.batch
        num_rows = rows.num_rows + batch.num_draft_rows
        totals = self.totals
        totals.rows[0] += rows.num_prefill_rows
        totals.rows[1] += num_rows - rows.num_prefill_rows - batch.num_draft_rows
        totals.rows[2] += batch.num_draft_rows
        totals.ceiling = trees.ceiling
        totals.observe(step_s, model_s, trees.seconds, host_s, num_rows)
        num_alike = 1
        num_asked, num_opened = trees.num_asked, trees.num_opened
        if rows.is_plain and not (rows.num_prefill_rows or num_asked or num_opened):
            self._num_alike = (self._num_alike + 1) % REST
            if self._num_alike:
                return
            num_alike = REST
        if self._cost is not None:
            num_draws = batch.draw_rows.shape[0] if batch.num_likely else 0
            likely_s = self._cost.likely_s * num_draws
            self._cost.observe(num_rows, built.num_keys, model_s - likely_s)
        num_prompt = rows.num_prefill_rows
        if rows.num_rows > num_prompt:
            num_decode = rows.num_rows - num_prompt
            self._gain.host.observe(
                num_decode, num_asked, host_s, num_prompt, num_alike, num_opened
            )
        head_s = results.head_s
        if head_s > 0.0:
            self._slices.observe(batch, model_s - head_s, head_s, num_prompt > 0)
