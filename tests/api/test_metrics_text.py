"""What /metrics says, read by Prometheus' own parser."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.figures import declared
from server.metrics import Metrics
from server.types import FigureValue, StepCounts
from tests.fakes.fake_runner import fake_info


def told(metrics: Metrics, engine: str, *, begins: bool = True, **given: FigureValue) -> None:
    """An engine tells these figures, and of the others nothing."""
    info = replace(fake_info(), name="m", figures=declared())
    if begins:
        metrics.engine_ready(engine, "m", info)
    metrics.engine_told(engine, [given.get(figure.name) for figure in info.figures])


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
    told(metrics, "m/0", kv_cache_usage_perc=math.nan, num_requests_running=3e21,
         num_requests_waiting=math.inf)  # fmt: skip
    metrics.corpus_sizes({"sql": 12345678})
    return metrics


@pytest.mark.parametrize("vllm_aliases", [False, True])
def test_vllms_main_names_are_there_and_the_others_when_asked_for(vllm_aliases: bool) -> None:
    text = filled(vllm_aliases=vllm_aliases).exposition().decode()
    names = [f.name for f in text_string_to_metric_families(text)]
    assert len(names) == len(set(names)), "a family is told once"
    theirs = {name.removeprefix("vllm:") for name in names if name.startswith("vllm:")}
    main = {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens",
        "generation_tokens", "request_success", "time_to_first_token_seconds",
    }  # fmt: skip
    assert theirs == main if not vllm_aliases else theirs > main | {"gpu_cache_usage_perc"}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = (("engine", "0"), ("model_name", "m"))
    assert values["vllm:num_requests_running", *labels] == 3e21
    assert values["vllm:generation_tokens_total", ("model_name", "m")] == 15  # of five tasks


def test_every_step_without_a_draft_is_counted_of_those_that_come_together() -> None:
    """As in mode exact, whose steps are handed out once they are verified."""
    metrics = Metrics()
    one = StepCounts(num_steps=1, no_draft_reason="no_match")
    drafted = StepCounts(num_steps=1, num_drafts=1, num_drafted=2)
    metrics.count_step(metrics.task("t", "auto", "m"), 5, one.plus(one).plus(drafted).plus(one))
    [sample] = [
        one
        for family in metrics.families(["tailor_spec_decode_num_no_draft_total"])
        for one in family.samples
    ]
    assert (sample.labels["reason"], sample.value) == ("no_match", 3)


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


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    labels = {"engine": "e", "model": "m", **labels}
    return metrics.registry.get_sample_value(f"tailor_{name}", labels)


def test_adapters_are_counted_by_name_and_hold_nothing_once_their_engine_is_gone() -> None:
    metrics = Metrics()

    def tell(requests: dict[str, int], num_bytes: dict[str, int]) -> None:
        told(
            metrics,
            "e",
            begins=len(requests) == 1,
            adapter_requests=tuple(((name,), num) for name, num in requests.items()),
            adapter_bytes=tuple(((name,), num) for name, num in num_bytes.items()),
        )  # fmt: skip

    def found(adapter: str) -> list[float | None]:
        names = ("adapter_requests_total", "adapter_bytes")
        return [sample(metrics, name, adapter=adapter) for name in names]

    tell({"a": 2}, {"a": 10})
    assert found("a") == [2, 10]
    tell({"a": 5, "b": 1}, {"a": 0, "b": 7})
    assert (found("a"), found("b")) == ([5, 0], [1, 7])
    metrics.engine_down("e", "m", restarted=True)
    assert (found("a"), found("b")) == ([5, 0], [1, 0])


def test_counts_go_on_where_they_were_when_an_engine_starts_again() -> None:
    metrics = Metrics()
    for life in (1, 2):
        for steps in (3, 4):
            told(
                metrics, "e", begins=steps == 3,
                engine_steps=steps, step_rows=((*(0,) * 2, steps, *(0,) * 18), 2.0 * steps),
                engine_rows=((("decode",), steps), (("draft",), 1)), prefix_cache_blocks=steps,
            )  # fmt: skip
        assert sample(metrics, "engine_steps_total") == 4 * life
        assert sample(metrics, "engine_rows_total", kind="decode") == 4 * life
        assert sample(metrics, "step_rows_sum") == 8.0 * life
        assert sample(metrics, "step_rows_bucket", le="2.0") == 0
        assert sample(metrics, "step_rows_bucket", le="3.0") == 4 * life
        assert sample(metrics, "step_rows_bucket", le="+Inf") == 4 * life
        assert sample(metrics, "prefix_cache_blocks") == 4
        metrics.engine_down("e", "m", restarted=True)
        assert sample(metrics, "prefix_cache_blocks") == 0
        assert sample(metrics, "engine_restarts_total") == life


def test_figures_that_an_engine_does_not_have_are_not_told() -> None:
    metrics = filled(vllm_aliases=False)
    told(metrics, "m/1", device_memory_bytes=None, device_utilization_ratio=None)
    assert b"tailor_device_" not in metrics.exposition()
    told(
        metrics, "m/1", begins=False,
        device_memory_bytes=tuple(((kind,), 5) for kind in ("reserved", "free")),
    )  # fmt: skip
    text = metrics.exposition()
    assert b'tailor_device_memory_bytes{engine="m/1",kind="free",model="m"} 5.0' in text
    assert b"device_utilization" not in text, "without NVML nothing is told of its use"
    metrics.engine_down("m/1", "m", restarted=False)
    assert b'kind="free",model="m"} 0.0' in metrics.exposition()
