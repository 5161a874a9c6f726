"""Our series under vLLM's names, for dashboards and autoscalers that were made for vLLM.

Opt-in (`metrics.vllm_aliases`). Nothing is counted twice: at each scrape our own samples are read,
summed over labels that vLLM lacks (task, drafter) and repeated. `model_name` is the model's name in
server.yaml. Engines' figures have `engine` ("0", "1", ...) as in vLLM; figures per request have no
such label, because a task's requests are spread over engines.

Left out, because Tailor has no figure of the same meaning: iteration_tokens, inference time,
requests' parameters, sleep state, LoRA and multimodal caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class _Alias:
    """ours: our name without `tailor_`. kept: labels beside model_name."""

    kind: str
    ours: str
    name: str
    kept: tuple[str, ...] = ()


_ON_ENGINE = ("engine",)

ALIASES = (
    _Alias("gauge", "num_requests_running", "num_requests_running", _ON_ENGINE),
    _Alias("gauge", "num_requests_waiting", "num_requests_waiting", _ON_ENGINE),
    _Alias("gauge", "kv_cache_usage_perc", "kv_cache_usage_perc", _ON_ENGINE),
    _Alias("gauge", "kv_cache_usage_perc", "gpu_cache_usage_perc", _ON_ENGINE),
    _Alias("counter", "num_preemptions", "num_preemptions", _ON_ENGINE),
    _Alias("counter", "prefix_cache_queries", "prefix_cache_queries", _ON_ENGINE),
    _Alias("counter", "prefix_cache_hits", "prefix_cache_hits", _ON_ENGINE),
    _Alias("counter", "prompt_tokens", "prompt_tokens"),
    _Alias("counter", "prompt_tokens_cached", "prompt_tokens_cached"),
    _Alias("counter", "generation_tokens", "generation_tokens"),
    _Alias("counter", "request_success", "request_success", ("finished_reason",)),
    _Alias("counter", "spec_decode_num_drafts", "spec_decode_num_drafts"),
    _Alias("counter", "spec_decode_num_draft_tokens", "spec_decode_num_draft_tokens"),
    _Alias("counter", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens"),
    _Alias(
        "counter",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_accepted_tokens_per_pos",
        ("position",),
    ),
    _Alias("histogram", "time_to_first_token_seconds", "time_to_first_token_seconds"),
    _Alias("histogram", "inter_token_latency_seconds", "inter_token_latency_seconds"),
    _Alias("histogram", "inter_token_latency_seconds", "time_per_output_token_seconds"),
    _Alias(
        "histogram",
        "request_time_per_output_token_seconds",
        "request_time_per_output_token_seconds",
    ),
    _Alias("histogram", "e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    _Alias("histogram", "request_queue_time_seconds", "request_queue_time_seconds"),
    _Alias("histogram", "request_prefill_time_seconds", "request_prefill_time_seconds"),
    _Alias("histogram", "request_decode_time_seconds", "request_decode_time_seconds"),
    _Alias("histogram", "request_prompt_tokens", "request_prompt_tokens"),
    _Alias("histogram", "request_generation_tokens", "request_generation_tokens"),
)


class VllmNames(Collector):
    """A collector of its own registry that reads ours."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """One family for each of ALIASES, in that order."""
        found = {family.name: family for family in self._registry.collect()}
        for alias in ALIASES:
            yield _told_again(alias, found[f"tailor_{alias.ours}"])


def _told_again(alias: _Alias, family: Metric) -> Metric:
    """`family` under the alias's name, summed over the labels that are not kept."""
    name, text = f"vllm:{alias.name}", family.documentation
    labels = ("model_name", *alias.kept)
    if alias.kind == "histogram":
        return _histogram(HistogramMetricFamily(name, text, labels=labels), labels, family)
    sums: dict[tuple[str, ...], float] = {}
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            key = _key(labels, sample.labels)
            sums[key] = sums.get(key, 0.0) + sample.value
    made: CounterMetricFamily | GaugeMetricFamily = (
        CounterMetricFamily(name, text, labels=labels)
        if alias.kind == "counter"
        else GaugeMetricFamily(name, text, labels=labels)
    )
    for key, value in sums.items():
        made.add_metric(key, value)
    return made


def _histogram(
    made: HistogramMetricFamily, labels: Iterable[str], family: Metric
) -> HistogramMetricFamily:
    labels = tuple(labels)
    buckets: dict[tuple[str, ...], dict[str, float]] = {}
    sums: dict[tuple[str, ...], float] = {}
    for sample in family.samples:
        key = _key(labels, sample.labels)
        if sample.name.endswith("_bucket"):
            edges = buckets.setdefault(key, {})
            edge = sample.labels["le"]
            edges[edge] = edges.get(edge, 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            sums[key] = sums.get(key, 0.0) + sample.value
    for key, edges in buckets.items():
        made.add_metric(key, list(edges.items()), sums[key])
    return made


def _key(labels: Iterable[str], own: dict[str, str]) -> tuple[str, ...]:
    """The values of vLLM's labels. Our engines are called MODEL/NUMBER."""
    values = []
    for label in labels:
        if label == "model_name":
            values.append(own["model"])
        elif label == "engine":
            values.append(own["engine"].rpartition("/")[2])
        else:
            values.append(own[label])
    return tuple(values)
