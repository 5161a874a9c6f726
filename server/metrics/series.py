"""Every Prometheus series of the server, declared once.

All values are counted in the API process, from the Deltas that also make `usage` (server.api.usage
calls in here), so counters equal the sums of the requests' usage. Names follow vLLM's suffixes
under the prefix `tailor_`. Latency histograms start at 1 ms; propose and host times, which lie far
below that, start at 10 us.

One `Metrics` per app, with a registry of its own: two apps in one process never share a series.

Definitions that are easy to get wrong:
- tokens per step = generation_tokens / spec_decode_num_decode_steps: *all* decode steps count,
  drafted or not, after the cut at EOS, stop and max_tokens.
- accepted / verified rows = spec_decode_num_accepted_tokens / spec_decode_num_draft_tokens.
- chance by depth = ..._accepted_tokens_per_pos / ..._offered_per_pos; position 0 is the root's
  child.
- spec_decode_expected_accepted_tokens / ..._draft_tokens: what the drafters' calibration claimed of
  the same rows; ..._by_survival says it by tenths of the claimed chance (survival="0.3" is 0.3 to
  0.4). Accepted tokens are counted after the cut at EOS, stop and max_tokens, so that even a
  perfect calibration is observed a little lower.
- draft_budget: rows that could have paid in the last step, had all been accepted; engine_rows
  with kind="draft" are those that were verified.
- inter_token_latency: the gap between two Deltas of a choice, shared equally by the tokens of the
  second one and observed once per token; its sum is the decode time.
- request_time_per_output_token: (last token - first token) / (tokens - 1), once per choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from server.metrics.vllm_names import VllmNames
from server.types import EngineStats, ModelInfo, StepCounts, VocabularyCounts

__all__ = ["CONTENT_TYPE_LATEST", "LATENCY_BUCKETS_S", "EngineSeries", "Metrics", "TaskSeries"]

LATENCY_BUCKETS_S = (
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0,
)  # fmt: skip
SHORT_BUCKETS_S = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, *LATENCY_BUCKETS_S[:24],
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)

_number: Callable[[float], str] = floatToGoString
_TENTHS = tuple(f"0.{tenth}" for tenth in range(10))

_TASK = ("task",)
_SPEC = ("task", "drafter")
_MODE = ("task", "mode", "model")
_REQUEST = (*_TASK, "model")
_DRAFTED = (*_SPEC, "model")
_ENGINE = ("engine", "model")


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
    verify_window: Gauge
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
    prefix_queries: Counter
    prefix_hits: Counter
    restarts: Counter
    last: EngineStats


class Metrics:
    """All series and the registry that holds them.

    vllm_aliases: /metrics tells the same figures under vLLM's names too
    (server.metrics.vllm_names).
    """

    def __init__(self, *, vllm_aliases: bool = False) -> None:
        r = self.registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(f"tailor_{name}", text, labels, registry=r)

        def gauge(name: str, text: str, labels: tuple[str, ...]) -> Gauge:
            return Gauge(f"tailor_{name}", text, labels, registry=r)

        def seconds(
            name: str,
            text: str,
            labels: tuple[str, ...],
            buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
        ) -> Histogram:
            return Histogram(f"tailor_{name}_seconds", text, labels, buckets=buckets, registry=r)

        def sizes(
            name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
        ) -> Histogram:
            return Histogram(f"tailor_{name}", text, labels, buckets=buckets, registry=r)

        # Tokens and speculation, by task and drafter.
        self._prompt = counter("prompt_tokens", "Prompt tokens of answered requests", _DRAFTED)
        self._generation = counter("generation_tokens", "Emitted tokens, after the cut", _DRAFTED)
        self._cached = counter(
            "prompt_tokens_cached", "Prompt tokens from the prefix cache", _DRAFTED
        )
        self._steps = counter(
            "spec_decode_num_decode_steps", "Steps that emitted tokens, drafted or not", _DRAFTED
        )
        self._drafts = counter("spec_decode_num_drafts", "Steps that carried draft nodes", _DRAFTED)
        self._drafted = counter("spec_decode_num_draft_tokens", "Verified draft rows", _DRAFTED)
        self._accepted = counter(
            "spec_decode_num_accepted_tokens", "Draft tokens kept after the cut", _DRAFTED
        )
        self._wasted = counter(
            "spec_decode_num_wasted_rows", "Verified draft rows that were not kept", _DRAFTED
        )
        self._expected = counter(
            "spec_decode_expected_accepted_tokens",
            "Draft tokens that the calibration expected to be kept", _DRAFTED,
        )  # fmt: skip
        self._survival_drafted = counter(
            "spec_decode_num_draft_tokens_by_survival",
            "Verified draft rows, by the tenth of their claimed chance", (*_DRAFTED, "survival"),
        )  # fmt: skip
        self._survival_accepted = counter(
            "spec_decode_num_accepted_tokens_by_survival",
            "Draft tokens kept, by the tenth of their claimed chance", (*_DRAFTED, "survival"),
        )  # fmt: skip
        self._accepted_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens kept, by depth (0 = the first)",
            (*_DRAFTED, "position"),
        )
        self._offered_pos = counter(
            "spec_decode_num_offered_per_pos", "Drafts with a node at this depth",
            (*_DRAFTED, "position"),
        )  # fmt: skip
        self._source_drafted = counter(
            "spec_decode_num_draft_tokens_by_source", "Verified draft rows, by source",
            (*_DRAFTED, "source"),
        )  # fmt: skip
        self._source_accepted = counter(
            "spec_decode_num_accepted_tokens_by_source", "Draft tokens kept, by source",
            (*_DRAFTED, "source"),
        )  # fmt: skip
        self._no_draft = counter(
            "spec_decode_num_no_draft", "Steps without a draft, by reason", (*_DRAFTED, "reason")
        )

        self._pairs = {
            "position": (self._offered_pos, self._accepted_pos),
            "source": (self._source_drafted, self._source_accepted),
            "survival": (self._survival_drafted, self._survival_accepted),
        }

        # LM-head slices, by task and mode.
        self._slice_steps = counter(
            "vocab_slice_steps", "Decode steps drawn from a slice of the LM head", _MODE
        )
        self._full_steps = counter(
            "vocab_full_steps", "Decode steps of sliced requests drawn from the full head", _MODE
        )
        self._head_rows = counter(
            "vocab_head_rows", "LM-head rows computed for sliced requests", _MODE
        )
        self._row_loads = counter("vocab_row_loads", "LM-head rows copied for requests", _MODE)
        self._slice_ids = gauge("vocab_slice_ids", "Ids of the last slice", _MODE)
        self._windows = counter("vocab_verify_windows", "Verified windows", _MODE)
        self._checked = counter("vocab_verified_tokens", "Tokens that were verified", _MODE)
        self._missed = counter("vocab_slice_misses", "Tokens the full head replaced", _MODE)
        self._dropped = counter("vocab_dropped_tokens", "Tokens taken back, never sent", _MODE)
        self._verify = seconds(
            "vocab_verify_time", "Verification time of a choice's windows", _MODE, SHORT_BUCKETS_S
        )

        # Requests, by task.
        self._ttft = seconds("time_to_first_token", "Arrival to first token", _REQUEST)
        self._inter_token = seconds("inter_token_latency", "Time between tokens", _REQUEST)
        self._per_output = seconds(
            "request_time_per_output_token", "Mean time per token after the first", _REQUEST
        )
        self._e2e = seconds("e2e_request_latency", "Arrival to last token", _REQUEST)
        self._prefill = seconds(
            "request_prefill_time", "First step to first token of a request", _REQUEST
        )
        self._decode = seconds(
            "request_decode_time", "First token to last token of a choice", _REQUEST
        )
        self._queue = seconds("request_queue_time", "Arrival to first step", _REQUEST)
        self._prompt_size = sizes(
            "request_prompt_tokens", "Prompt tokens per request", _REQUEST, TOKEN_BUCKETS
        )
        self._generation_size = sizes(
            "request_generation_tokens", "Emitted tokens per choice", _REQUEST, TOKEN_BUCKETS
        )
        self._success = counter(
            "request_success", "Finished choices", (*_REQUEST, "finished_reason")
        )
        self._outcomes = counter(
            "request_outcomes", "Requests by outcome (ok, abort, error)", (*_REQUEST, "outcome")
        )
        self._responses = counter(
            "http_responses", "HTTP responses by route, status and error code",
            ("route", "status", "code"),
        )  # fmt: skip

        # Engines.
        self._running = gauge("num_requests_running", "Sequences in the running batch", _ENGINE)
        self._waiting = gauge("num_requests_waiting", "Requests waiting in the engine", _ENGINE)
        self._waiting_tokens = gauge("num_tokens_waiting", "Prompt tokens waiting", _ENGINE)
        self._kv_usage = gauge("kv_cache_usage_perc", "Used share of KV blocks, 0 to 1", _ENGINE)
        self._cached_blocks = gauge(
            "prefix_cache_blocks", "Blocks that hold a reusable prefix", _ENGINE
        )
        self._draft_budget = gauge(
            "draft_budget", "Most draft rows that could pay in the last step", _ENGINE
        )
        self._slice_rows = gauge("slice_cache_rows", "LM-head rows copied beside the head", _ENGINE)
        self._slice_bytes = gauge("slice_cache_bytes", "Their bytes", _ENGINE)
        self._verify_window = gauge(
            "vocab_verify_every", "Tokens in an exact window, as adapted last", _ENGINE
        )
        self._slice_hits = counter(
            "slice_cache_hits", "Prompt rows found in the slice cache", _ENGINE
        )
        self._slice_loads = counter("slice_cache_loads", "LM-head rows copied", _ENGINE)
        self._slice_evictions = counter(
            "slice_cache_evictions", "Rows that the slice cache forgot", _ENGINE
        )
        self._vocab_size = gauge("model_vocab_size", "Ids of the model, padding included", _ENGINE)
        self._up = gauge("engine_up", "1 while the engine serves", _ENGINE)
        self._engine_steps = counter("engine_steps", "Steps", _ENGINE)
        self._engine_rows = counter(
            "engine_rows", "Rows computed: prefill, decode and draft", (*_ENGINE, "kind")
        )
        self._step = seconds("step_time", "Wall time of a step", _ENGINE)
        self._model = seconds("step_model_time", "Forward pass and draws of a step", _ENGINE)
        self._propose = seconds("propose_time", "Drafting of a step", _ENGINE, SHORT_BUCKETS_S)
        self._host = seconds(
            "step_host_time", "All of a step but the model", _ENGINE, SHORT_BUCKETS_S
        )
        self._rows = sizes("step_rows", "Rows of a step", _ENGINE, ROW_BUCKETS)
        self._preemptions = counter("num_preemptions", "Preempted sequences", _ENGINE)
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up", _ENGINE)
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found", _ENGINE)
        self._restarts = counter("engine_restarts", "Restarts of dead engines", _ENGINE)

        # Corpora and learning, by task.
        self._corpus = gauge("corpus_tokens", "Tokens of the task's corpus", _TASK)
        self._learned_held = gauge(
            "learned_tokens", "Learned tokens that are held", (*_ENGINE, *_TASK)
        )
        self._learned = counter(
            "learned_outputs", "Finished outputs that were learned", (*_ENGINE, *_TASK)
        )

        self._line_starts: dict[tuple[str, ...], str] = {}
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
                prompt_tokens=self._prompt.labels(*both),
                generation_tokens=self._generation.labels(*both),
                cached_tokens=self._cached.labels(*both),
                decode_steps=self._steps.labels(*both),
                drafts=self._drafts.labels(*both),
                draft_tokens=self._drafted.labels(*both),
                accepted_tokens=self._accepted.labels(*both),
                expected_tokens=self._expected.labels(*both),
                wasted_rows=self._wasted.labels(*both),
                time_to_first_token=self._ttft.labels(*ours),
                inter_token=self._inter_token.labels(*ours),
                per_output_token=self._per_output.labels(*ours),
                end_to_end=self._e2e.labels(*ours),
                prefill=self._prefill.labels(*ours),
                decode=self._decode.labels(*ours),
                queue=self._queue.labels(*ours),
                prompt_size=self._prompt_size.labels(*ours),
                generation_size=self._generation_size.labels(*ours),
            )
        return series

    def count_step(self, series: TaskSeries, num_tokens: int, counts: StepCounts) -> None:
        """What one Delta emitted and what speculation did for it."""
        if num_tokens:
            series.generation_tokens.inc(num_tokens)
        if counts.num_steps:
            series.decode_steps.inc(counts.num_steps)
        if counts.no_draft_reason:
            self._no_draft.labels(*series.labels, counts.no_draft_reason).inc()
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
        """What an LM-head slice did for one Delta. Series are made on first use, at 0."""
        labels = (task, mode, model)
        series = self._slices.get(labels)
        if series is None:
            series = self._slices[labels] = tuple(
                counter.labels(*labels)
                for counter in (
                    self._slice_steps,
                    self._full_steps,
                    self._head_rows,
                    self._row_loads,
                    self._windows,
                    self._checked,
                    self._missed,
                    self._dropped,
                )
            )
        numbers = (
            counts.num_slice_steps,
            counts.num_full_steps,
            counts.head_rows,
            counts.num_loaded,
            counts.num_windows,
            counts.num_checked,
            counts.num_missed,
            counts.num_dropped,
        )
        for one, number in zip(series, numbers, strict=True):
            if number:
                one.inc(number)
        self._slice_ids.labels(*labels).set(counts.num_ids)
        if counts.num_windows:
            self._verify.labels(*labels).observe(counts.verify_s)

    def _count_pair(
        self, series: TaskSeries, kind: str, value: str, drafted: int, accepted: int
    ) -> None:
        pair = series.pairs.get((kind, value))
        if pair is None:
            both = (*series.labels, value)
            drafted_by, accepted_by = self._pairs[kind]
            pair = drafted_by.labels(*both), accepted_by.labels(*both)
            series.pairs[kind, value] = pair
        pair[0].inc(drafted)
        if accepted:
            pair[1].inc(accepted)

    def count_choice(self, task: str, model: str, finish_reason: str) -> None:
        """A choice ended."""
        self._success.labels(task, model, finish_reason).inc()

    def count_outcome(self, task: str, model: str, outcome: str) -> None:
        """A Request ended: "ok", "abort" or "error"."""
        self._outcomes.labels(task, model, outcome).inc()

    def expect(self, task: str, drafter: str, model: str) -> None:
        """Show the series of a task before its first request.

        A counter that appears with its first event has lost it for Prometheus: rate() and
        increase() need the 0 before.
        """
        self.task(task, drafter, model)
        for reason in ("stop", "length"):
            self._success.labels(task, model, reason)
        for outcome in ("ok", "abort", "error"):
            self._outcomes.labels(task, model, outcome)

    def count_response(self, route: str, status: int, code: str) -> None:
        """An HTTP response was sent. route: a known route or "other"; code: "" without error."""
        self._responses.labels(route, str(status), code).inc()

    def engine(self, engine: str, model: str) -> EngineSeries:
        """The series of an engine slot; a slot keeps its series over restarts."""
        series = self._engines.get(engine)
        if series is None:
            both = (engine, model)
            series = self._engines[engine] = EngineSeries(
                running=self._running.labels(*both),
                waiting=self._waiting.labels(*both),
                waiting_tokens=self._waiting_tokens.labels(*both),
                kv_usage=self._kv_usage.labels(*both),
                cached_blocks=self._cached_blocks.labels(*both),
                draft_budget=self._draft_budget.labels(*both),
                slice_rows=self._slice_rows.labels(*both),
                slice_bytes=self._slice_bytes.labels(*both),
                verify_window=self._verify_window.labels(*both),
                slice_hits=self._slice_hits.labels(*both),
                slice_loads=self._slice_loads.labels(*both),
                slice_evictions=self._slice_evictions.labels(*both),
                up=self._up.labels(*both),
                steps=self._engine_steps.labels(*both),
                prefill_rows=self._engine_rows.labels(*both, "prefill"),
                decode_rows=self._engine_rows.labels(*both, "decode"),
                draft_rows=self._engine_rows.labels(*both, "draft"),
                step=self._step.labels(*both),
                model=self._model.labels(*both),
                propose=self._propose.labels(*both),
                host=self._host.labels(*both),
                rows=self._rows.labels(*both),
                preemptions=self._preemptions.labels(*both),
                prefix_queries=self._prefix_queries.labels(*both),
                prefix_hits=self._prefix_hits.labels(*both),
                restarts=self._restarts.labels(*both),
                last=EngineStats(),
            )
        return series

    def engine_ready(self, engine: str, model: str, info: ModelInfo) -> None:
        """An engine began to serve; its cumulative counts start at 0."""
        series = self.engine(engine, model)
        series.last = EngineStats()
        series.up.set(1)
        self._vocab_size.labels(engine, model).set(info.vocab_size)

    def engine_down(self, engine: str, model: str, *, restarted: bool) -> None:
        """An engine died or was stopped; it holds nothing any more."""
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
            series.verify_window,
        ):
            gauge.set(0)
        if restarted:
            series.restarts.inc()

    def engine_stats(self, engine: str, model: str, stats: EngineStats) -> None:
        """A snapshot of an engine.

        Its step figures are those of the last step; an engine repeats them when it goes idle, so a
        step is counted only when one of them changed (they are clock readings in nanoseconds).
        num_preemptions, prefix_queries and prefix_hits count from the engine's start.
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
        s.verify_window.set(stats.verify_window)
        if stats.slice_hits > last.slice_hits:
            s.slice_hits.inc(stats.slice_hits - last.slice_hits)
        if stats.slice_loads > last.slice_loads:
            s.slice_loads.inc(stats.slice_loads - last.slice_loads)
        if stats.slice_evictions > last.slice_evictions:
            s.slice_evictions.inc(stats.slice_evictions - last.slice_evictions)
        if stats.num_preemptions > last.num_preemptions:
            s.preemptions.inc(stats.num_preemptions - last.num_preemptions)
        if stats.prefix_queries > last.prefix_queries:
            s.prefix_queries.inc(stats.prefix_queries - last.prefix_queries)
        if stats.prefix_hits > last.prefix_hits:
            s.prefix_hits.inc(stats.prefix_hits - last.prefix_hits)
        if stats.learned != last.learned:
            before = {task: num for task, _, num in last.learned}
            for task, num_tokens, num_outputs in stats.learned:
                self._learned_held.labels(engine, model, task).set(num_tokens)
                more = num_outputs - before.get(task, 0)
                self._learned.labels(engine, model, task).inc(max(0, more))
            for task in before.keys() - {task for task, _, _ in stats.learned}:
                self._learned_held.labels(engine, model, task).set(0)
        s.last = stats

    def corpus_sizes(self, sizes: Mapping[str, int]) -> None:
        """Tokens of each served task's corpus, 0 for none."""
        self._corpus.clear()
        for task, num_tokens in sizes.items():
            self._corpus.labels(task).set(num_tokens)

    def exposition(self) -> bytes:
        """The text that /metrics returns (content type CONTENT_TYPE_LATEST).

        To the byte what prometheus_client's generate_latest writes, which checks and escapes each
        name and label of each sample anew: twice the time, every few seconds, of a thread that
        clients wait for. The start of a sample's line is the same in every scrape and kept.
        """
        lines: list[str] = []
        for registry in (self.registry, self._aliases):
            if registry is not None:
                for family in registry.collect():
                    self._write_family(family, lines)
        return "".join(lines).encode()

    def _write_family(self, family: MetricFamily, lines: list[str]) -> None:
        name, kind = family.name, family.type
        text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        shown = f"{name}_total" if kind == "counter" else name
        lines.append(f"# HELP {shown} {text}\n# TYPE {shown} {kind}\n")
        created_name = f"{name}_created"
        created: list[str] = []
        starts = self._line_starts
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            start = starts.get(key)
            if start is None:
                start = starts[key] = _line_start(sample)
            line = f"{start} {_number(sample.value)}\n"
            (created if sample.name == created_name else lines).append(line)
        if created:
            lines.append(f"# HELP {created_name} {text}\n# TYPE {created_name} gauge\n")
            lines += created

    def families(self, names: Iterable[str]) -> Iterable[MetricFamily]:
        """Only the samples with these names (`tailor_engine_steps_total`), by family."""
        return self.registry.restricted_registry(names).collect()


def _line_start(sample: Sample) -> str:
    """A sample's name and labels as its line in /metrics begins."""
    labels = ",".join(
        '{}="{}"'.format(name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for name, value in sorted(sample.labels.items())
    )
    return f"{sample.name}{{{labels}}}" if labels else str(sample.name)
