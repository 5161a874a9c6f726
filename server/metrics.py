"""Every series that the API counts, declared where it is kept, and the registry of /metrics.

Requests are counted in the API process, from the Deltas that also make `usage` (RequestAccount
calls in here), so counters equal the sums of the requests' usage. What engines tell of themselves
is added by EngineFigures, and the names that vLLM gives to the same by VllmNames. Ours follow
vLLM's suffixes under the prefix `tailor_`. Latency histograms start at 1 ms; propose and host
times, which lie far below that, start at 10 us.

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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.types import (
    LATENCY_BUCKETS_S,
    SHORT_BUCKETS_S,
    Figure,
    FigureValue,
    ModelInfo,
    StepCounts,
    VocabularyCounts,
)

TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_REQUEST = ("task", "model")
_DRAFTED = ("task", "drafter", "model")
_MODE = ("task", "mode", "model")
_ENGINE = ("engine", "model")


def _series(kind: type[Any], name: str, text: str, labels: tuple[str, ...], *buckets: float) -> Any:
    """A field that holds one series of the family that is declared so."""
    options = {"buckets": buckets} if buckets else {}
    return field(metadata={"family": (kind, f"tailor_{name}", text, labels, options)})


def _drafted(name: str, text: str) -> Any:
    return _series(Counter, name, text, _DRAFTED)


def _seconds(name: str, text: str) -> Any:
    return _series(Histogram, f"{name}_seconds", text, _REQUEST, *LATENCY_BUCKETS_S)


def _tokens(name: str, text: str) -> Any:
    return _series(Histogram, name, text, _REQUEST, *TOKEN_BUCKETS)


@dataclass(frozen=True, slots=True)
class TaskSeries:
    """The series of one (task, drafter, model), looked up once and not per token.

    pairs: (drafted, accepted) counters by (kind of label, its value).
    """

    labels: tuple[str, str, str]
    pairs: dict[tuple[str, str], tuple[Counter, Counter]]
    prompt_tokens: Counter = _drafted("prompt_tokens", "Prompt tokens of answered requests")
    generation_tokens: Counter = _drafted("generation_tokens", "Emitted tokens, after the cut")
    cached_tokens: Counter = _drafted("prompt_tokens_cached", "Prompt tokens from the prefix cache")
    decode_steps: Counter = _drafted(
        "spec_decode_num_decode_steps", "Steps that emitted tokens, drafted or not"
    )
    drafts: Counter = _drafted("spec_decode_num_drafts", "Steps that carried draft nodes")
    draft_tokens: Counter = _drafted("spec_decode_num_draft_tokens", "Verified draft rows")
    accepted_tokens: Counter = _drafted(
        "spec_decode_num_accepted_tokens", "Draft tokens kept after the cut"
    )
    wasted_rows: Counter = _drafted(
        "spec_decode_num_wasted_rows", "Verified draft rows that were not kept"
    )
    expected_tokens: Counter = _drafted(
        "spec_decode_expected_accepted_tokens",
        "Draft tokens that the calibration expected to be kept",
    )
    time_to_first_token: Histogram = _seconds("time_to_first_token", "Arrival to first token")
    inter_token: Histogram = _seconds("inter_token_latency", "Time between tokens")
    per_output_token: Histogram = _seconds(
        "request_time_per_output_token", "Mean time per token after the first"
    )
    end_to_end: Histogram = _seconds("e2e_request_latency", "Arrival to last token")
    prefill: Histogram = _seconds("request_prefill_time", "First step to first token of a request")
    decode: Histogram = _seconds("request_decode_time", "First token to last token of a choice")
    queue: Histogram = _seconds("request_queue_time", "Arrival to first step")
    prompt_size: Histogram = _tokens("request_prompt_tokens", "Prompt tokens per request")
    generation_size: Histogram = _tokens("request_generation_tokens", "Emitted tokens per choice")


_TASK_FAMILIES: Mapping[str, tuple[Any, ...]] = {
    one.name: one.metadata["family"] for one in fields(TaskSeries) if one.metadata
}

_BY_SLICE: Mapping[str, tuple[Any, str, str]] = {
    "num_slice_steps": (
        Counter, "vocab_slice_steps", "Decode steps drawn from a slice of the LM head",
    ),
    "num_full_steps": (
        Counter, "vocab_full_steps", "Decode steps of sliced requests drawn from the full head",
    ),
    "head_rows": (Counter, "vocab_head_rows", "LM-head rows computed for sliced requests"),
    "num_loaded": (Counter, "vocab_row_loads", "LM-head rows copied for requests"),
    "num_verifications": (Counter, "vocab_verify_windows", "Verifications of a choice"),
    "num_checked": (Counter, "vocab_verified_tokens", "Tokens that were verified"),
    "num_missed": (Counter, "vocab_slice_misses", "Tokens the full head replaced"),
    "num_dropped": (Counter, "vocab_dropped_tokens", "Tokens taken back, never sent"),
    "num_ids": (Gauge, "vocab_slice_ids", "Ids of the last slice"),
    "verify_s": (
        partial(Histogram, buckets=SHORT_BUCKETS_S), "vocab_verify_time_seconds",
        "Verifications that a choice waited for",
    ),
}  # fmt: skip
"""Families of LM-head slices, by the field of VocabularyCounts that they tell; counters sum it."""

_BY_TENTH = "by the tenth of their claimed chance"
_PAIRS: Mapping[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "position": (
        ("spec_decode_num_offered_per_pos", "Drafts with a node at this depth"),
        ("spec_decode_num_accepted_tokens_per_pos", "Draft tokens kept, by depth (0 = the first)"),
    ),
    "source": (
        ("spec_decode_num_draft_tokens_by_source", "Verified draft rows, by source"),
        ("spec_decode_num_accepted_tokens_by_source", "Draft tokens kept, by source"),
    ),
    "survival": (
        ("spec_decode_num_draft_tokens_by_survival", f"Verified draft rows, {_BY_TENTH}"),
        ("spec_decode_num_accepted_tokens_by_survival", f"Draft tokens kept, {_BY_TENTH}"),
    ),
}
"""Counters of draft rows and of those that were kept, by the label that they have beside a
task's drafter."""

