"""What /metrics says, read by Prometheus' own parser."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics.series import Metrics
from server.types import AdapterFigures, DeviceFigures, EngineStats, StepCounts


def filled(*, vllm_aliases: bool) -> Metrics:
    metrics = Metrics(vllm_aliases=vllm_aliases)
    for task in ("sql", 'a "quoted" one', "back\\slash", "two\nlines", "größe"):
        metrics.expect(task, "auto", "m")
        series = metrics.task(task, "auto", "m")
        metrics.count_step(
            series, 3,
            StepCounts(
                num_steps=1, num_drafts=1, num_drafted=4, num_accepted=2, expected_accepted=1.25,
                offered_by_depth=(1, 1), accepted_by_depth=(1, 1), by_source=(("corpus", 4, 2),),
            ),
        )  # fmt: skip
        for value in (0.0004, 0.02, 1e9, 1e-12):
            series.inter_token.observe(value)
    engine = metrics.engine("m/0", "m")
    for gauge, value in ((engine.kv_usage, math.nan), (engine.running, 3e21)):
        gauge.set(value)
    engine.waiting.set(math.inf)
    metrics.corpus_sizes({"sql": 12345678})
    return metrics


@pytest.mark.parametrize("vllm_aliases", [False, True])
def test_the_other_names_are_there_when_asked_for(vllm_aliases: bool) -> None:
    text = filled(vllm_aliases=vllm_aliases).exposition().decode()
    assert ("vllm:" in text) is vllm_aliases
    names = [f.name for f in text_string_to_metric_families(text)]
    assert len(names) == len(set(names)), "a family is told once"


def test_a_parser_reads_the_labels_back() -> None:
    text = filled(vllm_aliases=False).exposition().decode()
    tasks = {
        sample.labels["task"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "tailor_generation_tokens_total"
    }
    assert tasks == {"sql", 'a "quoted" one', "back\\slash", "two\nlines", "größe"}


def test_a_task_that_is_gone_is_not_told() -> None:
    metrics = filled(vllm_aliases=False)
    assert b'tailor_corpus_tokens{task="sql"} 1.2345678e+07' in metrics.exposition()
    metrics.corpus_sizes({"rag": 5})
    text = metrics.exposition()
    assert b'tailor_corpus_tokens{task="rag"} 5.0' in text
    assert b'tailor_corpus_tokens{task="sql"}' not in text


def test_adapters_are_counted_by_name_and_hold_nothing_once_their_engine_is_gone() -> None:
    metrics = Metrics()

    def sample(name: str, adapter: str) -> float | None:
        labels = {"engine": "e", "model": "m", "adapter": adapter}
        return metrics.registry.get_sample_value(f"tailor_adapter_{name}", labels)

    first = AdapterFigures("a", num_requests=2, num_loads=1, num_bytes=10)
    metrics.engine_stats("e", "m", EngineStats(adapters=(first,)))
    assert [sample(n, "a") for n in ("requests_total", "loads_total", "bytes")] == [2, 1, 10]
    gone = AdapterFigures("a", num_requests=5, num_loads=1, num_evictions=1)
    other = AdapterFigures("b", num_requests=1, num_loads=1, num_bytes=7)
    metrics.engine_stats("e", "m", EngineStats(adapters=(gone, other)))
    assert [sample(n, "a") for n in ("requests_total", "evictions_total", "bytes")] == [5, 1, 0]
    assert [sample(n, "b") for n in ("requests_total", "bytes")] == [1, 7]
    metrics.engine_down("e", "m", restarted=True)
    assert sample("bytes", "b") == 0 and sample("requests_total", "b") == 1


def test_a_gpu_s_figures_are_there_only_where_there_is_one() -> None:
    def told(of: Metrics) -> dict[str, float]:
        return {
            sample.labels.get("kind", "use"): sample.value
            for family in text_string_to_metric_families(of.exposition().decode())
            for sample in family.samples
            if sample.name.startswith("tailor_device_") and sample.labels["engine"] == "m/1"
        }

    metrics = filled(vllm_aliases=False)
    metrics.engine_stats("m/1", "m", EngineStats())
    assert told(metrics) == {}
    metrics.engine_stats("m/1", "m", EngineStats(device=DeviceFigures(5, 4, 2, 8)))
    memory = {"reserved": 5.0, "allocated": 4.0, "free": 2.0, "total": 8.0}
    assert told(metrics) == memory, "without NVML nothing is told of its use"
    for steps in ((3, 1, 2), (9, 1, 4)):
        figures = DeviceFigures(5, 4, 2, 8, 0.5, steps)
        metrics.engine_stats("m/1", "m", EngineStats(device=figures))
    assert told(metrics) == memory | {"use": 0.5}
    steps_by_kind = {
        sample.labels["kind"]: sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if sample.name == "tailor_cuda_graph_steps_total" and sample.labels["engine"] == "m/1"
    }
    assert steps_by_kind == {"replayed": 9.0, "captured": 1.0, "none": 4.0}
    metrics.engine_down("m/1", "m", restarted=False)
    assert set(told(metrics).values()) == {0.0}
