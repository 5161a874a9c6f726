"""The fleet's load test, as far as it goes without a fleet."""

from __future__ import annotations

from loadtest.fleet import missed_goals
from loadtest.fleet_traffic import body, percentile


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


def test_percentiles_and_bodies() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert percentile(values, 50) == 51.0 and percentile(values, 95) == 96.0
    assert percentile([1.0], 95) == 1.0
    told = body(3, [1, 2], 5, stream=True)
    assert told["model"] == "task-3" and told["stream"] and told["max_tokens"] == 5
