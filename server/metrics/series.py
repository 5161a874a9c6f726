"""Every Prometheus series of the server, and who counts what (families.py declares them).

All values are counted in the API process, from the Deltas that also make `usage` (server.api.usage
calls in here), so counters equal the sums of the requests' usage. Names follow vLLM's suffixes
under the prefix `tailor_`. Latency histograms start at 1 ms; propose and host times, which lie far
below that, start at 10 us.

One `Metrics` per app, with a registry of its own: two apps in one process never share a series.

Definitions that are easy to get wrong:
- tokens per step = generation_tokens / spec_decode_num_decode_steps: *all* steps that emit tokens
  count, drafted or not, after the cut at EOS, stop and max_tokens. The step that ends a prompt is
  one of them; replays and `tailor tasks tune` leave it and its token out (docs/drafting.md).
- accepted / verified rows = spec_decode_num_accepted_tokens / spec_decode_num_draft_tokens.
- chance by depth = ..._accepted_tokens_per_pos / ..._offered_per_pos; position 0 is the root's
  child.
- spec_decode_expected_accepted_tokens / ..._draft_tokens: the drafters' estimate for the same rows;
  ..._by_survival has it by tenths of the estimated chance (survival="0.3" is 0.3 to
  0.4). Accepted tokens are counted after the cut at EOS, stop and max_tokens, so that even a
  perfect calibration is observed a little lower.
- draft_budget: rows that could have paid in the last step, had all been accepted; engine_rows
  with kind="draft" are those that were verified.
- inter_token_latency: the gap between two Deltas of a choice, shared equally by the tokens of the
  second one and observed once per token; its sum is the decode time.
- request_time_per_output_token: (last token - first token) / (tokens - 1), once per choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as MetricFamily

from server.metrics.families import (
    AdapterFamilies,
    EngineFamilies,
    LearningFamilies,
    Registry,
    RequestFamilies,
    SpeculationFamilies,
    VocabularyFamilies,
)
from server.metrics.vllm_names import VllmNames
from server.types import (
    AdapterFigures,
    DeviceFigures,
    EngineStats,
    ModelInfo,
    StepCounts,
    VocabularyCounts,
)

_TENTHS = tuple(f"0.{tenth}" for tenth in range(10))


@dataclass(frozen=True, slots=True)
class TaskSeries:
    """The series of one (task, drafter, model), looked up once and not per token.

    pairs: (drafted, accepted) counters by (kind of label, its value).
    """

    labels: tuple[str, str, str]
    pairs: dict[tuple[str, str], tuple[Counter, Counter]]
    prompt_tokens: Counter
    generation_tokens: Counter
    cached_tokens: Counter
    decode_steps: Counter
    drafts: Counter
    draft_tokens: Counter
    accepted_tokens: Counter
    expected_tokens: Counter
    wasted_rows: Counter
    time_to_first_token: Histogram
    inter_token: Histogram
    per_output_token: Histogram
    end_to_end: Histogram
    prefill: Histogram
    decode: Histogram
    queue: Histogram
    prompt_size: Histogram
    generation_size: Histogram


@dataclass(slots=True)
class EngineSeries:
    """The series of one engine slot; `last` holds the cumulative counts seen so far."""

    running: Gauge
    waiting: Gauge
    waiting_tokens: Gauge
    kv_usage: Gauge
    cached_blocks: Gauge
    draft_budget: Gauge
    slice_rows: Gauge
    slice_bytes: Gauge
    verify_every: Gauge
    slice_hits: Counter
    slice_loads: Counter
    slice_evictions: Counter
    up: Gauge
    steps: Counter
    prefill_rows: Counter
    decode_rows: Counter
    draft_rows: Counter
    step: Histogram
    model: Histogram
    propose: Histogram
    host: Histogram
    rows: Histogram
    preemptions: Counter
    steps_ahead: Counter
    void_rows: Counter
    prefix_queries: Counter
    prefix_hits: Counter
    restarts: Counter
    last: EngineStats


class Metrics:
    """All series and the registry that holds them.

    vllm_aliases: /metrics has the same figures under vLLM's names too
    (server.metrics.vllm_names).
    """

    def __init__(self, *, vllm_aliases: bool = False) -> None:
        r = self.registry = Registry()
        self._speculation = SpeculationFamilies(r)
        self._vocabulary = VocabularyFamilies(r)
        self._requests = RequestFamilies(r)
        self._engine_families = EngineFamilies(r)
        self._learning = LearningFamilies(r)
        self._adapters = AdapterFamilies(r)
        self._tasks: dict[tuple[str, str, str], TaskSeries] = {}
        self._slices: dict[tuple[str, str, str], tuple[Counter, ...]] = {}
        self._engines: dict[str, EngineSeries] = {}
        self._aliases: CollectorRegistry | None = None
        if vllm_aliases:
            self._aliases = CollectorRegistry(auto_describe=False)
            self._aliases.register(VllmNames(r))

    def task(self, task: str, drafter: str, model: str) -> TaskSeries:
        """The series of a task under a drafter and a model. Made on first use, at 0."""
        both = (task, drafter, model)
        series = self._tasks.get(both)
        if series is None:
            ours = (task, model)
            series = self._tasks[both] = TaskSeries(
                labels=both,
                pairs={},
                prompt_tokens=self._speculation.prompt.labels(*both),
                generation_tokens=self._speculation.generation.labels(*both),
                cached_tokens=self._speculation.cached.labels(*both),
                decode_steps=self._speculation.steps.labels(*both),
                drafts=self._speculation.drafts.labels(*both),
                draft_tokens=self._speculation.drafted.labels(*both),
                accepted_tokens=self._speculation.accepted.labels(*both),
                expected_tokens=self._speculation.expected.labels(*both),
                wasted_rows=self._speculation.wasted.labels(*both),
                time_to_first_token=self._requests.ttft.labels(*ours),
                inter_token=self._requests.inter_token.labels(*ours),
                per_output_token=self._requests.per_output.labels(*ours),
                end_to_end=self._requests.e2e.labels(*ours),
                prefill=self._requests.prefill.labels(*ours),
                decode=self._requests.decode.labels(*ours),
                queue=self._requests.queue.labels(*ours),
                prompt_size=self._requests.prompt_size.labels(*ours),
                generation_size=self._requests.generation_size.labels(*ours),
            )
        return series

    def count_step(self, series: TaskSeries, num_tokens: int, counts: StepCounts) -> None:
        """Count the tokens of one Delta and its StepCounts."""
        if num_tokens:
            series.generation_tokens.inc(num_tokens)
        if counts.num_steps:
            series.decode_steps.inc(counts.num_steps)
        if counts.no_draft_reason:
            self._speculation.no_draft.labels(*series.labels, counts.no_draft_reason).inc()
        if not counts.num_drafts:
            return
        series.drafts.inc(counts.num_drafts)
        series.draft_tokens.inc(counts.num_drafted)
        series.accepted_tokens.inc(counts.num_accepted)
        series.wasted_rows.inc(max(0, counts.num_drafted - counts.num_accepted))
        series.expected_tokens.inc(counts.expected_accepted)
        kept = counts.accepted_by_depth
        for position, offered in enumerate(counts.offered_by_depth):
            accepted = kept[position] if position < len(kept) else 0
            self._count_pair(series, "position", str(position), offered, accepted)
        for source, drafted, accepted in counts.by_source:
            self._count_pair(series, "source", source, drafted, accepted)
        for tenth, drafted, accepted in counts.by_survival:
            self._count_pair(series, "survival", _TENTHS[tenth], drafted, accepted)

    def count_vocabulary(self, task: str, mode: str, model: str, counts: VocabularyCounts) -> None:
        """Count the VocabularyCounts of one Delta. Series are made on first use, at 0."""
        labels = (task, mode, model)
        series = self._slices.get(labels)
        if series is None:
            series = self._slices[labels] = tuple(
                counter.labels(*labels)
                for counter in (
                    self._vocabulary.slice_steps,
                    self._vocabulary.full_steps,
                    self._vocabulary.head_rows,
                    self._vocabulary.row_loads,
                    self._vocabulary.verifications,
                    self._vocabulary.checked,
                    self._vocabulary.missed,
                    self._vocabulary.dropped,
                )
            )
        numbers = (
            counts.num_slice_steps,
            counts.num_full_steps,
            counts.head_rows,
            counts.num_loaded,
            counts.num_verifications,
            counts.num_checked,
            counts.num_missed,
            counts.num_dropped,
        )
        for one, number in zip(series, numbers, strict=True):
            if number:
                one.inc(number)
        self._vocabulary.slice_ids.labels(*labels).set(counts.num_ids)
        if counts.num_verifications:
            self._vocabulary.verify.labels(*labels).observe(counts.verify_s)

    def _count_pair(
        self, series: TaskSeries, kind: str, value: str, drafted: int, accepted: int
    ) -> None:
        pair = series.pairs.get((kind, value))
        if pair is None:
            both = (*series.labels, value)
            drafted_by, accepted_by = self._speculation.pairs[kind]
            pair = drafted_by.labels(*both), accepted_by.labels(*both)
            series.pairs[kind, value] = pair
        pair[0].inc(drafted)
        if accepted:
            pair[1].inc(accepted)

    def count_choice(self, task: str, model: str, finish_reason: str) -> None:
        """A choice ended."""
        self._requests.success.labels(task, model, finish_reason).inc()

    def count_outcome(self, task: str, model: str, outcome: str) -> None:
        """A Request ended: "ok", "abort" or "error"."""
        self._requests.outcomes.labels(task, model, outcome).inc()

    def expect(self, task: str, drafter: str, model: str) -> None:
        """Show the series of a task before its first request.

        rate() and increase() of Prometheus need the 0 before the first event.
        """
        self.task(task, drafter, model)
        for reason in ("stop", "length"):
            self._requests.success.labels(task, model, reason)
        for outcome in ("ok", "abort", "error"):
            self._requests.outcomes.labels(task, model, outcome)

    def count_response(self, route: str, status: int, code: str) -> None:
        """An HTTP response was sent. route: a known route or "other"; code: "" without error."""
        self._requests.responses.labels(route, str(status), code).inc()

    def engine(self, engine: str, model: str) -> EngineSeries:
        """The series of an engine slot; a slot keeps its series over restarts."""
        series = self._engines.get(engine)
        if series is None:
            both = (engine, model)
            series = self._engines[engine] = EngineSeries(
                running=self._engine_families.running.labels(*both),
                waiting=self._engine_families.waiting.labels(*both),
                waiting_tokens=self._engine_families.waiting_tokens.labels(*both),
                kv_usage=self._engine_families.kv_usage.labels(*both),
                cached_blocks=self._engine_families.cached_blocks.labels(*both),
                draft_budget=self._engine_families.draft_budget.labels(*both),
                slice_rows=self._engine_families.slice_rows.labels(*both),
                slice_bytes=self._engine_families.slice_bytes.labels(*both),
                verify_every=self._engine_families.verify_every.labels(*both),
                slice_hits=self._engine_families.slice_hits.labels(*both),
                slice_loads=self._engine_families.slice_loads.labels(*both),
                slice_evictions=self._engine_families.slice_evictions.labels(*both),
                up=self._engine_families.up.labels(*both),
                steps=self._engine_families.engine_steps.labels(*both),
                prefill_rows=self._engine_families.engine_rows.labels(*both, "prefill"),
                decode_rows=self._engine_families.engine_rows.labels(*both, "decode"),
                draft_rows=self._engine_families.engine_rows.labels(*both, "draft"),
                step=self._engine_families.step.labels(*both),
                model=self._engine_families.model.labels(*both),
                propose=self._engine_families.propose.labels(*both),
                host=self._engine_families.host.labels(*both),
                rows=self._engine_families.rows.labels(*both),
                preemptions=self._engine_families.preemptions.labels(*both),
                steps_ahead=self._engine_families.steps_ahead.labels(*both),
                void_rows=self._engine_families.void_rows.labels(*both),
                prefix_queries=self._engine_families.prefix_queries.labels(*both),
                prefix_hits=self._engine_families.prefix_hits.labels(*both),
                restarts=self._engine_families.restarts.labels(*both),
                last=EngineStats(),
            )
        return series

    def engine_ready(self, engine: str, model: str, info: ModelInfo) -> None:
        """An engine began to serve; its cumulative counts start at 0."""
        series = self.engine(engine, model)
        series.last = EngineStats()
        series.up.set(1)
        self._engine_families.vocab_size.labels(engine, model).set(info.vocab_size)
        self._engine_families.weights.labels(engine, model, info.dtype, info.kernel).set(1)
        self._adapters.begin(engine, model)
        if info.kv_block_bytes:
            room = info.num_blocks * info.kv_block_bytes
            self._engine_families.kv_bytes.labels(engine, model, info.kv_dtype).set(room)

    def engine_down(self, engine: str, model: str, *, restarted: bool) -> None:
        """An engine died or was stopped; it has no requests any more."""
        series = self.engine(engine, model)
        for gauge in (
            series.up,
            series.running,
            series.waiting,
            series.waiting_tokens,
            series.kv_usage,
            series.cached_blocks,
            series.draft_budget,
            series.slice_rows,
            series.slice_bytes,
            series.verify_every,
        ):
            gauge.set(0)
        for figures in series.last.adapters:
            self._adapters.num_bytes.labels(engine, model, figures.name).set(0)
        if series.last.device is not None:
            self._device_figures(engine, model, DeviceFigures(0, 0, 0, 0, 0.0), None)
        if restarted:
            series.restarts.inc()

    def engine_heartbeat(self, engine: str, model: str, age_s: float) -> None:
        """How long ago an engine made progress; 0 for one that does not serve."""
        self._engine_families.heartbeat_age.labels(engine, model).set(age_s)

    def engine_stats(self, engine: str, model: str, stats: EngineStats) -> None:
        """A snapshot of an engine.

        Its step figures are those of the last step; an engine repeats them when it goes idle, so a
        step is counted only when one of them changed (they are clock readings in nanoseconds).
        num_preemptions, num_steps_ahead, num_void_rows, prefix_queries and prefix_hits count from
        the engine's start.
        """
        s = self.engine(engine, model)
        last = s.last
        s.running.set(stats.num_running)
        s.waiting.set(stats.num_waiting)
        s.waiting_tokens.set(stats.num_waiting_tokens)
        used = stats.num_total_blocks - stats.num_free_blocks
        s.kv_usage.set(used / stats.num_total_blocks if stats.num_total_blocks else 0.0)
        s.cached_blocks.set(stats.num_cached_blocks)
        s.draft_budget.set(stats.draft_budget)
        if stats.num_rows and (stats.step_s, stats.host_s) != (last.step_s, last.host_s):
            s.steps.inc()
            s.step.observe(stats.step_s)
            s.model.observe(stats.model_s)
            s.propose.observe(stats.propose_s)
            s.host.observe(stats.host_s)
            s.rows.observe(stats.num_rows)
            s.prefill_rows.inc(stats.num_prefill_rows)
            s.draft_rows.inc(stats.num_draft_rows)
            s.decode_rows.inc(
                max(0, stats.num_rows - stats.num_prefill_rows - stats.num_draft_rows)
            )
        s.slice_rows.set(stats.slice_rows)
        s.slice_bytes.set(stats.slice_bytes)
        s.verify_every.set(stats.verify_every)
        if stats.slice_hits > last.slice_hits:
            s.slice_hits.inc(stats.slice_hits - last.slice_hits)
        if stats.slice_loads > last.slice_loads:
            s.slice_loads.inc(stats.slice_loads - last.slice_loads)
        if stats.slice_evictions > last.slice_evictions:
            s.slice_evictions.inc(stats.slice_evictions - last.slice_evictions)
        if stats.num_preemptions > last.num_preemptions:
            s.preemptions.inc(stats.num_preemptions - last.num_preemptions)
        if stats.num_steps_ahead > last.num_steps_ahead:
            s.steps_ahead.inc(stats.num_steps_ahead - last.num_steps_ahead)
        if stats.num_void_rows > last.num_void_rows:
            s.void_rows.inc(stats.num_void_rows - last.num_void_rows)
        if stats.prefix_queries > last.prefix_queries:
            s.prefix_queries.inc(stats.prefix_queries - last.prefix_queries)
        if stats.prefix_hits > last.prefix_hits:
            s.prefix_hits.inc(stats.prefix_hits - last.prefix_hits)
        if (stats.learned, stats.shared) != (last.learned, last.shared):
            self._learned_figures(engine, model, stats, last)
        if stats.adapters != last.adapters:
            self._adapter_figures(engine, model, stats, last)
        self._device_figures(engine, model, stats.device, last.device)
        s.last = stats

    def _device_figures(
        self, engine: str, model: str, figures: DeviceFigures | None, last: DeviceFigures | None
    ) -> None:
        """Engines on a CPU tell none, and have no such series."""
        if figures is None:
            return
        families = self._engine_families.device
        for kind in ("reserved", "allocated", "free", "total"):
            families.memory.labels(engine, model, kind).set(getattr(figures, kind))
        if figures.utilisation is not None:
            families.use.labels(engine, model).set(figures.utilisation)
        before = (0, 0, 0) if last is None else last.steps
        kinds = ("replayed", "captured", "none")
        for kind, now, old in zip(kinds, figures.steps, before, strict=True):
            families.graph_steps.labels(engine, model, kind).inc(max(0, now - old))

    def _learned_figures(
        self, engine: str, model: str, stats: EngineStats, last: EngineStats
    ) -> None:
        families = self._learning
        before = {task: num for task, _, num in last.learned}
        for task, num_tokens, num_outputs in stats.learned:
            families.learned_held.labels(engine, model, task).set(num_tokens)
            more = num_outputs - before.get(task, 0)
            families.learned.labels(engine, model, task).inc(max(0, more))
        for task in before.keys() - {task for task, _, _ in stats.learned}:
            families.learned_held.labels(engine, model, task).set(0)
        written = {figures.task: figures.num_written for figures in last.shared}
        for now in stats.shared:
            labels = (engine, model, now.task)
            families.segments.labels(*labels).inc(
                max(0, now.num_written - written.get(now.task, 0))
            )
            families.merged.labels(*labels).set(now.num_merged)
            families.version.labels(*labels).set(now.version)
            families.published.labels(*labels).set(now.published_s)

    def _adapter_figures(
        self, engine: str, model: str, stats: EngineStats, last: EngineStats
    ) -> None:
        families = self._adapters
        before = {figures.name: figures for figures in last.adapters}
        for now in stats.adapters:
            then = before.get(now.name) or AdapterFigures(now.name)
            labels = (engine, model, now.name)
            families.requests.labels(*labels).inc(max(0, now.num_requests - then.num_requests))
            families.loads.labels(*labels).inc(max(0, now.num_loads - then.num_loads))
            families.evictions.labels(*labels).inc(max(0, now.num_evictions - then.num_evictions))
            families.num_bytes.labels(*labels).set(now.num_bytes)

    def corpus_sizes(self, sizes: Mapping[str, int]) -> None:
        """Tokens of each served task's corpus, 0 for none."""
        self._learning.corpus.clear()
        for task, num_tokens in sizes.items():
            self._learning.corpus.labels(task).set(num_tokens)

    def exposition(self) -> bytes:
        """The text that /metrics returns (content type CONTENT_TYPE_LATEST)."""
        text = generate_latest(self.registry)
        return text if self._aliases is None else text + generate_latest(self._aliases)

    def families(self, names: Iterable[str]) -> Iterable[MetricFamily]:
        """Only the samples with these names (`tailor_engine_steps_total`), by family."""
        return self.registry.restricted_registry(names).collect()
