"""The capacity model with its autoscaler: replicas follow the load, late by what is known."""

from __future__ import annotations

from dataclasses import replace

from server.fleet.scaling import ReplicaWork, ScalingNumbers
from server.fleet.simulated_scaling import ScalingTimes, SimulatedScaling
from server.fleet.simulation import Arrival, Outcome, Simulation, percentile, synthetic

NUMBERS = ScalingNumbers(least=1, most=3, first_token_s=0.2)
TIMES = ScalingTimes(up_after_s=0.5, down_after_s=2.0, look_back_s=11.0, start_s=4.0)


def cost(rows: float, keys: float) -> float:
    return 0.03 + 0.0005 * rows if rows else 0.0


def steps(*loads: tuple[float, float]) -> list[Arrival]:
    """Arrivals of loads, each (seconds, requests a second), one after the other."""
    arrivals: list[Arrival] = []
    begins_s = 0.0
    for seconds, rate in loads:
        some = synthetic(rate, seconds, 12, prompt=40, output=32)
        arrivals += [replace(arrival, at_s=arrival.at_s + begins_s) for arrival in some]
        begins_s += seconds
    return arrivals


def simulate(arrivals: list[Arrival], scaling: SimulatedScaling | None) -> Outcome:
    simulation = Simulation(cost, num_replicas=1, seats=16, max_rows=128)
    return simulation.run(arrivals, scaling=scaling)


def test_replicas_come_and_go_with_the_load() -> None:
    arrivals = steps((20.0, 2.0), (35.0, 16.0), (60.0, 2.0))
    scaled = simulate(arrivals, SimulatedScaling(NUMBERS, TIMES))
    numbers = [num for _, num in scaled.changes]
    assert numbers[0] == numbers[-1] == 1 and max(numbers) == 3
    up_s = next(at_s for at_s, num in scaled.changes if num > 1)
    # The load is seen when a replica reports, a new one takes requests when it has started.
    assert 20.0 + TIMES.start_s < up_s <= 20.0 + 2 * TIMES.report_s + TIMES.start_s
    assert 55.0 < scaled.changes[-1][0] < 110.0
    alone = simulate(arrivals, None)
    assert all(seconds > 0.0 for seconds in scaled.total_s)  # those of replicas that went, too
    assert percentile(scaled.total_s, 95) < 0.5 * percentile(alone.total_s, 95)


def test_a_load_that_one_replica_holds_asks_for_no_other() -> None:
    arrivals = steps((60.0, 2.0))
    scaled = simulate(arrivals, SimulatedScaling(NUMBERS, TIMES))
    assert scaled.changes == [(0.0, 1)]
    assert scaled.total_s == simulate(arrivals, None).total_s


def test_what_is_wanted_for_a_moment_changes_nothing() -> None:
    """Work must be reported, and be there for as long as up_after_s says."""
    busy = ReplicaWork(16, 40, 4000, base_s=0.03, row_s=0.0005, seats=16, max_rows=128, steps=32)
    for num_busy, most in ((0, 1), (30, 3)):
        scaling = SimulatedScaling(NUMBERS, replace(TIMES, look_back_s=1.0, up_after_s=5.0))
        for second in range(40):
            work = busy if second < num_busy else replace(busy, num_running=1, num_waiting=0)
            work = work if second < num_busy else replace(work, waiting_rows=0)
            scaling.look(float(second), dict.fromkeys(scaling.names, work))
        assert max(num for _, num in scaling.changes) == most