_BY_LABEL: Mapping[str, tuple[type[Any], str, tuple[str, ...]]] = {
    "spec_decode_num_no_draft": (
        Counter, "Steps without a draft, by reason (docs/no-drafts.md)", (*_DRAFTED, "reason"),
    ),
    "request_success": (Counter, "Finished choices", (*_REQUEST, "finished_reason")),
    "request_outcomes": (
        Counter, "Requests by outcome (ok, abort, error, refused)", (*_REQUEST, "outcome"),
    ),
    "http_responses": (
        Counter, "HTTP responses by route, status and error code", ("route", "status", "code"),
    ),
    "engine_up": (Gauge, "1 while the engine serves", _ENGINE),
    "engine_heartbeat_age_seconds": (
        Gauge, "Seconds since the engine last made progress", _ENGINE,
    ),
    "engine_restarts": (Counter, "Restarts of dead engines", _ENGINE),
    "model_vocab_size": (Gauge, "Ids of the model, padding included", _ENGINE),
    "model_weights": (
        Gauge, "1; how the weights are kept, what multiplies them", (*_ENGINE, "form", "kernel"),
    ),
    "kv_cache_bytes": (
        Gauge, "Most that keys and values may take, and what they are kept as",
        (*_ENGINE, "dtype"),
    ),
    "head_bytes_in_file": (
        Gauge, "Memory that an LM head does not take: it stays in the model's file", _ENGINE,
    ),
    "corpus_tokens": (Gauge, "Tokens of the task's corpus", ("task",)),
}  # fmt: skip
"""Families whose series are looked up by a label that comes with each count."""

_TENTHS = tuple(f"0.{tenth}" for tenth in range(10))


