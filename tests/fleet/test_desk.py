"""The desk: who is there, and what those who start are called."""

from __future__ import annotations

from server.fleet.desk import GONE_AFTER_S, LIVES_S, Desk, Standing
from server.fleet.far_engine import total
from server.types import AdapterFigures, EngineStats, SharedFigures
from tests.fakes.fake_runner import fake_info


def test_names_are_of_one_replica_each() -> None:
    now_s = 100.0
    desk = Desk(lambda: now_s)

    def tell(number: int, replica_id: str) -> None:
        info = fake_info(vocab_size=64)
        desk.tell(Standing(f"m/{number}", "m", replica_id, "n", info, EngineStats(), {}))

    tell(0, "a")
    tell(2, "b")  # it was made during an update, beside 0 and 1
    assert [desk.number("m", rank) for rank in (0, 1, 2)] == [1, 1, 3]
    assert desk.number("other", 0) == 0
    now_s += LIVES_S + 0.1  # both are dead: those that replace them find what they kept
    assert [desk.number("m", rank) for rank in (0, 2)] == [0, 2]
    assert len(desk.standings("m")) == 2
    now_s += GONE_AFTER_S
    assert desk.standings("m") == [] and desk.info("m") is not None


def test_the_figures_of_replicas_are_added_up() -> None:
    one = EngineStats(
        num_running=2, step_s=0.1, learned=(("t", 5, 1),), shared=(SharedFigures("t", 3),),
        adapters=(AdapterFigures("a", 1, 2, 3, 4),),
    )  # fmt: skip
    two = EngineStats(
        num_running=3, step_s=0.2, learned=(("t", 6, 1), ("u", 1, 1)),
        adapters=(AdapterFigures("a", 1, 1, 1, 1), AdapterFigures("b", 9)),
    )  # fmt: skip
    both = total([one, two])
    assert (both.num_running, both.step_s) == (5, 0.2)
    assert both.learned == (("t", 11, 2), ("u", 1, 1)) and both.shared == ()
    assert both.adapters == (AdapterFigures("a", 2, 3, 4, 5), AdapterFigures("b", 9))
    assert total([]) == EngineStats()
