"""Our series under vLLM's names, for dashboards and autoscalers that were made for vLLM.

Those that autoscalers and most dashboards ask for are always there, the others where
`metrics.vllm_aliases` says so. Nothing is counted twice: at each scrape our own samples are read,
summed over labels that vLLM lacks (task, drafter) and repeated. `model_name` is the model's name in
server.yaml. Engines' figures have `engine` ("0", "1", ...) as in vLLM; figures per request have no
such label, because a task's requests are spread over engines.

Left out, because Tailor has no figure of the same meaning: iteration_tokens, inference time,
requests' parameters, sleep state, LoRA and multimodal caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector


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
_SAMPLES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum")}


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
    """`family` under the alias's name, summed over the labels that are not kept."""
    name, text = f"vllm:{alias.name or alias.ours}", family.documentation
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