class Metrics:
    """All series and the registry that holds them.

    vllm_aliases: /metrics has the same figures under all of vLLM's names too, not only under its
    main ones (server.metrics).
    """

    def __init__(self, *, vllm_aliases: bool = False) -> None:
        r = self.registry = CollectorRegistry(auto_describe=True)
        self._families: dict[str, Any] = {
            field_name: kind(name, text, labels, registry=r, **options)
            for field_name, (kind, name, text, labels, options) in _TASK_FAMILIES.items()
        }
        self._by_slice: dict[str, Any] = {
            field_name: kind(f"tailor_{name}", text, _MODE, registry=r)
            for field_name, (kind, name, text) in _BY_SLICE.items()
        }
        self._pairs = {
            label: [
                Counter(f"tailor_{name}", text, (*_DRAFTED, label), registry=r)
                for name, text in both
            ]
            for label, both in _PAIRS.items()
        }
        self._by_label: dict[str, Any] = {
            name: kind(f"tailor_{name}", text, labels, registry=r)
            for name, (kind, text, labels) in _BY_LABEL.items()
        }
        self._engine_figures = EngineFigures()
        r.register(self._engine_figures)
        self._tasks: dict[tuple[str, str, str], TaskSeries] = {}
        self._slices: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._aliases = CollectorRegistry(auto_describe=False)
        self._aliases.register(VllmNames(self.families, all_names=vllm_aliases))

    def task(self, task: str, drafter: str, model: str) -> TaskSeries:
        """The series of a task under a drafter and a model. Made on first use, at 0."""
        labels = (task, drafter, model)
        series = self._tasks.get(labels)
        if series is None:
            given = dict(zip(_DRAFTED, labels, strict=True))
            made = {
                name: family.labels(*(given[label] for label in _TASK_FAMILIES[name][3]))
                for name, family in self._families.items()
            }
            series = self._tasks[labels] = TaskSeries(labels, {}, **made)
        return series

    def count_step(self, series: TaskSeries, num_tokens: int, counts: StepCounts) -> None:
        """Count the tokens of one Delta and its StepCounts."""
        if num_tokens:
            series.generation_tokens.inc(num_tokens)
        if counts.num_steps:
            series.decode_steps.inc(counts.num_steps)
        if counts.no_draft_reason:
            no_draft = self._by_label["spec_decode_num_no_draft"]
            # Mode exact hands several steps out at once.
            num = counts.num_steps - counts.num_drafts
            no_draft.labels(*series.labels, counts.no_draft_reason).inc(num)
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

    def _count_pair(
        self, series: TaskSeries, kind: str, value: str, drafted: int, accepted: int
    ) -> None:
        pair = series.pairs.get((kind, value))
        if pair is None:
            offered, kept = self._pairs[kind]
            labels = (*series.labels, value)
            pair = series.pairs[kind, value] = offered.labels(*labels), kept.labels(*labels)
        pair[0].inc(drafted)
        if accepted:
            pair[1].inc(accepted)

    def count_vocabulary(self, task: str, mode: str, model: str, counts: VocabularyCounts) -> None:
        """Count the VocabularyCounts of one Delta. Series are made on first use, at 0."""
        labels = (task, mode, model)
        series = self._slices.get(labels)
        if series is None:
            series = {name: family.labels(*labels) for name, family in self._by_slice.items()}
            self._slices[labels] = series
        for name, one in series.items():
            if isinstance(one, Counter) and (number := getattr(counts, name)):
                one.inc(number)
        series["num_ids"].set(counts.num_ids)
        if counts.num_verifications:
            series["verify_s"].observe(counts.verify_s)

    def count_choice(self, task: str, model: str, finish_reason: str) -> None:
        """A choice ended."""
        self._by_label["request_success"].labels(task, model, finish_reason).inc()

    def count_outcome(self, task: str, model: str, outcome: str) -> None:
        """A Request ended: "ok", "abort", "error", or "refused" by an engine (4xx)."""
        self._by_label["request_outcomes"].labels(task, model, outcome).inc()

    def expect(self, task: str, drafter: str, model: str) -> None:
        """Show the series of a task before its first request.

        rate() and increase() of Prometheus need the 0 before the first event.
        """
        self.task(task, drafter, model)
        for reason in ("stop", "length"):
            self._by_label["request_success"].labels(task, model, reason)
        for outcome in ("ok", "abort", "error", "refused"):
            self._by_label["request_outcomes"].labels(task, model, outcome)

    def count_response(self, route: str, status: int, code: str) -> None:
        """An HTTP response was sent. route: a known route or "other"; code: "" without error."""
        self._by_label["http_responses"].labels(route, str(status), code).inc()

    # --- engines ---

    def engine_ready(self, engine: str, model: str, info: ModelInfo) -> None:
        """An engine began to serve."""
        of = self._by_label
        of["engine_up"].labels(engine, model).set(1)
        of["model_vocab_size"].labels(engine, model).set(info.vocab_size)
        of["model_weights"].labels(engine, model, info.dtype, info.kernel).set(1)
        if info.kv_block_bytes:
            room = info.num_blocks * info.kv_block_bytes
            of["kv_cache_bytes"].labels(engine, model, info.kv_dtype).set(room)
        if info.head_bytes_in_file:
            of["head_bytes_in_file"].labels(engine, model).set(info.head_bytes_in_file)
        self._engine_figures.begin(engine, model, info.figures)

    def engine_down(self, engine: str, model: str, *, restarted: bool) -> None:
        """An engine died, was stopped or is not there yet; it has no requests."""
        self._by_label["engine_up"].labels(engine, model).set(0)
        self._by_label["engine_restarts"].labels(engine, model).inc(restarted)
        self._engine_figures.end(engine)

    def engine_gone(self, engine: str, model: str, *, has_left: bool) -> None:
        """Nobody knows a fleet's engine any more. has_left: nobody needs it, either. If it comes
        back, it tells what it has counted anew."""
        up = self._by_label["engine_up"]
        up.labels(engine, model).set(0)
        if has_left:
            up.remove(engine, model)
        self._engine_figures.forget(engine)

    def engine_heartbeat(self, engine: str, model: str, age_s: float) -> None:
        """How long ago an engine made progress; 0 for one that does not serve."""
        self._by_label["engine_heartbeat_age_seconds"].labels(engine, model).set(age_s)

    def engine_told(self, engine: str, *told: Sequence[FigureValue]) -> None:
        """See EngineFigures.told."""
        self._engine_figures.told(engine, *told)

    def corpus_sizes(self, sizes: Mapping[str, int]) -> None:
        """Tokens of each served task's corpus, 0 for none."""
        corpora = self._by_label["corpus_tokens"]
        corpora.clear()
        for task, num_tokens in sizes.items():
            corpora.labels(task).set(num_tokens)

    # --- what is shown ---

    def exposition(self, port: int = 0) -> bytes:
        """The text that /metrics returns (content type CONTENT_TYPE_LATEST). port: that it was
        asked on, by which an ingress of a fleet tells more or less."""
        return generate_latest(self.registry) + generate_latest(self._aliases)

    def families(self, names: Iterable[str]) -> Iterator[Metric]:
        """Only the samples with these names (`tailor_engine_steps_total`), by family."""
        wanted = set(names)
        yield from self.registry.restricted_registry(wanted).collect()
        for family in self._engine_figures.collect():
            family.samples = [one for one in family.samples if one.name in wanted]
            if family.samples:
                yield family


