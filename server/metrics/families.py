"""Every Prometheus family by subject: its name, its help, its labels, its buckets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.types import OTHER_ADAPTERS

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

_TASK = ("task",)
_SPEC = ("task", "drafter")
_MODE = ("task", "mode", "model")
_REQUEST = (*_TASK, "model")
_DRAFTED = (*_SPEC, "model")
_ENGINE = ("engine", "model")


class Registry(CollectorRegistry):
    """Holds the families; every name gets the prefix `tailor_`."""

    def __init__(self) -> None:
        super().__init__(auto_describe=True)

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        """A count that only grows."""
        return Counter(f"tailor_{name}", text, labels, registry=self)

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        """A present value."""
        return Gauge(f"tailor_{name}", text, labels, registry=self)

    def seconds(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        """A histogram of seconds."""
        return Histogram(f"tailor_{name}_seconds", text, labels, buckets=buckets, registry=self)

    def sizes(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        """A histogram of counts."""
        return Histogram(f"tailor_{name}", text, labels, buckets=buckets, registry=self)


class SpeculationFamilies:
    """Tokens and speculation, by task and drafter."""

    def __init__(self, to: Registry) -> None:
        self.prompt = to.counter("prompt_tokens", "Prompt tokens of answered requests", _DRAFTED)
        self.generation = to.counter("generation_tokens", "Emitted tokens, after the cut", _DRAFTED)
        self.cached = to.counter(
            "prompt_tokens_cached", "Prompt tokens from the prefix cache", _DRAFTED
        )
        self.steps = to.counter(
            "spec_decode_num_decode_steps", "Steps that emitted tokens, drafted or not", _DRAFTED
        )
        self.drafts = to.counter(
            "spec_decode_num_drafts", "Steps that carried draft nodes", _DRAFTED
        )
        self.drafted = to.counter("spec_decode_num_draft_tokens", "Verified draft rows", _DRAFTED)
        self.accepted = to.counter(
            "spec_decode_num_accepted_tokens", "Draft tokens kept after the cut", _DRAFTED
        )
        self.wasted = to.counter(
            "spec_decode_num_wasted_rows", "Verified draft rows that were not kept", _DRAFTED
        )
        self.expected = to.counter(
            "spec_decode_expected_accepted_tokens",
            "Draft tokens that the calibration expected to be kept", _DRAFTED,
        )  # fmt: skip
        self.survival_drafted = to.counter(
            "spec_decode_num_draft_tokens_by_survival",
            "Verified draft rows, by the tenth of their claimed chance", (*_DRAFTED, "survival"),
        )  # fmt: skip
        self.survival_accepted = to.counter(
            "spec_decode_num_accepted_tokens_by_survival",
            "Draft tokens kept, by the tenth of their claimed chance", (*_DRAFTED, "survival"),
        )  # fmt: skip
        self.accepted_pos = to.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens kept, by depth (0 = the first)",
            (*_DRAFTED, "position"),
        )
        self.offered_pos = to.counter(
            "spec_decode_num_offered_per_pos", "Drafts with a node at this depth",
            (*_DRAFTED, "position"),
        )  # fmt: skip
        self.source_drafted = to.counter(
            "spec_decode_num_draft_tokens_by_source", "Verified draft rows, by source",
            (*_DRAFTED, "source"),
        )  # fmt: skip
        self.source_accepted = to.counter(
            "spec_decode_num_accepted_tokens_by_source", "Draft tokens kept, by source",
            (*_DRAFTED, "source"),
        )  # fmt: skip
        self.no_draft = to.counter(
            "spec_decode_num_no_draft", "Steps without a draft, by reason", (*_DRAFTED, "reason")
        )

        self.pairs = {
            "position": (self.offered_pos, self.accepted_pos),
            "source": (self.source_drafted, self.source_accepted),
            "survival": (self.survival_drafted, self.survival_accepted),
        }


class VocabularyFamilies:
    """LM-head slices, by task and mode."""

    def __init__(self, to: Registry) -> None:
        self.slice_steps = to.counter(
            "vocab_slice_steps", "Decode steps drawn from a slice of the LM head", _MODE
        )
        self.full_steps = to.counter(
            "vocab_full_steps", "Decode steps of sliced requests drawn from the full head", _MODE
        )
        self.head_rows = to.counter(
            "vocab_head_rows", "LM-head rows computed for sliced requests", _MODE
        )
        self.row_loads = to.counter("vocab_row_loads", "LM-head rows copied for requests", _MODE)
        self.slice_ids = to.gauge("vocab_slice_ids", "Ids of the last slice", _MODE)
        self.verifications = to.counter("vocab_verify_windows", "Verifications of a choice", _MODE)
        self.checked = to.counter("vocab_verified_tokens", "Tokens that were verified", _MODE)
        self.missed = to.counter("vocab_slice_misses", "Tokens the full head replaced", _MODE)
        self.dropped = to.counter("vocab_dropped_tokens", "Tokens taken back, never sent", _MODE)
        self.verify = to.seconds(
            "vocab_verify_time", "Verifications that a choice waited for", _MODE, SHORT_BUCKETS_S
        )


class RequestFamilies:
    """Requests, by task."""

    def __init__(self, to: Registry) -> None:
        self.ttft = to.seconds("time_to_first_token", "Arrival to first token", _REQUEST)
        self.inter_token = to.seconds("inter_token_latency", "Time between tokens", _REQUEST)
        self.per_output = to.seconds(
            "request_time_per_output_token", "Mean time per token after the first", _REQUEST
        )
        self.e2e = to.seconds("e2e_request_latency", "Arrival to last token", _REQUEST)
        self.prefill = to.seconds(
            "request_prefill_time", "First step to first token of a request", _REQUEST
        )
        self.decode = to.seconds(
            "request_decode_time", "First token to last token of a choice", _REQUEST
        )
        self.queue = to.seconds("request_queue_time", "Arrival to first step", _REQUEST)
        self.prompt_size = to.sizes(
            "request_prompt_tokens", "Prompt tokens per request", _REQUEST, TOKEN_BUCKETS
        )
        self.generation_size = to.sizes(
            "request_generation_tokens", "Emitted tokens per choice", _REQUEST, TOKEN_BUCKETS
        )
        self.success = to.counter(
            "request_success", "Finished choices", (*_REQUEST, "finished_reason")
        )
        self.outcomes = to.counter(
            "request_outcomes", "Requests by outcome (ok, abort, error)", (*_REQUEST, "outcome")
        )
        self.responses = to.counter(
            "http_responses", "HTTP responses by route, status and error code",
            ("route", "status", "code"),
        )  # fmt: skip


class DeviceFamilies:
    """GPUs, by engine."""

    def __init__(self, to: Registry) -> None:
        self.memory = to.gauge(
            "device_memory_bytes",
            "Memory of a GPU: reserved and allocated by the engine, free and total of the device",
            (*_ENGINE, "kind"),
        )
        self.use = to.gauge(
            "device_utilization_ratio",
            "Share of time in which a GPU runs a kernel, by NVML",
            _ENGINE,
        )
        self.graph_steps = to.counter(
            "cuda_graph_steps",
            "Steps of a GPU by whether they replayed a CUDA graph, captured one first or had none",
            (*_ENGINE, "kind"),
        )


class EngineFamilies:
    """Engines."""

    def __init__(self, to: Registry) -> None:
        self.running = to.gauge("num_requests_running", "Sequences in the running batch", _ENGINE)
        self.waiting = to.gauge("num_requests_waiting", "Requests waiting in the engine", _ENGINE)
        self.waiting_tokens = to.gauge("num_tokens_waiting", "Prompt tokens waiting", _ENGINE)
        self.kv_usage = to.gauge("kv_cache_usage_perc", "Used share of KV blocks, 0 to 1", _ENGINE)
        self.cached_blocks = to.gauge(
            "prefix_cache_blocks", "Blocks that hold a reusable prefix", _ENGINE
        )
        self.draft_budget = to.gauge(
            "draft_budget", "Most draft rows that could pay in the last step", _ENGINE
        )
        self.slice_rows = to.gauge(
            "slice_cache_rows", "LM-head rows copied beside the head", _ENGINE
        )
        self.slice_bytes = to.gauge("slice_cache_bytes", "Their bytes", _ENGINE)
        self.verify_every = to.gauge(
            "vocab_verify_every", "Unverified tokens before a verification, adapted last", _ENGINE
        )
        self.slice_hits = to.counter(
            "slice_cache_hits", "Prompt rows found in the slice cache", _ENGINE
        )
        self.slice_loads = to.counter("slice_cache_loads", "LM-head rows copied", _ENGINE)
        self.slice_evictions = to.counter(
            "slice_cache_evictions", "Rows that the slice cache forgot", _ENGINE
        )
        self.vocab_size = to.gauge(
            "model_vocab_size", "Ids of the model, padding included", _ENGINE
        )
        self.weights = to.gauge(
            "model_weights", "1; how the weights are kept, what multiplies them",
            (*_ENGINE, "form", "kernel"),
        )  # fmt: skip
        self.kv_bytes = to.gauge(
            "kv_cache_bytes", "Most that keys and values may take, and what they are kept as",
            (*_ENGINE, "dtype"),
        )  # fmt: skip
        self.device = DeviceFamilies(to)
        self.up = to.gauge("engine_up", "1 while the engine serves", _ENGINE)
        self.heartbeat_age = to.gauge(
            "engine_heartbeat_age_seconds", "Seconds since the engine last made progress", _ENGINE
        )
        self.engine_steps = to.counter("engine_steps", "Steps", _ENGINE)
        self.engine_rows = to.counter(
            "engine_rows", "Rows computed: prefill, decode and draft", (*_ENGINE, "kind")
        )
        self.step = to.seconds("step_time", "Wall time of a step", _ENGINE)
        self.model = to.seconds("step_model_time", "Forward pass and draws of a step", _ENGINE)
        self.propose = to.seconds("propose_time", "Drafting of a step", _ENGINE, SHORT_BUCKETS_S)
        self.host = to.seconds(
            "step_host_time", "All of a step but the model", _ENGINE, SHORT_BUCKETS_S
        )
        self.rows = to.sizes("step_rows", "Rows of a step", _ENGINE, ROW_BUCKETS)
        self.preemptions = to.counter("num_preemptions", "Preempted sequences", _ENGINE)
        self.steps_ahead = to.counter(
            "steps_ahead", "Steps launched before the last was accepted", _ENGINE
        )
        self.void_rows = to.counter("void_rows", "Rows of those that nobody read", _ENGINE)
        self.prefix_queries = to.counter("prefix_cache_queries", "Prompt tokens looked up", _ENGINE)
        self.prefix_hits = to.counter("prefix_cache_hits", "Prompt tokens found", _ENGINE)
        self.restarts = to.counter("engine_restarts", "Restarts of dead engines", _ENGINE)


class AdapterFamilies:
    """Adapters beside a base, by name; past 64 names of an engine the rest is "(others)", which is
    there from the start, so that an engine without adapters reads 0."""

    def __init__(self, to: Registry) -> None:
        labels = (*_ENGINE, "adapter")
        self.requests = to.counter("adapter_requests", "Requests that named it", labels)
        self.loads = to.counter("adapter_loads", "Times that it was put into memory", labels)
        self.evictions = to.counter("adapter_evictions", "Times that it made room", labels)
        self.num_bytes = to.gauge("adapter_bytes", "Bytes of it in memory", labels)

    def begin(self, engine: str, model: str) -> None:
        """An engine that has none yet."""
        for family in (self.requests, self.loads, self.evictions, self.num_bytes):
            family.labels(engine, model, OTHER_ADAPTERS)


class LearningFamilies:
    """Corpora and learning, by task."""

    def __init__(self, to: Registry) -> None:
        self.corpus = to.gauge("corpus_tokens", "Tokens of the task's corpus", _TASK)
        self.learned_held = to.gauge(
            "learned_tokens", "Learned tokens that are held", (*_ENGINE, *_TASK)
        )
        self.learned = to.counter(
            "learned_outputs", "Finished outputs that were learned", (*_ENGINE, *_TASK)
        )
        # In a fleet whose replicas learn from each other (cluster.yaml's section `learning`).
        self.segments = to.counter(
            "learned_segments", "Segments that were written for other replicas", (*_ENGINE, *_TASK)
        )
        self.merged = to.gauge(
            "learned_segments_merged",
            "Segments of all replicas in what this one has from others",
            (*_ENGINE, *_TASK),
        )
        self.version = to.gauge(
            "learned_version", "Version that this one has from others", (*_ENGINE, *_TASK)
        )
        self.published = to.gauge(
            "learned_published_timestamp_seconds",
            "When that version was published, as Unix time; 0 for none yet",
            (*_ENGINE, *_TASK),
        )
