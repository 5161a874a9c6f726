"""The desk: who is there, and what those who start are called."""

from __future__ import annotations

from typing import Any

import pytest

from server.fleet.desk import GONE_AFTER_S, LIVES_S, Desk, Standing
from server.metrics import EngineFigures
from server.types import Figure
from tests.fakes.fake_runner import fake_info


def test_names_are_of_one_replica_each() -> None:
    now_s = 100.0
    desk = Desk(lambda: now_s)

    def tell(number: int, replica_id: str) -> None:
        info = fake_info(vocab_size=64)
        desk.tell(Standing(f"m/{number}", "m", replica_id, info, []))

    tell(0, "a")
    tell(2, "b")  # it was made during an update, beside 0 and 1
    # All three start at once, and the first one again.
    assert [desk.number("m", rank) for rank in (0, 1, 2, 0)] == [1, 3, 4, 1]
    assert desk.number("other", 0) == 0
    now_s += LIVES_S + 0.1  # both are dead: those that replace them find what they kept
    assert [desk.number("m", rank) for rank in (0, 2)] == [0, 2]
    assert len(desk.standings("m")) == 2
    now_s += GONE_AFTER_S
    assert desk.standings("m") == [] and desk.state("m").info is not None
    for number in (0, 1):
        tell(number, f"c{number}")
        desk.leave(f"c{number}")
    desk.leave("who")
    tell(0, "d")
    assert list(desk.state("m").figures) == ["m/0"] and desk.state("m").left == {"m/1"}
    assert not desk.state("other").left


def test_the_figures_of_replicas_are_added_up() -> None:
    figures = (
        Figure("num_requests_running", "gauge", ""),
        Figure("kv_cache_usage_perc", "gauge", ""),
        Figure("draft_budget", "gauge", ""),
        Figure("learned_outputs", "counter", "", ("task",)),
        Figure("step_rows", "histogram", "", (), (1, 2)),
        Figure("device_utilization_ratio", "gauge", ""),
    )
    one: Any = [2, 0.5, 3, [[["t"], 5]], [[1, 0, 2], 9.0], None]
    two: Any = [3, 0.1, 8, [[["t"], 6], [["u"], 1]], [[0, 4, 0], 8.0], None]
    shown = EngineFigures()
    shown.begin("m/fleet", "m", figures)
    shown.told("m/fleet", one, [], two)
    told = {
        (sample.name.removeprefix("tailor_"), *list(sample.labels.values())[2:]): sample.value
        for family in shown.collect()
        for sample in family.samples
    }
    assert told == {
        ("num_requests_running",): 5, ("kv_cache_usage_perc",): pytest.approx(0.3),
        ("draft_budget",): 8, ("learned_outputs_total", "t"): 11, ("learned_outputs_total", "u"): 1,
        ("step_rows_bucket", "1.0"): 1, ("step_rows_bucket", "2.0"): 5,
        ("step_rows_bucket", "+Inf"): 7, ("step_rows_count",): 7, ("step_rows_sum",): 17.0,
    }  # fmt: skip
    shown.told("m/fleet")
    assert not list(shown.collect())