# --- what engines tell ----------------------------------------------------------------------------

_Numbers = tuple[float, ...]
"""One number; of a histogram, how many values lay in each bucket and above, and their sum."""
_LARGEST = ("draft_budget", "vocab_verify_every")


class _Life:
    """An engine slot. Of each figure, by the values of its labels: numbers, what was told last, and
    before, what earlier processes of the slot had counted."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.figures: Sequence[Figure] = ()
        self.numbers: dict[str, dict[tuple[str, ...], _Numbers]] = {}
        self.before: dict[str, dict[tuple[str, ...], _Numbers]] = {}


class EngineFigures(Collector):
    """What engines tell of themselves, as series of /metrics.

    An engine declares its figures when it is ready (ModelInfo.figures) and tells their values when
    somebody asks (EngineClient.ask_figures), counted from its start. Here they get the labels
    `engine` and `model`, and counters and histograms go on where they were when an engine was
    started again.
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}

    def begin(self, engine: str, model: str, figures: Sequence[Figure]) -> None:
        """An engine is ready; it counts from 0."""
        life = self._lives.setdefault(engine, _Life(model))
        self.end(engine)
        life.figures = figures

    def told(self, engine: str, *told: Sequence[FigureValue]) -> None:
        """What an engine told, in the order of its ModelInfo.figures. Of several that count as one:
        sums; shares as means, and of what is decided anew each step the largest. One that was not
        ready is not known."""
        if (life := self._lives.get(engine)) is None:
            return
        for i, figure in enumerate(life.figures):
            found = [by for one in told if i < len(one) and (by := _by_labels(figure, one[i]))]
            sums: dict[tuple[str, ...], _Numbers] = {}
            add: Callable[[_Numbers, _Numbers], _Numbers] = max if figure.name in _LARGEST else _sum
            for labels, numbers in (item for by in found for item in by.items()):
                sums[labels] = add(sums[labels], numbers) if labels in sums else numbers
            if figure.name.endswith("_perc"):
                sums = {labels: (numbers[0] / len(found),) for labels, numbers in sums.items()}
            life.numbers[figure.name] = sums

    def end(self, engine: str) -> None:
        """An engine is gone: it holds nothing, and what it counted stays."""
        if (life := self._lives.get(engine)) is None:
            return
        for figure in life.figures:
            told = life.numbers.get(figure.name, {})
            if figure.kind == "gauge":
                life.numbers[figure.name] = dict.fromkeys(told, (0.0,))
                continue
            before = life.before.setdefault(figure.name, {})
            for labels, numbers in told.items():
                before[labels] = _sum(before.get(labels), numbers)
            life.numbers[figure.name] = {}

    def forget(self, engine: str) -> None:
        """Tell nothing of an engine any more."""
        self._lives.pop(engine, None)

    def describe(self) -> list[Metric]:
        """Nothing: what there is is known when an engine is ready."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family for each figure that some engine has told."""
        families: dict[str, Any] = {}
        for engine, life in self._lives.items():
            for figure in life.figures:
                told, before = life.numbers.get(figure.name, {}), life.before.get(figure.name, {})
                for labels in {**before, **told}:
                    numbers = _sum(before.get(labels), told.get(labels))
                    if figure.name not in families:
                        names = ("engine", "model", *figure.labels)
                        made = _KINDS[figure.kind](
                            f"tailor_{figure.name}", figure.text, labels=names
                        )
                        families[figure.name] = made
                    _add(families[figure.name], (engine, life.model, *labels), figure, numbers)
        yield from families.values()


