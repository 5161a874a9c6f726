"""The capacity model: what can be computed by hand comes out of it, and of the command."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from server.commands.cli import main
from server.errors import ConfigError
from server.fleet.arrivals import arrivals_of
from server.fleet.costs import TaskHabit
from server.fleet.simulation import (
    Arrival,
    RoutingNumbers,
    Simulation,
    percentile,
    replicas_for,
    synthetic,
)


def cost(rows: float, keys: float) -> float:
    return (0.01 + 0.001 * rows if rows else 0.0) + 1e-8 * keys


def flat(rows: float, keys: float) -> float:
    return 0.02 if rows else 0.0


def test_one_request_takes_its_steps() -> None:
    outcome = Simulation(cost, num_replicas=2, max_rows=64, overhead_s=0.003).run(
        [Arrival(5.0, "a", 100, 10)]
    )
    # Two chunks, 64 and 36 rows; then nine steps of one row.
    assert outcome.first_s == [pytest.approx(0.074 + 0.046 + 0.003)]
    assert outcome.total_s[0] == pytest.approx(0.123 + 9 * 0.011, abs=2e-4)
    assert outcome.seconds == pytest.approx(sum(outcome.busy_s))
    drafted = Simulation(flat, num_replicas=1, habit=TaskHabit(10, 5.0)).run(
        [Arrival(0.0, "a", 4, 10)]
    )
    assert drafted.total_s == [pytest.approx(0.04)]


def test_seats_bound_a_replica_and_two_do_twice_as_much() -> None:
    arrivals = [Arrival(0.0, f"task-{i}", 4, 50) for i in range(64)]
    times = []
    for num in (1, 2):
        numbers = RoutingNumbers(cold_cost=0.0)
        simulation = Simulation(flat, num_replicas=num, seats=8, max_rows=64, routing=numbers)
        outcome = simulation.run(arrivals)
        times.append(outcome.seconds)
        assert all(total >= 50 * 0.02 for total in outcome.total_s)
    assert times[0] == pytest.approx(64 / 8 * 50 * 0.02, rel=0.03)
    assert times[1] == pytest.approx(times[0] / 2, rel=0.15)


def test_every_request_ends_and_the_router_s_costs_are_told() -> None:
    arrivals = list(synthetic(40.0, 20.0, 100))
    assert arrivals == list(synthetic(40.0, 20.0, 100)) and len(arrivals) > 600
    outcome = Simulation(cost, num_replicas=16).run(arrivals)
    assert min(outcome.first_s) > 0.0
    assert all(t >= f for f, t in zip(outcome.first_s, outcome.total_s, strict=True))
    assert len(outcome.route_s) == len(arrivals) and outcome.state_bytes > 1000
    assert 0.0 < outcome.load < 1.0 and outcome.imbalance >= 1.0


def test_the_fewest_replicas_that_hold_a_p95() -> None:
    arrivals = list(synthetic(60.0, 10.0, 24))

    def simulate(num: int) -> object:
        return Simulation(cost, num_replicas=num, seats=16).run(arrivals)

    found = replicas_for(arrivals, 0.6, simulate)  # type: ignore[arg-type]
    assert found is not None
    num, outcome = found
    assert num > 1 and percentile(outcome.first_s, 95) <= 0.6
    fewer = simulate(num - 1)
    assert percentile(fewer.first_s, 95) > 0.6  # type: ignore[attr-defined]
    assert replicas_for(arrivals[:4], 0.001, simulate) is None  # type: ignore[arg-type]


def _log(num: int) -> list[str]:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    lines = ["not json", json.dumps({"event": "ready"})]
    for i in range(num):
        ended = start + timedelta(seconds=i * 0.5 + 1.0)
        lines.append(
            json.dumps(
                {
                    "event": "request", "timestamp": ended.isoformat().replace("+00:00", "Z"),
                    "duration_ms": 1000.0, "task": f"task-{i % 3}", "model": "tiny",
                    "prompt_tokens": 50, "completion_tokens": 20,
                }
            )
        )  # fmt: skip
    lines.append(lines[-1].replace('"completion_tokens": 20', '"completion_tokens": 0'))
    return lines


def test_arrivals_are_read_from_a_log() -> None:
    arrivals = arrivals_of(_log(4), "tiny", load=2.0)
    assert arrivals == [Arrival(i * 0.25, f"task-{i % 3}", 50, 20) for i in range(4)]
    with pytest.raises(ConfigError, match="no request for the model other"):
        arrivals_of(_log(4), "other")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "server.yaml").write_text("models: [{name: tiny, path: ./model}]\n")
    (tmp_path / "cluster.yaml").write_text("server: server.yaml\nreplicas: {min: 2}\n")
    (tmp_path / "server.log").write_text("\n".join(_log(40)))
    table = {"version": 2, "rows": [1, 512], "seconds": [0.02, 0.06], "key_s": 0.0}
    (tmp_path / "costs.json").write_text(json.dumps(table))
    return tmp_path


def test_the_command_answers_how_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["fleet", "simulate", str(folder / "cluster.yaml"), "--costs"]
    common.append(str(folder / "costs.json"))
    assert main([*common, "--log", str(folder / "server.log")]) == 0
    told = capsys.readouterr().out
    assert "40 requests" in told and "2 replicas" in told and "first token" in told
    assert main([*common, "--rate", "30", "--first-token-ms", "100"]) == 0
    told = capsys.readouterr().out
    assert "replicas hold a p95 of 100 ms" in told
    assert main([*common]) == 1
    assert "--log or --rate" in capsys.readouterr().err
    (folder / "costs.json").write_text("{}")
    assert main([*common, "--rate", "1"]) == 1
    assert "is no cost table" in capsys.readouterr().err
