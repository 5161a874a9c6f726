"""The desk: who is there, and what those who start are called."""

from __future__ import annotations

from server.fleet.desk import GONE_AFTER_S, LIVES_S, Desk, Standing
from server.metrics import total
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
    assert [desk.number("m", rank) for rank in (0, 1, 2)] == [1, 1, 3]
    assert desk.number("other", 0) == 0
    now_s += LIVES_S + 0.1  # both are dead: those that replace them find what they kept
    assert [desk.number("m", rank) for rank in (0, 2)] == [0, 2]
    assert len(desk.standings("m")) == 2
    now_s += GONE_AFTER_S
    assert desk.standings("m") == [] and desk.state("m")[0] is not None


def test_the_figures_of_replicas_are_added_up() -> None:
    figures = (
        Figure("num_requests_running", "gauge", ""),
        Figure("kv_cache_usage_perc", "gauge", ""),
        Figure("draft_budget", "gauge", ""),
        Figure("learned_outputs", "counter", "", ("task",)),
        Figure("step_rows", "histogram", "", (), (1, 2)),
        Figure("device_utilization_ratio", "gauge", ""),
    )
    one = [2, 0.5, 3, [[["t"], 5]], [[1, 0, 2], 9.0], None]
    two = [3, 0.1, 8, [[["t"], 6], [["u"], 1]], [[0, 4, 0], 8.0], None]
    assert total(figures, [one, two]) == [
        5, 0.3, 8, ((("t",), 11), (("u",), 1)), ((1, 4, 2), 17.0), None,
    ]  # fmt: skip
    assert total(figures, []) == [None, None, None, (), ((0, 0, 0), 0.0), None]