def _by_labels(figure: Figure, value: Any) -> dict[tuple[str, ...], _Numbers]:
    if value is None:
        return {}
    if figure.kind == "histogram":
        return {(): (*value[0], value[1])}
    if isinstance(value, int | float):
        return {(): (value,)}
    return {tuple(labels): (number,) for labels, number in value}


def _sum(a: _Numbers | None, b: _Numbers | None) -> _Numbers:
    if a is None or b is None:
        return a or b or ()
    return tuple(x + y for x, y in zip(a, b, strict=True))


_KINDS: dict[str, type[Any]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _add(family: Any, labels: tuple[str, ...], figure: Figure, numbers: _Numbers) -> None:
    if figure.kind != "histogram":
        family.add_metric(labels, numbers[0])
        return
    edges, buckets, count = (*figure.buckets, float("inf")), [], 0.0
    for edge, number in zip(edges, numbers[:-1], strict=True):
        count += number
        buckets.append((str(floatToGoString(edge)), count))  # type: ignore[no-untyped-call]
    family.add_metric(labels, buckets, numbers[-1])


# --- vLLM's names ---------------------------------------------------------------------------------

# Our series under vLLM's names, for dashboards and autoscalers that were made for vLLM.
#
# Those that autoscalers and most dashboards ask for are always there, the others where
# `metrics.vllm_aliases` says so. Nothing is counted twice: at each scrape our own samples are
# read, summed over labels that vLLM lacks (task, drafter) and repeated. `model_name` is the
# model's name in server.yaml. Engines' figures have `engine` ("0", "1", ...) as in vLLM; figures
# per request have no such label, because a task's requests are spread over engines.
#
# Left out, because Tailor has no figure of the same meaning: iteration_tokens, inference time,
# requests' parameters, sleep state, LoRA and multimodal caches.


class _Alias(NamedTuple):
    """ours: our name without `tailor_`. name: vLLM's, "" for the same. kept: labels beside
    model_name. is_main: always there."""

    kind: str
    ours: str
    name: str = ""
    kept: tuple[str, ...] = ()
    is_main: bool = False


_ON_ENGINE = ("engine",)

ALIASES = (
    _Alias("gauge", "num_requests_running", "", _ON_ENGINE, is_main=True),
    _Alias("gauge", "num_requests_waiting", "", _ON_ENGINE, is_main=True),
    _Alias("gauge", "kv_cache_usage_perc", "", _ON_ENGINE, is_main=True),
    _Alias("gauge", "kv_cache_usage_perc", "gpu_cache_usage_perc", _ON_ENGINE),
    _Alias("counter", "num_preemptions", "", _ON_ENGINE),
    _Alias("counter", "prefix_cache_queries", "", _ON_ENGINE),
    _Alias("counter", "prefix_cache_hits", "", _ON_ENGINE),
    _Alias("counter", "prompt_tokens", is_main=True),
    _Alias("counter", "prompt_tokens_cached"),
    _Alias("counter", "generation_tokens", is_main=True),
    _Alias("counter", "request_success", "", ("finished_reason",), is_main=True),
    _Alias("counter", "spec_decode_num_drafts"),
    _Alias("counter", "spec_decode_num_draft_tokens"),
    _Alias("counter", "spec_decode_num_accepted_tokens"),
    _Alias("counter", "spec_decode_num_accepted_tokens_per_pos", "", ("position",)),
    _Alias("histogram", "time_to_first_token_seconds", is_main=True),
    _Alias("histogram", "inter_token_latency_seconds"),
    _Alias("histogram", "inter_token_latency_seconds", "time_per_output_token_seconds"),
    _Alias("histogram", "request_time_per_output_token_seconds"),
    _Alias("histogram", "e2e_request_latency_seconds"),
    _Alias("histogram", "request_queue_time_seconds"),
    _Alias("histogram", "request_prefill_time_seconds"),
    _Alias("histogram", "request_decode_time_seconds"),
    _Alias("histogram", "request_prompt_tokens"),
    _Alias("histogram", "request_generation_tokens"),
)
_SAMPLES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}


