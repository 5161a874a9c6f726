"""The routing policy, without Ray: homes, prefixes, queues, and when a task leaves home."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.fleet.routing import CHUNK, Job, Pace, ReplicaView, TaskRouting, prefix_chain
from server.fleet.scaling import CostMeter, StepCosts, TaskHabit
from server.types import Delta, StepCounts
from tests.fleet.test_budgets import Clock

COSTS = StepCosts(0.02, 0.001, 16)


def _routing(replicas: list[str], clock: Clock | None = None, **numbers: float) -> TaskRouting:
    routing = TaskRouting(chance=random.Random(1), clock=clock or Clock(), **numbers)  # type: ignore[arg-type]
    routing.set_replicas(replicas)
    return routing


def _views(loads: dict[str, int]) -> dict[str, ReplicaView]:
    return {name: ReplicaView(load, COSTS) for name, load in loads.items()}


def _job(task: str = "slots", tokens: int = 100, **fields: object) -> Job:
    return Job(task, tokens, 64, **fields)  # type: ignore[arg-type]


NAMES = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=12, unique=True)


@given(NAMES, st.lists(st.text("xyz", min_size=1, max_size=6), max_size=30, unique=True))
def test_a_replica_that_goes_moves_only_the_tasks_that_lived_there(
    replicas: list[str], tasks: list[str]
) -> None:
    routing = _routing(replicas)
    before = {task: routing.ranking(task, 2) for task in tasks}
    gone = replicas[0]
    routing.set_replicas(replicas[1:])
    for task in tasks:
        after = routing.ranking(task, 2)
        assert gone not in after
        kept = [name for name in before[task] if name != gone]
        assert after[: len(kept)] == kept  # the others stay, in their order
    routing.set_replicas(reversed(replicas))
    assert {task: routing.ranking(task, 2) for task in tasks} == before


def test_homes_are_spread_evenly() -> None:
    routing = _routing([f"replica-{i}" for i in range(10)])
    homes = Counter(routing.ranking(f"task-{i}", 1)[0] for i in range(5000))
    assert len(homes) == 10 and min(homes.values()) > 400 and max(homes.values()) < 600


@given(NAMES, st.data())
def test_none_is_told_twice_and_stuck_ones_only_where_all_are(
    replicas: list[str], data: st.DataObject
) -> None:
    routing = _routing(replicas)
    loads = {name: data.draw(st.integers(0, 40)) for name in replicas}
    stuck = data.draw(st.sets(st.sampled_from(replicas), max_size=len(replicas)))
    views = {
        name: ReplicaView(load, data.draw(st.sampled_from([None, COSTS])), name in stuck)
        for name, load in loads.items()
    }
    ranked = routing.choose(_job(), views.get)
    usable = set(replicas) - stuck or set(replicas)
    assert ranked and len(set(ranked)) == len(ranked)
    assert set(ranked) == usable if len(replicas) <= 8 else set(ranked) <= usable


class Asked(dict[str, ReplicaView]):
    """Views that count how many of them were read."""

    num = 0

    def view(self, name: str) -> ReplicaView | None:
        self.num += 1
        return self.get(name)


def test_of_many_replicas_a_choice_looks_at_few_whatever_their_number() -> None:
    names = [f"replica-{i}" for i in range(2000)]
    routing = _routing(names)
    views = Asked(_views(dict.fromkeys(names, 1)))
    tasks = [f"task-{i}" for i in range(50)]
    for task in tasks:
        ranked = routing.choose(_job(task), views.view)
        assert ranked[0] == routing.ranking(task, 1)[0] and len(ranked) < 12
    assert views.num < 12 * len(tasks)
    for name in names[1:]:
        views[name] = ReplicaView(0, COSTS, is_stuck=True)
    assert routing.choose(_job(), views.get)[0] == names[0]  # one of all goes on, and it is found


def test_a_full_home_is_left_and_a_slow_one_too() -> None:
    routing = _routing(["a", "b"])
    home, other = routing.ranking("slots", 2)
    assert routing.choose(_job(), _views({home: 60, other: 0}).get)[0] == other
    slow = {
        home: ReplicaView(0, StepCosts(0.2, 0.01, 16)),
        other: ReplicaView(0, COSTS),
    }
    assert routing.choose(_job(), slow.get)[0] == other


def test_what_could_not_serve_it_is_avoided_while_there_is_another() -> None:
    routing = _routing(["a", "b"])
    home, other = routing.ranking("slots", 2)
    views = _views({home: 0, other: 0})
    assert routing.choose(_job(avoid=(home,)), views.get) == [other]
    assert routing.choose(_job(avoid=(home,)), {home: views[home]}.get) == [home]


def test_the_longest_shared_prefix_wins_where_loads_are_equal() -> None:
    routing = _routing(list("abcd"), cold_cost=0.0)
    ids = list(range(CHUNK * 8))
    there = Job("other", len(ids), 4, chain=prefix_chain("", ids))
    away = next(n for n in "abcd" if n != routing.ranking("slots", 1)[0])
    routing.routed(there, away)
    again = Job("slots", len(ids), 4, chain=prefix_chain("", [*ids, 7]))
    assert routing.matched_tokens(again) == {away: CHUNK * 8}
    assert routing.choose(again, _views(dict.fromkeys("abcd", 1)).get)[0] == away


def test_a_chain_is_of_its_scope_and_of_whole_chunks() -> None:
    ids = list(range(CHUNK * 3 + 5))
    chain = prefix_chain("tenant\0", ids)
    assert len(chain) == 3 and prefix_chain("tenant\0", ids[: CHUNK * 2]) == chain[:2]
    assert set(chain).isdisjoint(prefix_chain("another\0", ids))
    assert prefix_chain("", ids[: CHUNK - 1]) == ()
    assert len(prefix_chain("", [1] * CHUNK * 1000)) == 64


def test_a_task_gets_homes_as_its_load_grows_and_gives_them_up_later() -> None:
    clock = Clock()
    routing = _routing([f"r{i}" for i in range(8)], clock)
    job = Job("slots", 200, 64)
    work_s = 200 * COSTS.row_s + 64 * COSTS.seat_s()
    homes = []
    for _ in range(3000):  # three replicas' worth of work
        clock.now_s += work_s / (3 * 0.7)
        routing.routed(job, "r0", COSTS)
        homes.append(routing.num_homes("slots"))
    assert homes[0] == 1 and homes == sorted(homes) and homes[-1] in (3, 4)
    for _ in range(200):
        clock.now_s += 20 * work_s
        routing.routed(job, "r0", COSTS)
    assert routing.num_homes("slots") == 1


def test_few_replicas_bound_the_homes_and_tables_are_bounded() -> None:
    routing = _routing(["a", "b"], max_links=32)
    jobs = [
        Job("slots", 4 * CHUNK, 64, chain=prefix_chain("", [i] * CHUNK * 4)) for i in range(200)
    ]
    for job in jobs:
        routing.routed(job, "a", COSTS)
    assert routing.num_homes("slots") == 2
    known = [bool(routing.matched_tokens(job)) for job in jobs]
    assert known == [False] * 192 + [True] * 8  # of four links each


def test_costs_are_learned_from_steps() -> None:
    meter = CostMeter()
    assert meter.costs(8) is None
    for rows in (1, 4, 16, 32, 8, 2) * 5:
        meter.observe(rows, 0.01 + 0.002 * rows)
    costs = meter.costs(8)
    assert costs is not None and costs.seats == 8
    assert abs(costs.base_s - 0.01) < 1e-6 and abs(costs.row_s - 0.002) < 1e-7
    same = CostMeter()
    for _ in range(3):
        same.observe(4, 0.05)
    one = same.costs(8)
    assert one is not None and abs(one.step_s(4) - 0.05) < 1e-9


def test_habits_are_learned_from_outputs() -> None:
    meter = CostMeter()
    for _ in range(100):
        for i in range(5):
            last = i == 4
            meter.count(
                "slots",
                Delta("r", 0, (1, 2), finish_reason="stop" if last else None,
                      counts=StepCounts(num_steps=1)),
            )  # fmt: skip
    habit = meter.habits()["slots"]
    assert abs(habit.output_tokens - 10) < 0.1 and abs(habit.tokens_a_step - 2) < 1e-9
    assert TaskHabit(10.0, 2.0).steps == 5.0


def test_a_slow_replica_is_left_out_but_for_a_trial_now_and_then() -> None:
    clock = Clock()
    pace = Pace(clock)
    costs = dict.fromkeys("abc", COSTS)
    usual = COSTS.step_s(4)
    recent = {"a": (4.0, usual), "b": (4.0, 3 * usual), "c": (4.0, 10 * usual)}
    pace.read(recent, costs)
    assert [pace.is_out(name) for name in "abc"] == [False, False, True]
    clock.now_s += 11.0
    pace.read(recent, costs)
    assert not pace.is_out("c")  # a trial
    pace.routed("c")
    pace.read(recent, costs)
    assert pace.is_out("c")
    clock.now_s += 11.0
    pace.read({**recent, "c": (4.0, usual)}, costs)
    assert not pace.is_out("c")
    pace.routed("c")
    assert not pace.is_out("c")


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(st.floats(1, 64), st.floats(1e-4, 10.0)), min_size=1
    )
)
def test_never_more_than_half_of_the_replicas_are_slow(
    recent: dict[str, tuple[float, float]],
) -> None:
    pace = Pace(Clock())
    costs = {name: StepCosts(seconds / 2, seconds / 2 / rows) for name, (rows, seconds)
             in recent.items()}  # fmt: skip
    pace.read(recent, costs)
    assert 2 * sum(pace.is_out(name) for name in recent) <= len(recent)


def test_the_last_steps_follow_a_replica_that_became_slow() -> None:
    meter = CostMeter()
    for i in range(100):
        meter.observe(4, 0.02 + 1e-6 * i)
    assert meter.recent is not None and abs(meter.recent[1] - 0.02) < 1e-3
    for i in range(4):
        meter.observe(4, 0.4 + 1e-6 * i)
    assert meter.recent[1] > 0.3 and meter.recent[0] == 4.0
