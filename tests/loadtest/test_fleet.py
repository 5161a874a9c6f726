"""The fleet's load test, as far as it goes without a fleet."""

from __future__ import annotations

from loadtest.fleet import arrivals, body, missed_goals, replica_s


def test_goals_that_are_missed_are_told() -> None:
    good = {
        "throughput": {"linear": 0.97},
        "ingress": {"p50_ms": 2.0, "p95_ms": 8.0},
        "routing": {"cached": 1.4, "accepted": 1.5},
        "faults": {"num_lost": 0, "num_wrong": 0, "requests": 2000},
    }
    assert missed_goals(good) == [] == missed_goals({})
    bad = {**good, "throughput": {"linear": 0.9}, "ingress": {"p50_ms": 2.0, "p95_ms": 9.5}}
    assert missed_goals(bad) == [
        "throughput linear: 0.900, goal 0.95",
        "ingress p95_ms: 9.500, goal 8.0",
    ]
    assert missed_goals({"faults": {"num_lost": 1, "num_wrong": 0, "requests": 2000}}) == [
        "faults num_lost: 1, goal 0"
    ]


def test_a_body_names_its_task() -> None:
    told = body(3, [1, 2], 5, stream=True)
    assert told["model"] == "task-3" and told["stream"] and told["max_tokens"] == 5


def test_replicas_over_time_are_summed() -> None:
    changes = [(0.1, 1), (10.0, 3), (20.0, 2)]
    assert replica_s(changes, 30.0) == 9.9 + 3 * 10.0 + 2 * 10.0
    assert replica_s(changes, 15.0) == 9.9 + 3 * 5.0
    times = [at_s for at_s, *_ in arrivals()]
    assert times == sorted(times)
    assert 80.0 < times[-1] <= 90.0