class VllmNames(Collector):
    """A collector of its own registry. families: gives ours that have samples of these names."""

    def __init__(
        self, families: Callable[[Iterable[str]], Iterable[Metric]], *, all_names: bool
    ) -> None:
        self._families = families
        self._aliases = [one for one in ALIASES if all_names or one.is_main]
        self._names = {
            f"tailor_{one.ours}{suffix}" for one in self._aliases for suffix in _SAMPLES[one.kind]
        }

    def collect(self) -> Iterator[Metric]:
        """One family for each of ALIASES that has samples, in that order."""
        found = {family.name: family for family in self._families(self._names)}
        for alias in self._aliases:
            if (family := found.get(f"tailor_{alias.ours}")) is not None:
                yield _told_again(alias, family)


def _told_again(alias: _Alias, family: Metric) -> Metric:
    """`family` under the alias's name, summed over the labels that are not kept. Our engines are
    called MODEL/NUMBER."""
    made = Metric(f"vllm:{alias.name or alias.ours}", family.documentation, alias.kind)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        own, suffix = sample.labels, sample.name.removeprefix(f"tailor_{alias.ours}")
        labels = {"model_name": own["model"]}
        labels |= {label: own[label].rpartition("/")[2] for label in alias.kept}
        labels |= {"le": own["le"]} if "le" in own else {}
        at = suffix, tuple(labels.items())
        sums[at] = sums.get(at, 0.0) + sample.value
    for (suffix, kept), value in sums.items():
        made.add_sample(made.name + suffix, dict(kept), value)
    return made
