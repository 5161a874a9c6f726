"""How many replicas: monotone in the work, bounded, and it does not swing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.config.cluster import ReplicasConfig, ScalingConfig
from server.fleet.scaling import (
    StepCosts,
    Work,
    WorkPolicy,
    first_token_s,
    replicas_for,
    work_of,
)

_COSTS = st.builds(StepCosts, st.floats(1e-4, 0.1), st.floats(0.0, 0.01), st.integers(1, 256))
_WORK = st.builds(
    Work,
    num_running=st.floats(0, 5000),
    num_queued=st.floats(0, 5000),
    queued_rows=st.floats(0, 5e6),
    costs=st.one_of(st.none(), _COSTS),
    max_rows=st.integers(1, 4096),
    steps=st.floats(1, 2000),
)


def _config(least: int, most: int, first_token_s: float, spare: float = 0.5) -> ReplicasConfig:
    scaling = ScalingConfig(first_token_s=first_token_s, spare=spare)
    return ReplicasConfig(min=least, max=most, scaling=scaling)


_CONFIGS = st.builds(
    lambda least, more, target, spare: _config(least, max(1, least + more), target, spare),
    st.integers(0, 5), st.integers(0, 60), st.floats(0.01, 30), st.floats(0.0, 0.9),
)  # fmt: skip


@given(work=_WORK, current=st.integers(0, 80), config=_CONFIGS)
def test_it_is_bounded(work: Work, current: int, config: ReplicasConfig) -> None:
    num = replicas_for(work, current, config)
    assert config.min <= num <= config.most
    assert num > 0 or work.is_idle


@given(
    work=_WORK, current=st.integers(0, 80), config=_CONFIGS,
    more=st.tuples(st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 1e6)),
)  # fmt: skip
def test_more_work_never_takes_fewer(
    work: Work, current: int, config: ReplicasConfig, more: tuple[float, float, float]
) -> None:
    busier = replace(
        work,
        num_running=work.num_running + more[0],
        num_queued=work.num_queued + more[1],
        queued_rows=work.queued_rows + more[2],
    )
    for num in (1, 2, 7):
        assert first_token_s(busier, num) >= first_token_s(work, num) - 1e-9
        assert first_token_s(work, num + 1) <= first_token_s(work, num) + 1e-9
    assert replicas_for(busier, current, config) >= replicas_for(work, current, config)


@given(work=_WORK, current=st.integers(1, 60), config=_CONFIGS, tighter=st.floats(0.05, 1.0))
def test_a_tighter_target_never_takes_fewer(
    work: Work, current: int, config: ReplicasConfig, tighter: float
) -> None:
    target_s = config.scaling.first_token_s * tighter
    tight = _config(config.min, config.most, target_s, config.scaling.spare)
    assert replicas_for(work, current, tight) >= replicas_for(work, current, config)


@given(work=_WORK, current=st.integers(0, 80), config=_CONFIGS)
def test_what_it_says_once_it_says_again(work: Work, current: int, config: ReplicasConfig) -> None:
    num = replicas_for(work, current, config)
    assert replicas_for(work, num, config) == num


def test_a_little_less_work_gives_nothing_up() -> None:
    config = _config(1, 20, first_token_s=1.0)
    costs = StepCosts(0.02, 0.001, 16)
    held = [
        replicas_for(Work(8, 10, rows, costs, 256, 64), 4, config) for rows in (4500, 3500, 2600)
    ]
    assert held[0] > 4 and held[1] == held[2] == 4
    assert replicas_for(Work(8, 0, 100, costs, 256, 64), 4, config) < 4
    assert replicas_for(Work(), 4, _config(0, 20, 1.0)) == 0
    assert replicas_for(Work(num_running=1.0), 0, _config(0, 20, 1.0)) == 1


def _context(told: dict[str, dict[str, float]], **fields: Any) -> SimpleNamespace:
    known = {"total_queued_requests": 0.0, "total_num_requests": 0.0, **fields}
    return SimpleNamespace(aggregated_metrics=told, **known)


NAMES = ("num_running", "num_waiting", "waiting_rows", "base_s", "row_s", "seats", "max_rows",
         "steps", "prompt_tokens")  # fmt: skip


def _told(*replicas: tuple[float, ...]) -> dict[str, dict[str, float]]:
    """What EngineReplica.work tells, of each replica, as Serve's autoscaler has it."""
    columns = zip(NAMES, zip(*replicas, strict=True), strict=True)
    return {name: {str(i): value for i, value in enumerate(column)} for name, column in columns}


def test_the_work_of_replicas_is_added_up() -> None:
    one = (3, 2, 600, 0.02, 0.001, 16, 256, 32, 300)
    new = (0, 0, 0, 0, 0, 16, 256, 0, 0)  # it has measured nothing yet
    work = work_of(_told(one, one, new), 4.0)
    assert (work.num_running, work.num_queued, work.queued_rows) == (6.0, 8.0, 1200 + 4 * 300)
    assert work.costs == StepCosts(0.02, 0.001, 16) and work.steps == 32
    assert work_of({}, 2.0).queued_rows == 512.0


def test_serve_asks_it() -> None:
    policy = WorkPolicy(**_config(0, 8, 0.5).model_dump(mode="json"))
    busy = (16, 40, 9000, 0.02, 0.001, 16, 256, 32, 200)
    told = _told(busy)
    assert policy(_context(told, current_num_replicas=1, target_num_replicas=1))[0] == 8
    idle = _told((0, 0, 0, 0.02, 0.001, 16, 256, 0, 0))
    assert policy(_context(idle, current_num_replicas=2, target_num_replicas=2))[0] == 0
    asleep = _context({}, current_num_replicas=0, target_num_replicas=0)
    assert policy(asleep)[0] == 0
    asleep.total_queued_requests = 3.0
    assert policy(asleep)[0] == 1
    waking = _context({}, current_num_replicas=0, target_num_replicas=1)
    assert policy(waking)[0] == 1  # it is not given up before it was there
    starting = _context({}, current_num_replicas=1, target_num_replicas=2)
    assert policy(starting)[0] == 2
